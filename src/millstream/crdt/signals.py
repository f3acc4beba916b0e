"""Decayed signals: sums of weighted events in which an event counts less the older it is, and counts of recent events.

Each node folds its own events, in the order of its log: `S ← S · 2^(-Δt / half-life) + w`. An event that comes late
adds `w · 2^(-(last - t) / half-life)`. Next to the sum a node counts its events in buckets: the newest 60 minutes and
168 hours. The sum over the nodes is computed when it is read, as of a moment.

The result is the same to the bit on every machine: nodes are added in their order, events in the order of their log,
and the decay uses floor, sums, products and quotients alone, which IEEE 754 rounds alike everywhere, instead of a
library's `exp`. One node's events in another order give the same sum up to rounding.

Body: half-life i64 (nanoseconds), a count u32, then for each node, in order: the actor (16 bytes), events i64, time of
the newest event i64 (nanoseconds), sum f64, and the minutes, then the hours: a count u32, and for each bucket its number
since 1970 i64 and its events i64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.columns import Codes, Grouped, sums
from millstream.crdt.counters import Actor, read_actor
from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, counted
from millstream.errors import InvalidValue

Floats = npt.NDArray[np.float64]

HALVINGS_MAX: Final = 62
"""Number of half-lives after which a signal weighs nothing: 2^-62 of it is below the precision of a sum of doubles."""
_LN_2: Final = 0.6931471805599453


def _series() -> tuple[float, ...]:
    """Return the terms of 2^-f for f in [0, 1), highest power first: the next term is below half of the last bit."""
    terms = [1.0]
    power = factorial = 1.0
    for n in range(1, 19):
        power, factorial = power * -_LN_2, factorial * n
        terms.append(power / factorial)
    return tuple(reversed(terms))


DECAY_TERMS: Final = _series()
SUM_MAX: Final = float(np.finfo(np.float64).max)
"""A sum that would be greater stays at this: infinity wouldn't decay."""
MINUTE_NS: Final = 60 * 10**9
HOUR_NS: Final = 60 * MINUTE_NS
MINUTES: Final = 60
"""Number of minutes that a node counts its events in, the newest event's included."""
HOURS: Final = 168
WINDOWS: Final[Mapping[str, int]] = MappingProxyType({"1h": 60, "24h": 24, "7d": 168})
"""Windows of counts: of minutes the first, of hours the others."""
_NODE: Final = struct.Struct(">qqd")
_BUCKET: Final = struct.Struct(">qq")
_TIME_MAX: Final = 2**63 - 1


def decays(ages_ns: npt.NDArray[np.int64], half_life_ns: int) -> Floats:
    """Return what is left of 1 after each age, in nanoseconds; 1 if it is negative, 0 from `HALVINGS_MAX` on."""
    halvings = np.maximum(ages_ns, 0).astype(np.float64) / float(half_life_ns)
    gone = halvings >= HALVINGS_MAX
    halvings[gone] = 0.0
    full = np.floor(halvings)
    rest = halvings - full
    left = np.zeros(len(halvings), np.float64)
    for term in DECAY_TERMS:
        left = left * rest + term
    left /= (np.int64(1) << full.astype(np.int64)).astype(np.float64)
    left[gone] = 0.0
    return left


def accumulated(
    codes: Codes, weights: Floats, times_ns: npt.NDArray[np.int64], half_life_ns: int
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the sum after each event, and the newest time so far, in events' own group.

    Args:
        codes: each event's group; ascending.
        weights: each event's weight. A sum so far, with the time of its newest event, is the first event of its group.
        times_ns: each event's time, from 0.
        half_life_ns: the half-life.
    """
    count = len(codes)
    order = np.argsort(times_ns, kind="stable")
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    # A running greatest time in each group: later groups have greater numbers.
    newest = times_ns[order[np.maximum.accumulate(codes * count + rank) - codes * count]] if count else times_ns
    first = np.append(True, codes[1:] != codes[:-1]) if count else np.zeros(0, bool)
    before = np.where(first, times_ns, np.append(times_ns[:1], newest[:-1]))
    is_late = times_ns < before
    left = decays(np.abs(times_ns - before), half_life_ns)
    # Only this recurrence is sequential: a product and a sum for each event.
    kept = np.where(first, 0.0, np.where(is_late, 1.0, left))
    added = np.where(is_late, weights * left, weights)
    total, totals = 0.0, []
    for factor, weight in zip(kept.tolist(), added.tolist(), strict=True):
        total = min(total * factor + weight, SUM_MAX)
        totals.append(total)
    return np.array(totals, np.float64), newest


@dataclass(frozen=True, slots=True)
class NodeSignal:
    """The sum and the counts of one node."""

    events: int
    """Number of events so far: of two states of a node, the one with more is the newer one."""
    score: float
    """The sum as of `last_ns`."""
    last_ns: int
    """Time of the newest event, nanoseconds since 1970 UTC."""
    minutes: Mapping[int, int]
    """Number of events in each minute since 1970; the newest 60 at most."""
    hours: Mapping[int, int]
    """Number of events in each hour since 1970; the newest 168 at most."""


@dataclass(frozen=True, slots=True)
class SignalState:
    """Weighted events of several nodes that decay by a half-life.

    Args:
        half_life_ns: the time after which an event counts half, in nanoseconds.
        nodes: each node's sum and counts.

    Raises:
        InvalidValue: the half-life isn't above 0 and below 2^63, or a node's numbers are out of range.
    """

    half_life_ns: int
    nodes: Mapping[Actor, NodeSignal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.half_life_ns <= _TIME_MAX:
            raise InvalidValue(f"a half-life lies between 1 ns and 2^63 ns, not at {self.half_life_ns} ns")
        for node, held in self.nodes.items():
            numbers = (held.events, held.last_ns, *held.minutes, *held.hours)
            counts = (held.events, *held.minutes.values(), *held.hours.values())
            if not (0 <= held.score <= SUM_MAX and 0 <= min(numbers) <= max(numbers) <= _TIME_MAX and min(counts) > 0):
                raise InvalidValue(f"the signal of {node} is out of range: {held}")
        object.__setattr__(self, "nodes", MappingProxyType(dict(sorted(self.nodes.items()))))

    def __reduce__(self) -> tuple[object, ...]:
        return SignalState, (self.half_life_ns, dict(self.nodes))

    def add(self, node: Actor, weight: float, time_ns: int) -> Self:
        """Return the state after one event of a node; see `add_all`."""
        return self.add_all(node, [(weight, time_ns)])

    def add_all(self, node: Actor, events: Iterable[tuple[float, int]]) -> Self:
        """Return the state after events of a node, in the order in which they come.

        Args:
            node: the node; it adds to its own newest state alone.
            events: weight, from 0 and finite, and time, in nanoseconds since 1970 UTC.

        Raises:
            InvalidValue: a weight is negative or not finite, or a time is before 1970 or after 2262.
        """
        new = list(events)
        for weight, time_ns in new:
            if not 0 <= weight <= SUM_MAX:
                raise InvalidValue(f"a signal's weight is 0 or more and finite, not {weight}")
            if not 0 <= time_ns <= _TIME_MAX:
                raise InvalidValue(f"a signal's time lies between 1970 and 2262, not at {time_ns} ns")
        if not new:
            return self
        held = self.nodes.get(node)
        known = [] if held is None else [(held.score, held.last_ns)]
        weights, times = zip(*known, *new, strict=True)
        scores, newest = accumulated(
            np.zeros(len(weights), np.int64),
            np.array(weights, np.float64),
            np.array(times, np.int64),
            self.half_life_ns,
        )
        buckets: list[Mapping[int, int]] = []
        for width_ns, count, so_far in (
            (MINUTE_NS, MINUTES, {} if held is None else held.minutes),
            (HOUR_NS, HOURS, {} if held is None else held.hours),
        ):
            counts = dict(so_far)
            for _, time_ns in new:
                counts[time_ns // width_ns] = counts.get(time_ns // width_ns, 0) + 1
            buckets.append(_newest(counts, count))
        events_before = 0 if held is None else held.events
        after = NodeSignal(events_before + len(new), float(scores[-1]), int(newest[-1]), *buckets)
        return type(self)(self.half_life_ns, {**self.nodes, node: after})

    def join(self, other: Self) -> Self:
        """Return each node's newer sum, and the greatest count of each bucket.

        Raises:
            InvalidValue: the states have different half-lives.
        """
        if other.half_life_ns != self.half_life_ns:
            raise InvalidValue(f"signals with half-lives {self.half_life_ns} and {other.half_life_ns} ns don't join")
        nodes = dict(self.nodes)
        for node, theirs in other.nodes.items():
            ours = nodes.get(node, theirs)
            newer = max(ours, theirs, key=lambda held: (held.events, held.last_ns, held.score))
            minutes = _newest(_greater(ours.minutes, theirs.minutes), MINUTES)
            hours = _newest(_greater(ours.hours, theirs.hours), HOURS)
            nodes[node] = NodeSignal(newer.events, newer.score, newer.last_ns, minutes, hours)
        return type(self)(self.half_life_ns, nodes)

    @property
    def last_ns(self) -> int:
        """Time of the newest event of all nodes; 0 if there is none."""
        return max((held.last_ns for held in self.nodes.values()), default=0)

    @property
    def value(self) -> float:
        """The sum as of the newest event."""
        return self.score()

    def score(self, at_ns: int | None = None) -> float:
        """Return the sum of all nodes as of a moment, which counts as the newest event's if it is before that."""
        at = max(self.last_ns, at_ns or 0)
        ages = np.array([at - held.last_ns for held in self.nodes.values()], np.int64)
        total = 0.0
        for held, left in zip(self.nodes.values(), decays(ages, self.half_life_ns).tolist(), strict=True):
            total += held.score * left
        return total

    def count(self, window: str, at_ns: int | None = None) -> int:
        """Return the number of events in a window up to a moment, as `score` takes it.

        Args:
            window: "1h": the moment's minute and the 59 before it; "24h" and "7d": its hour and the 23 or 167 before.
            at_ns: the moment; None for the newest event's time.

        Raises:
            InvalidValue: there is no such window.
        """
        if window not in WINDOWS:
            raise InvalidValue(f"signals have no window {window!r}", hint=f"The windows are {', '.join(WINDOWS)}.")
        is_minutes = window == "1h"
        last = max(self.last_ns, at_ns or 0) // (MINUTE_NS if is_minutes else HOUR_NS)
        return sum(
            count
            for held in self.nodes.values()
            for bucket, count in (held.minutes if is_minutes else held.hours).items()
            if last - WINDOWS[window] < bucket <= last
        )

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        nodes = (
            node.encode()
            + _NODE.pack(held.events, held.last_ns, held.score + 0.0)
            + b"".join(
                counted(_BUCKET.pack(*bucket) for bucket in sorted(counts.items()))
                for counts in (held.minutes, held.hours)
            )
            for node, held in self.nodes.items()
        )
        return seal(StateKind.SIGNAL, struct.pack(">q", self.half_life_ns) + counted(nodes))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the state of its bytes; raise `MergeStateUnreadable` if no state has them."""
        return decoded(StateKind.SIGNAL, data, cls._read)

    @classmethod
    def _read(cls, cursor: Cursor) -> Self:
        half_life_ns = cursor.whole()
        return cls(half_life_ns, dict(_read_node(cursor) for _ in range(cursor.length())))

    @staticmethod
    def fold_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return each region's newest score."""
        return rows.newest_of(name)

    @staticmethod
    def merge_column(rows: Grouped, name: str) -> pa.Array:
        """Return the sum of the regions' scores, decayed since their rows were written."""
        ages = rows.at_ns - rows.column("__wall_ns").to_numpy()
        left = pa.array(decays(ages, rows.merge.of(name).half_life_ns))
        return sums(pc.multiply(rows.column(name).cast(pa.float64()), left), rows.codes, rows.count)


def _greater(ours: Mapping[int, int], theirs: Mapping[int, int]) -> dict[int, int]:
    """Return the greater count of each bucket."""
    return {bucket: max(ours.get(bucket, 0), theirs.get(bucket, 0)) for bucket in ours.keys() | theirs.keys()}


def _newest(counts: Mapping[int, int], kept: int) -> Mapping[int, int]:
    """Return the buckets that end with the newest one, as many as are kept."""
    last = max(counts, default=0)
    return {bucket: count for bucket, count in sorted(counts.items()) if bucket > last - kept}


def _read_node(cursor: Cursor) -> tuple[Actor, NodeSignal]:
    node = read_actor(cursor)
    events, last_ns, score = _NODE.unpack(cursor.take(_NODE.size))
    minutes, hours = (dict(_BUCKET.unpack(cursor.take(_BUCKET.size)) for _ in range(cursor.length())) for _ in range(2))
    return node, NodeSignal(events, score, last_ns, minutes, hours)
