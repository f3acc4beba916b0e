"""The leader's events and effects: the values that `Leader.step` takes and returns.

Links have numbers, given by the component that accepts them, none twice. Each `Greet` and `ReadAndSend` is
answered by `Sent`, `ReadFailed` or `LinkGone`; until then its link gets no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from millstream.errors import MillstreamError
from millstream.model.ids import GroupNumber, ShardId
from millstream.model.marks import DurableMark
from millstream.model.positions import Seq
from millstream.model.replication import Acknowledgement, Hello, NodeName, ReplicaPosition
from millstream.protocol.replication.ack_levels import Holdings
from millstream.protocol.replication.node_promises import Promise, RoleFact

LinkId = NewType("LinkId", int)


@dataclass(frozen=True, slots=True)
class ShipOptions:
    """Limits on the bytes sent at once, and intervals."""

    shipment_bytes: int = 4 << 20
    window_bytes: int = 32 << 20
    """Bytes sent to one follower and not yet acknowledged, at most."""
    heartbeat_s: float = 1.0
    """Interval at which a shipment is sent if there is nothing new."""
    silence_s: float = 30.0
    """Time after which a link is given up while an acknowledgement is due."""
    cursor_every_s: float = 1.0
    """Least interval at which a follower's cursor is noted for retention; a cursor that lags keeps more segments."""


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A follower connected."""

    link: LinkId
    hello: Hello


@dataclass(frozen=True, slots=True)
class Rejoined:
    """A follower sent `Hello` again: it lacks something, or has set something aside."""

    link: LinkId
    hello: Hello


@dataclass(frozen=True, slots=True)
class Acked:
    """A follower has something durably."""

    link: LinkId
    ack: Acknowledgement


@dataclass(frozen=True, slots=True)
class Sent:
    """A `Greet` or `ReadAndSend` was carried out."""

    link: LinkId
    position: ReplicaPosition
    """The position up to which the follower has now been sent everything."""
    size_bytes: int
    is_all: bool
    """The shipment leaves out nothing that is durable; its marks are current."""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A `Greet` or `ReadAndSend` failed: in reading, not on the link."""

    link: LinkId
    error: MillstreamError
    chance: float
    """In [0, 1), drawn by the caller."""


@dataclass(frozen=True, slots=True)
class LinkGone:
    """The link broke, or the follower ended it."""

    link: LinkId
    error: MillstreamError | None = None


@dataclass(frozen=True, slots=True)
class Durable:
    """The durable marks, or documents, have changed."""

    marks: Mapping[ShardId, DurableMark]
    documents: Mapping[str, int] = field(default_factory=dict)
    """Versions of the documents."""
    shown: Mapping[ShardId, DurableMark] = field(default_factory=dict)
    """The end of each shard for readers, if that isn't what is durable: it may change on its own."""


@dataclass(frozen=True, slots=True)
class StoredUpto:
    """The object store has everything up to that group, number, and position."""

    group: GroupNumber
    persisted_upto: Seq = Seq(0)
    position: ReplicaPosition = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heard:
    """The leader learned of a promise from a source other than a follower."""

    promise: Promise


@dataclass(frozen=True, slots=True)
class Stopping:
    """The leader stops: it ships what is durable now until the deadline."""

    deadline_s: float
    """On the clock that `step` is given."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Joined | Rejoined | Acked | Sent | ReadFailed | LinkGone | Durable | StoredUpto | Heard | Stopping | Tick
)  # fmt: skip

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PersistRole:
    """Note the role durably; no later effect happens before that."""

    fact: RoleFact


@dataclass(frozen=True, slots=True)
class PersistCursor:
    """Note for retention that the follower needs everything from there on."""

    node: NodeName
    needed_from: Seq
    """The last number that it has, not the next one: the segment that ends with it may still get a footer, and
    without the footer the follower can't go on in the next segment."""
    position: ReplicaPosition
    """Retention also keeps every segment at or after this position: an idle shard may be sealed long after its
    last number."""
    anew: bool = False
    """It has less than it had: its older cursor is dropped first."""


@dataclass(frozen=True, slots=True)
class PersistAcks:
    """Wake the callers that wait for other nodes to have something."""

    holdings: Holdings
    """The holdings, without times."""


@dataclass(frozen=True, slots=True)
class Greet:
    """Send the lineage, and all documents that it lacks; no parts and no marks.

    Then `Sent`, `ReadFailed` or `LinkGone`.
    """

    link: LinkId
    documents: Mapping[str, int]
    """Versions of the documents that it has."""


@dataclass(frozen=True, slots=True)
class ReadAndSend:
    """Take the marks, then read what is below them and send it, even if it is nothing.

    Then `Sent`, `ReadFailed` or `LinkGone`.
    """

    link: LinkId
    after: ReplicaPosition
    bytes_max: int
    documents: Mapping[str, int]
    """Versions of the documents that it has been sent; newer ones are added."""


@dataclass(frozen=True, slots=True)
class DropLink:
    """Send the follower the error, if there is one, and break the link."""

    link: LinkId
    why: MillstreamError | None


@dataclass(frozen=True, slots=True)
class Tell:
    """Write an entry to the event log."""

    node: NodeName
    what: str
    error: MillstreamError | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The leader has stopped.

    `lacking` names the followers that lack something that was durable when it began to stop.
    """

    lacking: tuple[NodeName, ...]


Effect = PersistRole | PersistCursor | PersistAcks | Greet | ReadAndSend | DropLink | Tell | Stopped
