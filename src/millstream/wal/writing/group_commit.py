"""Commit groups: from submissions to durable frames on all shards of a writer, and what happens when the disk fails.

One thread, `writer`'s, calls everything here; fsyncs of several shards run on threads of their own. Which waiting
submissions are the next group is decided by `group_commit_queue`. One group at a time is numbered, written as one run of
frames per shard, fsynced, and shown by the marks. Only then are its callers answered.

When the disk fails:

- No space, before any fsync: what was written is cut back durably, the callers get `DiskFull`, the writer goes on.
- After any other failed write, and every failed fsync, the writer is *poisoned*. The group's outcome is unknown,
  nothing is retried on the same files, and only recovery, by a new writer, decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

from millstream import failpoints
from millstream.codec.log_segment import NO_HASH
from millstream.errors import (
    AppendOutcomeUnknown,
    CatalogError,
    DiskFull,
    MillstreamError,
    ShardLocked,
    StaleEpoch,
    WriterClosed,
)
from millstream.model.ids import GroupNumber, ShardId, SourceId, TableId
from millstream.model.marks import DurableMark
from millstream.model.operations import Ack, SpilledOp, Submitted, WriteOps
from millstream.model.positions import Lsn, Offset, Seq, SeqRange
from millstream.ports import Clock, Files
from millstream.protocol.sequencer import LedgerView
from millstream.wal.disk_space import NO_SPACE, check_disk, check_space, keep_spare
from millstream.wal.durable_mark import MarkFile
from millstream.wal.files import error_of_os
from millstream.wal.mending.repair import set_tail_aside
from millstream.wal.missing_log import missing_log
from millstream.wal.shard_locks import check_not_gone, folder_lock, greatest_known, holds_mark, lock_shards, own_shards
from millstream.wal.startup_progress import StartupProgress
from millstream.wal.writing.hybrid_times import GroupTimes
from millstream.wal.writing.number_sources import GroupNumbers
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.own_shards import OwnShard, WriterIdentity, begin_shards, continue_shards, next_header
from millstream.wal.writing.record_numbering import FramePlan, plan_chunk, plan_group
from millstream.wal.writing.recover import Recovered, recover
from millstream.wal.writing.segment import GroupFacts, OpenSegment, WriteFailed
from millstream.wal.writing.submissions import acks_of, shards_of
from millstream.wal.writing.visibility import ShownMarks, show_all
from millstream.wal.writing.writer_metrics import CommitCounts

_Found = TypeVar("_Found")


class GroupCommitter:
    """The shards of one writer. `open` makes one; one thread uses it (any thread may read positions)."""

    def __init__(
        self,
        folder: str,
        files: Files,
        clock: Clock,
        options: LogOptions,
        identity: WriterIdentity,
        shards: dict[ShardId, OwnShard],
        recovered: Recovered,
        numbers: GroupNumbers,
        *,
        side_by_side: bool,
    ) -> None:
        self._folder = folder
        self._files = files
        self._clock = clock
        self._options = options
        self._identity = identity
        self._shards = shards
        self._numbers = numbers
        self._has_spares = True
        """Whether the next recovery has all the space that it may need."""
        self._is_settled = False
        self.group = recovered.last_group
        """Last durable group."""
        self.shown: ShownMarks | None = None
        """Marks that readers go by, if they may see only what other machines hold too."""
        # A joining writer's first marks show its position at once: the other writers' marks already did.
        self._shown = numbers.position if numbers.shared else recovered.shown
        self._shown_elsewhere = numbers.elsewhere
        self.times = GroupTimes(clock, recovered.hybrid_ns)
        self._side_by_side = side_by_side
        self._syncers = ThreadPoolExecutor(len(shards), "wal-sync") if side_by_side and len(shards) > 1 else None
        self.persisted_upto = numbers.position
        """Greatest number up to which every number of this writer is durable or never will be."""
        self.reached: Mapping[SourceId, Lsn] = dict(recovered.reached)
        """For each source, the commit end LSN up to which the durable log has everything."""
        self.failure: MillstreamError | None = None
        """Reason why nothing more is taken; None while the writer works."""
        self.counts = CommitCounts(identity.stream, recovered_cut_bytes=recovered.cut_bytes)

    @classmethod
    def open(
        cls,
        folder: str,
        identity: WriterIdentity,
        shards: Sequence[ShardId],
        *,
        numbers: GroupNumbers,
        files: Files,
        clock: Clock,
        options: LogOptions,
        side_by_side: bool = True,
        hides: bool = False,
    ) -> GroupCommitter:
        """Take the locks, recover, begin a new segment on each shard, and show what is there.

        Args:
            folder: the stream's; made if it doesn't exist.
            shards: all of this writer's; its shards already in the folder are opened too.
            numbers: where the groups' numbers come from.
            clock: for ages and creation times.
            side_by_side: fsync several shards in parallel threads; otherwise in order, for tests that count.
            hides: whether durable records are shown only as `shown` allows; otherwise at once.

        Raises:
            ShardLocked, CorruptWal, LogError (`unexpected_file`), UnsupportedFormat, StaleEpoch, DiskFull: see `LogWriter.open`.
            LogError (`loss_not_accepted`): the writer was forgotten, and its shards are damaged.
        """
        marks: dict[ShardId, MarkFile] = {}
        opened: dict[ShardId, OwnShard] = {}
        try:
            with folder_lock(files, folder, clock, make=True) if numbers.shared else nullcontext():
                shards = own_shards(files, folder, identity.writer, shards, numbers)
                check_not_gone(files, folder, shards, numbers)
                marks = lock_shards(files, folder, shards, seize=numbers.may_seize())
                progress = StartupProgress("the log's recovery", clock, folder)
                read = progress.over(files)
                if numbers.cut_at is not None:
                    set_tail_aside(read, folder, marks, above=numbers.cut_at, now_ns=clock.now_ns())
                recovered = recover(
                    read, folder, stream=identity.stream, region=identity.region, shards=shards, epoch=identity.epoch
                )
                progress.end()
                # If the catalog is older than the log, any writer's mark shows it.
                reserved_to = max(recovered.reserved_to, greatest_known(files, folder) if numbers.shared else Seq(0))
                numbers.begin(reserved_to=reserved_to, persisted_upto=recovered.persisted_upto)
                continue_shards(opened, identity, files, folder, recovered, marks, clock, options.frame_version)
                committer = cls(
                    folder, files, clock, options, identity, opened, recovered, numbers, side_by_side=side_by_side
                )
                committer._has_spares = keep_spare(files, [own.folder for own in opened.values()], options.spare_bytes)
                if hides:
                    empty = {shard: committer._mark(own, Seq(0)) for shard, own in opened.items()}
                    committer.shown = ShownMarks.begin(files, folder, marks, empty, recovered, acks=options.acks)
                committer._move_marks(anchor=True)
                if not hides:
                    show_all(files, folder, marks)
                with suppress(CatalogError):
                    committer.follow()  # the marks stand; if the catalog is away, the first draw reports the position
        except BaseException as error:
            for own in opened.values():
                own.segment.close()
            for mark in marks.values():
                mark.close()
            if isinstance(error, OSError):
                raise error_of_os(error) from error
            raise
        return committer

    @property
    def shards(self) -> frozenset[ShardId]:
        """The shards of this writer."""
        return frozenset(self._shards)

    @property
    def is_shared(self) -> bool:
        """Whether the stream has other writers."""
        return self._numbers.shared

    def durable_offset(self, shard: ShardId) -> Offset:
        """Return the exclusive end of what is durable on a shard."""
        return self._shards[shard].segment.end_offset

    def add_shards(self, shards: Sequence[ShardId]) -> None:
        """Begin more shards: durable, and empty, when it returns. Raises `DiskFull`, and as `commit`."""
        if self.failure is not None:
            raise WriterClosed("the log's writer has failed") from self.failure
        assert not self._numbers.shared, "each of several writers has its own shards from the beginning"
        self.uninterrupted(lambda: self._add_shards([shard for shard in shards if shard not in self._shards]))

    def _add_shards(self, shards: Sequence[ShardId]) -> None:
        if not shards:
            return
        try:
            made, whole = begin_shards(
                self._files,
                self._folder,
                shards,
                header=lambda n: next_header(
                    self._identity, n, Offset(0), NO_HASH, self._clock, self._options.frame_version
                ),
                mark=lambda shard: self._mark(shard, self._shown),
                spare_bytes=self._options.spare_bytes,
            )
            self._shards.update(made)
            if self.shown is not None:
                for shard, own in made.items():
                    self.shown.add(shard, own.mark, self._mark(own, self._shown))
            self._has_spares &= whole
            if self._side_by_side:
                self._syncers = ThreadPoolExecutor(len(self._shards), "wal-sync")
            self._move_marks(anchor=True)
        except OSError as error:
            check_space(error, f"no disk space in {self._folder} for more shards")
            raise self.poison("new shards couldn't be made", error) from error

    def commit(self, submitted: Sequence[Submitted]) -> list[Ack]:
        """Make a commit group durable and readable; return one Ack for each submission.

        Args:
            submitted: in order; a `SpilledOp` stands alone.

        Raises:
            DiskFull: nothing of it is in the log; the next group may succeed.
            CorruptWal (`log_missing`): the log's folder is gone; as `DiskFull`.
            MillstreamError (`io_failed` …): the disk can't tell whether it is; as `DiskFull`.
            ShardLocked: another writer hangs while it holds the folder's lock, and a segment is due; as `DiskFull`.
            AppendOutcomeUnknown: the disk failed, or another writer took over; nothing more is taken.
            WriterClosed: it failed before.
            StaleEpoch: another writer took over earlier; nothing of it is in the log, and nothing more is taken.
        """
        if self.failure is not None:
            raise WriterClosed(
                "the log's writer failed before this append; nothing of it was written"
            ) from self.failure
        return self.uninterrupted(lambda: self._commit(submitted))

    def _commit(self, submitted: Sequence[Submitted]) -> list[Ack]:
        count, reached = sum(ops.row_count for ops in submitted), dict(self.reached)
        for ops in submitted:
            for source, lsn in ops.reached.items():
                reached[source] = max(lsn, reached.get(source, lsn))
        if count == 0:
            self.reached = reached
            return [Ack({}, SeqRange(Seq(self._numbers.newest + 1), 0)) for _ in submitted]
        began_ns = self._clock.monotonic_ns()
        shard_dir = next(iter(self._shards.values())).folder
        try:
            if not self._files.exists(shard_dir):
                raise missing_log(self._folder, self._numbers.newest)
        except OSError as error:
            raise error_of_os(error) from error
        check_disk(self._files, shard_dir, self._options.disk_used_max)
        self._open_segments()
        hybrid_time = self.times.next_ns()  # before the numbers: whatever it waits for, none is in flight
        given = self._allocate(count)
        facts = GroupFacts(
            group=GroupNumber(self.group + 1),
            group_last_seq=given.last,
            epoch=self._identity.epoch,
            region=self._identity.region,
            writer=self._identity.writer,
            reserved_to=self._numbers.reserved_to,
            hybrid_time=hybrid_time,
            reached=reached,
            shards=frozenset(shard for ops in submitted for shard in shards_of(ops)),
            frame_version=self._options.frame_version,
        )
        touched = [self._shards[shard].segment for shard in sorted(facts.shards)]
        starts = {shard: self._shards[shard].segment.end_offset for shard in facts.shards}
        try:
            self._stage(submitted, facts, given.first)
        except Exception as error:
            self._numbers.abort(given)
            self._undo(touched, error)
            raise
        try:
            failpoints.hit("wal.before_fsync")
            self._sync(touched)
            failpoints.hit("wal.after_fsync")
            self._confirm(facts.shards)
            written = self._show(touched, facts, given)
        except Exception as error:
            if self.failure is None:
                raise self.poison("making a group durable failed", error) from error
            raise
        self.counts.add_group(
            operations=sum(1 if isinstance(ops, SpilledOp) else ops.operations.num_rows for ops in submitted),
            records=count,
            bytes_written=written,
            seconds=(self._clock.monotonic_ns() - began_ns) / 1e9,
        )
        return acks_of(submitted, given.first, starts)

    def _confirm(self, touched: frozenset[ShardId]) -> None:
        """Check that what was fsynced belongs to the log: the touched shards' marks are still in place.

        An incarnation that takes over replaces the marks before it reads the log. The lease proves as much by clocks,
        but the store's server may have stepped its clock.
        """
        self._numbers.confirm()
        if self._numbers.shared and not all(
            holds_mark(s.folder, s.mark) for s in map(self._shards.__getitem__, touched)
        ):
            raise StaleEpoch("another incarnation of this writer has taken its shards", epoch=int(self._identity.epoch))

    def after_group(self) -> None:
        """Do what is due between two groups: seal large or old segments. Nothing after a failure."""
        if self.failure is None:
            self.roll()

    def roll(self) -> None:
        """Seal segments that are large or old enough, and begin the next. The next append raises any error."""
        self.uninterrupted(self._roll)

    def _roll(self) -> None:
        now_ns = self._clock.now_ns()
        due = [shard.segment for shard in self._shards.values() if shard.segment.is_full(self._options, now_ns)]
        if due:
            self._seal(due)
            # The next append tries again, or raises the failure.
            with suppress(DiskFull, AppendOutcomeUnknown, ShardLocked, StaleEpoch):
                self._open_segments()
                self._keep_spares()

    def close(self) -> None:
        """Seal segments that hold records, and release the locks. After a failure the files are left as they are."""
        if self.failure is None:
            self._seal([shard.segment for shard in self._shards.values()])
        if self.failure is None and self._numbers.shared:
            self._is_settled = True
            with suppress(OSError):  # then its lease runs out, and the next incarnation recovers its shards
                self._move_marks(anchor=True)
                self._numbers.settle()
        self.abandon()

    def follow(self) -> LedgerView | None:
        """Report this writer's position, and let readers pass numbers given to other writers; None without others.

        Raises:
            StaleEpoch: another incarnation has taken over; nothing more is taken.
            CatalogError: the store can't be asked now; nothing was changed.
        """
        if self.failure is not None:
            return None
        try:
            view = self._numbers.follow()
        except StaleEpoch as error:
            self.failure = error
            raise
        if (self._numbers.position, self._numbers.elsewhere) != (self._shown, self._shown_elsewhere):
            self.persisted_upto = self._numbers.position
            self.uninterrupted(self._show_position)
        return view

    def sign(self) -> LedgerView | None:
        """As `follow`, from a thread other than the one that writes; it only renews the lease."""
        return None if self.failure is not None else self._numbers.sign()

    def _show_position(self) -> None:
        try:
            self._move_marks()
        except OSError as error:
            raise self.poison("the durable mark couldn't be written", error) from error

    def abandon(self) -> None:
        """Release the locks and close the files, as the end of the process would."""
        if self._syncers is not None:
            self._syncers.shutdown()
        self._close_files()

    def leave_to_parent(self) -> None:
        """Disable this copy in a forked child: it writes nothing, and doesn't release locks that the parent holds."""
        self.failure = WriterClosed(
            "this process was forked from the one that opened the log's writer, so it can't use that writer",
            hint="Open the home or the writer after the fork, in the process that appends.",
        )
        self._syncers = self.shown = None  # its threads exist only in the parent, and one of them may hold a lock
        self._close_files()

    def _close_files(self) -> None:
        if self.shown is not None:
            self.shown.close()
        for shard in self._shards.values():
            shard.segment.close()
            shard.mark.close()

    def uninterrupted(self, step: Callable[[], _Found]) -> _Found:
        """Run a step, and poison the writer if Ctrl-C interrupts it: files and counts may then be inconsistent."""
        try:
            return step()
        except Exception:
            raise
        except BaseException as error:
            self.poison("the writing thread was interrupted", error)
            raise

    # --- a group's steps -------------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> SeqRange:
        try:
            return self._numbers.allocate(count)
        except StaleEpoch as error:
            self.failure = error
            raise

    def _stage(self, group: Sequence[WriteOps | SpilledOp], facts: GroupFacts, first_seq: Seq) -> None:
        """Write the group's frames after the last ones of its shards."""
        base = {shard: self._shards[shard].segment.end_offset for shard in facts.shards}
        if isinstance(group[0], SpilledOp):
            assert len(group) == 1
            self._stage_spilled(group[0], facts, first_seq, base)
            return
        plans = plan_group(
            [ops for ops in group if isinstance(ops, WriteOps)],
            first_seq=first_seq,
            base=base,
            frame_bytes_max=self._options.frame_bytes_max,
            whole_rows=facts.frame_version == 1,
        )
        for shard, frames in plans.items():
            self._shards[shard].segment.stage(facts, frames, more=False)

    def _stage_spilled(self, op: SpilledOp, facts: GroupFacts, first_seq: Seq, base: dict[ShardId, Offset]) -> None:
        """Write one large operation chunk by chunk. One chunk per shard waits until it's known whether more follow."""
        next_seq: dict[tuple[ShardId, TableId], Seq] = {}
        number = first_seq
        for key, count in op.counts.items():
            next_seq[key] = number
            number = Seq(number + count)
        ends = {key: Seq(first + op.counts[key]) for key, first in next_seq.items()}
        waiting: dict[ShardId, list[FramePlan]] = {}
        for tables in op.chunks():
            plans = plan_chunk(
                op.operation,
                tables,
                next_seq=next_seq,
                base=base,
                frame_bytes_max=self._options.frame_bytes_max,
                whole_rows=facts.frame_version == 1,
            )
            for shard, frames in plans.items():
                if shard in waiting:
                    self._shards[shard].segment.stage(facts, waiting[shard], more=True)
                waiting[shard] = frames
                base[shard] = Offset(base[shard] + sum(frame.count for frame in frames))
        if next_seq != ends:
            raise AssertionError(f"a spilled operation announced {dict(op.counts)} rows, others came")
        for shard, frames in waiting.items():
            self._shards[shard].segment.stage(facts, frames, more=False)

    def _sync(self, segments: Sequence[OpenSegment]) -> None:
        """Fsync all segments, in parallel if there are threads for it; return when all are durable."""
        try:
            if self._syncers is None or len(segments) == 1:
                for segment in segments:
                    segment.sync()
                return
            outcomes = [self._syncers.submit(segment.sync) for segment in segments]
            for error in [outcome.exception() for outcome in outcomes]:
                if error is not None:
                    raise error
        except OSError as error:
            raise self.poison("an fsync of the log failed", error) from error

    def _show(self, touched: Sequence[OpenSegment], facts: GroupFacts, given: SeqRange) -> int:
        """Show the group to readers: it is durable on all its shards, so it belongs to the log. Return its bytes."""
        written = sum(segment.keep() for segment in touched)
        self.group = facts.group
        self._numbers.finish(given)
        self.persisted_upto = self._numbers.position
        self.reached = facts.reached
        self._show_position()
        return written

    def _undo(self, segments: Sequence[OpenSegment], error: Exception) -> None:
        """Cut back a group that wasn't written whole. Raises if the disk is at fault, or if the cut fails too."""
        if isinstance(error, WriteFailed) and error.cause.errno not in NO_SPACE:
            raise self.poison("a write to the log failed", error.cause) from error.cause
        try:
            for segment in segments:
                segment.cut_back()
        except OSError as second:
            raise self.poison("a failed write to the log couldn't be undone", second) from second
        if isinstance(error, WriteFailed):
            check_space(error.cause, "no disk space for the commit group")

    def poison(self, what: str, error: BaseException) -> AppendOutcomeUnknown:
        """Take nothing more; return the error to raise."""
        why = str(error) or type(error).__name__
        self.failure = AppendOutcomeUnknown(f"{what}: {why}; whether the group is durable is unknown")
        self.failure.__cause__ = error
        return self.failure

    def _move_marks(self, *, anchor: bool = False) -> None:
        """Show what is durable: with several shards, first all positions, then what is complete up to them."""
        if len(self._shards) > 1:
            for shard in self._shards.values():
                shard.mark.move(self._mark(shard, self._shown))
        marks = {number: self._mark(shard, self.persisted_upto) for number, shard in self._shards.items()}
        for number, shard in self._shards.items():
            shard.mark.move(marks[number], anchor=anchor)
        if self.shown is not None:
            self.shown.hide(marks)
        self._shown, self._shown_elsewhere = self.persisted_upto, self._numbers.elsewhere

    def _mark(self, shard: OwnShard, persisted_upto: Seq) -> DurableMark:
        return DurableMark(
            stream=self._identity.stream,
            writer=self._identity.writer,
            epoch=self._identity.epoch,
            base_offset=shard.segment.header.base_offset,
            byte_end=shard.segment.byte_end,
            durable_offset=shard.segment.end_offset,
            group=self.group,
            persisted_upto=persisted_upto,
            reserved_to=self._numbers.reserved_to,
            elsewhere=self._numbers.elsewhere if self._numbers.shared else None,
            is_settled=self._is_settled,
            shards=len(self._shards),
        )

    # --- segments --------------------------------------------------------------------------------------------------

    def _seal(self, segments: Sequence[OpenSegment]) -> None:
        """Seal the segments that hold records. Without space, a segment stays open, to be sealed later."""
        for segment in segments:
            if segment.sealed_hash is not None or not segment.holds_records:
                continue
            try:
                segment.seal()
                self.counts.segments_sealed += 1
            except OSError as error:
                if error.errno not in NO_SPACE:
                    self.poison("sealing a segment failed", error)
                    return
                try:
                    segment.cut_back()
                except OSError as second:
                    self.poison("a failed seal couldn't be undone", second)
                    return

    def _open_segments(self) -> None:
        """Begin segments after sealed ones. Raises `DiskFull`, `AppendOutcomeUnknown`, `ShardLocked`, `StaleEpoch`."""
        if all(shard.segment.sealed_hash is None for shard in self._shards.values()):
            return
        with self._in_own_folder():
            for number, shard in self._shards.items():
                sealed = shard.segment
                if sealed.sealed_hash is None:
                    continue
                header = next_header(
                    self._identity,
                    number,
                    sealed.end_offset,
                    sealed.sealed_hash,
                    self._clock,
                    self._options.frame_version,
                )
                try:
                    shard.segment = OpenSegment.create(self._files, shard.folder, header)
                    sealed.close()
                    self._move_marks()
                except OSError as error:
                    raise self.poison("a new segment couldn't be made", error) from error

    def _keep_spares(self) -> None:
        """Reserve again the space that a full disk had no room for. A spare holds no records."""
        if self._has_spares:
            return
        with suppress(OSError), self._in_own_folder():
            folders = [shard.folder for shard in self._shards.values()]
            self._has_spares = keep_spare(self._files, folders, self._options.spare_bytes)

    @contextmanager
    def _in_own_folder(self) -> Iterator[None]:
        """Guard work done by path: one writer of several at a time, and only while it still holds its shards."""
        if not self._numbers.shared:
            yield
            return
        with folder_lock(self._files, self._folder, self._clock):
            if not all(holds_mark(shard.folder, shard.mark) for shard in self._shards.values()):
                what = f"another incarnation of writer {self._identity.writer} has taken its shards"
                self.failure = StaleEpoch(what, epoch=int(self._identity.epoch))
                raise self.failure
            yield
