"""Sets that several sites add to: union sets, which only grow, and observed-remove sets, which allow removal.

An observed-remove set (Bieniusa et al., 2012; deltas as in Almeida et al., 2016) identifies each addition by a *dot*,
an actor and that actor's count, and has a set of dots that it has seen. An addition that both sides hold stays. One
that a single side holds stays unless the other has seen this very addition and no longer holds it. So a removal
removes what its site had seen, and a concurrent addition elsewhere survives it. Removed values leave only their dots,
and an actor's unbroken run of counts is kept as one number.

Bodies: a union set's values, as a list, in their order. An observed-remove set's seen dots (for each actor, in order,
the count up to which it has seen all, then single dots beyond that), then each value with its dots, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import pyarrow as pa

from millstream.crdt.columns import Grouped, unions
from millstream.crdt.counters import Actor, read_actor
from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, canonical, counted, encode_value, order_of, whole
from millstream.errors import InvalidValue


@dataclass(frozen=True, slots=True, init=False)
class UnionSet:
    """A set that only grows.

    Args:
        values: values of kinds that columns have; 1 and 1.0 and true are three.

    Raises:
        InvalidValue: a value is of another kind.
    """

    items: Mapping[bytes, Any]
    """The values by their encodings."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        items = {encode_value(value): canonical(value) for value in values}
        object.__setattr__(self, "items", MappingProxyType(items))

    def __reduce__(self) -> tuple[object, ...]:
        return UnionSet, (self.value,)

    def add(self, value: Any) -> Self:
        """Return the set with one value more."""
        return type(self)([*self.items.values(), value])

    def join(self, other: Self) -> Self:
        """Return all values of both."""
        return type(self)([*self.items.values(), *other.items.values()])

    @property
    def value(self) -> tuple[Any, ...]:
        """The values in their order."""
        return tuple(sorted(self.items.values(), key=order_of))

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        return seal(StateKind.UNION_SET, counted(encode_value(value) for value in self.value))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the state of its bytes; raise `MergeStateUnreadable` if no state has them."""
        return decoded(StateKind.UNION_SET, data, cls._read)

    @classmethod
    def _read(cls, cursor: Cursor) -> Self:
        return cls([cursor.value() for _ in range(cursor.length())])

    @staticmethod
    def fold_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return all values that a region ever wrote."""
        if rows.is_distinct and rows.states == rows.count:
            return rows.newest_of(name)  # a state's lists are sets
        return {name: unions(rows.column(name), rows.codes, rows.count)}

    @staticmethod
    def merge_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the regions' values together."""
        return {name: unions(rows.column(name), rows.codes, rows.count)}


class Dot(NamedTuple):
    """One addition: its actor, and its number among the actor's, from 1."""

    actor: Actor
    number: int


@dataclass(frozen=True, slots=True)
class ObservedSet:
    """A set that values can be removed from.

    Args:
        dots: the additions that are held, each with its value.
        seen: for each actor, the count up to which all its additions have been seen.
        cloud: seen additions beyond that count.

    Raises:
        InvalidValue: an addition's number is below 1.
    """

    dots: Mapping[Dot, Any] = field(default_factory=dict)
    seen: Mapping[Actor, int] = field(default_factory=dict)
    cloud: frozenset[Dot] = frozenset()

    def __post_init__(self) -> None:
        """Bring the state into canonical form: unbroken runs of seen dots as one number an actor, in order."""
        seen = {actor: count for actor, count in self.seen.items() if count}
        left = []
        for dot in sorted(self.cloud):
            if dot.number < 1:
                raise InvalidValue(f"{dot} isn't an addition: an actor counts from 1")
            if dot.number == seen.get(dot.actor, 0) + 1:
                seen[dot.actor] = dot.number
            elif dot.number > seen.get(dot.actor, 0):
                left.append(dot)
        object.__setattr__(self, "dots", MappingProxyType(dict(sorted(self.dots.items(), key=_dot_of))))
        object.__setattr__(self, "seen", MappingProxyType(dict(sorted(seen.items()))))
        object.__setattr__(self, "cloud", frozenset(left))

    def __reduce__(self) -> tuple[object, ...]:
        return ObservedSet, (dict(self.dots), dict(self.seen), self.cloud)

    def has_seen(self, dot: Dot) -> bool:
        """Return whether an addition was seen, whether it is held or not."""
        return dot.number <= self.seen.get(dot.actor, 0) or dot in self.cloud

    def add(self, actor: Actor, value: Any) -> Self:
        """Return the set after an actor has added a value. The addition replaces those of that value seen here.

        Raises:
            InvalidValue: the value is of a kind that columns don't have.
        """
        count = max([self.seen.get(actor, 0), *(dot.number for dot in self.cloud if dot.actor == actor)]) + 1
        dot = Dot(actor, count)
        return type(self)({**self.remove(value).dots, dot: canonical(value)}, self.seen, self.cloud | {dot})

    def remove(self, value: Any) -> Self:
        """Return the set without a value: without the additions of it that were seen here."""
        encoded = encode_value(value)
        kept = {dot: other for dot, other in self.dots.items() if encode_value(other) != encoded}
        return type(self)(kept, self.seen, self.cloud)

    def join(self, other: Self) -> Self:
        """Return what both hold, and what one holds and the other hasn't seen."""
        kept = {
            dot: value
            for one, beside in ((self, other), (other, self))
            for dot, value in one.dots.items()
            if dot in beside.dots or not beside.has_seen(dot)
        }
        actors = self.seen.keys() | other.seen.keys()
        seen = {actor: max(self.seen.get(actor, 0), other.seen.get(actor, 0)) for actor in actors}
        return type(self)(kept, seen, self.cloud | other.cloud)

    @property
    def value(self) -> tuple[Any, ...]:
        """The values in their order, each once."""
        return tuple(sorted({encode_value(v): v for v in self.dots.values()}.values(), key=order_of))

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        seen = counted(actor.encode() + whole(count) for actor, count in self.seen.items())
        cloud = counted(_encode_dot(dot) for dot in sorted(self.cloud))
        dots = counted(_encode_dot(dot) + encode_value(value) for dot, value in self.dots.items())
        return seal(StateKind.OBSERVED_SET, seen + cloud + dots)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the state of its bytes; raise `MergeStateUnreadable` if no state has them."""
        return decoded(StateKind.OBSERVED_SET, data, cls._read)

    @classmethod
    def _read(cls, cursor: Cursor) -> Self:
        seen = {read_actor(cursor): cursor.whole() for _ in range(cursor.length())}
        cloud = frozenset(_read_dot(cursor) for _ in range(cursor.length()))
        dots = {_read_dot(cursor): cursor.value() for _ in range(cursor.length())}
        state = cls(dots, seen, cloud)
        if any(count < 1 for count in seen.values()) or not all(state.has_seen(dot) for dot in dots):
            raise ValueError("a set holds what it hasn't seen")
        return state

    @staticmethod
    def fold_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return each region's newest list: its additions, all made again, and what it has removed gone."""
        return rows.newest_named(name)

    @staticmethod
    def merge_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the values that a region holds: a region removes only values that it has added."""
        return {name: unions(rows.column(name), rows.codes, rows.count)}


def _dot_of(entry: tuple[Dot, Any]) -> Dot:
    return entry[0]


def _encode_dot(dot: Dot) -> bytes:
    return dot.actor.encode() + whole(dot.number)


def _read_dot(cursor: Cursor) -> Dot:
    return Dot(read_actor(cursor), cursor.whole())
