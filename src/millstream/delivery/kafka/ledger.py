"""A ledger, kept in Kafka, of the messages that a consumer's sink has committed to Kafka.

Each transaction of a sink writes the ids of its messages as one record to the compacted topic `TOPIC`, under the
consumer's identity. The acknowledgements of a transaction are durable before the next one begins. So a process that
takes over finds in the last record every message that is committed and that its consumer may still deliver.

A follower has the acknowledgements later, and may be promoted without the newest. So a record also has the ids of the
transactions of the last seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millstream.buffers.kafka_errors import error_of_kafka
from millstream.buffers.kafka_server import check_right_to_write, make_topic
from millstream.errors import BufferUnavailable

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

TOPIC: Final = "_millstream_consumers"
_OPTIONS: Final = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20), "max.message.bytes": str(16 << 20)}
_KEPT_S: Final = 5.0
"""How long records name an earlier transaction: a follower gets the acknowledgements within a second or two."""
_KEPT_BYTES_MAX: Final = 256 << 10
"""Size of these names: 128,000 messages. A record goes with each transaction."""
_READ: Final = 1000
_SLOW: Final = 6
"""How many times the bound of its steps the reading may take: 16 MiB and what isn't compacted yet, on a slow line."""
_WAIT_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Committed:
    """The messages that a consumer's last transactions committed."""

    generation: int = 0
    """Number of the consumer's rewinds before them."""
    ids: frozenset[str] = frozenset()
    earlier: frozenset[str] = frozenset()
    """Messages of the transactions of the seconds before."""

    def to_bytes(self, earlier: tuple[bytes, ...] = (), packed: bytes | None = None) -> bytes:
        """Return the record's value: JSON, with the numbers at the ends of ids as differences.

        Args:
            earlier: the ids of earlier transactions of the generation, each as `packed` returns them.
            packed: the own ids in that form, if they are known.
        """
        own = self.packed() if packed is None else packed
        return b'{"generation":%d,"ids":%b,"earlier":[%b]}' % (self.generation, own, b",".join(earlier))

    def packed(self, *, whole: bool = False) -> bytes:
        """Return the ids alone; with those of earlier transactions if `whole`."""
        numbers: dict[str, list[int]] = {}
        for id_ in self.ids | self.earlier if whole else self.ids:
            head, dash, digits = id_.rpartition("-")
            prefix = head + dash
            if not (digits.isascii() and digits.isdigit()) or digits[0] == "0":  # the number of few ids
                digits = id_[len(id_.rstrip("0123456789")) :]
                digits = digits.lstrip("0") or digits[-1:]
                prefix = id_[: len(id_) - len(digits)]
            numbers.setdefault(prefix, []).append(int(digits or -1))
        packed = {}
        for prefix, some in numbers.items():
            some.sort()
            packed[prefix] = [number - before for before, number in zip([0, *some], some, strict=False)]
        return msgspec.json.encode(packed)

    @classmethod
    def from_bytes(cls, data: bytes) -> Committed:
        """Return the messages of a record's value."""
        value: dict[str, Any] = msgspec.json.decode(data)
        earlier = frozenset(id_ for packed in value.get("earlier", ()) for id_ in _unpacked(packed))
        return cls(value["generation"], frozenset(_unpacked(value["ids"])), earlier)


class Recent:
    """The transactions of the last seconds, for the next record.

    Args:
        now_s: returns a time that never steps back.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._generation = 0
        self._kept: deque[tuple[float, bytes]] = deque()
        self._size_bytes = 0

    def of(self, generation: int) -> tuple[bytes, ...]:
        """Return the ids of each transaction of a generation; those of another one are forgotten."""
        while self._kept and (
            generation != self._generation
            or self._kept[0][0] < self._now_s() - _KEPT_S
            or self._size_bytes > _KEPT_BYTES_MAX
        ):
            self._size_bytes -= len(self._kept.popleft()[1])
        return tuple(packed for _, packed in self._kept)

    def add(self, generation: int, packed: bytes) -> None:
        """Note messages that were committed: those of a transaction, or of an earlier process."""
        self.of(generation)
        self._generation = generation
        self._kept.append((self._now_s(), packed))
        self._size_bytes += len(packed)


def _unpacked(packed: Mapping[str, list[int]]) -> Iterator[str]:
    for prefix, differences in packed.items():
        number = 0
        for difference in differences:
            number += difference
            yield prefix if number < 0 else f"{prefix}{number}"


def make_ledger(admin: AdminClient, *, timeout_s: float) -> None:
    """Make the topic if it doesn't exist. Raises `BufferUnavailable`, `BufferRefused`, the latter without a right, too."""
    make_topic(admin, TOPIC, partitions=1, options=_OPTIONS, timeout_s=timeout_s)
    check_right_to_write(admin, TOPIC, timeout_s=timeout_s)


def read_committed(admin: AdminClient, settings: Mapping[str, Any], identity: str, *, timeout_s: float) -> Committed:
    """Return what a consumer's last transaction committed.

    The consumer's producer has called `init_transactions`, so none of its transactions is open.

    Args:
        admin: a client.
        settings: settings of the reading client.
        identity: the consumer's.
        timeout_s: bound of the time for the end's offset, and then of the time without a record. The ledger may be
            large, so records may come for longer, up to `_SLOW` times as long.

    Raises:
        BufferUnavailable, BufferRefused: the topic can't be read, or another consumer's transaction is open in it.
    """
    from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
    from confluent_kafka.admin._listoffsets import OffsetSpec

    own = {
        "group.id": "millstream",  # required, though no group is joined and no offset is stored
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 50,  # the end is reported once a fetch has waited so long
    }
    partition = TopicPartition(TOPIC, 0)
    found = Committed()
    key = identity.encode()
    try:
        asked = admin.list_offsets(
            {partition: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            request_timeout=timeout_s,
        )
        end = asked[partition].result(timeout_s).offset
    except KafkaException as error:
        raise error_of_kafka(error.args[0], TOPIC) from error
    except TimeoutError as error:
        raise BufferUnavailable(f"Kafka didn't answer about topic {TOPIC} in time", buffer=TOPIC) from error
    reader = Consumer({**settings, **own})
    try:
        reader.assign([TopicPartition(TOPIC, 0, 0)])
        began_s, stands_at, stable_end = time.monotonic(), 0, None
        deadline_s, give_up_s = began_s + timeout_s, began_s + _SLOW * timeout_s
        is_read = end == 0
        while not is_read:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _stands_still(stands_at, stable_end, end)
            for message in reader.consume(_READ, timeout=min(left_s, _WAIT_S)):
                problem = message.error()
                if problem is None:
                    deadline_s = min(time.monotonic() + timeout_s, give_up_s)
                    stands_at = (message.offset() or 0) + 1
                    is_read |= stands_at >= end  # the end moves on while others write: it may never be reached
                    if message.key() == key:
                        found = Committed.from_bytes(message.value() or b'{"generation":0,"ids":{}}')
                elif problem.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's name
                    # It stands at the end of what is committed: an open transaction may stand before the topic's end.
                    stable_end = message.offset() or 0
                    is_read |= stable_end >= end
                elif problem.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:  # of the group that isn't joined
                    raise error_of_kafka(problem, TOPIC)
    except KafkaException as error:
        raise error_of_kafka(error.args[0], TOPIC) from error
    finally:
        reader.close()
    return found


def _stands_still(stands_at: int, stable_end: int | None, end: int) -> BufferUnavailable:
    """Return the error for a ledger that can't be read on.

    Args:
        stands_at: offset behind the last record that was read.
        stable_end: end of what was committed, if the reader has reached it: a transaction is open there.
        end: end of the topic when the reading began.
    """
    why = f"offset {stands_at} of {end} was reached"
    if stable_end is not None:
        why = f"a transaction of another producer is open at offset {stable_end} of {end}"
    return BufferUnavailable(f"topic {TOPIC} can't be read to its end in time: {why}", buffer=TOPIC)
