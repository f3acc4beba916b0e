"""Counters for several sites at once: each actor writes its own entry alone, and the value is the sum of all.

An actor's entry only grows (in a PN counter both of its sides do), so the greater entry is the newer one. An actor
that has lost its entry goes on under a new incarnation, never under the old one: two histories of one entry wouldn't
merge into either.

Bodies: a count u32, then for each entry, in order of its actor: region u32, shard u32, incarnation u64, and one or
two numbers as encoded values. Empty entries aren't written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, counted, encode_value
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


GrowState = Mapping[Actor, int]
"""The count of each actor; never below 0."""
PnState = Mapping[Actor, tuple[int, int]]
"""The sums that each actor has added and subtracted; neither below 0."""


class GrowCounters:
    """Counters that only grow: the value is 0 or more."""

    def empty(self) -> GrowState:
        """Return the counter without entries."""
        return {}

    def add(self, actor: Actor, held: GrowState, by: int) -> GrowState:
        """Return the delta of an actor that counts up: its own entry alone, to be joined anywhere.

        `InvalidValue` below 0.
        """
        return {actor: held.get(actor, 0) + _positive(by)}

    def join(self, a: GrowState, b: GrowState) -> GrowState:
        """Return each actor's greater entry."""
        return {actor: max(a.get(actor, 0), b.get(actor, 0)) for actor in sorted(a.keys() | b.keys())}

    def value(self, state: GrowState) -> int:
        """Return the sum."""
        return sum(state.values())

    def encode(self, state: GrowState) -> bytes:
        """Return the canonical bytes."""
        entries = (actor.encode() + encode_value(_positive(count)) for actor, count in sorted(state.items()) if count)
        return seal(StateKind.GROW_COUNTER, counted(entries))

    def decode(self, data: bytes) -> GrowState:
        """Return the state of its bytes; raise `MergeStateUnreadable`."""
        return decoded(StateKind.GROW_COUNTER, data, _read_grow, self.encode)


class PnCounters:
    """Counters that go up and down."""

    def empty(self) -> PnState:
        """Return the counter without entries."""
        return {}

    def add(self, actor: Actor, held: PnState, by: int) -> PnState:
        """Return the delta of an actor that counts up or down: its own entry alone, to be joined anywhere."""
        plus, minus = held.get(actor, (0, 0))
        return {actor: (plus + max(by, 0), minus + max(-by, 0))}

    def join(self, a: PnState, b: PnState) -> PnState:
        """Return each actor's greater sides."""
        found = {}
        for actor in sorted(a.keys() | b.keys()):
            (plus, minus), (more_plus, more_minus) = a.get(actor, (0, 0)), b.get(actor, (0, 0))
            found[actor] = (max(plus, more_plus), max(minus, more_minus))
        return found

    def value(self, state: PnState) -> int:
        """Return the sum of additions less the sum of subtractions."""
        return sum(plus - minus for plus, minus in state.values())

    def encode(self, state: PnState) -> bytes:
        """Return the canonical bytes."""
        entries = (
            actor.encode() + encode_value(_positive(plus)) + encode_value(_positive(minus))
            for actor, (plus, minus) in sorted(state.items())
            if plus or minus
        )
        return seal(StateKind.PN_COUNTER, counted(entries))

    def decode(self, data: bytes) -> PnState:
        """Return the state of its bytes; raise `MergeStateUnreadable`."""
        return decoded(StateKind.PN_COUNTER, data, _read_pn, self.encode)


def _positive(count: int) -> int:
    if count < 0:
        raise InvalidValue(f"{count} can't be counted up by: entries of counters only grow")
    return count


def _read_grow(body: bytes) -> GrowState:
    cursor = Cursor(body)
    found = {read_actor(cursor): cursor.value() for _ in range(cursor.length())}
    cursor.end()
    return found


def _read_pn(body: bytes) -> PnState:
    cursor = Cursor(body)
    found = {read_actor(cursor): (cursor.value(), cursor.value()) for _ in range(cursor.length())}
    cursor.end()
    return found
