"""Hybrid times of a writer's commit groups: from its machine's clock, and always later than any time before."""

from __future__ import annotations

import threading
from collections.abc import Callable

from millstream.crdt.hlc import HLC, check_drift, next_wall_ns
from millstream.ports import Clock


class GroupTimes:
    """Source of commit groups' hybrid times.

    Args:
        clock: the machine's, which may go back.
        last_ns: the time of the log's last group; 0 if it has none.

    Concurrency: `next_ns` and `before` by the thread that writes, `hear` by any thread.
    """

    def __init__(self, clock: Clock, last_ns: int) -> None:
        self._clock = clock
        self._last_ns = last_ns
        self._heard_ns = 0
        self._hearing = threading.Lock()
        self.before: Callable[[], None] = lambda: None
        """Called before each group's time is taken. It may call `hear`; it raises nothing."""

    def next_ns(self) -> int:
        """Return the next group's time: later than every group before it, and than every time observed."""
        self.before()
        self._last_ns = next_wall_ns(max(self._last_ns, self._heard_ns), self._clock.now_ns())
        return self._last_ns

    def hear(self, time: HLC, name: str) -> None:
        """Observe another region's time. Raises `ReplicationError` (`clock_skew`) if it is too far ahead of this clock."""
        check_drift(time, self._clock.now_ns(), name=name)
        with self._hearing:
            self._heard_ns = max(self._heard_ns, time.wall_ns)
