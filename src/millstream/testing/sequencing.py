"""A sequencer's store in memory, which forgets, delays and loses as a real one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from millstream.errors import CatalogBusy
from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import Seq, SeqRange
from millstream.ports import Clock
from millstream.protocol.sequencer import Drawn, Ledger, LedgerView, Registration, WriterEntry
from millstream.testing.clock import ManualClock

_NO_EPOCH: Final = Epoch(0)
_Told = TypeVar("_Told")


class MemorySequenceStore:
    """`ports.SequenceStore` that outlives writers, not the process: the ledger itself, behind a lock.

    Args:
        clock: the store's.
        lease_s: how long a writer lives without a sign.

    Concurrency: any number of threads.
    """

    def __init__(self, clock: Clock | None = None, *, lease_s: float = 5.0) -> None:
        self.ledger = Ledger()
        self._clock = ManualClock() if clock is None else clock
        self._lease_us = round(lease_s * 1e6)
        self._lock = threading.Lock()
        self.fails: Callable[[str], str | None] = lambda _step: None
        """Asked before each step, by its name: `before` loses the call, `after` its reply, None neither."""

    def register(self, name: str, location: str, *, above: Epoch = _NO_EPOCH) -> Registration:
        """As the port."""
        timed = {"now_us": self._now_us(), "lease_us": self._lease_us}
        return self._step(Registration, "register", name, location, above=above, **timed)

    def take_over(self, writer: WriterId) -> Registration:
        """As the port."""
        return self._step(Registration, "take_over", writer, now_us=self._now_us(), lease_us=self._lease_us)

    def recovered(self, writer: WriterId, epoch: Epoch) -> Drawn:
        """As the port."""
        return self._step(Drawn, "recovered", writer, epoch, now_us=self._now_us(), lease_us=self._lease_us)

    def draw(self, writer: WriterId, epoch: Epoch, count: int, *, position: Seq) -> Drawn:
        """As the port."""
        timed = {"now_us": self._now_us(), "lease_us": self._lease_us}
        return self._step(Drawn, "draw", writer, epoch, count, position=position, **timed)

    def last(self, writer: WriterId, epoch: Epoch) -> SeqRange:
        """As the port."""
        return self._step(SeqRange, "last", writer, epoch)

    def report(self, writer: WriterId, epoch: Epoch, *, position: Seq) -> tuple[LedgerView, Seq]:
        """As the port."""
        timed = {"now_us": self._now_us(), "lease_us": self._lease_us}
        view = self._step(LedgerView, "report", writer, epoch, position=position, **timed)
        return view, self.ledger.elsewhere(self.ledger.entry(writer))

    def settle(self, writer: WriterId, epoch: Epoch) -> None:
        """As the port."""
        self._step(type(None), "settle", writer, epoch)

    def forget(self, writer: WriterId) -> None:
        """As the port."""
        self._step(type(None), "forget", writer, now_us=self._now_us())

    def view(self) -> LedgerView:
        """As the port."""
        with self._lock:
            return self.ledger.view(self._now_us())

    def writers(self) -> Sequence[WriterEntry]:
        """As the port."""
        return self.ledger.writers

    def _now_us(self) -> int:
        return self._clock.now_ns() // 1000

    def _step(self, kind: type[_Told], step: str, *arguments: Any, **named: Any) -> _Told:
        with self._lock:
            fails = self.fails(step)
            if fails == "before":
                raise CatalogBusy(f"{step}: the connection was lost before it came to the store")
            done = getattr(self.ledger, step)(*arguments, **named)
            if isinstance(done, tuple):
                self.ledger, told = done
            else:
                self.ledger, told = (done, None) if isinstance(done, Ledger) else (self.ledger, done)
            if fails == "after":
                raise CatalogBusy(f"{step}: the reply was lost")
            assert isinstance(told, kind)
            return told
