"""One backfill at work: the rows of a consumer's tables as of its cursor, delivered before the log goes on.

The rows have a machine of their own, whose log is the file of rows: row M is its record M + 1. While it runs, the
consumer's own machine gets no records; it goes on from its cursor once every row is settled or dead. So no record of the
log overtakes a row of its group. A row that dies becomes a dead letter of the consumer's own machine.

The number of a backfill is the time in ms at which it began: no other one of the stream has it, whatever was deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from millstream.delivery.ack_ids import AckIds
from millstream.delivery.backfill.rows import Row, Rows
from millstream.delivery.definition import Definition
from millstream.delivery.records.record_messages import Origin, size_of
from millstream.protocol.delivery import (
    Consumer,
    Delivery,
    DeliveryId,
    Limits,
    Message,
    State,
    position_of,
)

_READ_ROWS: Final = 1000
ENDED_MAX: Final = 16
"""Number of ended backfills whose deliveries are still known."""


@dataclass(slots=True)
class StoredBackfill:
    """A backfill as the store has it."""

    number: int
    cursor: int
    """The consumer's cursor when it began: the rows are as of it."""
    tables: list[str] | None
    """Patterns of tables; None for all of the consumer's."""
    where: str | None
    names: list[str] = field(default_factory=list)
    """Names of the tables."""
    total: int | None = None
    """Number of rows; None until they are written."""
    state: State = field(default_factory=lambda: State.begin(0))
    key: str | None = None
    """Idempotency key of the request that began it."""

    def to_json(self) -> dict[str, Any]:
        """Return a value that JSON can hold."""
        return {
            "number": self.number,
            "cursor": self.cursor,
            "tables": self.tables,
            "where": self.where,
            "names": self.names,
            "total": self.total,
            "state": self.state.to_json(),
            "key": self.key,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the backfill of `to_json`'s value. Raises `KeyError`, `TypeError` or `ValueError` for other values."""
        return cls(**{**value, "state": State.from_json(value["state"])})


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a backfill: what remains of it."""

    number: int
    is_rewound: bool
    """Whether it ended before its rows were settled."""
    key: str | None = None
    """As `StoredBackfill.key`."""
    failure: str | None = None
    """The reason why it ended without its rows, if they can't be had any longer."""


def file_of(folder: Path, number: int) -> Path:
    """Return the path of a backfill's rows in the folder of the consumers' state."""
    return folder / f"backfill-{number}.rows"


def remove_leftovers(folder: Path, running: Iterable[StoredBackfill | None]) -> None:
    """Remove the files of backfills that don't run: a kill ended them before their files were removed."""
    names = {file_of(folder, one.number).stem for one in running if one is not None}
    for path in folder.glob("backfill-*"):
        if path.stem not in names:
            with suppress(OSError):  # the next process tries again
                path.unlink()


class Backfill:
    """A backfill whose rows are written.

    Args:
        stream: the stream's name.
        definition: the consumer's.
        stored: the backfill; its state belongs to the machine from now on.
        rows: its rows.
        limits: the consumer's numbers.
        now: the time; see `Consumer`.

    Concurrency: the caller serialises.
    """

    def __init__(
        self, stream: str, definition: Definition, stored: StoredBackfill, rows: Rows, limits: Limits, now: int
    ) -> None:
        run = max(stored.state.run + 1, now)
        self.machine: Final = Consumer(limits, stored.state, run=run, now=now)
        self._prefix = f"{stream}-b{stored.number}-"
        self._holds_groups = definition.group_by != "none"
        self._total = stored.total or 0
        self._rows = rows

    @property
    def is_over(self) -> bool:
        """Whether every row is settled or dead."""
        return self.machine.cursor >= self._total

    @property
    def settled(self) -> int:
        """Number of rows that are settled or dead, as far as they were read."""
        return self.machine.read_upto - self.machine.unsettled

    def receive(self, now: int, count: int) -> list[Delivery]:
        """Deliver rows; an empty list if none can be delivered now. Raises `MillstreamError` if the disk fails."""
        machine = self.machine
        machine.expire(now)
        while machine.wants(count) and self._read():
            continue
        return machine.receive(now, count)

    def restore(self) -> None:
        """Read the rows that were in flight before a restart."""
        while not self.machine.is_restored and self._read():
            continue

    def _read(self) -> bool:
        """Offer the next rows; return whether there were any."""
        number = self.machine.read_upto
        found = self._rows.read(number, _READ_ROWS) if number < self._total else []
        if not found:
            return False
        self.machine.offer((self._message(row) for row in found), found[-1].number + 1)
        return True

    def _message(self, row: Row) -> Message:
        id_ = f"{self._prefix}{row.number}"
        groups = (row.group,) if self._holds_groups and row.group is not None else ()
        origin = Origin(id_ if row.group is None else row.group, row.record)
        position = position_of(row.number + 1)
        return Message(
            position, row.number, id_, groups, row.table, barrier=False, size=size_of(row.record), origin=origin
        )

    def close(self) -> None:
        """Close the file of rows."""
        self._rows.close()


class Deliveries:
    """The ids of the deliveries of a consumer's rows: those of the present backfill, and of ended ones."""

    def __init__(self, key: bytes, incarnation: str) -> None:
        self._key = key
        self._incarnation = incarnation
        self._ids: dict[int, AckIds] = {}

    def of(self, number: int) -> AckIds:
        """Return the ids of a backfill's deliveries."""
        found = self._ids.get(number)
        if found is None:
            found = self._ids[number] = AckIds(self._key, f"{self._incarnation}-b{number}")
        return found

    def find(self, text: str, numbers: Iterable[int]) -> tuple[int, DeliveryId] | None:
        """Return the number of the backfill that a delivery belongs to, and the delivery; None if it belongs to no backfill."""
        for number in numbers:
            delivery = self.of(number).read(text)
            if delivery is not None:
                return number, delivery
        return None
