"""The part of a home's status that a viewer may read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millstream.app.record_rates import Status
from millstream.model.access import ALL_STREAMS, Right
from millstream.serving.access import Caller


@dataclass(frozen=True, slots=True)
class VisibleStreams:
    """The streams that a viewer may read."""

    streams: frozenset[str] | None
    """Names; None for every stream, and what concerns the whole home."""

    @classmethod
    def of(cls, caller: Caller, names: Iterator[str]) -> VisibleStreams:
        """Return the streams that a caller may read. Raises `AccessError` (`forbidden`) if it may read none of the streams."""
        if caller.may(Right.READ):
            return cls(None)
        found = frozenset(name for name in names if caller.may(Right.READ, name))
        if not found:
            caller.check(Right.READ, ALL_STREAMS)
        return cls(found)

    def has(self, stream: str) -> bool:
        """Return whether the viewer may read a stream."""
        return self.streams is None or stream in self.streams

    def part_of(self, status: Status) -> Status:
        """Return the status without what the viewer may not read."""
        if self.streams is None:
            return status
        return {
            **status,
            "streams": [stream for stream in status["streams"] if self.has(stream["name"])],
            "conditions": [one for one in status["conditions"] if not one["stream"] or self.has(one["stream"])],
            # Their texts may name other streams.
            "alerts": None,
            "problems": [],
            "measures": {},
            "resources": {"memory_bytes": {}, "disk_free_bytes": None, "disk_size_bytes": None},
        }
