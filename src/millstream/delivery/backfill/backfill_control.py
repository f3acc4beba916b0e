"""The part of a consumer that runs its backfills: one begins, its rows are delivered and settled, and it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from millstream.delivery.ack_ids import AckIds
from millstream.delivery.backfill.rows import Rows
from millstream.delivery.backfill.running_backfill import (
    ENDED_MAX,
    Backfill,
    Deliveries,
    Ended,
    StoredBackfill,
    file_of,
)
from millstream.delivery.consumer_store import Stored
from millstream.delivery.wait_clock import now_ms
from millstream.errors import DeliveryError
from millstream.protocol.delivery import (
    Change,
    Consumer,
    Counters,
    Delivery,
    DeliveryId,
    Limits,
    Phase,
    Status,
    seq_of,
)
from millstream.wal.files import error_of_os

logger = structlog.get_logger("millstream.delivery")

_UNSETTLED_MAX: Final = 10_000
"""Number of waiting rows in memory."""
Settle = Callable[[Consumer, list[DeliveryId]], list[Status]]


class Notes(NamedTuple):
    """Where the state of backfills is kept."""

    folder: Path
    """Has the files of rows."""
    set_backfill: Callable[[str, StoredBackfill | None, Sequence[Ended], Sequence[int]], None]
    """As `Store.set_backfill`."""
    change_rows: Callable[[str, list[Change]], None]
    """As `Store.change_rows`."""


class Backfilling:
    """The backfills of one consumer.

    Args:
        stream: the stream's name.
        stored: the consumer; its backfill's state belongs to this object from now on.
        key: the home's secret.
        limits: the consumer's numbers.
        machine: the consumer's own machine, which has no record in flight while a backfill runs.
        notes: where the state is kept; None: nothing changes here.

    Concurrency: the caller serialises.
    """

    def __init__(
        self, stream: str, stored: Stored, key: bytes, limits: Limits, machine: Consumer, notes: Notes | None
    ) -> None:
        self.stored: StoredBackfill | None = stored.backfill
        self.ended: list[Ended] = stored.ended
        self._stream = stream
        self._definition = stored.definition
        self._ids = Deliveries(key, stored.incarnation)
        self._limits = limits
        self._machine = machine
        self._notes = notes
        self._work: Backfill | None = None
        self.error: str | None = None
        """The reason why the rows can't be written for now."""
        if self.stored is not None and self.stored.total is not None and notes is not None:
            try:
                self._open(self.stored, notes.folder)
            except FileNotFoundError:  # the file stayed on the node that led before
                self.restart()

    def _open(self, stored: StoredBackfill, folder: Path) -> None:
        rows = Rows(file_of(folder, stored.number), self._definition)
        limits = self._limits_of_rows()
        self._work = Backfill(self._stream, self._definition, stored, rows, limits, now_ms())

    def _limits_of_rows(self) -> Limits:
        own = self._limits
        return Limits(own.ack_wait_ms, own.max_deliver, own.max_ack_pending, unsettled_max=_UNSETTLED_MAX)

    # --- what it shows -----------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a backfill runs: the log waits."""
        return self.stored is not None

    @property
    def folder(self) -> Path | None:
        """Folder of the files of rows; None if nothing changes here."""
        return None if self._notes is None else self._notes.folder

    @property
    def wants_rows(self) -> StoredBackfill | None:
        """The backfill whose rows are still to be written, if there is one."""
        return self.stored if self.stored is not None and self._work is None else None

    @property
    def machine(self) -> Consumer | None:
        """The machine of the rows, if they are written."""
        return None if self._work is None else self._work.machine

    @property
    def in_flight(self) -> int:
        """Number of rows in flight."""
        return 0 if self._work is None else self._work.machine.in_flight

    @property
    def counters(self) -> Counters:
        """The counts of the backfill that runs."""
        if self._work is not None:
            return self._work.machine.counters
        return Counters() if self.stored is None else self.stored.state.counters

    def shown(self) -> dict[str, Any] | None:
        """Return the progress; None if no backfill runs."""
        if self.stored is None:
            return None
        settled = self.stored.state.cursor if self._work is None else self._work.settled
        return {"tables": self.stored.names, "rows": settled, "of": self.stored.total}

    def failed(self) -> str | None:
        """Return how the last backfill failed; None if it didn't, and once another one runs."""
        last = self.ended[-1] if self.ended and self.stored is None else None
        if last is None or last.failure is None:
            return None
        return f"backfill {last.number} ended without its rows, and can't be repeated as of its cursor: {last.failure}"

    def next_wake(self) -> int | None:
        """Return the time at which `expire` has something to do; None if there is none."""
        return None if self._work is None else self._work.machine.next_wake()

    def current(self) -> StoredBackfill | None:
        """Return the backfill for the store; `save` was called."""
        if self.stored is not None and self._work is not None:
            self.stored.state = self._work.machine.snapshot()
        return self.stored

    # --- delivering --------------------------------------------------------------------------------------------------

    def receive(self, now: int, count: int) -> list[Delivery]:
        """Deliver rows, if the consumer is active. Raises `MillstreamError` if the disk fails."""
        if self._work is None or self._machine.phase is not Phase.ACTIVE:
            return []
        return self._work.receive(now, count)

    def expire(self, now: int) -> None:
        """Return deliveries that have expired."""
        if self._work is not None:
            self._work.machine.expire(now)

    def return_all(self) -> None:
        """Return the rows in flight."""
        if self._work is not None:
            self._work.restore()
            self._work.machine.return_all()

    def ids(self) -> AckIds:
        """Return the ids of the deliveries of the backfill that runs."""
        assert self.stored is not None
        return self._ids.of(self.stored.number)

    def settle(self, texts: Sequence[str], do: Settle, *, is_ack: bool) -> list[Status]:
        """Apply an ack, a nack or an extension; return the status of each text, `UNKNOWN` if it isn't of a row."""
        current = None if self.stored is None else self.stored.number
        numbers = [*(() if current is None else (current,)), *(one.number for one in self.ended)]
        found = [self._ids.find(text, numbers) for text in texts]
        if self._work is not None:
            self._work.restore()
        own = [one[1] for one in found if one is not None and one[0] == current]
        statuses = iter(do(self._work.machine, own) if self._work is not None and own else [])
        return [Status.UNKNOWN if one is None else self._status(one, statuses, is_ack=is_ack) for one in found]

    def _status(self, found: tuple[int, DeliveryId], statuses: Iterator[Status], *, is_ack: bool) -> Status:
        number, delivery = found
        if self.stored is not None and number == self.stored.number:
            status = next(statuses, Status.REWOUND)
        else:
            is_rewound = any(one.is_rewound for one in self.ended if one.number == number)
            status = Status.REWOUND if is_rewound else Status.ALREADY_ACKED
        if status is not Status.ALREADY_ACKED:
            return status
        id_ = f"{self._stream}-b{number}-{seq_of(delivery.position) - 1}"
        if id_ in self._machine.retried:
            return Status.SUPERSEDED
        if id_ not in self._machine.dead:
            return status
        if not is_ack:
            return Status.DEAD
        self._machine.drop([id_])
        return Status.ACKED

    def number_of(self, key: str) -> int | None:
        """Return the number of the backfill that a request with this idempotency key began; None if none is known."""
        known = [*self.ended, *(() if self.stored is None else (self.stored,))]
        return next((one.number for one in reversed(known) if one.key == key), None)

    def check_none(self) -> None:
        """Raise `DeliveryError` (`backfill_running`) if a backfill runs."""
        if self.is_running:
            name = self._definition.name
            raise DeliveryError(
                f"a backfill of consumer {name} runs", code="backfill_running", stream=self._stream, consumer=name
            )

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin(self, stored: StoredBackfill) -> None:
        """Begin a backfill, durably. Its rows are still to be written."""
        self.stored = stored
        self._set()

    def has_rows(self, total: int) -> None:
        """Note that the rows are written, durably."""
        assert self.stored is not None
        assert self._notes is not None
        self.stored.total, self.error = total, None
        self._set()
        self._open(self.stored, self._notes.folder)

    def restart(self) -> None:
        """Begin the backfill again, as of the present cursor, under another number."""
        earlier = self.stored
        if earlier is None:
            return
        self.end(is_rewound=True)
        self.begin(
            StoredBackfill(
                new_number(), self._machine.cursor, earlier.tables, earlier.where, list(earlier.names), key=earlier.key
            )
        )

    def end(self, *, is_rewound: bool, failure: str | None = None) -> None:
        """End the backfill that runs, if there is one, durably, and remove its rows; `failure` as of `Ended`."""
        if self.stored is None:
            return
        counts, total, stored = self.counters, self._machine.counters, self.stored
        added = counts.delivered, counts.redelivered, counts.acked
        total.delivered += counts.delivered
        total.redelivered += counts.redelivered
        total.acked += counts.acked
        self.ended.append(Ended(stored.number, is_rewound, stored.key, failure))
        del self.ended[:-ENDED_MAX]
        self.close()
        self.stored = self.error = None
        self._set(added)
        self._remove_file(stored)

    def bury(self) -> None:
        """Give the rows that died to the consumer's machine, as dead letters. Its changes must be kept before `save`."""
        if self._work is not None:
            for letter in list(self._work.machine.dead.values()):
                self._machine.adopt(letter)

    def save(self) -> None:
        """Store the changes; end the backfill if every row is settled."""
        if self._work is None or self.stored is None:
            return
        machine = self._work.machine
        if machine.dead:
            machine.drop()
        changes = machine.take_changes()
        if changes and self._notes is not None:
            self._notes.change_rows(self._definition.name, changes)
        if self._work.is_over:
            self.end(is_rewound=False)

    def close(self) -> None:
        """Close the file of rows."""
        if self._work is not None:
            self._work.close()
            self._work = None

    def forget(self) -> None:
        """Remove the rows: the consumer is deleted."""
        self.close()
        if self.stored is not None:
            self._remove_file(self.stored)

    def _set(self, added: Sequence[int] = (0, 0, 0)) -> None:
        if self._notes is not None:
            self._notes.set_backfill(self._definition.name, self.stored, self.ended, added)

    def _remove_file(self, stored: StoredBackfill) -> None:
        if self._notes is None:
            return
        try:
            file_of(self._notes.folder, stored.number).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the rows of a backfill can't be removed", error=error_of_os(error).message)


_number_lock: Final = threading.Lock()
_last_number = 0


def new_number() -> int:
    """Return a number that no other backfill has."""
    global _last_number  # noqa: PLW0603 - two backfills of a process may begin within one ms
    with _number_lock:
        _last_number = max(_last_number + 1, time.time_ns() // 1_000_000)
        return _last_number
