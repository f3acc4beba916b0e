"""A consumer as the source of its push sink, and the sink's pusher for as long as the consumer delivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from millstream.delivery.push_retries import Pusher
from millstream.delivery.records.record_messages import Origin
from millstream.delivery.running_consumer import Running, Waiter
from millstream.delivery.sinks import Place, PushMessage, PushSink, open_sink
from millstream.delivery.wait_clock import now_ms
from millstream.errors import MillstreamError
from millstream.protocol.delivery import Consumer, DeliveryId, Phase, Status
from millstream.wal.files import error_of_os

logger = structlog.get_logger("millstream.delivery")

_RETRY_S: Final = 10.0
"""Wait before a delivery that couldn't begin begins again."""
_ENDS_WITHIN_S: Final = 5.0
"""How long requests may take when delivery stops, before their connections are closed."""


_NO_DELIVERY: Final = DeliveryId(0, 0, 0, 0)


class _Message(PushMessage, frozen=True):
    """A message with the delivery that counts for it."""

    delivery: DeliveryId = _NO_DELIVERY
    machine: Consumer | None = None
    """The machine that delivered it: the consumer's own, or that of a backfill."""


class ConsumerSource:
    """See `push_retries.PushSource`.

    Args:
        running: the consumer.
        want: says that a call waits for the log to grow.
        sync: makes what was noted durable.
    """

    def __init__(self, running: Running, want: Callable[[], None], sync: Callable[[], None]) -> None:
        self._running = running
        self._want = want
        self._sync = sync
        self.is_over = False
        """Whether the pusher ends, so that no call waits."""

    def receive(self, count: int, *, wait_s: float) -> Sequence[PushMessage]:
        """See `PushSource`."""
        running, waiter, end_s = self._running, Waiter(), time.monotonic() + wait_s
        running.waiters.add(waiter)
        try:
            while True:
                waiter.wake.clear()
                messages, is_more = self._received(count)
                now_s = time.monotonic()
                if messages or now_s >= end_s or self.is_over:
                    return messages
                if not is_more:
                    self._want()
                    wake_ms = running.next_wake()
                    due_s = wait_s if wake_ms is None else max(0.0, (wake_ms - now_ms()) / 1000)
                    waiter.wake.wait(min(end_s - now_s, due_s))
        finally:
            running.waiters.discard(waiter)

    def _received(self, count: int) -> tuple[list[PushMessage], bool]:
        running = self._running
        with running.lock:
            if self._is_gone() or running.machine.phase is not Phase.ACTIVE:
                return [], False
            machine = running.delivering
            deliveries, is_more = running.deliver(count)
            found: list[PushMessage] = []
            for message, count_of_it, id_, failures in deliveries:
                origin = message.origin
                logged = origin.logged if isinstance(origin, Origin) else None
                if isinstance(origin, Origin) and logged is not None:
                    group, record = origin.group, origin.record or ""  # the sink sends it in the log's form
                else:
                    group, record = running.origin(message)
                found.append(
                    _Message(message.id, group, count_of_it, record.encode(), logged, id_[0], failures, id_, machine)
                )
            return found, is_more

    def is_held(self, messages: Sequence[PushMessage]) -> bool:
        """See `PushSource`."""
        running, first = self._running, messages[0]
        with running.lock:
            if self._is_gone() or running.machine.phase is not Phase.ACTIVE or not isinstance(first, _Message):
                return False
            machine = first.machine
            known = machine is running.machine or machine is running.backfills.machine
            return known and machine is not None and first.generation == machine.generation

    def hold(self, messages: Sequence[PushMessage], seconds: float, *, is_retry: bool) -> bool:
        """See `PushSource`."""
        wait_ms, is_held = round(seconds * 1000), True
        with self._running.lock:
            known = self._running.machine, self._running.backfills.machine
            if self._is_gone() or self._running.machine.phase is not Phase.ACTIVE:
                return False  # the messages go back: a paused consumer repeats nothing
            for machine, ids in _by_machine(messages):
                if machine not in known:  # the backfill has ended
                    is_held = False
                elif is_retry:
                    is_held &= machine.redeliver(ids, now_ms(), wait_ms)
                else:
                    is_held &= all(status is Status.EXTENDED for status in machine.extend(ids, now_ms(), wait_ms))
            self._running.save()
        return is_held

    def ack(self, messages: Sequence[PushMessage]) -> None:
        """See `PushSource`."""
        with self._running.lock:
            if not self._is_gone():
                for machine, ids in _by_machine(messages):
                    machine.ack(ids)
                self._running.save()
        self._running.wake()

    def sync(self) -> None:
        """See `PushSource`."""
        self._sync()

    def bury(self, dead: Sequence[tuple[PushMessage, str]]) -> None:
        """See `PushSource`."""
        with self._running.lock:
            if not self._is_gone():
                for message, error in dead:
                    for machine, ids in _by_machine([message]):
                        machine.bury(ids, now_ms(), error=error)
                self._running.save()
        self._running.wake()

    def give_back(self, messages: Sequence[PushMessage]) -> None:
        """See `PushSource`."""
        with self._running.lock:
            if not self._is_gone():
                for machine, ids in _by_machine(messages):
                    machine.give_back(ids)
                self._running.save()
        self._running.wake()

    def show(self, error: str | None) -> None:
        """See `PushSource`."""
        self._running.push_error = error

    def pause(self, error: str) -> None:
        """See `PushSource`."""
        with self._running.lock:
            if not self._is_gone():
                self._running.machine.pause(error)
                self._running.save()
        self._sync()

    def _is_gone(self) -> bool:
        return self._running.is_deleted or self._running.is_closed


class Pushing:
    """The delivery of one consumer to its push sink.

    Args:
        stream: the stream's name.
        running: the consumer; its definition has a sink.
        want: as `ConsumerSource`.
        sync: as `ConsumerSource`.
        place: returns more about the consumer.

    Concurrency: any number of threads.
    """

    def __init__(
        self,
        stream: str,
        running: Running,
        want: Callable[[], None],
        sync: Callable[[], None],
        place: Callable[[Running], Place],
    ) -> None:
        self._place = place
        self._stream = stream
        self._running = running
        self._want = want
        self._sync = sync
        self._source: ConsumerSource | None = None
        self._sink: PushSink | None = None
        self._pusher: Pusher | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._retry_at_s = 0.0

    def look(self) -> None:
        """Begin to deliver, unless that goes on or the consumer is paused."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        running, sink = self._running, self._running.definition.sink
        if self._is_over or sink is None or (self._pusher is not None and self._pusher.is_running):
            return
        if self._pusher is not None and (failure := self._pusher.failure) is not None:
            running.push_error = f"a bug of Millstream ended the delivery, which begins again: {type(failure).__name__}"
            self._retry_at_s = time.monotonic() + _RETRY_S
            self._end()
        if running.refusal is not None or time.monotonic() < self._retry_at_s:
            return
        with running.lock:
            if running.machine.phase is not Phase.ACTIVE:
                return
        self._end()
        name = running.definition.name
        try:
            self._sink = open_sink(
                sink.kind, sink.settings, stream=self._stream, consumer=name, place=self._place(running)
            )
            with running.lock:
                running.begin_pushing()
            running.push_error = None
            self._source = ConsumerSource(running, self._want, self._sync)
            self._pusher = Pusher(
                name,
                self._source,
                self._sink,
                max_deliver=running.definition.max_deliver,
                observe=running.observe_request,
            ).start()
        except (MillstreamError, OSError) as error:
            told = error_of_os(error) if isinstance(error, OSError) else error
            running.push_error, self._retry_at_s = told.message, time.monotonic() + _RETRY_S
            logger.warning("a consumer can't deliver", stream=self._stream, consumer=name, error=told.message)
            self._end()

    def stop(self) -> None:
        """End the delivery. Requests that take too long are cut off; their messages are delivered again later."""
        with self._lock:
            self._is_over = True
            if self._source is not None:
                self._source.is_over = True
                self._running.wake()
            if self._pusher is not None and not self._pusher.stops(_ENDS_WITHIN_S):
                self._close(self._sink)
            self._end()

    def _end(self) -> None:
        """Release what has ended."""
        pusher, sink = self._pusher, self._sink
        self._pusher = self._sink = self._source = None
        if pusher is not None:
            pusher.close()
        self._close(sink)

    def _close(self, sink: PushSink | None) -> None:
        if sink is not None:
            try:
                sink.close()
            except Exception:  # another package's sink may have a fault, which must not stop the other consumers
                logger.exception(
                    "a push sink couldn't be closed", stream=self._stream, consumer=self._running.definition.name
                )


def _by_machine(messages: Sequence[PushMessage]) -> list[tuple[Consumer, list[DeliveryId]]]:
    """Return the deliveries of messages, with the machine of each."""
    machine = getattr(messages[0], "machine", None) if messages else None
    own = [message.delivery for message in messages if isinstance(message, _Message) and message.machine is machine]
    if machine is not None and len(own) == len(messages):  # mostly: a batch has rows of a backfill, or records
        return [(machine, own)]
    found: dict[int, tuple[Consumer, list[DeliveryId]]] = {}
    for message in messages:
        if isinstance(message, _Message) and message.machine is not None:
            found.setdefault(id(message.machine), (message.machine, []))[1].append(message.delivery)
    return list(found.values())
