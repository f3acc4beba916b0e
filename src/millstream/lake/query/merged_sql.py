"""`merged."schema.table"` in SQL: the rows of a table that several regions write, as the caller reads them.

A session reads such a table when a statement first names it, and keeps its rows. Listing tables reads no rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Protocol

import pyarrow as pa

from millstream.errors import InvalidQuery, MillstreamError
from millstream.lake.query.duckdb_connection import Engine
from millstream.lake.query.namesakes import names_written
from millstream.model.names import parse_qualified_name, qualified_name, quote
from millstream.model.region_ages import RegionAge, oldest, with_regions

MERGED: Final = "merged"


class MergedTables(Protocol):
    """A stream's tables that several regions write."""

    def names(self) -> Sequence[str]:
        """Return the names (`schema.table`) of the tables whose merge is declared and that a region has written."""
        ...

    def columns(self, table: str) -> pa.Schema:
        """Return the columns of a table's merged rows; raises as `rows`."""
        ...

    def rows(self, table: str) -> tuple[pa.Table, Sequence[RegionAge]]:
        """Return a table's merged rows, and their regions; `UnknownTable` if no region has it."""
        ...


class MergedViews:
    """A session's views of merged rows.

    Args:
        engine: has the views.
        tables: reads the rows; None if the session has none.
    """

    def __init__(self, engine: Engine, tables: MergedTables | None, *, past: bool) -> None:
        self._engine = engine
        self._tables = tables
        self._past = past
        self._read: dict[str, tuple[str, Sequence[RegionAge], float]] = {}
        """By table, its registered rows, their regions, and when they were read (seconds, monotonic)."""
        self.regions: tuple[RegionAge, ...] = ()
        """Regions of the merged rows that the last statement names; empty if it names none."""

    @property
    def has_rows(self) -> bool:
        """Whether the session has read any merged rows: later ones need a session of their own."""
        return bool(self._read)

    def prepare(self, sql: str | None, *, is_listing: bool) -> None:
        """Make the views that a statement names.

        Args:
            sql: the statement; None for all tables.
            is_listing: whether the statement may list tables: those that it doesn't name get a view without rows.

        Raises:
            InvalidQuery: the session stands at an earlier position.
            MillstreamError: as `MergedTables.rows`, for a table that the statement names.
        """
        begun_s = time.monotonic()
        named = [] if sql is None else _named(sql)
        if self._past and named:
            raise InvalidQuery(
                f"{_in_sql(named[0])} has only its present rows",
                hint=f"Ask for it without --as-of. Records of this region are in history.{quote(_plain(named[0]))}.",
            )
        if self._tables is None or self._past:
            return
        for table in named if sql is not None else self._listed():
            self._make(table, self._tables)
        if is_listing:
            for table in self._listed():
                if table not in self._read and not self._engine.has_view(MERGED, _plain(table)):
                    empty = self._engine.register(self._tables.columns(table).empty_table())
                    self._engine.view(MERGED, _plain(table), f"FROM {empty}")
        self.regions = oldest(
            RegionAge(one.region, None if one.age_s is None else one.age_s + max(0.0, begun_s - read_s))
            for _, ages, read_s in (self._read[table] for table in named)
            for one in ages
        )

    def stamped(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema of the last statement's result, with the regions in its metadata."""
        return schema.with_metadata(with_regions(schema.metadata, self.regions)) if self.regions else schema

    def _listed(self) -> Sequence[str]:
        try:
            return () if self._tables is None else self._tables.names()
        except MillstreamError:
            return ()  # a log that can't be read; naming a table reports why

    def _make(self, table: str, tables: MergedTables) -> None:
        if table not in self._read:
            rows, ages = tables.rows(table)
            # The view of a list has no rows.
            self._engine.drop_view(MERGED, _plain(table))
            self._read[table] = self._engine.register(rows), ages, time.monotonic()
        if not self._engine.has_view(MERGED, _plain(table)):
            self._engine.view(MERGED, _plain(table), f"FROM {self._read[table][0]}")


def _named(sql: str) -> list[str]:
    """Return the tables whose merged rows a statement names: those of `merged."schema.table"`."""
    found = {
        qualified_name(*name.split(".", 1))
        for parts in names_written(sql)
        for schema, name in pairwise(parts)
        if schema == MERGED and "." in name
    }
    return sorted(found)


def _plain(table: str) -> str:
    """Return a table's name in the schema `merged`: without quotes of its own."""
    return ".".join(parse_qualified_name(table))


def _in_sql(table: str) -> str:
    return f"{MERGED}.{quote(_plain(table))}"
