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

OBJECT_STORE: Final = NodeName("object-store")
"""What the object store is called among those that hold a log."""

_NODE_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z")


def check_node_name(name: str) -> NodeName:
    """The name itself, where it is one that a node may have; else `UsageError`."""
    if _NODE_NAME.match(name) is None or len(name) > 63:
        raise UsageError(
            f"{name!r} can't name a node: names of nodes have lower-case letters, digits and -, at most 63",
            hint="Name it as a host is named, such as a or db-2.",
        )
    return NodeName(name)


def region_node(region: RegionId) -> NodeName:
    """What a home of another region calls itself, or is called, as a follower."""
    return NodeName(f"region-{region}")


_HOLDER: Final = "follower "


def follower_holder(node: NodeName) -> str:
    """A follower's name among those who hold segments."""
    return f"{_HOLDER}{node}"


def follower_of_holder(name: str) -> NodeName | None:
    """The follower of such a name; None where it is another one's."""
    return NodeName(name.removeprefix(_HOLDER)) if name.startswith(_HOLDER) else None


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
class Document:
    """Something beside the log that a promoted node needs: the newest counts, whole."""

    name: str
    """`catalog`, `sessions`, and `lineage`: who has led from which group on, with which everything begins on a connection."""
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
    leader: NodeName = NodeName("")
    """To whom the promise was given that `epoch` numbers: two nodes may have begun with one number, never with one pair. Empty:
    nobody was ever promoted."""
    bytes_left: int = 0
    """What the sender has of the stream, durably, beyond this."""
    shown: Mapping[ShardId, DurableMark] | None = None
    """Goes with marks: how far readers of the leader see each shard, where others have to hold it first; empty: they see all that the marks
    say. None: nothing is said of it."""
    by_one: bool = False
    """What this follower has acknowledged is held as the stream's level asks, by that alone."""

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
    promised_to: NodeName = NodeName("")
    """To whom it has; empty: to nobody, nobody was ever promoted."""
    home: str = ""
    """Which home of that name it is: the same for as long as that stays where it is. Empty: not said."""


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
    """How old what it shows is, at most; -1 where it never had all that the leader had."""


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

    @property
    def by_one(self) -> bool:
        """Whether what any one follower has is held."""
        return self.kind is AckKind.DURABLE and self.followers == 1

    def covers(self, other: AckLevel) -> bool:
        """Whether what is held as this one says is held as the other one says, too."""
        if other.kind is AckKind.LOCAL or self == other:
            return True
        return self.kind is other.kind is AckKind.DURABLE and self.followers >= other.followers


LOCAL: Final = AckLevel(AckKind.LOCAL)
_ALL_THERE_IS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Holding:
    """What one other place holds durably of a stream: a follower, or the object store."""

    name: str
    """The node's; of the object store `OBJECT_STORE`."""
    promised: Epoch
    """It takes nothing of a leader with a lower one."""
    group: GroupNumber
    """The last commit group of which it has all."""
    persisted_upto: Seq = Seq(0)  # a NewType of int
    """Likewise of numbers; of the object store 0."""
    told_ns: int = 0
    """When it said so, by the leader's clock, in nanoseconds since 1970 UTC; 0 where nobody has looked at a clock yet."""
    is_store: bool = False
    """Whether it is the object store."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who holds how much of a stream beside the node that leads it, as of one moment: what each acknowledgement level is reached by.

    The leader's machine makes it of what followers have said, the file of acknowledgements carries it, and the stream's writer looks at it while
    appends wait.
    """

    promised: Epoch = Epoch(0)  # a NewType of int
    """The leader's own: what a place holds counts only where it hasn't promised another leader since."""
    places: tuple[Holding, ...] = ()

    def group_reached(self, level: AckLevel) -> GroupNumber:
        """The last commit group that is held as the level says, as far as it takes others than the leader; 0 where there is none yet.

        `local` takes nobody else: all there is.
        """
        return GroupNumber(self._reached(level, [int(place.group) for place in self._counting(level)]))

    def seq_reached(self, level: AckLevel) -> Seq:
        """As `group_reached`, of numbers."""
        return Seq(self._reached(level, [int(place.persisted_upto) for place in self._counting(level)]))

    def behind(self, group: GroupNumber, level: AckLevel) -> tuple[str, ...]:
        """Names of the places that would count for the level, and lack a group."""
        is_store = level.kind is AckKind.OBJECT
        return tuple(
            place.name
            for place in self.places
            if place.is_store == is_store and (place.group < group or place.promised > self.promised)
        )

    def _counting(self, level: AckLevel) -> list[Holding]:
        is_store = level.kind is AckKind.OBJECT
        return [place for place in self.places if place.is_store == is_store and place.promised <= self.promised]

    @staticmethod
    def _reached(level: AckLevel, ends: list[int]) -> int:
        if level.kind is AckKind.LOCAL:
            return _ALL_THERE_IS
        needed = max(level.followers, 1)
        return sorted(ends, reverse=True)[needed - 1] if len(ends) >= needed else 0
