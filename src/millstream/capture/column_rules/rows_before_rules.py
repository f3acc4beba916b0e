"""Tables whose older records have raw values in columns that have a rule by now, until the copy that replaces them.

An update leaves a large value unsent if it didn't change. The lake fills it from the row's older version, which may
have the raw value. So such a value is null, and no longer marked as unchanged, from the first record under the new rule
to the copy's first record. The copy brings the column's values for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.model.operations import SpilledOp, TableRows, WriteOps

_UNCHANGED: Final = "__unchanged"


def raw_values_scope(stream: StreamId) -> str:
    """Return the scope of the catalog's facts about tables with older records from before a rule, by table id.

    A fact has `columns`, and `since_us`: µs since 1970, at which the last of their rules began to hold. After
    `tables copy --forget` it has no columns: all older records are meant, which are `is_in_log_alone`.
    """
    return f"capture/{stream}/raw_values"


def note_raw_values(catalog: Catalog, stream: StreamId, table: TableId, columns: list[str], since_us: int) -> None:
    """Note that records of a table that were stored before a moment have values in columns that have a rule now."""
    scope = raw_values_scope(stream)
    known = catalog.fact(scope, str(table), {"columns": []})
    columns = sorted({*known["columns"], *columns})
    catalog.put_fact(scope, str(table), {"columns": columns, "since_us": since_us})


def note_forgotten(catalog: Catalog, stream: StreamId, table: TableId, since_us: int) -> None:
    """Note that a table's records from before a moment have been deleted, except those in the log."""
    catalog.put_fact(
        raw_values_scope(stream), str(table), {"columns": [], "since_us": since_us, "is_in_log_alone": True}
    )


class RawPast:
    """Such tables of one stream. Any thread."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"capture/{stream}/raw_past"
        self._lock = threading.Lock()
        self._columns: dict[TableId, frozenset[str]] = {
            TableId(int(id_)): frozenset(names) for id_, names in catalog.facts(self._scope).items()
        }

    def begin(self, table: TableId, columns: list[str]) -> None:
        """Note the columns whose past is raw."""
        with self._lock:
            found = self._columns.get(table, frozenset()) | frozenset(columns)
            if found != self._columns.get(table):
                self._catalog.put_fact(self._scope, str(table), sorted(found))
                self._columns[table] = found

    def end(self, table: TableId) -> None:
        """Note that the copy's first record is about to be submitted: later records follow it."""
        with self._lock:
            self._columns.pop(table, None)

    def store(self, table: TableId, *, when: bool = True) -> None:
        """Forget a table in the catalog, too, when the copy's first record is durable."""
        if when and self._catalog.fact(self._scope, str(table)) is not None:
            self._catalog.drop_fact(self._scope, str(table))

    def applied_to_spilled(self, op: SpilledOp) -> SpilledOp:
        """Return an operation that is too large for memory, without marks of unchanged values whose past is raw.

        The moment of the call counts, not the moment at which the operation is read.
        """
        if not self._columns:
            return op
        with self._lock:
            columns, chunks = dict(self._columns), op.chunks

        def masked() -> Iterator[tuple[TableRows, ...]]:
            for piece in chunks():
                yield tuple(_unmarked(table, columns.get(table.schema.table_id, frozenset())) for table in piece)

        return replace(op, chunks=masked)

    def applied_to_run(self, ops: WriteOps) -> WriteOps:
        """Return operations, likewise."""
        with self._lock:
            columns = dict(self._columns)
        if not columns:
            return ops
        tables = tuple(_unmarked(table, columns.get(table.schema.table_id, frozenset())) for table in ops.tables)
        return replace(ops, tables=tables)


def _unmarked(table: TableRows, columns: frozenset[str]) -> TableRows:
    if not columns or _UNCHANGED not in table.rows.schema.names:
        return table
    marks: list[Any] = table.rows.column(_UNCHANGED).to_pylist()
    if not any(columns.intersection(names or ()) for names in marks):
        return table
    place = table.rows.schema.get_field_index(_UNCHANGED)
    field = table.rows.schema.field(place)
    left = [[name for name in names if name not in columns] or None if names else None for names in marks]
    return replace(table, rows=table.rows.set_column(place, field, pa.array(left, field.type)))
