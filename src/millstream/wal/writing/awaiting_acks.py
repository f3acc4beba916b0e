"""Appends that are durable here, and wait until other machines have them as well.

The writer goes on: commit groups follow one another at this machine's pace, and wait here in their
order. While anything waits, one thread polls what the others hold (`HighWater`). It first shows
readers what they may see, then answers the waiters: what was acknowledged can be read. Appends that
ask for more than the stream's level wait in separate queues, so that they delay no other append.

A waiting append keeps its room in the writer's queue, so one bound in bytes covers it together with
what isn't written yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import pyarrow as pa
import structlog

from millstream.backoff import Backoff
from millstream.errors import LogError, NotEnoughReplicas, ReplicationError
from millstream.model.ids import GroupNumber, StreamId
from millstream.model.operations import OPERATION_SCHEMA, Ack, WriteOps
from millstream.model.positions import Seq
from millstream.model.replication import LOCAL, AckKind, AckLevel, Reach
from millstream.ports import HighWater
from millstream.protocol.replication.ack_levels import Holdings
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.group_commit_queue import GroupCommitQueue
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.waiters import Outcome, Waiting, answer
from millstream.workers import Worker

logger = structlog.get_logger("millstream.wal")

_LOOK_FIRST_S: Final = 0.0002
_LOOK_MAX_S: Final = 0.001
_LOOK_LATE_S: Final = 0.02
"""Interval between polls: a fraction of a network round trip. After a second's wait, the answer isn't about to come."""
_LATE_S: Final = 1.0
_TELL_AFTER_S: Final = 10.0
_TELL_EVERY_S: Final = 60.0


NOTHING: Final = WriteOps(pa.RecordBatch.from_pylist([], schema=OPERATION_SCHEMA), ())
"""An append of nothing: it is acknowledged once everything before it is."""


def check_level(level: AckLevel, high_water: HighWater | None, reach: Reach | None = None, *, shared: bool) -> None:
    """Raise `ack_level_unavailable` if the level can't be observed here, or can never be reached."""
    if level == LOCAL:
        return
    if shared:
        raise ReplicationError(
            f"this stream has several writers, so {level} can't be checked",
            code="ack_level_unavailable",
            hint='Let one writer own the stream, or use acks = "local".',
            level=str(level),
        )
    if high_water is None:
        raise ReplicationError(
            f"{level} can't be checked: only this machine has the records that are written here",
            code="ack_level_unavailable",
            level=str(level),
        )
    lacking = None if reach is None else reach.lacks(level)
    if lacking is not None:
        raise ReplicationError(
            lacking,
            code="ack_level_unavailable",
            hint="Request a lower level, or extend [replication] and restart the process that writes here.",
            level=str(level),
        )


@dataclass(slots=True, eq=False)
class _Held:
    waiting: Waiting
    ack: Ack
    group: GroupNumber
    """Last group that must be held: the submission's group, or the newest one before it."""
    upto: Seq | None
    """For a repeated write, whose outcome is only reported again: the number that must be held."""
    since_s: float


@dataclass(frozen=True, slots=True)
class Awaiting:
    """The appends that wait, as shown in status and metrics."""

    submissions: int = 0
    size_bytes: int = 0
    longest_s: float = 0.0
    """Time in seconds that the oldest of them has waited."""
    behind: tuple[str, ...] = ()
    """Names of the followers, or of the object store, that lack what it waits for."""


class AckLevels:
    """The acknowledgement levels of a writer's callers: the appends that wait for more than this machine.

    Its thread starts with the first such append, so a log whose callers ask for `local` alone has none.

    Args:
        committer: makes groups durable; with a level other than local it hides them.
        queue: holds the room of what waits.
        options: the stream's level, its reach and the writer's patience.
        high_water: reports what the others hold; None: no level beyond `local` is available.

    Concurrency: `acknowledge` by the thread that writes, `close` once; the others by any.
    """

    def __init__(
        self,
        committer: GroupCommitter,
        queue: GroupCommitQueue,
        options: LogOptions,
        stream: StreamId,
        high_water: HighWater | None,
    ) -> None:
        self._high_water = high_water
        self._default = options.acks
        self._reach = options.reach
        self._patience_s = options.acks_patience_s
        self._committer = committer
        self._queue = queue
        self._stream = str(stream)
        self.ends_as = "the log was closed"
        """Reason given to callers that still wait at `close`."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._held: dict[AckLevel, deque[_Held]] = {}
        """Waiting appends by level, in the order of their groups."""
        self._repeats: dict[AckLevel, deque[_Held]] = {}
        """Repeats of earlier writes: each is answered as soon as that write is held, regardless of
        the appends before it.
        """
        self._expires_s = float("inf")
        """Lower bound of all deadlines."""
        self._asleep = False
        self._closing = False
        self._holdings = Holdings()
        self._told_s = 0.0
        self._unreadable = False
        self._starting = threading.Lock()
        self._worker: Worker | None = None
        """Polls the others' holdings; None until an append asks for more than this machine."""
        if self._default != LOCAL:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._worker is None:
                check_level(self._default, self._high_water, self._reach, shared=False)
                assert self._high_water is not None
                self._high_water.begin(self._committer.group)
                self._look(self._high_water)
                self._show()
                self._worker = Worker("wal-levels", partial(self._run, self._high_water)).start()

    def awaits(self, acks: AckLevel | None) -> bool:
        """Return whether an append that asks for this level waits for other machines."""
        return self._default != LOCAL or (acks is not None and not LOCAL.covers(acks))

    def require(self, waiting: Waiting, acks: AckLevel | None, deadline_s: float | None) -> None:
        """Set the level that a submission waits for, its own or the stream's, unless that is this machine alone.

        Raises:
            ReplicationError (`ack_level_unavailable`): the level can't be observed here, or can never be reached.
        """
        if not self.awaits(acks):
            return
        level = self._default
        if acks is not None and not level.covers(acks):
            check_level(acks, self._high_water, self._reach, shared=self._committer.is_shared)
            level = acks
        self._start()
        waiting.level = level
        waiting.until_s = None if deadline_s is None else time.monotonic() + deadline_s

    # --- for the thread that writes ----------------------------------------------------------------------------------

    def acknowledge(self, group: Sequence[Waiting], acks: Sequence[Ack]) -> None:
        """Answer the callers of a commit group that is durable here; hold those that wait until others have it."""
        if self._worker is None:
            answer(zip(group, acks, strict=True))
            return
        now = time.monotonic()
        newest = self._committer.group
        ready: list[tuple[Waiting, Outcome]] = []
        with self._lock:
            size = 0
            for waiting, ack in zip(group, acks, strict=True):
                level = waiting.level
                if level is None:
                    ready.append((waiting, ack))
                    continue
                size += waiting.size_bytes
                upto = _repeated_upto(ack)
                held = _Held(waiting, ack, newest, upto, now)
                kept = self._held if upto is None else self._repeats
                kept.setdefault(level, deque()).append(held)
                if waiting.until_s is not None:
                    self._expires_s = min(self._expires_s, waiting.until_s)
            if size:
                self._queue.hold(size)
            if self._asleep and self._has_work():
                self._asleep = False
                self._work.notify_all()
        answer(ready)

    # --- for any thread ----------------------------------------------------------------------------------------------

    def awaited(self) -> Awaiting:
        """Return what waits now."""
        with self._lock:
            held = [one for kept in self._all() for one in kept]
            if not held:
                return Awaiting()
            first = min(held, key=lambda one: one.since_s)
            return Awaiting(
                len(held),
                sum(one.waiting.size_bytes for one in held),
                time.monotonic() - first.since_s,
                self._holdings.behind(first.group, first.waiting.level or self._default),
            )

    def close(self) -> None:
        """Wait within the writer's patience, then answer the remaining appends: other machines lack them.

        Nothing more may come.
        """
        if self._worker is None:
            return
        end = time.monotonic() + self._patience_s
        with self._lock:
            while self._any_held() and (left := end - time.monotonic()) > 0:
                self._work.wait(min(left, _LOOK_LATE_S))
            self._closing = True
            self._work.notify_all()
        self._worker.join()
        with self._lock:
            left_over = self._take_all()
        self._let_go(left_over)
        answer([(one.waiting, self._missing(one, self.ends_as)) for one in left_over])

    # --- the thread that looks ---------------------------------------------------------------------------------------

    def _run(self, high_water: HighWater) -> None:
        pause = Backoff(_LOOK_FIRST_S, jitter=0)
        while True:
            with self._lock:
                while not self._closing and not self._has_work():
                    self._asleep = True
                    self._work.wait()
                    pause.reset()
                self._asleep = False
                if self._closing:
                    return
            if self._step(high_water):
                pause.reset()
            pause.most_s = _LOOK_LATE_S if self._is_late() else _LOOK_MAX_S
            if not self._closing:
                time.sleep(pause.next_s())

    def _step(self, high_water: HighWater) -> bool:
        """Poll once; return whether that changed anything."""
        shown, failure = self._look(high_water), None
        try:
            moved = shown and self._show()
        except OSError as error:
            moved = False
            failure = self._committer.poison("the readers' mark couldn't be written", error)
        now = time.monotonic()
        with self._lock:
            ready = self._take_ready() if failure is None else self._take_all()
            late = self._take_late(now)
            self._work.notify_all()
        if self._committer.shown is not None:
            with self._lock:
                first = min((kept[0].group for kept in self._held.values() if kept), default=self._committer.group)
            self._committer.shown.thin(first)
        self._let_go([*ready, *late])
        answer([(one.waiting, one.ack if failure is None else failure) for one in ready])
        answer([(one.waiting, self._missing(one, "the append's deadline is over")) for one in late])
        self._say_who_is_missing(now)
        return moved or bool(ready)

    def _look(self, high_water: HighWater) -> bool:
        """Read what the others hold; return whether it changed."""
        before = self._holdings
        try:
            self._holdings = high_water.look()
            self._unreadable = False
        except (LogError, OSError) as error:
            if not self._unreadable:
                logger.warning("what other machines hold can't be read", stream=self._stream, error=str(error))
            self._unreadable = True
        hides = self._committer.shown is not None and self._committer.shown.hides
        return before != self._holdings or hides

    def _show(self) -> bool:
        shown = self._committer.shown
        return shown is not None and shown.show(self._holdings.group_reached(self._default))

    def _reached(self, level: AckLevel) -> tuple[GroupNumber, Seq]:
        """Return what is held as the level requires, and also as the stream's level requires."""
        of_level = self._holdings.group_reached(level), self._holdings.seq_reached(level)
        if self._committer.shown is None or level == self._default:
            return of_level
        group, upto = self._holdings.group_reached(self._default), self._holdings.seq_reached(self._default)
        return min(of_level[0], group), min(of_level[1], upto)

    def _take_ready(self) -> list[_Held]:
        ready: list[_Held] = []
        for level, kept in self._held.items():
            group, _ = self._reached(level)
            while kept and kept[0].group <= group:
                ready.append(kept.popleft())
        for level, kept in self._repeats.items():
            group, upto = self._reached(level)
            left: deque[_Held] = deque()
            for one in kept:
                is_held = one.group <= group or (one.upto is not None and one.upto <= upto)
                (ready if is_held else left).append(one)
            self._repeats[level] = left
        return ready

    def _take_late(self, now: float) -> list[_Held]:
        """Remove and return the appends whose deadline has passed."""
        if now < self._expires_s:
            return []
        late: list[_Held] = []
        self._expires_s = float("inf")
        for by_level in (self._held, self._repeats):
            for level, kept in by_level.items():
                left: deque[_Held] = deque()
                for one in kept:
                    until_s = one.waiting.until_s
                    if until_s is not None and until_s <= now:
                        late.append(one)
                        continue
                    left.append(one)
                    if until_s is not None:
                        self._expires_s = min(self._expires_s, until_s)
                by_level[level] = left
        return late

    def _take_all(self) -> list[_Held]:
        taken = [one for kept in self._all() for one in kept]
        self._held, self._repeats = {}, {}
        return taken

    def _let_go(self, done: Sequence[_Held]) -> None:
        if done:
            self._queue.let_go(sum(one.waiting.size_bytes for one in done))

    def _all(self) -> list[deque[_Held]]:
        return [*self._held.values(), *self._repeats.values()]

    def _any_held(self) -> bool:
        return any(self._all())

    def _has_work(self) -> bool:
        shown = self._committer.shown
        return self._any_held() or (shown is not None and shown.hides)

    def _is_late(self) -> bool:
        with self._lock:
            first = min((kept[0].since_s for kept in self._all() if kept), default=0.0)
        return time.monotonic() - first > _LATE_S

    def _missing(self, held: _Held, why: str) -> NotEnoughReplicas:
        level = held.waiting.level or self._default
        behind = self._holdings.behind(held.group, level)
        who = f"{', '.join(behind)} lacks it" if behind else _too_few(level, self._holdings)
        return NotEnoughReplicas(
            f"the write is durable here but not {level}, as requested: {who}, and {why}",
            level=str(level),
            behind=list(behind),
        )

    def _say_who_is_missing(self, now: float) -> None:
        if now - self._told_s < _TELL_EVERY_S:
            return
        found = self.awaited()
        if found.longest_s < _TELL_AFTER_S:
            return
        self._told_s = now
        logger.warning(
            "writes wait for other machines to have them", stream=self._stream, level=str(self._default), waiting=found.submissions,
            for_s=round(found.longest_s, 1), behind=list(found.behind),
        )  # fmt: skip


def _too_few(level: AckLevel, holdings: Holdings) -> str:
    """Return why a level isn't reached although no known follower lags behind."""
    if level.kind is AckKind.OBJECT:
        return "no object store has taken anything yet"
    known = [place.name for place in holdings.places if not place.is_store]
    return f"no more followers have come than {', '.join(known)}" if known else "no follower has come yet"


def _repeated_upto(ack: Ack) -> Seq | None:
    """Return the last number of repeated writes, if a submission appended nothing; None if it did, or repeats none."""
    if ack.seqs.count:
        return None
    given = [outcome.seqs.last for outcome in ack.each if isinstance(outcome, Ack) and outcome.duplicate]
    return max(given, default=None)
