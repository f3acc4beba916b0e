"""Results of `inspect` on a log on disk: its segments, its frames, its damage, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.model.ids import Epoch, GroupNumber, ShardId, TableId
from millstream.model.positions import SEQ_MAX, Offset, Seq
from millstream.wal.segment_scan import Loss


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment file."""

    shard: ShardId
    path: str
    state: str
    """`sealed`, `open` (no footer: being written, or left by a crash) or `damaged` (header or footer can't be read)."""
    base_offset: Offset
    end_offset: Offset | None
    """Exclusive end; of an open segment, the end of its whole frames. None if damage hides it."""
    records: int | None
    frames: int | None
    size_bytes: int
    epoch: Epoch | None
    created_ns: int | None
    first_seq: Seq | None
    last_seq: Seq | None
    durable_to: Offset | None
    """Exclusive end of its durable records; None if no mark shows it."""
    shown_to: Offset | None
    """Exclusive end of the records that readers are shown."""


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """One frame."""

    shard: ShardId
    path: str
    position: int
    length: int
    kind: str
    """`schema` or `records`."""
    epoch: Epoch
    group: GroupNumber
    more: bool
    first_offset: Offset
    count: int
    first_seq: Seq
    last_seq: Seq
    commit_ts_us: tuple[int, int] | None
    """Least and greatest commit time in it."""
    tables: tuple[tuple[TableId, int, int, int], ...]
    """(table id, schema version, rows, bytes)"""
    durable: bool
    """Whether it lies before the shard's mark."""
    shown: bool
    """Whether readers see it: if the level requires it, other machines hold it, too."""


@dataclass(slots=True)
class Verification:
    """Result of `verify`."""

    segments: int = 0
    frames: int = 0
    records: int = 0
    bytes_checked: int = 0
    losses: list[Loss] = field(default_factory=list)
    """Damage: unreadable records, or unreadable bytes needed to trust them."""
    accepted: list[Loss] = field(default_factory=list)
    """Losses that `wal repair` was told to accept, and that readers skip."""
    unfinished: list[Loss] = field(default_factory=list)
    """Bytes after the last whole frame, left by a crash or a write in progress: nothing durable is lost."""
    readable: dict[ShardId, list[tuple[Offset, Offset]]] = field(default_factory=dict)
    """Ranges of offsets that were read and passed, by shard."""
    readable_in_part: dict[ShardId, list[tuple[Offset, Offset]]] = field(default_factory=dict)
    """Ranges in which only some tables' records are lost."""
    hidden: dict[ShardId, int] = field(default_factory=dict)
    """Number of durable records by shard that readers aren't shown, because other machines don't
    hold them as the level requires.
    """
    unmarked: list[ShardId] = field(default_factory=list)
    """Shards with frames but without a mark: durable records may be missing at their ends, unnoticed."""

    @property
    def has_marks(self) -> bool:
        """Whether every shard with frames has its mark."""
        return not self.unmarked

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost except accepted losses. Without marks, this covers only what can be checked."""
        return not self.losses


@dataclass(slots=True)
class TableStats:
    """Counts of one table's records in the log."""

    table_id: TableId
    name: str
    records: int = 0
    size_bytes: int = 0
    """Size in bytes of its payload."""


@dataclass(slots=True)
class PartitionStats:
    """Counts of one partition of a table; partition None counts the rows without one."""

    table_id: TableId
    partition: str | None
    records: int = 0
    first_seq: Seq = SEQ_MAX
    last_seq: Seq = Seq(0)
    """Greatest number; numbers of others may lie between the two."""


@dataclass(slots=True)
class LogStats:
    """Counts of the whole log."""

    segments: int = 0
    size_bytes: int = 0
    frames: int = 0
    records: int = 0
    groups: int = 0
    first_seq: Seq | None = None
    last_seq: Seq | None = None
    persisted_upto: Seq | None = None
    """Number up to which it is durable."""
    high_water_mark: Seq | None = None
    """Number up to which readers are shown it."""
    oldest_commit_us: int | None = None
    newest_commit_us: int | None = None
    has_marks: bool = True
    """Whether every shard has its mark; else `persisted_upto` may be missing, and records that
    aren't durable count too.
    """
    dropped_upto: Seq = Seq(0)
    tables: dict[TableId, TableStats] = field(default_factory=dict)
    partitions: dict[tuple[TableId, str | None], PartitionStats] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    accepted: list[Loss] = field(default_factory=list)
    """Losses that `wal repair` was told to accept, and that readers skip."""
