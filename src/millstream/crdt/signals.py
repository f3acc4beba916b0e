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
from millstream.crdt.declared import HOUR_NS, MINUTE_NS, WINDOWS, window_columns
from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, counted, whole_number
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
_KEPT: Final = {MINUTE_NS: 60, HOUR_NS: 168}
"""Number of buckets of each width that a node counts its events in, the newest event's included."""
_COUNTS: Final = pa.list_(pa.struct([("bucket", pa.int64()), ("events", pa.int64())]))
_NODE: Final = struct.Struct(">qqd")
_BUCKET: Final = struct.Struct(">qq")
_TIME_MAX: Final = 2**63 - 1


def signal_time(moment_ns: int) -> int:
    """Return the time of signals that is nearest to a moment: 1970 for one before it, the year 2262 for one after it."""
    return min(max(moment_ns, 0), _TIME_MAX)


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
        InvalidValue: the half-life isn't a whole number above 0 and below 2^63, or a node's numbers are out of range.
    """

    half_life_ns: int
    nodes: Mapping[Actor, NodeSignal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "half_life_ns", whole_number(self.half_life_ns, "a half-life"))
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
            InvalidValue: a weight is negative or not finite, or a time isn't a whole number, is before 1970 or after 2262.
        """
        new = [(weight, whole_number(time_ns, "a signal's time")) for weight, time_ns in events]
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
        for (width_ns, kept), so_far in zip(
            _KEPT.items(), ({}, {}) if held is None else (held.minutes, held.hours), strict=True
        ):
            counts = dict(so_far)
            for _, time_ns in new:
                counts[time_ns // width_ns] = counts.get(time_ns // width_ns, 0) + 1
            buckets.append(_newest(counts, kept))
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
            minutes = _newest(_greater(ours.minutes, theirs.minutes), _KEPT[MINUTE_NS])
            hours = _newest(_greater(ours.hours, theirs.hours), _KEPT[HOUR_NS])
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
        """Return the sum of all nodes as of a moment: at least the newest event's, and at most the end of `signal_time`."""
        at = max(self.last_ns, signal_time(at_ns or 0))
        ages = np.array([at - held.last_ns for held in self.nodes.values()], np.int64)
        total = 0.0
        for held, left in zip(self.nodes.values(), decays(ages, self.half_life_ns).tolist(), strict=True):
            total += held.score * left
        return min(total, SUM_MAX)

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
        width_ns, size = WINDOWS[window]
        last = max(self.last_ns, signal_time(at_ns or 0)) // width_ns
        return sum(
            count
            for held in self.nodes.values()
            for bucket, count in (held.minutes if width_ns == MINUTE_NS else held.hours).items()
            if last - size < bucket <= last
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
    def fields_of(name: str) -> tuple[pa.Field, pa.Field, pa.Field, pa.Field]:
        """Return the state columns next to a column: the sum, the newest event's time, the minutes and the hours.

        All are null if there is no event.
        """
        types = (pa.float64(), pa.int64(), _COUNTS, _COUNTS)
        words = ("score", "last_ns", "minutes", "hours")
        return tuple(pa.field(f"__{word}.{name}", of) for word, of in zip(words, types, strict=True))

    @classmethod
    def lift_column(cls, name: str, weights: pa.Array, moments: pa.Array) -> dict[str, pa.Array]:
        """Return the state columns of records: each that has a weight is one event.

        Args:
            name: the column.
            weights: its values. One that is no weight, from before the column was declared, is no event.
            moments: each record's time: nanoseconds since 1970.
        """
        values = weights.cast(pa.float64())
        is_event = pc.fill_null(pc.and_(pc.greater_equal(values, 0.0), pc.is_finite(values)), False)
        none = pa.nulls(len(values), _COUNTS)
        parts = (pc.if_else(is_event, values, None), pc.if_else(is_event, moments, None), none, none)
        return {one.name: part for one, part in zip(cls.fields_of(name), parts, strict=True)}

    @classmethod
    def fold_column(cls, rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return each region's events so far, folded in the order of its log."""
        names = [one.name for one in cls.fields_of(name)]
        if rows.sequence is None:
            return rows.newest_of(name, *names)
        score, last = (rows.column(one) for one in names[:2])
        some = rows.sequence[np.asarray(score.is_valid())[rows.sequence]]
        codes, moments = rows.codes[some], last.take(pa.array(some)).to_numpy()
        scores, newest = accumulated(
            codes, score.take(pa.array(some)).to_numpy(), moments, rows.merge.of(name).half_life_ns
        )
        ends = np.flatnonzero(np.append(codes[1:] != codes[:-1], True)) if len(codes) else codes
        at = np.full(rows.count, -1, np.int64)
        at[codes[ends]] = ends
        index = pa.array(at, mask=at < 0)
        found = {name: rows.column(name).take(rows.newest)}
        found |= {one: pa.array(part).take(index) for one, part in zip(names[:2], (scores, newest), strict=True)}
        is_record = some >= rows.states
        held = pa.array(some[~is_record])
        for one, (width_ns, kept) in zip(names[2:], _KEPT.items(), strict=True):
            of, buckets, events = _flat(rows.column(one).take(held), codes[~is_record])
            of = np.concatenate([of, codes[is_record]])
            buckets = np.concatenate([buckets, moments[is_record] // width_ns])
            events = np.concatenate([events, np.ones(np.count_nonzero(is_record), np.int64)])
            found[one] = _lists(of, buckets, events, rows.count, kept)
        return found

    @classmethod
    def merge_column(cls, rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the regions' sum as of a moment, and the number of events in each window up to it."""
        score, last, minutes, hours = (rows.column(one.name) for one in cls.fields_of(name))
        lasts = last.fill_null(0).to_numpy()
        moments = np.full(rows.count, rows.at_ns, np.int64)
        np.maximum.at(moments, rows.codes, lasts)
        left = pa.array(decays(moments[rows.codes] - lasts, rows.merge.of(name).half_life_ns))
        subtracted = rows.subtracted
        with np.errstate(over="ignore"):
            total = sums(pc.multiply(score, left), rows.codes, rows.count, less=subtracted)
        found = {name: pc.min_element_wise(total, SUM_MAX, skip_nulls=False)}
        places = np.arange(len(rows.codes))
        flat = {MINUTE_NS: _flat(minutes, places), HOUR_NS: _flat(hours, places)}
        for column, (width_ns, count) in zip(window_columns(name), WINDOWS.values(), strict=True):
            row, buckets, events = flat[width_ns]
            of = rows.codes[row]
            events = np.where(subtracted[row], -events, events)
            ages = moments[of] // width_ns - buckets
            within = (ages >= 0) & (ages < count)
            recent = np.zeros(rows.count, np.int64)
            np.add.at(recent, of[within], events[within])
            found[column] = pa.array(recent)
        return found


def _flat(lists: pa.Array, codes: Codes) -> tuple[Codes, Codes, Codes]:
    """Return the buckets of lists: each one's group, number and events."""
    items = pc.list_flatten(lists)
    of = codes[pc.list_parent_indices(lists).to_numpy()]
    return of, items.field(0).to_numpy(), items.field(1).to_numpy()


def _lists(codes: Codes, buckets: Codes, events: Codes, count: int, kept: int) -> pa.Array:
    """Return a list for each group: the sum of each bucket's events, of the newest buckets; null if it has none."""
    order = np.lexsort((buckets, codes))
    codes, buckets, events = codes[order], buckets[order], events[order]
    begins = np.flatnonzero(np.append(True, (codes[1:] != codes[:-1]) | (buckets[1:] != buckets[:-1]))[: len(codes)])
    events = np.add.reduceat(events, begins) if len(begins) else events
    codes, buckets = codes[begins], buckets[begins]
    last = np.zeros(count, np.int64)
    last[codes] = buckets  # ascending: the last one stays
    is_kept = buckets > last[codes] - kept
    codes, buckets, events = codes[is_kept], buckets[is_kept], events[is_kept]
    offsets = np.searchsorted(codes, np.arange(count + 1)).astype(np.int32)
    items = pa.StructArray.from_arrays([pa.array(buckets), pa.array(events)], fields=list(_COUNTS.value_type))
    is_there = offsets[1:] > offsets[:-1]
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=_COUNTS, mask=pa.array(~is_there))


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
