"""A log on its way to another machine: pieces of segments, the marks that say how far they count, and who has what.

A follower's files are the leader's, byte for byte. So a position is where a shard's bytes end: a segment and a place in it. What
is shown there is said by the leader's own marks, which travel behind the bytes that they cover.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NewType

from millstream.errors import UsageError
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq

NodeName = NewType("NodeName", str)
"""One machine's name among those that have a stream; it stays when an address changes."""

_NODE_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z")


def check_node_name(name: str) -> NodeName:
    """The name itself, where it is one that a node may have; else `UsageError`."""
    if _NODE_NAME.match(name) is None or len(name) > 63:
        raise UsageError(
            f"{name!r} can't name a node",
            hint="Names of nodes are those of hosts: lower-case letters, digits and -, at most 63 characters.",
        )
    return NodeName(name)


@dataclass(frozen=True, slots=True, order=True)
class ByteEnd:
    """Exclusive end of a shard's bytes; orders as the bytes do."""

    base_offset: Offset
    """The segment."""
    position: int
    """In its file; 0 where the segment has nothing yet: behind a footer stands the next segment's 0."""


ReplicaPosition = Mapping[ShardId, ByteEnd]
"""What somebody holds durably of every shard that they know. A shard that isn't in it: nothing."""


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Bytes of one segment's file, as they stand there: header, frames, footer. Only frames are cut, anywhere."""

    shard: ShardId
    base_offset: Offset
    position: int
    """Of the first byte in the file."""
    data: bytes | memoryview
    is_end: bool = False
    """The file ends with it: it is sealed."""

    @property
    def end(self) -> ByteEnd:
        """Where it ends."""
        return ByteEnd(self.base_offset, self.position + len(self.data))


@dataclass(frozen=True, slots=True)
class SegmentHistory:
    """What two nodes compare of a segment: that its frames are the same up to some byte."""

    base_offset: Offset
    header_hash: bytes
    """SHA-256 of its header."""
    frames_end: int
    """Exclusive end of its frames in the file."""
    end_offset: Offset
    """Exclusive end of their records."""
    frames_hash: bytes
    """SHA-256 over the heads of these frames; heads hold the checksums of what lies behind them."""
    footer_hash: bytes = b""
    """SHA-256 of its footer; empty where it has none."""


LogHistory = Mapping[ShardId, tuple[SegmentHistory, ...]]
"""Of every shard all segments that are there, in order."""


@dataclass(frozen=True, slots=True)
class Document:
    """Something beside the log that a promoted node needs: the newest counts, whole."""

    name: str
    """`catalog`, `sessions`."""
    version: int
    """Grows with each change."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Shipment:
    """What goes to a follower in one piece. Those of one sender follow each other as they were sent, or are refused as a gap."""

    stream: StreamId
    region: RegionId
    epoch: Epoch
    """The leader's: of the greatest promise that it knows of. One that is lower than the follower has promised is refused."""
    parts: tuple[SegmentPart, ...] = ()
    marks: Mapping[ShardId, DurableMark] = field(default_factory=dict)
    """All marks of the stream as of one moment, whose bytes have been sent with these parts at the latest. Empty: what was sent
    isn't whole yet."""
    first_kept: Mapping[ShardId, DroppedMark] = field(default_factory=dict)
    """What retention has dropped at the leader, of each shard of which it has: a follower that has nothing yet begins behind it."""
    documents: tuple[Document, ...] = ()
    leader_end: Seq = Seq(0)  # a NewType of int
    """How far the leader itself is durable: lag is measured against it."""
    sent_ns: int = 0
    """The leader's clock, nanoseconds since 1970 UTC."""

    @property
    def size_bytes(self) -> int:
        """Of what it carries."""
        return sum(len(part.data) for part in self.parts) + sum(len(document.data) for document in self.documents)


@dataclass(frozen=True, slots=True)
class Hello:
    """A follower's first word on a connection, and what it says when it lacks something: from there on, please."""

    stream: StreamId | None
    """None where it has nothing yet."""
    node: NodeName
    promised: Epoch
    """It takes nothing of a leader with a lower one."""
    position: ReplicaPosition
    documents: Mapping[str, int] = field(default_factory=dict)
    """Their versions."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What a follower holds durably, and shows."""

    node: NodeName
    promised: Epoch
    position: ReplicaPosition
    group: GroupNumber
    """The last commit group of which it has all shards' parts, durably."""
    persisted_upto: Seq
    applied_ns: int
    """The follower's clock when it was durable."""
    records_behind: int = 0
    """Of what the leader had when it sent."""
    bytes_behind: int = 0
    lag_s: float = 0.0
    """How old what it shows is, by the leader's clock, as of the last shipment."""


class AckKind(StrEnum):
    """Where a write has to be before it is acknowledged."""

    LOCAL = "local"
    DURABLE = "durable"
    OBJECT = "object"


_LEVEL: Final = re.compile(r"durable\((\d{1,3})\)\Z")


@dataclass(frozen=True, slots=True)
class AckLevel:
    """`local`, `durable(k)`: on k followers, too, `object`: in the object store, too."""

    kind: AckKind
    followers: int = 0
    """Of `durable`: how many, 1 or more."""

    @classmethod
    def parse(cls, text: str) -> AckLevel:
        """From its name; `UsageError` where it is none."""
        match = _LEVEL.match(text)
        if match is not None and int(match[1]) > 0:
            return cls(AckKind.DURABLE, int(match[1]))
        if text in (AckKind.LOCAL, AckKind.OBJECT):
            return cls(AckKind(text))
        raise UsageError(
            f"{text!r} is no acknowledgement level", hint="There are local, durable(1), durable(2) …, and object."
        )

    def __str__(self) -> str:
        return f"durable({self.followers})" if self.kind is AckKind.DURABLE else self.kind.value


LOCAL: Final = AckLevel(AckKind.LOCAL)
