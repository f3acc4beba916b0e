"""Copies existing rows into the log while changes flow: which tables, by which threads, and when a chunk enters.

What may enter when is decided in `millstream.protocol.table_copy`; how a chunk is read, in `copy_reader`. Here is what
lies between: worker threads read chunks, the applier's thread tells what it logs (`note`, `passed`) and takes chunks
whose time has come (`ready`). The catalog has each range's progress, so that a copy goes on where it stopped.

A copy of a table that the log has records of already (after `tables copy`, `tables retry`, a slot made anew) begins with
one `t` record of the table: what the log had of it before is void, rows deleted in the meantime included. It enters
when the stream has come to where the source's tables were last looked at: of a table that has got another key, no
record under the old one comes behind it. A table without a key (REPLICA
IDENTITY FULL and no primary key) is copied as one chunk behind such a record, read again until no transaction that its
snapshot doesn't see has touched the table: its rows can't be told apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import structlog

from millstream.capture.chunk_workers import ChunkWorkers, Work
from millstream.capture.config import CaptureConfig
from millstream.capture.copy_reader import (
    CHUNK_BYTES,
    CHUNK_BYTES_MAX,
    Bounds,
    ChunkReader,
    TableChanged,
    TableGone,
    TableTooLarge,
    table_of,
)
from millstream.capture.copy_state import FIRST_KEYS_RANGE, OPEN_CHUNKS_MAX, Copy, OpenChunk, Range, Stage
from millstream.capture.copy_text import behind_truncate, chunk_operation, truncate_rows
from millstream.capture.directory import CatalogDirectory
from millstream.capture.source import Connection, Identity, SourceTable, connect_same
from millstream.capture.standby import StandbyChunkReader, StandbySnapshots
from millstream.capture.touches import touches_of, touches_of_spilled
from millstream.capture.watcher import Tables
from millstream.catalog import Catalog, TableRow, TableState
from millstream.errors import MillstreamError
from millstream.failpoints import hit
from millstream.model.ids import StreamId, TableId
from millstream.model.operations import SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.schema import TableSchema
from millstream.protocol.table_copy import kept

logger = structlog.get_logger("millstream.capture")

_SPLIT_CHUNKS: Final = 4
"""A table of more than so many chunks is split between the workers."""
_WAIT_S: Final = 0.1

Entry = tuple[WriteOps | SpilledOp, Callable[[], None]]


class TableCopies:
    """All copies of one session. `applier.CopySink`.

    Concurrency: `note`, `passed`, `ready` on the applier's thread; `see`, `progress` and the rest from any.
    """

    def __init__(
        self,
        config: CaptureConfig,
        identity: Identity,
        catalog: Catalog,
        directory: CatalogDirectory,
        tables: Tables,
        stream: StreamId,
        nudge: Callable[[], None],
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._directory = directory
        self._tables = tables
        self._stream = stream
        self._nudge = nudge
        self._snapshots = StandbySnapshots(config.dsn) if identity.on_standby else None
        self._lock = threading.RLock()
        self._copies: dict[TableId, Copy] = {}
        self._schemas: dict[TableSchema, TableSchema] = {}
        self._passed = Lsn(0)
        self._seen = False
        self._save_lock = threading.Lock()
        # Each copy that runs may hold chunks in memory; the others wait untracked.
        self._copies_max = 2 * max(1, config.copy_workers)
        self._workers = ChunkWorkers[Copy](
            "copy",
            max(1, config.copy_workers),
            connect=lambda purpose: connect_same(config.dsn, identity, purpose=purpose),
            reader=self._reader_on,
            wanted=lambda copy: self._copies.get(copy.row.id) is copy,
            gone=lambda copy: copy.row.relation_oid not in tables.facts,
            failed=self._failed,
            name_of=lambda copy: copy.name,
            broken=nudge,
        )

    # --- for the session ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._workers.start()

    def stop(self) -> None:
        """End the workers; chunks that haven't entered are read again another time."""
        if self._snapshots is not None:
            self._snapshots.close()
        self._workers.stop()

    @property
    def all_done(self) -> bool:
        """Whether no table has to be copied."""
        unfinished = {TableState.COPY_REQUESTED, TableState.COPYING}
        with self._lock:
            return self._seen and not self._copies and not any(r.state in unfinished for r in self._directory.rows())

    @property
    def waits_for_stream(self) -> bool:
        """Whether a chunk waits for the stream to come as far as its snapshot, or a copy as far as it begins."""
        with self._lock:
            if any(c.stage is Stage.WAITING and c.begins_at > self._passed for c in self._copies.values()):
                return True
            return any(
                chunk.read.lsn > self._passed and not chunk.durable
                for copy in self._copies.values()
                for chunk in copy.open_chunks()
            )

    def progress(self) -> dict[str, dict[str, Any]]:
        """By table being copied, how far it is."""
        with self._lock:
            return {c.name: c.progress() for c in self._copies.values()}

    def see(self, rows: list[TableRow]) -> None:
        """Begin what the tables' states ask for."""
        with self._lock:
            for row in rows:
                table = self._tables.facts.get(row.relation_oid)
                if row.state is TableState.COPY_REQUESTED and row.id in self._copies:
                    if self._serves(self._copies[row.id], row, table):
                        continue
                    del self._copies[row.id]
                if row.id in self._copies or table is None or row.relation_oid not in self._tables.coverage.oids:
                    continue
                if row.state is TableState.COPYING and row.copy_id:
                    self._resume(Copy(row, table, row.copy_id, fresh=False, marked=False))
                elif row.state in {TableState.COPYING, TableState.COPY_REQUESTED}:
                    copy_id = f"{time.time_ns() // 1000:x}"
                    # Before its first copy the log may have inserts alone: it was in history only.
                    marked = bool(row.copy_id) or bool(row.schema_version) or not table.key
                    begins_at = self._tables.seen_at if marked else Lsn(0)
                    self._copies[row.id] = Copy(row, table, copy_id, fresh=True, marked=marked, begins_at=begins_at)
            self._seen = True
        self._nudge()

    @staticmethod
    def _serves(copy: Copy, row: TableRow, table: SourceTable | None) -> bool:
        """Whether a copy is what a row asks for, which may have been read before the copy began."""
        if copy.row.changed_us != row.changed_us:
            return False
        return copy.stage is not Stage.WAITING or (table is not None and copy.table.same_definition(table))

    def _resume(self, copy: Copy) -> None:
        saved = self._catalog.chunks(copy.row.id, copy.copy_id)
        copy.ranges = {row.number: Range.loaded(row) for row in saved}
        if not copy.ranges or not copy.keyed:
            copy.fresh, copy.marked, copy.begins_at = True, bool(copy.copy_id), self._tables.seen_at
        self._copies[copy.row.id] = copy

    # --- on the applier's thread -------------------------------------------------------------------------------

    def note(self, ops: WriteOps | SpilledOp) -> None:
        """These operations are about to be submitted: remember what they touch."""
        with self._lock:
            tracked = {id_ for id_, copy in self._copies.items() if copy.stage is not Stage.WAITING}
            if not tracked:
                return
            found = touches_of(ops, tracked) if isinstance(ops, WriteOps) else touches_of_spilled(ops, tracked)
            for table, touch, moved in found:
                copy = self._copies[table]
                copy.tracker.touch(touch)
                if moved and copy.keyed:
                    self._ask_keys(copy, moved)

    def passed(self, lsn: Lsn) -> None:
        """Everything that committed at or below `lsn` has been submitted."""
        self._passed = lsn

    def discard(self, relation_oid: int) -> None:
        """The table was set aside: end its copy."""
        with self._lock:
            for table, copy in list(self._copies.items()):
                if copy.row.relation_oid == relation_oid:
                    del self._copies[table]

    def ready(self) -> Iterable[Entry]:
        """What of the copies may enter now."""
        if self._workers.error is not None:
            raise self._workers.error
        if not self._copies:
            return ()
        with self._lock:
            return [entry for copy in list(self._copies.values()) for entry in self._ready_of(copy)]

    def _ready_of(self, copy: Copy) -> Iterator[Entry]:
        if copy.stage is Stage.WAITING:
            if copy.begins_at > self._passed:
                return
            if sum(other.stage is not Stage.WAITING for other in self._copies.values()) >= self._copies_max:
                return
            copy.stage = Stage.PREPARING
            if copy.fresh:
                self._catalog.drop_chunks(copy.row.id)
            self._catalog.set_state(copy.row.id, TableState.COPYING, copy.row.reason, copy_id=copy.copy_id)
            if copy.marked and copy.keyed:
                # Once ranges are in the catalog, nobody asks any more whether this record is in the log.
                yield self._void_what_was(copy), lambda: self._queue(copy, lambda reader: self._prepare(copy, reader))
            else:
                self._queue(copy, lambda reader: self._prepare(copy, reader))
        for chunk in copy.open_chunks():
            if chunk.ticket and chunk.read.lsn <= self._passed:
                yield from self._enter(copy, chunk)

    def _void_what_was(self, copy: Copy) -> WriteOps:
        """The record that voids what the log had of the table. Changes are tracked from here on."""
        found = table_of(copy.table, self._directory.source, copy.row.id)
        schema = self._catalog.put_schema(self._stream, found)
        self._directory.note_key(schema)
        at_us = time.time_ns() // 1000
        operation = chunk_operation(self._directory.source, f"{copy.copy_id}/begin", self._passed, at_us)
        rows = TableRows(schema, truncate_rows(schema), self._directory.shard_of(copy.row.id))
        return WriteOps(operation, (rows,))

    def _enter(self, copy: Copy, chunk: OpenChunk) -> Iterator[Entry]:
        verdict = copy.tracker.judge(chunk.ticket, chunk.bounds.keys)
        if verdict.again:
            self._go_back(copy, chunk)
            return
        copy.tracker.end(chunk.ticket)
        chunk.ticket = 0
        rows = chunk.read.rows
        mask: list[bool] | None = None
        again = verdict.reread if chunk.bounds.keys else frozenset()
        if verdict.drop:
            mask, dropped = kept(rows.key_list(), verdict)
            again |= dropped
        if again:
            self._ask_keys(copy, again)
        batch = rows.rows(mask)
        chunk.rows_entered = batch.num_rows
        shard = self._directory.shard_of(copy.row.id)
        entries: tuple[TableRows, ...] = (TableRows(rows.schema, batch, shard),)
        if not copy.keyed:
            self._directory.note_key(rows.schema)
            entries = behind_truncate(entries[0])
        elif not batch.num_rows:
            self._chunk_durable(copy, chunk)
            return
        chunk_id = f"{copy.copy_id}/{chunk.range.number}"
        operation = chunk_operation(self._directory.source, chunk_id, chunk.read.lsn, chunk.read.at_us)
        yield WriteOps(operation, entries), lambda: self._chunk_durable(copy, chunk)

    def _go_back(self, copy: Copy, chunk: OpenChunk) -> None:
        """Read a range again from a chunk on: something touched the table as a whole that the chunk doesn't see."""
        if self._snapshots is not None:
            self._snapshots.renew()
        part = chunk.range
        while part.open:
            last = part.open.pop()
            if last.ticket:
                copy.tracker.end(last.ticket)
                last.ticket = 0
            if last is chunk:
                break
        part.read_after = chunk.bounds.after
        part.all_read = False
        if not part.reading:
            part.reading = True
            self._queue(copy, lambda reader: self._read_next(copy, part, reader), after_s=_WAIT_S)

    def _ask_keys(self, copy: Copy, keys: Iterable[Any]) -> None:
        """Have rows read again by key. Kept in the catalog first: what made it necessary is about to be durable."""
        asked = copy.ask_keys(keys)
        self._catalog.put_chunks([asked.saved(copy.row.id, copy.copy_id)])
        if copy.stage is Stage.READING:
            self._queue_range(copy, asked)

    def _chunk_durable(self, copy: Copy, chunk: OpenChunk) -> None:
        """The chunk is in the log: let a worker note it down."""
        with self._lock:
            chunk.durable = True
            self._queue(copy, lambda _: self._save(copy, chunk.range))

    # --- on the workers ----------------------------------------------------------------------------------------

    def _reader_on(self, connection: Connection) -> ChunkReader:
        on = (connection, self._directory.source, self._tables.coverage.publications)
        return ChunkReader(*on) if self._snapshots is None else StandbyChunkReader(*on, self._snapshots)

    def _queue(self, copy: Copy, work: Work, *, after_s: float = 0.0) -> None:
        self._workers.queue(copy, work, after_s=after_s)

    def _queue_range(self, copy: Copy, part: Range) -> None:
        if not part.reading and not part.all_read and len(part.open) < OPEN_CHUNKS_MAX:
            part.reading = True
            self._queue(copy, lambda reader: self._read_next(copy, part, reader))

    def _failed(self, copy: Copy, error: MillstreamError) -> None:
        self.discard(copy.row.relation_oid)
        if isinstance(error, TableGone) or copy.row.relation_oid not in self._tables.facts:
            logger.info("copy given up: the table is gone", table=copy.name)
        elif isinstance(error, TableChanged):
            logger.info("copy begins again: the table's key changed", table=copy.name)
            self._catalog.set_state(copy.row.id, TableState.COPY_REQUESTED, "its key changed during the copy")
            self._directory.look_wanted.set()
        elif isinstance(error, TableTooLarge):
            logger.warning("table in history only", table=copy.name, reason=error.message)
            details = {"cause": error.code, "hint": error.hint}
            self._catalog.set_state(copy.row.id, TableState.HISTORY_ONLY, error.message, details=details)
        else:
            logger.warning("table set aside", table=copy.name, reason=error.message)
            self._catalog.set_state(
                copy.row.id, TableState.SET_ASIDE, f"its copy failed: {error.message}", details={"hint": error.hint}
            )
            self._directory.refresh()

    def _prepare(self, copy: Copy, reader: ChunkReader) -> None:
        """Wait for transactions that ran when tracking began, then cut the table into ranges."""
        copy.bound = copy.bound or reader.running_bound()
        if reader.current_snapshot().xmin < copy.bound:
            self._queue(copy, lambda again: self._prepare(copy, again), after_s=_WAIT_S)
            return
        if not any(number < FIRST_KEYS_RANGE for number in copy.ranges):
            table = copy.table
            rows = max(table.row_estimate, table.size_bytes // 200)
            parts = self._config.copy_workers if copy.keyed and rows > _SPLIT_CHUNKS * self._config.chunk_rows else 1
            cuts = reader.split(table, parts) if parts > 1 else []
            bounds = [None, *cuts, None]
            planned = [Range(n, bounds[n], bounds[n + 1], read_after=bounds[n]) for n in range(len(bounds) - 1)]
            self._catalog.put_chunks([part.saved(copy.row.id, copy.copy_id) for part in planned])
            with self._lock:
                copy.ranges |= {part.number: part for part in planned}
        with self._lock:
            copy.stage = Stage.READING
            for part in list(copy.ranges.values()):
                if not part.finished:
                    self._queue_range(copy, part)
        self._finish_where_whole(copy)

    def _read_next(self, copy: Copy, part: Range, reader: ChunkReader) -> None:
        """Read a range's next chunk; it enters when the stream has passed it."""
        with self._lock:
            ticket, bounds = copy.tracker.begin(), part.bounds()
            # A rename is seen by the next look at the source's tables. By another key the bounds mean nothing.
            seen = self._tables.facts.get(copy.row.relation_oid, copy.table)
            copy.table = seen if seen.key == copy.table.key else copy.table
        try:
            read = reader.read(copy.table, copy.row.id, bounds, rows_max=self._rows_max(copy))
        except BaseException:
            with self._lock:
                copy.tracker.end(ticket)
            raise
        if not copy.keyed and not read.last:
            raise TableTooLarge(
                f"it has no key and more than {CHUNK_BYTES_MAX >> 20} MiB of rows, which can't be copied at once",
                hint="Give it a primary key, then run `millstream tables copy`.",
            )
        read.rows.schema = self._numbered(read.rows.schema)
        hit("capture.copy_chunk_read")
        with self._lock:
            copy.tracker.take(ticket, read.snapshot)
            part.reading = False
            upto = (
                part.upto
                if read.last or bounds.keys
                else read.rows.last_key([column.name for column in read.table.key])
            )
            covered = Bounds(after=bounds.after, upto=upto, keys=bounds.keys)
            part.note_read(OpenChunk(part, ticket, covered, read))
            self._queue_range(copy, part)
        self._nudge()

    def _rows_max(self, copy: Copy) -> int | None:
        """Rows of a chunk: as many as are configured, fewer where they are wide."""
        if not copy.keyed:
            return None
        seen = [part for part in copy.ranges.values() if part.row_count]
        rows = sum(part.row_count for part in seen)
        width = sum(part.size_bytes for part in seen) // rows if rows else 0
        if not rows and copy.table.row_estimate > 0:
            width = copy.table.size_bytes // copy.table.row_estimate
        return max(1, min(self._config.chunk_rows, CHUNK_BYTES // max(1, width)))

    def _numbered(self, schema: TableSchema) -> TableSchema:
        with self._lock:
            found = self._schemas.get(schema)
        if found is None:
            found = self._catalog.put_schema(self._stream, schema)
            with self._lock:
                self._schemas[schema] = found
        return found

    def _save(self, copy: Copy, part: Range) -> None:
        """Note down how far a range is durable; the next chunk may come."""
        with self._save_lock:
            with self._lock:
                moved = part.advance()
                row = part.saved(copy.row.id, copy.copy_id)
                if not part.finished:
                    self._queue_range(copy, part)
            if moved:
                hit("capture.copy_chunk_durable")
                self._catalog.put_chunks([row])
        self._finish_where_whole(copy)

    def _finish_where_whole(self, copy: Copy) -> None:
        with self._lock:
            if not copy.whole or self._copies.get(copy.row.id) is not copy:
                return
            del self._copies[copy.row.id]
            self._catalog.set_state(copy.row.id, TableState.STREAMING, only_from=[TableState.COPYING])
            self._directory.refresh()
        rows = copy.progress()["rows"]
        logger.info("table copied", table=copy.name, rows=rows)
        self._nudge()
