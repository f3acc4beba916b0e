"""A write buffer of log files, the default: each shard is a log of its own, in which an operation is one record.

    <folder>/buffer.json      what the buffer is: its identity, its shards, when it was made
    <folder>/<shard:05d>/     a log as `layout` has it, of one shard, with one table: `op`, the bytes of an operation

As in any log, waiting appends are grouped into one write and one fsync per shard. One process
writes a shard at a time; any number read it, wherever the folder is visible. Segments are dropped
by age or size, even if a reader still needs them: it gets an error.
"""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID, uuid4

import pyarrow as pa

from millstream.backoff import Backoff
from millstream.closing import Closing
from millstream.codec.buffer_reading import (
    PlacedReader,
    gone,
    replaced,
    undecodable,
    unknown_shard,
    went_back,
)
from millstream.codec.buffered_op import encode_op
from millstream.errors import (
    BufferMissing,
    BufferOutcomeUnknown,
    BufferRefused,
    BufferUnavailable,
    CorruptWal,
    IngestError,
    MillstreamError,
    OffsetBeyondEnd,
    OffsetExpired,
    ShardLocked,
    StaleEpoch,
    WriterClosed,
)
from millstream.model.buffered_operations import BufferedOp, BufferMeta, BufferOffset
from millstream.model.ids import Epoch, SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.operations import (
    FIRST_SHARD,
    Ack,
    TableRows,
    WriteOps,
    append_operations,
    append_rows,
)
from millstream.model.positions import Offset, Seq
from millstream.model.records import INSTANT
from millstream.model.schema import Column, TableSchema
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.awaiting_acks import NOTHING
from millstream.wal.writing.writer import LogOptions, LogWriter

_FACTS: Final = "buffer.json"
_SCHEMA: Final = TableSchema(
    TableId(1), SchemaVersion(1), SourceId(0), "millstream", "operations", (Column("op", pa.binary()),)
)
_POLL_S: Final = (0.0005, 0.02)
_SWEEP_EVERY_S: Final = 30.0
_EVERYTHING: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class LogBufferOptions:
    """Options of a buffer of log files."""

    folder: str
    create_shards: int | None = None
    """Number of shards to make the buffer with if it doesn't exist; None: don't make it."""
    retention_age_s: float = 7 * 86400.0
    """Age in seconds at which segments are dropped, read or not."""
    retention_bytes: int | None = None
    """Size in bytes above which a shard's oldest segments are dropped; None: by age alone."""
    log: LogOptions = LogOptions()  # noqa: RUF009 - frozen
    op_bytes_max: int = 64 << 20
    """Size in bytes above which an operation is refused."""


class LogBuffer(Closing):
    """A client of a buffer of log files: `ports.WriteBuffer`.

    Args:
        options: its folder, bounds, and log options.

    Raises:
        BufferMissing: it doesn't exist, and isn't to be made.
        BufferRefused: its folder can't be made or read.
    """

    def __init__(self, options: LogBufferOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        """Held while the fields below change."""
        self._writers: dict[ShardId, LogWriter] = {}
        self._closed = False
        self._swept_s = time.monotonic()
        if options.create_shards is not None:
            _create(options.folder, options.create_shards)
        self._shards = self.shards()

    def shards(self) -> tuple[ShardId, ...]:
        return tuple(map(ShardId, range(int(_facts(self._options.folder)["shards"]))))

    def identity(self) -> str:
        """Return the random identity that the buffer was made with."""
        return str(_facts(self._options.folder)["identity"])

    def submit(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> Future[BufferMeta]:
        """See `ports.BufferWriting.submit`; raises `BufferUnavailable` also if another process writes the shard."""
        data = encode_op(op)
        if len(data) > self._options.op_bytes_max:
            raise IngestError(
                f"an operation of {len(data)} bytes exceeds the limit of write buffer {self._options.folder}",
                code="rows_too_large",
                hint="Send fewer rows at a time.",
                size=len(data),
                size_max=self._options.op_bytes_max,
            )
        return self.submit_bytes(shard, data, deadline_s=deadline_s)

    def submit_bytes(self, shard: ShardId, data: bytes, *, deadline_s: float | None = None) -> Future[BufferMeta]:
        """As `submit`, for bytes that are encoded already; only a reader finds out whether they are an operation."""
        writer = self._writer(shard)
        now = pa.array([time.time_ns() // 1000], INSTANT)
        rows = append_rows(_SCHEMA, [pa.array([data], pa.binary())], [1])
        one = WriteOps(append_operations(1, commit_ts=now), (TableRows(_SCHEMA, rows),))
        stored = writer.submit(one, deadline_s=deadline_s)
        answer: Future[BufferMeta] = Future()
        answer.set_running_or_notify_cancel()

        def on_stored(done: Future[Ack]) -> None:
            error = done.exception()
            if error is None:
                offset = BufferOffset(done.result().offsets[FIRST_SHARD][0])
                answer.set_result(BufferMeta(shard, offset, time.time_ns() // 1000, len(data)))
            elif writer.failure() is error and isinstance(error, MillstreamError):
                unknown = BufferOutcomeUnknown(
                    f"the disk failed under write buffer {self._options.folder}: {error.message}",
                    buffer=self._options.folder,
                    shard=int(shard),
                )
                unknown.__cause__ = error
                answer.set_exception(unknown)
            else:
                answer.set_exception(error)

        stored.add_done_callback(on_stored)
        self._sweep_sometimes()
        return answer

    def append(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> BufferMeta:
        future = self.submit(shard, op, deadline_s=deadline_s)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            raise BufferOutcomeUnknown(
                f"write buffer {self._options.folder} didn't confirm within {deadline_s:g} s that shard {shard} has stored the operation",
                buffer=self._options.folder,
                shard=int(shard),
            ) from None

    def flush(self, *, deadline_s: float | None = None) -> None:
        with self._lock:
            shards = list(self._writers)
        give_up_s = None if deadline_s is None else time.monotonic() + deadline_s
        for shard in shards:
            # Waiting operations were submitted earlier, so an empty append after them is
            # acknowledged last.
            with self._lock:
                writer = self._writers.get(shard)
            left_s = None if give_up_s is None else max(0.0, give_up_s - time.monotonic())
            if writer is not None:
                try:
                    writer.submit(NOTHING, deadline_s=left_s).result(left_s)
                except TimeoutError:
                    raise BufferOutcomeUnknown(
                        f"write buffer {self._options.folder} didn't answer in time",
                        buffer=self._options.folder,
                        shard=int(shard),
                    ) from None

    def reader(self, shard: ShardId) -> LogBufferReader:
        self._check(shard, self.shards())
        return LogBufferReader(self._options.folder, shard, self.identity())

    def sweep(self) -> None:
        """Drop segments that are too old or too many, on the shards that this process writes."""
        own = self._options
        size = _EVERYTHING if own.retention_bytes is None else own.retention_bytes
        with self._lock:
            written = list(self._writers)
        for shard in written:
            drop_segments(_folder(own.folder, shard), Retention(), RetentionBounds(own.retention_age_s, size, size))

    def close(self) -> None:
        """Write what is queued, and take nothing more."""
        with self._lock:
            self._closed = True
            writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()

    def _sweep_sometimes(self) -> None:
        with self._lock:
            if time.monotonic() - self._swept_s < _SWEEP_EVERY_S:
                return
            self._swept_s = time.monotonic()
        self.sweep()

    def _check(self, shard: ShardId, shards: tuple[ShardId, ...]) -> None:
        if shard not in shards:
            raise unknown_shard(self._options.folder, shard, shards)

    def _writer(self, shard: ShardId) -> LogWriter:
        """Return the shard's writer; open it if it isn't open, or again if it has failed."""
        self._check(shard, self._shards)
        with self._lock:
            if self._closed:
                raise WriterClosed(f"write buffer {self._options.folder} was closed; nothing was stored")
            found = self._writers.get(shard)
            if found is not None and found.failure() is not None:
                del self._writers[shard]
                found.close()
                found = None
            if found is None:
                found = self._writers[shard] = self._open(shard)
            return found

    def _open(self, shard: ShardId) -> LogWriter:
        stream, epoch = StreamId(UUID(self.identity())), Epoch(1)
        while True:
            try:
                return LogWriter.open(
                    _folder(self._options.folder, shard),
                    stream=stream,
                    shards=[FIRST_SHARD],
                    epoch=epoch,
                    reservations=_Unreserved(),
                    options=self._options.log,
                )
            except StaleEpoch as error:
                # The lock was ours, so no newer writer exists: the epoch in the log is an earlier
                # writer's.
                if error.details.get("epoch", 0) < epoch:
                    raise
                epoch = Epoch(error.details["epoch"] + 1)
            except ShardLocked as error:
                raise BufferUnavailable(
                    f"another process writes shard {shard} of write buffer {self._options.folder}",
                    hint="Write through that process, or use a buffer in Kafka or Redis, which many processes may write.",
                    buffer=self._options.folder,
                ) from error


class LogBufferReader(PlacedReader):
    """Reads one shard's log."""

    def __init__(self, folder: str, shard: ShardId, identity: str) -> None:
        super().__init__(folder, shard)
        self._identity = identity
        self._reader = StreamReader(_folder(folder, shard))
        self._fetched: list[tuple[BufferOffset, bytes, int]] = []
        """Fetched items from the current position on, as `op_of` takes them, the next one last."""
        self.seek_earliest()

    def next_op(self, wait_s: float) -> BufferedOp | None:
        deadline, pause = time.monotonic() + wait_s, Backoff(*_POLL_S, factor=1.5, jitter=0)
        while not self._fetched:
            self._fetch()
            left_s = deadline - time.monotonic()
            if self._fetched:
                break
            if left_s <= 0:
                return None
            time.sleep(min(pause.next_s(), left_s))
        return self.op_of(*self._fetched.pop())

    def extent(self) -> tuple[BufferOffset, BufferOffset]:
        self._check_identity()
        first = self._reader.first_offset(FIRST_SHARD)
        return BufferOffset(first), BufferOffset(self._reader.durable_offset(FIRST_SHARD))

    def go_to(self, offset: BufferOffset) -> None:
        super().go_to(offset)
        self._fetched.clear()

    def close(self) -> None:
        """Drop what was fetched."""
        self._fetched.clear()

    def _fetch(self) -> None:
        """Fetch the items of one frame, from the current position on."""
        self._check_identity()
        try:
            found = next(self._reader.read(FIRST_SHARD, Offset(self._place)), None)
        except OffsetExpired as error:
            self._ended = True
            first = BufferOffset(self._reader.first_offset(FIRST_SHARD))
            raise gone(self._buffer, self._shard, self._place, first) from error
        except OffsetBeyondEnd as error:
            raise went_back(self._buffer, self._shard, self._place, BufferOffset(error.details["end"])) from error
        except CorruptWal as error:
            end = error.details.get("offset_to")
            if end is None:
                raise
            offset, self._place = self._place, BufferOffset(end)
            raise undecodable(self._buffer, self._shard, offset, error) from error
        if found is None:
            return
        offsets = found.batch.column("__offset").to_pylist()
        moments = found.batch.column("__commit_ts").cast(pa.int64()).to_pylist()
        items = found.batch.column("op").to_pylist()
        fetched = [(BufferOffset(o), data or b"", at or 0) for o, data, at in zip(offsets, items, moments, strict=True)]
        self._fetched = fetched[::-1]

    def _check_identity(self) -> None:
        found = str(_facts(self._buffer)["identity"])
        if found != self._identity:
            raise replaced(self._buffer, self._identity, found)


class _Unreserved:
    """`ports.SeqReservations` of a log whose numbers no one uses: what its frames record is enough."""

    def __init__(self) -> None:
        self._reserved = Seq(0)

    def reserved(self) -> Seq:
        """Return the greatest reservation of this process."""
        return self._reserved

    def reserve_to(self, seq: Seq, *, epoch: Epoch) -> None:  # noqa: ARG002 - the shard's lock fences
        """Keep the reservation in memory."""
        self._reserved = max(self._reserved, seq)


def _folder(folder: str, shard: ShardId) -> str:
    return f"{folder}/{shard:05d}"


def _facts(folder: str) -> dict[str, Any]:
    try:
        return dict(json.loads(RealFiles().read(f"{folder}/{_FACTS}")))
    except FileNotFoundError as error:
        raise BufferMissing(f"there is no write buffer in {folder}", buffer=folder) from error
    except (OSError, ValueError) as error:
        raise BufferRefused(
            f"{folder}/{_FACTS} can't be read: {error}",
            hint="Give this user write access to the folder.",
            buffer=folder,
        ) from error


def _create(folder: str, shards: int) -> None:
    """Make the buffer if it doesn't exist: whole or not at all, so that any number of processes may do so at a time."""
    target, mine = f"{folder}/{_FACTS}", f"{folder}/{_FACTS}.{uuid4().hex}"
    files = RealFiles()
    try:
        files.makedirs(folder)
        if files.exists(target):
            return
        facts = {"identity": str(uuid4()), "shards": shards, "made_us": time.time_ns() // 1000}
        made = files.create(mine)
        try:
            made.pwrite(json.dumps(facts).encode(), 0)
            made.sync()
        finally:
            made.close()
        try:
            os.link(mine, target)
        except FileExistsError:
            return  # another process was faster
        finally:
            files.remove(mine)
            files.sync_dir(folder)
    except OSError as error:
        raise BufferRefused(
            f"can't create a write buffer in {folder}: {error.strerror}",
            hint="Give this user write access to the folder.",
            buffer=folder,
        ) from error
