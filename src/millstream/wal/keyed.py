"""Writes of applications that can be told apart: appended once, however often they are sent.

Beside the committer, on the thread that writes: so the state is always what the durable log has, in its order, and a second call of a write
whose first one is being written finds that one's outcome. Nothing more is fsynced for it: what tells writes apart stands in the log's operations,
from which the state is made anew when a writer opens, behind the last copy of it (`session_file`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from millstream import failpoints
from millstream.codec.log_frame import RecordsFrame
from millstream.codec.log_records import first_seqs
from millstream.errors import CorruptWal, MillstreamError
from millstream.model.appends import Submitted
from millstream.model.ids import ShardId, StreamId
from millstream.model.operations import Ack, OperationKind, Outcome, Repeated, WriteOps
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import SessionFacts, WriteId, WriteKeys
from millstream.ports import Clock, Files
from millstream.protocol.sessions import NO_DIGEST, SessionLimits, Sessions
from millstream.wal.commit import GroupCommitter
from millstream.wal.reader import StreamReader
from millstream.wal.session_file import read_copy, remove_copy, write_copy
from millstream.wal.submissions import parts_of

logger = structlog.get_logger("millstream.wal")

COPY_EVERY_BYTES: Final = 64 << 20
"""Of the log, at the least: what a writer that opens has to look through. Behind a large copy, four times its size."""
_LARGE_COPIES: Final = 4


class KeyedCommits:
    """Commit groups of one writer, without the writes that its log has. Used by the thread that writes; `facts` by any.

    Args:
        committer: makes groups durable.
        sessions: what the log has.
        files: the file system.
        clock: the writes' time.
        folder: the stream's.
        stream: its id.
        upto: the last number that the copy in the folder knows of; None where there is none.
        every_bytes: how much of the log is written between two copies.
        in_background: whether copies are written by a thread of their own.
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
        in_background: bool = True,
    ) -> None:
        self._committer = committer
        self._sessions = sessions
        self._files = files
        self._clock = clock
        self._folder = folder
        self._stream = stream
        self._upto = upto
        self._every_bytes = every_bytes
        self._in_background = in_background
        self._written_at = committer.counts.bytes_written
        """What had been written when the last copy was made."""
        self._copy_bytes = 0
        self._copying: threading.Thread | None = None
        self._changing = threading.Lock()
        """Held while the state changes, for who looks at it from other threads."""

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
        in_background: bool = True,
    ) -> KeyedCommits:
        """What the recovered log has: the copy, and the operations behind it.

        Raises:
            CorruptWal: the copy is damaged, or the log.
            UnsupportedFormat: the copy is of a newer version.
        """
        copy = read_copy(files, folder, stream)
        persisted = committer.persisted_upto
        if copy is not None and copy.upto > persisted:
            logger.warning("sessions: the log was taken back", known_upto=int(copy.upto), log_upto=int(persisted))
            copy = None
            # Where none can be written in its place, it would be taken for the log's own once that has come as far again.
            remove_copy(files, folder)
        try:
            sessions = Sessions(limits) if copy is None else Sessions.restored(copy.state, limits)
        except ValueError as error:
            raise CorruptWal(f"the sessions' copy in {folder} makes no sense: {error}", file=folder) from error
        upto = Seq(0) if copy is None else copy.upto
        reader = StreamReader(folder, files=files, durable=True)
        first = reader.first_seq()
        if upto + 1 < first:
            logger.warning(
                "sessions: retention has dropped writes that they lack", known_upto=int(upto), first=int(first)
            )
        for group in reader.read_groups(max(upto, Seq(first - 1)), persisted):
            for write_id, digest, given, now_us in writes_of(group):
                sessions.note(write_id, digest, given, now_us)
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
            in_background=in_background,
        )
        if copy is None or persisted > upto:
            # From here on the folder says that it was looked through.
            opened._copy(beside=False)
        return opened

    # --- committing ------------------------------------------------------------------------------------------------

    def commit(self, submitted: Sequence[Submitted]) -> list[Ack]:
        """As `GroupCommitter.commit`, without what the log has."""
        if not any(isinstance(ops, WriteOps) and ops.keys is not None for ops in submitted):
            return self._committer.commit(submitted)
        return self._committer.uninterrupted(lambda: self._commit(submitted))

    def _commit(self, submitted: Sequence[Submitted]) -> list[Ack]:
        group = _Group(self._sessions, submitted)
        left = group.left()
        acks = iter(self._committer.commit(left) if left else ())
        now_us = self._clock.now_ns() // 1000
        try:
            with self._changing:
                return group.settle(acks, now_us, Seq(self._committer.persisted_upto + 1))
        except Exception as error:
            # The group is durable, and the state doesn't know of it: the next writer's will.
            self._committer.poison("noting what was written failed", error)
            raise

    def facts(self, session: str) -> SessionFacts:
        """What the durable log has of a session."""
        with self._changing:
            return self._sessions.facts(session)

    # --- copies ----------------------------------------------------------------------------------------------------

    def after_group(self, *, sealed: bool = False) -> None:
        """Make a copy where enough was written since the last, or where there is none: without one retention keeps nothing for it."""
        since = self._committer.counts.bytes_written - self._written_at
        if (
            self._upto is None
            or since >= max(self._every_bytes, _LARGE_COPIES * self._copy_bytes)
            or (sealed and since >= _LARGE_COPIES * self._copy_bytes)
        ):
            self._copy(beside=self._in_background)

    def close(self) -> None:
        """Make a last copy, before the locks are given up."""
        if self._copying is not None:
            self._copying.join()
        if self._committer.failure is None and self._committer.persisted_upto != self._upto:
            self._copy(beside=False)

    def _copy(self, *, beside: bool) -> None:
        if self._copying is not None and self._copying.is_alive():
            return
        upto = self._committer.persisted_upto
        self._written_at = self._committer.counts.bytes_written
        pieces = self._sessions.copied()

        def write() -> None:
            failpoints.hit("wal.before_session_copy")
            try:
                self._copy_bytes = write_copy(self._files, self._folder, self._stream, upto, pieces())
                self._upto = upto
            except OSError as error:
                # The log has it all: the one before does, and retention keeps what it lacks.
                logger.warning("sessions: no copy could be written", folder=self._folder, error=str(error))
            failpoints.hit("wal.after_session_copy")

        if beside:
            self._copying = threading.Thread(target=write, name="session-copy", daemon=True)
            self._copying.start()
        else:
            write()


class _Again:
    """A write that stands in its own commit group before, by the place of its submission and its own in that."""

    __slots__ = ("first",)

    def __init__(self, first: tuple[int, int]) -> None:
        self.first = first


class _Group:
    """One commit group: which of its writes are new."""

    def __init__(self, sessions: Sessions, submitted: Sequence[Submitted]) -> None:
        self._sessions = sessions
        self._submitted = submitted
        self._new: dict[WriteId, tuple[int, int, int]] = {}
        """Places as in `_Again`, and the digest."""
        self._marks: dict[str, int] = {}
        """Of sessions, as they will be."""
        self._told: list[dict[int, Repeated | _Again | MillstreamError]] = []
        """Of each submission, by place, what isn't to be appended."""
        self._left: list[Submitted | None] = []
        for place, ops in enumerate(submitted):
            keys = ops.keys if isinstance(ops, WriteOps) else None
            told = {} if keys is None else self._told_of(place, keys)
            self._told.append(told)
            self._left.append(ops if not told or not isinstance(ops, WriteOps) else without(ops, told))

    def _told_of(self, place: int, keys: WriteKeys) -> dict[int, Repeated | _Again | MillstreamError]:
        told: dict[int, Repeated | _Again | MillstreamError] = {}
        for i, (write_id, digest) in enumerate(zip(keys.ids, keys.digests, strict=True)):
            if write_id is None:
                continue
            try:
                first = self._new.get(write_id)
                if first is not None:
                    Sessions.check_same(first[2], digest, write_id)
                    told[i] = _Again(first[:2])
                elif (given := self._look(write_id, digest)) is not None:
                    told[i] = Repeated(given)
                else:
                    self._new[write_id] = (place, i, digest)
            except MillstreamError as error:
                told[i] = error
        return told

    def _look(self, write_id: WriteId, digest: int) -> Ack | None:
        name, number = write_id.session, write_id.number
        if name is None or number is None:
            return self._sessions.look(write_id, digest)
        mark = self._marks.get(name)
        if mark is None:
            mark = self._sessions.mark(name)
        found = self._sessions.look(write_id, digest, mark=mark)
        if found is None:
            self._marks[name] = number if number == mark + 1 else mark
        return found

    def left(self) -> list[Submitted]:
        """What is to be appended."""
        return [ops for ops in self._left if ops is not None]

    def settle(self, acks: Iterator[Ack], now_us: int, nothing: Seq) -> list[Ack]:
        """Note what was appended; what became of each submission.

        Args:
            acks: of `left`.
            now_us: the writes' time.
            nothing: the number of an ack of no rows.
        """
        settled = []
        given: dict[tuple[int, int], Ack] = {}
        for place, (ops, left, told) in enumerate(zip(self._submitted, self._left, self._told, strict=True)):
            ack = Ack({}, SeqRange(nothing, 0)) if left is None else next(acks)
            keys = ops.keys if isinstance(ops, WriteOps) else None
            if keys is None:
                settled.append(ack)
                continue
            kept = [i for i in range(len(keys.ids)) if i not in told]
            parts = parts_of(left, [keys.counts[i] for i in kept], ack) if isinstance(left, WriteOps) else []
            each: dict[int, Outcome] = {}
            for i, part in zip(kept, parts, strict=True):
                each[i] = given[place, i] = part
                write_id = keys.ids[i]
                if write_id is not None:
                    self._sessions.note(write_id, keys.digests[i], part, now_us)
            for i, instead in told.items():
                each[i] = Repeated(given[instead.first]) if isinstance(instead, _Again) else instead
            settled.append(replace(ack, each=tuple(each[i] for i in range(len(keys.ids)))))
        return settled


def without(ops: WriteOps, places: Iterable[int]) -> WriteOps | None:
    """The operations but for some; None where none is left."""
    keep = np.ones(ops.operations.num_rows, dtype=bool)
    keep[list(places)] = False
    if not keep.any():
        return None
    anew = pa.array((np.cumsum(keep) - 1).astype(np.int32))
    tables = []
    for table in ops.tables:
        of_row = table.rows.column(0)
        rows = table.rows.filter(pc.take(pa.array(keep), of_row))
        if rows.num_rows:
            rows = rows.set_column(0, rows.schema.field(0), pc.take(anew, rows.column(0)))
            tables.append(replace(table, rows=rows))
    return replace(ops, operations=ops.operations.filter(pa.array(keep)), tables=tuple(tables), keys=None)


def writes_of(group: Sequence[RecordsFrame]) -> Iterator[tuple[WriteId, int, Ack, int]]:
    """A commit group's writes that can be told apart, in their order: id, digest, what they were given, time in µs since 1970."""
    found: dict[WriteId, tuple[int, int, list[tuple[int, int, ShardId, int, int]]]] = {}
    for frame in group:
        operations = frame.operations
        sessions, keys = operations.column("session"), operations.column("idempotency_key")
        count = operations.num_rows
        if sessions.null_count == count and keys.null_count == count:
            continue
        of_batch = frame.batches.column("operation").to_numpy()
        counts = frame.batches.column("count").to_numpy()
        lowest = first_seqs(operations, frame.batches)
        rows = np.bincount(of_batch, weights=counts, minlength=count).astype(np.int64)
        ends = int(frame.header.first_offset) + np.cumsum(rows)
        facts = operations.select(
            ["kind", "commit_end_lsn", "session", "session_number", "idempotency_key"]
        ).to_pylist()
        times = operations.column("commit_ts").cast(pa.int64()).to_pylist()
        for i, fact in enumerate(facts):
            if fact["kind"] != OperationKind.APPEND:
                continue
            if fact["idempotency_key"] is not None:
                write_id = WriteId(key=fact["idempotency_key"])
            elif fact["session"] is not None and fact["session_number"] is not None:
                write_id = WriteId(fact["session"], fact["session_number"])
            else:
                continue
            digest = NO_DIGEST if fact["commit_end_lsn"] is None else int(fact["commit_end_lsn"])
            place = (int(lowest[i]), int(rows[i]), frame.header.shard, int(ends[i] - rows[i]), int(ends[i]))
            found.setdefault(write_id, (digest, times[i] or 0, []))[2].append(place)
    # By their numbers: a shard's frames may lack some of them.
    for write_id, (digest, now_us, places) in sorted(found.items(), key=lambda one: min(one[1][2])[0]):
        offsets: dict[ShardId, tuple[Offset, Offset]] = {}
        for _, _, shard, start, end in places:
            known = offsets.get(shard, (Offset(start), Offset(end)))
            offsets[shard] = Offset(min(start, known[0])), Offset(max(end, known[1]))
        first = Seq(min(place[0] for place in places))
        yield write_id, digest, Ack(offsets, SeqRange(first, sum(place[1] for place in places))), now_us
