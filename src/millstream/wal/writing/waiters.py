"""Callers that wait for the log's writer, and how each kind of caller receives its result.

A thread sleeps on a lock of its own; a caller that asked for a future has one; a task awaits a
future of its event loop. A wake-up costs more than appending a small row, so wake-ups are batched:
a group's results reach each event loop in one call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import CancelledError
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeAlias

from millstream.model.operations import Ack, Submitted
from millstream.model.replication import AckLevel

logger = logging.getLogger("millstream.wal")

Outcome: TypeAlias = Ack | Exception
"""Result of a submission. Submissions that fail together share one error object."""


class Waiting:
    """One submission and its caller. One thread calls `begin` and `end`, once each, in this order.

    One is made for every append: subclasses set all fields directly, since a call of `super` costs
    as much as the rest.
    """

    __slots__ = ("level", "ops", "size_bytes", "until_s")
    ops: Submitted
    size_bytes: int
    level: AckLevel | None
    """Level that it waits for beyond this machine."""
    until_s: float | None
    """Time by `time.monotonic` until which it waits for the level; None: without a limit."""

    def begin(self) -> bool:
        """Return whether the caller still wants it. From then on, it can't be cancelled."""
        return True

    def end(self, outcome: Outcome) -> None:
        """Deliver the result to the caller."""
        raise NotImplementedError


class ThreadWaiter(Waiting):
    """A thread waits, in `wait`. Costs a tenth of a future."""

    __slots__ = ("_done", "_outcome")

    def __init__(self, ops: Submitted, size_bytes: int) -> None:
        self.ops = ops
        self.size_bytes = size_bytes
        self.level = self.until_s = None
        self._done = threading.Lock()
        self._done.acquire()
        self._outcome: Outcome | None = None

    def end(self, outcome: Outcome) -> None:
        """Wake the thread."""
        self._outcome = outcome
        self._done.release()

    def wait(self) -> Ack:
        """Return the ack, or raise the error. One thread calls it, once."""
        self._done.acquire()
        outcome = self._outcome
        if isinstance(outcome, Ack):
            return outcome
        assert outcome is not None
        raise outcome


class FutureWaiter(Waiting):
    """A future was given out. If it is cancelled before `begin`, the submission isn't written."""

    __slots__ = ("future",)

    def __init__(self, ops: Submitted, size_bytes: int) -> None:
        self.ops = ops
        self.size_bytes = size_bytes
        self.level = self.until_s = None
        self.future: Future[Ack] = Future()

    def begin(self) -> bool:
        """See `Waiting.begin`."""
        return self.future.set_running_or_notify_cancel()

    def end(self, outcome: Outcome) -> None:
        """End the future.

        An error of one of its callbacks is logged and stops no other submission, as the future does
        for an `Exception`.
        """
        try:
            if isinstance(outcome, Ack):
                self.future.set_result(outcome)
            else:
                self.future.set_exception(outcome)
        except (CancelledError, SystemExit, GeneratorExit):  # a callback's: it would end the writer's thread
            logger.exception("a callback of an append's future failed")


class TaskWaiter(Waiting):
    """A task awaits `future`; cancelling the task cancels it. If that is before `begin`, the submission isn't written.

    A task of `loop` makes it; any other thread calls `begin` and `end`.
    """

    __slots__ = ("future", "loop")

    def __init__(self, ops: Submitted, size_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.ops = ops
        self.size_bytes = size_bytes
        self.level = self.until_s = None
        self.loop = loop
        self.future: asyncio.Future[Ack] = loop.create_future()

    def begin(self) -> bool:
        """See `Waiting.begin`."""
        return not self.future.cancelled()  # one read of a field that only the loop's thread changes

    def end(self, outcome: Outcome) -> None:
        """Wake the task; `answer` wakes many at once."""
        _tell(self.loop, [(self, outcome)])


def answer(outcomes: Iterable[tuple[Waiting, Outcome]]) -> None:
    """End all submissions, in order; each event loop is called once."""
    of_loops: dict[asyncio.AbstractEventLoop, list[tuple[TaskWaiter, Outcome]]] = {}
    for waiting, outcome in outcomes:
        if not isinstance(waiting, TaskWaiter):
            waiting.end(outcome)
        elif (of_loop := of_loops.get(waiting.loop)) is not None:
            of_loop.append((waiting, outcome))
        else:
            of_loops[waiting.loop] = [(waiting, outcome)]
    for loop, of_loop in of_loops.items():
        _tell(loop, of_loop)


def _tell(loop: asyncio.AbstractEventLoop, outcomes: list[tuple[TaskWaiter, Outcome]]) -> None:
    with suppress(RuntimeError):  # the loop is closed, so no task awaits there
        loop.call_soon_threadsafe(_settle, outcomes)


def _settle(outcomes: list[tuple[TaskWaiter, Outcome]]) -> None:
    """End the futures; runs in the loop's own thread."""
    for waiting, outcome in outcomes:
        future = waiting.future
        if future.done():
            continue  # cancelled after it began: written, but no caller waits
        if isinstance(outcome, Ack):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
