"""The operations that make the next commit group: a queue in order of the calls, bounded by bytes.

Callers wait for room, and get it in order: threads by blocking, tasks by awaiting. If there is none in
time, they get `Overloaded`, which HTTP answers as status 429. The writer sleeps while the queue is
empty, and is woken only then: a needless wake-up costs as much as a small append.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from millstream.errors import MillstreamError, Overloaded, WriterClosed
from millstream.model.operations import SpilledOp
from millstream.wal.writing.waiters import Waiting

_NEVER: Final = sys.maxsize
_ASKS_EVERY_S: Final = 0.2
"""How often a thread that waits for room is asked whether it gives up."""
_Room: TypeAlias = "threading.Event | asyncio.Future[None]"
"""An event for a thread that waits for room, a future of its loop for a task."""


class GroupCommitQueue:
    """Bounded queue; any number of threads and event loops put, one thread at a time takes.

    Args:
        bytes_max: bound of the queued bytes; one larger submission may exceed it.
        group_bytes_max: bound of what `take` returns at once; a single submission may exceed it.
        delay_s: how long the first submission of a group waits for more.
    """

    def __init__(self, *, bytes_max: int, group_bytes_max: int, delay_s: float) -> None:
        self._bytes_max = bytes_max
        self._group_bytes_max = group_bytes_max
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Signals the taker."""
        self._visitors: dict[_Room, tuple[Callable[[], object], int]] = {}
        """Callers that wait for room, in order: a function that wakes the caller, and the submission's size in bytes."""
        self._waiting: deque[Waiting] = deque()
        self._spilled = 0
        """Number of spilled operations in `_waiting`."""
        self._came_s = 0.0
        """Time when the queue last became non-empty. A `take` that leaves some in it doesn't change that."""
        self._wake_above_bytes = _NEVER
        """Queued bytes above which the sleeping taker is woken; `_NEVER` while it is awake."""
        self._ended = False
        """Whether the queue takes nothing more in."""
        self._abandoned = False
        """Whether the queue also gives nothing more out."""
        self._failure: MillstreamError | None = None
        self.queued_bytes = 0
        """Size in bytes of everything queued."""
        self.held_bytes = 0
        """Size in bytes of what was taken and keeps its room until `let_go`, because it waits for other machines."""

    # --- putting ---------------------------------------------------------------------------------------------------

    def put(self, waiting: Waiting, deadline_s: float | None, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Append to the queue; block while there's no room, or until `gives_up` returns True.

        Raises:
            Overloaded: there was no room until then.
            WriterClosed: the queue takes nothing more in.
        """
        if self.offer(waiting):
            return
        end_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
        room, let_in = threading.Event(), False
        while not self._offer_or_visit(waiting, room, room.set, let_in=let_in):
            try:
                while not room.wait(max(0.0, min(_ASKS_EVERY_S, end_s - time.monotonic()))):
                    if time.monotonic() >= end_s or gives_up():
                        raise self._overloaded()
            except BaseException:
                self._leave(room)
                raise
            room, let_in = threading.Event(), True

    def enter(self, waiting: Waiting) -> None:
        """Append to the queue, whether there is room or not: for a submission without rows.

        Raise `WriterClosed` if the queue takes nothing more in.
        """
        with self._lock:
            self._check_open()
            self._push(waiting)

    def offer(self, waiting: Waiting) -> bool:
        """Append to the queue if there is room and no other caller waits for it.

        Raise `WriterClosed` if the queue takes nothing more in.
        """
        with self._lock:
            return self._offer(waiting, let_in=False)

    async def put_async(self, waiting: Waiting, deadline_s: float | None) -> None:
        """As `put`, for a task: its event loop isn't blocked. If the task is cancelled, nothing was queued."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                room, let_in = loop.create_future(), False
                while not self._offer_or_visit(waiting, room, partial(_end, loop, room), let_in=let_in):
                    try:
                        await room
                    except BaseException:
                        self._leave(room)
                        raise
                    room, let_in = loop.create_future(), True
        except TimeoutError:
            raise self._overloaded() from None

    def _offer(self, waiting: Waiting, *, let_in: bool) -> bool:
        """Append if there is room, but not before callers that already wait for room: the taker lets those in."""
        self._check_open()
        if self._waiting or self.held_bytes:
            behind = self._visitors and not let_in
            if behind or self.queued_bytes + self.held_bytes + waiting.size_bytes > self._bytes_max:
                return False
        self._push(waiting)
        return True

    def _offer_or_visit(self, waiting: Waiting, room: _Room, wake: Callable[[], object], *, let_in: bool) -> bool:
        """Append, or call `wake` once a retry is worthwhile; return whether it was appended.

        A caller that was let in once goes first.
        """
        with self._lock:
            if self._offer(waiting, let_in=let_in):
                return True
            if let_in:
                self._visitors = {room: (wake, waiting.size_bytes), **self._visitors}
            else:
                self._visitors[room] = (wake, waiting.size_bytes)
            self._hurry()
            return False

    def _leave(self, room: _Room) -> None:
        """Stop waiting for room. A caller that was let in and didn't come leaves its room to the next."""
        with self._lock:
            self._visitors.pop(room, None)
            self._let_in()

    def _check_open(self) -> None:
        if self._ended:
            raise WriterClosed("the log's writer is closed") from self._failure

    def _overloaded(self) -> Overloaded:
        if self.held_bytes > self.queued_bytes:
            return Overloaded(
                f"{self.held_bytes} bytes are written and wait for other machines to acknowledge them",
                hint="Run `millstream replicas` to find the nodes that don't answer.",
                queued_bytes=self.queued_bytes + self.held_bytes,
            )
        return Overloaded(f"{self.queued_bytes} bytes still wait to be written", queued_bytes=self.queued_bytes)

    def _push(self, waiting: Waiting) -> None:
        if self._delay_s and not self._waiting:
            self._came_s = time.monotonic()
        self._waiting.append(waiting)
        self._spilled += isinstance(waiting.ops, SpilledOp)
        self.queued_bytes += waiting.size_bytes
        if self.queued_bytes > self._wake_above_bytes:
            self._hurry()

    def _hurry(self) -> None:
        """Wake the taker if it sleeps. If Ctrl-C interrupts `notify`, the next call does it again."""
        if self._wake_above_bytes != _NEVER:
            self._work.notify_all()  # an interrupted call may have left the lock of an earlier wait, which wakes nothing
            self._wake_above_bytes = _NEVER

    def _let_in(self) -> None:
        """Wake callers for which there is room, in order; all of them once the queue has ended."""
        free = self._bytes_max - self.queued_bytes - self.held_bytes
        nobody = not self._waiting and not self.held_bytes
        for room, (wake, size) in list(self._visitors.items()):
            if size > free and not (nobody or self._ended):
                return
            del self._visitors[room]
            try:
                wake()
            except RuntimeError:  # the loop is closed, so no task awaits there
                continue
            nobody = False
            free -= size

    # --- taking ----------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Return whether nothing is queued, and the queue still takes in more."""
        return not self._waiting and not self._ended

    def is_empty(self) -> bool:
        """Return whether nothing is queued."""
        return not self._waiting

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to take, at most `timeout_s`; return False once there never will be."""
        with self._lock:
            if not (self._waiting or self._ended):
                self._sleep(0, timeout_s)
            if self._waiting and self._delay_s:
                self._gather()
            return not self._abandoned and (bool(self._waiting) or not self._ended)

    def _gather(self) -> None:
        """Wait for more submissions, until they fill a group or a caller finds no room."""
        enough = min(self._group_bytes_max, self._bytes_max)
        left_s = self._came_s + self._delay_s - time.monotonic()
        crowded = self._visitors or self.queued_bytes >= enough
        if left_s > 0 and not (crowded or self._ended):
            self._sleep(enough - 1, left_s)

    def _sleep(self, until_above_bytes: int, timeout_s: float) -> None:
        self._wake_above_bytes = until_above_bytes
        self._work.wait_for(
            lambda: self._wake_above_bytes == _NEVER or self._ended or self.queued_bytes > until_above_bytes, timeout_s
        )
        self._wake_above_bytes = _NEVER

    def take(self) -> list[Waiting]:
        """Take what is queued, up to a group's bound, in order; empty if nothing is.

        A `SpilledOp` is a group of its own.
        """
        with self._lock:
            if not self._spilled and self.queued_bytes <= self._group_bytes_max:
                group = list(self._waiting)
                self._waiting.clear()
                self.queued_bytes = 0
            else:
                group = self._take_some()
            if self._visitors:
                self._let_in()
            return group

    def _take_some(self) -> list[Waiting]:
        group: list[Waiting] = []
        size = 0
        while self._waiting:
            following = self._waiting[0]
            spilled = isinstance(following.ops, SpilledOp)
            if group and (spilled or size + following.size_bytes > self._group_bytes_max):
                break
            group.append(self._waiting.popleft())
            size += following.size_bytes
            if spilled:
                self._spilled -= 1
                break
        self.queued_bytes -= size
        return group

    def hold(self, size_bytes: int) -> None:
        """Keep the room of submissions that were taken."""
        with self._lock:
            self.held_bytes += size_bytes

    def let_go(self, size_bytes: int) -> None:
        """Release the room that `hold` kept."""
        with self._lock:
            self.held_bytes -= size_bytes
            if self._visitors:
                self._let_in()

    def end(self) -> None:
        """Take nothing more in; what is queued may still be taken."""
        with self._lock:
            self._end()

    def abandon(self, failure: MillstreamError | None) -> list[Waiting]:
        """End the queue, give nothing more out, and return what was still queued.

        Later callers get `failure` as the cause.
        """
        with self._lock:
            self._failure = failure
            self._abandoned = True
            left = list(self._waiting)
            self._waiting.clear()
            self.queued_bytes = self._spilled = 0
            self._end()
            return left

    def _end(self) -> None:
        self._ended = True
        self._hurry()
        self._let_in()


def _end(loop: asyncio.AbstractEventLoop, room: asyncio.Future[None]) -> None:
    """Wake a task of a loop; `RuntimeError` if the loop is closed."""
    loop.call_soon_threadsafe(_settle, room)


def _settle(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
