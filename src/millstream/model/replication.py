"""A log on its way to another machine: pieces of segments, the marks that make them count, and acknowledgements of them.

A follower's files are the leader's, byte for byte. So a position is the end of a shard's bytes: a
segment and a position in its file. The leader's own marks, sent behind the bytes that they cover,
determine what the follower shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NewType

from millstream.errors import UsageError
from millstream.model.human_text import counted
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq

NodeName = NewType("NodeName", str)
"""One machine's name among those that have a stream; it stays when an address changes."""

OBJECT_STORE: Final = NodeName("object-store")
"""The object store's name among the holders of a log."""

_NODE_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z")


def check_node_name(name: str) -> NodeName:
    """Return the name if it is a valid node name; else raise `UsageError`."""
    if _NODE_NAME.match(name) is None or len(name) > 63:
        raise UsageError(
            f"{name!r} can't name a node: names of nodes have lower-case letters, digits and -, at most 63",
            hint="Name it as a host is named, such as a or db-2.",
        )
    return NodeName(name)


def region_node(region: RegionId) -> NodeName:
    """Return the node name that another region's home has as a follower."""
    return NodeName(f"region-{region}")


_HOLDER: Final = "follower "


def follower_holder(node: NodeName) -> str:
    """Return a follower's name among the holders of segments."""
    return f"{_HOLDER}{node}"


def follower_of_holder(name: str) -> NodeName | None:
    """Return the follower with such a holder name; None if the holder is no follower."""
    return NodeName(name.removeprefix(_HOLDER)) if name.startswith(_HOLDER) else None


@dataclass(frozen=True, slots=True, order=True)
class ByteEnd:
    """Exclusive end of a shard's bytes; orders as the bytes do."""

    base_offset: Offset
    """Base offset of the segment."""
    position: int
    """Position in the segment's file; 0 if the segment has nothing yet. Behind a footer comes position
    0 of the next segment."""


ReplicaPosition = Mapping[ShardId, ByteEnd]
"""Durable end of every shard that a node knows. The node holds nothing of a shard that isn't in the mapping."""


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Bytes of one segment's file, as they stand there: header, frames, footer. Only frames are cut, anywhere."""

    shard: ShardId
    base_offset: Offset
    position: int
    """Position of the first byte in the file."""
    data: bytes | memoryview
    is_end: bool = False
    """Whether the file ends with these bytes: it is sealed."""

    @property
    def end(self) -> ByteEnd:
        """The end of these bytes."""
        return ByteEnd(self.base_offset, self.position + len(self.data))


@dataclass(frozen=True, slots=True)
class Document:
    """A document outside the log that a promoted node needs. The newest version counts, as a whole."""

    name: str
    """`catalog`, `sessions`, or `lineage` (which nodes have led from which group on), the first
    document on a connection."""
    version: int
    """Version number; grows with each change."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Shipment:
    """One message to a follower.

    A sender's shipments are applied in the order sent; one that leaves a gap is rejected.
    """

    stream: StreamId
    region: RegionId
    epoch: Epoch
    """The greatest promise that the leader knows of. A follower that has promised a higher epoch
    rejects the shipment."""
    parts: tuple[SegmentPart, ...] = ()
    marks: Mapping[ShardId, DurableMark] = field(default_factory=dict)
    """All marks of the stream at one moment, whose bytes have been sent with these parts at the
    latest. Empty: the bytes sent so far aren't complete."""
    first_kept: Mapping[ShardId, DroppedMark] = field(default_factory=dict)
    """The dropped front of each shard of which retention has dropped something at the leader. A
    follower that has nothing yet begins behind it."""
    documents: tuple[Document, ...] = ()
    leader_end: Seq = Seq(0)  # a NewType of int
    """How far the leader itself is durable; lag is measured against it."""
    sent_ns: int = 0
    """The leader's clock, in nanoseconds since 1970 UTC."""
    leader: NodeName = NodeName("")
    """The node that the promise numbered `epoch` was given to. Two nodes may have begun with one
    number, never with one pair. Empty: no node was ever promoted."""
    bytes_left: int = 0
    """Bytes of the stream, beyond this shipment, that the sender has durably."""
    shown: Mapping[ShardId, DurableMark] | None = None
    """Goes with marks: how far the leader's readers see each shard, if others have to hold it first.
    Empty: they see everything that the marks cover. None: not sent."""
    by_one: bool = False
    """Whether this follower's acknowledgement alone satisfies the stream's acknowledgement level."""

    @property
    def size_bytes(self) -> int:
        """Size in bytes of the parts and documents."""
        return sum(len(part.data) for part in self.parts) + sum(len(document.data) for document in self.documents)


@dataclass(frozen=True, slots=True)
class Hello:
    """A follower's first message on a connection, also sent when it lacks something.

    It asks the leader to send from a position on.
    """

    stream: StreamId | None
    """The stream's id; None if the follower has nothing yet."""
    node: NodeName
    promised: Epoch
    """The follower's promise: it rejects shipments of a leader with a lower epoch."""
    position: ReplicaPosition
    documents: Mapping[str, int] = field(default_factory=dict)
    """Versions of the documents that it has."""
    promised_to: NodeName = NodeName("")
    """The node that the promise was given to. Empty: none, no node was ever promoted."""
    home: str = ""
    """Identity of the home among those with this node name; permanent while the home stays in place.
    Empty: not sent."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Durable and shown state of a follower."""

    node: NodeName
    promised: Epoch
    position: ReplicaPosition
    group: GroupNumber
    """The last commit group of which it holds all shards' parts durably."""
    persisted_upto: Seq
    applied_ns: int
    """The follower's clock when it was durable."""
    records_behind: int = 0
    """Number of records behind what the leader had when it sent."""
    bytes_behind: int = 0
    lag_s: float = 0.0
    """Maximum age of what it shows; -1 if it never had everything that the leader had."""


class AckKind(StrEnum):
    """Where a write has to be before it is acknowledged."""

    LOCAL = "local"
    DURABLE = "durable"
    OBJECT = "object"


_LEVEL: Final = re.compile(r"durable\((\d{1,3})\)\Z")


@dataclass(frozen=True, slots=True)
class AckLevel:
    """An acknowledgement level: `local`; `durable(k)`, also on k followers; `object`, also in the object store."""

    kind: AckKind
    followers: int = 0
    """Number of followers for `durable`, 1 or more; else 0."""

    @classmethod
    def parse(cls, text: str) -> AckLevel:
        """Parse a level's name; raises `UsageError` if it is none."""
        said: object = text  # of a public call, whose callers may have no types
        match = _LEVEL.match(said) if isinstance(said, str) else None
        if match is not None and int(match[1]) > 0:
            return cls(AckKind.DURABLE, int(match[1]))
        if text in (AckKind.LOCAL, AckKind.OBJECT):
            return cls(AckKind(text))
        raise UsageError(
            f"{text!r} is no acknowledgement level", hint="There are local, durable(1), durable(2) …, and object."
        )

    def __str__(self) -> str:
        return f"durable({self.followers})" if self.kind is AckKind.DURABLE else self.kind.value

    @property
    def by_one(self) -> bool:
        """Whether any one follower's acknowledgement satisfies the level."""
        return self.kind is AckKind.DURABLE and self.followers == 1

    def covers(self, other: AckLevel) -> bool:
        """Whether a write that satisfies this level also satisfies the other."""
        if other.kind is AckKind.LOCAL or self == other:
            return True
        return self.kind is other.kind is AckKind.DURABLE and self.followers >= other.followers


LOCAL: Final = AckLevel(AckKind.LOCAL)


@dataclass(frozen=True, slots=True)
class Reach:
    """The holders that a node's writes can ever have, as configured."""

    followers: int
    """Number of nodes that may follow it."""
    has_store: bool
    """Whether there is an object store."""

    def lacks(self, level: AckLevel) -> str | None:
        """Return what the level needs and the configuration lacks, as text; None if the level can be reached."""
        if level.kind is AckKind.DURABLE and level.followers > self.followers:
            followers, others = counted(level.followers, "follower"), counted(self.followers, "other node")
            return f"{level} asks for {followers}, and [replication.nodes] has {others}"
        if level.kind is AckKind.OBJECT and not self.has_store:
            return "object asks for an object store, and [replication] names none"
        return None
