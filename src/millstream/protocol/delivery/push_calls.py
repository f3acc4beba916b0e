"""The part of a consumer's machine that is for a push sink, which holds messages while it repeats their delivery."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from millstream.protocol.delivery.change_notes import Noted
from millstream.protocol.delivery.delivery_order import Pending
from millstream.protocol.delivery.entries import Back, Entry, EntryState
from millstream.protocol.delivery.messages import DeadLetter, DeliveryId, Status
from millstream.protocol.delivery.state import Counters
from millstream.protocol.delivery.state_changes import Delivered, Returned
from millstream.protocol.delivery.timer_heap import Timers


class Pushed(Noted):
    """Calls for a push sink. `Consumer` has the rest."""

    counters: Counters
    _generation: int
    _pending: Pending
    _timers: Timers

    def redeliver(self, ids: Iterable[DeliveryId], now: int, ack_wait_ms: int) -> bool:
        """Count a failure and another delivery of messages in flight, which stay in flight under the same ids.

        This makes no message dead: the caller compares `Delivery.failures` with `max_deliver`, and calls `bury`.

        Args:
            ids: the deliveries that failed.
            now: the time.
            ack_wait_ms: how long from now on they stay in flight.

        Returns:
            Whether all of them are in flight by these deliveries; else nothing was done.
        """
        entries = []
        for delivery in dict.fromkeys(ids):
            status, entry = self._find(delivery)
            if status is not Status.ACKED or entry is None or entry.answer is None:
                return False
            entries.append(entry)
        answers: dict[tuple[int, int], list[int]] = {}
        for entry in entries:
            assert entry.answer is not None
            entry.failures += not entry.has_failed
            entry.deliveries += 1
            if entry.deliveries == 1:  # an extension revived it after a kill that forgot its first delivery
                self.counters.delivered += 1
            else:
                self.counters.redelivered += 1
            entry.deadline, entry.has_failed = now + ack_wait_ms, False
            answers.setdefault((entry.answer.run, entry.answer.number), []).append(entry.position)
        for (run, number), positions in answers.items():
            self._timers.set(now + ack_wait_ms, run, number)
            self._changes.append(Returned((), positions))
            self._changes.append(Delivered(run, number, now + ack_wait_ms, positions))
        return True

    def bury(self, ids: Iterable[DeliveryId], now: int, *, error: str) -> None:
        """Make messages dead letters. Later messages in flight of their groups come back.

        Args:
            ids: deliveries; those that don't count any longer are left out.
            now: the time.
            error: the reason, which the dead letters keep.
        """
        for delivery in ids:
            status, entry = self._find(delivery)
            if status is Status.ACKED and entry is not None:
                back, position = Back(0), entry.position
                if entry.state is EntryState.IN_FLIGHT:
                    back.returned += self._come_back(entry)
                self._note_back(back)
                if entry.position == position and entry.state is EntryState.WAITING:  # else a newer one replaced it
                    self._bury(entry, DeadLetter(entry.message, entry.deliveries, error, now, self._generation))

    def return_all(self) -> None:
        """Return all messages in flight, without counting a failure: their receiver is gone."""
        self._open()
        self.give_back(
            [
                DeliveryId(self._generation, entry.position, *entry.last)
                for entry in list(self._pending.in_flight_entries())
                if entry.last is not None
            ]
        )

    @abstractmethod
    def _open(self) -> None:
        """Give each message its entry."""

    @abstractmethod
    def give_back(self, ids: Iterable[DeliveryId]) -> list[Status]:
        """Return messages, without counting a failure."""

    @abstractmethod
    def _find(self, delivery: DeliveryId) -> tuple[Status, Entry | None]:
        """Return `ACKED` if the delivery counts, else why not, and its message if it was offered."""

    @abstractmethod
    def _come_back(self, entry: Entry) -> list[int]:
        """Return a message in flight, and the later ones of its groups; return their positions."""

    @abstractmethod
    def _note_back(self, back: Back) -> None:
        """Note the messages that came back."""

    @abstractmethod
    def _bury(self, entry: Entry, letter: DeadLetter) -> None:
        """Make a message a dead letter: its group goes on."""
