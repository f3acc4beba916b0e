"""Hybrid times of a writer's commit groups: by its machine's clock, and always later than what there was before."""

from __future__ import annotations

from millstream.crdt.hlc import HybridTime, check_drift, next_wall_ns
from millstream.ports import Clock


class GroupTimes:
    """Gives each commit group its time.

    Args:
        clock: the machine's, which may go back.
        last_ns: the time of the log's last group; 0 where it has none.

    Concurrency: `next_ns` by the thread that writes, `hear` by one other at a time.
    """

    def __init__(self, clock: Clock, last_ns: int) -> None:
        self._clock = clock
        self._last_ns = last_ns
        self._heard_ns = 0

    def next_ns(self) -> int:
        """The next group's: later than that of every group before it, and than whatever was heard of."""
        self._last_ns = next_wall_ns(max(self._last_ns, self._heard_ns), self._clock.now_ns())
        return self._last_ns

    def hear(self, time: HybridTime, name: str) -> None:
        """Take in a time of elsewhere. `ClockSkew` where it lies too far ahead of this clock."""
        check_drift(time, self._clock.now_ns(), name=name)
        self._heard_ns = max(self._heard_ns, time.wall_ns)
