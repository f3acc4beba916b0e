"""What a leader learns, and what it is to do: the values that `Leader.step` takes and gives.

Links have numbers, given by whoever accepts them, none twice. Each `Greet` and `ReadAndSend` is answered by `Sent` or `ReadFailed`, or by
`LinkGone`; until then its link gets no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from millstream.errors import MillstreamError
from millstream.model.ids import GroupNumber, ShardId
from millstream.model.marks import DurableMark
from millstream.model.positions import Seq
from millstream.model.replication import Acknowledgement, Hello, Holdings, NodeName, ReplicaPosition
from millstream.protocol.replication.roles import Promise, RoleFact

LinkId = NewType("LinkId", int)


@dataclass(frozen=True, slots=True)
class ShipOptions:
    """How much goes at once, and how often."""

    shipment_bytes: int = 4 << 20
    window_bytes: int = 32 << 20
    """Sent to one follower and not yet acknowledged."""
    heartbeat_s: float = 1.0
    """Nothing new is told that often."""
    silence_s: float = 30.0
    """A link on which an acknowledgement is due for longer than that is given up."""
    cursor_every_s: float = 1.0
    """How often a follower's cursor is noted for retention, at most: it may lag, which keeps more."""


# --- what it learns ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A follower came."""

    link: LinkId
    hello: Hello


@dataclass(frozen=True, slots=True)
class Asked:
    """It said `Hello` again: it lacks something, or has set something aside."""

    link: LinkId
    hello: Hello


@dataclass(frozen=True, slots=True)
class Acked:
    """It has something durably."""

    link: LinkId
    ack: Acknowledgement


@dataclass(frozen=True, slots=True)
class Sent:
    """A `Greet` or `ReadAndSend` was carried out."""

    link: LinkId
    position: ReplicaPosition
    """Up to where the follower has been sent everything now."""
    size_bytes: int
    is_all: bool
    """Nothing durable is left that it doesn't bear; its marks are of this moment."""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A `Greet` or `ReadAndSend` wasn't: reading failed, not the link."""

    link: LinkId
    error: MillstreamError
    chance: float
    """In [0, 1), drawn by the caller."""


@dataclass(frozen=True, slots=True)
class LinkGone:
    """It broke, or the follower ended it."""

    link: LinkId
    error: MillstreamError | None = None


@dataclass(frozen=True, slots=True)
class Durable:
    """The marks as they stand, or documents, have changed."""

    marks: Mapping[ShardId, DurableMark]
    documents: Mapping[str, int] = field(default_factory=dict)
    """Versions."""
    shown: Mapping[ShardId, DurableMark] = field(default_factory=dict)
    """How far readers see each shard, where that isn't what is durable: it may change without anything else."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The object store has everything up to that group, number, and position."""

    group: GroupNumber
    persisted_upto: Seq = Seq(0)
    position: ReplicaPosition = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heard:
    """Of a promise, from anywhere else than a follower."""

    promise: Promise


@dataclass(frozen=True, slots=True)
class Stopping:
    """What is durable now is to be shipped yet, for so long."""

    deadline_s: float
    """On the clock that `step` is given."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Joined | Asked | Acked | Sent | ReadFailed | LinkGone | Durable | Stored | Heard | Stopping | Tick
)  # fmt: skip

# --- what is to be done ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PersistRole:
    """Note it durably; nothing behind this effect happens before."""

    fact: RoleFact


@dataclass(frozen=True, slots=True)
class PersistCursor:
    """Retention keeps for it everything from there on."""

    node: NodeName
    needed_from: Seq
    """The last number that it has, not the one behind: the segment that ends with it may get a footer yet, and without that the follower can't
    go on in the next."""
    position: ReplicaPosition
    """Likewise no segment goes in which this lies, or behind it: a shard where nothing happens may be sealed long after its last number."""
    anew: bool = False
    """It has less than it had: what was noted of it before is let go first."""


@dataclass(frozen=True, slots=True)
class PersistAcks:
    """Tell whoever waits for others to have something."""

    holdings: Holdings
    """Without times."""


@dataclass(frozen=True, slots=True)
class Greet:
    """Send the lineage, and all documents that it hasn't; no parts and no marks. Then `Sent`, or `ReadFailed`, or `LinkGone`."""

    link: LinkId
    documents: Mapping[str, int]
    """The versions that it has."""


@dataclass(frozen=True, slots=True)
class ReadAndSend:
    """Take the marks, then read what is below them; send it, even if it is nothing. Then `Sent`, or `ReadFailed`, or `LinkGone`."""

    link: LinkId
    after: ReplicaPosition
    bytes_max: int
    documents: Mapping[str, int]
    """The versions that it has been sent; newer ones go along."""


@dataclass(frozen=True, slots=True)
class DropLink:
    """Tell the follower why, where there is something to tell, and break it."""

    link: LinkId
    why: MillstreamError | None


@dataclass(frozen=True, slots=True)
class Tell:
    """For whoever reads the log of events."""

    node: NodeName
    what: str
    error: MillstreamError | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """All is over; those who lack something that was durable when it began to stop."""

    lacking: tuple[NodeName, ...]


Effect = PersistRole | PersistCursor | PersistAcks | Greet | ReadAndSend | DropLink | Tell | Stopped
