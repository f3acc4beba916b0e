"""Conflicts between valid settings of how a stream's tables merge."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.config.model import StreamConfig
from millstream.config.routing_checks import clashes_of_table
from millstream.config.toml_lines import KeyPath
from millstream.errors import UsageError
from millstream.model.names import parse_qualified_name


def clashes_of_regions(at: KeyPath, stream: StreamConfig, writer: str | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and its description."""
    from millstream.crdt.declared import ColumnMerge

    if stream.region and writer is not None:
        yield (*at, "region"), "a stream that several regions write has one writer in each: take `name` out of [writer]"
    for table, words in stream.merge.items():
        where: KeyPath = (*at, "merge", table)
        found = False
        for one in clashes_of_table(where, table, stream):
            found = True
            yield one
        if found:
            continue
        key = key_of(stream, table)
        if not key:
            yield where, f'has no key to tell its rows by: give it one in [streams.{at[-1]}.keys], such as ["id"]'
        for column, word in words.items():
            if column in key:
                yield (*where, column), "is of the key: rows that differ in it are different rows"
            try:
                ColumnMerge.parse(word)
            except UsageError as error:
                yield (*where, column), f"{error.message}. {error.hint}"


def key_of(stream: StreamConfig, table: str) -> tuple[str, ...]:
    """Return the key of a table that applications write, however its name is written; empty if it has none."""
    wanted = parse_qualified_name(table)
    return next((tuple(key) for name, key in stream.keys.items() if parse_qualified_name(name) == wanted), ())
