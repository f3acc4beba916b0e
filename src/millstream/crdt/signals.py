"""Decayed signals: scores that count less the older they are, summed over the nodes that gave them.

Each node replaces its own entry, by its position in its log; so an entry is the node's newest, whatever came first. The sum is made when
it is read, as of a moment, and is the same to the bit wherever it is made: nodes are added in their order, and the decay is made of
sums and products alone (`decay`), which every machine and engine rounds alike, and not of a library's `exp`.

Body: a count u32, then for each node, in order: node u32, position i64, time i64 (nanoseconds), score f64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millstream.crdt.lattice import Kind, decoded, seal
from millstream.crdt.scalars import Cursor, canonical, counted, order_of
from millstream.errors import InvalidValue

_ENTRY: Final = struct.Struct(">Iqqd")
HALVINGS_MAX: Final = 62
"""From then on a signal weighs nothing: 2^-62 of it is below what a sum of doubles shows."""
DECAY_TERMS: Final[tuple[float, ...]] = tuple((-math.log(2.0)) ** n / math.factorial(n) for n in range(18, -1, -1))
"""Of 2^-f for f in [0, 1), highest power first: the series' next term is below half of the last bit."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A node's newest."""

    position: int
    """In the node's log: the greater one is the newer one."""
    score: float
    time_ns: int
    """Nanoseconds since 1970 UTC, from which it decays."""


CrdtSignalState = Mapping[int, Signal]
"""By node."""


@dataclass(frozen=True, slots=True)
class DecayedSignals:
    """Signals as of a moment."""

    half_life_ns: int
    at_ns: int

    def __post_init__(self) -> None:
        if self.half_life_ns <= 0:
            raise InvalidValue(f"a half-life is longer than nothing, not {self.half_life_ns} ns")

    def empty(self) -> CrdtSignalState:
        """No node has given any."""
        return {}

    def join(self, a: CrdtSignalState, b: CrdtSignalState) -> CrdtSignalState:
        """Each node's newer entry."""
        found = {}
        for node in sorted(a.keys() | b.keys()):
            held = [state[node] for state in (a, b) if node in state]
            found[node] = max(held, key=_order)
        return found

    def value(self, state: CrdtSignalState) -> float:
        """The sum of what is left of each; what lies behind the moment hasn't decayed yet."""
        total = 0.0
        for _, signal in sorted(state.items()):
            total += signal.score * decay(self.at_ns - signal.time_ns, self.half_life_ns)
        return total

    def encode(self, state: CrdtSignalState) -> bytes:
        """Canonical bytes."""
        try:
            entries = [_ENTRY.pack(n, s.position, s.time_ns, canonical(s.score)) for n, s in sorted(state.items())]
        except struct.error as error:
            raise InvalidValue(f"a signal is out of range: {error}") from error
        return seal(Kind.SIGNAL, counted(entries))

    def decode(self, data: bytes) -> CrdtSignalState:
        """The state of its bytes; `MergeStateUnreadable`."""
        return decoded(Kind.SIGNAL, data, _read, self.encode)


def decay(age_ns: int, half_life_ns: int) -> float:
    """What is left of 1 after that time; 1 where the time lies ahead."""
    halvings = float(max(age_ns, 0)) / float(half_life_ns)  # as columns divide: a long quotient rounds otherwise
    if halvings >= HALVINGS_MAX:
        return 0.0
    full = math.floor(halvings)
    rest = halvings - full
    left = 0.0
    for term in DECAY_TERMS:
        left = left * rest + term
    return left / (1 << full)


def _order(signal: Signal) -> tuple[object, ...]:
    return signal.position, signal.time_ns, order_of(signal.score)


def _read(body: bytes) -> CrdtSignalState:
    cursor = Cursor(body)
    found = {}
    for _ in range(cursor.length()):
        node, position, time_ns, score = _ENTRY.unpack(cursor.take(_ENTRY.size))
        found[node] = Signal(position, score, time_ns)
    cursor.end()
    return found
