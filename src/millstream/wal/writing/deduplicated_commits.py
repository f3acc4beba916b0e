"""Application writes with a session or an idempotency key: appended once, however often they are sent.

This runs with the committer, on the thread that writes. So the state always matches the durable
log, in its order, and a second call of a write that is still being written gets the first call's
outcome. Deduplication needs no extra fsync: the log's operations hold the sessions and keys. A
writer that opens rebuilds the state from the last copy (`session_file`) and the log after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import structlog

from millstream import failpoints
from millstream.codec.log_frame import RecordsFrame
from millstream.codec.log_records import first_seqs
from millstream.errors import CorruptWal, MillstreamError
from millstream.model.ids import ShardId, StreamId
from millstream.model.operations import Ack, Outcome, Submitted, WriteOps, writes_in
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import SessionFacts, WriteId
from millstream.ports import Clock, Files
from millstream.protocol.deduplication.known_writes import SessionLimits, Sessions
from millstream.protocol.deduplication.other_regions import OtherRegions
from millstream.protocol.deduplication.repeats_within_group import GroupLookup
from millstream.wal.reader import StreamReader
from millstream.wal.startup_progress import StartupProgress
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.session_file import read_copy, remove_copy, write_copy
from millstream.workers import Worker

logger = structlog.get_logger("millstream.wal")

COPY_EVERY_BYTES: Final = 64 << 20
"""Least bytes of log between two copies: a writer that opens reads the log after the copy. For a
large copy, four times its size.
"""
COPY_EVERY_S: Final = 3600.0
_LARGE_COPIES: Final = 4
_SMALL_COPY_BYTES: Final = 1 << 20
"""Size in bytes of a copy that is small enough to write again whenever retention waits for it."""


class DeduplicatedCommits:
    """Commit groups of one writer, without the writes that its log already has.

    Used by the thread that writes; any thread may call `facts`.

    Args:
        sessions: the session state of the log.
        clock: the writes' time.
        upto: the last number that the copy in the folder covers; None if there is no copy.
        every_bytes: bytes of log between two copies …
        every_s: … or seconds between them, if a segment was sealed in that time.
        in_background: whether a separate thread writes the copies.
    """

    def __init__(
        self,
        committer: GroupCommitter,
        sessions: Sessions,
        files: Files,
        clock: Clock,
        folder: str,
        stream: StreamId,
        *,
        upto: Seq | None,
        every_bytes: int = COPY_EVERY_BYTES,
        every_s: float = COPY_EVERY_S,
        in_background: bool = True,
    ) -> None:
        self._committer = committer
        self.others: Final = OtherRegions(sessions.limits)
        """The writes of other regions; changed only while nothing is committed."""
        self._sessions = sessions
        self._files = files
        self._clock = clock
        self._folder = folder
        self._stream = stream
        self._upto = upto
        self._every_bytes = every_bytes
        self._every_ns = int(every_s * 1e9)
        self._in_background = in_background
        self._written_at = committer.counts.bytes_written
        """Bytes that had been written when the last copy was made …"""
        self._sealed_at = committer.counts.segments_sealed
        """… the number of segments sealed by then …"""
        self._made_ns = clock.now_ns()
        """… and the time."""
        self._copy_bytes = 0
        self._copying: Worker | None = None
        self._changing = threading.Lock()
        """Held while the state changes, for readers on other threads."""

    @classmethod
    def open(
        cls,
        committer: GroupCommitter,
        files: Files,
        clock: Clock,
        folder: str,
        stream: StreamId,
        limits: SessionLimits,
        *,
        every_bytes: int = COPY_EVERY_BYTES,
        every_s: float = COPY_EVERY_S,
        in_background: bool = True,
    ) -> DeduplicatedCommits:
        """Load the recovered log's session state: the copy, and the operations after it.

        Raises:
            CorruptWal: the copy or the log is damaged.
            UnsupportedFormat: a newer version wrote the copy.
            OSError: the disk fails.
        """
        copy = read_copy(files, folder, stream)
        persisted = committer.persisted_upto
        if copy is not None and copy.upto > persisted:
            logger.warning("sessions: the log was taken back", known_upto=int(copy.upto), log_upto=int(persisted))
            copy = None
            # If the replacement can't be written, this copy would pass for the log's own once the
            # log reaches its number again.
            remove_copy(files, folder)
        try:
            sessions = Sessions(limits) if copy is None else Sessions.restored(copy.state, limits)
        except ValueError as error:
            raise CorruptWal(f"the copy of the sessions in {folder} is invalid: {error}", file=folder) from error
        upto = Seq(0) if copy is None else copy.upto
        progress = StartupProgress("reading the sessions' writes", clock, folder)
        reader = StreamReader(folder, files=progress.over(files), durable=True)
        first = reader.first_seq()
        if upto + 1 < first:
            logger.warning(
                "sessions: retention has dropped writes that they lack", known_upto=int(upto), first=int(first)
            )
        for group in reader.read_groups(max(upto, Seq(first - 1)), persisted):
            for write_id, digest, given, now_us in writes_of(group):
                sessions.note(write_id, digest, given, now_us)
        progress.end()
        if upto + 1 < first:
            sessions.forget_gaps()
        opened = cls(
            committer,
            sessions,
            files,
            clock,
            folder,
            stream,
            upto=None if copy is None else copy.upto,
            every_bytes=every_bytes,
            every_s=every_s,
            in_background=in_background,
        )
        if copy is None or persisted > upto:
            # From here on the copy in the folder records that the log was read to its end.
            opened._copy(beside=False)
        return opened

    # --- committing ------------------------------------------------------------------------------------------------

    def commit(self, submitted: Sequence[Submitted]) -> list[Ack]:
        """Commit as `GroupCommitter.commit` does, but skip the writes that the log already has."""
        if not any(isinstance(ops, WriteOps) and ops.is_keyed for ops in submitted):
            return self._committer.commit(submitted)
        return self._committer.uninterrupted(lambda: self._commit(submitted))

    def _commit(self, submitted: Sequence[Submitted]) -> list[Ack]:
        group = _GroupDeduplication(self._sessions, submitted, self.others)
        left = group.left()
        acks = iter(self._committer.commit(left) if left else ())
        now_us = self._clock.now_ns() // 1000
        try:
            with self._changing:
                return group.settle(acks, now_us, Seq(self._committer.persisted_upto + 1))
        except Exception as error:
            # The group is durable, but this state lacks it. The next writer reads it from the log.
            self._committer.poison("recording the written sessions failed", error)
            raise

    def facts(self, session: str) -> SessionFacts:
        """Return what the durable log has of a session."""
        with self._changing:
            return self.others.facts(session, self._sessions)

    # --- copies ----------------------------------------------------------------------------------------------------

    def after_group(self) -> None:
        """Do the committer's part; then make a copy if enough was written since the last, or if there is none.

        Without a copy, retention keeps nothing for it. If little is written, segments are sealed by
        age, and retention waits for a copy that covers them. So a copy is also made some time after
        a seal.
        """
        self._committer.after_group()
        counts = self._committer.counts
        if self._committer.failure is not None:
            return
        if (
            self._upto is None
            or counts.bytes_written - self._written_at >= max(self._every_bytes, _LARGE_COPIES * self._copy_bytes)
            or (
                counts.segments_sealed != self._sealed_at
                and not 0 <= self._clock.now_ns() - self._made_ns < self._every_ns
            )
        ):
            self._copy(beside=self._in_background)

    def copy_for_retention(self) -> None:
        """Make a copy if retention waits for nothing else; a large copy is made only when due.

        Blocks the writing.
        """
        if (
            self._copy_bytes <= _SMALL_COPY_BYTES
            and self._committer.failure is None
            and self._committer.persisted_upto != self._upto
        ):
            self._copy(beside=self._in_background)

    def close(self) -> None:
        """Make a last copy, then close the committer, which releases the locks."""
        if self._copying is not None:
            self._copying.join()
        if self._committer.failure is None and self._committer.persisted_upto != self._upto:
            self._copy(beside=False)
        self._committer.close()

    def _copy(self, *, beside: bool) -> None:
        if self._copying is not None and self._copying.is_alive:
            return
        upto = self._committer.persisted_upto
        self._written_at, self._sealed_at = self._committer.counts.bytes_written, self._committer.counts.segments_sealed
        self._made_ns = self._clock.now_ns()
        pieces = self._sessions.copied()

        def write() -> None:
            failpoints.hit("wal.before_session_copy")
            try:
                self._copy_bytes = write_copy(self._files, self._folder, self._stream, upto, pieces())
                self._upto = upto
            except OSError as error:
                # The log has everything: the previous copy covers a part, and retention keeps the
                # rest.
                logger.warning("sessions: no copy could be written", folder=self._folder, error=str(error))
            failpoints.hit("wal.after_session_copy")

        if beside:
            self._copying = Worker("session-copy", write).start()
        else:
            write()


class _GroupDeduplication:
    """One commit group, which separates new writes from repeated ones."""

    def __init__(self, sessions: Sessions, submitted: Sequence[Submitted], others: OtherRegions) -> None:
        self._sessions = sessions
        self._others = others
        self._told: list[dict[int, Outcome | int]] = []
        """For each submission, by index: the outcome of an operation that isn't appended. A number
        refers to the operation with that index over all submissions, whose outcome it shares.
        """
        self._left: list[Submitted | None] = []
        self._writes: list[Sequence[tuple[WriteId, int] | None]] = []
        """For each submission, the writes of its operations; empty if they aren't looked up."""
        asked = GroupLookup(sessions, others)
        before = 0
        for ops in submitted:
            if not isinstance(ops, WriteOps) or not ops.is_keyed:
                self._writes.append(())
                self._told.append({})
                self._left.append(ops)
                continue
            writes = writes_in(ops.operations)
            told = _told_of(writes, asked, before)
            before += len(writes)
            left = [number for number in range(len(writes)) if number not in told]
            self._writes.append(writes)
            self._told.append(told)
            self._left.append(ops.select(left) if left else None)

    def left(self) -> list[Submitted]:
        """Return the operations to append."""
        return [ops for ops in self._left if ops is not None]

    def settle(self, acks: Iterator[Ack], now_us: int, nothing: Seq) -> list[Ack]:
        """Note what was appended; return the ack of each submission.

        Args:
            acks: the acks of `left`.
            now_us: the writes' time.
            nothing: the number for an ack of no rows.
        """
        settled = []
        each: list[Outcome] = []
        """Outcomes of all operations of submissions that have keys."""
        note = self._sessions.note
        for writes, left, told in zip(self._writes, self._left, self._told, strict=True):
            ack = Ack({}, SeqRange(nothing, 0)) if left is None else next(acks)
            if not writes:
                settled.append(ack)
                continue
            parts = left.split_ack(ack) if isinstance(left, WriteOps) else []
            outcomes = parts if not told else _with_those_told(len(writes), parts, told, each)
            for write, outcome in zip(writes, outcomes, strict=True):
                if write is not None and isinstance(outcome, Ack) and not outcome.duplicate:
                    name = write[0].session
                    if name is not None and (mark := self._others.mark(name, self._sessions)) > self._sessions.mark(
                        name
                    ):
                        self._sessions.raise_mark(name, mark, now_us)
                    note(*write, outcome, now_us)
            each += outcomes
            settled.append(replace(ack, each=tuple(outcomes)))
        return settled


def _with_those_told(
    count: int, parts: Iterable[Ack], told: Mapping[int, Outcome | int], before: Sequence[Outcome]
) -> list[Outcome]:
    """Return a submission's outcomes by index: the parts of what was appended, and the outcomes known before.

    Args:
        count: the number of its operations.
        parts: acks of the operations that aren't in `told`.
        told: outcomes known before, by index; a number is the index, over all submissions, of the
            operation that was repeated.
        before: outcomes of the submissions before this one.
    """
    left = iter(parts)
    outcomes: list[Outcome] = []
    for i in range(count):
        instead = told.get(i)
        if isinstance(instead, int):
            first = before[instead] if instead < len(before) else outcomes[instead - len(before)]
            assert isinstance(first, Ack), "it was new"
            outcomes.append(replace(first, duplicate=True))
        else:
            outcomes.append(next(left) if instead is None else instead)
    return outcomes


def _told_of(writes: Sequence[tuple[WriteId, int] | None], asked: GroupLookup, before: int) -> dict[int, Outcome | int]:
    """Return, by index, the outcomes of a submission's operations that aren't appended; `before` writes precede it."""
    told: dict[int, Outcome | int] = {}
    for i, write in enumerate(writes):
        if write is None:
            continue
        try:
            found = asked.ask(*write, before + i)
        except MillstreamError as error:
            told[i] = error
        else:
            if found is not None:
                told[i] = found if isinstance(found, int) else replace(found, duplicate=True)
    return told


def writes_of(group: Sequence[RecordsFrame]) -> Iterator[tuple[WriteId, int, Ack, int]]:
    """Yield a commit group's writes that have keys, in order: id, digest, ack, and time in µs since 1970."""
    found: dict[WriteId, tuple[int, int, list[tuple[int, int, ShardId, int, int]]]] = {}
    for frame in group:
        operations = frame.operations
        count = operations.num_rows
        writes = writes_in(operations)
        if not any(writes):
            continue
        of_batch = frame.batches.column("operation").to_numpy()
        counts = frame.batches.column("count").to_numpy()
        lowest = first_seqs(operations, frame.batches)
        rows = np.bincount(of_batch, weights=counts, minlength=count).astype(np.int64)
        ends = int(frame.header.first_offset) + np.cumsum(rows)
        times = operations.column("commit_ts").cast(pa.int64()).to_pylist()
        for i, write in enumerate(writes):
            if write is None:
                continue
            write_id, digest = write
            place = (int(lowest[i]), int(rows[i]), frame.header.shard, int(ends[i] - rows[i]), int(ends[i]))
            found.setdefault(write_id, (digest, times[i] or 0, []))[2].append(place)
    # In the order of their numbers, because a shard's frames may lack some of them.
    for write_id, (digest, now_us, places) in sorted(found.items(), key=lambda one: min(one[1][2])[0]):
        offsets: dict[ShardId, tuple[Offset, Offset]] = {}
        for _, _, shard, start, end in places:
            known = offsets.get(shard, (Offset(start), Offset(end)))
            offsets[shard] = Offset(min(start, known[0])), Offset(max(end, known[1]))
        first = Seq(min(place[0] for place in places))
        yield write_id, digest, Ack(offsets, SeqRange(first, sum(place[1] for place in places))), now_us
