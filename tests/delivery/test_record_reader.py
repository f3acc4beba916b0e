"""A consumer reads its tables' records in commit order, and each of them has its group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.wal.test_records_json import ITEMS, MESSAGES, ORDERS, operation, ops, pg, row, schema

from millstream.catalog import Catalog
from millstream.delivery.definition import Definition
from millstream.delivery.records.groups import groups_of
from millstream.delivery.records.record_messages import Origin
from millstream.delivery.records.record_reader import ConsumerReader
from millstream.errors import CorruptWal
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.operations import OperationKind
from millstream.model.positions import Seq
from millstream.model.record_json import to_json
from millstream.model.records import Op, record_schema
from millstream.model.schema import Column, PgType, TableSchema
from millstream.protocol.delivery import Consumer, Limits, Message, State, seq_of
from millstream.wal.backlog import backlog_of_tables
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

NOTHING: dict[str, Any] = {"total": None, "ratio": None, "paid": None, "note": None}


@pytest.fixture(params=[1, 2], ids=["one shard", "two shards"])
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LogWriter]:
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        with LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(n) for n in range(request.param)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        ) as writer:
            yield writer


NOTES = schema(5, "notes", Column("id", pa.int64(), pg(20, "bigint")))


def fill_by_application(log: LogWriter) -> None:
    """Append operations without a transaction's number; on two shards their numbers interleave."""
    other = len(log.shards()) - 1
    for n in range(6):
        log.append(
            ops(
                [operation(None, 0x1000 + 16 * n, OperationKind.APPEND)],
                (ORDERS, 0, [row(0, Op.CREATE, id=n, **NOTHING | {"note": "new"})]),
                (ITEMS, other, [row(1, Op.CREATE, id=n), row(2, Op.CREATE, id=50 + n)]),
                (NOTES, 0, [row(3, Op.CREATE, id=n)]),
            )
        )


def fill(log: LogWriter, transactions: int = 6) -> None:
    """Append transactions that go from table to table and back, each followed by a message."""
    other = len(log.shards()) - 1
    for n in range(transactions):
        log.append(
            ops(
                [operation(n + 1, 0x1000 + 16 * n)],
                (ORDERS, 0, [
                    row(0, Op.CREATE, id=n, **NOTHING),
                    row(2, Op.UPDATE, id=n, **NOTHING | {"note": f"note {n}"}),
                    row(3, Op.UPDATE, id=100 + n, __before=[("id", str(n))], **NOTHING),
                    row(5, Op.DELETE, id=100 + n),
                ]),
                (ITEMS, other, [row(1, Op.CREATE, id=n), row(4, Op.CREATE, id=50 + n)]),
            )
        )  # fmt: skip
        log.append(
            ops(
                [operation(None, 0x1008 + 16 * n, OperationKind.MESSAGE)],
                (MESSAGES, 0, [row(0, Op.MESSAGE, prefix="p", content=b"c", transactional=False)]),
            )
        )


def reader_of(folder: Path, **fields: Any) -> ConsumerReader:
    return ConsumerReader("shop", StreamReader(str(folder / "wal")), Definition.parse({"name": "search"} | fields))


def read_all(reader: ConsumerReader, after: int = 0) -> tuple[list[Message], int]:
    messages: list[Message] = []
    upto = after
    while (step := reader.read(after)) is not None:
        messages += step.messages
        assert step.upto >= upto
        upto = step.upto
    return messages, upto


def cat(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(to_json(line)) for line in Cat("shop", StreamReader(str(folder / "wal"))).lines()]


def record(message: Message) -> dict[str, Any]:
    assert isinstance(message.origin, Origin)
    found: dict[str, Any] = json.loads(message.origin.record)
    return found


@pytest.mark.parametrize("append", [fill, fill_by_application])
def test_messages_are_the_records_of_the_log_in_its_order(
    log: LogWriter, tmp_path: Path, append: Callable[[LogWriter], None]
) -> None:
    append(log)
    messages, upto = read_all(reader_of(tmp_path))
    lines = cat(tmp_path)
    assert [record(message) for message in messages] == lines
    assert [m.id for m in messages] == [f"shop-{l['shard']}-{l['epoch']}-{l['offset']}" for l in lines]  # noqa: E741
    positions = [message.position for message in messages]
    assert positions == sorted(set(positions))
    assert upto == StreamReader(str(tmp_path / "wal")).persisted_upto()


@pytest.mark.sampled
@pytest.mark.parametrize("append", [fill, fill_by_application])
@pytest.mark.parametrize(
    "fields", [{}, {"tables": ["public.orders"]}, {"where": "note is not null"}, {"tables": ['public."Order Items"']}]
)
def test_reading_again_from_any_cursor_gives_the_same_positions(
    log: LogWriter, tmp_path: Path, append: Callable[[LogWriter], None], fields: dict[str, Any]
) -> None:
    append(log)
    messages, _ = read_all(reader_of(tmp_path, **fields))
    assert messages
    reader = StreamReader(str(tmp_path / "wal"))
    for message in messages:
        if len(reader.shards) == 1:  # else an earlier part of its transaction may lie on the other shard
            assert reader.whole_upto(message.before) == message.before  # type: ignore[arg-type]
        again, _ = read_all(reader_of(tmp_path, **fields), message.before)
        assert again[0].before == message.before
        assert [m.id for m in again] == [m.id for m in messages if m.position >= again[0].position]
        assert {m.id: m.position for m in again}.items() <= {m.id: m.position for m in messages}.items()
    ends = {seq_of(message.position) for message in messages}
    assert all(reader.whole_upto(message.before) < end for message, end in zip(messages, sorted(ends), strict=True))  # type: ignore[arg-type]


def test_the_end_of_what_was_read_repeats_nothing(log: LogWriter, tmp_path: Path) -> None:
    fill(log)
    reader = reader_of(tmp_path, tables=["public.orders"], where="id >= 2")
    messages, after = [], 0
    for _ in range(100):
        step = reader.read(after)
        if step is None:
            break
        messages += step.messages
        again, _ = read_all(reader_of(tmp_path, tables=["public.orders"], where="id >= 2"), step.upto)
        assert {m.id for m in again}.isdisjoint(m.id for m in messages if seq_of(m.position) <= step.upto)
    assert len({m.id for m in messages}) == len(messages) > 10


@pytest.mark.parametrize("fields", [{}, {"tables": ["public.orders"]}], ids=["all", "orders"])
def test_a_definition_is_no_message_and_no_lag(log: LogWriter, tmp_path: Path, fields: dict[str, Any]) -> None:
    """A renamed column ended `status` and the server's health while a consumer hadn't come past it."""
    fill(log, 2)
    renamed = row(0, Op.DEFINITION, __before=[("note", "remark")])
    log.append(ops([operation(None, 0x1800, OperationKind.APPEND)], (ORDERS.as_definition(), 0, [renamed])))
    log.append(ops([operation(9, 0x1900)], (ITEMS, 0, [row(0, Op.CREATE, id=900)])))
    reader = reader_of(tmp_path, **fields)
    log_reader = StreamReader(str(tmp_path / "wal"))
    after, upto = Seq(0), log_reader.persisted_upto()
    takes = reader.takes_of(after, upto)
    lag = backlog_of_tables(log_reader, after, upto, lambda table: takes(table.table_id, table.schema_version))
    messages, _ = read_all(reader_of(tmp_path, **fields))
    assert lag.records == len(messages) == (8 if fields else 15)


def test_the_newest_states_of_rows_have_the_default_of_a_later_column(log: LogWriter, tmp_path: Path) -> None:
    key = Column("id", pa.int64(), pg(20, "bigint"), number=1)
    grade = Column("grade", pa.int32(), pg(23, "integer"), number=2, filled="5")
    old = schema(5, "notes", key)
    new = replace(old, version=SchemaVersion(2), columns=(key, grade))
    log.append(ops([operation(1, 0x1000)], (old, 0, [row(0, Op.CREATE, id=1), row(1, Op.DELETE, id=2)])))
    changes, latest = reader_of(tmp_path), reader_of(tmp_path, kind="latest")
    assert [record(message)["row"] for message in read_all(latest)[0]] == [{"id": 1}, {"id": 2}]
    log.append(ops([operation(2, 0x1100)], (new, 0, [row(0, Op.CREATE, id=3, grade=None)])))
    sent = [{"id": 1}, {"id": 2}, {"id": 3, "grade": None}]
    assert [record(message)["row"] for message in read_all(changes)[0]] == sent
    latest.restart()
    assert [record(message)["row"] for message in read_all(latest)[0]] == [{"id": 1, "grade": 5}, *sent[1:]]


def test_the_newest_states_of_an_idle_tables_rows_have_the_default_of_a_definition(
    log: LogWriter, tmp_path: Path
) -> None:
    key = Column("id", pa.int64(), pg(20, "bigint"), number=1)
    grade = Column("grade", pa.int32(), pg(23, "integer"), number=2, filled="5")
    old = schema(5, "notes", key)
    new = replace(old, version=SchemaVersion(2), columns=(key, grade)).as_definition()
    log.append(ops([operation(1, 0x1000)], (old, 0, [row(0, Op.CREATE, id=1)])))
    log.append(ops([operation(2, 0x1100)], (new, 0, [row(0, Op.DEFINITION)])))
    messages, _ = read_all(reader_of(tmp_path, kind="latest"))
    assert [record(message)["row"] for message in messages] == [{"id": 1, "grade": 5}]


def test_a_condition_leaves_records_out(log: LogWriter, tmp_path: Path) -> None:
    fill(log)
    messages, _ = read_all(reader_of(tmp_path, where="note is not null"))
    ops_of = [(record(m)["table"], record(m)["op"]) for m in messages]
    # A delete lacks the column, so the condition can't be evaluated on it.
    assert set(ops_of) == {("public.orders", "u"), ("public.orders", "d")}
    assert len(messages) == 12


@pytest.mark.sampled
@pytest.mark.parametrize("where", [None, "note = 'note 33'"])
def test_many_frames_give_the_records_of_the_log(log: LogWriter, tmp_path: Path, where: str | None) -> None:
    fill(log, 70)
    messages, upto = read_all(reader_of(tmp_path, tables=["public.orders"], where=where))
    lines = [line for line in cat(tmp_path) if line["table"] == "public.orders"]
    if where is not None:
        lines = [line for line in lines if line["row"].get("note") == "note 33" or line["op"] == "d"]
        assert len(lines) == 71
    assert [record(message) for message in messages] == lines
    assert upto == StreamReader(str(tmp_path / "wal")).persisted_upto()


@pytest.mark.parametrize("kind", [OperationKind.TRANSACTION, OperationKind.APPEND])
@pytest.mark.parametrize("fields", [{}, {"tables": ["public.orders"]}])
def test_an_operation_in_several_frames_is_delivered_whole(
    tmp_path: Path, kind: OperationKind, fields: dict[str, Any]
) -> None:
    """Numbers go from table to table, so later frames have lower ones than earlier frames: their messages were lost."""
    rows = 400
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        with LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(0)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
            options=LogOptions(frame_bytes_max=16_000),
        ) as writer:
            for n in range(2):
                ids = range(n * rows, (n + 1) * rows)
                orders = [row(2 * i, Op.CREATE, id=id_, **NOTHING) for i, id_ in enumerate(ids)]
                items = [row(2 * i + 1, Op.CREATE, id=id_) for i, id_ in enumerate(ids)]
                xid = n + 1 if kind is OperationKind.TRANSACTION else None
                writer.append(ops([operation(xid, 0x1000 + n, kind)], (ORDERS, 0, orders), (ITEMS, 0, items)))
    log = StreamReader(str(tmp_path / "wal"))
    assert len(list(log.frames_between(Seq(0), log.persisted_upto()))) > 4
    machine = Consumer(Limits(), State.begin(0), run=1)
    reader, uptos, messages = reader_of(tmp_path, **fields), [0], list[Message]()
    while (step := reader.read(0)) is not None:
        machine.offer(step.messages, step.upto)
        messages += step.messages
        uptos.append(step.upto)
    assert [record(m) for m in messages] == [l for l in cat(tmp_path) if not fields or l["table"] == "public.orders"]  # noqa: E741
    assert machine.unsettled == len(messages)
    positions = [message.position for message in messages]
    assert positions == sorted(set(positions))
    ends = {0, 2 * rows, 4 * rows}
    assert {*uptos} == ends
    assert {message.before for message in messages} == {0, 2 * rows}
    again, _ = read_all(reader_of(tmp_path, **fields), 2 * rows)
    assert again == messages[len(messages) // 2 :]


def test_all_records_before_damage_are_read(tmp_path: Path) -> None:
    notes_table = replace(ORDERS, table_id=TableId(77), name="notes")
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        reservations = catalog.reservations(stream)
        with LogWriter.open(
            str(tmp_path / "wal"), stream=stream, shards=[ShardId(0)], epoch=epoch, reservations=reservations
        ) as writer:
            for n in range(5):
                orders, notes = ((0, [row(0, Op.CREATE, id=n, **NOTHING)]) for n in (n, 100 + n))
                writer.append(ops([operation(n + 1, 0x1000 + n)], (ORDERS, *orders), (notes_table, *notes)))
            log = StreamReader(str(tmp_path / "wal"))
            (span,) = log.spans(Seq(0), log.persisted_upto())
            with Path(span.path).open("r+b") as file:
                file.seek(span.byte_end - 1)
                last = file.read(1)
                file.seek(span.byte_end - 1)
                file.write(bytes((last[0] ^ 1,)))
            reader, found = reader_of(tmp_path, tables=["public.*"]), []
            is_damaged = False
            while not is_damaged:
                try:
                    step = reader.read(0)
                except CorruptWal:
                    is_damaged = True
                else:
                    assert step is not None
                    found += [record(message)["row"]["id"] for message in step.messages]
    assert found == [0, 100, 1, 101, 2, 102, 3, 103]  # of the damaged frame nothing, though only its second table is


def test_columns_are_chosen_and_renamed(log: LogWriter, tmp_path: Path) -> None:
    fill(log, 1)
    messages, _ = read_all(reader_of(tmp_path, tables=["public.orders"], columns=["note as text", "id as number"]))
    records = [record(message) for message in messages]
    assert records[1]["row"] == {"text": "note 0", "number": 0}
    assert (records[2]["before"], records[3]["row"]) == ({"number": 0}, {"number": 100})
    assert list(records[0]["row"]) == ["text", "number"]


def test_a_key_change_holds_both_groups(log: LogWriter, tmp_path: Path) -> None:
    fill(log, 1)
    messages, _ = read_all(reader_of(tmp_path, tables=["public.orders"]))
    assert [m.groups for m in messages] == [('[1,"0"]',), ('[1,"0"]',), ('[1,"100"]', '[1,"0"]'), ('[1,"100"]',)]
    assert [m.origin.group for m in messages] == ['[1,"0"]', '[1,"0"]', '[1,"100"]', '[1,"100"]']


def test_without_groups_each_message_is_its_own(log: LogWriter, tmp_path: Path) -> None:
    fill(log, 1)
    messages, _ = read_all(reader_of(tmp_path, tables=["public.orders"], group_by="none"))
    assert [m.groups for m in messages] == [()] * 4
    assert [m.origin.group for m in messages] == [m.id for m in messages]


def test_only_a_consumer_of_all_tables_gets_messages(log: LogWriter, tmp_path: Path) -> None:
    fill(log, 1)
    every, _ = read_all(reader_of(tmp_path))
    some, _ = read_all(reader_of(tmp_path, tables=["*.*"]))
    assert [record(m)["op"] for m in every if m.table is None] == ["m"]
    assert [m.origin.group for m in every if m.table is None] == [None]
    assert all(m.table is not None for m in some)


def test_a_truncate_is_a_barrier_and_passes_every_condition(log: LogWriter, tmp_path: Path) -> None:
    log.append(ops([operation(1, 0x1000)], (ORDERS, 0, [row(0, Op.CREATE, id=1, **NOTHING), row(1, Op.TRUNCATE)])))
    (message,), _ = read_all(reader_of(tmp_path, where="id = 2"))
    assert (message.barrier, message.groups, message.origin.group, message.table) == (True, (), None, 1)


@pytest.mark.parametrize("fields", [{}, {"kind": "latest"}])
def test_a_partition_that_left_is_a_barrier_and_passes_every_condition_and_choice_of_columns(
    log: LogWriter, tmp_path: Path, fields: dict[str, Any]
) -> None:
    leafy = replace(ORDERS, partitioned=True)
    first = row(0, Op.CREATE, id=1, __partition_oid=16_500, **NOTHING)
    left = row(1, Op.PARTITION_LEFT, __partition_oid=16_500, __before=[("partition", "public.orders_1")])
    log.append(ops([operation(1, 0x1000)], (leafy, 0, [first, left])))
    reader = reader_of(tmp_path, tables=["public.orders"], where="id = 2", columns=["id as partition"], **fields)
    (message,), _ = read_all(reader)
    assert (message.barrier, message.groups, message.origin.group, message.table) == (True, (), None, 1)
    assert record(message) == cat(tmp_path)[1]
    assert record(message)["row"] == {"partition": "public.orders_1", "oid": 16_500}


def test_later_records_are_read_by_the_same_reader(log: LogWriter, tmp_path: Path) -> None:
    reader = reader_of(tmp_path, tables=["public.orders"])
    fill(log, 1)
    first, upto = read_all(reader)
    assert reader.read(upto) is None
    fill(log, 1)
    second, _ = read_all(reader, upto)
    assert len(first) == len(second) == 4
    assert second[0].position > first[-1].position


def test_groups_are_equal_if_and_only_if_table_and_key_are() -> None:
    columns = (
        Column("a", pa.string(), PgType(25, -1, "text")),
        Column("b", pa.string(), PgType(25, -1, "text")),
        Column("n", pa.string(), PgType(1700, -1, "numeric")),
    )
    keys = [
        ("a", "b,c", "1"), ("a,b", "c", "1"), ("a", None, "1"), ("a", "null", "1"), ('a","b', "c", "1"), ("", "", "1"),
        ("a", "b,c", "2"), ("x" * 500, "", "1"), ("x" * 501, "", "1"), ("a", "b,c", "10"), ("a", "b,c", "-1"),
    ]  # fmt: skip
    found = []
    for number in (1, 2, 11):
        names = tuple(column.name for column in columns)
        schema = TableSchema(
            TableId(number), SchemaVersion(1), SourceId(1), "public", f"t{number}", columns, names, names
        )
        found += [one_group(schema, dict(zip(names, key, strict=True))) for key in keys]
    assert len(set(found)) == 3 * len(keys)
    assert all(len(group) <= 200 for group in found)
    same = TableSchema(
        TableId(1), SchemaVersion(9), SourceId(1), "other", "renamed", columns, ("a", "b", "n"), ("a", "b", "n")
    )
    assert one_group(same, {"a": "a", "b": "b,c", "n": "1.00"}) == found[0]
    assert one_group(same, {"a": "a", "b": "b,c", "n": "10.0"}) == found[9]


def one_group(schema: TableSchema, values: dict[str, Any]) -> str:
    batch = pa.RecordBatch.from_pylist(
        [{"__op": "c", "__seq": 1, "__source": 1, **values}], schema=record_schema(schema)
    )
    ((group,),) = groups_of(schema, batch, "key", ["id"])
    return group


def test_a_table_without_a_key_is_one_group() -> None:
    schema = TableSchema(TableId(7), SchemaVersion(1), SourceId(0), "public", "e", (Column("id", pa.int64()),))
    assert one_group(schema, {"id": 1}) == one_group(schema, {"id": 2}) == "[7]"
