"""Moves a consumer's messages to its push sink: sends, repeats, and reports the outcome to the consumer.

A batch that failed is set aside: only its own groups wait for it. It is repeated with the same messages as long as
the consumer holds them for it. When a batch is repeated (by the sink's pacing, or when the receiver asked for it), and
which failure is the last, is decided here; the sink judges each answer (`sinks.Verdict`).
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import msgspec
import structlog

from millstream.backoff import Backoff
from millstream.delivery.sinks import Outcome, PushMessage, PushSink, Verdict, failed
from millstream.errors import MillstreamError
from millstream.workers import Worker

_SPREAD: Final = 0.2
"""The part of a wait by which chance makes it longer or shorter."""
_RECEIVE_S: Final = 1.0
_PART_OF_BATCH: Final = 16
"""More than a 16th of a batch in one answer shows a backlog. Only then is the next batch received ahead: a small one would
go out small, and what comes in between would wait for the batch after it."""
_LOOK_S: Final = 0.1

logger = structlog.get_logger("millstream")


class PushSource(Protocol):
    """A consumer, as the pusher uses it. The pusher returns the message objects that it received.

    A method may raise `MillstreamError`: what it did counts, and `sync` returns once it is kept.

    Concurrency: any number of threads.
    """

    def receive(self, count: int, *, wait_s: float) -> Sequence[PushMessage]:
        """Return messages that are in flight from now on, at most `count`; wait for the first if there is none.

        They stay in flight for longer than a batch waits for its turn and is sent.

        No group is in two answers at once. A paused consumer has no messages.

        Raises:
            MillstreamError: the log can't be read, or the consumer's state can't be kept now; no message is in flight
                because of it.
        """

    def is_held(self, messages: Sequence[PushMessage]) -> bool:
        """Return whether messages of one answer, none of which is settled, are still in flight for this receiver."""

    def hold(self, messages: Sequence[PushMessage], seconds: float, *, is_retry: bool) -> bool:
        """Keep messages in flight for so long from now on.

        Args:
            messages: messages that were received.
            seconds: the time.
            is_retry: whether their delivery failed and another one begins, which `deliveries` counts.

        Returns:
            Whether all of them are still in flight for this receiver. A rewind, for example, takes them away.
        """

    def ack(self, messages: Sequence[PushMessage]) -> None:
        """Settle messages."""

    def sync(self) -> None:
        """Make what was settled durable."""

    def bury(self, dead: Sequence[tuple[PushMessage, str]]) -> None:
        """Make messages dead letters, each with the reason, all at once: none of them is received again before it is dead."""

    def give_back(self, messages: Sequence[PushMessage]) -> None:
        """Return messages, without counting a failure."""

    def show(self, error: str | None) -> None:
        """Show the consumer's present error; None: there is none."""

    def pause(self, error: str) -> None:
        """Pause the consumer, since its receiver wants no more."""


@dataclass(slots=True)
class _Batch:
    """Messages that are sent together, or one by one after their last failure."""

    messages: Sequence[PushMessage]
    """The messages that aren't settled."""
    backoff: Backoff
    renew_at_s: float
    """When its messages have to be held again before they are sent."""
    failures: int = 0
    """Number of failed deliveries of them together; those before a restart count."""
    repeats: int = 0
    """Number of repeated deliveries since they were received."""
    is_split: bool = False
    """Whether each is sent alone."""
    dead: list[tuple[PushMessage, str]] = field(default_factory=list)
    """Messages that failed alone, with their errors."""
    error: str | None = None
    """The reason why it waits."""

    @property
    def next(self) -> Sequence[PushMessage]:
        """The messages of the next request."""
        return self.messages[:1] if self.is_split else self.messages

    @property
    def held(self) -> Sequence[PushMessage]:
        """The messages that have to stay in flight: until all were sent alone, those that failed too."""
        return [*self.messages, *(message for message, _ in self.dead)] if self.dead else self.messages


class _Turns:
    """A lock that goes to the threads in the order in which they asked.

    Python's own may go to the same thread again and again: one that receives nothing would keep another from sending what
    it has received ahead, and the consumer delivers no more while so many messages are in flight.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False


class Pusher:
    """Pushes until it is closed, until the receiver is gone, or until one of its threads fails by a bug.

    Args:
        name: names its threads.
        source: the consumer.
        sink: the destination; the pusher doesn't close it.
        max_deliver: failed deliveries after which a message is dead; 0: never. Messages that failed together so
                often are each sent alone once more.
        observe: takes the seconds of each delivery by the sink.
        now_s: returns a time that never steps back.
        chance: draws from [0, 1).
        margin_s: least time for which messages are held in addition to what their next delivery takes.
        kept_again_s: time between two tries while the consumer's state can't be kept.
    """

    def __init__(
        self,
        name: str,
        source: PushSource,
        sink: PushSink,
        *,
        max_deliver: int,
        observe: Callable[[float], None] = lambda _seconds: None,
        now_s: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        margin_s: float = 30.0,
        kept_again_s: float = 0.5,
    ) -> None:
        self._source = source
        self._sink = sink
        self._pacing = sink.pacing
        self._max_deliver = max_deliver
        self._observe = observe
        self._now_s = now_s
        self._chance = chance
        self._margin_s = margin_s
        self._kept_again_s = kept_again_s
        self._lock = threading.Lock()
        """Held while the fields below change."""
        self._aside: list[tuple[float, int, _Batch]] = []
        """Batches that wait: a heap by time."""
        self._under_way: dict[int, Sequence[PushMessage]] = {}
        """The messages of the requests that are under way, by the `id` of their batch."""
        self._numbers = itertools.count()
        self._shown: str | None = None
        self._turn = _Turns() if self._pacing.syncs else nullcontext()
        """Held while a batch is sent, if batches go one after the other."""
        self._is_behind = False
        """Whether the last answer was large, so that the next batch is received before its turn."""
        self._stopping = threading.Event()
        self._hold_s = self._pacing.timeout_s + 2 * margin_s
        self._name = name
        self._workers = [
            Worker(f"push-{name}", self._step, on_failure=self._fail) for _ in range(self._pacing.concurrency)
        ]
        self._workers.append(
            Worker(f"push-{name}-hold", self._renew, every_s=margin_s / 3, stop=self._stopping, on_failure=self._fail)
        )

    def start(self) -> Pusher:
        """Start its threads; once only. If the system refuses one (`OSError`), none is left, and nothing was received."""
        try:
            with self._lock:  # a thread receives once all have started
                try:
                    for worker in self._workers:
                        worker.start()
                except BaseException:
                    self._stopping.set()
                    raise
        except BaseException:
            self.close()
            raise
        return self

    @property
    def is_running(self) -> bool:
        """Whether a thread of it runs."""
        return any(worker.is_alive for worker in self._workers)

    @property
    def failure(self) -> BaseException | None:
        """The bug that ended it: the messages of its threads are in flight until another pusher begins."""
        return next((worker.failure for worker in self._workers if worker.failure is not None), None)

    def stops(self, within_s: float) -> bool:
        """Begin no more requests; return whether those under way ended within that time. `close` comes after it."""
        self._stopping.set()
        end_s = time.monotonic() + within_s
        return all(worker.join(max(0.0, end_s - time.monotonic())) for worker in self._workers)

    def close(self) -> None:
        """Finish the requests that are under way, and return all other messages to the consumer."""
        self._stopping.set()
        for worker in self._workers:
            worker.join()
        self._give_back_all()

    # --- its threads -------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """End the other threads too: what the failed one had in flight would stay so, and its groups with it."""
        logger.error("a pusher failed", consumer=self._name, exc_info=error)
        self._stopping.set()

    def _step(self) -> bool:
        ahead = self._next() if self._is_behind else None
        with self._turn:
            batch = ahead or self._next()
            if batch is not None:
                self._work(batch)
        return not self._stopping.is_set()

    def _work(self, batch: _Batch) -> None:
        try:
            while batch.messages and not self._stopping.is_set():
                wait_s = self._send(batch)
                if wait_s is not None and self._set_aside(batch, wait_s):
                    return
            self._give_back(batch)
        except MillstreamError as error:
            self._wait_until_kept(error, partial(self._set_aside, batch, 0.0))

    def _wait_until_kept(self, error: MillstreamError, then: Callable[[], object] = lambda: None) -> None:
        """Send nothing until the consumer's state can be kept, for example on a full disk; then call `then`."""
        self._show(error.message)
        while not self._stopping.wait(self._kept_again_s):
            with suppress(MillstreamError):
                self._source.sync()
                then()
                self._show(None)
                return

    def _next(self) -> _Batch | None:
        """Return a batch that is due, or a new one; None if there is none, or the pusher ends."""
        with self._lock:
            if self._stopping.is_set():
                return None
            left_s = self._aside[0][0] - self._now_s() if self._aside else _RECEIVE_S
            if left_s <= 0:
                return heapq.heappop(self._aside)[2]
        try:
            messages = self._source.receive(self._pacing.batch_size, wait_s=min(left_s, _RECEIVE_S))
        except MillstreamError as error:
            self._show(error.message)
            self._stopping.wait(self._kept_again_s)
            messages = []
        else:
            self._show(None)
        self._is_behind = len(messages) > self._pacing.batch_size // _PART_OF_BATCH
        return self._begun(messages) if messages else None

    def _begun(self, messages: Sequence[PushMessage]) -> _Batch:
        """Return a batch of messages that were received. It starts from the fewest failures of its messages."""
        failures = min(message.failures for message in messages)
        renew_at_s = self._now_s() + self._margin_s
        return _Batch(messages, self._waits(), renew_at_s, failures, is_split=self._is_over(failures))

    def _is_over(self, failures: int) -> bool:
        """Return whether so many failures are the most that messages may have together."""
        return 0 < self._max_deliver <= failures

    def _waits(self) -> Backoff:
        longest = 1 + _SPREAD
        return Backoff(
            first_s=self._pacing.retry_min_s * longest,
            most_s=self._pacing.retry_max_s * longest,
            jitter=2 * _SPREAD / longest,
            chance=self._chance,
        )

    def _send(self, batch: _Batch) -> float | None:
        """Send the batch's next request; return the seconds to wait before another attempt, None to go on."""
        sent = batch.next
        with self._lock:
            self._under_way[id(batch)] = batch.held
        try:
            if not self._may_send(batch):
                return None
            again = batch.repeats  # mostly 0, and a copy of a message takes 4 us
            replace = msgspec.structs.replace
            outcome = self._deliver(
                [replace(one, deliveries=one.deliveries + again) for one in sent] if again else sent
            )
        finally:
            with self._lock:
                del self._under_way[id(batch)]
        if outcome.parts:
            told = {message.id for messages, _ in outcome.parts for message in messages}
            untold = [message for message in sent if message.id not in told]
            for messages, part in [*outcome.parts, (untold, failed("the sink didn't return the message's outcome"))]:
                self._judge_apart(batch, messages, part)
            batch.messages = batch.messages[len(sent) :]
            self._show(None)
            return None
        return self._judge(batch, sent, outcome)

    def _judge_apart(self, batch: _Batch, messages: Sequence[PushMessage], outcome: Outcome) -> None:
        """Take the outcome of a part of the batch, which is repeated without the others."""
        own = {message.id for message in messages}
        sent = [message for message in batch.next if message.id in own]
        if not sent:
            return
        part = _Batch(sent, self._waits(), batch.renew_at_s, batch.failures, batch.repeats)
        wait_s = self._judge(part, sent, outcome)
        if part.messages and (wait_s is None or not self._set_aside(part, wait_s)):
            self._give_back(part)

    def _judge(self, batch: _Batch, sent: Sequence[PushMessage], outcome: Outcome) -> float | None:
        """Take the outcome of a request; return as `_send`."""
        batch.error = outcome.reason or None
        self._show(batch.error)
        if outcome.verdict is Verdict.GONE:
            self._source.pause(outcome.reason)
            self._stopping.set()
            self._give_back(batch)
            self._give_back_all()
            return None
        if outcome.verdict is Verdict.ACCEPTED:
            self._acknowledge(sent)
        elif outcome.verdict is Verdict.FAILED and self._is_final(batch):
            batch.dead += [(message, outcome.reason) for message in sent]
        else:
            wait_s = batch.backoff.next_s()
            if outcome.verdict is Verdict.FAILED:
                batch.failures += 1
                batch.repeats += 1
                batch.is_split = self._is_over(batch.failures)
                self._hold(batch, is_retry=True)
            return wait_s if outcome.retry_after_s is None else outcome.retry_after_s
        batch.messages = batch.messages[len(sent) :]
        if not batch.messages:
            self._bury(batch)
        return None

    def _acknowledge(self, sent: Sequence[PushMessage]) -> None:
        """Acknowledge messages that were accepted: they aren't sent again, even if that can't be kept now."""
        try:
            self._source.ack(sent)
            if self._pacing.syncs:
                self._source.sync()
        except MillstreamError as error:
            self._wait_until_kept(error)

    def _is_final(self, batch: _Batch) -> bool:
        """Return whether the failure of the request that was sent is its messages' last."""
        return batch.is_split or (len(batch.messages) == 1 and self._is_over(batch.failures + 1))

    def _deliver(self, messages: Sequence[PushMessage]) -> Outcome:
        began_s = time.monotonic()
        try:
            return self._sink.deliver(messages)
        except Exception as error:  # another package's sink may have a fault, which must not stop the consumer
            logger.exception("a push sink raised an exception")
            return failed(f"the sink raised {type(error).__name__}")
        finally:
            self._observe(time.monotonic() - began_s)

    def _show(self, error: str | None) -> None:
        """Show an error; if there is none, that of a batch that waits."""
        with self._lock:
            if error is None:
                error = next((batch.error for *_, batch in self._aside if batch.error is not None), None)
            if error == self._shown:
                return
            self._shown = error
        self._source.show(error)

    def _may_send(self, batch: _Batch) -> bool:
        """Return whether a batch is held, once the requests of messages that were taken back have ended.

        After a rewind their groups may be in this batch, and the receiver must not have a group in two requests.
        """
        while self._hold(batch):
            with self._lock:
                others = [messages for number, messages in self._under_way.items() if number != id(batch)]
            if all(map(self._source.is_held, others)):
                return True
            time.sleep(_LOOK_S)
        return False

    def _hold(self, batch: _Batch, *, is_retry: bool = False) -> bool:
        """Keep a batch in flight; give it back if the consumer has taken a part of it back."""
        is_due = is_retry or self._now_s() >= batch.renew_at_s
        is_held = self._renewed(batch, is_retry=is_retry) if is_due else self._source.is_held(batch.held)
        if not is_held:
            self._give_back(batch)
        return is_held

    def _renewed(self, batch: _Batch, *, is_retry: bool = False) -> bool:
        batch.renew_at_s = self._now_s() + self._margin_s
        return self._source.hold(batch.held, self._hold_s, is_retry=is_retry)

    def _renew(self) -> bool:
        """Keep the batches that wait in flight. A batch that was taken back is noticed before it is sent."""
        now_s = self._now_s()
        with self._lock:
            due = [batch for *_, batch in self._aside if now_s >= batch.renew_at_s]
        for batch in due:
            with suppress(MillstreamError):  # noted in memory, though the state can't be kept now
                self._renewed(batch)
        return not self._stopping.is_set()

    def _set_aside(self, batch: _Batch, wait_s: float) -> bool:
        """Let a batch wait; return False if there is nothing to wait for."""
        with self._lock:
            if self._stopping.is_set() or not batch.messages:
                return False
            heapq.heappush(self._aside, (self._now_s() + wait_s, next(self._numbers), batch))
            return True

    def _bury(self, batch: _Batch) -> None:
        """Report the dead messages of a batch, once all its messages were sent.

        A message that is buried earlier would return the later ones of its group, which would be sent again.
        """
        if batch.dead:
            self._source.bury(batch.dead)
        batch.dead = []

    def _give_back(self, batch: _Batch) -> None:
        messages, batch.messages = batch.messages, []
        try:
            self._bury(batch)
        finally:
            if messages:
                self._source.give_back(messages)

    def _give_back_all(self) -> None:
        with self._lock:
            aside, self._aside = self._aside, []
        for *_, batch in aside:
            with suppress(MillstreamError):  # noted in memory, though the state can't be kept now
                self._give_back(batch)
