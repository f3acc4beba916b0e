from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millstream.catalog import Catalog
from millstream.errors import CorruptWal, OffsetBeyondEnd
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.positions import Offset
from millstream.model.record_json import to_json
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, PgType, ReplicaIdentity, TableKind, TableSchema
from millstream.wal.mending.inspect import ls
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat
from millstream.wal.writing.writer import LogWriter


def schema(number: int, name: str, *columns: Column, kind: TableKind = TableKind.TABLE, key: str = "id") -> TableSchema:
    return TableSchema(
        TableId(number), SchemaVersion(1), SourceId(1), "public", name, columns, (key,), (key,), ReplicaIdentity.DEFAULT, kind, 16384 + number
    )  # fmt: skip


def pg(oid: int, name: str) -> PgType:
    return PgType(oid, -1, name)


ORDERS = schema(
    1,
    "orders",
    Column("id", pa.int64(), pg(20, "bigint")),
    Column("total", pa.decimal128(12, 2), pg(1700, "numeric")),
    Column("ratio", pa.float64(), pg(701, "double precision")),
    Column("paid", pa.bool_(), pg(16, "boolean")),
    Column("note", pa.string(), pg(25, "text")),
)
ITEMS = schema(2, "Order Items", Column("id", pa.int32(), pg(23, "integer")))
MESSAGES = replace(
    schema(
        3,
        "_messages",
        Column("prefix", pa.string()),
        Column("content", pa.binary()),
        Column("transactional", pa.bool_()),
        kind=TableKind.MESSAGES,
    ),
    namespace="",
)
RAW = schema(4, "broken", Column("message", pa.binary()), kind=TableKind.RAW)


def operation(xid: int | None, lsn: int, kind: OperationKind = OperationKind.TRANSACTION) -> dict[str, Any]:
    return {
        "kind": int(kind), "source": 1, "commit_lsn": lsn, "commit_end_lsn": lsn + 8, "xid": xid, "commit_ts": 1_700_000_000_000_000
    }  # fmt: skip


def row(index: int, op: Op, operation: int = 0, **values: Any) -> dict[str, Any]:
    return {"__operation": operation, "__index": index, "__op": int(op), **values}


def ops(operations: list[dict[str, Any]], *tables: tuple[TableSchema, int, list[dict[str, Any]]]) -> WriteOps:
    return WriteOps(
        pa.RecordBatch.from_pylist(operations, schema=OPERATION_SCHEMA),
        tuple(
            TableRows(s, pa.RecordBatch.from_pylist(rows, schema=append_row_schema(s)), ShardId(shard))
            for s, shard, rows in tables
        ),
    )


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogWriter]:
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        with LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(0), ShardId(1)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        ) as writer:
            yield writer


def cat(folder: Path, **options: Any) -> list[dict[str, Any]]:
    lines = Cat("shop", StreamReader(str(folder / "wal")), **options).lines()
    return [json.loads(to_json(line)) for line in lines]


FIELDS = ["stream", "shard", "epoch", "offset", "seq", "op", "table", "source", "commit_lsn", "commit_index", "commit_ts", "xid", "row", "before", "unchanged", "exact"]  # fmt: skip


def test_a_line_holds_every_field_as_the_contract_says(log: LogWriter, tmp_path: Path) -> None:
    big = 2**53 + 1
    log.append(
        ops(
            [operation(7, 0x16B374D848)],
            (ORDERS, 0, [
                row(0, Op.CREATE, id=1, total=Decimal("1.50"), ratio=0.1, paid=True, note="é"),
                row(2, Op.UPDATE, id=2, total=None, ratio=float("inf"), paid=False, note=None, __unchanged=["note"],
                    __exact=[("total", "NaN")], __before=[("id", "1")]),
                row(3, Op.DELETE, id=big),
                row(4, Op.TRUNCATE),
            ]),
            (ITEMS, 0, [row(1, Op.CREATE, id=5)]),
        )
    )  # fmt: skip
    lines = cat(tmp_path)
    assert all(list(line) == FIELDS for line in lines)
    assert [line["commit_index"] for line in lines] == [0, 1, 2, 3, 4] == [line["offset"] for line in lines]
    assert {line["epoch"] for line in lines} == {segment.epoch for segment in ls(str(tmp_path / "wal"))} == {1}
    first, item, update, delete, truncate = lines
    assert first["row"] == {"id": 1, "total": "1.50", "ratio": 0.1, "paid": "t", "note": "é"}
    assert (first["commit_lsn"], first["op"], first["table"], first["xid"]) == ("16/B374D848", "c", "public.orders", 7)
    assert first["commit_ts"].startswith("2023-11-14T22:13:20")
    assert (first["before"], first["unchanged"], first["exact"]) == (None, [], {})
    assert item["table"] == 'public."Order Items"'
    assert update["row"] == {"id": 2, "total": "NaN", "ratio": "Infinity", "paid": "f"}
    assert (update["unchanged"], update["exact"], update["before"]) == (["note"], {"total": "NaN"}, {"id": 1})
    assert (delete["row"], delete["before"]) == ({"id": str(big)}, None)
    assert (truncate["op"], truncate["row"]) == ("t", None)


def test_records_of_a_partitioned_table_name_their_leaf_partition(log: LogWriter, tmp_path: Path) -> None:
    own = (Column("id", pa.int64(), pg(20, "bigint")), Column("partition", pa.string(), pg(25, "text")))
    parts = replace(schema(5, "parts", *own), partitioned=True)
    log.append(
        ops([operation(7, 16)], (parts, 0, [
            row(0, Op.CREATE, id=1, partition="mine", __partition_oid=16_500),
            row(1, Op.CREATE, id=2),
            row(2, Op.PARTITION_LEFT, __partition_oid=4_000_000_000, __before=[("partition", 'public."Leaf 1"')]),
        ]), (ITEMS, 0, [row(3, Op.CREATE, id=5)]))
    )  # fmt: skip
    first, unknown, left, item = cat(tmp_path)
    assert [list(line) for line in (first, unknown, left)] == [[*FIELDS, "partition_oid"]] * 3
    assert list(item) == FIELDS
    assert (first["row"], first["partition_oid"]) == ({"id": 1, "partition": "mine"}, 16_500)
    assert unknown["partition_oid"] is None
    assert (left["op"], left["before"], left["partition_oid"]) == ("x", None, 4_000_000_000)
    assert left["row"] == {"partition": 'public."Leaf 1"', "oid": 4_000_000_000}


def test_as_text_every_value_is_what_postgresql_prints(log: LogWriter, tmp_path: Path) -> None:
    log.append(
        ops([operation(7, 16)], (ORDERS, 0, [
            row(0, Op.UPDATE, id=1, total=Decimal("1.50"), ratio=1e21, paid=True, note=None, __before=[("id", "9")]),
        ]))
    )  # fmt: skip
    (line,) = cat(tmp_path, values="text")
    assert line["row"] == {"id": "1", "total": "1.50", "ratio": "1e+21", "paid": "t", "note": None}
    assert line["before"] == {"id": "9"}


def test_messages_and_raw_records_have_shapes_of_their_own(log: LogWriter, tmp_path: Path) -> None:
    log.append(
        ops(
            [operation(None, 8, OperationKind.MESSAGE)],
            (MESSAGES, 0, [row(0, Op.MESSAGE, prefix="p", content=b"hello", transactional=False)]),
        )
    )
    changes = [row(0, Op.CREATE, message=b"\x00I"), row(1, Op.DELETE, message=b"D"), row(2, Op.TRUNCATE, message=b"T")]
    log.append(ops([operation(8, 16)], (RAW, 0, changes)))
    message, raw, deletion, truncation = cat(tmp_path)
    assert (message["table"], message["op"], message["xid"]) == (None, "m", None)
    assert message["row"] == {"prefix": "p", "content": "hello", "transactional": False}
    assert (raw["op"], raw["table"], raw["row"]) == ("raw", "public.broken", {"message": "\\x0049"})
    assert [line["row"] for line in (deletion, truncation)] == [{"message": "\\x44"}, {"message": "\\x54"}]


def test_shards_are_merged_by_operation_and_a_transaction_by_index(log: LogWriter, tmp_path: Path) -> None:
    def orders(operation: int, *indexes: int) -> list[dict[str, Any]]:
        return [row(i, Op.CREATE, operation, id=i, paid=None, total=None, ratio=None, note=None) for i in indexes]

    def items(operation: int, *indexes: int) -> list[dict[str, Any]]:
        return [row(i, Op.CREATE, operation, id=i) for i in indexes]

    log.append(
        ops(
            [operation(1, 8), operation(2, 16), operation(3, 24)],
            (ORDERS, 0, [*orders(0, 1, 3), *orders(2, 0)]),
            (ITEMS, 1, [*items(0, 0, 2), *items(1, 0, 1)]),
        )
    )
    log.append(ops([operation(4, 32)], (ITEMS, 1, items(0, 0))))
    lines = cat(tmp_path)
    assert [(line["xid"], line["commit_index"]) for line in lines] == [
        (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (4, 0)
    ]  # fmt: skip
    assert {line["shard"] for line in lines if line["table"] == "public.orders"} == {0}
    only = cat(tmp_path, tables=frozenset({TableId(2)}))
    assert [(line["xid"], line["commit_index"]) for line in only] == [(1, 0), (1, 2), (2, 0), (2, 1), (4, 0)]
    behind = cat(tmp_path, from_offset=Offset(2))
    assert [(line["shard"], line["offset"]) for line in behind] == [(1, 2), (1, 3), (0, 2), (1, 4)]


def test_a_cat_goes_on_where_it_stopped(log: LogWriter, tmp_path: Path) -> None:
    def one(xid: int) -> WriteOps:
        return ops([operation(xid, xid * 8)], (ITEMS, 0, [row(0, Op.CREATE, id=xid)]))

    log.append(one(1))
    follower = Cat("shop", StreamReader(str(tmp_path / "wal")))
    assert [line["xid"] for line in follower.lines()] == [1]
    assert list(follower.lines()) == []
    assert not follower.is_behind()
    log.append(one(2))
    log.append(one(3))
    assert follower.is_behind()
    assert [line["xid"] for line in follower.lines()] == [2, 3]


def test_an_offset_beyond_the_end_is_an_error_and_the_end_itself_is_not(log: LogWriter, tmp_path: Path) -> None:
    log.append(ops([operation(1, 8)], (ITEMS, 0, [row(0, Op.CREATE, id=1)])))
    assert cat(tmp_path, from_offset=Offset(1)) == []
    with pytest.raises(OffsetBeyondEnd):
        cat(tmp_path, from_offset=Offset(2))


def test_all_that_lies_before_damage_is_given_before_the_error(log: LogWriter, tmp_path: Path) -> None:
    for xid in (1, 2, 3):
        log.append(ops([operation(xid, xid * 8)], (ITEMS, 0, [row(0, Op.CREATE, id=xid)])))
    segment = next((tmp_path / "wal" / "00000").glob("*.wal"))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 0xFF  # in the last frame's rows
    segment.write_bytes(bytes(data))
    lines = Cat("shop", StreamReader(str(tmp_path / "wal"))).lines()
    given = [next(lines)["xid"], next(lines)["xid"]]
    with pytest.raises(CorruptWal):
        next(lines)
    assert given == [1, 2]
