"""The writer of a stream's shards: group commit without a timer.

Callers queue; one thread takes what has waited while the last fsync ran as the next commit group, and starts on it at once
when that fsync has returned. A caller of `append` who finds nothing waiting and nobody writing writes its group itself: that
saves two changes of threads, and the rows' way from one core's cache to another's. What a group goes through is `commit`'s;
here are only the queue, its bounds, and the answers. Durable before readable, durable before acknowledged, always.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Self

from millstream.errors import MillstreamError, Overloaded, WriterClosed
from millstream.model.ids import Epoch, RegionId, ShardId, SourceId, StreamId, WriterId
from millstream.model.operations import Ack, SpilledOp, WriteOps
from millstream.model.positions import Lsn, Offset, Seq, StreamToken
from millstream.ports import Clock, Files, SeqReservations
from millstream.wal.commit import GroupCommitter, LogOptions, Submitted, WriterIdentity, shards_of
from millstream.wal.files import RealFiles, SystemClock

__all__ = ["LogOptions", "LogWriter", "WriterStats"]

_ONLY_REGION: Final = RegionId(0)
_FIRST_WRITER: Final = WriterId(1)


@dataclass(frozen=True, slots=True)
class WriterStats:
    """Counts since the writer was opened."""

    groups: int
    operations: int
    records: int
    bytes_written: int
    queued_bytes: int
    recovered_cut_bytes: int
    """What recovery cut off at the open."""


@dataclass(slots=True)
class _Submission:
    ops: Submitted
    size_bytes: int
    answer: Future[Ack] = field(default_factory=Future)


class LogWriter:
    """Appends to all shards of one writer; see `ports.LogAppender`. Made by `open`.

    Concurrency: any number of threads may call anything.
    """

    def __init__(self, committer: GroupCommitter, stream: StreamId, options: LogOptions) -> None:
        self._committer = committer
        self._stream = stream
        self._options = options
        self._writing = threading.Lock()
        """Held by the thread that writes: taken before `_changed`, and before anything is taken off the queue."""
        self._changed = threading.Condition()
        self._queue: deque[_Submission] = deque()
        self._queued_bytes = 0
        self._ended = False
        """No more is taken: closed, or failed."""
        self._thread = threading.Thread(target=self._run, name=f"wal-writer-{stream.hex[:8]}", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        stream: StreamId,
        shards: Sequence[ShardId],
        epoch: Epoch,
        reservations: SeqReservations,
        files: Files | None = None,
        clock: Clock | None = None,
        options: LogOptions | None = None,
        region: RegionId = _ONLY_REGION,
        writer: WriterId = _FIRST_WRITER,
    ) -> LogWriter:
        """Take the shards' locks, recover, and begin a new segment on each.

        Args:
            folder: `data/wal/<stream>`; made where it isn't there.
            stream: the stream's identity.
            shards: all shards of this writer; those that lie in the folder already are opened too.
            epoch: greater than that of any writer before.
            reservations: the durable store of reserved numbers.
            files: the file system.
            clock: for ages and creation times.
            options: sizes and bounds.
            region: of the shards.
            writer: who writes.

        Raises:
            ShardLocked: another process writes one of the shards.
            CorruptWal, UnexpectedFile, UnsupportedFormat, StaleEpoch: see `recover`; nothing was changed.
            DiskFull: there's no space to recover or to begin a segment; what was readable stays so.
        """
        options = LogOptions() if options is None else options
        committer = GroupCommitter.open(
            folder,
            WriterIdentity(stream, region, writer, epoch),
            shards,
            reservations=reservations,
            files=RealFiles() if files is None else files,
            clock=SystemClock() if clock is None else clock,
            options=options,
        )
        return cls(committer, stream, options)

    def submit(self, ops: WriteOps | SpilledOp, *, deadline_s: float | None = None) -> Future[Ack]:
        """Queue for the next commit group; see `ports.LogAppender.submit`."""
        submission = self._submission(ops)
        size = submission.size_bytes
        with self._changed:
            decided = self._changed.wait_for(lambda: self._ended or self._has_room(size), deadline_s)
            if self._ended:
                raise WriterClosed("the log's writer takes no more") from self._committer.failure
            if not decided:
                raise Overloaded(
                    f"{self._queued_bytes} bytes still wait to be written", queued_bytes=self._queued_bytes
                )
            self._queue.append(submission)
            self._queued_bytes += size
            self._changed.notify_all()
        return submission.answer

    def append(self, ops: WriteOps | SpilledOp, *, deadline_s: float | None = None) -> Ack:
        """Append and return once durable; raises what `submit`'s future would end with."""
        if self._writing.acquire(blocking=False):
            try:
                if self._is_idle():
                    submission = self._submission(ops)
                    self._write([submission])
                    return submission.answer.result()
            finally:
                self._writing.release()
        return self.submit(ops, deadline_s=deadline_s).result()

    def reached(self) -> Mapping[SourceId, Lsn]:
        """For each source, the commit end LSN up to which the durable log has everything."""
        return self._committer.reached

    def persisted_upto(self) -> Seq:
        """Every number up to it is durable or will never be."""
        return self._committer.persisted_upto

    def token(self) -> StreamToken:
        """The newest consistent cut."""
        return StreamToken.scalar(self._stream, self._committer.persisted_upto)

    def durable_offset(self, shard: ShardId) -> Offset:
        """Exclusive end of what is durable on a shard."""
        return self._committer.durable_offset(shard)

    def failure(self) -> MillstreamError | None:
        """Why the writer takes no more; None while it does, and after a plain `close`."""
        return self._committer.failure

    def stats(self) -> WriterStats:
        """Counts so far."""
        counts = self._committer.counts
        return WriterStats(
            counts.groups,
            counts.operations,
            counts.records,
            counts.bytes_written,
            self._queued_bytes,
            counts.recovered_cut_bytes,
        )

    def close(self) -> None:
        """Write what waits, seal, and give up the locks. After a failure the files are left as they are."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submission(self, ops: WriteOps | SpilledOp) -> _Submission:
        unknown = shards_of(ops) - self._committer.shards
        if unknown:
            raise AssertionError(f"shards {sorted(unknown)} aren't this writer's")
        return _Submission(ops, ops.size_bytes if isinstance(ops, WriteOps) else 0)  # a spilled one isn't in memory

    def _is_idle(self) -> bool:
        """Whether nothing waits, and more is taken. For the holder of `_writing`."""
        with self._changed:
            return not self._queue and not self._ended and self._committer.failure is None

    def _has_room(self, size: int) -> bool:
        return not self._queue or self._queued_bytes + size <= self._options.queue_bytes_max

    # --- the writer's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                with self._writing:
                    self._write(self._next_group())
            with self._writing:
                self._committer.close()
        finally:
            self._refuse_the_rest()

    def _wait_for_work(self) -> bool:
        """Wait until something is queued, or a segment may have come of age; False at the end."""

        def failed() -> bool:
            return self._committer.failure is not None

        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._ended or failed(), self._options.segment_age_s)
            return not failed() and (bool(self._queue) or not self._ended)

    def _write(self, group: list[_Submission]) -> None:
        """Commit a group, if there is one, and roll the segments. For the holder of `_writing`."""
        if group:
            self._commit(group)
        if self._committer.failure is None:
            self._committer.roll()
        if self._committer.failure is not None:
            with self._changed:
                self._changed.notify_all()

    def _next_group(self) -> list[_Submission]:
        """What waits, up to a group's bound; empty where nothing does."""
        with self._changed:
            if not self._queue:
                return []
            group = [self._queue.popleft()]
            size = group[0].size_bytes
            while isinstance(group[0].ops, WriteOps) and self._queue:
                following = self._queue[0]
                if isinstance(following.ops, SpilledOp) or size + following.size_bytes > self._options.group_bytes_max:
                    break
                group.append(self._queue.popleft())
                size += following.size_bytes
            self._queued_bytes -= size
            self._changed.notify_all()
        return group

    def _commit(self, waiting: list[_Submission]) -> None:
        """One commit group. Every submission is answered, whatever happens; one that was cancelled isn't written."""
        taken = [submission for submission in waiting if submission.answer.set_running_or_notify_cancel()]
        if not taken:
            return
        try:
            acks = self._committer.commit([submission.ops for submission in taken])
        except Exception as error:  # noqa: BLE001 (each caller gets it, whatever it is)
            for submission in taken:
                submission.answer.set_exception(error)
            return
        for submission, ack in zip(taken, acks, strict=True):
            submission.answer.set_result(ack)

    def _refuse_the_rest(self) -> None:
        """The thread ends: nothing of what still waits was written."""
        with self._changed:
            self._ended = True
            left, self._queue = self._queue, deque()
            self._queued_bytes = 0
            self._changed.notify_all()
        for submission in left:
            if submission.answer.set_running_or_notify_cancel():
                error = WriterClosed("the log's writer failed before this was written; nothing of it was")
                error.__cause__ = self._committer.failure
                submission.answer.set_exception(error)
