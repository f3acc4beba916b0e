"""The values that a consumer's machine takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from millstream.model.positions import Seq

ANSWER_BYTES: Final = 8 << 20
"""Most bytes of records in one answer; its first message may be larger."""
UNSETTLED_BYTES_MAX: Final = 64 << 20
"""Most bytes of unsettled messages in memory."""


def position_of(seq: int, part: int = 0) -> int:
    """Return the position of a record's message: `part` is 1 for the second message of a record, else 0."""
    return 2 * seq + part


def seq_of(position: int) -> Seq:
    """Return the number of the record at a position of the log."""
    return Seq(position >> 1)


class Kind(StrEnum):
    """The kinds of consumers."""

    CHANGES = "changes"
    LATEST = "latest"


class Phase(StrEnum):
    """Whether a consumer is given messages."""

    ACTIVE = "active"
    PAUSED = "paused"
    CUT_OFF = "cut_off"


class Status(StrEnum):
    """The result of an ack, a nack or an extension."""

    ACKED = "acked"
    NACKED = "nacked"
    EXTENDED = "extended"
    ALREADY_ACKED = "already_acked"
    SUPERSEDED = "superseded"
    REWOUND = "rewound"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a machine: the first three are in the consumer's definition, the others protect its caller's memory."""

    ack_wait_ms: int = 30_000
    max_deliver: int = 10
    """Failed deliveries after which a message is dead; 0: never."""
    max_ack_pending: int = 1000
    """Most messages in flight."""
    answer_bytes: int = ANSWER_BYTES
    unsettled_max: int = 1_000_000
    """Number of unsettled messages from which the machine wants no more, since it holds each in memory."""
    unsettled_bytes_max: int = UNSETTLED_BYTES_MAX
    """The same in bytes of memory, for kind `latest`."""
    records_bytes_max: int | None = None
    """For kind `changes`: a bound in bytes of the records that messages refer to. Above it, the machine wants no more than
    one deliverable message, and drops the `origin` of messages that wait behind others. The caller reads those records
    again for an answer or a dead letter."""


class Message(NamedTuple):
    """A record, or half of one, that a consumer is to receive. The machine compares its fields and never looks into `origin`."""

    position: int
    """Its place in the order of delivery: `position_of` its `seq`; unique, growing with the log.

    A dead letter has a negative one if its record was lost by a promotion, since another record may have its `seq`.
    """
    before: int
    """The `seq` at the end of the operation before this message's operation."""
    id: str
    """The text that identifies it for ever."""
    groups: tuple[str, ...]
    """The groups that it holds: none (`t`, `x`, `m`, `group_by = "none"`), one, or two for a key change."""
    table: int | None
    """The table that it belongs to; None for `m`."""
    barrier: bool
    """Whether it waits for all earlier messages of its table and holds all later ones (`t` and `x`)."""
    size: int
    """Size of its record in bytes, for the limit of an answer."""
    origin: Any = None
    """The caller's own reference, such as the record; None if it was dropped, see `Limits`. It isn't part of the durable state."""
    truncates: bool = False
    """Whether it is a `t` or an `x`: a consumer of kind `latest` drops the waiting messages that it takes; see `takes`."""
    leaf: int | None = None
    """OID of the source's partition that has its row; of an `x`, of the partition that left. None if it isn't known, or
    the message stands for records of several partitions."""

    def takes(self, older: Message) -> bool:
        """Whether this `t` or `x` makes an older message of its table void.

        A `t` takes all rows and all of its kind before it, an `x` those of its partition. A message that stands for
        records of several partitions isn't void: the receiver may know the row as one of another partition.
        """
        if older.barrier and not older.truncates:
            return False
        return self.leaf is None or older.leaf == self.leaf


class DeliveryId(NamedTuple):
    """One delivery of one message: the content of an `ack_id`."""

    generation: int
    """Number of rewinds before it."""
    position: int
    run: int
    """The run of the machine that delivered it; see `Consumer`."""
    answer: int
    """Number of the answer within its run."""


class Delivery(NamedTuple):
    """A message in an answer."""

    message: Message
    deliveries: int
    """Number of deliveries of the message, this one included."""
    delivery_id: DeliveryId
    failures: int = 0
    """Number of its deliveries that failed before."""


class DeadLetter(NamedTuple):
    """A message that failed `max_deliver` times."""

    message: Message
    """The message; `origin` is None after a restart: the caller keeps the record by `id`."""
    deliveries: int
    error: str
    died: int
    """When it died, in ms since 1970."""
    generation: int
    """The generation in which it died: a delivery of another one doesn't name it."""
    is_overtaken: bool = False
    """Whether its group has a newer message, which a consumer of kind `latest` delivers instead."""
