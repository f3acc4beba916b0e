"""The status that all viewers share: taken at most once a second, and only while there are viewers and the home changes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import structlog

from millstream.app.record_rates import Rates, Status
from millstream.console.html import Rendered
from millstream.console.visible_streams import VisibleStreams
from millstream.errors import MillstreamError

logger = structlog.get_logger("millstream.serve")

_SHARE: Final = 0.015
"""The part of a core that taking the status may cost: of a large home it is taken less often."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How often a status is taken, and how long a page waits for one, in seconds."""

    every_s: float = 1.0
    every_s_max: float = 10.0
    """The same, where a status costs much."""
    unchanged_s: float = 5.0
    """How long a status is shown while nothing seems to have changed: lags in seconds grow, and a look doesn't see everything."""
    patience_s: float = 2.0
    """How long a page waits for the next status before it shows the last one."""
    first_patience_s: float = 5.0
    """How long a page waits if there is no last one; as long as a request for the status does."""


USUAL: Final = Timing()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A status, with the areas that were made of it."""

    status: Status
    rates: Mapping[str, float]
    taken_s: float
    """When it was current, on the monotonic clock."""
    areas: dict[View, Rendered] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class View:
    """A page as one viewer sees it: viewers with the same one share its area."""

    path: str
    visible: VisibleStreams


Render: TypeAlias = Callable[[View, Snapshot], Rendered]


class Live:
    """The shared status. For one event loop.

    Args:
        collect: returns the status; it may block.
        look: returns a value that differs if a new status would; None if that isn't known.
        last: returns the last status that was taken for others, and when on the monotonic clock; None if there is none.
    """

    def __init__(
        self,
        collect: Callable[[], Status],
        render: Render,
        look: Callable[[], Hashable | None],
        last: Callable[[], tuple[Status, float] | None] = lambda: None,
        *,
        timing: Timing = USUAL,
    ) -> None:
        self.timing = timing
        self._collect = collect
        self._render = render
        self._look = look
        self._last = last
        self._rates = Rates()
        # Two threads: areas of the last status are made while the next one hangs.
        self._taker, self._drawer = (
            ThreadPoolExecutor(1, thread_name_prefix=f"console-{of}") for of in ("home", "area")
        )
        self._views: dict[View, int] = {}
        """Numbers of viewers."""
        self._running: asyncio.Task[None] | None = None
        self._current: Snapshot | None = None
        self._taking: asyncio.Future[Snapshot] | None = None
        self._began_s = self._looked_s = self._collected_s = -math.inf
        self._seen: Hashable | None = None
        """The value that `look` returned before the last status was collected."""
        self._is_failing = False
        self._costs_s: deque[float] = deque(maxlen=3)
        """CPU time of the last statuses and their areas; the first two take long, for imports and indexes."""
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Close the threads."""
        self._taker.shutdown(wait=False)
        self._drawer.shutdown(wait=False)

    async def snapshot(self) -> Snapshot:
        """Return the current status; the last one, with its age, if the next can't be taken or takes too long.

        Raises:
            MillstreamError (`status_hangs`): there is no last one.
        """
        now_s = time.monotonic()
        if self._current is not None and now_s - self._looked_s < self.timing.every_s:
            return self._current
        if self._taking is None or self._taking.done():
            self._began_s = now_s
            self._taking = asyncio.get_running_loop().run_in_executor(self._taker, self._take)
        taking = self._taking
        for patience_s in (self.timing.patience_s, self.timing.first_patience_s):
            await asyncio.wait([taking], timeout=max(0.0, self._began_s + patience_s - time.monotonic()))
            if self._current is not None:
                return self._current
        if not taking.done():
            waited_s = time.monotonic() - self._began_s
            raise MillstreamError(f"no status could be taken for {waited_s:.1f} s", code="status_hangs")
        return taking.result()

    async def area(self, view: View) -> tuple[Snapshot, Rendered]:
        """Return a view's area, and the status that it shows."""
        snapshot = await self.snapshot()
        area = snapshot.areas.get(view)
        if area is None:
            area = await asyncio.get_running_loop().run_in_executor(self._drawer, self._area, snapshot, view)
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
        return min(max(self.timing.every_s, cost_s / _SHARE), self.timing.every_s_max)

    async def _run(self) -> None:
        while self._views:
            try:
                snapshot = await self.snapshot()
                for view in list(self._views):
                    if view not in snapshot.areas:
                        await asyncio.get_running_loop().run_in_executor(self._drawer, self._area, snapshot, view)
            except Exception:
                if not self._is_failing:
                    logger.exception("the console's first status can't be taken, or an area can't be made")
                self._is_failing = True
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(self.timing.every_s)

    def _take(self) -> Snapshot:
        self._looked_s = time.monotonic()
        if self._current is None and (last := self._last()) is not None:
            self._current = Snapshot(last[0], {}, last[1])
        current = self._current
        try:
            self._current = self._next(current, self._looked_s)
        except Exception:
            if current is None:
                raise
            if not self._is_failing:
                logger.exception("the console's status can't be taken: it shows the last one")
            self._is_failing = True
            return current
        self._is_failing = False
        return self._current

    def _next(self, current: Snapshot | None, now_s: float) -> Snapshot:
        seen, age_s = self._look(), now_s - self._collected_s
        if (
            current is not None
            and seen is not None
            and seen == self._seen
            and age_s < max(self.timing.unchanged_s, self._every_s)
        ):
            rates = self._rates.take(current.status, now_s)
            # A comparison goes on in this process, whatever the home does.
            is_same = rates == current.rates
            drawn = list(current.areas.items()) if is_same else []
            areas = {view: area for view, area in drawn if view.path != "/diff"}
            return Snapshot(current.status, rates, now_s, areas)
        if current is not None and age_s < self._every_s:
            return current
        start_s = time.thread_time()
        status = self._collect()
        self._costs_s.append(time.thread_time() - start_s)
        self._seen, self._collected_s = seen, now_s
        return Snapshot(status, self._rates.take(status, now_s), now_s)

    def _area(self, snapshot: Snapshot, view: View) -> Rendered:
        if view not in snapshot.areas:
            start_s = time.thread_time()
            snapshot.areas[view] = self._render(view, snapshot)
            if self._costs_s:
                self._costs_s[-1] += time.thread_time() - start_s
        return snapshot.areas[view]
