"""The writer of a stream's shards: group commit without a timer.

Callers queue; one thread takes what has waited while the last fsync ran as the next commit group, and starts on it at once
when that fsync has returned. A caller of `append` who finds nothing waiting and nobody writing writes its group itself: that
saves two changes of threads, and the rows' way from one core's cache to another's. What a group goes through is `commit`'s,
the queue and its bounds are `queue`'s, and how callers are told `answers`'; who asks for more than this machine waits in `levels`. Durable before
readable, durable before acknowledged, always.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Self

from millstream.crdt.hlc import HybridTime
from millstream.errors import InvalidValue, MillstreamError, OutOfOrder, SessionsNeedOneWriter, WriterClosed
from millstream.model.appends import AppendOp, Submitted, columns_of
from millstream.model.ids import Epoch, RegionId, ShardId, SourceId, StreamId, WriterId
from millstream.model.operations import Ack, SpilledOp, WriteOps
from millstream.model.positions import Lsn, Offset, Seq, StreamToken
from millstream.model.replication import LOCAL, AckLevel
from millstream.model.writes import SessionFacts
from millstream.ports import Clock, Files, HighWater, SeqReservations
from millstream.protocol.sequencer import LedgerView
from millstream.protocol.sessions import SessionLimits
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.readable_range import LogExtent
from millstream.wal.writing.ack_levels import NOTHING, Awaiting, LevelsOfWriter, check_level
from millstream.wal.writing.commit import GroupCommitter
from millstream.wal.writing.deduplication import KeyedCommits
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.own_shards import WriterIdentity
from millstream.wal.writing.queue import SubmissionQueue
from millstream.wal.writing.sequence_allocator import BlockNumbers, SharedNumbers
from millstream.wal.writing.submissions import follow, shards_of
from millstream.wal.writing.waiters import (
    AwaitedAtLevel,
    BlockedAtLevel,
    FutureWaiter,
    PromisedAtLevel,
    TaskWaiter,
    ThreadWaiter,
    Waiting,
    answer,
)

__all__ = ["LogOptions", "LogWriter", "WriterStats"]

_ONLY_REGION: Final = RegionId(0)
_FIRST_WRITER: Final = WriterId(1)
_SUBMISSION_BYTES: Final = 1024
"""What a submission holds beside its rows: itself, its answer, and who waits for that."""
_OPEN_HERE: Final[weakref.WeakSet[LogWriter]] = weakref.WeakSet()
"""This process's: a fork's child has none of them."""


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
    acks: str
    """The stream's level."""
    awaited: Awaiting
    """What is durable here, and isn't acknowledged before others have it."""


class LogWriter:
    """Appends to all shards of one writer; see `ports.LogAppender`. Made by `open`.

    Concurrency: any number of threads may call anything. A forked child's copy is closed (`WriterClosed`): the parent writes on.
    """

    def __init__(
        self,
        committer: GroupCommitter,
        stream: StreamId,
        options: LogOptions,
        keyed: KeyedCommits | None,
        high_water: HighWater | None,
        shown_upto: Callable[[], Seq],
    ) -> None:
        self._committer = committer
        self._keyed = keyed
        self._stream = stream
        self._options = options
        self._writing = threading.Lock()
        """Held by the thread that writes: taken before anything is taken off the queue."""
        self._shards = committer.shards
        self._may_write = threading.Event()
        """Not set while somebody waits to change the shards: a busy writer would never let go of `_writing`."""
        self._may_write.set()
        self._era = 0
        self._place_anew: Callable[[WriteOps], WriteOps] | None = None
        """What to do about operations that were placed under another era's ring, once there is one."""
        self._delays = options.group_commit_delay_s > 0
        self._commits = committer if keyed is None else keyed
        self._queue = self._empty_queue()
        self._shown_upto, self._seen_upto = shown_upto, Seq(0)
        self._levels = LevelsOfWriter(committer, self._queue, options, stream, high_water, shown_upto)
        self._thread = threading.Thread(target=self._run, name=f"wal-writer-{stream.hex[:8]}", daemon=True)
        self._thread.start()
        _OPEN_HERE.add(self)

    def _empty_queue(self) -> SubmissionQueue:
        return SubmissionQueue(
            bytes_max=self._options.queue_bytes_max,
            group_bytes_max=self._options.group_bytes_max,
            delay_s=self._options.group_commit_delay_s,
        )

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        stream: StreamId,
        shards: Sequence[ShardId],
        epoch: Epoch,
        reservations: SeqReservations | SharedNumbers,
        files: Files | None = None,
        clock: Clock | None = None,
        options: LogOptions | None = None,
        region: RegionId = _ONLY_REGION,
        writer: WriterId = _FIRST_WRITER,
        sessions: SessionLimits | None = None,
        high_water: HighWater | None = None,
    ) -> LogWriter:
        """Take the shards' locks, recover, and begin a new segment on each.

        Args:
            folder: `data/wal/<stream>`; made where it isn't there.
            stream: the stream's identity.
            shards: all shards of this writer; those that lie in the folder already are opened too.
            epoch: greater than that of any writer before.
            reservations: the durable store of reserved numbers, of a stream that this writer owns; or the numbers that it shares with
                other writers of the stream.
            files: the file system.
            clock: for ages and creation times.
            options: sizes and bounds.
            region: of the shards.
            writer: who writes.
            sessions: when sessions of applications are forgotten; None: none are known, and operations with `WriteOps.keys` refused.
            high_water: tells what other machines hold; None: nobody does, and only the level `local` is known.

        Raises:
            AckLevelUnavailable: `options` ask for more than this machine, of one of several writers or without `high_water`.
            ShardLocked: another process writes one of the shards.
            ShardTaken: one of them is another writer's.
            SequenceUnusable: the shared store can't be right for this log.
            CorruptWal, UnexpectedFile, UnsupportedFormat, StaleEpoch: see `recover`; nothing was changed.
            DiskFull: there's no space to recover or to begin a segment; what was readable stays so.
        """
        options = LogOptions() if options is None else options
        check_level(options.acks, high_water, options.reach, shared=isinstance(reservations, SharedNumbers))
        files, clock = files or RealFiles(), clock or SystemClock()
        committer = GroupCommitter.open(
            folder,
            WriterIdentity(stream, region, writer, epoch),
            shards,
            numbers=reservations if isinstance(reservations, SharedNumbers) else BlockNumbers(reservations, epoch),
            files=files,
            clock=clock,
            options=options,
            hides=options.acks != LOCAL,
        )
        keyed = None
        if sessions is not None and not isinstance(reservations, SharedNumbers):
            try:
                keyed = KeyedCommits.open(
                    committer, files, clock, folder, stream, sessions, every_s=options.segment_age_s
                )
            except BaseException:
                committer.abandon()
                raise
        readable = LogExtent(files, folder, without_mark=False, on_damage=None)
        return cls(committer, stream, options, keyed, high_water, lambda: readable.marks()[1])

    def submit(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Future[Ack]:
        """Queue for the next commit group; see `ports.LogAppender.submit`."""
        self._check_shards(ops)
        waiting = FutureWaiter(ops, _held_bytes(ops))
        if acks is not None or self._levels.is_asked:
            waiting = self._levels.raised(PromisedAtLevel(ops, waiting.size_bytes), acks, deadline_s) or waiting
        self._queue.put(waiting, deadline_s)
        return waiting.future

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """Append and return once durable; raises what `submit`'s future would end with."""
        self._check_shards(ops)
        if acks is not None or self._levels.is_asked:
            raised = self._levels.raised(BlockedAtLevel(ops, _held_bytes(ops)), acks, deadline_s)
            if raised is not None:
                self._queue.put(raised, deadline_s)
                return raised.wait()
        if not self._delays and self._may_write.is_set() and self._writing.acquire(blocking=False):
            try:
                if self._queue.is_idle() and self._committer.failure is None:
                    return self._write_alone(ops)
            finally:
                self._writing.release()
        waiting = ThreadWaiter(ops, _held_bytes(ops))
        self._queue.put(waiting, deadline_s)
        return waiting.wait()

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """Append and return once durable; see `ports.LogAppender.append_async`."""
        self._check_shards(ops)
        waiting = TaskWaiter(ops, _held_bytes(ops), asyncio.get_running_loop())
        if acks is not None or self._levels.is_asked:
            raised = AwaitedAtLevel(ops, waiting.size_bytes, waiting.loop)
            waiting = self._levels.raised(raised, acks, deadline_s) or waiting
        if not self._queue.offer(waiting):
            await self._queue.put_async(waiting, deadline_s)
        return await waiting.future

    def reached(self) -> Mapping[SourceId, Lsn]:
        """For each source, the commit end LSN up to which the durable log has everything."""
        return self._committer.reached

    def settled(self) -> Future[Ack] | None:
        """None where all that is durable is held as the stream's level says; else a future that ends when it is. See `ports.LogAppender.settled`."""
        shown = self._committer.shown
        return self.submit(NOTHING) if shown is not None and shown.hides else None

    def is_written(self) -> bool:
        """Whether all that was submitted is durable here, or failed; see `ports.LogAppender.is_written`."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            return self._queue.is_empty()
        finally:
            self._writing.release()

    def persisted_upto(self) -> Seq:
        """Every number up to it is durable or will never be."""
        return self._committer.persisted_upto

    def shown_upto(self) -> Seq:
        """The greatest number known up to which any reader may read; among several writers it is the slowest one's position."""
        if not self._committer.is_shared:
            return self._committer.persisted_upto
        # Others' marks, readable or not, refuse no append that is durable.
        with suppress(MillstreamError, OSError):
            self._seen_upto = max(self._seen_upto, self._shown_upto())
        return self._seen_upto

    def token(self) -> StreamToken:
        """The newest consistent cut."""
        return StreamToken.scalar(self._stream, self._committer.persisted_upto)

    def durable_offset(self, shard: ShardId) -> Offset:
        """Exclusive end of what is durable on a shard."""
        return self._committer.durable_offset(shard)

    def hear(self, time: HybridTime, *, name: str = "") -> None:
        """Take in another region's time: what is appended from here on is later, whatever this machine's clock says.

        Args:
            time: of what has come from there.
            name: the other's, for the error.

        Raises:
            ClockSkew: its clock is too far ahead of this one; nothing was taken in.
        """
        self._committer.times.hear(time, name)

    def copy_sessions(self) -> None:
        """Copy what is known of applications' writes out of the log, where that isn't much: retention keeps nothing for it then. Any thread."""
        if self._keyed is not None:
            with self._writing:
                self._keyed.copy_for_retention()

    def follow(self) -> LedgerView | None:
        """Of a writer among several: tell the others where it stands, and let readers pass what others were given while it is idle.

        To be called several times a lease. While a group is being written, however long that takes, it gives a sign of life and follows nobody.

        Returns:
            Where all writers stand; None where this is the only one.

        Raises:
            StaleEpoch: another one has taken over; nothing more is taken.
            CatalogError, CatalogBusy: the store can't be asked now.
        """
        if not self._writing.acquire(blocking=False):
            return self._committer.sign()
        try:
            return self._committer.follow()
        finally:
            self._writing.release()

    def reshard(
        self,
        shards: Sequence[ShardId],
        *,
        era: int,
        place_anew: Callable[[WriteOps], WriteOps],
        record: Callable[[Seq], None],
    ) -> Seq:
        """Begin an era, in which rows are placed by another ring, at a cut between two commit groups.

        What is in front of the cut was placed by the ring before. What waits, or comes later though it was placed earlier, is placed anew
        before it is written; so nobody has to be kept waiting for longer than a group takes.

        Args:
            shards: what the era's ring has; those that the log hasn't are begun.
            era: its number, as entries that were placed in it bear it (`TableRows.era`).
            place_anew: called with operations of other eras, by the thread that writes.
            record: called with the cut, while nothing is written: the era is in force when it returns, and isn't when it raises.

        Returns:
            The cut: what has numbers up to it lies where the ring before put it.

        Raises:
            DiskFull, ShardLocked, AppendOutcomeUnknown, WriterClosed: the shards couldn't be begun; nothing was recorded.
            Whatever `record` raises; then the era before is still in force.
        """
        self._may_write.clear()
        try:
            with self._writing:
                self._committer.add_shards(shards)
                self._shards = self._committer.shards
                cut = self._committer.persisted_upto
                record(cut)
                self._era, self._place_anew = era, place_anew
                return cut
        finally:
            self._may_write.set()
            if self._committer.failure is not None:
                self._refuse_the_rest()

    def give_up(self, cause: MillstreamError) -> None:
        """Take nothing more: what would be written next can't be known. For `record` of `reshard`; recovery goes on from what is durable."""
        if self._committer.failure is None:
            self._committer.failure = WriterClosed(f"the log's writer gave up: {cause.message}")
            self._committer.failure.__cause__ = cause

    def _in_force(self, ops: Submitted) -> Submitted:
        """Operations as the era in force places them."""
        if self._place_anew is None or not isinstance(ops, WriteOps):
            return ops
        if all(table.era in {0, self._era} for table in ops.tables):
            return ops
        return self._place_anew(ops)

    def shards(self) -> frozenset[ShardId]:
        """The shards of this writer."""
        return self._shards

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
            self._queue.queued_bytes,
            counts.recovered_cut_bytes,
            str(self._options.acks),
            self._levels.awaited(),
        )

    def ends_as(self, why: str, *, goes_on: bool = False) -> None:
        """Say, before `close`, why it comes: who waits for other machines then, and isn't waited for any longer, is told.

        Args:
            why: as the end of a sentence.
            goes_on: another process of this machine writes the log from here on: whoever has a deadline goes on waiting until that, and `close` waits for nobody.
        """
        self._levels.ends_as(why, goes_on=goes_on)

    def close(self) -> None:
        """Write what waits, seal, and give up the locks. After a failure the files are left as they are."""
        self._queue.end()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave_to_parent(self) -> None:
        """In a forked child: the files are the parent's, and no lock may live on here that the parent has given up."""
        self._committer.leave_to_parent()
        # Threads that aren't here may have held its locks.
        self._queue, self._writing, self._may_write = self._empty_queue(), threading.Lock(), threading.Event()
        self._may_write.set()
        self._queue.abandon(self._committer.failure)

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """What the durable log has of an application's session, once that is held as the stream's level says.

        Raises:
            SessionsNeedOneWriter: this writer knows none.
            NotEnoughReplicas: the level doesn't hold for it, and didn't until the deadline: what wasn't acknowledged would pass for written.
        """
        if self._keyed is None:
            raise _no_sessions()
        facts = self._keyed.facts(name)
        if self._committer.shown is not None and self._committer.shown.hides:
            self.append(NOTHING, deadline_s=deadline_s)
        return facts

    def _check_shards(self, ops: Submitted) -> None:
        if self._keyed is None and isinstance(ops, WriteOps) and ops.keys is not None:
            raise _no_sessions()
        known = ops.shard in self._shards if isinstance(ops, AppendOp) else shards_of(ops) <= self._shards
        if not known:
            raise AssertionError(f"shards {sorted(shards_of(ops) - self._shards)} aren't this writer's")

    # --- writing: for the holder of `_writing` ---------------------------------------------------------------------

    def _run(self) -> None:
        """The writer's thread."""
        try:
            while self._queue.wait(self._options.segment_age_s):
                self._may_write.wait()
                with self._writing:
                    self._write()
            with self._writing:
                self._levels.close()
                if self._keyed is not None:
                    self._keyed.close()
                self._committer.close()
        finally:
            self._refuse_the_rest()

    def _write(self) -> None:
        """Commit what waits, up to a group; roll the segments. What was cancelled meanwhile isn't written."""
        group = [waiting for waiting in self._queue.take() if waiting.begin()]
        if group:
            self._commit(group)
        self._after_group()

    def _write_alone(self, ops: Submitted) -> Ack:
        try:
            if not all(follow([ops], self._committer.reached)):
                raise _out_of_order()
            written = self._in_force(ops)
            (ack,) = self._commits.commit([written])
            return _ack_of(ack, ops, written)
        finally:
            self._after_group()

    def _after_group(self) -> None:
        if self._committer.failure is None:
            self._committer.roll()
            if self._keyed is not None:
                self._keyed.after_group()
        if self._committer.failure is not None:
            self._refuse_the_rest()

    def _commit(self, group: Sequence[Waiting]) -> None:
        """One commit group. Every submission is answered, whatever happens."""
        fits = follow([waiting.ops for waiting in group], self._committer.reached)
        if not all(fits):
            answer((waiting, _out_of_order()) for waiting, fit in zip(group, fits, strict=True) if not fit)
            group = [waiting for waiting, fit in zip(group, fits, strict=True) if fit]
            if not group:
                return
        try:
            written = [self._in_force(waiting.ops) for waiting in group]
            acks = self._commits.commit(written)
        except InvalidValue as error:
            self._commit_without_invalid(group, error)
        except Exception as error:  # noqa: BLE001 (each caller gets it, whatever it is)
            answer((waiting, error) for waiting in group)
        else:
            if self._place_anew is not None:
                acks = [_ack_of(ack, was.ops, ops) for ack, was, ops in zip(acks, group, written, strict=True)]
            self._levels.tell(group, acks)

    def _commit_without_invalid(self, group: Sequence[Waiting], error: InvalidValue) -> None:
        """Values of somebody's aren't of their columns' types, and nothing was written: the others are."""
        fine, refused = [], []
        for waiting in group:
            try:
                if isinstance(waiting.ops, AppendOp):
                    columns_of([waiting.ops])
                fine.append(waiting)
            except InvalidValue as own:
                refused.append((waiting, own))
        answer(refused or [(waiting, error) for waiting in group])
        if refused and fine:
            self._commit(fine)

    def _refuse_the_rest(self) -> None:
        """The writer takes no more: nothing of what still waits was written."""
        failure = self._committer.failure
        left = [waiting for waiting in self._queue.abandon(failure) if waiting.begin()]
        error = WriterClosed("the log's writer failed before this was written; nothing of it was")
        error.__cause__ = failure
        answer((waiting, error) for waiting in left)


def _ack_of(ack: Ack, submitted: Submitted, written: Submitted) -> Ack:
    """The ack of what was written, for who has submitted it."""
    return ack if written is submitted or not isinstance(written, WriteOps) else replace(ack, placed=written)


def _no_sessions() -> SessionsNeedOneWriter:
    return SessionsNeedOneWriter("this writer is one of several, and knows no sessions and keys; nothing was appended")


def _out_of_order() -> OutOfOrder:
    return OutOfOrder("an append that this one follows failed; nothing of this one was appended either")


def _held_bytes(ops: Submitted) -> int:
    """Memory that a submission holds while it waits. The rows of a spilled one aren't there."""
    return _SUBMISSION_BYTES if isinstance(ops, SpilledOp) else _SUBMISSION_BYTES + ops.size_bytes


def _leave_all_to_parent() -> None:
    for log in list(_OPEN_HERE):
        log._leave_to_parent()  # noqa: SLF001 (its own module)
    _OPEN_HERE.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
