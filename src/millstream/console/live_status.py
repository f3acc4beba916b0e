"""The status that all viewers share, taken at most once a second while there are any, and each viewer's differences.

A viewer has the last area that was sent to it. So a slow one gets fewer and larger differences, and none waits in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import structlog

from millstream.app.record_rates import Rates, Status
from millstream.console.html import Rendered
from millstream.console.sight import Sight

logger = structlog.get_logger("millstream.serve")

_EVERY_S: Final = 1.0
_SHARE: Final = 0.015
"""The part of a core that taking the status may cost: of a large home it is taken less often."""
_EVERY_S_MAX: Final = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A status, with the areas that were made of it."""

    status: Status
    rates: Mapping[str, float]
    taken_s: float
    """On the monotonic clock."""
    areas: dict[View, Rendered] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class View:
    """A page as one viewer sees it: viewers with the same one share its area."""

    path: str
    sight: Sight


Render: TypeAlias = Callable[[View, Snapshot], Rendered]


class Live:
    """The shared status. For one event loop.

    Args:
        collect: returns the status; it may block.
        render: makes a view's area.
    """

    def __init__(self, collect: Callable[[], Status], render: Render) -> None:
        self._collect = collect
        self._render = render
        self._rates = Rates()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="console")
        self._views: dict[View, int] = {}
        """Numbers of viewers."""
        self._running: asyncio.Task[None] | None = None
        self._current: Snapshot | None = None
        self._costs_s: deque[float] = deque(maxlen=3)
        """CPU time of the last statuses and their areas; the first two take long, for imports and indexes."""
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Close the thread."""
        self._thread.shutdown(wait=False)

    async def snapshot(self) -> Snapshot:
        """Return a status that isn't older than the interval."""
        current = self._current
        if current is None or time.monotonic() - current.taken_s >= self._every_s:
            current = await asyncio.get_running_loop().run_in_executor(self._thread, self._take)
        return current

    async def area(self, view: View) -> tuple[Snapshot, Rendered]:
        """Return a view's area, and the status that it shows."""
        snapshot = await self.snapshot()
        area = snapshot.areas.get(view)
        if area is None:
            area = await asyncio.get_running_loop().run_in_executor(self._thread, self._area, snapshot, view)
        return snapshot, area

    def current(self, view: View) -> tuple[Snapshot, Rendered] | None:
        """Return the last status with a view's area, of any age, if there is one."""
        if self._current is None or view not in self._current.areas:
            return None
        return self._current, self._current.areas[view]

    async def next(self, *, within_s: float) -> None:
        """Wait until there is a newer status than the current one, but not for longer than a time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()

    @contextlib.contextmanager
    def watched(self, view: View) -> Iterator[None]:
        """Keep the status and a view's area current until the block ends."""
        self._views[view] = self._views.get(view, 0) + 1
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._views[view] -= 1
            if not self._views[view]:
                del self._views[view]

    @property
    def _every_s(self) -> float:
        cost_s = min(self._costs_s) if len(self._costs_s) == self._costs_s.maxlen else 0.0
        return min(max(_EVERY_S, cost_s / _SHARE), _EVERY_S_MAX)

    async def _run(self) -> None:
        while self._views:
            try:
                snapshot = await self.snapshot()
                for view in list(self._views):
                    if view not in snapshot.areas:
                        await asyncio.get_running_loop().run_in_executor(self._thread, self._area, snapshot, view)
            except Exception:
                logger.exception("the console's status can't be taken")
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(self._every_s)

    def _take(self) -> Snapshot:
        current = self._current
        if current is not None and time.monotonic() - current.taken_s < self._every_s:
            return current  # another caller's
        start_s = time.thread_time()
        status = self._collect()
        now_s = time.monotonic()
        self._costs_s.append(time.thread_time() - start_s)
        self._current = Snapshot(status, self._rates.take(status, now_s), now_s)
        return self._current

    def _area(self, snapshot: Snapshot, view: View) -> Rendered:
        if view not in snapshot.areas:
            start_s = time.thread_time()
            snapshot.areas[view] = self._render(view, snapshot)
            self._costs_s[-1] += time.thread_time() - start_s
        return snapshot.areas[view]
