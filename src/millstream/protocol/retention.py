"""Which segment of a log is dropped next, and which holders are cut off for it: retention by reference.

Premises
--------
1. Only whole, sealed segments are dropped, oldest first: by the last number of their last commit group, over all
   shards. The first segment that has to stay keeps all later ones, so a reader that begins at a token never
   meets a hole.
2. A holder that reads by position needs everything from its number on: `needs`. A holder that has the log's bytes also
   needs each segment that it hasn't up to its end. An idle shard may be sealed long after its last number, and without
   the footer the holder can't go on in the next segment. For a pipeline the number is the *start* of its last
   batch: the engine may ask for that batch again after the lake has it.
3. A segment also waits until every batch (of a table and partition) in it has *landed* in every pipeline. Pipelines
   report landed ranges of numbers, of all tables or of one, in any order: before the seal or after it, twice, or never.
4. A notice that is lost, late or forgotten keeps a segment longer and never drops it sooner. So positions only grow,
   reports of unknown holders are ignored, and the number of remembered ranges is bounded.
5. A pipeline that is expected and hasn't reported so far needs everything.

Transitions of a holder:

    | event           | unknown            | holds                                  | cut off             |
    |-----------------|--------------------|----------------------------------------|---------------------|
    | needs(n)        | holds from n on    | holds from the greater number on       | refused by its error|
    | landed(range)   | -                  | remembered (pipelines), within bounds  | -                   |
    | released        | -                  | unknown; an expected one: holds all    | unknown             |
    | CutOff returned |                    | cut off                                |                     |

The step for the oldest segment, by the holders that need it and the size of the log:

    | needed by                    | <= size_bytes      | <= bytes_max | > bytes_max                |
    |------------------------------|--------------------|--------------|----------------------------|
    | no holder                    | Drop when old      | Drop         | Drop                       |
    | consumers and followers only | Keep               | Keep         | CutOff of each, then Drop  |
    | any other holder             | Keep               | Keep         | Keep; none is cut off      |

No holder is cut off if that would free nothing. Pipelines, backlogs and merges of several regions are never cut
off: the lake, and the merged table, can't get the records that they lack from elsewhere.

The machine does no I/O. `step` returns one effect; the caller carries it out (a cut-off durably, before anything else)
and asks again. Segments aren't remembered between calls: the caller passes the oldest sealed segment of every shard.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from millstream.errors import CursorExpired, FollowerBehindRetention, MillstreamError
from millstream.model.ids import ShardId, TableId
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ReplicaPosition

RANGES_MAX: Final = 4096
"""Ranges remembered of a pipeline: so many of single tables, and as many of all tables. A batch has fewer tables, and
they take some hundred kilobytes."""


class HolderKind(StrEnum):
    """The kind of a holder of segments."""

    PIPELINE = "pipeline"
    BACKLOG = "backlog"
    """A table that a pipeline has quarantined: the records that it lacks."""
    SESSIONS = "sessions"
    """The log's writer: writes of applications that the copy of its sessions lacks."""
    CONSUMER = "consumer"
    FOLLOWER = "follower"
    MERGE = "merge"
    """A table that several regions write: records that its merge hasn't taken."""
    LEADER = "leader"
    """The leader of a follower's log: the segments that it still has. A promoted follower needs everything that the
    holders in the leader's catalog need."""

    @property
    def can_be_cut_off(self) -> bool:
        """Whether the log may go on without the holder when it keeps too much."""
        return self in {HolderKind.CONSUMER, HolderKind.FOLLOWER}


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Records of one table in a segment.

    If its range is wider than its records' numbers, it waits for the whole range.
    """

    table: TableId
    first: Seq
    last: Seq
    partition: str | None = None


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A segment that is no longer written."""

    shard: ShardId
    base_offset: Offset
    end_offset: Offset
    last_seq: Seq
    """Last number of its last commit group."""
    size_bytes: int
    sealed_ns: int
    """Time at which the next segment was begun: wall clock, nanoseconds since 1970."""
    batches: tuple[SegmentTable, ...] = ()


@dataclass(frozen=True, slots=True)
class RetentionBounds:
    """How much is kept. `bytes_max` is never below `size_bytes`."""

    age_s: float
    """Age at which a segment that no holder needs is dropped …"""
    size_bytes: int
    """… unless the log is larger than this: then it is dropped sooner."""
    bytes_max: int
    """Size of the log above which consumers and followers are cut off."""

    def __post_init__(self) -> None:
        if self.bytes_max < self.size_bytes:
            raise AssertionError(f"{self.bytes_max} bytes at most are below {self.size_bytes}")

    def is_due(self, segment: SealedSegment, *, now_ns: int, log_bytes: int) -> bool:
        """Return whether a segment that no holder needs is dropped: it is old, or the log is large."""
        return now_ns - segment.sealed_ns >= self.age_s * 1e9 or log_bytes > self.size_bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the segment."""

    segment: SealedSegment


@dataclass(frozen=True, slots=True)
class CutOff:
    """Record durably that the holder is cut off; it no longer keeps any segment."""

    name: str
    kind: HolderKind
    needed_from: Seq
    first: Seq
    """First number of the log once the segment that the holder needed is gone."""
    position: ReplicaPosition | None = None
    """The holder's position, if it is known."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Drop nothing now."""

    segment: SealedSegment | None = None
    """The oldest sealed segment."""
    needed_by: tuple[str, ...] = ()
    """Names of the holders that need it. Empty: it is young, and the log small."""


@dataclass(slots=True)
class Holder:
    """The state of one holder."""

    kind: HolderKind
    needed_from: Seq
    """It needs everything from here on; only grows."""
    landed: _Landed | None = None
    """Set for a pipeline."""
    position: ReplicaPosition | None = None
    """Set for a holder that has the log's bytes: the position up to which it last reported to have them."""


class Retention:
    """The references to one log.

    Args:
        expected: pipelines that need everything until they report.

    Concurrency: none; the caller serialises.
    """

    def __init__(self, expected: Collection[str] = ()) -> None:
        self._expected: Final = frozenset(expected)
        self._holders: dict[str, Holder] = {}
        self._cut_off: dict[str, CutOff] = {}
        for name in self._expected:
            self._holders[name] = _new(HolderKind.PIPELINE)

    @property
    def holders(self) -> Mapping[str, Holder]:
        """All holders, by name."""
        return self._holders

    def needs(self, name: str, kind: HolderKind, seq: Seq, position: ReplicaPosition | None = None) -> None:
        """Note that a holder may still ask for everything from `seq` on; a lower number than before changes nothing.

        Args:
            name: the holder.
            kind: its kind, if it is new.
            seq: the number.
            position: the bytes of each shard that it has; a shard that is missing has none. None: it reads by numbers.

        Raises:
            CursorExpired, FollowerBehindRetention: it was cut off. It can begin again after `released`.
        """
        gone = self._cut_off.get(name)
        if gone is not None:
            raise cut_off_error(gone)
        holder = self._holders.setdefault(name, _new(kind))
        holder.needed_from = max(holder.needed_from, seq)
        holder.position = holder.position if position is None else position

    def landed(
        self, name: str, first: Seq, last: Seq, *, table: TableId | None = None, partition: str | None = None
    ) -> None:
        """Note that a pipeline has committed records with numbers `first` to `last` in the lake.

        Args:
            name: the pipeline; a report of any other holder changes nothing.
            first: the range's first number.
            last: its last.
            table: their table; None: of all tables.
            partition: their partition of that table; None: all of it.
        """
        holder = self._holders.get(name)
        if holder is not None and holder.landed is not None and first <= last:
            holder.landed.add(first, last, table, partition)

    def released(self, name: str) -> None:
        """Forget a holder, even one that was cut off. A pipeline that is expected needs everything again."""
        self._cut_off.pop(name, None)
        self._holders.pop(name, None)
        if name in self._expected:
            self._holders[name] = _new(HolderKind.PIPELINE)

    def forget_below(self, seq: Seq) -> None:
        """Forget landed ranges below `seq`: no shard has a record below it now."""
        for holder in self._holders.values():
            if holder.landed is not None:
                holder.landed.forget_below(seq)

    def needed_by(self, segment: SealedSegment) -> tuple[str, ...]:
        """Return the names of all holders that need a segment, in order."""
        return tuple(sorted(name for name, holder in self._holders.items() if _needs(holder, segment)))

    def step(
        self, oldest: Iterable[SealedSegment], *, now_ns: int, log_bytes: int, bounds: RetentionBounds
    ) -> Drop | CutOff | Keep:
        """Return what to do next; call again after `Drop` and `CutOff`.

        Args:
            oldest: the oldest sealed segment of every shard that has one.
            now_ns: wall clock, nanoseconds since 1970.
            log_bytes: size of all segments, those being written included.
            bounds: how much is kept.
        """
        segment = oldest_of(oldest)
        if segment is None:
            return Keep()
        names = self.needed_by(segment)
        if not names:
            return Drop(segment) if bounds.is_due(segment, now_ns=now_ns, log_bytes=log_bytes) else Keep(segment)
        if log_bytes <= bounds.bytes_max or not all(self._holders[name].kind.can_be_cut_off for name in names):
            return Keep(segment, names)
        holder = self._holders.pop(names[0])
        gone = CutOff(names[0], holder.kind, holder.needed_from, Seq(segment.last_seq + 1), holder.position)
        self._cut_off[names[0]] = gone
        return gone


def oldest_of(segments: Iterable[SealedSegment]) -> SealedSegment | None:
    """Return the segment that is dropped first."""
    return min(segments, key=lambda one: (one.last_seq, one.shard), default=None)


def cut_off_error(gone: CutOff) -> MillstreamError:
    """Return the error for a holder that was cut off: `CursorExpired` or `FollowerBehindRetention`."""
    kind = FollowerBehindRetention if gone.kind is HolderKind.FOLLOWER else CursorExpired
    needed = (
        f"the log from {gone.needed_from} on" if gone.needed_from < gone.first else "the end of a segment of the log"
    )
    return kind(
        f"the {gone.kind.value} {gone.name} was cut off: it needed {needed}; the log now begins at {gone.first}",
        holder=gone.name,
        needed_from=int(gone.needed_from),
        first=int(gone.first),
    )


def _new(kind: HolderKind) -> Holder:
    return Holder(kind, Seq(0), _Landed() if kind is HolderKind.PIPELINE else None)


def _needs(holder: Holder, segment: SealedSegment) -> bool:
    if segment.last_seq >= holder.needed_from:
        return True
    if holder.position is not None:
        end = holder.position.get(segment.shard)
        if end is None or end.base_offset <= segment.base_offset:
            return True
    landed = holder.landed
    return landed is not None and not all(landed.covers(batch) for batch in segment.batches)


@dataclass(slots=True)
class _NumberRanges:
    """Ranges of numbers, both ends included: in order, none adjacent to the next."""

    firsts: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)

    def _near(self, first: int, last: int) -> tuple[int, int]:
        """Return indexes `[start, stop)` of the ranges that overlap `first` to `last`, or are adjacent to it."""
        return bisect_left(self.lasts, first - 1), bisect_right(self.firsts, last + 1)

    def touches(self, first: int, last: int) -> bool:
        """Return whether the range can be added without another range."""
        start, stop = self._near(first, last)
        return start < stop

    def add(self, first: int, last: int) -> None:
        """Add a range, merged with those that it touches."""
        start, stop = self._near(first, last)
        if start < stop:
            first, last = min(first, self.firsts[start]), max(last, self.lasts[stop - 1])
        self.firsts[start:stop], self.lasts[start:stop] = [first], [last]

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts of `first` to `last` that are in no range."""
        found: list[tuple[int, int]] = []
        at = bisect_left(self.lasts, first)
        while at < len(self.firsts) and self.firsts[at] <= last:
            if first < self.firsts[at]:
                found.append((first, self.firsts[at] - 1))
            first = self.lasts[at] + 1
            at += 1
        if first <= last:
            found.append((first, last))
        return found

    def keep(self, wanted: Callable[[int, int], bool]) -> None:
        """Keep the ranges for which `wanted` is true."""
        kept = [(first, last) for first, last in zip(self.firsts, self.lasts, strict=True) if wanted(first, last)]
        self.firsts, self.lasts = [first for first, _ in kept], [last for _, last in kept]


_Scope = tuple[TableId | None, str | None]
"""A table and a partition; None means all."""


@dataclass(slots=True)
class _Landed:
    """Ranges of landed numbers: of all tables, and by table and partition."""

    everything: _NumberRanges = field(default_factory=_NumberRanges)
    scopes: dict[_Scope, _NumberRanges] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of ranges remembered."""
        return len(self.everything.firsts) + self._count_of_tables()

    def add(self, first: Seq, last: Seq, table: TableId | None, partition: str | None) -> None:
        """Remember a range, unless that exceeds the bound."""
        if table is None:
            if len(self.everything.firsts) < RANGES_MAX or self.everything.touches(first, last):
                self.everything.add(first, last)
                self._keep(lambda a, b: bool(self.everything.gaps(a, b)))
            return
        ranges = self.scopes.get((table, partition)) or _NumberRanges()
        if ranges.touches(first, last) or (self.everything.gaps(first, last) and self._count_of_tables() < RANGES_MAX):
            ranges.add(first, last)
            self.scopes[table, partition] = ranges

    def covers(self, batch: SegmentTable) -> bool:
        """Return whether all of a batch's range has landed."""
        gaps = self.everything.gaps(batch.first, batch.last)
        for scope in dict.fromkeys([(batch.table, None), (batch.table, batch.partition)]):
            if scope in self.scopes:
                gaps = [gap for first, last in gaps for gap in self.scopes[scope].gaps(first, last)]
        return not gaps

    def forget_below(self, seq: Seq) -> None:
        """Forget ranges that end below `seq`."""
        self._keep(lambda _, last: last >= seq)
        self.everything.keep(lambda _, last: last >= seq)

    def _count_of_tables(self) -> int:
        return sum(len(ranges.firsts) for ranges in self.scopes.values())

    def _keep(self, wanted: Callable[[int, int], bool]) -> None:
        """Keep the wanted ranges of single tables."""
        for ranges in self.scopes.values():
            ranges.keep(wanted)
        self.scopes = {scope: ranges for scope, ranges in self.scopes.items() if ranges.firsts}
