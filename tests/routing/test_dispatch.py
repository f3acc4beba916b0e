"""One write to the log and to sinks at once: all of it, or what each of them said."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from tests.routing.rows import batch_of, ops_of, schema_of, shards

from millstream.buffers.memory import MemoryBuffer, MemoryServer
from millstream.errors import DiskFull, MillstreamError, Overloaded, PartialWrite, RowsTooLarge, WriterClosed
from millstream.model.buffers import ReadPause
from millstream.model.ids import ShardId
from millstream.model.operations import Ack, TableRows, WriteOps
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.routing.dispatch import Dispatcher
from millstream.routing.ring import ShardRouter
from millstream.routing.router import Router
from millstream.routing.rules import HashRing, Matcher, ShardConfig, SpecificTarget, Target
from millstream.routing.sinks import BufferSink

KEYED = schema_of({"id": pa.int64(), "n": pa.int64()}, key=("id",))


class Log:
    """What a log's writer says, of rows that it counts."""

    def __init__(self, failing: MillstreamError | None = None) -> None:
        self.failing = failing
        self.taken: list[WriteOps] = []

    def append(self, ops: Any, *, deadline_s: float | None = None) -> Ack:
        del deadline_s
        if self.failing is not None:
            raise self.failing
        assert all(table.sink is None for table in ops.tables)
        self.taken.append(ops)
        return Ack({ShardId(0): (Offset(0), Offset(ops.row_count))}, SeqRange(Seq(1), ops.row_count))

    async def append_async(self, ops: Any, *, deadline_s: float | None = None) -> Ack:
        return self.append(ops, deadline_s=deadline_s)

    def persisted_upto(self) -> Seq:
        return Seq(sum(ops.row_count for ops in self.taken))


class Sink:
    """Takes rows until it is told to fail."""

    def __init__(self) -> None:
        self.failing: MillstreamError | None = None
        self.rows: list[int] = []
        self.is_closed = False

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> Mapping[str, object]:
        del deadline_s
        if self.failing is not None:
            raise self.failing
        self.rows += [n for table in ops.tables for n in table.rows.column("n").to_pylist()]
        return {"rows": ops.row_count}

    def close(self) -> None:
        self.is_closed = True


def write(*entries: tuple[str | None, list[int]]) -> WriteOps:
    tables = [TableRows(KEYED, batch_of(KEYED, {"id": ns, "n": ns}), sink=sink) for sink, ns in entries]
    return ops_of(tables)


WAYS = [False, True]


def append(to: Dispatcher, ops: WriteOps, *, by_task: bool) -> Ack:
    if not by_task:
        return to.append(ops)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(to.append_async(ops))).result()


@pytest.mark.parametrize("by_task", WAYS)
def test_each_gets_its_part_and_the_answer_is_the_logs(by_task: bool) -> None:
    log, copies, audit = Log(), Sink(), Sink()
    to = Dispatcher(log, {"copies": copies, "audit": audit})
    ack = append(to, write((None, [1, 2]), ("copies", [2]), ("audit", [1, 2, 3])), by_task=by_task)
    assert (ack.seqs.count, copies.rows, audit.rows) == (2, [2], [1, 2, 3])
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
    log.failing = DiskFull("no space")
    with pytest.raises(PartialWrite) as other:
        append(to, write((None, [2]), ("copies", [2])), by_task=by_task)
    assert list(other.value.details["failed"]) == ["log"]
    assert copies.rows == [1, 2]


@pytest.mark.parametrize("by_task", WAYS)
def test_where_all_fail_nothing_is_partial(by_task: bool) -> None:
    log, audit = Log(DiskFull("no space")), Sink()
    audit.failing = Overloaded("too much at once")
    to = Dispatcher(log, {"audit": audit})
    with pytest.raises(DiskFull):
        append(to, write((None, [1]), ("audit", [1])), by_task=by_task)
    with pytest.raises(Overloaded):
        append(to, write(("audit", [1])), by_task=by_task)


@pytest.mark.parametrize("by_task", WAYS)
def test_a_sink_that_took_a_part_is_never_told_as_one_that_took_nothing(by_task: bool) -> None:
    """Of two requests in one call one is too large for the buffer: the error said that nothing was appended, and both were sent again."""
    buffer = MemoryBuffer(MemoryServer(), "copies", create_shards=1, op_bytes_max=10_000)
    to = Dispatcher(Log(), {"copies": BufferSink(buffer)})
    sizes = [1, 5_000]
    ns = [n for n, size in enumerate(sizes) for _ in range(size)]
    rows = batch_of(KEYED, {"id": ns, "n": list(range(len(ns)))}, ns)
    with pytest.raises(PartialWrite, match=r"copies \(in part\) took the write") as caught:
        append(to, ops_of([TableRows(KEYED, rows, sink="copies")], count=2), by_task=by_task)
    assert caught.value.details["failed"]["copies"]["code"] == "rows_too_large"
    assert caught.value.details["failed"]["copies"]["details"]["took"] == {"0": [0]}
    with pytest.raises(RowsTooLarge):
        append(
            to, ops_of([TableRows(KEYED, batch_of(KEYED, {"id": ns[1:], "n": ns[1:]}), sink="copies")]), by_task=by_task
        )
    to.close()


@pytest.mark.parametrize("by_task", WAYS)
def test_what_comes_after_the_end_is_told_that_nothing_of_it_was_taken(by_task: bool) -> None:
    """Who writes the home changes while applications append: those try again with the next one, and only where they hear this."""
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
    to = Dispatcher(log, {"copies": copies}, ignore_errors=frozenset({"copies"}))
    assert append(to, write((None, [1]), ("copies", [1])), by_task=by_task).seqs.count == 1
    assert append(to, write(("copies", [2])), by_task=by_task).seqs.count == 0
    assert dict(to.ignored) == {"copies": 2}
    # The log is no such sink.
    log.failing = DiskFull("no space")
    with pytest.raises(DiskFull):
        append(to, write((None, [1]), ("copies", [1])), by_task=by_task)


def test_a_buffer_gets_each_key_on_one_of_its_shards_in_order() -> None:
    rules = ShardConfig((SpecificTarget(Matcher.parse(".*"), Target.parse("ring", "copies")),), HashRing())
    router = Router(rules, shard_of_table=lambda _: None, ring=ShardRouter.ring(shards(2)))
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
