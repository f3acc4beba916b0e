"""What waits for the log's writer: a queue in order of the calls, bounded by bytes.

Callers wait for room as they can: threads by blocking, tasks by awaiting. The writer sleeps where nothing waits, and is woken then
only: a wake-up that nobody needs costs as much as a small append.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from typing import Final

from millstream.errors import MillstreamError, Overloaded, WriterClosed
from millstream.model.operations import SpilledOp
from millstream.wal.writing.waiters import Waiting

_NEVER: Final = sys.maxsize


class SubmissionQueue:
    """Bounded; any number of threads and event loops put, one thread at a time takes.

    Args:
        bytes_max: of what waits; one larger submission may stretch it.
        group_bytes_max: of what `take` gives at once; a single submission may stretch it.
        delay_s: how long what came first waits for company.
    """

    def __init__(self, *, bytes_max: int, group_bytes_max: int, delay_s: float) -> None:
        self._bytes_max = bytes_max
        self._group_bytes_max = group_bytes_max
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """For the taker."""
        self._room = threading.Condition(self._lock)
        """For threads that wait for room."""
        self._blocked = 0
        """How many these are."""
        self._visitors: dict[asyncio.Future[None], tuple[asyncio.AbstractEventLoop, int]] = {}
        """Tasks that wait for room, in order: a future of the task's loop, the loop, and how many bytes it has."""
        self._waiting: deque[Waiting] = deque()
        self._spilled = 0
        """Among them."""
        self._came_s = 0.0
        """When the first of them came, or before."""
        self._wake_above_bytes = _NEVER
        """The taker sleeps until more than this waits; `_NEVER` where it is awake."""
        self._ended = False
        """Nothing more is taken in."""
        self._abandoned = False
        """Nothing more is given out, either."""
        self._failure: MillstreamError | None = None
        self.queued_bytes = 0
        """Of all that waits."""
        self.held_bytes = 0
        """Of what was taken, and keeps its room until it is let go: it waits for others than the taker."""

    # --- putting ---------------------------------------------------------------------------------------------------

    def put(self, waiting: Waiting, deadline_s: float | None) -> None:
        """Put behind the others; blocks while there's no room.

        Raises:
            Overloaded: there was none until the deadline.
            WriterClosed: no more is taken in.
        """
        size = waiting.size_bytes
        with self._lock:
            if not self._may_decide(size):
                self._blocked += 1
                self._hurry()
                try:
                    self._room.wait_for(lambda: self._may_decide(size), deadline_s)
                finally:
                    self._blocked -= 1
            self._check_open()
            if not self._has_room(size):
                raise self._overloaded()
            self._push(waiting)

    def offer(self, waiting: Waiting) -> bool:
        """Put behind the others, where there is room and no task waits for it; `WriterClosed` where no more is taken in."""
        with self._lock:
            return self._offer(waiting, let_in=False)

    async def put_async(self, waiting: Waiting, deadline_s: float | None) -> None:
        """As `put`, for a task: its event loop goes on meanwhile. Cancelled, it has put nothing."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                let_in = False
                while (room := self._offer_or_visit(waiting, loop, let_in=let_in)) is not None:
                    try:
                        await room
                    except BaseException:
                        self._leave(room)
                        raise
                    let_in = True
        except TimeoutError:
            raise self._overloaded() from None

    def _offer(self, waiting: Waiting, *, let_in: bool) -> bool:
        """Put it where there is room, behind tasks that wait for theirs already: who takes what waits lets them in."""
        self._check_open()
        if self._waiting or self.held_bytes:
            behind = self._visitors and not let_in
            if behind or self.queued_bytes + self.held_bytes + waiting.size_bytes > self._bytes_max:
                return False
        self._push(waiting)
        return True

    def _offer_or_visit(
        self, waiting: Waiting, loop: asyncio.AbstractEventLoop, *, let_in: bool
    ) -> asyncio.Future[None] | None:
        """Put it; or a future that ends when it's worth to try again, before others where it was let in already."""
        with self._lock:
            if self._offer(waiting, let_in=let_in):
                return None
            room: asyncio.Future[None] = loop.create_future()
            if let_in:
                self._visitors = {room: (loop, waiting.size_bytes), **self._visitors}
            else:
                self._visitors[room] = (loop, waiting.size_bytes)
            self._hurry()
            return room

    def _leave(self, room: asyncio.Future[None]) -> None:
        """Wait for room no longer. Who was let in and didn't come leaves the room to the next."""
        with self._lock:
            self._visitors.pop(room, None)
            self._let_in()

    def _may_decide(self, size: int) -> bool:
        return self._ended or self._has_room(size)

    def _has_room(self, size: int) -> bool:
        taken = self.queued_bytes + self.held_bytes
        return not taken or taken + size <= self._bytes_max

    def _check_open(self) -> None:
        if self._ended:
            raise WriterClosed("the log's writer takes no more") from self._failure

    def _overloaded(self) -> Overloaded:
        if self.held_bytes > self.queued_bytes:
            return Overloaded(
                f"{self.held_bytes} bytes are written, and still wait for other machines to have them",
                hint="`millstream replicas` tells who doesn't answer.",
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
        """Wake the taker, where it sleeps."""
        if self._wake_above_bytes != _NEVER:
            self._wake_above_bytes = _NEVER
            self._work.notify()

    def _let_in(self) -> None:
        """Wake tasks for which there is room, in order; at the end all of them."""
        free = self._bytes_max - self.queued_bytes - self.held_bytes
        nobody = not self._waiting and not self.held_bytes
        for room, (loop, size) in list(self._visitors.items()):
            if size > free and not (nobody or self._ended):
                return
            del self._visitors[room]
            try:
                loop.call_soon_threadsafe(_end, room)
            except RuntimeError:  # the loop is closed: nobody awaits there any more
                continue
            nobody = False
            free -= size

    # --- taking ----------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether nothing waits, and more is taken in."""
        return not self._waiting and not self._ended

    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to take, for as long as asked; False once there never will be."""
        with self._lock:
            if not (self._waiting or self._ended):
                self._sleep(0, timeout_s)
            if self._waiting and self._delay_s:
                self._gather()
            return not self._abandoned and (bool(self._waiting) or not self._ended)

    def _gather(self) -> None:
        """Wait for company, until there's a group's worth of it, or somebody finds no room."""
        enough = min(self._group_bytes_max, self._bytes_max)
        left_s = self._came_s + self._delay_s - time.monotonic()
        crowded = self._blocked or self._visitors or self.queued_bytes >= enough
        if left_s > 0 and not (crowded or self._ended):
            self._sleep(enough - 1, left_s)

    def _sleep(self, until_above_bytes: int, timeout_s: float) -> None:
        self._wake_above_bytes = until_above_bytes
        self._work.wait_for(lambda: self._wake_above_bytes == _NEVER, timeout_s)
        self._wake_above_bytes = _NEVER

    def take(self) -> list[Waiting]:
        """What waits, up to a group's bound, in order; empty where nothing does. A `SpilledOp` is a group of its own."""
        with self._lock:
            if not self._spilled and self.queued_bytes <= self._group_bytes_max:
                group = list(self._waiting)
                self._waiting.clear()
                self.queued_bytes = 0
            else:
                group = self._take_some()
            if self._blocked:
                self._room.notify_all()
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
        """What was taken goes on taking room."""
        with self._lock:
            self.held_bytes += size_bytes

    def let_go(self, size_bytes: int) -> None:
        """It doesn't any more."""
        with self._lock:
            self.held_bytes -= size_bytes
            if self._blocked:
                self._room.notify_all()
            if self._visitors:
                self._let_in()

    def end(self) -> None:
        """Take no more in; what waits may still be taken."""
        with self._lock:
            self._end()

    def abandon(self, failure: MillstreamError | None) -> list[Waiting]:
        """As `end`, and nothing more is given out: what still waited. Callers get `failure` as the cause."""
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
        self._room.notify_all()
        self._let_in()


def _end(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
