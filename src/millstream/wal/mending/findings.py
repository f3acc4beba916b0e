"""What `inspect` finds in a log on disk: its segments, its frames, what is damaged, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.codec.log_directory import Numbering
from millstream.model.ids import Epoch, GroupNumber, ShardId, TableId
from millstream.model.positions import SEQ_MAX, Offset, Seq
from millstream.wal.walk import Loss


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment file."""

    shard: ShardId
    path: str
    state: str
    """`sealed`, `open` (no footer: being written, or left by a crash) or `damaged` (header or footer can't be read)."""
    base_offset: Offset
    end_offset: Offset | None
    """Exclusive; of an open one as far as whole frames go. None where damage hides it."""
    records: int | None
    frames: int | None
    size_bytes: int
    epoch: Epoch | None
    created_ns: int | None
    first_seq: Seq | None
    last_seq: Seq | None
    durable_to: Offset | None
    """Exclusive end of its records that are durable; None where no mark says so."""
    shown_to: Offset | None
    """… and of those that readers are shown."""


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
    numbering: Numbering
    """Which sequence numbers its directory has."""
    durable: bool
    """Whether it lies in front of the shard's mark."""
    shown: bool
    """Whether readers see it: it is held by others, too, where that is asked for."""


@dataclass(slots=True)
class Verification:
    """What `verify` found."""

    segments: int = 0
    frames: int = 0
    records: int = 0
    bytes_checked: int = 0
    losses: list[Loss] = field(default_factory=list)
    """Damage: records, or what is needed to trust them, can't be read."""
    accepted: list[Loss] = field(default_factory=list)
    """What was lost, and is passed over because `wal repair` was told so."""
    unfinished: list[Loss] = field(default_factory=list)
    """Bytes behind the last whole frame, as a crash or a write that is going on leaves them: nothing durable is lost."""
    readable: dict[ShardId, list[tuple[Offset, Offset]]] = field(default_factory=dict)
    """What is not lost: by shard the ranges of offsets that were read and passed."""
    readable_in_part: dict[ShardId, list[tuple[Offset, Offset]]] = field(default_factory=dict)
    """Ranges of which only some tables' records are lost."""
    hidden: dict[ShardId, int] = field(default_factory=dict)
    """By shard, how many records are durable and not shown to readers, since others don't hold them as the stream's level asks."""
    unmarked: list[ShardId] = field(default_factory=list)
    """Shards with frames but without a mark: whether durable records are missing at their ends can't be said."""

    @property
    def has_marks(self) -> bool:
        """Whether every shard with frames has its mark."""
        return not self.unmarked

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost but what was accepted. Without marks: nothing of what can be judged."""
        return not self.losses


@dataclass(slots=True)
class TableStats:
    """What the log holds of one table."""

    table_id: TableId
    name: str
    records: int = 0
    size_bytes: int = 0
    """Of its payload."""


@dataclass(slots=True)
class PartitionStats:
    """What the log holds of one partition of a table; of partition None, what has none."""

    table_id: TableId
    partition: str | None
    records: int = 0
    first_seq: Seq = SEQ_MAX
    last_seq: Seq = Seq(0)
    """Between the two there may be numbers of others."""


@dataclass(slots=True)
class LogStats:
    """What the log holds."""

    segments: int = 0
    size_bytes: int = 0
    frames: int = 0
    records: int = 0
    groups: int = 0
    first_seq: Seq | None = None
    last_seq: Seq | None = None
    persisted_upto: Seq | None = None
    """How far it is durable."""
    high_water_mark: Seq | None = None
    """How far readers are shown it."""
    oldest_commit_us: int | None = None
    newest_commit_us: int | None = None
    has_marks: bool = True
    """Whether every shard has its mark; else `persisted_upto` may be missing, and what isn't durable counts too."""
    dropped_upto: Seq = Seq(0)
    tables: dict[TableId, TableStats] = field(default_factory=dict)
    partitions: dict[tuple[TableId, str | None], PartitionStats] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    accepted: list[Loss] = field(default_factory=list)
    """What was lost, and is passed over because `wal repair` was told so."""
