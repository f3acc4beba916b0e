"""The writer of a stream's shards: group commit without a timer.

One thread at a time does all writing. It takes what has waited while the last fsync ran (a *commit group*), numbers it,
writes one run of frames a shard, fsyncs the shards side by side, moves the marks, and only then answers. It starts on the
next group at once. Durable before readable, durable before acknowledged, always.

That thread is the writer's own, but for a caller of `append` who finds nothing waiting and nobody writing: it writes its
group itself, which saves two changes of threads and the way of the rows from one core's cache to another's.

When the disk fails:

- for want of space before any fsync: what was written is cut back durably, the callers get `DiskFull`, the writer goes on;
- any other failed write, and every failed fsync: the writer is *poisoned*. The group's outcome is unknown, nothing is tried
  again on the same files, and only recovery, by a new writer, decides.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Self

from millstream import failpoints
from millstream.codec.log_segment import SegmentHeader
from millstream.errors import (
    AppendOutcomeUnknown,
    DiskFull,
    MillstreamError,
    Overloaded,
    ShardLocked,
    StaleEpoch,
    WriterClosed,
)
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, SourceId, StreamId, TableId, WriterId
from millstream.model.operations import Ack, SpilledOp, WriteOps
from millstream.model.positions import Lsn, Offset, Seq, SeqRange, StreamToken
from millstream.ports import Clock, Files, SeqReservations
from millstream.protocol.sequencer import Sequencer
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.grouping import FramePlan, plan_chunk, plan_group
from millstream.wal.layout import shard_folder
from millstream.wal.mark import DurableMark, MarkFile
from millstream.wal.recover import NO_SPACE, Recovered, keep_spare, recover
from millstream.wal.segment import GroupFacts, OpenSegment

_MIB: Final = 1 << 20
_ONLY_REGION: Final = RegionId(0)
_FIRST_WRITER: Final = WriterId(1)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a log is written."""

    segment_bytes: int = 64 * _MIB
    """A segment is sealed once it has reached this size …"""
    segment_age_s: float = 3600.0
    """… or this age, where it holds records."""
    queue_bytes_max: int = 64 * _MIB
    """Memory of what waits; one larger submission may stretch it."""
    group_bytes_max: int = 16 * _MIB
    """Memory of the submissions that go into one commit group; a single one may stretch it."""
    disk_used_max: float = 0.9
    """Share of the disk above which appends get `DiskFull`."""
    frame_bytes_max: int = 16 * _MIB
    """Rows of a group beyond this go on in further frames."""


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
    ops: WriteOps | SpilledOp
    size_bytes: int
    answer: Future[Ack] = field(default_factory=Future)


@dataclass(slots=True)
class _Shard:
    folder: str
    mark: MarkFile
    segment: OpenSegment


class LogWriter:
    """Appends to all shards of one writer; see `ports.LogAppender`. Made by `open`.

    Concurrency: any number of threads may call anything.
    """

    def __init__(
        self,
        files: Files,
        clock: Clock,
        options: LogOptions,
        identity: tuple[StreamId, RegionId, WriterId, Epoch],
        shards: dict[ShardId, _Shard],
        recovered: Recovered,
        reservations: SeqReservations,
    ) -> None:
        self._files = files
        self._clock = clock
        self._options = options
        self._stream, self._region, self._writer, self._epoch = identity
        self._shards = shards
        self._reservations = reservations
        floor = max(recovered.reserved_to, recovered.persisted_upto, reservations.reserved())
        self._sequencer = Sequencer(reserved_to=Seq(floor), persisted_upto=recovered.persisted_upto)
        self._group = recovered.last_group
        self._persisted_upto = recovered.persisted_upto
        self._reached: dict[SourceId, Lsn] = dict(recovered.reached)
        self._recovered = recovered
        self._shown = recovered.shown
        """`persisted_upto` in the marks."""
        self._syncers = ThreadPoolExecutor(len(shards), "wal-sync") if len(shards) > 1 else None

        self._changed = threading.Condition()
        self._writing = threading.Lock()
        """Held by the one who writes. Taken before `_changed`, and before anything is taken off the queue."""
        self._queue: deque[_Submission] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._failure: MillstreamError | None = None
        self._counts = {"groups": 0, "operations": 0, "records": 0, "bytes": 0}
        self._thread = threading.Thread(target=self._run, name=f"wal-writer-{self._stream.hex[:8]}", daemon=True)

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
            shards: all shards of this writer.
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
            DiskFull: there's no space to recover or to begin a segment.
        """
        files = RealFiles() if files is None else files
        clock = SystemClock() if clock is None else clock
        options = LogOptions() if options is None else options
        marks = _lock_shards(files, folder, shards)
        try:
            recovered = recover(files, folder, stream=stream, region=region, shards=shards, epoch=epoch)
            opened = {}
            for shard in shards:
                end = recovered.shards[shard]
                header = SegmentHeader(
                    stream, region, shard, epoch, end.end_offset, end.last_footer_hash, clock.now_ns()
                )
                shard_dir = shard_folder(folder, shard)
                opened[shard] = _Shard(shard_dir, marks[shard], _create_segment(files, shard_dir, header))
            keep_spare(files, [shard.folder for shard in opened.values()], options.segment_bytes + 4 * _MIB)
            log = cls(files, clock, options, (stream, region, writer, epoch), opened, recovered, reservations)
            log._move_marks()
        except BaseException:
            for mark in marks.values():
                mark.close()
            raise
        log._thread.start()
        return log

    # --- for callers -----------------------------------------------------------------------------------------------

    def submit(self, ops: WriteOps | SpilledOp, *, deadline_s: float | None = None) -> Future[Ack]:
        """Queue for the next commit group; see `ports.LogAppender.submit`."""
        submission = self._submission(ops)
        size = submission.size_bytes
        with self._changed:
            fits = self._changed.wait_for(lambda: self._takes(size), deadline_s)
            if self._failure is not None or self._closing:
                raise WriterClosed("the log's writer takes no more") from self._failure
            if not fits:
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
        return self._reached

    def persisted_upto(self) -> Seq:
        """Every number up to it is durable or will never be."""
        return self._persisted_upto

    def token(self) -> StreamToken:
        """The newest consistent cut."""
        return StreamToken.scalar(self._stream, self._persisted_upto)

    def durable_offset(self, shard: ShardId) -> Offset:
        """Exclusive end of what is durable on a shard."""
        return self._shards[shard].segment.end_offset

    def failure(self) -> MillstreamError | None:
        """Why the writer takes no more; None while it does."""
        return self._failure

    def stats(self) -> WriterStats:
        """Counts so far."""
        counts = self._counts
        return WriterStats(
            counts["groups"],
            counts["operations"],
            counts["records"],
            counts["bytes"],
            self._queued_bytes,
            self._recovered.cut_bytes,
        )

    def close(self) -> None:
        """Write what waits, seal, and give up the locks. A poisoned writer's files are left as they are."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._syncers is not None:
            self._syncers.shutdown()
        for shard in self._shards.values():
            shard.segment.close()
            shard.mark.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submission(self, ops: WriteOps | SpilledOp) -> _Submission:
        unknown = {shard for shard in _shards_of(ops) if shard not in self._shards}
        if unknown:
            raise AssertionError(f"shards {sorted(unknown)} aren't this writer's")
        return _Submission(ops, ops.size_bytes if isinstance(ops, WriteOps) else 0)  # a spilled one isn't in memory

    def _is_idle(self) -> bool:
        """Whether nothing waits to be written, and more is taken. Told to the one who holds `_writing`."""
        with self._changed:
            return not self._queue and not self._closing and self._failure is None

    def _takes(self, size: int) -> bool:
        """Whether a submission may be queued or refused now: there's room, or the writer takes no more."""
        room = not self._queue or self._queued_bytes + size <= self._options.queue_bytes_max
        return room or self._closing or self._failure is not None

    # --- the writer's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            with self._writing:
                if self._failure is not None:
                    break
                self._write(self._next_group())
        with self._writing:
            if self._failure is None:
                self._roll_segments(all_of_them=True)
        with self._changed:
            self._closing = True
            left, self._queue = self._queue, deque()
            self._queued_bytes = 0
            self._changed.notify_all()
        for submission in left:
            error = WriterClosed("the log's writer failed before this was written; nothing of it was")
            error.__cause__ = self._failure
            submission.answer.set_exception(error)

    def _wait_for_work(self) -> bool:
        """Wait until something is queued or a segment may have come of age; False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue or self._closing or self._failure is not None, self._options.segment_age_s
            )
            return bool(self._queue) or not (self._closing or self._failure is not None)

    def _write(self, group: list[_Submission]) -> None:
        """Commit a group, if there is one, and seal what has become large or old. By the holder of `_writing` only."""
        if group:
            self._commit(group)
        if self._failure is None:
            self._roll_segments(all_of_them=False)
        if self._failure is not None:
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

    def _commit(self, submissions: list[_Submission]) -> None:
        """One commit group, from numbers to answers. Every submission is answered, whatever happens."""
        taken = [s for s in submissions if s.answer.set_running_or_notify_cancel()]
        try:
            acks = self._append_group(taken)
        except BaseException as error:
            for submission in taken:
                submission.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for submission, ack in zip(taken, acks, strict=True):
            submission.answer.set_result(ack)

    def _append_group(self, submissions: list[_Submission]) -> list[Ack]:
        count = sum(submission.ops.row_count for submission in submissions)
        reached = dict(self._reached)
        for submission in submissions:
            for source, lsn in submission.ops.reached.items():
                reached[source] = max(lsn, reached.get(source, lsn))
        if count == 0:
            self._reached = reached
            return [Ack({}, SeqRange(Seq(self._sequencer.newest + 1), 0)) for _ in submissions]
        self._check_disk()
        self._open_segments()
        self._reserve(count)
        given = self._sequencer.allocate(count)
        facts = GroupFacts(
            group=GroupNumber(self._group + 1),
            group_last_seq=given.last,
            epoch=self._epoch,
            region=self._region,
            writer=self._writer,
            reserved_to=self._sequencer.reserved_to,
            hybrid_time=self._clock.now_ns(),
            reached=reached,
            shards=frozenset(shard for submission in submissions for shard in _shards_of(submission.ops)),
        )
        touched = [self._shards[shard].segment for shard in sorted(facts.shards)]
        starts = {shard: self._shards[shard].segment.end_offset for shard in facts.shards}
        try:
            self._stage(submissions, facts, given.first)
        except Exception as error:
            self._sequencer.abort(given)
            self._cut_back(touched, error)
            raise
        failpoints.hit("wal.before_fsync")
        self._sync(touched)
        failpoints.hit("wal.after_fsync")
        for segment in touched:
            before = segment.byte_end
            segment.keep()
            self._counts["bytes"] += segment.byte_end - before
        self._group = facts.group
        self._persisted_upto = self._sequencer.finish(given)
        self._reached = reached
        self._move_marks()
        self._counts["groups"] += 1
        self._counts["records"] += count
        self._counts["operations"] += sum(_operation_count(submission.ops) for submission in submissions)
        return _acks(submissions, given.first, starts)

    def _check_disk(self) -> None:
        used, total = self._files.disk_usage(next(iter(self._shards.values())).folder)
        if used > total * self._options.disk_used_max:
            raise DiskFull(
                f"{used} of {total} bytes of the disk are used, more than disk_used_max = {self._options.disk_used_max}",
                used_bytes=used,
                total_bytes=total,
            )

    def _reserve(self, count: int) -> None:
        upto = self._sequencer.to_reserve(count)
        if upto is None:
            return
        try:
            self._reservations.reserve_to(upto, epoch=self._epoch)
        except StaleEpoch as error:
            self._failure = error
            raise
        self._sequencer.reserved(upto)

    def _stage(self, submissions: list[_Submission], facts: GroupFacts, first_seq: Seq) -> None:
        """Write the group's frames behind the last ones of its shards."""
        first = submissions[0].ops
        if isinstance(first, SpilledOp):
            self._stage_spilled(first, facts, first_seq)
            return
        group = [submission.ops for submission in submissions if isinstance(submission.ops, WriteOps)]
        base = {shard: self._shards[shard].segment.end_offset for shard in facts.shards}
        plans = plan_group(group, first_seq=first_seq, base=base, frame_bytes_max=self._options.frame_bytes_max)
        for shard, frames in plans.items():
            self._shards[shard].segment.stage(facts, frames, more=False)

    def _stage_spilled(self, op: SpilledOp, facts: GroupFacts, first_seq: Seq) -> None:
        """Write one large operation chunk by chunk. One chunk a shard waits, until it's known whether more follows."""
        next_seq: dict[tuple[ShardId, TableId], Seq] = {}
        number = first_seq
        for key, count in op.counts.items():
            next_seq[key] = number
            number = Seq(number + count)
        end = {key: Seq(first + op.counts[key]) for key, first in next_seq.items()}
        base = {shard: self._shards[shard].segment.end_offset for shard in facts.shards}
        waiting: dict[ShardId, list[FramePlan]] = {}
        for tables in op.chunks():
            plans = plan_chunk(
                op.operation, tables, next_seq=next_seq, base=base, frame_bytes_max=self._options.frame_bytes_max
            )
            for shard, frames in plans.items():
                if shard in waiting:
                    self._shards[shard].segment.stage(facts, waiting[shard], more=True)
                waiting[shard] = frames
                base[shard] = Offset(base[shard] + sum(frame.count for frame in frames))
        if next_seq != end:
            raise AssertionError(f"a spilled operation announced {dict(op.counts)} rows, others came")
        for shard, frames in waiting.items():
            self._shards[shard].segment.stage(facts, frames, more=False)

    def _sync(self, segments: Sequence[OpenSegment]) -> None:
        """fsync all, side by side; return when all are durable."""
        try:
            if self._syncers is None or len(segments) == 1:
                for segment in segments:
                    segment.sync()
            else:
                outcomes = [self._syncers.submit(segment.sync) for segment in segments]
                errors = [error for outcome in outcomes if (error := outcome.exception()) is not None]
                if errors:
                    raise errors[0]
        except OSError as error:
            raise self._poison("an fsync of the log failed", error) from error

    def _cut_back(self, segments: Sequence[OpenSegment], error: Exception) -> None:
        """Undo a group that wasn't written whole; raises where that can't be done or the disk is at fault."""
        if isinstance(error, OSError) and error.errno not in NO_SPACE:
            raise self._poison("a write to the log failed", error) from error
        try:
            for segment in segments:
                segment.cut_back()
        except OSError as second:
            raise self._poison("a failed write to the log couldn't be undone", second) from second
        if isinstance(error, OSError):
            raise DiskFull(f"the disk has no space for the group: {error}") from error

    def _poison(self, what: str, error: OSError) -> AppendOutcomeUnknown:
        self._failure = AppendOutcomeUnknown(f"{what}: {error}; whether the group is durable is unknown")
        return self._failure

    def _move_marks(self) -> None:
        """Show what is durable: with several shards all positions first, then what is complete up to them."""
        if len(self._shards) > 1:
            for shard in self._shards.values():
                shard.mark.move(self._mark(shard, self._shown))
        for shard in self._shards.values():
            shard.mark.move(self._mark(shard, self._persisted_upto))
        self._shown = self._persisted_upto

    def _mark(self, shard: _Shard, persisted_upto: Seq) -> DurableMark:
        segment = shard.segment
        return DurableMark(
            stream=self._stream,
            epoch=self._epoch,
            base_offset=segment.header.base_offset,
            byte_end=segment.byte_end,
            durable_offset=segment.end_offset,
            group=self._group,
            persisted_upto=persisted_upto,
            reserved_to=self._sequencer.reserved_to,
        )

    # --- segments --------------------------------------------------------------------------------------------------

    def _roll_segments(self, *, all_of_them: bool) -> None:
        """Seal what is large or old enough (at the end: whatever holds records) and begin the next."""
        age_ns = int(self._options.segment_age_s * 1e9)
        for shard in self._shards.values():
            segment = shard.segment
            old = self._clock.now_ns() - segment.header.created_ns >= age_ns
            full = segment.byte_end >= self._options.segment_bytes
            if segment.sealed_hash is None and segment.holds_records and (old or full or all_of_them):
                self._seal(segment)
        if not all_of_them and self._failure is None:
            try:
                self._open_segments()
            except DiskFull:
                return  # the next append tries again, and tells its caller

    def _seal(self, segment: OpenSegment) -> None:
        try:
            segment.seal()
        except OSError as error:
            if error.errno not in NO_SPACE:
                self._poison("sealing a segment failed", error)
                return
            try:
                segment.cut_back()
            except OSError as second:
                self._poison("a failed seal couldn't be undone", second)

    def _open_segments(self) -> None:
        """Begin the next segment wherever the last one is sealed. Raises `DiskFull`, `AppendOutcomeUnknown`."""
        for number, shard in self._shards.items():
            sealed = shard.segment
            if sealed.sealed_hash is None:
                continue
            header = SegmentHeader(
                self._stream,
                self._region,
                number,
                self._epoch,
                sealed.end_offset,
                sealed.sealed_hash,
                self._clock.now_ns(),
            )
            try:
                shard.segment = _create_segment(self._files, shard.folder, header)
            except OSError as error:
                raise self._poison("a new segment couldn't be made", error) from error
            sealed.close()
            self._move_marks()


def _create_segment(files: Files, shard_dir: str, header: SegmentHeader) -> OpenSegment:
    try:
        return OpenSegment.create(files, shard_dir, header)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise DiskFull(f"{shard_dir} has no space for a new segment: {error}") from error
        raise


def _lock_shards(files: Files, folder: str, shards: Sequence[ShardId]) -> dict[ShardId, MarkFile]:
    marks: dict[ShardId, MarkFile] = {}
    try:
        for shard in shards:
            shard_dir = shard_folder(folder, shard)
            files.makedirs(shard_dir)
            files.sync_dir(folder)
            marks[shard] = MarkFile.open(files, shard_dir)
            if not marks[shard].file.lock():
                raise ShardLocked(
                    f"another process writes {shard_dir}",
                    hint="Stop it first; `millstream status` shows who it is.",
                    shard=int(shard),
                )
    except BaseException:
        for mark in marks.values():
            mark.close()
        raise
    return marks


def _shards_of(ops: WriteOps | SpilledOp) -> set[ShardId]:
    if isinstance(ops, SpilledOp):
        return {shard for (shard, _), count in ops.counts.items() if count}
    return {table.shard for table in ops.tables if table.rows.num_rows}


def _operation_count(ops: WriteOps | SpilledOp) -> int:
    return 1 if isinstance(ops, SpilledOp) else ops.operations.num_rows


def _acks(submissions: Sequence[_Submission], first_seq: Seq, starts: Mapping[ShardId, Offset]) -> list[Ack]:
    """What each submission was given: submissions follow one another in numbers and, on every shard, in offsets."""
    next_offset = dict(starts)
    acks = []
    number = first_seq
    for submission in submissions:
        counts: dict[ShardId, int] = {}
        ops = submission.ops
        if isinstance(ops, SpilledOp):
            for (shard, _), count in ops.counts.items():
                counts[shard] = counts.get(shard, 0) + count
        else:
            for table in ops.tables:
                counts[table.shard] = counts.get(table.shard, 0) + table.rows.num_rows
        offsets = {}
        for shard, count in counts.items():
            if count:
                offsets[shard] = (next_offset[shard], Offset(next_offset[shard] + count))
                next_offset[shard] = offsets[shard][1]
        rows = sum(counts.values())
        acks.append(Ack(offsets, SeqRange(number, rows)))
        number = Seq(number + rows)
    return acks
