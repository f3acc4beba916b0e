"""The identified writes that sinks have taken, in this process: a repeated write isn't sent to them again."""

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
"""Most writes remembered over all sinks, the latest ones: some 200 bytes each."""


@dataclass(frozen=True, slots=True)
class SinkDelivery:
    """One operation in flight to one sink."""

    write: bytes | None
    """Identity of the write at the sink; None if it has none."""
    outcome: Future[SinkOutcome]
    """The outcome of the delivery."""
    is_new: bool = True
    """Whether to send it to the sink; otherwise it is there, or in flight."""


class Deliveries:
    """Remembers which writes sinks have taken, and which are in flight to them.

    It lives as long as the process writes the stream: after that, the next process sends repeated writes to sinks
    again.

    Concurrency: any number of threads.
    """

    def __init__(self, *, writes_max: int = WRITES_KNOWN_MAX) -> None:
        self._writes_max = writes_max
        self._lock = threading.Lock()
        self._taken: OrderedDict[bytes, None] = OrderedDict()
        """Writes that were taken, longest unasked first."""
        self._on_way: dict[bytes, Future[SinkOutcome]] = {}

    def begin(self, sink: str, write: tuple[WriteId, int] | None) -> SinkDelivery:
        """Begin the delivery of an operation to a sink. If it `is_new`, the caller calls `end`, in any case.

        Args:
            write: identity of the operation, if it has one, and digest of its rows. Other rows under the
                same identity are another write.
        """
        if write is None:
            return SinkDelivery(None, Future())
        write_id, digest = write
        told = repr((sink, write_id.session, write_id.number, write_id.key, digest))
        key = blake2b(told.encode(), digest_size=16).digest()
        with self._lock:
            if key in self._taken:
                self._taken.move_to_end(key)
                outcome: Future[SinkOutcome] = Future()
                outcome.set_result({"duplicate": True})
                return SinkDelivery(key, outcome, is_new=False)
            if key in self._on_way:
                return SinkDelivery(key, self._on_way[key], is_new=False)
            self._on_way[key] = Future()
            return SinkDelivery(key, self._on_way[key])

    def end(self, delivery: SinkDelivery, outcome: SinkOutcome | BaseException) -> None:
        """Set the outcome of a delivery, for all its waiters. An exception outside our tree is raised there."""
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
