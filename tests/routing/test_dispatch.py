"""One write to the log and to sinks at once: it is written everywhere, or each destination's outcome is reported."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import wait_for
from tests.routing.rows import batch_of, ops_of, schema_of, shards

from millstream.errors import (
    AppendOutcomeUnknown,
    DiskFull,
    MillstreamError,
    Overloaded,
    PartialWrite,
    Retry,
    WriterClosed,
)
from millstream.ingest.append_requests import operations_of
from millstream.model.buffered_operations import BufferMeta, ReadPause
from millstream.model.ids import ShardId
from millstream.model.operations import Ack, TableRows, WriteOps
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.replication import LOCAL, AckLevel
from millstream.model.writes import SessionFacts, WriteId
from millstream.ports import SinkOutcome
from millstream.routing import dispatch
from millstream.routing.dispatch import Deliveries, Dispatcher
from millstream.routing.router import Router
from millstream.routing.rules import HashRing, Matcher, RuleTarget, ShardConfig, SpecificTarget
from millstream.routing.shard_map import ShardMap
from millstream.routing.sinks import BufferSink
from millstream.testing.errors import code_of, coded
from millstream.testing.memory_buffer import MemoryBuffer, MemoryServer
from millstream.workers import Worker
from millstream.writers.write_buffers import BufferDestination

KEYED = schema_of({"id": pa.int64(), "n": pa.int64()}, key=("id",))


class Log:
    """A log's writer that counts rows and returns a prepared outcome."""

    def __init__(self, failing: MillstreamError | None = None) -> None:
        self.failing = failing
        self.taken: list[WriteOps] = []
        self.levels: list[AckLevel | None] = []

    def append(self, ops: Any, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        del deadline_s
        self.levels.append(acks)
        if self.failing is not None:
            raise self.failing
        assert all(table.sink is None for table in ops.tables)
        self.taken.append(ops)
        return Ack({ShardId(0): (Offset(0), Offset(ops.row_count))}, SeqRange(Seq(1), ops.row_count))

    async def append_async(self, ops: Any, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        return self.append(ops, deadline_s=deadline_s, acks=acks)

    def shown_upto(self) -> Seq:
        return Seq(sum(ops.row_count for ops in self.taken))

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        del deadline_s
        return SessionFacts(len(name))


class Sink:
    """A sink that takes rows, except certain ones, until it is told to fail."""

    def __init__(self) -> None:
        self.failing: MillstreamError | None = None
        self.bad: set[int] = set()
        """Rows whose operation it refuses."""
        self.rows: list[int] = []
        self.is_closed = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = 0

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> list[SinkOutcome]:
        del deadline_s
        self.asked += 1
        assert self.goes_on.wait(60)
        if self.failing is not None:
            raise self.failing
        outcomes: list[SinkOutcome] = []
        for op in ops.split():
            ns = [n for table in op.tables for n in table.rows.column("n").to_pylist()]
            assert ns
            if self.bad & set(ns):
                outcomes.append(Overloaded(f"not {ns}"))
            else:
                self.rows += ns
                outcomes.append({"rows": len(ns)})
        return outcomes

    def close(self) -> None:
        self.is_closed = True


def write(*entries: tuple[str | None, list[int]]) -> WriteOps:
    tables = [TableRows(KEYED, batch_of(KEYED, {"id": ns, "n": ns}), sink=sink) for sink, ns in entries]
    return ops_of(tables)


def group(
    *entries: tuple[str | None, dict[int, list[int]]],
    count: int,
    ids: Sequence[WriteId | None] | None = None,
    digests: Sequence[int] | None = None,
) -> WriteOps:
    """Make several operations in one call; for each destination, the rows of each operation, by number."""
    tables = []
    for sink, of_each in entries:
        ns = [n for own in of_each.values() for n in own]
        operations = [number for number, own in of_each.items() for _ in own]
        tables.append(TableRows(KEYED, batch_of(KEYED, {"id": ns, "n": ns}, operations), sink=sink))
    ops = ops_of(tables, count=count)
    if ids is None:
        return ops
    return replace(ops, operations=operations_of(ids, digests or [0] * count), is_keyed=True)


WAYS = [False, True]


def append(to: Dispatcher, ops: WriteOps, *, by_task: bool) -> Ack:
    if not by_task:
        return to.append(ops, acks=LOCAL)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(to.append_async(ops, acks=LOCAL))).result()


@pytest.mark.parametrize("by_task", WAYS)
def test_each_gets_its_part_and_the_answer_is_the_logs(by_task: bool) -> None:
    log, copies, audit = Log(), Sink(), Sink()
    to = Dispatcher(log, {"copies": copies, "audit": audit})
    ack = append(to, write((None, [1, 2]), ("copies", [2]), ("audit", [1, 2, 3])), by_task=by_task)
    assert (ack.seqs.count, copies.rows, audit.rows) == (2, [2], [1, 2, 3])
    assert log.levels == [LOCAL]
    assert append(to, write((None, [4])), by_task=by_task).seqs.count == 1
    nothing_here = append(to, write(("copies", [5])), by_task=by_task)
    assert (nothing_here.seqs.count, dict(nothing_here.offsets), len(log.taken)) == (0, {}, 2)
    to.close()
    assert copies.is_closed
    assert audit.is_closed


@pytest.mark.parametrize("by_task", WAYS)
def test_where_some_fail_it_is_said_what_each_did(by_task: bool) -> None:
    log, copies, audit = Log(), Sink(), Sink()
    audit.failing = Overloaded("too much at once")
    to = Dispatcher(log, {"copies": copies, "audit": audit})
    with pytest.raises(PartialWrite, match="audit: too much at once") as caught:
        append(to, write((None, [1]), ("copies", [1]), ("audit", [1])), by_task=by_task)
    said = caught.value.details
    assert said["succeeded"] == {"copies": {"rows": 1}, "log": {"first": 1, "rows": 1, "offsets": {"0": [0, 1]}}}
    assert {name: error["code"] for name, error in said["failed"].items()} == {"audit": "overloaded"}
    assert caught.value.retry is Retry.NEVER
    assert to.session("four").mark == 4
    to.close()


@pytest.mark.parametrize("by_task", WAYS)
def test_what_the_log_refuses_goes_nowhere(by_task: bool) -> None:
    """Sinks got rows in parallel with the log, and kept rows that the log had refused."""
    log, copies = Log(DiskFull("no space")), Sink()
    to = Dispatcher(log, {"copies": copies})
    with pytest.raises(DiskFull):
        append(to, write((None, [1]), ("copies", [1])), by_task=by_task)
    with pytest.raises(DiskFull):
        append(to, group((None, {0: [1], 1: [2]}), ("copies", {1: [2], 2: [3]}), count=3), by_task=by_task)
    assert copies.asked == 0
    to.close()


@pytest.mark.parametrize("by_task", WAYS)
def test_where_all_fail_nothing_is_partial(by_task: bool) -> None:
    log, audit = Log(), Sink()
    audit.failing = Overloaded("too much at once")
    to = Dispatcher(log, {"audit": audit})
    with pytest.raises(Overloaded):
        append(to, write(("audit", [1])), by_task=by_task)
    to.close()


@pytest.mark.parametrize("by_task", WAYS)
def test_of_a_group_those_alone_are_told_whose_rows_were_concerned(by_task: bool) -> None:
    """Requests travel together: if a sink refused one request's rows, all of them got a partial write."""
    log, copies, audit = Log(), Sink(), Sink()
    copies.bad, audit.failing = {4}, Overloaded("too much at once")
    to = Dispatcher(log, {"copies": copies, "audit": audit})
    ops = group(
        (None, {0: [1, 2], 1: [3], 2: [4], 4: [6]}),
        ("copies", {1: [3], 2: [4], 3: [5]}),
        ("audit", {4: [6], 5: [7]}),
        count=6,
    )
    ack = append(to, ops, by_task=by_task)
    alone, copied, half, beside, audited, lost = ack.each
    assert isinstance(alone, Ack)
    assert isinstance(copied, Ack)
    assert isinstance(beside, Ack)
    assert [(int(one.seqs.first), one.seqs.count) for one in (alone, copied)] == [(1, 2), (3, 1)]
    assert (beside.seqs.count, dict(beside.offsets)) == (0, {})
    assert isinstance(half, PartialWrite)
    assert half.details["succeeded"] == {"log": {"first": 4, "rows": 1, "offsets": {"0": [3, 4]}}}
    assert isinstance(audited, PartialWrite)
    assert list(audited.details["failed"]) == ["audit"]
    assert isinstance(lost, Overloaded)
    assert copies.rows == [3, 5]
    to.close()


@pytest.mark.parametrize("by_task", WAYS)
def test_a_write_that_is_sent_again_goes_to_those_sinks_that_lack_it(by_task: bool) -> None:
    log, copies, audit = Log(), Sink(), Sink()
    audit.failing = Overloaded("too much at once")
    to = Dispatcher(log, {"copies": copies, "audit": audit})
    ids = [WriteId("s", 1), WriteId(key="k"), None]

    def send() -> Ack:
        ops = group(("copies", {0: [1], 1: [2], 2: [3]}), ("audit", {1: [2]}), count=3, ids=ids)
        return append(to, ops, by_task=by_task)

    assert [isinstance(one, Ack) for one in send().each] == [True, False, True]
    audit.failing = None
    assert [isinstance(one, Ack) for one in send().each] == [True] * 3
    assert (copies.rows, audit.rows) == ([1, 2, 3, 3], [2])
    # Only the write without an id goes to its sink again; other rows under a known number are another write.
    send()
    assert (copies.rows, audit.rows) == ([1, 2, 3, 3, 3], [2])
    append(to, group(("copies", {0: [9]}), count=1, ids=[WriteId("s", 1)], digests=[77]), by_task=by_task)
    assert copies.rows[-1] == 9
    to.close()


def test_a_write_that_is_sent_again_while_it_is_on_its_way_is_given_once() -> None:
    log, copies = Log(), Sink()
    to = Dispatcher(log, {"copies": copies})
    copies.goes_on.clear()
    ops = group(("copies", {0: [1]}), count=1, ids=[WriteId(key="k")])
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(append, to, ops, by_task=by_task) for by_task in WAYS]
        wait_for(lambda: to._under_way == 2)
        copies.goes_on.set()
        assert [answer.result(60).seqs.count for answer in answers] == [0, 0]
    assert (copies.rows, copies.asked) == ([1], 1)
    to.close()


@pytest.mark.parametrize("why", ["thread", "sink"])
@pytest.mark.parametrize("by_task", WAYS)
def test_a_limit_of_the_system_is_told_as_one_of_the_sinks_that_did_not_take_the_write(
    by_task: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that nothing was done though the log had the rows, and a repeated write waited without end."""
    start = Worker.start

    def refused(worker: Worker) -> Worker:
        if worker.name == "routing-sink":
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    def limited(_: Sink, ops: WriteOps, *, deadline_s: float | None) -> list[SinkOutcome]:
        raise OSError(errno.EMFILE, f"no file for {ops.row_count} rows in {deadline_s} s")

    log, copies = Log(), Sink()
    to = Dispatcher(log, {"copies": copies})
    ops = group((None, {0: [1]}), ("copies", {0: [1]}), count=1, ids=[WriteId(key="k")])
    with monkeypatch.context() as patched:
        if why == "thread":
            patched.setattr(Worker, "start", refused)
        else:
            patched.setattr(Sink, "append", limited)
        with pytest.raises(PartialWrite) as caught:
            append(to, ops, by_task=by_task)
        with pytest.raises(MillstreamError, check=coded("system_limit")):
            append(to, write(("copies", [2])), by_task=by_task)
    said = caught.value.details
    assert (list(said["succeeded"]), said["failed"]["copies"]["code"]) == (["log"], "system_limit")
    assert copies.rows == []
    assert append(to, ops, by_task=by_task).seqs.count == 1
    assert copies.rows == [1]
    to.close()


def test_what_is_known_of_sinks_is_bounded() -> None:
    deliveries = Deliveries(writes_max=3)

    def is_new(number: int) -> bool:
        delivery = deliveries.begin("copies", (WriteId("s", number), 0))
        if delivery.is_new:
            deliveries.end(delivery, {})
        return delivery.is_new

    assert [is_new(number) for number in (1, 2, 3, 1, 4, 1, 2)] == [True, True, True, False, True, False, True]


def test_a_task_that_is_cancelled_leaves_no_sink_without_what_the_log_has() -> None:
    log, copies = Log(), Sink()
    to = Dispatcher(log, {"copies": copies})
    copies.goes_on.clear()

    async def cancelled() -> None:
        task = asyncio.create_task(to.append_async(write((None, [1]), ("copies", [1]))))
        await asyncio.to_thread(wait_for, lambda: copies.asked == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        copies.goes_on.set()
        await asyncio.to_thread(wait_for, lambda: not to._under_way)

    asyncio.run(cancelled())
    assert (log.taken[0].row_count, copies.rows) == (1, [1])
    to.close()


def test_an_event_loop_that_ends_takes_no_delivery_with_it() -> None:
    """Regression: its deliveries were cancelled, and the same writes, sent again, waited for them for ever."""
    log, copies = Log(), Sink()
    to = Dispatcher(log, {"copies": copies})
    copies.goes_on.clear()
    ops = group(("copies", {0: [1], 1: [2]}), count=2, ids=[WriteId(key="a"), WriteId(key="b")])

    async def ends_early() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(to.append_async(ops), 0.01)
        await asyncio.to_thread(wait_for, lambda: copies.asked == 1)

    asyncio.run(ends_early())
    copies.goes_on.set()
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(to.append, ops)
        with closing(to):
            assert [isinstance(one, Ack) for one in again.result(20).each] == [True, True]
    assert copies.rows == [1, 2]


def test_what_is_on_its_way_when_it_is_closed_is_answered() -> None:
    log, copies = Log(), Sink()
    to = Dispatcher(log, {"copies": copies})
    copies.goes_on.clear()
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(to.append, write((None, [1]), ("copies", [1])))
        wait_for(lambda: copies.asked == 1)
        closing = threads.submit(to.close)
        wait_for(lambda: to._closed)
        with pytest.raises(WriterClosed):
            to.append(write(("copies", [2])))
        copies.goes_on.set()
        assert answer.result(60).seqs.count == 1
        closing.result(60)
    assert (copies.rows, copies.is_closed) == ([1], True)


def test_every_sink_is_closed_though_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Worker) -> Worker:
        raise OSError(errno.EAGAIN, "no more threads can be started")

    copies, audit = Sink(), Sink()
    to = Dispatcher(Log(), {"copies": copies, "audit": audit})
    monkeypatch.setattr(Worker, "start", refused)
    to.close()
    assert (copies.is_closed, audit.is_closed) == (True, True)


@pytest.mark.parametrize("by_task", WAYS)
def test_a_sink_that_hangs_holds_up_no_end(by_task: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the stream, and of the process, waited for it, however long it took."""
    monkeypatch.setattr(dispatch, "_CLOSES_WITHIN_S", 0.2)
    monkeypatch.setattr(dispatch, "_THREADS_OF_A_SINK", 1)
    log, copies = Log(), Sink()
    to = Dispatcher(log, {"copies": copies})
    copies.goes_on.clear()
    close, copies.close = copies.close, lambda: (copies.goes_on.wait(60), close())  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as threads:
        begun = threads.submit(append, to, write(("copies", [1])), by_task=by_task)
        wait_for(lambda: copies.asked == 1)
        waits = threads.submit(append, to, write(("copies", [2])), by_task=by_task)
        partly = threads.submit(append, to, write((None, [3]), ("copies", [3])), by_task=by_task)
        wait_for(lambda: len(to._on_way) == 3)
        to.close()
        errors = [future.exception(60) for future in (begun, waits, partly)]
    assert [type(error) for error in errors] == [AppendOutcomeUnknown, WriterClosed, PartialWrite]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("routing-sink"))
    copies.goes_on.set()
    wait_for(lambda: copies.is_closed and copies.rows)
    wait_for(lambda: not any(thread.name.startswith("routing-sink") for thread in threading.enumerate()))
    assert copies.rows == [1], "what was refused isn't sent later"


def test_what_waits_for_a_slow_sink_is_refused_once_its_deadline_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that was away took a time limit for each write that waited, one after the other, and callers all of them."""
    monkeypatch.setattr(dispatch, "_THREADS_OF_A_SINK", 1)
    log, copies = Log(), Sink()
    to = Dispatcher(log, {"copies": copies})
    copies.goes_on.clear()
    with ThreadPoolExecutor(3) as threads:
        begun = threads.submit(to.append, write(("copies", [1])), deadline_s=60)
        wait_for(lambda: copies.asked == 1)
        late = threads.submit(to.append, write(("copies", [2])), deadline_s=0.1)
        partly = threads.submit(to.append, write((None, [3]), ("copies", [3])), deadline_s=0.1)
        wait_for(lambda: len(to._on_way) == 3)
        over_s = time.monotonic() + 0.1
        wait_for(lambda: time.monotonic() > over_s)
        copies.goes_on.set()
        errors = [future.exception(60) for future in (begun, late, partly)]
    assert [type(error) for error in errors] == [type(None), Overloaded, PartialWrite]
    assert (copies.asked, copies.rows) == (1, [1])
    to.close()


@pytest.mark.parametrize("by_task", WAYS)
def test_a_sink_that_took_a_part_is_never_told_as_one_that_took_nothing(by_task: bool) -> None:
    """If one of two requests in a call was too large for the buffer, the error said that nothing was appended.

    Both were then sent again.
    """
    buffer = MemoryBuffer(MemoryServer(), "copies", create_shards=1, op_bytes_max=10_000)
    to = Dispatcher(Log(), {"copies": BufferSink(buffer)})
    sizes = [1, 5_000]
    ns = [n for n, size in enumerate(sizes) for _ in range(size)]
    rows = batch_of(KEYED, {"id": ns, "n": list(range(len(ns)))}, ns)
    first, second = append(to, ops_of([TableRows(KEYED, rows, sink="copies")], count=2), by_task=by_task).each
    assert isinstance(first, Ack)
    assert code_of(second) == "rows_too_large"
    to.close()
    # With one operation on two shards, only the smaller part is stored.
    buffer = MemoryBuffer(MemoryServer(), "copies", create_shards=2, op_bytes_max=10_000)
    to = Dispatcher(Log(), {"copies": BufferSink(buffer)})
    keys = [*([1] * 5_000), *range(2, 40)]
    rows = batch_of(KEYED, {"id": keys, "n": keys})
    with pytest.raises(PartialWrite, match=r"copies \(in part\) took the write") as caught:
        append(to, ops_of([TableRows(KEYED, rows, sink="copies")]), by_task=by_task)
    said = caught.value.details["failed"]["copies"]
    assert (said["code"], list(said["details"]["took"].values())) == ("rows_too_large", [0])
    to.close()


@pytest.mark.parametrize("by_task", WAYS)
def test_what_comes_after_the_end_is_told_that_nothing_of_it_was_taken(by_task: bool) -> None:
    """When another process becomes the writer, appends retry there, but only if they get this error."""
    log, copies, audit = Log(), Sink(), Sink()
    to = Dispatcher(log, {"copies": copies, "audit": audit})
    to.close()
    with pytest.raises(WriterClosed):
        append(to, write((None, [1]), ("copies", [1]), ("audit", [1])), by_task=by_task)
    assert (log.taken, copies.rows, audit.rows) == ([], [], [])


@pytest.mark.parametrize("by_task", WAYS)
def test_a_sink_that_may_fail_fails_no_write_and_is_counted(by_task: bool) -> None:
    log, copies = Log(), Sink()
    copies.failing = Overloaded("too much at once")
    ignored: list[str] = []
    to = Dispatcher(log, {"copies": copies}, ignore_errors=frozenset({"copies"}), count_ignored=ignored.append)
    assert append(to, write((None, [1]), ("copies", [1])), by_task=by_task).seqs.count == 1
    assert append(to, write(("copies", [2])), by_task=by_task).seqs.count == 0
    assert ignored == ["copies", "copies"]
    # The log isn't such a sink.
    log.failing = DiskFull("no space")
    with pytest.raises(DiskFull):
        append(to, write((None, [1]), ("copies", [1])), by_task=by_task)


class FullBuffer(MemoryBuffer):
    """A buffer without room: a caller waits until its deadline."""

    def submit(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> Future[BufferMeta]:
        del shard, op
        threading.Event().wait(deadline_s)
        raise Overloaded("it has no room")


def test_operations_that_a_buffer_has_no_room_for_wait_until_one_deadline() -> None:
    """Each operation of a call waited for the whole of it, in turn."""
    buffer = FullBuffer(MemoryServer(), "copies", create_shards=1)
    ops = group(("copies", {n: [n] for n in range(30)}), count=30)
    began_s = time.monotonic()
    outcomes = BufferSink(buffer).append(ops, deadline_s=0.5)
    destination = BufferDestination(buffer, "copies")
    each = destination.append(group((None, {n: [n] for n in range(30)}), count=30), deadline_s=0.5).each
    assert [type(outcome) for outcome in (*outcomes, *each)] == [Overloaded] * 60
    assert time.monotonic() - began_s < 15


def test_a_buffer_gets_each_key_on_one_of_its_shards_in_order() -> None:
    rules = ShardConfig((SpecificTarget(Matcher.parse(".*"), RuleTarget.parse("ring", "copies")),), HashRing())
    router = Router(rules, shard_of_table=lambda _: None, ring=ShardMap.ring(shards(2)))
    server = MemoryServer()
    buffer = MemoryBuffer(server, "copies", create_shards=3)
    sink = BufferSink(buffer)
    to = Dispatcher(Log(), {"copies": sink})
    for n in range(0, 60, 6):
        rows = batch_of(KEYED, {"id": [k % 7 for k in range(n, n + 6)], "n": list(range(n, n + 6))}, [0, 0, 0, 1, 1, 1])
        to.append(ops_of(router.place(KEYED, rows), count=2))
    found: dict[int, list[int]] = {}
    shard_of: dict[int, ShardId] = {}
    operations = 0
    for shard in buffer.shards():
        reader = buffer.reader(shard)
        while not isinstance(item := reader.read(), ReadPause):
            operations += 1
            for table in item.op.tables:
                for row in table.rows.to_pylist():
                    assert shard_of.setdefault(row["id"], shard) == shard
                    found.setdefault(row["id"], []).append(row["n"])
    assert {key: [n for n in range(60) if n % 7 == key] for key in range(7)} == found
    assert len(set(shard_of.values())) > 1
    assert operations > 20
    to.close()
