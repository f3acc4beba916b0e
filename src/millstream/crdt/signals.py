"""Decayed signals: scores that count less the older they are, summed over the nodes that gave them.

Each node replaces its own entry, by its position in its log; so an entry is the node's newest, in whatever order they
arrive. The sum is computed when it is read, as of a moment, and is the same to the bit on every machine. Nodes are
added in their order, and the decay uses sums and products alone (`decay`), which every machine and engine rounds
alike, instead of a library's `exp`.

Body: a count u32, then for each node, in order: node u32, position i64, time i64 (nanoseconds), score f64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, canonical, counted, order_of
from millstream.errors import InvalidValue

_ENTRY: Final = struct.Struct(">Iqqd")
HALVINGS_MAX: Final = 62
"""Number of half-lives after which a signal weighs nothing: 2^-62 of it is below the precision of a sum of doubles."""
DECAY_TERMS: Final[tuple[float, ...]] = tuple((-math.log(2.0)) ** n / math.factorial(n) for n in range(18, -1, -1))
"""Terms of 2^-f for f in [0, 1), highest power first: the series' next term is below half of the last bit."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A node's newest entry."""

    position: int
    """Position in the node's log: the greater one is the newer one."""
    score: float
    time_ns: int
    """Time from which it decays, nanoseconds since 1970 UTC."""


CrdtSignalState = Mapping[int, Signal]
"""Signals by node."""


@dataclass(frozen=True, slots=True)
class DecayedSignals:
    """Signals as of a moment."""

    half_life_ns: int
    at_ns: int

    def __post_init__(self) -> None:
        if self.half_life_ns <= 0:
            raise InvalidValue(f"a half-life is longer than nothing, not {self.half_life_ns} ns")

    def empty(self) -> CrdtSignalState:
        """Return the state without entries."""
        return {}

    def join(self, a: CrdtSignalState, b: CrdtSignalState) -> CrdtSignalState:
        """Return each node's newer entry."""
        found = {}
        for node in sorted(a.keys() | b.keys()):
            held = [state[node] for state in (a, b) if node in state]
            found[node] = max(held, key=_order)
        return found

    def value(self, state: CrdtSignalState) -> float:
        """Return the sum of the decayed scores; a score with a time after the moment hasn't decayed."""
        total = 0.0
        for _, signal in sorted(state.items()):
            total += signal.score * decay(self.at_ns - signal.time_ns, self.half_life_ns)
        return total

    def encode(self, state: CrdtSignalState) -> bytes:
        """Return the canonical bytes."""
        try:
            entries = [_ENTRY.pack(n, s.position, s.time_ns, canonical(s.score)) for n, s in sorted(state.items())]
        except struct.error as error:
            raise InvalidValue(f"a signal is out of range: {error}") from error
        return seal(StateKind.SIGNAL, counted(entries))

    def decode(self, data: bytes) -> CrdtSignalState:
        """Return the state of its bytes; raise `MergeStateUnreadable`."""
        return decoded(StateKind.SIGNAL, data, _read, self.encode)


def decay(age_ns: int, half_life_ns: int) -> float:
    """Return what is left of 1 after that time; 1 if the age is negative."""
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
