"""Tasks that append: their groups, answers, cancellation, room in the queue, and errors of a failing disk."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.wal.log_writers import OTHER, TABLE, HeldSyncs, column, one, opened, small
from tests.wal.plain_operations import plain_spilled

from millstream.errors import AppendOutcomeUnknown, Overloaded, WriterClosed
from millstream.model.operations import Ack
from millstream.testing.files import FaultPlan
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

DEADLINE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; the event loop runs on until then."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def held(log: LogWriter, files: HeldSyncs) -> asyncio.Task[Ack]:
    """Return a task whose append is in an fsync that waits for the test."""
    files.may_sync.clear()
    files.waiting.clear()
    first = asyncio.create_task(log.append_async(small(1)))
    await until(files.waiting.is_set)
    return first


async def queued(log: LogWriter, *appends: Coroutine[Any, Any, Ack]) -> list[asyncio.Task[Ack]]:
    """Return tasks that have run until they wait, one after the other."""
    before = log.stats().queued_bytes
    tasks = [asyncio.create_task(append) for append in appends]
    await until(lambda: log.stats().queued_bytes >= before + 1024 * len(tasks))
    return tasks


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread woke it."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = 0

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        self.woken += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


def test_a_group_answers_its_tasks_in_order_and_wakes_each_event_loop_once():
    files = HeldSyncs()
    ended: list[int] = []
    loops = [CountingLoop(), CountingLoop()]
    have_queued = [threading.Event(), threading.Event()]

    async def append(log: LogWriter, number: int) -> Ack:
        ack = await log.append_async(small(number))
        ended.append(number)
        return ack

    def run(place: int, log: LogWriter, acks: list[Ack]) -> None:
        async def many() -> list[Ack]:
            tasks = await queued(log, *(append(log, 100 * place + n) for n in range(20)))
            have_queued[place].set()
            return await asyncio.gather(*tasks)

        acks += loops[place].run_until_complete(many())

    with opened("/wal/s", files=files) as log:
        files.may_sync.clear()
        first = log.submit(small(-1))
        assert files.waiting.wait(DEADLINE_S)
        acks: list[list[Ack]] = [[], []]
        threads = [threading.Thread(target=run, args=(place, log, acks[place])) for place in (0, 1)]
        for thread, has_queued in zip(threads, have_queued, strict=True):
            thread.start()
            assert has_queued.wait(DEADLINE_S)
        files.may_sync.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert first.result(0).seqs.first == 1
        assert log.stats().groups == 2
    assert [loop.woken for loop in loops] == [1, 1]
    assert [ack.seqs.first for ack in (*acks[0], *acks[1])] == list(range(2, 42))
    assert [ack.offsets for ack in acks[1]] == [{0: (n, n + 1)} for n in range(21, 41)]
    assert [n for n in ended if n < 100] == list(range(20))
    assert [n for n in ended if n >= 100] == list(range(100, 120))
    for loop in loops:
        loop.close()


def test_tasks_of_several_loops_and_threads_append_and_each_gets_its_own_numbers(tmp_path: Path):
    acks: dict[int, Ack] = {}

    async def caller(log: LogWriter, who: int) -> None:
        for n in range(20):
            number = who * 100 + n
            acks[number] = await log.append_async(
                small(number, 1 + n % 2, table=(TABLE, OTHER)[who % 2], shard=who % 2)
            )

    async def callers(log: LogWriter, whos: range) -> None:
        await asyncio.gather(*(caller(log, who) for who in whos))

    def blocked(log: LogWriter, who: int) -> None:
        for n in range(20):
            acks[who * 100 + n] = log.append(small(who * 100 + n, 1 + n % 2))

    with opened(tmp_path / "s", shards=(0, 1)) as log:
        threads = [threading.Thread(target=asyncio.run, args=(callers(log, range(w, w + 8)),)) for w in (0, 8)]
        threads += [threading.Thread(target=blocked, args=(log, who)) for who in range(16, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert log.stats().groups < log.stats().operations == 400
    reader = StreamReader(str(tmp_path / "s"))
    ids = column(reader, "id")
    numbers = column(reader, "__seq")
    assert numbers == list(range(1, 601))
    for number, ack in acks.items():
        first = ack.seqs.first - 1
        assert ids[first : first + ack.seqs.count] == [number] * (1 + number % 2)
    for who in range(20):
        of_caller = [acks[who * 100 + n].seqs.first for n in range(20)]
        assert of_caller == sorted(of_caller)


def test_cancelled_while_it_waits_it_is_not_written_and_once_begun_it_is_and_nobody_is_told():
    files = HeldSyncs()

    async def run(log: LogWriter) -> None:
        first = await held(log, files)
        tasks = await queued(log, *(log.append_async(small(n)) for n in range(2, 6)))
        for task in (first, tasks[0], tasks[2]):
            task.cancel()
        files.may_sync.set()
        outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [
            asyncio.CancelledError, asyncio.CancelledError, Ack, asyncio.CancelledError, Ack,
        ]  # fmt: skip
        assert [ack.seqs.first for ack in outcomes if isinstance(ack, Ack)] == [2, 3]
        assert (await log.append_async(small(6))).seqs.first == 4

    with opened("/wal/s", files=files) as log:
        asyncio.run(run(log))
        assert log.stats().queued_bytes == 0
    assert column(StreamReader("/wal/s", files=files), "id") == [1, 3, 5, 6]


def test_a_group_of_which_all_were_cancelled_writes_nothing():
    files = HeldSyncs()

    async def run(log: LogWriter) -> None:
        first = await held(log, files)
        tasks = await queued(log, *(log.append_async(small(n)) for n in (2, 3)))
        for task in tasks:
            task.cancel()
        files.may_sync.set()
        await first
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await log.append_async(small(4))).seqs.first == 2
        assert log.stats().groups == 2

    with opened("/wal/s", files=files) as log:
        asyncio.run(run(log))


def test_a_failed_fsync_reaches_every_task_of_its_group_and_what_waited_was_not_written():
    files = HeldSyncs()

    async def run(log: LogWriter) -> None:
        first = await held(log, files)
        of_group = await queued(log, *(log.append_async(small(n)) for n in range(2, 30)))
        files.plan = FaultPlan(fail_sync_at=frozenset({2}))
        files.may_sync.set()
        assert (await first).seqs.first == 1
        outcomes = await asyncio.gather(*of_group, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [AppendOutcomeUnknown] * 28
        with pytest.raises(WriterClosed):
            await log.append_async(small(30))

    log = opened("/wal/s", files=files)
    asyncio.run(run(log))
    assert log.failure() is not None
    log.close()
    assert column(StreamReader("/wal/s", files=files), "id") == [1]


def test_what_waited_behind_a_failed_fsync_says_that_it_was_not_written():
    files = HeldSyncs()

    async def run(log: LogWriter) -> None:
        await log.append_async(small(0))
        first = await held(log, files)
        files.plan = FaultPlan(fail_sync_at=frozenset({1}))
        waiting = await queued(log, *(log.append_async(small(n)) for n in range(2, 20)))
        files.may_sync.set()
        outcomes = await asyncio.gather(first, *waiting, return_exceptions=True)
        assert [getattr(outcome, "code", None) for outcome in outcomes] == [
            "append_outcome_unknown", *["writer_closed"] * 18,
        ]  # fmt: skip
        assert all(outcome.__cause__ is outcomes[0] for outcome in outcomes[1:] if isinstance(outcome, WriterClosed))

    log = opened("/wal/s", files=files)
    asyncio.run(run(log))
    log.close()
    assert column(StreamReader("/wal/s", files=files), "id") == [0]


def test_closing_writes_what_waits_answers_it_and_takes_no_more():
    files = HeldSyncs()

    async def run(log: LogWriter) -> None:
        first = await held(log, files)
        tasks = await queued(log, *(log.append_async(small(n)) for n in range(2, 12)))
        closing = asyncio.create_task(asyncio.to_thread(log.close))

        async def refused() -> bool:
            try:
                await log.append_async(small(99), deadline_s=0)
            except WriterClosed:
                return True
            return False

        files.may_sync.set()
        await closing
        acks = await asyncio.gather(first, *tasks)
        assert [ack.seqs.first for ack in acks] == list(range(1, 12))
        assert await refused()

    asyncio.run(run(opened("/wal/s", files=files)))
    assert column(StreamReader("/wal/s", files=files), "id") == list(range(1, 12))


def test_a_full_queue_holds_tasks_in_order_while_their_loop_goes_on_and_refuses_them_at_their_deadline():
    files = HeldSyncs()

    async def run(log: LogWriter) -> None:
        first = await held(log, files)
        tasks = await queued(log, log.append_async(small(2, text="y" * 160_000)))
        tasks += [asyncio.create_task(log.append_async(small(n, text="y" * 80_000))) for n in range(3, 9)]
        await asyncio.sleep(0)  # all of them wait for room
        with pytest.raises(Overloaded):
            await log.append_async(small(90), deadline_s=0.05)  # there is room for it, but other appends were first
        gives_up = asyncio.create_task(log.append_async(small(91)))
        await asyncio.sleep(0)
        gives_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gives_up
        assert log.stats().queued_bytes < 240_000
        assert not any(task.done() for task in tasks)
        files.may_sync.set()
        acks = await asyncio.gather(first, *tasks)
        assert [ack.seqs.first for ack in acks] == list(range(1, 9))

    with opened("/wal/s", files=files, queue_bytes_max=240_000) as log:
        asyncio.run(run(log))
        assert log.stats().queued_bytes == 0
    assert column(StreamReader("/wal/s", files=files), "id") == list(range(1, 9))


def test_tasks_and_threads_that_wait_for_room_all_get_it(tmp_path: Path):
    done: list[int] = []

    async def caller(log: LogWriter, who: int) -> None:
        for n in range(15):
            ack = await log.append_async(small(who, text="z" * (10_000 * (1 + (who + n) % 7))), deadline_s=DEADLINE_S)
            done.append(ack.seqs.first)

    async def callers(log: LogWriter) -> None:
        await asyncio.gather(*(caller(log, who) for who in range(30)))

    def blocked(log: LogWriter, who: int) -> None:
        for n in range(15):
            answer = log.submit(small(who, text="z" * (14_000 * (1 + n % 5))), deadline_s=DEADLINE_S)
            done.append(answer.result(DEADLINE_S).seqs.first)

    with opened(tmp_path / "s", queue_bytes_max=100_000) as log:
        threads = [threading.Thread(target=asyncio.run, args=(callers(log),)) for _ in range(2)]
        threads += [threading.Thread(target=blocked, args=(log, who)) for who in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert sorted(done) == list(range(1, 2 * 30 * 15 + 8 * 15 + 1))


def test_whoever_was_let_in_and_does_not_come_leaves_the_room_to_the_next():
    files = HeldSyncs()

    async def run(log: LogWriter) -> None:
        first = await held(log, files)
        await queued(log, log.append_async(small(2, text="y" * 180_000)))
        large = asyncio.create_task(log.append_async(small(3, text="y" * 180_000)))
        behind = asyncio.create_task(log.append_async(small(4, text="y" * 180_000)))
        await asyncio.sleep(0)  # both wait for room, in this order
        files.may_sync.set()
        # The queued append is taken off, which admits `large`; `large` is cancelled before its task
        # runs.
        deadline = time.monotonic() + DEADLINE_S
        while log.stats().queued_bytes:
            assert time.monotonic() < deadline
        large.cancel()
        await asyncio.wait_for(behind, DEADLINE_S)
        assert first.done()
        assert large.cancelled()

    with opened("/wal/s", files=files, queue_bytes_max=240_000) as log:
        asyncio.run(run(log))
    assert column(StreamReader("/wal/s", files=files), "id") == [1, 2, 4]


def test_an_event_loop_that_ended_without_its_answers_holds_nobody_up():
    files = HeldSyncs()

    def left_behind(log: LogWriter) -> None:
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(log.append_async(small(n, text="y" * 40_000))) for n in (2, 3, 4)]
        loop.run_until_complete(asyncio.sleep(0))
        for task in tasks:
            task._log_destroy_pending = False  # the test leaves it pending on purpose
        loop.close()

    with opened("/wal/s", files=files, queue_bytes_max=140_000) as log:
        files.may_sync.clear()
        first = log.submit(small(1))
        assert files.waiting.wait(DEADLINE_S)
        left_behind(log)  # two in the queue, one that waits for room
        files.may_sync.set()
        assert first.result(60).seqs.first == 1
        assert asyncio.run(log.append_async(small(5), deadline_s=10)).seqs.first == 4
    assert column(StreamReader("/wal/s", files=files), "id") == [1, 2, 3, 5]


def test_a_task_may_append_whatever_the_writer_takes():
    async def run(log: LogWriter) -> None:
        outcomes = await asyncio.gather(
            log.append_async(one(1)),
            log.append_async(plain_spilled(2, [[(TABLE, 2, "a")]] * 3)),
            log.append_async(small(3)),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [Ack, Ack, Ack]

    files = HeldSyncs()
    with opened("/wal/s", files=files) as log:
        asyncio.run(run(log))
        with pytest.raises(AssertionError, match="aren't this writer's"):
            asyncio.run(log.append_async(small(1, shard=7)))
    assert column(StreamReader("/wal/s", files=files), "id") == [0, *range(6), 3]
