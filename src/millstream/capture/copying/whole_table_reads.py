"""Reads tables without a key, of any size, whole, into files: under one snapshot each, in bounded memory.

Rows that can't be told apart can't be dropped from a copy one by one. So they enter as one operation, at a position
of the log such that everything their snapshot sees comes before it, and any other change of the table after it. To
get such a position, a table is read in turns:

- *Plain*, twice at most: under a present snapshot, while the stream goes on. If a transaction that the snapshot
  doesn't see touched the table, there is no such position, and the reading is given up at once.
- *Held*: under the snapshot of a temporary logical slot, which sees exactly the commits below an LSN, while later
  commits wait (`StreamBarrier`) until the rows have entered. The stream goes on up to that LSN, and by then no change
  of the table can have come after it. PostgreSQL gives such a snapshot when the running transactions have ended. So
  it is asked for first without holding anything. The stream may pass its LSN by then, with changes of the table after
  it. In that case it is asked for with the stream held, for as long as the patience lasts, which doubles each time.
  However long transactions last, one turn is the last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

import structlog

from millstream.capture.config import CaptureConfig
from millstream.capture.copying.chunk_reader import AGAIN, Begun, ChunkBounds, ChunkReader
from millstream.capture.copying.copied_file import CopiedFile
from millstream.capture.copying.copy_output import CopyText
from millstream.capture.copying.copy_progress import Copy
from millstream.capture.copying.copy_text import read_copied
from millstream.capture.copying.key_ranges import OpenChunk, Range
from millstream.capture.copying.source_snapshot import SourceSnapshot
from millstream.capture.copying.throttle import CopyRate
from millstream.capture.stream.barrier import StreamBarrier
from millstream.capture.stream.spill_files import SpillFolder
from millstream.capture.table_directory import TableDirectory
from millstream.errors import DiskFull, SourceError
from millstream.failpoints import hit
from millstream.model.operations import SpilledOp
from millstream.model.schema import TableSchema

logger = structlog.get_logger("millstream.capture")

STANDBY_PATIENCE_S: Final = 60.0
"""A standby gets the running transactions every 15 seconds, and needs them three times."""
_LOOK_S: Final = 0.2
_OF_NAMES: Final = "42"
"""The class of SQLSTATEs for names that don't exist."""


class _GivenUp(Exception):
    """Not an error: the reading is useless, or not wanted now."""


@dataclass(slots=True, eq=False)
class _TableRead:
    """The reading of one table, from before its snapshot to its file."""

    copy: Copy
    ticket: int
    begun: Begun | None = None
    file: CopiedFile | None = None
    decoding: Future[None] | None = None
    kept: bool = False
    """Whether another owner has its ticket and its file now."""


class WholeTableReads:
    """The reading of one session's tables without a key. `read` on any worker thread, of one copy on one at a time.

    Args:
        config: capture's; its DSN is that of the one server that the session reads.
        patience_s: how long the stream is held at first for a snapshot to come.
        lock: lock of the copies: their trackers, and the rate.
        piece_bytes: returns how much text to take at a time.
        numbered: gives a schema its version.
        goes_on: whether a copy is still wanted, and not paused.
    """

    def __init__(
        self,
        config: CaptureConfig,
        spill: SpillFolder,
        hold: StreamBarrier,
        directory: TableDirectory,
        *,
        patience_s: float,
        lock: threading.RLock,
        rate: CopyRate,
        piece_bytes: Callable[[], int],
        numbered: Callable[[TableSchema], TableSchema],
        goes_on: Callable[[Copy], bool],
        decoders: Executor,
    ) -> None:
        self._config = config
        self._dsn = config.dsn
        self._spill = spill
        self._hold = hold
        self._directory = directory
        self._patience_s = patience_s
        self._lock = lock
        self._rate = rate
        self._piece_bytes = piece_bytes
        self._numbered = numbered
        self._goes_on = goes_on
        self._decoders = decoders
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End readings soon."""
        self._stopping.set()

    def read(self, copy: Copy, part: Range, reader: ChunkReader) -> None:
        """Read the table in the way whose turn it is. If its range isn't all read then, call it again.

        If the rows were read with the stream held, it stays held while they wait to enter.

        Raises:
            MillstreamError: as `ChunkReader.read_whole` and `SourceSnapshot.take`, `DiskFull`, `TableUndecodable`.
        """
        if self._spill.free_bytes() < 2 * copy.table.size_bytes:
            raise DiskFull(
                f"no disk space to copy {copy.name}: its rows are kept in a file until they are in the log",
                hint="Free space on the home's disk, or give the table a primary key; the copy then continues.",
            )
        if copy.turn < self._config.plain_turns:
            self._read(self._begin(copy), part, reader, None)
            return
        try:
            self._read_held(copy, part, reader)
        finally:
            if not part.all_read:
                self._hold.release(copy)

    def enter(self, copy: Copy, chunk: OpenChunk, file: CopiedFile) -> SpilledOp | None:
        """Return the rows as an operation, now that the log has everything that they see; None: they were read in vain.

        If the log may have records of the table, the operation begins with one that voids them. It is empty if the log
        has none and there are no rows. Nothing is left of rows read in vain. Call it on the thread that submits; the
        stream goes on after the operation.
        """
        self._hold.release(copy)
        with self._lock:
            in_vain = copy.tracker.judge(chunk.ticket).touches
            if not in_vain:
                copy.tracker.end(chunk.ticket)
        if in_vain:
            copy.turn += 1
            copy.file = None
            file.remove()
            return None
        chunk.ticket = 0
        chunk.rows_entered = file.row_count
        self._directory.note_key(file.schema)
        shard = self._directory.shard_of(copy.row.id)
        voids = copy.marked or self._directory.has_met(copy.row.relation_oid)
        self._directory.leaves.known.begin_copy(copy.row.id, file.table, voids=voids)
        return file.operation(self._directory.source, f"{copy.copy_id}/{chunk.range.number}", shard, voids=voids)

    def _read_held(self, copy: Copy, part: Range, reader: ChunkReader) -> None:
        ahead = (copy.turn - self._config.plain_turns) % 2 == 1
        if ahead and not self._hold.begin(copy):
            return  # another table holds the stream: try later
        patience_s = (copy.patience_s or self._patience_s) if ahead else self._config.free_patience_s
        reading = self._begin(copy)
        try:
            self._config.on_moment("copy.snapshot", {"table": copy.table})
            with SourceSnapshot.take(
                self._dsn,
                patience_s=patience_s,
                purpose="copy",
                stopped=lambda: self._stopping.is_set() or not self._goes_on(copy),
            ) as snapshot:
                if self._hold.begin(copy, snapshot.lsn):
                    self._read(reading, part, reader, snapshot)
        except SourceError as error:
            if error.code != "snapshot_waits" or (self._goes_on(copy) and not ahead):
                raise
            if self._goes_on(copy):
                logger.info("the stream goes on: a snapshot takes long", table=copy.name, after_s=patience_s)
                copy.patience_s = 2 * patience_s
                copy.turn += 1
        finally:
            self._drop(reading)

    def _read(self, reading: _TableRead, part: Range, reader: ChunkReader, under: SourceSnapshot | None) -> None:
        copy = reading.copy
        try:
            reader.not_before = copy.tracked_from
            try:
                reader.read_whole(
                    copy.table,
                    copy.row.id,
                    under=under,
                    piece_bytes=self._piece_bytes,
                    began=lambda begun: self._note_begun(reading, begun),
                    take=lambda piece: self._take(reading, piece),
                )
            except SourceError as error:
                if under is None or not str(error.details.get("sqlstate", "")).startswith(_OF_NAMES):
                    raise
                # Its definition changed between the snapshot and the lock.
                raise SourceError(error.message, sqlstate=AGAIN) from error
            self._finish(reading, part)
        except _GivenUp:
            pass
        finally:
            self._drop(reading)

    # --- one reading -------------------------------------------------------------------------------------------

    def _begin(self, copy: Copy) -> _TableRead:
        with self._lock:
            return _TableRead(copy, copy.tracker.begin())

    def _note_begun(self, reading: _TableRead, begun: Begun) -> None:
        copy = reading.copy
        with self._lock:
            copy.tracker.take(reading.ticket, begun.snapshot)
        reading.begun = begun
        self._directory.leaves.known.note_copied(copy.row.id, begun.table)
        path = self._spill.path_for(f"table-{copy.row.id}")
        copy.file = reading.file = CopiedFile(path, begun, self._numbered(begun.schema))
        self._look(reading)

    def _take(self, reading: _TableRead, piece: CopyText) -> None:
        """Decode and write a piece while the next one is read, and keep to the rate."""
        now = time.monotonic()
        with self._lock:
            self._rate.note(piece.size_bytes, now)
            reading.copy.note_rates(piece.row_count, piece.size_bytes, now)
        self._look(reading)
        _settle(reading)
        if piece.row_count:
            reading.decoding = self._decoders.submit(_write, reading, piece)
        while not piece.whole:
            with self._lock:
                owed_s = self._rate.wait_s(time.monotonic())
            if not owed_s:
                break
            self._stopping.wait(min(owed_s, _LOOK_S))
            self._look(reading)

    def _finish(self, reading: _TableRead, part: Range) -> None:
        _settle(reading)
        assert reading.file is not None
        reading.file.finish()
        hit("capture.copy_whole_read")
        with self._lock:
            self._look(reading)
            reading.kept = True
            part.note_read(OpenChunk(part, reading.ticket, ChunkBounds(), reading.file))

    def _drop(self, reading: _TableRead) -> None:
        """Remove what is left of a reading, unless it is whole."""
        if reading.kept:
            return
        reading.kept = True
        if reading.decoding is not None and not reading.decoding.cancel():
            reading.decoding.exception()
        if reading.file is not None:
            reading.file.remove()
        with self._lock:
            reading.copy.file = None
            reading.copy.tracker.end(reading.ticket)

    def _look(self, reading: _TableRead) -> None:
        """Raise `_GivenUp` unless the reading is still of use."""
        copy = reading.copy
        if self._stopping.is_set() or not self._goes_on(copy):
            raise _GivenUp
        with self._lock:
            if copy.tracker.judge(reading.ticket).touches:
                copy.turn += 1
                raise _GivenUp


def _settle(reading: _TableRead) -> None:
    """Wait for the piece that is being written. Raises its error."""
    decoding, reading.decoding = reading.decoding, None
    if decoding is not None:
        decoding.result()


def _write(reading: _TableRead, piece: CopyText) -> None:
    """Decode a piece from text to columns and write it to the file, on a thread of its own."""
    assert reading.begun is not None
    assert reading.file is not None
    relation = reading.begun.table.relation
    reading.file.append(read_copied(piece, relation, reading.file.schema))
