"""What sinks have of writes that can be told apart, as far as this process knows: a write that is sent again isn't given to them again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from millstream.errors import MillstreamError
from millstream.model.writes import WriteId
from millstream.ports import SinkOutcome

WRITES_KNOWN_MAX: Final = 1 << 16
"""Over all sinks, the latest ones: some 200 bytes each."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One operation on its way to one sink."""

    write: bytes | None
    """What tells it apart there; None where nothing does."""
    outcome: Future[SinkOutcome]
    """What becomes of it."""
    is_new: bool = True
    """Whether it is to be given to the sink; else it is there, or on its way."""


class Deliveries:
    """Remembers which writes sinks have taken, and which are on their way to them.

    It lives as long as the process writes the stream: who writes it next gives sinks again what is sent again.

    Concurrency: any number of threads.
    """

    def __init__(self, *, writes_max: int = WRITES_KNOWN_MAX) -> None:
        self._writes_max = writes_max
        self._lock = threading.Lock()
        self._taken: OrderedDict[bytes, None] = OrderedDict()
        """The longest unasked first."""
        self._on_way: dict[bytes, Future[SinkOutcome]] = {}

    def begin(self, sink: str, write_id: WriteId | None, digest: int) -> Delivery:
        """An operation is to go to a sink. Where it `is_new`, its caller says `end`, whatever comes.

        Args:
            sink: its name.
            write_id: what tells the operation apart, where something does. Other rows under it are another write.
            digest: of its rows.
        """
        if write_id is None:
            return Delivery(None, Future())
        told = repr((sink, write_id.session, write_id.number, write_id.key, digest))
        write = blake2b(told.encode(), digest_size=16).digest()
        with self._lock:
            if write in self._taken:
                self._taken.move_to_end(write)
                outcome: Future[SinkOutcome] = Future()
                outcome.set_result({"duplicate": True})
                return Delivery(write, outcome, is_new=False)
            if write in self._on_way:
                return Delivery(write, self._on_way[write], is_new=False)
            self._on_way[write] = Future()
            return Delivery(write, self._on_way[write])

    def end(self, delivery: Delivery, outcome: SinkOutcome | BaseException) -> None:
        """What became of a delivery; everybody who waits for it hears that. An exception that isn't of our tree is raised there."""
        if delivery.write is not None:
            with self._lock:
                del self._on_way[delivery.write]
                if not isinstance(outcome, BaseException):
                    self._taken[delivery.write] = None
                    if len(self._taken) > self._writes_max:
                        self._taken.popitem(last=False)
        if isinstance(outcome, BaseException) and not isinstance(outcome, MillstreamError):
            delivery.outcome.set_exception(outcome)
        else:
            delivery.outcome.set_result(outcome)
