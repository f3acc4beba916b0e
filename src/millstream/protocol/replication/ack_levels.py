"""The high-water mark: how far enough followers, or the object store, hold a stream durably.

The leader's machine collects their reports. A stream's acknowledgement level says how many of them are enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.model.ids import Epoch, GroupNumber
from millstream.model.positions import Seq
from millstream.model.replication import AckKind, AckLevel

_ALL_THERE_IS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Holding:
    """Durable state of a stream in one other place: a follower, or the object store."""

    name: str
    """The node's name, or `OBJECT_STORE`."""
    promised: Epoch
    """Its promise: it rejects shipments of a leader with a lower epoch."""
    group: GroupNumber
    """The last commit group that it holds whole."""
    persisted_upto: Seq = Seq(0)  # a NewType of int
    """Every number up to it is held or will never be; 0 for the object store."""
    told_ns: int = 0
    """When it reported this, by the leader's clock, in nanoseconds since 1970 UTC; 0 if no clock was read."""
    is_store: bool = False
    """Whether it is the object store."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """State of a stream in the places other than its leader, at one moment.

    It determines which acknowledgement levels are reached. The leader's machine makes it from the
    followers' reports, and the file of acknowledgements carries it. The stream's writer reads it
    while appends wait.
    """

    promised: Epoch = Epoch(0)  # a NewType of int
    """The leader's own promise; a place counts only if it hasn't promised a later leader."""
    places: tuple[Holding, ...] = ()

    def group_reached(self, level: AckLevel) -> GroupNumber:
        """Return the last commit group that enough other places hold for the level; 0 if there is none yet.

        `local` needs no other place: the result covers everything.
        """
        return GroupNumber(self._reached(level, [int(place.group) for place in self._counting(level)]))

    def seq_reached(self, level: AckLevel) -> Seq:
        """Return the number up to which the level is reached, as `group_reached` does for groups."""
        return Seq(self._reached(level, [int(place.persisted_upto) for place in self._counting(level)]))

    def behind(self, group: GroupNumber, level: AckLevel) -> tuple[str, ...]:
        """Return the names of the places that would count for the level, and lack a group."""
        is_store = level.kind is AckKind.OBJECT
        return tuple(
            place.name
            for place in self.places
            if place.is_store == is_store and (place.group < group or place.promised > self.promised)
        )

    def _counting(self, level: AckLevel) -> list[Holding]:
        is_store = level.kind is AckKind.OBJECT
        return [place for place in self.places if place.is_store == is_store and place.promised <= self.promised]

    @staticmethod
    def _reached(level: AckLevel, ends: list[int]) -> int:
        if level.kind is AckKind.LOCAL:
            return _ALL_THERE_IS
        needed = max(level.followers, 1)
        return sorted(ends, reverse=True)[needed - 1] if len(ends) >= needed else 0
