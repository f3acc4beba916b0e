"""Moving messages to a sink: repeats, waits, split batches, groups, and receivers that are gone."""

from __future__ import annotations

import errno
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.delivery.receivers import Receiver, Request, answer

from millstream.delivery.push_retries import Pusher, _Turns
from millstream.delivery.sinks import (
    ACCEPTED,
    Outcome,
    Pacing,
    PushMessage,
    PushSink,
    Verdict,
    apart,
    failed,
    open_sink,
)
from millstream.errors import MillstreamError
from millstream.workers import Worker

SECRET = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
Judge = Callable[[Sequence[PushMessage]], Outcome]


class Source:
    """A consumer in memory, with the rule of groups: a group in flight is in no other answer."""

    def __init__(self, messages: Sequence[PushMessage]) -> None:
        self.waiting = deque(messages)
        self.flying: list[PushMessage] = []
        self.acked: list[str] = []
        self.syncs: list[int] = []
        """Number of messages that were settled at each sync."""
        self.dead: dict[str, str] = {}
        self.returned: list[str] = []
        self.deliveries = dict.fromkeys((message.id for message in messages), 0)
        self.shown: list[str | None] = []
        self.paused: str | None = None
        self.holds = 0
        self.lost: set[str] = set()
        """Ids of messages that aren't in flight for this receiver any longer."""
        self.changed = threading.Condition()

    def receive(self, count: int, *, wait_s: float) -> Sequence[PushMessage]:
        with self.changed:
            busy = {message.group for message in self.flying}
            free = [message for message in self.waiting if message.group is None or message.group not in busy][:count]
            if not free or self.paused:
                self.changed.wait(min(wait_s, 0.02))
                return []
            for message in free:
                self.waiting.remove(message)
                self.deliveries[message.id] += 1
            self.flying += free
            return free

    def is_held(self, messages: Sequence[PushMessage]) -> bool:
        with self.changed:
            return self.lost.isdisjoint(message.id for message in messages)

    def hold(self, messages: Sequence[PushMessage], seconds: float, *, is_retry: bool) -> bool:
        with self.changed:
            assert seconds > 0
            self.holds += 1
            for message in messages:
                self.deliveries[message.id] += is_retry
            return self.lost.isdisjoint(message.id for message in messages)

    def ack(self, messages: Sequence[PushMessage]) -> None:
        with self.changed:
            for message in messages:
                self.flying.remove(message)
                self.acked.append(message.id)
            self.changed.notify_all()

    def sync(self) -> None:
        with self.changed:
            self.syncs.append(len(self.acked))

    def bury(self, dead: Sequence[tuple[PushMessage, str]]) -> None:
        with self.changed:
            for message, error in dead:
                self.flying.remove(message)
                self.dead[message.id] = error
            self.changed.notify_all()

    def give_back(self, messages: Sequence[PushMessage]) -> None:
        with self.changed:
            for message in messages:
                self.flying.remove(message)
                self.returned.append(message.id)
            self.changed.notify_all()

    def show(self, error: str | None) -> None:
        self.shown.append(error)

    def pause(self, error: str) -> None:
        self.paused = error

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline_s, vars(self)
            time.sleep(0.005)

    @property
    def is_settled(self) -> bool:
        return not self.waiting and not self.flying


class Sink:
    """A sink whose outcomes a test chooses; it keeps what it was sent."""

    def __init__(self, judge: Judge, *, concurrency: int = 1, batch_size: int = 10, retry_min_s: float = 0.01) -> None:
        self.pacing = Pacing(batch_size, concurrency, retry_min_s, max(0.04, retry_min_s), timeout_s=1)
        self.judge = judge
        self.sent: list[list[tuple[str, int]]] = []
        self.is_closed = False

    def deliver(self, messages: Sequence[PushMessage]) -> Outcome:
        self.sent.append([(message.id, message.deliveries) for message in messages])
        return self.judge(messages)

    def close(self) -> None:
        self.is_closed = True


def messages_of(count: int, groups: int = 1000) -> list[PushMessage]:
    return [PushMessage(f"m{number}", f"g{number % groups}", 1, b'{"op":"c"}') for number in range(count)]


@contextmanager
def pushing_to(
    sink: PushSink,
    source: Source,
    *,
    max_deliver: int = 3,
    observe: Callable[[float], None] = lambda _seconds: None,
    **options: Any,
) -> Iterator[Pusher]:
    pusher = Pusher("test", source, sink, max_deliver=max_deliver, observe=observe, **options).start()
    try:
        yield pusher
    finally:
        pusher.close()
        assert not pusher.is_running
        assert not getattr(sink, "is_closed", False)  # that is its owner's


def by_poison(*ids: str) -> Judge:
    return lambda messages: failed("poison") if any(message.id in ids for message in messages) else ACCEPTED


def test_all_messages_are_pushed_and_acknowledged() -> None:
    source, sink = Source(messages_of(95, groups=7)), Sink(lambda _: ACCEPTED, concurrency=4)
    with pushing_to(sink, source):
        source.wait_until(lambda: source.is_settled)
    assert sorted(source.acked) == sorted(source.deliveries)
    assert not source.shown
    for group in range(7):
        own = [id_ for id_ in source.acked if int(id_[1:]) % 7 == group]
        assert own == sorted(own, key=lambda id_: int(id_[1:]))


def test_a_failed_batch_is_repeated_whole_with_growing_deliveries() -> None:
    outcomes = deque([failed("first"), failed("second"), ACCEPTED])
    source, sink = Source(messages_of(3)), Sink(lambda _: outcomes.popleft())
    with pushing_to(sink, source, max_deliver=0):
        source.wait_until(lambda: source.is_settled)
    assert sink.sent == [[(f"m{number}", attempt) for number in range(3)] for attempt in (1, 2, 3)]
    assert source.acked == ["m0", "m1", "m2"]
    assert set(source.deliveries.values()) == {3}
    assert source.shown == ["first", "second", None]


def test_each_request_is_timed_whatever_its_outcome() -> None:
    outcomes, seconds = deque([failed("first"), ACCEPTED]), list[float]()
    source, sink = Source(messages_of(3)), Sink(lambda _: outcomes.popleft())
    with pushing_to(sink, source, max_deliver=0, observe=seconds.append):
        source.wait_until(lambda: source.is_settled)
    assert len(seconds) == len(sink.sent) == 2
    assert min(seconds) >= 0


def test_after_the_last_failure_of_a_batch_each_message_is_sent_alone_once() -> None:
    source, sink = Source(messages_of(4)), Sink(by_poison("m1", "m3"))
    with pushing_to(sink, source, max_deliver=2):
        source.wait_until(lambda: source.is_settled)
    together = [[f"m{number}" for number in range(4)]] * 2
    assert [[id_ for id_, _ in batch] for batch in sink.sent] == [*together, ["m0"], ["m1"], ["m2"], ["m3"]]
    assert [batch[0][1] for batch in sink.sent] == [1, 2, 3, 3, 3, 3]
    assert source.acked == ["m0", "m2"]
    assert source.dead == {"m1": "poison", "m3": "poison"}
    assert set(source.deliveries.values()) == {3}


@pytest.mark.parametrize(("step_s", "holds"), [(0, 1), (30, 4)])
def test_messages_that_failed_alone_stay_in_flight_until_the_others_were_sent(
    monkeypatch: pytest.MonkeyPatch, step_s: float, holds: int
) -> None:
    """With a receiver that fails slowly they expired on the way, and were sent again.

    With one that fails fast, all of them were held again for each: the cost grew with the square of the batch.
    """
    source, sink = Source(messages_of(3)), Sink(by_poison("m0", "m1", "m2"))
    hold, held = source.hold, list[list[str]]()

    def noted(messages: Sequence[PushMessage], seconds: float, *, is_retry: bool) -> bool:
        held.append(sorted(message.id for message in messages))
        return hold(messages, seconds, is_retry=is_retry)

    monkeypatch.setattr(source, "hold", noted)
    clock = time.monotonic if not step_s else itertools.count(step=step_s).__next__
    with pushing_to(sink, source, max_deliver=1, now_s=clock):
        source.wait_until(lambda: source.is_settled)
    assert [len(batch) for batch in sink.sent] == [3, 1, 1, 1]
    assert len(held) == holds if not step_s else len(held) >= holds
    assert set(map(tuple, held)) == {("m0", "m1", "m2")}


def test_a_message_that_was_sent_alone_from_the_first_is_dead_after_its_last_failure() -> None:
    source, sink = Source(messages_of(2)), Sink(by_poison("m0"), batch_size=1)
    with pushing_to(sink, source, max_deliver=3):
        source.wait_until(lambda: source.is_settled)
    assert [batch for batch in sink.sent if batch[0][0] == "m0"] == [[("m0", 1)], [("m0", 2)], [("m0", 3)]]
    assert source.dead == {"m0": "poison"}
    assert source.acked == ["m1"]


@pytest.mark.parametrize(
    ("before", "sent"), [((2,), [[1]]), ((3, 3), [[1], [1]]), ((9, 1), [[1, 1], [2, 2], [3], [3]])]
)
def test_failures_before_a_restart_count(before: tuple[int, ...], sent: list[list[int]]) -> None:
    """Messages of a request have the failures of the one that has the fewest."""
    messages = [
        msgspec.structs.replace(one, failures=count)
        for one, count in zip(messages_of(len(before)), before, strict=True)
    ]
    source, sink = Source(messages), Sink(lambda _: failed("it failed"))
    with pushing_to(sink, source):
        source.wait_until(lambda: source.is_settled)
    assert [[deliveries for _, deliveries in request] for request in sink.sent] == sent
    assert source.dead.keys() == {one.id for one in messages}


def test_a_failing_record_holds_only_its_own_group() -> None:
    """Also with one request at a time: a batch that waits takes none."""
    source = Source(messages_of(60, groups=3))
    sink = Sink(by_poison("m0"), batch_size=1, retry_min_s=60)
    with pushing_to(sink, source, max_deliver=0):
        source.wait_until(lambda: len(source.acked) == 40)
    assert all(int(id_[1:]) % 3 for id_ in source.acked)
    assert source.returned == ["m0"]


def test_a_refusal_is_shown_and_repeated_and_does_not_count() -> None:
    outcomes = deque([Outcome(Verdict.REFUSED, "private")] * 5 + [ACCEPTED])
    source, sink = Source(messages_of(1)), Sink(lambda _: outcomes.popleft())
    with pushing_to(sink, source, max_deliver=1):
        source.wait_until(lambda: source.is_settled)
    assert source.acked == ["m0"]
    assert source.shown == ["private", None]
    assert sink.sent == [[("m0", 1)]] * 6
    assert source.deliveries == {"m0": 1}


def test_a_receiver_that_is_gone_pauses_the_consumer_and_costs_no_message() -> None:
    def judge(messages: Sequence[PushMessage]) -> Outcome:
        return Outcome(Verdict.GONE, "gone") if messages[0].id == "m1" else failed("not now")

    source, sink = Source(messages_of(2)), Sink(judge, batch_size=1, retry_min_s=60)
    with pushing_to(sink, source, max_deliver=1000) as pusher:
        source.wait_until(lambda: sink.sent and not source.flying)
        assert source.paused == "gone"
        source.wait_until(lambda: not pusher.is_running)
    assert sorted(source.returned) == ["m0", "m1"]
    assert not source.dead


@pytest.mark.parametrize("method", ["receive", "ack", "hold"])
def test_a_bug_in_one_of_several_threads_ends_the_pusher(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others went on, and the owner saw one that runs: what the dead thread had in flight stayed so, with its groups."""
    bugs = [RuntimeError("a bug")]

    def fails_once(*args: Any, **named: Any) -> Any:
        if bugs:
            raise bugs.pop()
        return plain(*args, **named)

    source = Source(messages_of(3))
    plain = getattr(source, method)
    monkeypatch.setattr(source, method, fails_once)
    judge = lambda messages: failed("not now") if messages[0].id == "m2" else ACCEPTED  # noqa: E731
    with pushing_to(
        Sink(judge, concurrency=2, batch_size=1, retry_min_s=60), source, max_deliver=9, margin_s=0.03
    ) as pusher:
        source.wait_until(lambda: not pusher.is_running)
        assert isinstance(pusher.failure, RuntimeError)


def test_a_pusher_that_lacks_a_thread_leaves_none_and_has_received_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that had started sent on, while another pusher was given the same messages."""
    start, received = Worker.start, list[int]()

    def receive(count: int, *, wait_s: float) -> Sequence[PushMessage]:
        del wait_s
        received.append(count)
        return []

    def refused(worker: Worker) -> Worker:
        if worker is pusher._workers[1]:
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    source, sink = Source(messages_of(5)), Sink(lambda _: ACCEPTED, concurrency=2)
    monkeypatch.setattr(source, "receive", receive)
    monkeypatch.setattr(Worker, "start", refused)
    pusher = Pusher("test", source, sink, max_deliver=3)
    with pytest.raises(OSError, match="no more threads"):
        pusher.start()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("push-test")]
    assert (received, sink.sent, pusher.failure) == ([], [], None)


def test_a_receiver_may_set_the_wait() -> None:
    outcomes = deque([failed("busy", retry_after_s=0.0), failed("busy", retry_after_s=0.3), ACCEPTED])
    moments: list[float] = []

    def judge(_: Sequence[PushMessage]) -> Outcome:
        moments.append(time.monotonic())
        return outcomes.popleft()

    source, sink = Source(messages_of(1)), Sink(judge, retry_min_s=60)
    with pushing_to(sink, source):
        source.wait_until(lambda: source.is_settled)
    assert moments[1] - moments[0] < 5
    assert 0.3 <= moments[2] - moments[1] < 5


def test_waits_double_within_a_fifth_up_to_the_longest() -> None:
    pacing = Pacing(retry_min_s=1, retry_max_s=60)
    for chance, factor in ((0.0, 0.8), (0.5, 1.0), (1.0, 1.2)):
        sink = Sink(lambda _: ACCEPTED)
        sink.pacing = pacing
        waits = Pusher("test", Source([]), sink, max_deliver=1, chance=lambda drawn=chance: drawn)._waits()
        expected = [factor * whole for whole in (1, 2, 4, 8, 16, 32, 60, 60)]
        assert [waits.next_s() for _ in expected] == pytest.approx(expected)


def test_messages_that_were_taken_back_are_not_sent_again() -> None:
    def judge(_: Sequence[PushMessage]) -> Outcome:
        source.lost.add("m1")
        return failed("not now")

    source, sink = Source(messages_of(2)), Sink(judge)
    with pushing_to(sink, source):
        source.wait_until(lambda: sink.sent and not source.flying)
    assert len(sink.sent) == 1
    assert source.returned == ["m0", "m1"]


def test_a_group_that_a_rewind_took_back_waits_for_its_request_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver had both at once, and might have taken the older message last."""
    first, again = (PushMessage(id_, "g", 1, b"{}") for id_ in ("first", "again"))
    source, taken_back, asked, events = Source([first]), threading.Event(), threading.Event(), list[str]()

    def judge(messages: Sequence[PushMessage]) -> Outcome:
        events.append(f"begin {messages[0].id}")
        if messages[0] is first:
            with source.changed:
                source.lost.add("first")
                source.flying.remove(first)
                source.deliveries["again"] = 0
                source.waiting.append(again)
            taken_back.set()
            assert asked.wait(30)
        events.append(f"end {messages[0].id}")
        return ACCEPTED

    is_held = source.is_held

    def noted(messages: Sequence[PushMessage]) -> bool:
        if taken_back.is_set() and messages[0] is first:
            asked.set()
        return is_held(messages)

    monkeypatch.setattr(source, "is_held", noted)

    def acked(messages: Sequence[PushMessage]) -> None:
        source.acked.extend(message.id for message in messages)

    monkeypatch.setattr(source, "ack", acked)
    with pushing_to(Sink(judge, concurrency=2), source):
        source.wait_until(lambda: "again" in source.acked)
        source.flying.clear()
    assert events == ["begin first", "end first", "begin again", "end again"]


def test_messages_that_wait_are_kept_in_flight() -> None:
    source, sink = Source(messages_of(1)), Sink(lambda _: failed("not now"), retry_min_s=60)
    with pushing_to(sink, source, margin_s=0.03):
        source.wait_until(lambda: source.holds > 10)
    assert len(sink.sent) == 1


def test_a_sink_with_a_fault_stops_nothing() -> None:
    def judge(messages: Sequence[PushMessage]) -> Outcome:
        if messages[0].id == "m0":
            raise RuntimeError("a secret")
        return ACCEPTED

    source, sink = Source(messages_of(3)), Sink(judge, batch_size=1)
    with pushing_to(sink, source, max_deliver=2):
        source.wait_until(lambda: source.is_settled)
    assert source.dead == {"m0": "the sink raised RuntimeError"}
    assert sorted(source.acked) == ["m1", "m2"]


def test_a_webhook_gets_each_group_in_order_whatever_its_answers() -> None:
    """A real receiver that fails at random times; a retry has the same id and another signature."""
    attempts: dict[str, int] = {}
    lock = threading.Lock()

    def sometimes(connection: object, request: Request) -> None:
        with lock:
            id_ = request.headers["webhook-id"]
            attempts[id_] = attempts.get(id_, 0) + 1
            status = 503 if attempts[id_] == 1 and len(attempts) % 3 == 0 else 200
        answer(status)(connection, request)  # type: ignore[arg-type]

    with Receiver(sometimes) as receiver:
        settings = {
            "url": receiver.url, "secret": SECRET, "allow_private": True, "batch_size": 7, "retry_min": "10ms",
        }  # fmt: skip
        sink = open_sink("webhook", settings, stream="shop", consumer="search")
        source = Source(messages_of(300, groups=20))
        with pushing_to(sink, source):
            source.wait_until(lambda: source.is_settled)
        sink.close()
        assert sorted(source.acked) == sorted(source.deliveries)
        assert not source.dead
        assert 2 in attempts.values()
        bodies = [json.loads(request.body)["messages"] for request in receiver.requests]
    first_seen = list(dict.fromkeys(message["id"] for body in bodies for message in body))
    for group in range(20):
        own = [int(id_[1:]) for id_ in first_seen if int(id_[1:]) % 20 == group]
        assert own == sorted(own)


# --- batches of several outcomes ---------------------------------------------------------------------------------------


def by_part(*poison: str, closed: str = "") -> Judge:
    """Return a judge that accepts all messages but those of poisoned groups, and of a receiver that is closed."""

    def judge(messages: Sequence[PushMessage]) -> Outcome:
        bad = {message.group for message in messages if message.id in poison}
        shut = [message for message in messages if message.id == closed]
        failing = [message for message in messages if message.group in bad]
        good = [message for message in messages if message not in failing and message not in shut]
        parts = [(good, ACCEPTED), (failing, failed("poison")), (shut, Outcome(Verdict.REFUSED, "closed"))]
        return apart([(some, outcome) for some, outcome in parts if some])

    return judge


def test_a_part_that_failed_doesn_t_hold_the_rest_of_its_batch() -> None:
    source, sink = Source(messages_of(10, groups=5)), Sink(by_part("m2"), retry_min_s=0.01)
    with pushing_to(sink, source):
        source.wait_until(lambda: source.is_settled)
    assert source.dead == {"m2": "poison"}
    first = [f"m{number}" for number in range(10) if number % 5 != 2]
    assert source.acked == [*first, "m7"]  # the group's next one follows, and no other waited
    assert source.deliveries["m2"] == 4  # three times with its group, once alone
    assert [[id_ for id_, _ in batch] for batch in sink.sent[1:4]] == [["m2", "m7"]] * 2 + [["m2"]]
    assert source.shown[0] == "poison"


def test_a_part_that_wasn_t_judged_is_repeated_apart_without_a_failure() -> None:
    opened = threading.Event()

    def judge(messages: Sequence[PushMessage]) -> Outcome:
        return by_part("m1", closed="" if opened.is_set() else "m0")(messages)

    source, sink = Source(messages_of(4)), Sink(judge)
    with pushing_to(sink, source):
        source.wait_until(lambda: source.dead and len(sink.sent) > 10)
        assert sorted(source.acked) == ["m2", "m3"]
        assert source.shown[-1] == "closed"  # as long as a batch waits for it
        opened.set()
        source.wait_until(lambda: source.is_settled)
    assert sorted(source.acked) == ["m0", "m2", "m3"]
    assert source.deliveries["m0"] == 1
    assert list(source.dead) == ["m1"]
    assert source.shown[-1] is None


@pytest.mark.parametrize("failing", ["ack", "sync", "is_held"])
def test_nothing_is_sent_while_the_consumer_s_state_can_t_be_kept_and_all_is_sent_once_it_can(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A full disk ended the thread that pushes, and the consumer stood still until a restart."""
    source, sink = Source(messages_of(30)), Sink(lambda _: ACCEPTED)
    is_full, tries = threading.Event(), threading.Semaphore(0)
    is_full.set()
    done = getattr(source, failing)

    def check() -> None:
        if is_full.is_set():
            tries.release()
            raise MillstreamError("the disk is full")

    def noted(*arguments: Any, **options: Any) -> Any:
        found = done(*arguments, **options)
        if len(source.acked) in {10, 20}:
            check()
        return found

    monkeypatch.setattr(source, "sync", check)
    monkeypatch.setattr(source, failing, noted)
    sink.pacing = replace(sink.pacing, syncs=failing == "sync")
    with pushing_to(sink, source, kept_again_s=0.01) as pusher:
        for _ in range(4):
            assert tries.acquire(timeout=30)
        assert (len(sink.sent), source.shown, pusher.is_running) == (1, ["the disk is full"], True)
        is_full.clear()
        source.wait_until(lambda: source.is_settled)
        source.wait_until(lambda: source.shown[-1] is None)
    assert source.acked == [f"m{number}" for number in range(30)]
    assert [id_ for batch in sink.sent for id_, _ in batch] == source.acked


def test_a_message_whose_outcome_a_sink_leaves_out_has_failed() -> None:
    """It stayed in flight for hours, and its group with it."""
    source = Source(messages_of(3))
    sink = Sink(lambda messages: Outcome(Verdict.FAILED, "some", parts=((messages[:1], ACCEPTED),)))
    with pushing_to(sink, source, max_deliver=0):
        source.wait_until(lambda: source.is_settled)
    assert source.acked == ["m0", "m1", "m2"]
    assert [[id_ for id_, _ in batch] for batch in sink.sent] == [["m0", "m1", "m2"], ["m1", "m2"], ["m2"]]


def test_a_sink_may_tell_the_outcome_of_one_message_as_a_part() -> None:
    """The messages that were to be sent alone after it stayed in flight."""
    source = Source(messages_of(3))
    sink = Sink(
        lambda messages: (
            failed("poison")
            if len(messages) > 1
            else Outcome(
                Verdict.FAILED, "", parts=((messages, failed("alone") if messages[0].id == "m1" else ACCEPTED),)
            )
        )
    )
    with pushing_to(sink, source, max_deliver=2):
        source.wait_until(lambda: source.is_settled)
    assert (source.acked, source.dead) == (["m0", "m2"], {"m1": "alone"})


def test_all_batches_that_wait_go_back_at_the_end_though_the_consumer_s_state_can_t_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a full disk, the first batch's return ended the close, and the others stayed in flight."""
    refused = Outcome(Verdict.REFUSED, "not now", retry_after_s=60)
    source = Source(messages_of(6))
    sink = Sink(
        lambda messages: failed("poison") if len(messages) > 1 or messages[0].id in {"m0", "m3"} else refused,
        batch_size=3,
    )

    def noted(done: Callable[..., None], *arguments: Any) -> None:
        done(*arguments)
        raise MillstreamError("the disk is full")

    monkeypatch.setattr(source, "bury", partial(noted, source.bury))
    monkeypatch.setattr(source, "give_back", partial(noted, source.give_back))
    with pushing_to(sink, source, max_deliver=2) as pusher:
        source.wait_until(lambda: len(pusher._aside) == 2 and all(batch.dead for *_, batch in pusher._aside))
    assert sorted(source.dead) == ["m0", "m3"]
    assert sorted(source.returned) == ["m1", "m2", "m4", "m5"]


def test_acknowledgements_are_durable_before_the_next_batch_if_the_sink_needs_it() -> None:
    synced: list[int] = []

    def judge(messages: Sequence[PushMessage]) -> Outcome:
        synced.append(source.syncs[-1] if source.syncs else 0)
        assert messages
        return ACCEPTED

    source, sink = Source(messages_of(30)), Sink(judge)
    sink.pacing = replace(sink.pacing, syncs=True)
    with pushing_to(sink, source):
        source.wait_until(lambda: source.is_settled)
    assert synced == [0, 10, 20]


def test_messages_that_cannot_be_received_now_are_waited_for_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = Source(messages_of(30)), Sink(lambda _: ACCEPTED)
    receive, tries = source.receive, threading.Semaphore(0)
    is_full = threading.Event()
    is_full.set()

    def receive_later(count: int, *, wait_s: float) -> Sequence[PushMessage]:
        if is_full.is_set():
            tries.release()
            raise MillstreamError("the disk is full")
        return receive(count, wait_s=wait_s)

    monkeypatch.setattr(source, "receive", receive_later)
    with pushing_to(sink, source, kept_again_s=0.01) as pusher:
        for _ in range(4):
            assert tries.acquire(timeout=30)
        assert (sink.sent, source.shown, pusher.is_running) == ([], ["the disk is full"], True)
        is_full.clear()
        source.wait_until(lambda: source.is_settled)
        source.wait_until(lambda: source.shown[-1] is None)


def test_turns_go_to_threads_in_the_order_in_which_they_asked() -> None:
    """Else a thread that receives nothing would keep another from sending what it has received ahead."""
    turns, order = _Turns(), list[str]()

    def take(name: str) -> None:
        turns.__enter__()
        order.append(name)

    waits = threading.Thread(target=take, args=["it had waited"])
    with turns:
        waits.start()
        deadline_s = time.monotonic() + 30
        while not turns._waiting:
            assert time.monotonic() < deadline_s
    waits.join(30)
    again = threading.Thread(target=take, args=["it came later"])
    again.start()
    assert order == ["it had waited"]
    turns.__exit__()
    again.join(30)
    assert order == ["it had waited", "it came later"]


def test_a_backlog_is_received_ahead_and_sent_in_turn() -> None:
    """One batch is sent while the next one is received, but none before the acknowledgements of the last are durable."""
    going, most = [0], [0]
    synced: list[tuple[int, int]] = []

    def judge(messages: Sequence[PushMessage]) -> Outcome:
        going[0] += 1
        most[0] = max(most[0], going[0])
        if source.waiting and synced:  # the first may be received in its turn
            source.wait_until(lambda: len(source.flying) > len(messages) or source.is_settled)
        synced.append((len(source.acked), source.syncs[-1] if source.syncs else 0))
        going[0] -= 1
        return ACCEPTED

    source, sink = Source(messages_of(100)), Sink(judge, concurrency=2)
    sink.pacing = replace(sink.pacing, syncs=True)
    with pushing_to(sink, source):
        source.wait_until(lambda: source.is_settled)
    assert most == [1]
    assert synced == [(number, number) for number in range(0, 100, 10)]
    assert sorted(source.acked) == sorted(f"m{number}" for number in range(100))
