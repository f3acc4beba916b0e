"""Which segment of a log goes next, and who is cut off for it: retention by reference.

Premises
--------
1. Segments go whole, sealed, and oldest first: by the last number of their last commit group, over all shards. The first that
   has to stay keeps all behind it, so that a reader who begins at a token never meets a hole.
2. A holder that reads by position needs all from its number on: `needs`. One that has the log's bytes needs, besides, each segment that it hasn't up to its end: a shard
   where nothing happens may be sealed long after its last number, and without the footer it can't go on in the next segment. For a pipeline that number is the *start* of its last
   batch: the engine may ask for that batch again after the lake has it.
3. Besides, a segment waits until every batch (of a table and partition) in it has *landed* in every pipeline. What has landed is
   told in ranges of numbers, of all tables or of one, in any order: before the seal or after it, twice, or never.
4. A notice that is lost, late or forgotten makes a segment stay longer and never go sooner. So positions move only upward, what
   somebody unknown tells means nothing, and the ranges remembered are bounded in number.
5. A pipeline that is expected and has said nothing yet needs everything.

What becomes of a holder:

    | event           | unknown            | holds                                  | cut off             |
    |-----------------|--------------------|----------------------------------------|---------------------|
    | needs(n)        | holds from n on    | holds from the greater number on       | refused by its error|
    | landed(range)   | -                  | remembered (pipelines), within bounds  | -                   |
    | released        | -                  | unknown; an expected one: holds all    | unknown             |
    | CutOff returned |                    | cut off                                |                     |

What becomes of the oldest segment, by who needs it and how large the log is:

    | needed by                    | <= bytes           | <= bytes_max | > bytes_max                |
    |------------------------------|--------------------|--------------|----------------------------|
    | nobody                       | Drop when old      | Drop         | Drop                       |
    | consumers and followers only | Keep               | Keep         | CutOff of each, then Drop  |
    | anybody else                 | Keep               | Keep         | Keep; nobody is cut off    |

Nobody is cut off where that would free nothing. Pipelines and backlogs never are, nor what is merged of several regions: the lake, and the
merged table, have no other way to what they lack.

The machine does nothing by itself. `step` gives one effect; the caller carries it out (a cut-off durably, before anything else)
and asks again. Segments aren't remembered from one call to the next: the caller shows the oldest sealed one of every shard.
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
"""Ranges remembered of a pipeline, of single tables and as many of all: more than a batch has tables, some hundred kilobytes."""


class HolderKind(StrEnum):
    """Who keeps segments."""

    PIPELINE = "pipeline"
    BACKLOG = "backlog"
    """Of a table that a pipeline has set aside: what it lacks."""
    SESSIONS = "sessions"
    """Of the log's writer: writes of applications that the copy of its sessions lacks."""
    CONSUMER = "consumer"
    FOLLOWER = "follower"
    MERGE = "merge"
    """What is kept of a table that several regions write: records that it hasn't taken."""
    LEADER = "leader"
    """Of a follower's log: what its leader still has. Whoever is promoted needs all that those in the leader's catalog do."""

    @property
    def can_be_cut_off(self) -> bool:
        """Whether the log goes on without it, once it holds too much."""
        return self in {HolderKind.CONSUMER, HolderKind.FOLLOWER}


@dataclass(frozen=True, slots=True)
class TableBatch:
    """Records of one table in a segment. Its range may be wider than its records' numbers: then it waits for all of that."""

    table: TableId
    first: Seq
    last: Seq
    partition: str | None = None


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A segment that nobody writes any more."""

    shard: ShardId
    base_offset: Offset
    end_offset: Offset
    last_seq: Seq
    """Last number of its last commit group."""
    size_bytes: int
    sealed_ns: int
    """When the segment behind it was begun: wall clock, nanoseconds since 1970."""
    batches: tuple[TableBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept. `bytes_max` is never below `size_bytes`."""

    age_s: float
    """What nobody needs goes at that age …"""
    size_bytes: int
    """… or while the log is larger than this."""
    bytes_max: int
    """Past it, consumers and followers are cut off."""

    def __post_init__(self) -> None:
        if self.bytes_max < self.size_bytes:
            raise AssertionError(f"{self.bytes_max} bytes at most are below {self.size_bytes}")


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of the segment."""

    segment: SealedSegment


@dataclass(frozen=True, slots=True)
class CutOff:
    """Note durably that the holder is cut off; it holds nothing any more."""

    name: str
    kind: HolderKind
    needed_from: Seq
    first: Seq
    """Where the log begins once the segment has gone that it needed."""
    position: ReplicaPosition | None = None
    """Where it stood, where that is known."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Nothing goes now."""

    segment: SealedSegment | None = None
    """The oldest sealed one."""
    needed_by: tuple[str, ...] = ()
    """By whom it is needed; nobody: it is young, and the log small."""


@dataclass(slots=True)
class Holder:
    """What is known of one."""

    kind: HolderKind
    needed_from: Seq
    """It needs everything from here on; only grows."""
    landed: _Landed | None = None
    """Of a pipeline."""
    position: ReplicaPosition | None = None
    """Of one that has the log's bytes, as it said last: it has them up to there."""


class Retention:
    """The references to one log.

    Args:
        expected: pipelines that need everything until they have said what.

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
        """Everybody who holds something, by name."""
        return self._holders

    @property
    def remembered(self) -> int:
        """Ranges that are remembered, of all pipelines: at most `2 * RANGES_MAX` each."""
        return sum(holder.landed.count for holder in self._holders.values() if holder.landed is not None)

    def needs(self, name: str, kind: HolderKind, seq: Seq, position: ReplicaPosition | None = None) -> None:
        """Somebody may still ask for everything from `seq` on; a lower number than before changes nothing.

        Args:
            name: the holder.
            kind: what it is, when it is new.
            seq: the number.
            position: up to where it has each shard's bytes; of one that isn't in it nothing. None: by numbers alone.

        Raises:
            CursorExpired, FollowerBehindRetention: it was cut off. `released` is how it begins anew.
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
        """Records with numbers `first` to `last` are committed in the lake by a pipeline.

        Args:
            name: the pipeline; what anybody else tells changes nothing.
            first: the range's first number.
            last: its last.
            table: whose; None: of all tables.
            partition: of that table; None: all of it.
        """
        holder = self._holders.get(name)
        if holder is not None and holder.landed is not None and first <= last:
            holder.landed.add(first, last, table, partition)

    def released(self, name: str) -> None:
        """Forget a holder, also one that was cut off. A pipeline that is expected needs everything again."""
        self._cut_off.pop(name, None)
        self._holders.pop(name, None)
        if name in self._expected:
            self._holders[name] = _new(HolderKind.PIPELINE)

    def forget_below(self, seq: Seq) -> None:
        """No shard has a record below `seq` any more: what is known of them is let go."""
        for holder in self._holders.values():
            if holder.landed is not None:
                holder.landed.forget_below(seq)

    def needed_by(self, segment: SealedSegment) -> tuple[str, ...]:
        """The names of all who need a segment, in order."""
        return tuple(sorted(name for name, holder in self._holders.items() if _needs(holder, segment)))

    def step(
        self, oldest: Iterable[SealedSegment], *, now_ns: int, log_bytes: int, bounds: Bounds
    ) -> Drop | CutOff | Keep:
        """What to do next; ask again after `Drop` and `CutOff`.

        Args:
            oldest: of every shard that has sealed segments, the oldest.
            now_ns: wall clock, nanoseconds since 1970.
            log_bytes: of all segments, those being written among them.
            bounds: how much is kept.
        """
        segment = oldest_of(oldest)
        if segment is None:
            return Keep()
        names = self.needed_by(segment)
        if not names:
            is_old = now_ns - segment.sealed_ns >= bounds.age_s * 1e9
            return Drop(segment) if is_old or log_bytes > bounds.size_bytes else Keep(segment)
        if log_bytes <= bounds.bytes_max or not all(self._holders[name].kind.can_be_cut_off for name in names):
            return Keep(segment, names)
        holder = self._holders.pop(names[0])
        gone = CutOff(names[0], holder.kind, holder.needed_from, Seq(segment.last_seq + 1), holder.position)
        self._cut_off[names[0]] = gone
        return gone


def oldest_of(segments: Iterable[SealedSegment]) -> SealedSegment | None:
    """The one that goes first."""
    return min(segments, key=lambda one: (one.last_seq, one.shard), default=None)


def cut_off_error(gone: CutOff) -> MillstreamError:
    """The error that a holder gets which was cut off: `CursorExpired` or `FollowerBehindRetention`."""
    kind = FollowerBehindRetention if gone.kind is HolderKind.FOLLOWER else CursorExpired
    needed = (
        f"the log from {gone.needed_from} on" if gone.needed_from < gone.first else "the end of a segment of the log"
    )
    return kind(
        f"the {gone.kind.value} {gone.name} was cut off: it needed {needed}, which begins at {gone.first}",
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
class _Ranges:
    """Ranges of numbers, both ends in them: in order, none touching the next."""

    firsts: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)

    def _near(self, first: int, last: int) -> tuple[int, int]:
        """Places `[start, stop)` of the ranges that overlap `first` to `last`, or end right before or begin right behind."""
        return bisect_left(self.lasts, first - 1), bisect_right(self.firsts, last + 1)

    def touches(self, first: int, last: int) -> bool:
        """Whether adding the range makes no range more."""
        start, stop = self._near(first, last)
        return start < stop

    def add(self, first: int, last: int) -> None:
        """Put a range in, joined with those that it touches."""
        start, stop = self._near(first, last)
        if start < stop:
            first, last = min(first, self.firsts[start]), max(last, self.lasts[stop - 1])
        self.firsts[start:stop], self.lasts[start:stop] = [first], [last]

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """What of `first` to `last` isn't in any range."""
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
        """Keep the ranges that are wanted."""
        kept = [(first, last) for first, last in zip(self.firsts, self.lasts, strict=True) if wanted(first, last)]
        self.firsts, self.lasts = [first for first, _ in kept], [last for _, last in kept]


_Scope = tuple[TableId | None, str | None]
"""A table and a partition, None standing for all."""


@dataclass(slots=True)
class _Landed:
    """What has landed, as ranges of numbers: of all tables, and by table and partition."""

    everything: _Ranges = field(default_factory=_Ranges)
    scopes: dict[_Scope, _Ranges] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Ranges remembered."""
        return len(self.everything.firsts) + self._count_of_tables()

    def add(self, first: Seq, last: Seq, table: TableId | None, partition: str | None) -> None:
        """Remember a range, unless that were one too many."""
        if table is None:
            if len(self.everything.firsts) < RANGES_MAX or self.everything.touches(first, last):
                self.everything.add(first, last)
                self._keep(lambda a, b: bool(self.everything.gaps(a, b)))
            return
        ranges = self.scopes.get((table, partition)) or _Ranges()
        if ranges.touches(first, last) or (self.everything.gaps(first, last) and self._count_of_tables() < RANGES_MAX):
            ranges.add(first, last)
            self.scopes[table, partition] = ranges

    def covers(self, batch: TableBatch) -> bool:
        """Whether all of a batch's range has landed."""
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
        """Of single tables, keep the ranges that are wanted."""
        for ranges in self.scopes.values():
            ranges.keep(wanted)
        self.scopes = {scope: ranges for scope, ranges in self.scopes.items() if ranges.firsts}
