"""Counters for several sites at once: each actor writes its own entry alone, and the value is the sum of all.

An actor's entry only grows (in a PN counter both of its sides do), so the greater entry is the newer one. An actor
that has lost its entry goes on under a new incarnation, never under the old one: two histories of one entry wouldn't
merge into either. In a merging table the actor is the region, and its log orders its totals.

Bodies: a count u32, then for each entry, in order of its actor: region u32, shard u32, incarnation u64, and one or
two numbers as encoded values. Empty entries aren't written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, Self

import pyarrow as pa

from millstream.crdt.accumulating import LogRuns
from millstream.crdt.columns import Grouped, greatest, sums
from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, counted, encode_value, whole_number
from millstream.errors import InvalidValue

_ACTOR: Final = struct.Struct(">IIQ")


class Actor(NamedTuple):
    """A counting actor: one incarnation of one writer, at one site."""

    region: int
    shard: int = 0
    incarnation: int = 0

    def encode(self) -> bytes:
        """Return 16 bytes, whose order is the actors' order; raise `InvalidValue` if a number is out of range."""
        try:
            return _ACTOR.pack(*self)
        except struct.error as error:
            raise InvalidValue(f"{self} can't be an actor: {error}") from error


def read_actor(cursor: Cursor) -> Actor:
    """Read the bytes of `Actor.encode`."""
    return Actor(*_ACTOR.unpack(cursor.take(_ACTOR.size)))


@dataclass(frozen=True, slots=True)
class GCounter:
    """A counter that only grows: the value is 0 or more. Whole numbers of any size.

    Args:
        counts: the count of each actor; never below 0.

    Raises:
        InvalidValue: a count is negative, or isn't a whole number.
    """

    counts: Mapping[Actor, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {actor: _positive(count) for actor, count in sorted(self.counts.items())}
        entries = {actor: count for actor, count in counts.items() if count}
        object.__setattr__(self, "counts", MappingProxyType(entries))

    def __reduce__(self) -> tuple[object, ...]:
        return GCounter, (dict(self.counts),)

    def add(self, actor: Actor, by: int = 1) -> Self:
        """Return the counter after an actor has counted up. An actor adds to its own newest state alone.

        Raises:
            InvalidValue: `by` is negative, or isn't a whole number.
        """
        return type(self)({**self.counts, actor: self.counts.get(actor, 0) + _positive(by)})

    def join(self, other: Self) -> Self:
        """Return each actor's greater count."""
        actors = self.counts.keys() | other.counts.keys()
        return type(self)({actor: max(self.counts.get(actor, 0), other.counts.get(actor, 0)) for actor in actors})

    @property
    def value(self) -> int:
        """The sum."""
        return sum(self.counts.values())

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        entries = (actor.encode() + encode_value(count) for actor, count in self.counts.items())
        return seal(StateKind.GROW_COUNTER, counted(entries))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the state of its bytes; raise `MergeStateUnreadable` if no state has them."""
        return decoded(StateKind.GROW_COUNTER, data, cls._read)

    @classmethod
    def _read(cls, cursor: Cursor) -> Self:
        return cls({read_actor(cursor): cursor.value() for _ in range(cursor.length())})

    @staticmethod
    def fold_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the greatest total that each region has written, or the sum of its increments."""
        if rows.merge.of(name).increments:
            return _totals(rows, name)
        if rows.is_distinct:
            return rows.newest_of(name)
        return {name: greatest(rows.column(name), rows.codes, rows.count)}

    @staticmethod
    def merge_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the sum of the regions' totals."""
        return {name: sums(rows.column(name), rows.codes, rows.count, less=rows.subtracted)}


@dataclass(frozen=True, slots=True)
class PNCounter:
    """A counter that goes up and down. Whole numbers of any size.

    Args:
        sides: the sums that each actor has added and subtracted; neither below 0.

    Raises:
        InvalidValue: a sum is negative, or isn't a whole number.
    """

    sides: Mapping[Actor, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sides = {actor: (_positive(plus), _positive(minus)) for actor, (plus, minus) in sorted(self.sides.items())}
        entries = {actor: side for actor, side in sides.items() if any(side)}
        object.__setattr__(self, "sides", MappingProxyType(entries))

    def __reduce__(self) -> tuple[object, ...]:
        return PNCounter, (dict(self.sides),)

    def add(self, actor: Actor, by: int = 1) -> Self:
        """Return the counter after an actor has counted up or down. An actor adds to its own newest state alone.

        Raises:
            InvalidValue: `by` isn't a whole number.
        """
        by = whole_number(by, "a counter's step")
        plus, minus = self.sides.get(actor, (0, 0))
        return type(self)({**self.sides, actor: (plus + max(by, 0), minus + max(-by, 0))})

    def join(self, other: Self) -> Self:
        """Return each actor's greater sums."""
        entries = dict(self.sides)
        for actor, (plus, minus) in other.sides.items():
            own_plus, own_minus = entries.get(actor, (0, 0))
            entries[actor] = (max(own_plus, plus), max(own_minus, minus))
        return type(self)(entries)

    @property
    def value(self) -> int:
        """The sum of additions less the sum of subtractions."""
        return sum(plus - minus for plus, minus in self.sides.values())

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        entries = (
            actor.encode() + encode_value(plus) + encode_value(minus) for actor, (plus, minus) in self.sides.items()
        )
        return seal(StateKind.PN_COUNTER, counted(entries))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the state of its bytes; raise `MergeStateUnreadable` if no state has them."""
        return decoded(StateKind.PN_COUNTER, data, cls._read)

    @classmethod
    def _read(cls, cursor: Cursor) -> Self:
        return cls({read_actor(cursor): (cursor.value(), cursor.value()) for _ in range(cursor.length())})

    @staticmethod
    def fold_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return each region's newest total, or the sum of its increments.

        A region's log orders its rows, so the newest total replaces all before it.
        """
        return _totals(rows, name) if rows.merge.of(name).increments else rows.newest_named(name)

    @staticmethod
    def merge_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the sum of the regions' totals."""
        return {name: sums(rows.column(name), rows.codes, rows.count, less=rows.subtracted)}


def _totals(rows: Grouped, name: str) -> dict[str, pa.Array]:
    """Return each region's total of increments so far, added in the order of its log."""
    if rows.sequence is None:
        return rows.newest_of(name)
    runs = LogRuns.of(rows.codes[rows.sequence])
    column = rows.column(name)
    totals = runs.totals(column.take(pa.array(rows.sequence)))
    last = runs.last()
    totals.check(last, column=name)
    return {name: totals.values.take(pa.array(last)).cast(column.type)}


def _positive(count: int) -> int:
    found = whole_number(count, "a counter's step")
    if found < 0:
        raise InvalidValue(f"a counter can't grow by {found}")
    return found
