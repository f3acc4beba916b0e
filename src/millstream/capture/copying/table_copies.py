"""Copies existing rows into the log while changes flow: which tables, by which threads, and when a chunk enters.

`millstream.protocol.copy_conflicts` decides when a chunk may enter. Worker threads read chunks here; the applier's thread
reports what it logs (`note`, `passed`) and takes chunks that may enter (`ready`). The catalog has each range's progress.

If the log already has records of the table (after `tables copy`, `tables retry`, a new slot), its copy begins with
one `t` record: it voids what the log had of the table before, rows deleted since included. It enters when the stream
has come to where the source's tables were last looked at: if the table's key has changed, no record under the old key
follows. A table without a key (REPLICA IDENTITY FULL and no primary key) enters whole after such a record, as one
operation: its rows can't be told apart (`whole_table_reads`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import structlog

from millstream.capture.config import CaptureConfig
from millstream.capture.copying.chunk_reader import ChunkBounds, ChunkReader, FetchedRows, TableChanged, TableGone
from millstream.capture.copying.chunk_sizes import AIM_BYTES, CUT_AT, ChunkSizes
from millstream.capture.copying.copied_file import CopiedFile
from millstream.capture.copying.copy_progress import Copy, Stage
from millstream.capture.copying.copy_text import CopiedRows, chunk_operation
from millstream.capture.copying.copy_threads import ChunkWorkers, Work
from millstream.capture.copying.key_ranges import FIRST_KEYS_RANGE, OpenChunk, Range, cuts_among, part_count
from millstream.capture.copying.schemas import CopySchemas
from millstream.capture.copying.standby import StandbySnapshots, reader_on
from millstream.capture.copying.throttle import ROOM_WAIT_S, CopyRate, OpenBytes
from millstream.capture.copying.touched_keys import touches_of, touches_of_spilled
from millstream.capture.copying.whole_table_reads import STANDBY_PATIENCE_S, WholeTableReads
from millstream.capture.source_tables import SourceIdentity, SourceTable, connect_same
from millstream.capture.stream.barrier import StreamBarrier
from millstream.capture.stream.spill_files import SpillFolder
from millstream.capture.table_directory import TableDirectory
from millstream.capture.table_states import quarantine
from millstream.capture.watched_tables import WatchedTables
from millstream.catalog import Catalog, TableRow, TableState
from millstream.errors import CodecError, ConfigError, DiskFull, MillstreamError, SourceError
from millstream.failpoints import hit
from millstream.model.ids import StreamId, TableId
from millstream.model.operations import SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.schema import TableSchema
from millstream.protocol.copy_conflicts import kept

UNFINISHED: Final = frozenset({TableState.COPY_REQUESTED, TableState.COPYING})
"""States of tables that have rows to be copied."""

logger = structlog.get_logger("millstream.capture")

_WAIT_S: Final = 0.1
_LATER_S: Final = 1.0

Entry = tuple[WriteOps | SpilledOp, Callable[[], None]]


class TableCopies:
    """All copies of one session (an `applier.CopySink`). A session with `reads_backlog` begins no table without a key.

    Concurrency: `note`, `passed`, `ready` on the applier's thread; `see`, `progress` and the rest from any.
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
        *,
        spill: SpillFolder,
        hold: StreamBarrier,
        reads_backlog: bool = False,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._directory = directory
        self._tables = tables
        self._stream = stream
        self._nudge = nudge
        self._hold = hold
        self._reads_backlog = reads_backlog
        self._snapshots = StandbySnapshots(config.dsn) if identity.on_standby else None
        self._lock = threading.RLock()
        self._copies: dict[TableId, Copy] = {}
        self._rate = CopyRate()
        self._open_bytes = OpenBytes()
        self._leaves = directory.leaves.known
        self._schemas = CopySchemas(catalog, directory, stream)
        self._passed = Lsn(0)
        self._seen = False
        self._save_lock = threading.Lock()
        self._decoders = ThreadPoolExecutor(max(1, config.copy_workers), "millstream-copy-decode")
        self._whole = WholeTableReads(
            config,
            spill,
            hold,
            directory,
            patience_s=STANDBY_PATIENCE_S if identity.on_standby else config.held_patience_s,
            lock=self._lock,
            rate=self._rate,
            piece_bytes=self._piece_bytes,
            numbered=self._schemas.numbered,
            goes_on=lambda copy: self._copies.get(copy.row.id) is copy and not copy.paused,
            decoders=self._decoders,
        )
        # Each running copy may hold chunks in memory; the others wait untracked.
        self._copies_max = 2 * max(1, config.copy_workers)
        self._workers = ChunkWorkers[Copy](
            "copy",
            max(1, config.copy_workers),
            connect=lambda purpose: connect_same(config.dsn, identity, purpose=purpose),
            reader=lambda on: reader_on(on, directory, tables.coverage.publications, self._snapshots),
            wanted=lambda copy: self._copies.get(copy.row.id) is copy,
            gone=lambda copy: copy.row.relation_oid not in tables.facts,
            failed=self._failed,
            name_of=lambda copy: copy.name,
            broken=nudge,
        )

    # --- for the session ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers."""
        self._workers.start()

    def stop(self) -> None:
        """End the workers; chunks that haven't entered are read again another time."""
        if self._snapshots is not None:
            self._snapshots.close()
        self._whole.stop()
        self._workers.stop()
        self._decoders.shutdown(cancel_futures=True)

    @property
    def all_done(self) -> bool:
        """Whether every table is copied, except those that are paused or held."""
        paused = self._catalog.paused_copies(self._stream)
        with self._lock:
            # Pauses count as of the last look: one that was lifted or asked for since has no effect so far.
            left = (row for row in self._directory.rows() if row.state in UNFINISHED)
            return (
                self._seen
                and all(copy.paused and copy.stage is Stage.WAITING for copy in self._copies.values())
                and all(row.id in paused or row.is_copy_held for row in left)
            )

    @property
    def waits_for_stream(self) -> bool:
        """Whether a chunk waits for the stream to come as far as its snapshot, or a copy as far as its begin."""
        with self._lock:
            copies = self._copies.values()
            begins = [c.begins_at for c in copies if c.stage is Stage.WAITING and not c.paused]
            chunks = [chunk.read.lsn for copy in copies for chunk in copy.open_chunks() if not chunk.durable]
            return any(lsn > self._passed for lsn in begins + chunks)

    @property
    def busy(self) -> set[TableId]:
        """Tables of which rows may have been read that haven't entered."""
        with self._lock:
            return {id_ for id_, copy in self._copies.items() if copy.stage is not Stage.WAITING}

    @property
    def keeps_session(self) -> bool:
        """Whether a table is being copied that another session would have to read from its beginning."""
        with self._lock:
            return any(not c.keyed and c.stage is Stage.READING and not c.paused for c in self._copies.values())

    def progress(self) -> dict[str, dict[str, Any]]:
        """Return the progress of each table being copied."""
        now_s = time.monotonic()
        with self._lock:
            copies = list(self._copies.values())
            return {c.name: c.progress(now_s) | {"holds_stream": self._hold.is_held_by(c)} for c in copies}

    def see(self, rows: list[TableRow]) -> None:
        """Begin, pause and resume copies as the tables' states and operators ask, at the rate that is allowed now."""
        paused, rate = self._catalog.paused_copies(self._stream), self._config.copy_rate()
        with self._lock:
            self._rate.allow(rate, time.monotonic())
            for row in rows:
                table = self._tables.facts.get(row.relation_oid)
                if row.state is TableState.COPY_REQUESTED and row.id in self._copies:
                    if self._copies[row.id].serves(row, table):
                        continue
                    self._forget(self._copies[row.id])
                if row.id in self._copies or table is None or row.relation_oid not in self._tables.coverage.oids:
                    continue
                self._take(row, table)
            turned = [copy for copy in self._copies.values() if copy.paused is not copy.waits_for_operator(paused)]
            for copy in turned:
                copy.paused = not copy.paused
                logger.info("copy paused" if copy.paused else "copy resumed", table=copy.name)
                if not copy.paused and copy.stage is Stage.READING:
                    self._queue_ranges(copy)
            self._seen = True
        for copy in turned:
            self._rest(copy)
        self._nudge()

    def _take(self, row: TableRow, table: SourceTable) -> None:
        """Begin a table's copy, or go on with it, if its state asks for that."""
        row = self._catalog.table(row.id) if row.state in UNFINISHED else row  # it may have ended since it was read
        if row.state in UNFINISHED:
            is_begun = row.state is TableState.COPYING and row.copy_id
            saved = self._catalog.chunks(row.id, row.copy_id) if is_begun else ()
            self._copies[row.id] = Copy.resumed_or_new(row, table, saved, self._tables.seen_at)
        if (copy := self._copies.get(row.id)) is not None:
            width = table.size_bytes / table.row_estimate if table.row_estimate else 0.0
            copy.sizes, copy.paused = ChunkSizes(self._config.chunk_rows, width), row.is_copy_held

    def _rest(self, copy: Copy) -> None:
        """Put a paused copy aside once nothing of it is in flight: untracked, so that days of changes aren't remembered.

        It resumes from the catalog, as after a restart.
        """
        with self._save_lock, self._lock:
            if not copy.paused or self._copies.get(copy.row.id) is not copy:
                return
            if copy.stage is Stage.WAITING or (copy.stage is Stage.READING and not copy.drained):
                return
            self._forget(copy)
            self._take(copy.row, copy.table)
            if copy.row.id in self._copies:
                self._copies[copy.row.id].paused = True

    def _forget(self, copy: Copy) -> None:
        """Remove a copy that has ended or begins again: nothing waits for it, and its open chunks are dropped."""
        del self._copies[copy.row.id]
        self._hold.release(copy)
        for chunk in copy.open_chunks():
            if chunk.ticket and isinstance(chunk.read, CopiedFile):
                chunk.read.remove()

    # --- on the applier's thread -------------------------------------------------------------------------------

    def note(self, ops: WriteOps | SpilledOp) -> None:
        """Remember the keys of operations that are about to be submitted."""
        with self._lock:
            # Track a begun copy that waits too: rows that move incomplete into a part already read don't come again.
            tracked = {id_ for id_, c in self._copies.items() if c.stage is not Stage.WAITING or c.ranges}
            if not tracked:
                return
            found = touches_of(ops, tracked) if isinstance(ops, WriteOps) else touches_of_spilled(ops, tracked)
            for table, touch, moved in found:
                copy = self._copies[table]
                if copy.stage is not Stage.WAITING:
                    copy.tracker.touch(touch)
                if moved and copy.keyed:
                    self._ask_keys(copy, moved)

    def passed(self, lsn: Lsn) -> None:
        """Note that everything that committed at or below `lsn` has been submitted."""
        self._passed = lsn

    def discard(self, relation_oid: int, quarantine: Callable[[], None] = lambda: None) -> None:
        """End the copy of a table that was quarantined, or that `quarantine` quarantines. Any thread."""
        with self._lock:
            quarantine()
            for copy in list(self._copies.values()):
                if copy.row.relation_oid == relation_oid:
                    self._forget(copy)

    def ready(self) -> Iterable[Entry]:
        """Return the operations of the copies that may enter now."""
        self._workers.check()
        if not self._copies:
            return ()
        entries: list[Entry] = []
        with self._lock:
            for copy in list(self._copies.values()):
                try:
                    entries += list(self._ready_of(copy))
                except (CodecError, SourceError) as error:
                    self._failed(copy, error)
        return entries

    def _ready_of(self, copy: Copy) -> Iterator[Entry]:
        if copy.stage is Stage.WAITING:
            if copy.paused or copy.begins_at > self._passed:
                return
            if sum(other.stage is not Stage.WAITING for other in self._copies.values()) >= self._copies_max:
                return
            copy.stage, copy.tracked_from = Stage.PREPARING, self._passed
            if copy.fresh:
                self._catalog.drop_chunks(copy.row.id)
                if copy.keyed:
                    self._leaves.begin_copy(copy.row.id, copy.table, voids=copy.marked)
            self._catalog.set_state(copy.row.id, TableState.COPYING, copy.row.reason, copy_id=copy.copy_id)
            if copy.marked and copy.keyed:
                # Once ranges are in the catalog, this record is in the log: a resumed copy doesn't repeat it.
                self._config.on_moment("copy.begin", {"table": copy.table})
                void = self._schemas.voiding(copy.table, copy.row.id, copy.copy_id, self._passed)
                self._directory.raw_past.end(copy.row.id)
                yield void, lambda: self._queue(copy, lambda reader: self._prepare(copy, reader))
            else:
                self._queue(copy, lambda reader: self._prepare(copy, reader))
        for chunk in copy.open_chunks():
            if not chunk.ticket or chunk.read.lsn > self._passed:
                continue
            if not self._directory.rules.are_as_in(chunk.read.table):
                raise TableChanged(f"the rule of a column of table {copy.name} changed", table=copy.name)
            if isinstance(chunk.read, CopiedFile):
                yield from self._enter_whole(copy, chunk, chunk.read)
            elif chunk.rows is not None:
                yield from self._enter(copy, chunk, chunk.read, chunk.rows)

    def _enter_whole(self, copy: Copy, chunk: OpenChunk, file: CopiedFile) -> Iterator[Entry]:
        if (operation := self._whole.enter(copy, chunk, file)) is None:
            self._go_back(copy, chunk)
            return
        self._directory.raw_past.end(copy.row.id)
        if operation.row_count:
            yield operation, lambda: self._chunk_durable(copy, chunk)
        else:
            self._chunk_durable(copy, chunk)

    def _enter(self, copy: Copy, chunk: OpenChunk, read: FetchedRows, rows: CopiedRows) -> Iterator[Entry]:
        verdict = copy.tracker.judge(chunk.ticket, chunk.bounds.keys)
        if verdict.again:
            self._go_back(copy, chunk)
            return
        copy.tracker.end(chunk.ticket)
        chunk.ticket = 0
        mask: list[bool] | None = None
        again = verdict.reread if chunk.bounds.keys else frozenset()
        if verdict.drop:
            mask, dropped = kept(rows.key_list(), verdict)
            again |= dropped
        if again:
            self._ask_keys(copy, again)
        batch = rows.rows(mask)
        chunk.rows_entered = batch.num_rows
        if not batch.num_rows:
            self._chunk_durable(copy, chunk)
            return
        entered = TableRows(rows.schema, batch, self._directory.shard_of(copy.row.id))
        chunk_id = f"{copy.copy_id}/{chunk.range.number}"
        operation = chunk_operation(self._directory.source, chunk_id, read.lsn, read.at_us)
        yield WriteOps(operation, (entered,)), lambda: self._chunk_durable(copy, chunk)

    def _go_back(self, copy: Copy, chunk: OpenChunk) -> None:
        """Read a range again from a chunk on: a transaction that the chunk doesn't see touched the table as a whole."""
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
            self._queue(copy, self._reading_of(copy, part), after_s=_WAIT_S)
        self._config.on_moment("copy.again", {"bounds": chunk.bounds})

    def _ask_keys(self, copy: Copy, keys: Iterable[Any]) -> None:
        """Request rows to be read again by key: first in the catalog, because the cause is about to become durable."""
        asked = copy.ask_keys(keys)
        self._catalog.put_chunks([part.saved(copy.row.id, copy.copy_id) for part in asked])
        if copy.stage is Stage.READING:
            for part in asked:
                self._queue_range(copy, part)

    def _chunk_durable(self, copy: Copy, chunk: OpenChunk) -> None:
        """Let a worker save the progress: the chunk is in the log."""
        if isinstance(chunk.read, CopiedFile):
            chunk.read.remove()
            self._directory.raw_past.store(copy.row.id)
        with self._lock:
            chunk.durable = True
            self._queue(copy, lambda _: self._save(copy, chunk.range))

    # --- on the workers ----------------------------------------------------------------------------------------

    def _queue(self, copy: Copy, work: Work, *, after_s: float = 0.0) -> None:
        self._workers.queue(copy, work, after_s=after_s)

    def _queue_range(self, copy: Copy, part: Range, *, after_s: float = 0.0) -> None:
        if not copy.paused and part.takes_next:
            part.reading = True
            self._queue(copy, self._reading_of(copy, part), after_s=after_s)

    def _reading_of(self, copy: Copy, part: Range) -> Work:
        read = self._read_next if copy.keyed else self._read_whole
        return lambda reader: read(copy, part, reader)

    def _queue_ranges(self, copy: Copy) -> None:
        for part in list(copy.ranges.values()):
            if not part.finished:
                self._queue_range(copy, part)

    def _failed(self, copy: Copy, error: MillstreamError) -> None:
        self.discard(copy.row.relation_oid)
        if isinstance(error, TableGone) or copy.row.relation_oid not in self._tables.facts:
            logger.info("copy given up: the table is gone", table=copy.name)
        elif isinstance(error, TableChanged):
            logger.info("copy begins again", table=copy.name, reason=error.message)
            self._catalog.set_state(copy.row.id, TableState.COPY_REQUESTED, f"{error.message} during the copy")
            self._directory.look_wanted.set()
        elif isinstance(error, ConfigError):
            self._directory.refuse(copy.row.relation_oid, copy.row.namespace, copy.row.name, error)
        else:
            quarantine(self._catalog, copy.row, f"its copy failed: {error.message}", details={"hint": error.hint})
            self._directory.refresh()

    def _prepare(self, copy: Copy, reader: ChunkReader) -> None:
        """Wait for transactions that ran when tracking began, then cut the table into ranges."""
        copy.bound = copy.bound or reader.running_bound()
        if reader.current_snapshot().xmin < copy.bound:
            self._queue(copy, lambda again: self._prepare(copy, again), after_s=_WAIT_S)
            return
        if not any(number < FIRST_KEYS_RANGE for number in copy.ranges):
            table, config = copy.table, self._config
            parts = part_count(
                table.row_estimate, table.size_bytes, chunk_rows=config.chunk_rows, workers=config.copy_workers
            )
            keys = reader.sample_keys(table) if copy.keyed and parts > 1 else []
            planned = Range.cut_at(cuts_among(keys, parts))
            self._directory.raw_past.store(copy.row.id, when=copy.keyed)
            self._catalog.put_chunks([part.saved(copy.row.id, copy.copy_id) for part in planned])
            with self._lock:
                copy.ranges |= {part.number: part for part in planned}
        with self._lock:
            copy.tracker.settle(copy.bound)
            copy.stage = Stage.READING
            self._queue_ranges(copy)
        self._rest(copy)
        self._finish_where_whole(copy)

    def _read_next(self, copy: Copy, part: Range, reader: ChunkReader) -> None:
        """Read a range's next chunk; it enters when the stream has passed it."""
        with self._lock:
            rows_max, bytes_max = self._most(copy, bounds := part.bounds())
            expected = min(bytes_max, copy.sizes.size_bytes(len(bounds.keys) or rows_max) or bytes_max)
            ticket = None if self._put_off(copy, part, expected) else copy.tracker.begin()
        if ticket is None:
            self._rest(copy)
            return
        with self._lock:
            copy.look_at(self._tables.facts)
        began_s = time.monotonic()
        try:
            reader.not_before = copy.tracked_from
            self._config.on_moment("copy.fetch", {"bounds": bounds})
            read = reader.fetch(copy.table, copy.row.id, bounds, rows_max=rows_max, bytes_max=bytes_max)
            self._leaves.note_copied(copy.row.id, read.table)
            schema = self._schemas.numbered(read.schema)
            upto = part.upto if read.last or bounds.keys else read.last_key()
            hit("capture.copy_chunk_read")
        except BaseException:
            with self._lock:
                self._open_bytes.release(expected)
                copy.tracker.end(ticket)
            raise
        ended_s = time.monotonic()
        with self._lock:
            self._open_bytes.release(expected)
            self._rate.note(read.size_bytes, ended_s)
            copy.tracker.take(ticket, read.snapshot)
            part.reading = False
            if not bounds.keys and bounds.after != part.read_after:
                # The chunk before it was given up during the read: read that part first, and this chunk again after it.
                copy.tracker.end(ticket)
            elif not read.last and len(bounds.keys) > 1:
                # A row that was cut off must not pass for a missing one.
                copy.tracker.end(ticket)
                rest = copy.halve(part)
                self._catalog.put_chunks([one.saved(copy.row.id, copy.copy_id) for one in (part, rest)])
                self._queue_range(copy, rest)
            else:
                if not bounds.keys:
                    copy.sizes.note(read.row_count, read.size_bytes, ended_s - began_s)
                covered = replace(bounds, upto=upto)
                chunk = OpenChunk(part, ticket, covered, read)
                part.note_read(chunk)
                # The source sends the next chunk during decoding.
                self._decoders.submit(self._decode, copy, chunk, read, schema)
            self._queue_range(copy, part)
        self._rest(copy)
        self._nudge()

    def _read_whole(self, copy: Copy, part: Range, reader: ChunkReader) -> None:
        """Read a table without a key; it enters when the stream has come to where it was read."""
        if self._put_off(copy, part, 0):  # its pieces go to a file, two at a time
            self._rest(copy)
            return
        copy.look_at(self._tables.facts)
        try:
            self._whole.read(copy, part, reader)
        except (DiskFull, SourceError) as error:
            if error.code not in {DiskFull.code, "no_free_slot"}:
                raise
            after_s = self._config.put_off_s
            logger.warning("a table waits to be copied", table=copy.name, reason=error.message, in_s=after_s)
            self._catalog.set_state(
                copy.row.id,
                TableState.COPYING,
                error.message,
                details={"hint": error.hint},
                copy_id=copy.copy_id,
                only_from=[TableState.COPYING],
            )
            self._queue(copy, self._reading_of(copy, part), after_s=after_s)
            return
        with self._lock:
            part.reading = False
            self._queue_range(copy, part, after_s=_WAIT_S)
        self._rest(copy)
        self._hold.nudge()
        self._nudge()

    def _piece_bytes(self) -> int:
        with self._lock:
            return self._rate.aim_bytes(max(1, self._config.copy_workers))

    def _decode(self, copy: Copy, chunk: OpenChunk, read: FetchedRows, schema: TableSchema) -> None:
        """Decode a chunk from text to columns, on a thread of its own."""
        if self._copies.get(copy.row.id) is not copy:
            return
        try:
            self._config.on_moment("copy.decode", {"bounds": chunk.bounds})
            rows = read.decoded(schema)
        except MillstreamError as error:
            if self._copies.get(copy.row.id) is copy:
                self._failed(copy, error)
        except BaseException as error:
            self._workers.error = error
            raise
        else:
            chunk.rows = rows
        finally:
            self._nudge()

    def _put_off(self, copy: Copy, part: Range, expected: int) -> bool:
        """Return whether a pause, memory or rate forbids reading now; if not, reserve `expected` bytes."""
        with self._lock:
            if copy.paused:
                part.reading = False
                return True
            wait_s = _LATER_S if self._reads_backlog and not copy.keyed else self._wait_s(expected)
            if wait_s:
                self._queue(copy, self._reading_of(copy, part), after_s=wait_s)
            return wait_s > 0

    def _wait_s(self, expected: int) -> float:
        """Return how long memory or rate forbid reading: a short time, because the rate may change."""
        if owed_s := self._rate.wait_s(time.monotonic()):
            return min(owed_s, _LATER_S)
        held = sum(chunk.memory_bytes for copy in self._copies.values() for chunk in copy.open_chunks())
        return 0.0 if self._open_bytes.reserve(expected, held=held) else ROOM_WAIT_S

    def _most(self, copy: Copy, bounds: ChunkBounds) -> tuple[int | None, int]:
        """Return the rows and bytes at which a chunk ends."""
        if bounds.keys:
            return None, CUT_AT * AIM_BYTES
        aim_bytes = self._rate.aim_bytes(max(1, self._config.copy_workers))
        return copy.sizes.rows(aim_bytes), CUT_AT * aim_bytes

    def _save(self, copy: Copy, part: Range) -> None:
        """Save up to where a range is durable; the next chunk may come."""
        with self._save_lock:
            with self._lock:
                rows, size_bytes = part.row_count, part.size_bytes
                moved = part.advance()
                if copy.keyed:
                    copy.note_rates(part.row_count - rows, part.size_bytes - size_bytes, time.monotonic())
                row = part.saved(copy.row.id, copy.copy_id)
                if not part.finished:
                    self._queue_range(copy, part)
            if moved:
                hit("capture.copy_chunk_durable")
                self._catalog.put_chunks([row])
        self._finish_where_whole(copy)
        self._rest(copy)

    def _finish_where_whole(self, copy: Copy) -> None:
        with self._lock:
            if not copy.whole or self._copies.get(copy.row.id) is not copy:
                return
            self._forget(copy)
            self._catalog.set_state(copy.row.id, TableState.STREAMING, only_from=[TableState.COPYING])
            self._catalog.resume_copy(self._stream, copy.row.id)  # in case a pause came too late
            self._directory.refresh()
        logger.info("table copied", table=copy.name, rows=sum(part.row_count for part in copy.ranges.values()))
        self._nudge()
