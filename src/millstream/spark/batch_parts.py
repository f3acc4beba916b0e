"""Parts of a batch: stretches of the log, which a task in an executor reads on its own.

Only places in the log travel to a task, never its bytes. A task that doesn't see the log's folder fetches
the bytes of its stretches by Flight, before it reads them.
A table's records in a stretch are read without decoding other tables'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.model.ids import TableId
from millstream.model.schema import TableSchema
from millstream.wal.flight_log import FlightLog
from millstream.wal.reader import LogSpan, StreamReader, TableRecords
from millstream.wal.table_batches import is_raw, one_batch, table_batches

SPAN_BYTES: Final = 16 << 20
"""Minimum log bytes of a task of a large batch: many times what a task costs, and each task makes a file a table."""
_TOGETHER_BYTES: Final = 1 << 20
"""Log bytes of a table up to which it is read together with others: opening the segment again costs more."""
_MANY_TABLES: Final = 16
"""Number of tables for which another task is worth its cost."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A batch, or one task's part of it: the records of some tables in some stretches of the log."""

    wal: str
    """The log's folder."""
    spans: tuple[LogSpan, ...]
    """In the order of the log."""
    only: frozenset[TableId] | None = None
    """The tables to read; None: all."""
    share: int = 0
    shares: int = 1
    """If one stretch has many tables, this task reads those whose number modulo `shares` is `share`."""
    flight: FlightLog | None = None
    """The log by Flight; None: its folder is read."""

    def reader(self) -> StreamReader:
        """Return a reader of these stretches, definitions included."""
        return StreamReader(self.wal, definitions=True) if self.flight is None else self.flight.reader(self.spans)

    def wants(self, table: TableId) -> bool:
        """Whether this task reads the table."""
        return (self.only is None or table in self.only) and int(table) % self.shares == self.share


@dataclass(frozen=True, slots=True)
class PartRecords:
    """One table's records of a part."""

    table_id: TableId
    schema: TableSchema
    """Schema of the last record."""
    batches: list[tuple[TableSchema, pa.RecordBatch]]
    newest_us: int | None
    """The newest commit time among the records, µs since 1970."""


Load: TypeAlias = Callable[[], PartRecords | None]
"""Returns a table's records; None if the table has none there after all."""


def divided(batch: BatchPart, *, tasks: int, tables: int) -> list[BatchPart]:
    """Divide a batch among tasks: by stretches, and if there are few, by tables.

    Args:
        batch: all of it, in stretches of about `SPAN_BYTES`.
    """
    size = sum(span.size_bytes for span in batch.spans)
    target = max(SPAN_BYTES, size // tasks) + SPAN_BYTES // 2 if tasks > 1 else size
    groups: list[list[LogSpan]] = []
    for span in batch.spans:
        # Few tasks with much each: every task makes a file of each table.
        if not groups or sum(one.size_bytes for one in groups[-1]) + span.size_bytes > target:
            groups.append([])
        groups[-1].append(span)
    shares = 1 if len(groups) > 1 else max(1, min(tasks, tables // _MANY_TABLES))
    return [
        replace(batch, spans=tuple(group), share=share, shares=shares) for group in groups for share in range(shares)
    ]


def table_loads(part: BatchPart) -> Iterator[tuple[TableId, Load]]:
    """Yield a part's tables, each with the function that reads its records. Large tables are in memory one at a time.

    Raises:
        OffsetExpired, CorruptWal: also from the functions.
    """
    log = part.reader()
    sizes: dict[TableId, int] = {}
    places: dict[TableId, list[LogSpan]] = {}
    for span in part.spans:
        for found in log.parts_of(span):
            table = found.schema.table_id
            if not is_raw(found.schema) and part.wants(table):
                sizes[table] = sizes.get(table, 0) + found.size_bytes
                places.setdefault(table, []).append(span)
    small = frozenset(table for table, size in sizes.items() if size < _TOGETHER_BYTES)
    held: dict[TableId, list[tuple[TableSchema, pa.RecordBatch]]] = {}
    for span in part.spans if small else ():
        for table, pieces in _together(log, span, small).items():
            held.setdefault(table, []).extend(pieces)
    for table in sorted(sizes):
        if table in small:
            yield table, partial(_part_records, table, held.pop(table, []))
        else:
            yield table, partial(_read_alone, log, table, list(dict.fromkeys(places[table])))


def _read_alone(log: StreamReader, table: TableId, spans: list[LogSpan]) -> PartRecords | None:
    return _part_records(table, [found for span in spans for found in table_batches(log, span, table)])


def _together(
    log: StreamReader, span: LogSpan, tables: frozenset[TableId]
) -> dict[TableId, list[tuple[TableSchema, pa.RecordBatch]]]:
    """Return the records of small tables in a stretch, which are read in one go."""
    runs: dict[TableId, list[list[TableRecords]]] = {}
    for piece in log.read_span(span, tables=tables, moments=True):
        if is_raw(piece.schema):
            continue
        some = runs.setdefault(piece.schema.table_id, [])
        if not some or some[-1][-1].schema.version != piece.schema.version:
            some.append([])
        some[-1].append(piece)
    return {table: [(pieces[0].schema, one_batch(pieces)) for pieces in some] for table, some in runs.items()}


def _part_records(table: TableId, batches: list[tuple[TableSchema, pa.RecordBatch]]) -> PartRecords | None:
    if not batches:
        return None
    last: tuple[int, TableSchema] | None = None
    for schema, batch in batches:
        # Not by version: a table that is renamed back to an earlier name also has that name's version again.
        ends = pc.max(batch.column("__seq")).as_py() or 0
        last = (ends, schema) if last is None or ends >= last[0] else last
    assert last is not None, "there is a batch"
    times = [pc.max(batch.column("__commit_ts").cast(pa.int64())).as_py() for _, batch in batches]
    return PartRecords(
        table, last[1].defined(), batches, max((time for time in times if time is not None), default=None)
    )
