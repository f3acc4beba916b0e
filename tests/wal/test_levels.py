"""Appends that wait for other machines.

When they are acknowledged, what readers see of them, and what happens if no machine confirms them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from tests.wal.log_writers import Others, one, small, xids
from tests.wal.plain_operations import MemoryReservations
from tests.wal.test_sessions import write

from millstream.errors import AppendOutcomeUnknown, NotEnoughReplicas, Overloaded, ReplicationError, WriterClosed
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.operations import Ack
from millstream.model.replication import AckLevel
from millstream.model.writes import WriteId
from millstream.protocol.deduplication.known_writes import SessionLimits
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.testing.errors import coded
from millstream.testing.files import FaultPlan, MemoryFiles
from millstream.wal.mending.inspect import stats, verify
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

FOLDER = "/wal/shop"
STREAM = StreamId(UUID(int=9))
ONE, TWO = AckLevel.parse("durable(1)"), AckLevel.parse("durable(2)")
DEADLINE_S = 60.0


class Life:
    """Writers of one log, one after the other."""

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self.others = Others()
        self.reservations = MemoryReservations()
        self.epoch = 0

    @contextmanager
    def open(
        self, acks: AckLevel | None = ONE, *, shards: int = 1, keyed: bool = False, **options: Any
    ) -> Iterator[LogWriter]:
        self.epoch += 1
        self.reservations.epoch = Epoch(self.epoch)
        given = {"segment_bytes": 1 << 20, "disk_used_max": 1.0, "acks_patience_s": 0.0, **options}
        if acks is not None:
            given["acks"] = acks
        log = LogWriter.open(
            FOLDER,
            stream=STREAM,
            shards=[ShardId(shard) for shard in range(shards)],
            epoch=Epoch(self.epoch),
            reservations=self.reservations,
            files=self.files,
            options=LogOptions(**given),
            sessions=SessionLimits() if keyed else None,
            high_water=self.others,
        )
        with log:
            yield log

    def reader(self, *, durable: bool = False) -> StreamReader:
        return StreamReader(FOLDER, files=self.files, durable=durable)

    def shown(self) -> list[int | None]:
        return xids(self.reader())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def durable(log: LogWriter, records: int) -> None:
    """Return once so many records are durable here."""
    until(lambda: log.stats().records >= records and log.is_written())


def given_up(future: Future[Ack]) -> NotEnoughReplicas:
    error = future.exception(DEADLINE_S)
    assert isinstance(error, NotEnoughReplicas)
    return error


def test_groups_are_acknowledged_in_order_once_others_hold_them_and_readers_see_them_just_before() -> None:
    life = Life()
    with life.open() as log:
        futures = []
        for xid in (1, 2, 3):
            futures.append(log.submit(one(xid)))
            durable(log, xid)
        # The writer went on: three groups are durable, none is shown or acknowledged.
        assert log.durable_offset(ShardId(0)) == 3
        assert life.shown() == []
        assert not any(future.done() for future in futures)
        order: list[int] = []

        def noted(number: int, _: Future[Ack]) -> None:
            order.append(number)

        for number, future in enumerate(futures):
            future.add_done_callback(partial(noted, number))
        for group in (1, 2):
            life.others.hold(group)
            assert futures[group - 1].result(DEADLINE_S).seqs.first == group
            assert life.shown() == list(range(1, group + 1))
        assert not futures[2].done()
        life.others.hold(3)
        futures[2].result(DEADLINE_S)
        assert order == [0, 1, 2]
        assert life.shown() == [1, 2, 3]


def test_what_others_say_less_of_later_stays_shown() -> None:
    life = Life()
    with life.open() as log:
        life.others.hold(1)
        log.append(one(1))
        life.others.hold(0)
        late = log.submit(one(2))
        durable(log, 2)
        assert life.shown() == [1]
        assert not late.done()
        life.others.hold(2)
        late.result(DEADLINE_S)


def test_an_append_past_its_deadline_is_told_who_is_missing_and_those_behind_it_are_not_affected() -> None:
    life = Life()
    life.others.hold(0, name="west")
    with life.open() as log:
        missing = log.submit(one(1), deadline_s=0.05)
        behind = log.submit(one(2))
        error = given_up(missing)
        assert error.details == {"level": "durable(1)", "behind": ["west"]}
        assert "durable here" in error.message
        assert not behind.done()
        life.others.hold(5)
        behind.result(DEADLINE_S)
        # The record was durable all along, and is shown once other nodes have it.
        assert life.shown() == [1, 2]


def test_nothing_looks_while_nothing_waits() -> None:
    life = Life()
    life.others.hold(10)
    with life.open() as log:
        log.append(one(1))
        looks = [-1]

        def is_quiet() -> bool:
            """Return whether the writer has stopped looking, over a time in which hundreds of looks fit."""
            looks.append(life.others.looks)
            threading.Event().wait(0.1)
            return looks[-1] == looks[-2]

        until(is_quiet)
        assert life.shown() == [1]


def test_an_append_may_ask_for_more_than_its_stream_and_holds_nobody_else_up() -> None:
    life = Life()
    with life.open(acks=None) as log:
        more = log.submit(one(1), acks=ONE)
        durable(log, 1)
        assert life.shown() == [1], "a stream that asks for nothing shows what is durable"
        log.append(one(2))
        log.append(one(3), acks=AckLevel.parse("local"))
        most = log.submit(one(4), acks=TWO)
        store = log.submit(one(5), acks=AckLevel.parse("object"))
        assert not more.done()
        life.others.hold(9, name="b")
        more.result(DEADLINE_S)
        assert not most.done()
        life.others.hold(9, name="c")
        most.result(DEADLINE_S)
        assert not store.done()
        life.others.hold(9, name="s3", is_store=True)
        store.result(DEADLINE_S)


def test_a_streams_level_is_the_least_and_an_append_may_ask_for_more() -> None:
    life = Life()
    with life.open(ONE) as log:
        less = log.submit(one(1), acks=AckLevel.parse("local"))
        more = log.submit(one(2), acks=TWO)
        store = log.submit(one(3), acks=AckLevel.parse("object"))
        durable(log, 3)
        life.others.hold(9, name="s3", is_store=True)
        assert not less.done()
        assert life.shown() == []
        life.others.hold(9)
        less.result(DEADLINE_S)
        store.result(DEADLINE_S)
        assert life.shown() == [1, 2, 3]
        assert not more.done()
        life.others.hold(9, name="c")
        more.result(DEADLINE_S)


def test_closing_waits_for_its_patience_and_then_answers_everybody() -> None:
    life = Life()
    with life.open(acks_patience_s=0.05) as log:
        future = log.submit(one(1))
    assert "closed" in given_up(future).message
    assert life.shown() == []
    with life.open(acks_patience_s=DEADLINE_S) as log:
        future = log.submit(one(2))
        durable(log, 1)
        threading.Timer(0.02, life.others.hold, [9]).start()
    assert future.result(0).seqs.count == 1
    assert life.shown() == [1, 2]


def test_who_waits_when_another_writer_takes_the_log_over_is_told_so_and_may_repeat_the_write() -> None:
    life = Life()
    life.others.hold(0)
    with life.open(keyed=True) as log:
        future = log.submit(write((WriteId("s", 1), 1)), deadline_s=DEADLINE_S)
        durable(log, 1)
        log.ends_as("another process writes from here on")
    assert "another process writes" in given_up(future).message
    with life.open(keyed=True) as log:
        repeated = log.submit(write((WriteId("s", 1), 1)), deadline_s=DEADLINE_S)
        until(lambda: log.stats().awaited.submissions == 1)
        life.others.hold(9)
        (outcome,) = repeated.result(DEADLINE_S).each
        assert isinstance(outcome, Ack)
        assert outcome.duplicate
        assert len(life.shown()) == 1


def test_who_waits_keeps_its_room_in_the_queue() -> None:
    life = Life()
    with life.open(queue_bytes_max=100_000) as log:
        waiting: list[Future[Ack]] = []

        def fill() -> None:
            for number in range(1, 100):
                waiting.append(log.submit(small(number), deadline_s=None if number < 3 else 0.2))  # noqa: PERF401 (until it raises)

        with pytest.raises(Overloaded, match="other machines"):
            fill()
        held = log.stats().awaited
        assert 2 <= held.submissions < 10
        assert held.size_bytes <= 200_000, "the queue's room, and that of a group which was just being written"
        life.others.hold(100)
        for future in waiting:
            assert future.exception(DEADLINE_S) is None or isinstance(future.exception(), NotEnoughReplicas)
        until(lambda: log.stats().awaited.submissions == 0)
        log.append(small(1000), deadline_s=DEADLINE_S)


def test_what_is_settled_is_asked_without_room_in_the_queue() -> None:
    """Capture asks before each session: it heard no stop while it waited for the room that held appends kept."""
    life = Life()
    with life.open(queue_bytes_max=100_000) as log, ThreadPoolExecutor(1) as threads:
        first = log.submit(small(1, text="x" * 150_000))
        until(lambda: log.stats().awaited.submissions == 1)
        try:
            settled = threads.submit(log.settled).result(10)
        finally:
            life.others.hold(100)
        assert settled is not None
        assert settled.result(DEADLINE_S)
        assert first.done()


def test_tasks_wait_as_threads_do() -> None:
    life = Life()

    async def run(log: LogWriter) -> None:
        tasks = [asyncio.create_task(log.append_async(one(xid))) for xid in (1, 2)]
        await asyncio.to_thread(until, lambda: log.stats().awaited.submissions == 2)
        with pytest.raises(NotEnoughReplicas):
            await log.append_async(one(3), deadline_s=0.02)
        assert not any(task.done() for task in tasks)
        life.others.hold(9)
        await asyncio.gather(*tasks)

    with life.open() as log:
        asyncio.run(run(log))
    assert life.shown() == [1, 2, 3]


def test_what_was_recovered_is_shown_once_others_hold_it_and_not_for_what_they_said_before() -> None:
    life = Life()
    with life.open() as log:
        life.others.hold(1)
        log.append(one(1))
        late = log.submit(one(2))
        durable(log, 2)
    given_up(late)
    assert life.shown() == [1]
    with life.open() as log:
        settled = log.settled()
        assert settled is not None
        assert life.shown() == [1]
        assert log.persisted_upto() == 2
        assert not settled.done()
        life.others.hold(2)
        settled.result(DEADLINE_S)
        assert life.shown() == [1, 2]
        assert log.settled() is None


def test_a_stream_that_asks_for_nothing_any_more_shows_what_is_durable_and_one_that_begins_to_ask_takes_nothing_back() -> (
    None
):
    life = Life()
    with life.open() as log:
        future = log.submit(one(1))
        durable(log, 1)
    given_up(future)
    assert life.shown() == []
    with life.open(acks=None) as log:
        assert life.shown() == [1]
        log.append(one(2))
    with life.open() as log:
        assert life.shown() == [1, 2]
        future = log.submit(one(3))
        durable(log, 1)
        assert life.shown() == [1, 2]
        counted = stats(FOLDER, files=life.files)
        assert counted.persisted_upto == log.persisted_upto()
        assert counted.high_water_mark == life.reader().persisted_upto() < log.persisted_upto()
        assert verify(FOLDER, files=life.files).hidden == {ShardId(0): 1}
    given_up(future)


def test_a_shard_that_is_begun_while_groups_wait_takes_nothing_from_readers() -> None:
    life = Life()
    with life.open() as log:
        life.others.hold(1)
        log.append(one(1))
        waiting = log.submit(one(2))
        durable(log, 2)
        log.reshard([ShardId(1)], era=1, place_anew=lambda ops: ops, record=lambda _: None)
        assert life.shown() == [1]
        life.others.hold(2)
        waiting.result(DEADLINE_S)
        assert life.shown() == [1, 2]
        behind = log.submit(one(3))
        durable(log, 3)
        assert life.shown() == [1, 2]
        life.others.hold(3)
        behind.result(DEADLINE_S)
        assert life.shown() == [1, 2, 3]


def test_segments_that_no_reader_has_been_shown_arent_dropped() -> None:
    life = Life()
    bounds = RetentionBounds(age_s=0, size_bytes=1, bytes_max=1)
    with life.open(segment_bytes=6_000, queue_bytes_max=1 << 20) as log:
        life.others.hold(1)
        log.append(one(1, "x" * 3000))
        for xid in range(2, 12):
            log.submit(one(xid, "x" * 3000))
            durable(log, xid)
        drop_segments(FOLDER, Retention(), bounds, files=life.files)
        assert life.reader().first_seq() == 1
        life.others.hold(11)
        until(lambda: life.reader().persisted_upto() == 11)
        drop_segments(FOLDER, Retention(), bounds, files=life.files)
        assert life.reader().first_seq() > 1


def test_a_repeated_write_waits_for_what_the_first_one_waits_for() -> None:
    life = Life()
    key = WriteId(key="k")
    with life.open(keyed=True) as log:
        first = log.submit(write((key, 1)), deadline_s=0.02)
        given_up(first)
        again = log.submit(write((key, 1)), deadline_s=0.02)
        assert "durable here" in given_up(again).message
        later = log.submit(write((key, 1)))
        behind = log.submit(write((WriteId(key="l"), 1)))
        durable(log, 2)
        assert not later.done()
        # The repeated write's own first write is held; the writes after it aren't.
        life.others.hold(1, upto=1)
        (outcome,) = later.result(DEADLINE_S).each
        assert isinstance(outcome, Ack)
        assert outcome.duplicate
        assert not behind.done()
        life.others.hold(2, upto=2)
        behind.result(DEADLINE_S)
        assert life.reader().persisted_upto() == 2


def test_a_sessions_mark_isnt_told_before_its_writes_are_held() -> None:
    life = Life()
    with life.open(keyed=True) as log:
        given_up(log.submit(write((WriteId("s", 1), 1)), deadline_s=0.02))
        with pytest.raises(NotEnoughReplicas):
            log.session("s", deadline_s=0.02)
        life.others.hold(1, upto=1)
        assert log.session("s", deadline_s=DEADLINE_S).mark == 1


def test_what_nobody_can_tell_is_refused() -> None:
    life = Life()
    log = LogWriter.open(
        FOLDER, stream=STREAM, shards=[ShardId(0)], epoch=Epoch(1), reservations=life.reservations, files=life.files,
        options=LogOptions(disk_used_max=1.0),
    )  # fmt: skip
    with log:
        with pytest.raises(ReplicationError, check=coded("ack_level_unavailable"), match="only this machine"):
            log.append(one(1), acks=ONE)
        log.append(one(2), acks=AckLevel.parse("local"))
    assert life.shown() == [2]
    with pytest.raises(ReplicationError, check=coded("ack_level_unavailable")):
        LogWriter.open(
            FOLDER, stream=STREAM, shards=[ShardId(0)], epoch=Epoch(2), reservations=life.reservations, files=life.files,
            options=LogOptions(disk_used_max=1.0, acks=ONE),
        )  # fmt: skip


def test_a_mark_that_cant_be_moved_ends_the_writer_and_leaves_the_outcome_open() -> None:
    life = Life()
    with life.open() as log:
        future = log.submit(one(1))
        durable(log, 1)
        plan = life.files.plan
        life.files.plan = FaultPlan(fail_write_at=frozenset(range(1, 100)))
        life.others.hold(1)
        assert isinstance(future.exception(DEADLINE_S), AppendOutcomeUnknown)
        life.files.plan = plan
        with pytest.raises(WriterClosed):
            log.append(one(2))
    with life.open(acks_patience_s=0.0):
        until(lambda: life.shown() == [1])
