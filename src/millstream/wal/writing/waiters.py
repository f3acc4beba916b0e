"""Those who wait for the log's writer, and how each kind of them is told what became of what it handed over.

A thread sleeps on a lock of its own; whoever asked for a future has one; a task awaits a future of its event loop. Waking costs
more than appending a small row, so it is done once for all that can be woken together: a group's answers reach each event
loop in one call.
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

from millstream.model.appends import Submitted
from millstream.model.operations import Ack
from millstream.model.replication import AckLevel

logger = logging.getLogger("millstream.wal")

Outcome: TypeAlias = Ack | Exception
"""What became of it. All that failed together get one error, the same object."""


class Waiting:
    """One submission and whoever waits for it. `begin` and `end` are called once each, in this order, by one thread.

    One is made for every append: kinds set all fields themselves, since a call of `super` costs as much as the rest.
    """

    __slots__ = ("ops", "size_bytes")
    ops: Submitted
    size_bytes: int
    level: AckLevel | None = None
    """Where it has to be before it is acknowledged, where that isn't this machine alone: a subclass's, so that nobody else pays for it."""
    until_s: float | None = None
    """By `time.monotonic`, how long it waits for that; None: for as long as it takes."""

    def begin(self) -> bool:
        """Whether it is still wanted. If so, it can't be taken back any more."""
        return True

    def end(self, outcome: Outcome) -> None:
        """Tell it."""
        raise NotImplementedError


class ThreadWaiter(Waiting):
    """A thread waits, in `wait`. A tenth of what a future costs."""

    __slots__ = ("_done", "_outcome")

    def __init__(self, ops: Submitted, size_bytes: int) -> None:
        self.ops = ops
        self.size_bytes = size_bytes
        self._done = threading.Lock()
        self._done.acquire()
        self._outcome: Outcome | None = None

    def end(self, outcome: Outcome) -> None:
        """Wake the thread."""
        self._outcome = outcome
        self._done.release()

    def wait(self) -> Ack:
        """The ack, or the error raised. By one thread, once."""
        self._done.acquire()
        outcome = self._outcome
        if isinstance(outcome, Ack):
            return outcome
        assert outcome is not None
        raise outcome


class FutureWaiter(Waiting):
    """A future was given out; cancelled before it begins, the submission isn't written."""

    __slots__ = ("future",)

    def __init__(self, ops: Submitted, size_bytes: int) -> None:
        self.ops = ops
        self.size_bytes = size_bytes
        self.future: Future[Ack] = Future()

    def begin(self) -> bool:
        """See `Waiting.begin`."""
        return self.future.set_running_or_notify_cancel()

    def end(self, outcome: Outcome) -> None:
        """End the future. What a callback of it raises is logged and stops nobody, as the future does with an `Exception`."""
        try:
            if isinstance(outcome, Ack):
                self.future.set_result(outcome)
            else:
                self.future.set_exception(outcome)
        except (CancelledError, SystemExit, GeneratorExit):  # a callback's: the writer's thread would end by it
            logger.exception("a callback of an append's future failed")


class TaskWaiter(Waiting):
    """A task awaits `future`, which cancelling the task cancels: before it begins, the submission isn't written.

    Made by a task of `loop`; `begin` and `end` are for any other thread.
    """

    __slots__ = ("future", "loop")

    def __init__(self, ops: Submitted, size_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.ops = ops
        self.size_bytes = size_bytes
        self.loop = loop
        self.future: asyncio.Future[Ack] = loop.create_future()

    def begin(self) -> bool:
        """See `Waiting.begin`."""
        return not self.future.cancelled()  # one read of a field that only the loop's thread changes

    def end(self, outcome: Outcome) -> None:
        """Wake the task; see `answer` for many."""
        _tell(self.loop, [(self, outcome)])


class BlockedAtLevel(ThreadWaiter):
    """As `ThreadWaiter`, until others have it, too."""

    __slots__ = ("level", "until_s")


class PromisedAtLevel(FutureWaiter):
    """As `FutureWaiter`, likewise."""

    __slots__ = ("level", "until_s")


class AwaitedAtLevel(TaskWaiter):
    """As `TaskWaiter`, likewise."""

    __slots__ = ("level", "until_s")


def answer(outcomes: Iterable[tuple[Waiting, Outcome]]) -> None:
    """End all, in order; each event loop is called once."""
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
    with suppress(RuntimeError):  # the loop is closed: nobody awaits there any more
        loop.call_soon_threadsafe(_settle, outcomes)


def _settle(outcomes: list[tuple[TaskWaiter, Outcome]]) -> None:
    """In the loop's own thread."""
    for waiting, outcome in outcomes:
        future = waiting.future
        if future.done():
            continue  # cancelled after it began: written, and nobody asks
        if isinstance(outcome, Ack):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
