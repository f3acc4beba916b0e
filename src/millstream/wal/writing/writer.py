"""The writer of a stream's shards: group commit without a timer.

Callers queue. One thread takes what queued during the last fsync as the next commit group, and
starts it as soon as that fsync returns. If a caller of `append` finds an empty queue and an idle
writer, it writes its own group: that saves two thread switches and moving the rows from one core's
cache to another's.

The writer is a stack. `group_commit` makes groups durable, in order; `deduplicated_commits` has the
same calls and leaves out the writes that the log has. Above them are this module's queue
(`group_commit_queue`) and thread; `awaiting_acks` answers the callers (`waiters`) of a durable group, or
lets them wait for other machines. Durable before readable, durable before acknowledged, always.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from millstream.closing import Closing
from millstream.crdt.hlc import HLC
from millstream.errors import LogError, MillstreamError, SessionsNeedOneWriter, WriterClosed
from millstream.model.ids import Epoch, RegionId, ShardId, SourceId, StreamId, WriterId
from millstream.model.operations import Ack, SpilledOp, Submitted, WriteOps
from millstream.model.positions import Lsn, Offset, Seq, StreamToken
from millstream.model.replication import LOCAL, AckLevel
from millstream.model.writes import SessionFacts, WriteId
from millstream.ports import Clock, Files, HighWater, SeqReservations
from millstream.protocol.deduplication.known_writes import SessionLimits
from millstream.protocol.sequencer import LedgerView
from millstream.wal.files import RealFiles, SystemClock, error_of_os
from millstream.wal.readable_range import ReadableRange
from millstream.wal.writing.awaiting_acks import NOTHING, AckLevels, Awaiting, check_level
from millstream.wal.writing.deduplicated_commits import DeduplicatedCommits
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.group_commit_queue import GroupCommitQueue
from millstream.wal.writing.number_sources import BlockNumbers, SharedNumbers
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.own_shards import WriterIdentity
from millstream.wal.writing.submissions import follow, shards_of
from millstream.wal.writing.waiters import FutureWaiter, TaskWaiter, ThreadWaiter, Waiting, answer
from millstream.workers import Worker

__all__ = ["LogOptions", "LogWriter", "WriterStats"]

_ONLY_REGION: Final = RegionId(0)
_FIRST_WRITER: Final = WriterId(1)
_SUBMISSION_BYTES: Final = 1024
"""Bytes that a submission holds apart from its rows: the submission, its result, and its waiter."""
_OPEN_HERE: Final[weakref.WeakSet[LogWriter]] = weakref.WeakSet()
"""The open writers of this process. A forked child has none of them."""


@dataclass(frozen=True, slots=True)
class WriterStats:
    """Counts since the writer was opened."""

    groups: int
    operations: int
    records: int
    bytes_written: int
    queued_bytes: int
    recovered_cut_bytes: int
    """Bytes that recovery cut off at the open."""
    acks: str
    """The stream's acknowledgement level."""
    awaited: Awaiting
    """Submissions that are durable here and wait for other machines before they are acknowledged."""


class LogWriter(Closing):
    """Appends to all shards of one writer; see `ports.LogAppender`. `open` makes one.

    Concurrency: any thread may call any method. In a forked child the copy is closed
    (`WriterClosed`); the parent keeps writing.
    """

    def __init__(
        self,
        committer: GroupCommitter,
        stream: StreamId,
        options: LogOptions,
        keyed: DeduplicatedCommits | None,
        high_water: HighWater | None,
        shown_upto: Callable[[], Seq],
    ) -> None:
        self._committer = committer
        self._keyed = keyed
        self._stream = stream
        self._options = options
        self._writing = threading.Lock()
        """Held by the thread that writes, and acquired before it takes anything off the queue."""
        self._shards = committer.shards
        self._may_write = threading.Event()
        """Cleared while a caller waits between two groups: a busy writer takes `_writing` again before the caller can."""
        self._may_write.set()
        self._visiting = threading.Lock()
        """Held by the caller that has cleared `_may_write`."""
        self._era = 0
        self._place_anew: Callable[[WriteOps], WriteOps] | None = None
        """Places operations again that were placed under another era's ring; None before the first era."""
        self._delays = options.group_commit_delay_s > 0
        self._commits = committer if keyed is None else keyed
        self._queue = self._empty_queue()
        self._shown_upto, self._seen_upto = shown_upto, Seq(0)
        self._levels = AckLevels(committer, self._queue, options, stream, high_water)
        try:
            self._worker = Worker(f"wal-writer-{stream.hex[:8]}", self._run).start()
        except BaseException:
            self._levels.close()
            raise
        _OPEN_HERE.add(self)

    def _empty_queue(self) -> GroupCommitQueue:
        return GroupCommitQueue(
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
            folder: `data/wal/<stream>`; made if it doesn't exist.
            shards: all shards of this writer; shards already in the folder are opened too.
            epoch: greater than that of any earlier writer.
            reservations: the durable store of reserved numbers, if this writer owns the stream; or
                the numbers that it shares with other writers of the stream.
            clock: for ages and creation times.
            region: the region of the shards.
            writer: this writer's id.
            sessions: when application sessions expire; None: no sessions, and operations with
                `WriteOps.is_keyed` are refused.
            high_water: reports what other machines hold; None: only the level `local` is available.

        Raises:
            ReplicationError (`ack_level_unavailable`): `options` ask for more than this machine, but there are several
                writers or no `high_water`.
            ShardLocked: another process writes one of the shards.
            LogError (`shard_taken`): one of the shards belongs to another writer.
            SequencingError (`sequence_unusable`): the shared store can't be right for this log.
            CorruptWal, LogError (`unexpected_file`), UnsupportedFormat, StaleEpoch: see `recover`; nothing was
                changed.
            DiskFull: there's no space to recover or to begin a segment; what was readable stays so.
            MillstreamError (`io_failed`, `home_unwritable`, `system_limit`): the disk fails or refuses this user, or
                no thread could be started.
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
        try:
            keyed = None
            if sessions is not None and not isinstance(reservations, SharedNumbers):
                keyed = DeduplicatedCommits.open(
                    committer, files, clock, folder, stream, sessions, every_s=options.segment_age_s
                )
            readable = ReadableRange(files, folder, without_mark=False, on_damage=None)
            return cls(committer, stream, options, keyed, high_water, lambda: readable.marks()[1])
        except BaseException as error:
            committer.abandon()
            if isinstance(error, OSError):
                raise error_of_os(error) from error
            raise

    def submit(
        self,
        ops: Submitted,
        *,
        deadline_s: float | None = None,
        acks: AckLevel | None = None,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Future[Ack]:
        """Queue for the next commit group; see `ports.LogAppender.submit`."""
        self._check_shards(ops)
        waiting = FutureWaiter(ops, _held_bytes(ops))
        self._levels.require(waiting, acks, deadline_s)
        self._queue.put(waiting, deadline_s, gives_up)
        return waiting.future

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """Append and return once durable; raises the error that `submit`'s future would end with."""
        self._check_shards(ops)
        is_awaited = self._levels.awaits(acks)
        if not is_awaited and not self._delays and self._may_write.is_set():
            has_lock: list[bool] = []
            try:
                # In one call: Ctrl-C between an acquisition and its note would leave the lock held for ever.
                has_lock.extend(map(self._writing.acquire, (False,)))
                if True in has_lock and self._queue.is_idle() and self._committer.failure is None:
                    return self._write_alone(ops)
            finally:
                if True in has_lock:
                    self._writing.release()
        waiting = ThreadWaiter(ops, _held_bytes(ops))
        self._levels.require(waiting, acks, deadline_s)
        self._queue.put(waiting, deadline_s)
        return waiting.wait()

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """Append and return once durable; see `ports.LogAppender.append_async`."""
        self._check_shards(ops)
        waiting = TaskWaiter(ops, _held_bytes(ops), asyncio.get_running_loop())
        self._levels.require(waiting, acks, deadline_s)
        if not self._queue.offer(waiting):
            await self._queue.put_async(waiting, deadline_s)
        return await waiting.future

    def reached(self) -> Mapping[SourceId, Lsn]:
        """Return, for each source, the commit end LSN up to which the durable log has everything."""
        return self._committer.reached

    def settled(self) -> Future[Ack] | None:
        """Return a future that ends once everything durable is held as the stream's level requires.

        None if it already is. See `ports.LogAppender.settled`.
        """
        shown = self._committer.shown
        if shown is None or not shown.hides:
            return None
        waiting = FutureWaiter(NOTHING, _held_bytes(NOTHING))
        self._levels.require(waiting, None, None)
        self._queue.enter(waiting)
        return waiting.future

    def is_written(self) -> bool:
        """Return whether everything submitted is durable here or has failed; see `ports.LogAppender.is_written`."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            return self._queue.is_empty()
        finally:
            self._writing.release()

    def persisted_upto(self) -> Seq:
        """Return the number up to which every number is durable or never will be."""
        return self._committer.persisted_upto

    def shown_upto(self) -> Seq:
        """Return the number up to which any reader may read; with several writers, the slowest one's position."""
        if not self._committer.is_shared:
            return self._committer.persisted_upto
        # If other writers' marks can't be read, the append still succeeds: it is durable.
        with suppress(MillstreamError, OSError):
            self._seen_upto = max(self._seen_upto, self._shown_upto())
        return self._seen_upto

    def token(self) -> StreamToken:
        """Return the newest consistent cut."""
        return StreamToken.scalar(self._stream, self._committer.persisted_upto)

    def durable_offset(self, shard: ShardId) -> Offset:
        """Return the exclusive end of what is durable on a shard."""
        return self._committer.durable_offset(shard)

    def hear(self, time: HLC, *, name: str = "") -> None:
        """Observe another region's time: later appends get a later time, whatever this machine's clock shows.

        Args:
            time: the time received from that region.
            name: the region's name, for the error.

        Raises:
            ReplicationError (`clock_skew`): that region's clock is too far ahead of this one; the time was ignored.
        """
        self._committer.times.hear(time, name)

    def hear_before_groups(self, ask: Callable[[], None]) -> None:
        """Set a function that observes other regions' times by `hear`.

        The thread that writes calls it before it takes each commit group's time. It raises nothing.
        """
        self._committer.times.before = ask

    def place_in(self, region: RegionId) -> object:
        """Return where the received part of another region's log ends, as `hear_writes` noted it; None if none was."""
        return None if self._keyed is None else self._keyed.others.place(region)

    def hear_writes(
        self,
        region: RegionId,
        writes: Iterable[tuple[WriteId, int, Ack, int]],
        place: object,
        *,
        is_anew: bool = False,
        is_cut: bool = False,
    ) -> None:
        """Note writes that another region's log has, so that their repetitions here are answered as duplicates.

        Any thread may call it. Nothing is noted if this writer keeps no sessions.

        Args:
            writes: see `OtherRegions.note`.
            place: see there.
            is_anew: whether its log is read from the beginning: what was noted of it before is forgotten.
            is_cut: see `OtherRegions.note`.
        """
        if self._keyed is not None:
            with self._between_groups():
                if is_anew:
                    self._keyed.others.forget(region)
                self._keyed.others.note(region, writes, place, is_cut=is_cut)

    def copy_sessions(self) -> None:
        """Copy the session state out of the log if it is small, so that retention keeps no segments for it.

        Any thread may call it.
        """
        if self._keyed is not None:
            with self._between_groups():
                self._keyed.copy_for_retention()

    @contextmanager
    def _between_groups(self) -> Iterator[None]:
        """Hold `_writing` from the end of the present group on, however much is queued."""
        with self._visiting:
            self._may_write.clear()
            try:
                with self._writing:
                    yield
            finally:
                self._may_write.set()

    def follow(self) -> LedgerView | None:
        """Report this writer's position to the other writers; while it is idle, let readers pass numbers given to them.

        Call it several times a lease. While a group is being written, it only renews the lease and
        doesn't follow the others.

        Returns:
            The positions of all writers; None if this is the only one.

        Raises:
            StaleEpoch: another incarnation has taken over; this writer takes nothing more.
            CatalogError: the store can't be asked now.
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
        """Begin an era, in which another ring places the rows, at a cut between two commit groups.

        The previous ring placed everything before the cut. The writer places again whatever is
        still queued, or arrives later with an older placement, before it writes it. So no caller
        waits longer than one group takes.

        Args:
            shards: the shards of the era's ring; those missing from the log are begun.
            era: its number, as in the entries placed under it (`TableRows.era`).
            place_anew: called with operations of other eras, by the thread that writes.
            record: called with the cut, while nothing is written: the era is in force if it
                returns, and isn't if it raises.

        Returns:
            The cut: rows with numbers up to it lie where the previous ring placed them.

        Raises:
            DiskFull, ShardLocked, AppendOutcomeUnknown, WriterClosed: the shards couldn't be begun;
                nothing was recorded.
            Any error of `record`; the previous era is then still in force.
        """
        try:
            with self._between_groups():
                self._committer.add_shards(shards)
                self._shards = self._committer.shards
                cut = self._committer.persisted_upto
                record(cut)
                self._era, self._place_anew = era, place_anew
                return cut
        finally:
            if self._committer.failure is not None:
                self._refuse_the_rest()

    def give_up(self, cause: MillstreamError) -> None:
        """Take nothing more, because the right placement of the next rows is unknown.

        For `record` of `reshard`. Recovery continues from what is durable.
        """
        if self._committer.failure is None:
            self._committer.failure = WriterClosed(f"the log's writer stopped: {cause.message}")
            self._committer.failure.__cause__ = cause

    def _in_force(self, ops: Submitted) -> Submitted:
        """Return the operations as the era in force places them."""
        if self._place_anew is None or not isinstance(ops, WriteOps):
            return ops
        if all(table.era in {0, self._era} for table in ops.tables):
            return ops
        return self._place_anew(ops)

    def shards(self) -> frozenset[ShardId]:
        """Return the shards of this writer."""
        return self._shards

    def failure(self) -> MillstreamError | None:
        """Reason why the writer takes no more; None while it does, and after a plain `close`."""
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

    def ends_as(self, why: str) -> None:
        """Set, before `close`, the reason given to callers that still wait for other machines: a sentence's end."""
        self._levels.ends_as = why

    def close(self) -> None:
        """Write what is queued, seal, and release the locks. After a failure the files are left as they are."""
        self._queue.end()
        self._worker.join()

    def _leave_to_parent(self) -> None:
        """Detach a forked child.

        The files belong to the parent, and the child must not keep a lock that the parent has
        released.
        """
        self._committer.leave_to_parent()
        # Threads that don't exist in the child may have held the locks.
        self._queue, self._writing, self._may_write = self._empty_queue(), threading.Lock(), threading.Event()
        self._may_write.set()
        self._visiting = threading.Lock()
        self._queue.abandon(self._committer.failure)

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """Return the durable log's state of an application's session, once it is held as the stream's level requires.

        Raises:
            SessionsNeedOneWriter: this writer keeps no sessions.
            NotEnoughReplicas: the level wasn't reached by the deadline: unacknowledged writes would
                look written.
        """
        if self._keyed is None:
            raise _no_sessions()
        facts = self._keyed.facts(name)
        if self._committer.shown is not None and self._committer.shown.hides:
            self.append(NOTHING, deadline_s=deadline_s)
        return facts

    def _check_shards(self, ops: Submitted) -> None:
        if self._keyed is None and isinstance(ops, WriteOps) and ops.is_keyed:
            raise _no_sessions()
        if unknown := shards_of(ops) - self._shards:
            raise AssertionError(f"shards {sorted(unknown)} aren't this writer's")

    # --- writing: for the holder of `_writing` ---------------------------------------------------------------------

    def _run(self) -> None:
        """Run the writer's thread."""
        try:
            while self._queue.wait(self._options.segment_age_s):
                self._may_write.wait()
                with self._writing:
                    self._write()
            with self._writing:
                self._levels.close()
                self._commits.close()
        finally:
            self._refuse_the_rest()

    def _write(self) -> None:
        """Commit what is queued, up to a group's bound, and roll the segments.

        Submissions cancelled by then aren't written.
        """
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
        """Do what is due between two groups; a failure there is the writer's, not that of a caller whose group is durable."""
        try:
            self._commits.after_group()
        except Exception as error:  # noqa: BLE001 (the next caller gets it, whatever it is)
            self._committer.poison("the work between two groups failed", error)
        if self._committer.failure is not None:
            self._refuse_the_rest()

    def _commit(self, group: Sequence[Waiting]) -> None:
        """Commit one group. Every submission is answered, whatever happens."""
        fits = follow([waiting.ops for waiting in group], self._committer.reached)
        if not all(fits):
            answer((waiting, _out_of_order()) for waiting, fit in zip(group, fits, strict=True) if not fit)
            group = [waiting for waiting, fit in zip(group, fits, strict=True) if fit]
            if not group:
                return
        try:
            written = [self._in_force(waiting.ops) for waiting in group]
            acks = self._commits.commit(written)
        except Exception as error:  # noqa: BLE001 (each caller gets it, whatever it is)
            answer((waiting, error) for waiting in group)
        else:
            if self._place_anew is not None:
                acks = [_ack_of(ack, was.ops, ops) for ack, was, ops in zip(acks, group, written, strict=True)]
            self._levels.acknowledge(group, acks)

    def _refuse_the_rest(self) -> None:
        """Refuse what is still queued: the writer takes no more, and none of it was written."""
        failure = self._committer.failure
        left = [waiting for waiting in self._queue.abandon(failure) if waiting.begin()]
        error = WriterClosed("the log's writer failed before this append; nothing of it was written")
        error.__cause__ = failure
        answer((waiting, error) for waiting in left)


def _ack_of(ack: Ack, submitted: Submitted, written: Submitted) -> Ack:
    """Return the ack of what was written, for the caller that submitted it."""
    return ack if written is submitted or not isinstance(written, WriteOps) else replace(ack, placed=written)


def _no_sessions() -> SessionsNeedOneWriter:
    return SessionsNeedOneWriter(
        "this writer is one of several, which support neither sessions nor idempotency keys; nothing was appended"
    )


def _out_of_order() -> LogError:
    return LogError(
        "an append that this one depends on failed, so nothing of this one was appended", code="out_of_order"
    )


def _held_bytes(ops: Submitted) -> int:
    """Return the bytes that a submission holds in memory while it waits. A spilled one's rows aren't in memory."""
    return _SUBMISSION_BYTES if isinstance(ops, SpilledOp) else _SUBMISSION_BYTES + ops.size_bytes


def _leave_all_to_parent() -> None:
    for log in list(_OPEN_HERE):
        log._leave_to_parent()  # noqa: SLF001 (its own module)
    _OPEN_HERE.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
