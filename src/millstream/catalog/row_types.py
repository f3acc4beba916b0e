"""The catalog's return values: frozen rows, and the states of tables and copy chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from millstream.model.access import Rights
from millstream.model.ids import Epoch, SchemaVersion, ShardId, SourceId, StreamId, TableId, WriterId
from millstream.model.positions import Lsn, Seq
from millstream.model.replication import ReplicaPosition
from millstream.model.schema import TableKind
from millstream.protocol.retention import HolderKind


class TableState(StrEnum):
    """The state of a table."""

    COPY_REQUESTED = "copy_requested"
    """Known; its existing rows have to be copied (again)."""
    COPYING = "copying"
    """Its existing rows are being copied while its changes are captured."""
    STREAMING = "streaming"
    """The copy is whole; its changes are captured."""
    HISTORY_ONLY = "history_only"
    """Captured, but without a usable identity: it has no `current` view. The reason names the cause."""
    QUARANTINED = "quarantined"
    """It failed. Until it is retried, its changes enter the log undecoded; none do if its rules can't be applied, or if no
    publication sends the whole table. The reason names the cause."""
    GONE = "gone"
    """Dropped at the source or left out by the configuration; its records stay."""


COPY_HELD: Final = "copy_held"
"""Cause in the details of a table whose requested copy waits until an operator asks for it."""


class ChunkState(StrEnum):
    """The state of a chunk of a table copy."""

    PLANNED = "planned"
    """Its key range is known."""
    READ = "read"
    """Its rows were read under `snapshot`; they wait for the stream to pass it."""
    DURABLE = "durable"
    """Its rows are in the log."""


@dataclass(frozen=True, slots=True)
class HomeIdentity:
    """A home, as identified in a catalog that it shares with others."""

    id: str
    """Its own for ever, even if its folder is moved; empty while it has never been written."""
    place: str
    """Location of the home, for people."""


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A stream."""

    id: StreamId
    name: str
    created_us: int


@dataclass(frozen=True, slots=True)
class WriterRow:
    """A writer's newest incarnation."""

    stream: StreamId
    id: WriterId
    name: str
    epoch: Epoch
    pid: int
    registered_us: int


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source, and how far it is in the log."""

    id: SourceId
    stream: StreamId
    system_identifier: int
    database: str
    timeline: int
    reached: Lsn
    """The commit end LSN up to which everything is durable in the log or wasn't ours; 0 at first."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A table of a stream."""

    id: TableId
    stream: StreamId
    source: SourceId
    """The branch of the source under which it was first seen."""
    relation_oid: int
    namespace: str
    name: str
    kind: TableKind
    shard: ShardId
    state: TableState
    reason: str
    """One sentence for people; may be empty."""
    details: dict[str, Any]
    """Facts for programs in addition to the reason, JSON-able."""
    schema_version: SchemaVersion
    """The newest version put; 0 before the first."""
    copy_id: str
    """The present or last copy; empty before the first."""
    changed_us: int

    @property
    def is_captured(self) -> bool:
        """Whether its rows come from PostgreSQL; otherwise applications write them, or it has a source's messages."""
        return self.kind is TableKind.TABLE and self.source != 0

    @property
    def is_copy_held(self) -> bool:
        """Whether its copy waits until an operator asks for it: see `COPY_HELD`."""
        return self.state is TableState.COPY_REQUESTED and self.details.get("cause") == COPY_HELD

    @property
    def shown_state(self) -> str:
        """Name of its state for people: `copy_held` if its copy is."""
        return COPY_HELD if self.is_copy_held else self.state.value


@dataclass(frozen=True, slots=True)
class CopyChunk:
    """A key range of one copy of one table. The copier defines the text of the bounds; half-open: `[lower, upper)`."""

    table: TableId
    copy_id: str
    number: int
    lower: str | None = None
    """None: from the first key."""
    upper: str | None = None
    """None: to the last key."""
    state: ChunkState = ChunkState.PLANNED
    snapshot: str | None = None
    """`pg_current_snapshot()` under which the rows were read."""
    lsn: Lsn | None = None
    """The insert LSN read right after the snapshot."""
    row_count: int = 0
    size_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """Other state of the copier, JSON-able."""


@dataclass(frozen=True, slots=True)
class PipelinePosition:
    """How far a pipeline (or another holder of segments) is."""

    stream: StreamId
    name: str
    needed_from: Seq | None
    """The lowest number that it may still ask for; None if it holds nothing."""
    landed: Seq
    """Everything up to here is committed in all its tables; 0 at first."""
    changed_us: int
    kind: HolderKind = HolderKind.PIPELINE
    cut_off_at: Seq | None = None
    """First number of the log when the holder was cut off, from which on it holds nothing; None: it wasn't."""
    position: ReplicaPosition | None = None
    """Position of a holder that has the log's bytes; None if it never reported one."""


@dataclass(frozen=True, slots=True)
class AccessToken:
    """An access token, as it is stored: its text can't be derived from it."""

    id: str
    name: str
    digest: bytes = field(repr=False)
    """See `model.access.digest`."""
    rights: Rights
    created_us: int
    expires_us: int | None = None
    """Time of expiry; None: never."""

    def has_expired(self, now_us: int) -> bool:
        """Return whether it has expired."""
        return self.expires_us is not None and self.expires_us <= now_us
