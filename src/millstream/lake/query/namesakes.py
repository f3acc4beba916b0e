"""Tables whose names differ only by case: DuckDB takes them for one, so each statement sees the table that it names.

A session has the view of one such table at a time. A statement names a table exactly if the name
stands there with its letters in double quotes. A lower-case name may also stand without quotes, in
any case: the rule of every command.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from typing import Final

from millstream.errors import InvalidQuery
from millstream.lake.commit_cuts import CutTable
from millstream.lake.known_tables import KnownTable
from millstream.lake.layout import MESSAGES
from millstream.lake.query.duckdb_connection import Engine
from millstream.model.names import DEFAULT_SCHEMA, parse_qualified_name, qualified_name

Name = tuple[str, str]
"""A schema and a table."""

_PART: Final = r"(?:\"(?:[^\"]|\"\")+\"|[^\W\d]\w*)"
_NAMES: Final = re.compile(
    rf"\$(?P<tag>\w*)\$.*?\$(?P=tag)\$|'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|(?P<name>{_PART}(?:\s*\.\s*{_PART})*)",
    re.DOTALL,
)


def names_written(sql: str) -> set[tuple[str, ...]]:
    """Return the identifiers of a text, with their parts; those without quotes in lower case.

    Strings and comments have none.
    """
    found = (match["name"] for match in _NAMES.finditer(sql))
    return {
        tuple(
            part[1:-1].replace('""', '"') if part.startswith('"') else part.lower() for part in re.findall(_PART, name)
        )
        for name in found
        if name is not None
    }


class Namesakes:
    """The tables of a session that currently have views, among those whose names differ only by case."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shown: dict[Name, str | None] = {}

    def choose(
        self, sql: str, cut: Mapping[str, CutTable], known: Callable[[], Iterable[KnownTable]]
    ) -> tuple[set[str], set[str]]:
        """Choose the tables that a statement sees, and drop the views of those that it must not see.

        Args:
            known: returns the tables that capture knows. Called only if the statement names a table of the lake in
                other case.

        Returns:
            The folders that the statement doesn't mean, and those whose views were dropped and must be made again on
            demand.

        Raises:
            InvalidQuery: it names two tables that DuckDB would take for one, or a view that two tables have.
        """
        tables = {folder: parse_qualified_name(table.name) for folder, table in cut.items() if folder != MESSAGES}
        written = names_written(sql)
        _check_views(tables.values(), written)
        lowered = {tuple(map(str.lower, name)) for name in written}
        alike: dict[Name, list[str]] = defaultdict(list)
        for folder, (namespace, name) in tables.items():
            key = namespace.lower(), name.lower()
            if _stands_in(key, lowered):
                alike[key].append(folder)
        hidden, dropped = set[str](), set[str]()
        for key, folders in alike.items():
            meant = [folder for folder in folders if _stands_in(tables[folder], written)]
            if len(meant) > 1:
                names = " and ".join(sorted(qualified_name(*tables[folder]) for folder in meant))
                raise InvalidQuery(
                    f"{names} differ only by case, and DuckDB treats them as one name",
                    hint="Use only one of them in a statement. Write a column of such a name as table.column.",
                )
            if not meant and len(folders) == 1 and not _are_others(key, tables[folders[0]], written, known):
                meant = folders
            shown = meant[0] if meant else None
            if len(folders) > 1 or shown is None or key in self._shown:
                if key not in self._shown or self._shown[key] != shown:
                    self._engine.drop_views(*key)
                    dropped.update(folders)
                self._shown[key] = shown
            hidden.update(folder for folder in folders if folder != shown)
        return hidden, dropped


def _check_views(tables: Iterable[Name], written: Collection[tuple[str, ...]]) -> None:
    """Raise `InvalidQuery` if the text names a view of two tables: `"a.b".c` and `a."b.c"` are both `a.b.c` in history."""
    names = {part.lower() for parts in written for part in parts if part.count(".") > 1}
    for view in names:
        found = sorted(qualified_name(*table) for table in tables if ".".join(table).lower() == view)
        if len(found) > 1 and len({name.lower() for name in found}) > 1:
            raise InvalidQuery(
                f"{' and '.join(found)} have one name in views: {view}",
                hint="Rename one of them at the source.",
            )


def _are_others(
    key: Name, table: Name, written: Collection[tuple[str, ...]], known: Callable[[], Iterable[KnownTable]]
) -> bool:
    """Whether the text names a table that the source has and the lake doesn't."""
    named = {(known_table.namespace, known_table.name) for known_table in known()} - {table}
    return any((other[0].lower(), other[1].lower()) == key and _stands_in(other, written) for other in named)


def _stands_in(table: Name, written: Collection[tuple[str, ...]]) -> bool:
    namespace, name = table
    in_full = f"{namespace}.{name}"
    return any(
        (namespace == DEFAULT_SCHEMA and parts[0] == name)
        or in_full in parts
        or any(pair == table for pair in pairwise(parts))
        for parts in written
    )
