"""The hybrid logical clock (Kulkarni et al., 2014), which follows the wall clock, and always causality.

The owner of a clock holds its last time, and makes the next one durable before another process can have seen it. A log's
writer does that by the frames themselves (`next_wall_ns`): their hybrid times rise from group to group, over restarts
too. A record's time is its frame's, with its own number as the logical part.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

from millstream.errors import InvalidValue, MergeStateUnreadable, ReplicationError

DRIFT_MAX_NS: Final = 60 * 1_000_000_000
"""How far another node's clock may be ahead: NTP keeps milliseconds, so a clock that is a minute off is unmanaged."""
_LAYOUT: Final = struct.Struct(">QQI")
ENCODED_SIZE: Final = _LAYOUT.size
"""Size in bytes of an encoded time."""
_WALL_MAX: Final = 2**63 - 1
_LOGICAL_MAX: Final = 2**63 - 1
_NODE_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, order=True)
class HLC:
    """A hybrid time: a moment of one node. Orders by wall, then logical, then node: no two nodes' times are equal.

    `tick` and `observe` return a time that is later than the node's last one and, for `observe`, later than the time
    received, whatever the wall clock does. Start a node's clock with `HLC(0, 0, node)`.

    Raises:
        InvalidValue: a number is out of range.
    """

    wall_ns: int
    """Nanoseconds since 1970 UTC; never below what the node has seen, so it may be ahead of its wall clock."""
    logical: int = 0
    """Distinguishes moments of one wall time."""
    node: int = 0
    """The region's number."""

    def __post_init__(self) -> None:
        for name, value, top in (("wall_ns", self.wall_ns, _WALL_MAX), ("logical", self.logical, _LOGICAL_MAX), ("node", self.node, _NODE_MAX)):  # fmt: skip
            if not 0 <= value <= top:
                raise InvalidValue(f"{value} can't be the {name} of a hybrid time: it lies between 0 and {top}")

    @property
    def moment(self) -> tuple[int, int]:
        """The time without its node: decides whether one moment is strictly later than another."""
        return self.wall_ns, self.logical

    def tick(self, now_ns: int) -> Self:
        """Return the node's next time, for an event there.

        Args:
            now_ns: its wall clock, which may have gone back.
        """
        if now_ns > self.wall_ns:
            return type(self)(now_ns, 0, self.node)
        return self._after(self.wall_ns, self.logical)

    def observe(self, remote: HLC, now_ns: int, *, name: str = "", drift_max_ns: int = DRIFT_MAX_NS) -> Self:
        """Return the node's next time after it has received another node's time: later than both.

        Args:
            remote: the received time.
            now_ns: the node's wall clock.
            name: name of the sender, for the error; empty: its number is used.
            drift_max_ns: how far ahead of `now_ns` the other's wall time may be.

        Raises:
            ReplicationError (`clock_skew`): it is further ahead; the clock stays where it was.
        """
        check_drift(remote, now_ns, name=name, drift_max_ns=drift_max_ns)
        wall = max(self.wall_ns, remote.wall_ns, now_ns)
        if wall > max(self.wall_ns, remote.wall_ns):
            return type(self)(wall, 0, self.node)
        return self._after(wall, max(time.logical for time in (self, remote) if time.wall_ns == wall))

    def join(self, other: HLC) -> HLC:
        """Return the later time: commutative, associative, idempotent."""
        return max(self, other)

    def encode(self) -> bytes:
        """Return 20 bytes, whose order is the times' order."""
        return _LAYOUT.pack(self.wall_ns, self.logical, self.node)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the time of its bytes; raise `MergeStateUnreadable` if they aren't a time's, or of another size."""
        try:
            return cls(*_LAYOUT.unpack(data))
        except (struct.error, InvalidValue) as error:
            raise MergeStateUnreadable(f"{len(data)} bytes are no hybrid time: {error}") from error

    def _after(self, wall: int, logical: int) -> Self:
        if logical < _LOGICAL_MAX:
            return type(self)(wall, logical + 1, self.node)
        return type(self)(wall + 1, 0, self.node)


NEVER: Final = HLC(0)
"""A time before every time of a clock."""


def check_drift(remote: HLC, now_ns: int, *, name: str = "", drift_max_ns: int = DRIFT_MAX_NS) -> None:
    """Raise `ReplicationError` (`clock_skew`), with the node's name, if a time is too far ahead of a wall clock."""
    ahead_ns = remote.wall_ns - now_ns
    if ahead_ns > drift_max_ns:
        who = name or f"region {remote.node}"
        raise ReplicationError(
            f"the clock of {who} is {ahead_ns / 1e9:,.1f} s ahead of this one; up to {drift_max_ns / 1e9:g} s are taken",
            code="clock_skew",
            node=who,
            ahead_s=ahead_ns / 1e9,
        )


def next_wall_ns(last_ns: int, now_ns: int) -> int:
    """Return the hybrid time of a log's next commit group after one with `last_ns`: later than all before it."""
    return max(now_ns, last_ns + 1)
