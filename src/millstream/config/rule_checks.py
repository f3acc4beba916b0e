"""Mistakes in the rules of columns that never leave the source, as far as the file alone shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from millstream.config.toml_lines import KeyPath
from millstream.errors import UsageError
from millstream.model.column_rules import Rule

if TYPE_CHECKING:
    from millstream.config.model import StreamConfig, TableConfig

HASH_KEY_BYTES_MIN: Final = 16
"""Size of the shortest key: shorter ones can be guessed, and then the hashes of known values be compared."""

Clash = tuple[KeyPath, str, str]
"""A key's path, its code (`config`: none of its own), and the mistake."""


def rules_of(stream: StreamConfig) -> dict[tuple[str, str], dict[str, Rule]]:
    """Return the rules of a stream that was checked: by schema and name of a table, the rule of each column."""
    from millstream.model.names import parse_qualified_name

    found: dict[tuple[str, str], dict[str, Rule]] = {}
    for table, config in stream.tables.items():
        found.setdefault(parse_qualified_name(table), {}).update(_columns(config))
    return {table: columns for table, columns in found.items() if columns}


def clashes_of_rules(at: KeyPath, stream: StreamConfig) -> Iterator[Clash]:
    """Yield each mistake of a stream's `tables` and `hash_key`."""
    from millstream.model.names import parse_qualified_name

    key = None if stream.source is None else stream.source.hash_key
    # A variable that isn't set stays as it is written, for commands that need no source.
    if key and not key.startswith("${") and len(key.encode()) < HASH_KEY_BYTES_MIN:
        yield (*at, "source", "hash_key"), "config", f"must be at least {HASH_KEY_BYTES_MIN} bytes long"
    seen: dict[tuple[str, str], str] = {}
    written = set(_names([*stream.keys, *stream.partitions, *stream.merge]))
    typed = {(table, column) for table, column in map(_typed, stream.types)}
    for table, config in stream.tables.items():
        where: KeyPath = (*at, "tables", table)
        try:
            name = parse_qualified_name(table)
        except UsageError:
            yield where, "unknown_table", "must name one table exactly, as schema.table"
            continue
        if stream.source is None or name in written:
            yield where, "rule_not_captured", "applications write the table: only captured columns can have a rule"
        if name in seen:
            yield where, "rule_clash", f"names the same table as {seen[name]}"
        seen[name] = table
        yield from _clashes_of_columns(where, config, {column for named, column in typed if named == name})
        if config.hash and not key:
            yield (*where, "hash"), "hash_key_missing", 'needs a key: [streams.S.source] hash_key = "${…}"'


def _clashes_of_columns(where: KeyPath, config: TableConfig, typed: set[str]) -> Iterator[Clash]:
    seen: dict[str, str] = {}
    for rule in Rule:
        for column in getattr(config, rule.value):
            if column in seen:
                yield (*where, rule.value), "rule_clash", f"column {column} is in {seen[column]} already"
            elif column in typed:
                yield (*where, rule.value), "rule_clash", f"column {column} has a type in [streams.S.types]"
            seen.setdefault(column, rule.value)


def _columns(config: TableConfig) -> Mapping[str, Rule]:
    return {column: rule for rule in Rule for column in getattr(config, rule.value)}


def _names(tables: list[str]) -> Iterator[tuple[str, str]]:
    from millstream.model.names import parse_qualified_name

    for table in tables:
        try:
            yield parse_qualified_name(table)
        except UsageError:
            continue  # reported where it stands


def _typed(column: str) -> tuple[tuple[str, str], str]:
    """Return the table and the column of a key of `types`, `schema.table.column`."""
    from millstream.model.names import parse_column

    try:
        schema, table, name = parse_column(column)
    except UsageError:
        return ("", ""), ""
    return (schema, table), name
