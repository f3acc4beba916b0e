"""Applications' appends into a buffer: each request is an item with its own answer, by threads and by tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.wal.plain_operations import MemoryReservations

from millstream.catalog import Catalog
from millstream.errors import (
    BufferOutcomeUnknown,
    InvalidValue,
    MillstreamError,
    Overloaded,
    RoutingError,
    WriteBufferError,
    WriterClosed,
)
from millstream.ingest.append_requests import sole_outcome
from millstream.ingest.appender import Appender
from millstream.ingest.schema_on_write import SchemaOnWrite, TableRules, WriteRules
from millstream.model.ids import Epoch, ShardId
from millstream.model.operations import FIRST_SHARD, Appended, TableRows
from millstream.model.writes import AppendBatch, TableBatch, WriteId
from millstream.testing.errors import coded
from millstream.testing.memory_buffer import BufferFailure, MemoryBuffer, MemoryServer, lost_answer
from millstream.testing.write_buffer import NORTH, SOUTH, next_op
from millstream.wal.writing.writer import LogWriter
from millstream.writers.write_buffers import BufferDestination

Append = Callable[[Appender, AppendBatch], list[Appended | MillstreamError]]


def by_thread(appender: Appender, batch: AppendBatch) -> list[Appended | MillstreamError]:
    return appender.append_batch(batch, deadline_s=10)


def by_task(appender: Appender, batch: AppendBatch) -> list[Appended | MillstreamError]:
    return asyncio.run(appender.append_batch_async(batch, deadline_s=10))


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def appender(tmp_path: Path, server: MemoryServer) -> Iterator[Appender]:
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        writer, _ = catalog.register_writer(stream)
        log = LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[FIRST_SHARD],
            epoch=Epoch(1),
            reservations=MemoryReservations(),
        )

        def place(schema: object, rows: pa.RecordBatch) -> tuple[TableRows, ...]:
            """Route rows of even ids to the northern shard."""
            even = pa.compute.equal(pa.compute.bit_wise_and(rows.column("id"), 1), 0)
            parts = ((NORTH, rows.filter(even)), (SOUTH, rows.filter(pa.compute.invert(even))))
            return tuple(TableRows(schema, part, shard) for shard, part in parts if part.num_rows)  # type: ignore[arg-type]

        rules = TableRules(
            rules_of=lambda *_: WriteRules(SchemaOnWrite.CREATE),
            place=place,
            check_place=place,
            home_shard=lambda _: ShardId(0),
        )
        buffer = MemoryBuffer(server, "orders", create_shards=2)
        to = BufferDestination(buffer, "orders")
        yield Appender(catalog, stream, to, writer=writer, rules=rules, buffer="orders")
        assert log.durable_offset(FIRST_SHARD) == 0
        log.close()


def batch(ids: list[int], counts: list[int]) -> AppendBatch:
    rows = pa.table({"id": pa.array(ids, pa.int64())})
    return AppendBatch.of_table(
        "clicks", rows, counts, [WriteId(session="s", number=n + 1) for n in range(len(counts))]
    )


@pytest.mark.parametrize("append", [by_thread, by_task])
def test_each_request_is_an_item_on_each_of_its_shards(
    appender: Appender, server: MemoryServer, append: Append
) -> None:
    outcomes = append(appender, batch([0, 2, 1, 3, 4, 5], [2, 1, 3]))
    assert all(isinstance(outcome, Appended) for outcome in outcomes)
    found = [outcome for outcome in outcomes if isinstance(outcome, Appended)]
    assert [dict(one.offsets) for one in found] == [{0: (0, 1)}, {1: (0, 1)}, {0: (1, 2), 1: (1, 2)}]
    assert [(one.buffer, one.row_count, int(one.seqs.first)) for one in found] == [
        ("orders", 2, 0),
        ("orders", 1, 0),
        ("orders", 3, 0),
    ]
    assert Appended.from_dict(found[2].as_dict()) == found[2]
    buffer = MemoryBuffer(server, "orders")
    for shard, wanted in ((NORTH, [[0, 2], [4]]), (SOUTH, [[1], [3, 5]])):
        reader = buffer.reader(shard)
        ops = [next_op(reader).op for _ in wanted]
        assert [op.tables[0].rows.column("id").to_pylist() for op in ops] == wanted
        assert reader.place == reader.end_offset()


@pytest.mark.parametrize("append", [by_thread, by_task])
def test_a_request_that_fails_leaves_the_others_alone_and_half_a_one_is_not_called_refused(
    appender: Appender, server: MemoryServer, append: Append
) -> None:
    server.fail_next(BufferFailure(Overloaded("full")))
    first, second = append(appender, batch([0, 2], [1, 1]))
    assert isinstance(first, Overloaded)
    assert isinstance(second, Appended)
    server.fail_next(lost_answer("orders", NORTH))
    (lost,) = append(appender, batch([4], [1]))
    assert isinstance(lost, BufferOutcomeUnknown)
    server.fail_next(BufferFailure(Overloaded("full")))  # of the northern part; the southern one is stored
    (half,) = append(appender, batch([6, 7], [2]))
    assert isinstance(half, BufferOutcomeUnknown)
    assert half.details["shards"] == {"0": "overloaded"}


def test_a_session_goes_on_in_a_buffer_only_where_its_number_is_said(appender: Appender) -> None:
    """The log lacks the session and reported number 1: buffer readers then skipped writes after a restart."""
    assert isinstance(append_of("s", 1, appender), Appended)
    with pytest.raises(WriteBufferError, check=coded("sessions_not_known")) as caught:
        appender.session("s")
    assert "next_number" in caught.value.hint


def append_of(session: str, number: int, appender: Appender) -> Appended | MillstreamError:
    rows = pa.table({"id": pa.array([number], pa.int64())})
    (outcome,) = by_thread(appender, AppendBatch.of_table("clicks", rows, [1], [WriteId(session, number)]))
    return outcome


@pytest.mark.parametrize("append", [by_thread, by_task])
def test_a_buffer_that_was_closed_is_told_as_a_log_that_was(appender: Appender, append: Append) -> None:
    """Each request got its own error, so callers kept the old appender and never looked for its successor."""
    assert isinstance(append(appender, batch([0], [1]))[0], Appended)
    appender._log._buffer.close()  # type: ignore[attr-defined]
    with pytest.raises(WriterClosed):
        append(appender, batch([2, 4], [1, 1]))


def test_rows_that_are_none_never_reach_the_buffer(appender: Appender, server: MemoryServer) -> None:
    rows = pa.table({"ID": pa.array([1], pa.int64())})
    appender.append_batch(batch([0], [1]), deadline_s=10)
    with pytest.raises(InvalidValue):
        sole_outcome(appender.append_batch(AppendBatch.of_request({"clicks": rows}), deadline_s=10))
    assert MemoryBuffer(server, "orders").reader(NORTH).end_offset() == 1


def test_tables_on_several_shards_of_a_buffer_are_not_one_operation(appender: Appender) -> None:
    """The buffer stores each shard's part alone, so that one may fail."""

    def several(*ids: int) -> AppendBatch:
        tables = [TableBatch(f"t{at}", pa.table({"id": [number]}), [1]) for at, number in enumerate(ids)]
        return AppendBatch(tables, [None])

    with pytest.raises(RoutingError) as refused:
        sole_outcome(appender.append_batch(several(0, 1), deadline_s=10))
    assert refused.value.code == "not_one_operation"
    appended = sole_outcome(appender.append_batch(several(0, 2), deadline_s=10))
    assert dict(appended.offsets) == {0: (0, 1)}
    assert [(part.first, part.rows) for part in appended.tables.values()] == [(0, 1), (0, 1)]
    with pytest.raises(RoutingError):
        sole_outcome(appender.append_batch(several(0, 1), deadline_s=10))
