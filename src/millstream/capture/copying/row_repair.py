"""Reads rows again by key and puts them into the log among running changes, as `diff --repair` requests.

A chunk of keys enters as a chunk of a table copy does, by the same rules (`millstream.protocol.copy_conflicts`). It is
read under a snapshot, and waits until the log has everything that the snapshot sees. Keys touched by a transaction
that the snapshot doesn't see are left out, because the log has a newer version of them. Rows that exist enter as `r`
records. A requested key without a row enters as a `d` record, before them: an insert that the snapshot doesn't see
has touched the key, or comes later in the log and wins there. If a chunk is read again after a crash, it enters
twice, the second time as of a later moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import structlog

from millstream.capture.config import CaptureConfig
from millstream.capture.copying.chunk_reader import (
    ChunkBounds,
    ChunkReader,
    FetchedRows,
    TableChanged,
    TableGone,
    table_of,
)
from millstream.capture.copying.copy_progress import Stage
from millstream.capture.copying.copy_text import CopiedRows, chunk_operation, rows_of_one_operation
from millstream.capture.copying.copy_threads import ChunkWorkers, Work
from millstream.capture.copying.repair_request import RepairChunk, repair_chunks, repair_scope
from millstream.capture.copying.standby import StandbySnapshots, reader_on
from millstream.capture.copying.touched_keys import touches_of, touches_of_spilled
from millstream.capture.source_tables import SourceIdentity, SourceTable, connect_same
from millstream.capture.table_directory import TableDirectory
from millstream.capture.watched_tables import WatchedTables
from millstream.catalog import Catalog, TableRow, TableState
from millstream.errors import MillstreamError
from millstream.failpoints import hit
from millstream.model.exact_values import INEXACT, array_of, text_parser
from millstream.model.ids import StreamId, TableId
from millstream.model.names import qualified_name
from millstream.model.operations import SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import TEXT_BY_COLUMN, Op
from millstream.model.schema import TableSchema
from millstream.protocol.copy_conflicts import CopyTracker, Key, kept

logger = structlog.get_logger("millstream.capture")

_WAIT_S: Final = 0.1
_READ_MAX: Final = 2
"""Chunks of a table in memory, at most."""

Entry = tuple[WriteOps | SpilledOp, Callable[[], None]]


@dataclass(slots=True, eq=False)
class _Keys:
    """A chunk, from its request until it is durable."""

    chunk: RepairChunk
    """The chunk, its keys in the schema's order of columns."""
    all_keys: frozenset[Key]
    ticket: int = 0
    read: FetchedRows | None = None
    rows: CopiedRows | None = None
    """The rows of `read`, decoded."""
    entered: bool = False

    @classmethod
    def of(cls, chunk: RepairChunk) -> _Keys:
        return cls(chunk, frozenset(chunk.keys))


@dataclass(slots=True, eq=False)
class _Repair:
    """The repair of one table."""

    row: TableRow
    waiting: dict[str, _Keys] = field(default_factory=dict)
    open: dict[str, _Keys] = field(default_factory=dict)
    """Chunks being read, or read."""
    tracker: CopyTracker = field(default_factory=CopyTracker)
    stage: Stage = Stage.WAITING
    tracked_from: Lsn = Lsn(0)
    """Commits below aren't remembered: a snapshot has to see them."""
    bound: int = 0
    rows: int = 0

    @property
    def name(self) -> str:
        return qualified_name(self.row.namespace, self.row.name)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.open

    def chunks(self) -> list[_Keys]:
        return [*self.waiting.values(), *self.open.values()]

    def may_be_damaged(self, keys: frozenset[Key]) -> bool:
        """Return whether the log may still be wrong about one of the keys."""
        return any(not found.entered and not found.all_keys.isdisjoint(keys) for found in self.chunks())


class Repairs:
    """All repairs of one session. `applier.CopySink`.

    Concurrency: `note`, `passed`, `ready`, `discard` on the applier's thread; `see` on the watcher's.
    """

    def __init__(
        self,
        config: CaptureConfig,
        identity: SourceIdentity,
        catalog: Catalog,
        directory: TableDirectory,
        tables: WatchedTables,
        stream: StreamId,
        nudge: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._directory = directory
        self._tables = tables
        self._stream = stream
        self._nudge = nudge
        self._snapshots = StandbySnapshots(config.dsn) if identity.on_standby else None
        self._lock = threading.RLock()
        self._repairs: dict[TableId, _Repair] = {}
        self._passed = Lsn(0)
        self._seen = False
        self._workers = ChunkWorkers[_Repair](
            "repair",
            1,
            connect=lambda purpose: connect_same(config.dsn, identity, purpose=purpose),
            reader=lambda on: reader_on(on, directory, tables.coverage.publications, self._snapshots),
            wanted=lambda repair: self._repairs.get(repair.row.id) is repair,
            gone=lambda repair: repair.row.relation_oid not in tables.facts,
            failed=self._failed,
            name_of=lambda repair: repair.name,
            broken=nudge,
        )

    # --- for the session ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker."""
        self._workers.start()

    def stop(self) -> None:
        """End the worker; chunks that haven't entered are read again another time."""
        if self._snapshots is not None:
            self._snapshots.close()
        self._workers.stop()

    @property
    def all_done(self) -> bool:
        """Whether every repair is done."""
        with self._lock:
            return self._seen and not self._repairs

    @property
    def busy(self) -> set[TableId]:
        """Tables of which rows may have been read that haven't entered."""
        with self._lock:
            return set(self._repairs)

    @property
    def waits_for_stream(self) -> bool:
        """Whether a chunk waits for the stream to come as far as its snapshot."""
        with self._lock:
            return any(
                found.ticket and found.read is not None and found.read.lsn > self._passed
                for repair in self._repairs.values()
                for found in repair.open.values()
            )

    def see(self, rows: list[TableRow]) -> None:
        """Begin the repairs that the catalog has."""
        asked = [chunk for chunk in repair_chunks(self._catalog, self._stream) if not chunk.failed]
        by_id = {row.id: row for row in rows}
        with self._lock:
            for chunk in asked:
                row = by_id.get(chunk.table)
                if row is None:
                    self._fail(chunk, "the table is gone")
                elif row.state in {TableState.COPY_REQUESTED, TableState.COPYING}:
                    # The copy brings all of its rows.
                    self._repairs.pop(row.id, None)
                    self._catalog.drop_fact(repair_scope(self._stream), chunk.name)
                elif row.state is TableState.STREAMING and row.relation_oid in self._tables.facts:
                    self._take(row, chunk)
            self._seen = True
        self._nudge()

    def _take(self, row: TableRow, chunk: RepairChunk) -> None:
        repair = self._repairs.get(row.id) or _Repair(row)
        if chunk.name in repair.waiting or chunk.name in repair.open:
            return
        key = self._key(self._tables.facts[row.relation_oid], row.id)
        if set(key) != set(chunk.columns):
            self._fail(chunk, "the table's key changed: run `millstream diff` again")
            return
        self._repairs[row.id] = repair
        repair.waiting[chunk.name] = _Keys.of(chunk.ordered(key))
        self._read_on(repair)

    # --- on the applier's thread -------------------------------------------------------------------------------

    def note(self, ops: WriteOps | SpilledOp) -> None:
        """Remember the keys of operations that are about to be submitted."""
        if not self._repairs:
            return
        with self._lock:
            tracked = {id_ for id_, repair in self._repairs.items() if repair.stage is not Stage.WAITING}
            if not tracked:
                return
            found = touches_of(ops, tracked) if isinstance(ops, WriteOps) else touches_of_spilled(ops, tracked)
            again: dict[TableId, set[Key]] = {}
            for table, touch, moved in found:
                repair = self._repairs[table]
                repair.tracker.touch(touch)
                # A row that moved without its large value takes it from its old key, where it may still be wrong.
                if moved and (touch.everything or repair.may_be_damaged(touch.keys)):
                    again.setdefault(table, set()).update(moved)
            for table, keys in again.items():
                self._ask_again(self._repairs[table], keys)

    def passed(self, lsn: Lsn) -> None:
        """Note that everything that committed at or below `lsn` has been submitted."""
        self._passed = lsn

    def discard(self, relation_oid: int) -> None:
        """Drop the repair of a table that was quarantined, until it streams again, or is copied."""
        with self._lock:
            for table, repair in list(self._repairs.items()):
                if repair.row.relation_oid == relation_oid:
                    del self._repairs[table]

    def ready(self) -> Iterable[Entry]:
        """Return the operations that may enter now."""
        self._workers.check()
        if not self._repairs:
            return ()
        with self._lock:
            return [entry for repair in list(self._repairs.values()) for entry in self._ready_of(repair)]

    def _ready_of(self, repair: _Repair) -> Iterator[Entry]:
        if repair.stage is Stage.WAITING:
            # Begin here, not in `see`: changes are tracked from a known position of the stream on.
            repair.stage, repair.tracked_from = Stage.PREPARING, self._passed
            self._queue(repair, lambda reader: self._prepare(repair, reader))
        for found in list(repair.open.values()):
            if found.ticket and found.read is not None and found.rows is not None and found.read.lsn <= self._passed:
                yield from self._enter(repair, found, found.read, found.rows)

    def _enter(self, repair: _Repair, found: _Keys, read: FetchedRows, copied: CopiedRows) -> Iterator[Entry]:
        verdict = repair.tracker.judge(found.ticket, found.all_keys)
        repair.tracker.end(found.ticket)
        found.ticket = 0
        if verdict.again:
            if self._snapshots is not None:
                self._snapshots.renew()
            self._back(repair, found)
            self._read_on(repair, after_s=_WAIT_S)
            return
        found.entered = True
        there = copied.key_list()
        mask, _ = kept(there, verdict)
        gone = sorted(found.all_keys - verdict.drop - set(there))
        if verdict.reread:
            self._ask_again(repair, verdict.reread)
        rows = _numbered(deleted_rows(copied.schema, gone), copied.rows(mask))
        repair.rows += rows.num_rows
        if not rows.num_rows:
            self._durable(repair, found)
            return
        shard = self._directory.shard_of(repair.row.id)
        chunk_id = f"{found.chunk.request}/{found.chunk.number}"
        operation = chunk_operation(self._directory.source, chunk_id, read.lsn, read.at_us)
        hit("capture.repair.before_append")
        yield (
            WriteOps(operation, (TableRows(copied.schema, rows, shard),)),
            lambda: self._durable(repair, found),
        )

    def _ask_again(self, repair: _Repair, keys: Iterable[Key]) -> None:
        """Request rows to be read once more.

        They are stored in the catalog first: the cause is about to become durable.
        """
        like = repair.chunks()[0].chunk
        chunk = like.part(time.time_ns() // 1000, sorted(keys))
        self._catalog.put_fact(repair_scope(self._stream), chunk.name, chunk.value())
        repair.waiting[chunk.name] = _Keys.of(chunk)
        self._read_on(repair)

    @staticmethod
    def _back(repair: _Repair, found: _Keys) -> None:
        """Read the chunk another time."""
        del repair.open[found.chunk.name]
        repair.waiting[found.chunk.name] = found
        found.read = None

    def _durable(self, repair: _Repair, found: _Keys) -> None:
        """Let the worker save the progress: the chunk is in the log."""
        self._queue(repair, lambda _: self._note_done(repair, found))

    # --- on the worker -----------------------------------------------------------------------------------------

    def _queue(self, repair: _Repair, work: Work, *, after_s: float = 0.0) -> None:
        self._workers.queue(repair, work, after_s=after_s)

    def _read_on(self, repair: _Repair, *, after_s: float = 0.0) -> None:
        if repair.stage is Stage.READING:
            self._queue(repair, lambda reader: self._read_next(repair, reader), after_s=after_s)

    def _failed(self, repair: _Repair, error: MillstreamError) -> None:
        logger.warning("rows can't be repaired", table=repair.name, reason=error.message)
        with self._lock:
            for found in repair.chunks():
                self._fail(found.chunk, error.message)
            self._repairs.pop(repair.row.id, None)

    def _fail(self, chunk: RepairChunk, reason: str) -> None:
        self._catalog.put_fact(repair_scope(self._stream), chunk.name, {**chunk.value(), "failed": reason})

    def _prepare(self, repair: _Repair, reader: ChunkReader) -> None:
        """Wait for transactions that ran when tracking began."""
        repair.bound = repair.bound or reader.running_bound()
        if reader.current_snapshot().xmin < repair.bound:
            self._queue(repair, lambda again: self._prepare(repair, again), after_s=_WAIT_S)
            return
        with self._lock:
            repair.tracker.settle(repair.bound)
            repair.stage = Stage.READING
        self._read_on(repair)

    def _read_next(self, repair: _Repair, reader: ChunkReader) -> None:
        """Read a chunk; it enters when the stream has passed it."""
        table = self._table(repair)
        with self._lock:
            if not repair.waiting or len(repair.open) >= _READ_MAX:
                return
            name = next(iter(repair.waiting))
            found = repair.open[name] = repair.waiting.pop(name)
            ticket = repair.tracker.begin()
        try:
            if self._key(table, repair.row.id) != found.chunk.columns:
                raise TableChanged(f"the key of {table.full_name} changed: run `millstream diff` again")
            reader.not_before = repair.tracked_from
            read = reader.fetch(table, repair.row.id, ChunkBounds(keys=found.chunk.keys))
            rows = read.decoded(read.schema)
            self._directory.leaves.known.note_copied(repair.row.id, read.table)
            rows.schema = self._catalog.put_schema(self._stream, rows.schema)
        except BaseException:
            with self._lock:
                repair.tracker.end(ticket)
                self._back(repair, found)
            raise
        with self._lock:
            repair.tracker.take(ticket, read.snapshot)
            if not read.last and len(found.all_keys) > 1:
                repair.tracker.end(ticket)
                self._halve(repair, found)
            else:
                found.ticket, found.read, found.rows = ticket, read, rows
            self._read_on(repair)
        self._nudge()

    def _halve(self, repair: _Repair, found: _Keys) -> None:
        """Split a chunk whose rows are too wide for one read: an unread row must not pass for a missing one."""
        del repair.open[found.chunk.name]
        number, half = time.time_ns() // 1000, len(found.chunk.keys) // 2
        for offset, keys in enumerate((found.chunk.keys[:half], found.chunk.keys[half:])):
            chunk = found.chunk.part(number + offset, keys)
            self._catalog.put_fact(repair_scope(self._stream), chunk.name, chunk.value())
            repair.waiting[chunk.name] = _Keys.of(chunk)
        self._catalog.drop_fact(repair_scope(self._stream), found.chunk.name)

    def _note_done(self, repair: _Repair, found: _Keys) -> None:
        hit("capture.repair.durable")
        self._catalog.drop_fact(repair_scope(self._stream), found.chunk.name)
        with self._lock:
            repair.open.pop(found.chunk.name, None)
            self._read_on(repair)
            self._finish_where_done(repair)

    def _finish_where_done(self, repair: _Repair) -> None:
        if repair.done and self._repairs.get(repair.row.id) is repair:
            del self._repairs[repair.row.id]
            logger.info("rows repaired", table=repair.name, records=repair.rows)
            self._nudge()

    def _key(self, table: SourceTable, table_id: TableId) -> tuple[str, ...]:
        return table_of(table, self._directory.source, table_id).key

    def _table(self, repair: _Repair) -> SourceTable:
        found = self._tables.facts.get(repair.row.relation_oid)
        if found is None:
            raise TableGone(f"the table {repair.name} is gone")
        return found


def deleted_rows(schema: TableSchema, keys: Sequence[Key]) -> pa.RecordBatch:
    """Return `d` records of keys (texts, in the schema's order), in `append_row_schema`."""
    columns: dict[str, pa.Array] = {}
    exact: list[dict[str, str]] = [{} for _ in keys]
    for place, name in enumerate(schema.key):
        kind = schema.column(name).arrow
        parse = text_parser(kind)
        values = [parse(key[place]) for key in keys]
        for row, value in enumerate(values):
            if value is INEXACT:
                exact[row][name] = keys[row][place]
        columns[name] = array_of([None if value is INEXACT else value for value in values], kind)
    columns["__exact"] = pa.array([list(texts.items()) or None for texts in exact], TEXT_BY_COLUMN)
    return rows_of_one_operation(schema, Op.DELETE, np.arange(len(keys), dtype=np.int64), columns)


def _numbered(gone: pa.RecordBatch, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return both as one operation's rows. Deletions come first: of a key written in two ways the row stays."""
    both = pa.Table.from_batches([gone, rows], schema=gone.schema).combine_chunks()
    place = gone.schema.get_field_index("__index")
    index = pa.array(np.arange(both.num_rows, dtype=np.int64))
    batches = both.set_column(place, gone.schema.field(place), index).to_batches()
    return batches[0] if batches else gone
