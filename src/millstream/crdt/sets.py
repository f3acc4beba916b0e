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
from typing import Any, NamedTuple

from millstream.crdt.counters import Actor, read_actor
from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, canonical, counted, encode_value, order_of, whole
from millstream.errors import InvalidValue


class UnionSets:
    """Sets that only grow. A state maps the values' encodings to the values: so 1 and 1.0 and true are three."""

    def empty(self) -> Mapping[bytes, Any]:
        """Return the empty set."""
        return {}

    def of(self, values: Iterable[Any]) -> Mapping[bytes, Any]:
        """Return the set of some values; `InvalidValue` for a kind that columns don't have."""
        return {encode_value(value): canonical(value) for value in values}

    def join(self, a: Mapping[bytes, Any], b: Mapping[bytes, Any]) -> Mapping[bytes, Any]:
        """Return all values of both."""
        return {**a, **b}

    def value(self, state: Mapping[bytes, Any]) -> tuple[Any, ...]:
        """Return the values in their order."""
        return tuple(sorted(state.values(), key=order_of))

    def encode(self, state: Mapping[bytes, Any]) -> bytes:
        """Return the canonical bytes."""
        return seal(StateKind.UNION_SET, counted(encode_value(value) for value in self.value(state)))

    def decode(self, data: bytes) -> Mapping[bytes, Any]:
        """Return the state of its bytes; raise `MergeStateUnreadable`."""
        return decoded(StateKind.UNION_SET, data, _read_union, self.encode)


class Dot(NamedTuple):
    """One addition: its actor, and its number among the actor's, from 1."""

    actor: Actor
    number: int


@dataclass(frozen=True, slots=True)
class ObservedSet:
    """A set's state; whole sets and deltas have the same form."""

    dots: Mapping[Dot, Any] = field(default_factory=dict)
    """The additions that are held, each with its value."""
    seen: Mapping[Actor, int] = field(default_factory=dict)
    """For each actor, the count up to which all its additions have been seen."""
    cloud: frozenset[Dot] = frozenset()
    """Seen additions beyond that count."""

    def has_seen(self, dot: Dot) -> bool:
        """Return whether an addition was seen, whether it is held or not."""
        return dot.number <= self.seen.get(dot.actor, 0) or dot in self.cloud


class ObservedSets:
    """Sets that values can be removed from."""

    def empty(self) -> ObservedSet:
        """Return the empty set that has seen nothing."""
        return ObservedSet()

    def add(self, actor: Actor, held: ObservedSet, value: Any) -> ObservedSet:
        """Return the delta by which an actor adds a value to what it holds.

        It replaces earlier additions of that value.
        """
        count = max([held.seen.get(actor, 0), *(dot.number for dot in held.cloud if dot.actor == actor)]) + 1
        dot, encoded = Dot(actor, count), encode_value(value)
        replaced = {known for known, other in held.dots.items() if encode_value(other) == encoded}
        return compact(ObservedSet({dot: canonical(value)}, {}, frozenset({dot} | replaced)))

    def remove(self, held: ObservedSet, value: Any) -> ObservedSet:
        """Return the delta by which a site that holds `held` removes a value: the additions that it has seen."""
        encoded = encode_value(value)
        return compact(
            ObservedSet({}, {}, frozenset(dot for dot, other in held.dots.items() if encode_value(other) == encoded))
        )

    def join(self, a: ObservedSet, b: ObservedSet) -> ObservedSet:
        """Return what both hold, and what one holds and the other hasn't seen."""
        kept = {
            dot: value
            for one, other in ((a, b), (b, a))
            for dot, value in one.dots.items()
            if dot in other.dots or not other.has_seen(dot)
        }
        seen = {actor: max(a.seen.get(actor, 0), b.seen.get(actor, 0)) for actor in a.seen.keys() | b.seen.keys()}
        return compact(ObservedSet(kept, seen, a.cloud | b.cloud))

    def value(self, state: ObservedSet) -> tuple[Any, ...]:
        """Return the values in their order, each once."""
        return tuple(sorted({encode_value(v): v for v in state.dots.values()}.values(), key=order_of))

    def encode(self, state: ObservedSet) -> bytes:
        """Return the canonical bytes."""
        state = compact(state)
        seen = counted(actor.encode() + whole(count) for actor, count in state.seen.items())
        cloud = counted(_encode_dot(dot) for dot in sorted(state.cloud))
        dots = counted(_encode_dot(dot) + encode_value(value) for dot, value in state.dots.items())
        return seal(StateKind.OBSERVED_SET, seen + cloud + dots)

    def decode(self, data: bytes) -> ObservedSet:
        """Return the state of its bytes; raise `MergeStateUnreadable`."""
        return decoded(StateKind.OBSERVED_SET, data, _read_observed, self.encode)


def compact(state: ObservedSet) -> ObservedSet:
    """Return the state in canonical form: unbroken runs of seen dots as one number an actor, in order."""
    seen = {actor: count for actor, count in state.seen.items() if count}
    left = []
    for dot in sorted(state.cloud):
        if dot.number < 1:
            raise InvalidValue(f"{dot} can't be an adding: an actor's count from 1")
        if dot.number == seen.get(dot.actor, 0) + 1:
            seen[dot.actor] = dot.number
        elif dot.number > seen.get(dot.actor, 0):
            left.append(dot)
    return ObservedSet(dict(sorted(state.dots.items(), key=_dot_of)), dict(sorted(seen.items())), frozenset(left))


def _dot_of(entry: tuple[Dot, Any]) -> Dot:
    return entry[0]


def _encode_dot(dot: Dot) -> bytes:
    return dot.actor.encode() + whole(dot.number)


def _read_dot(cursor: Cursor) -> Dot:
    return Dot(read_actor(cursor), cursor.whole())


def _read_union(body: bytes) -> Mapping[bytes, Any]:
    cursor = Cursor(body)
    found = UnionSets().of([cursor.value() for _ in range(cursor.length())])
    cursor.end()
    return found


def _read_observed(body: bytes) -> ObservedSet:
    cursor = Cursor(body)
    seen = {read_actor(cursor): cursor.whole() for _ in range(cursor.length())}
    cloud = frozenset(_read_dot(cursor) for _ in range(cursor.length()))
    dots = {_read_dot(cursor): cursor.value() for _ in range(cursor.length())}
    cursor.end()
    state = ObservedSet(dots, seen, cloud)
    if any(count < 1 for count in seen.values()) or not all(state.has_seen(dot) for dot in dots):
        raise ValueError("a set holds what it hasn't seen")
    return state
