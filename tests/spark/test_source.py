"""The data source against the log itself: the same records, between the same bounds, however Spark reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.spark.hand_made import Change, Home, delete, insert, update

from millstream.errors import (
    EngineError,
    MillstreamError,
    OffsetExpired,
    TokenFromFuture,
    UnknownStream,
    UnknownTable,
    UsageError,
)
from millstream.model.ids import SchemaVersion
from millstream.model.positions import Seq, StreamToken
from millstream.model.records import Op
from millstream.model.schema import Column, TableKind, TableSchema
from millstream.spark.log_source import MillstreamSource, MillstreamStreamReader, SourceOptions, position_of
from millstream.testing.errors import coded
from millstream.wal.reader import StreamReader


def orders_of(home: Home) -> TableSchema:
    return home.table("public.orders", id=pa.int64(), total=pa.decimal128(12, 2), note=pa.string())


def some_transactions(orders: TableSchema, items: TableSchema, first: int, count: int) -> list[list[Change]]:
    return [
        [
            insert(orders, id=number, total=None, note=f"order {number}"),
            insert(items, id=number * 10, order=number),
            insert(items, id=number * 10 + 1, order=number),
        ]
        for number in range(first, first + count)
    ]


def items_of(home: Home) -> TableSchema:
    return home.table("public.items", id=pa.int64(), order=pa.int64())


def in_log(home: Home, schema: TableSchema, after: int = 0, upto: int | None = None) -> list[dict[str, Any]]:
    """Return the table's records as the log's own reader returns them."""
    log = home.log
    pieces = log.read_between(Seq(after), log.persisted_upto() if upto is None else Seq(upto), table=schema.table_id)
    return [row for piece in pieces for row in piece.batch.to_pylist()]


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows as Arrow has them: maps as pairs, times with their zone."""
    rows: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return sorted(rows, key=lambda row: row["__seq"])


def load(spark: SparkSession, home: Home, **options: str) -> DataFrame:
    return spark.read.format("millstream").options(path=str(home.path), stream="shop", **options).load()


def test_a_batch_read_gives_the_records_of_the_log(spark: SparkSession, home: Home) -> None:
    orders, items = orders_of(home), items_of(home)
    home.commits(some_transactions(orders, items, 1, 50))
    home.commit(
        update(orders, id=1, note="changed"),
        delete(items, id=10),
        Change(orders, Op.UPDATE, {"id": 77}, before={"id": "7"}, unchanged=["note"]),
        Change(items, Op.TRUNCATE),
    )

    assert rows_of(load(spark, home, table="public.orders")) == in_log(home, orders)
    assert rows_of(load(spark, home, table="public.items")) == in_log(home, items)


def test_columns_are_pruned_and_tokens_bound_what_is_read(spark: SparkSession, home: Home) -> None:
    orders, items = orders_of(home), items_of(home)
    first = home.commits(some_transactions(orders, items, 1, 5))
    second = home.commits(some_transactions(orders, items, 6, 5))
    home.commits(some_transactions(orders, items, 11, 5))
    bounds = {
        "starting": str(StreamToken.scalar(home.stream, first)),
        "ending": str(StreamToken.scalar(home.stream, second)),
    }

    frame = load(spark, home, table="public.orders", columns="note,__seq", **bounds)

    assert frame.columns == ["note", "__seq"]
    expected = [{"note": row["note"], "__seq": row["__seq"]} for row in in_log(home, orders, first, second)]
    assert rows_of(frame) == expected
    assert len(expected) == 5
    # Inside the second transaction, and inside the last but one: only whole ones, whichever table is read.
    inside = {"starting": first + 4, "ending": second - 4}
    frame = load(
        spark, home, columns="__seq", **{k: str(StreamToken.scalar(home.stream, Seq(n))) for k, n in inside.items()}
    )
    assert [row["__seq"] for row in rows_of(frame)] == list(range(first + 4, second - 5))


def test_older_rows_come_in_the_columns_of_the_latest_schema(spark: SparkSession, home: Home) -> None:
    orders = orders_of(home)
    home.commit(insert(orders, id=1, note="old"))
    wider = home.add_column(orders, "paid", pa.bool_())
    home.commit(insert(wider, id=2, note="new", paid=True))

    rows = rows_of(load(spark, home, table="public.orders", columns="id,paid,__seq"))

    assert [(row["id"], row["paid"]) for row in rows] == [(1, None), (2, True)]


def test_a_renamed_column_is_the_same_column(spark: SparkSession, home: Home) -> None:
    plain = orders_of(home)
    orders = replace(plain, columns=tuple(replace(c, number=at) for at, c in enumerate(plain.columns, 1)))
    home.commit(insert(orders, id=1, note="old"))
    before = load(spark, home, table="public.orders", columns="id,note,__seq")
    columns = tuple(replace(c, name="remark" if c.name == "note" else c.name) for c in orders.columns)
    renamed = replace(orders, version=SchemaVersion(orders.version + 1), columns=columns)
    home.commit(insert(renamed, id=2, remark="new"))
    for frame in (before, load(spark, home, table="public.orders", columns="id,remark,__seq")):
        assert [[*row.values()][:2] for row in rows_of(frame)] == [[1, "old"], [2, "new"]]


def test_without_a_table_every_record_comes_as_an_envelope(spark: SparkSession, home: Home) -> None:
    orders, items = orders_of(home), items_of(home)
    home.commit(insert(orders, id=2**60, note='a "quoted" note'), insert(items, id=1, order=2))
    home.commit(Change(orders, Op.UPDATE, {"id": 1}, before={"id": "5"}, unchanged=["note", "total"]))

    rows = rows_of(load(spark, home))

    assert [row["table"] for row in rows] == ["public.orders", "public.items", "public.orders"]
    assert [json.loads(row["row"]) for row in rows] == [
        {"id": str(2**60), "total": None, "note": 'a "quoted" note'},
        {"id": 1, "order": 2},
        {"id": 1},
    ]
    assert rows[2]["__before"] == [("id", "5")]


def test_records_of_a_partitioned_table_name_their_partition_and_one_that_left(spark: SparkSession, home: Home) -> None:
    plain = orders_of(home)
    home.commit(insert(plain, id=0))
    assert "__partition_oid" not in load(spark, home).columns
    leafy = home._put(replace(home.table("public.leafy", id=pa.int64(), note=pa.string()), partitioned=True))
    first = Change(leafy, Op.CREATE, {"id": 1, "__partition_oid": 16_500})
    left = Change(leafy, Op.PARTITION_LEFT, {"__partition_oid": 16_500}, before={"partition": "public.leafy_1"})
    home.commit(first, left)

    table = rows_of(load(spark, home, table="public.leafy"))
    assert table == in_log(home, leafy)
    assert [(row["__op"], row["__partition_oid"], row["id"]) for row in table] == [
        ("c", 16_500, 1),
        ("x", 16_500, None),
    ]
    every = rows_of(load(spark, home))
    assert [(row["__op"], row["__partition_oid"]) for row in every] == [("c", None), ("c", 16_500), ("x", 16_500)]
    assert json.loads(every[2]["row"]) == {"partition": "public.leafy_1", "oid": 16_500}


def run_query(
    spark: SparkSession, home: Home, checkpoint: Path, seen: list[list[int]], **options: str
) -> StreamingQuery:
    """Run an AvailableNow query to its end; `seen` gets each batch's numbers."""

    def note(batch: DataFrame, _number: int) -> None:
        seen.append(sorted(row["__seq"] for row in batch.select("__seq").collect()))

    frame = spark.readStream.format("millstream").options(path=str(home.path), stream="shop", **options).load()
    query = (
        frame.writeStream.foreachBatch(note)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(600)
    return query


@pytest.mark.long
def test_available_now_reads_what_there_is_in_cuts_within_the_bound(
    spark: SparkSession, home: Home, tmp_path: Path
) -> None:
    orders, items = orders_of(home), items_of(home)
    for first in range(1, 13, 3):
        home.commits(some_transactions(orders, items, first, 3))  # 9 records a group
    seen: list[list[int]] = []
    run_query(spark, home, tmp_path / "notes", seen, max_rows_per_trigger="20")

    expected = sorted(row["__seq"] for schema in (orders, items) for row in in_log(home, schema))
    assert [number for batch in seen for number in batch] == expected
    assert [len(batch) for batch in seen] == [18, 18]


@pytest.mark.long
def test_a_query_goes_on_where_its_notes_end(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    orders, items = orders_of(home), items_of(home)
    home.commits(some_transactions(orders, items, 1, 3))
    seen: list[list[int]] = []
    run_query(spark, home, tmp_path / "notes", seen)
    first = len(seen)
    home.commits(some_transactions(orders, items, 4, 2))
    run_query(spark, home, tmp_path / "notes", seen)

    assert [len(batch) for batch in seen] == [9, 6]
    assert first == 1
    assert len({number for batch in seen for number in batch}) == 15


@pytest.mark.long
def test_a_batch_that_was_begun_is_replayed_with_its_own_bounds(
    spark: SparkSession, home: Home, tmp_path: Path
) -> None:
    orders, items = orders_of(home), items_of(home)
    notes = tmp_path / "notes"
    home.commits(some_transactions(orders, items, 1, 3))
    seen: list[list[int]] = []
    run_query(spark, home, notes, seen)
    home.commits(some_transactions(orders, items, 4, 3))
    run_query(spark, home, notes, seen)
    for name in ("1", ".1.crc"):
        (notes / "commits" / name).unlink(missing_ok=True)  # as a crash leaves it before the batch is noted as done
    home.commits(some_transactions(orders, items, 7, 1))
    run_query(spark, home, notes, seen)

    assert [len(batch) for batch in seen] == [9, 9, 9, 3]
    assert seen[2] == seen[1]


@pytest.mark.long
def test_notes_of_another_stream_are_refused(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    orders, items = orders_of(home), items_of(home)
    home.commits(some_transactions(orders, items, 1, 1))
    run_query(spark, home, tmp_path / "notes", [])
    other = Home(tmp_path / "other")
    try:
        other.commit(insert(items_of(other), id=1, order=1))
        with pytest.raises(Exception, match="checkpoint belongs to stream"):
            run_query(spark, other, tmp_path / "notes", [])
        with pytest.raises(EngineError, check=coded("checkpoint_foreign")):
            position_of({"stream": str(home.stream), "token": "0.s1"}, other.stream)
    finally:
        other.close()


@pytest.mark.long
def test_an_operation_larger_than_the_bound_comes_whole(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    items = items_of(home)
    home.commit(*(insert(items, id=number, order=0) for number in range(50)))
    home.commit(insert(items, id=99, order=0))
    seen: list[list[int]] = []
    run_query(spark, home, tmp_path / "notes", seen, max_rows_per_trigger="10")

    assert [len(batch) for batch in seen] == [50, 1]


@pytest.mark.long
def test_an_ending_stops_a_stream(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    items = items_of(home)
    upto = home.commit(insert(items, id=1, order=0))
    home.commit(insert(items, id=2, order=0))
    seen: list[list[int]] = []
    run_query(spark, home, tmp_path / "notes", seen, ending=str(StreamToken.scalar(home.stream, upto)))

    assert seen == [[upto]]


def test_an_empty_log_gives_no_rows(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    run_query(spark, home, tmp_path / "notes", seen)

    assert not any(seen)
    assert load(spark, home).collect() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"path": "/nowhere", "stream": "shop"}, UnknownStream),
        ({"stream": "shop"}, UsageError),
        ({"path": "s3://bucket/shop", "stream": "shop"}, UsageError),
        ({"path": "HOME", "stream": "shop", "colums": "id"}, UsageError),
        ({"path": "HOME", "stream": "shop", "max_rows_per_trigger": "0"}, UsageError),
        ({"path": "HOME", "stream": "shop", "max_bytes_per_trigger": "many"}, UsageError),
        ({"path": "HOME", "stream": ""}, UsageError),
        ({"path": "HOME", "stream": "../wal/shop"}, UsageError),
        ({"path": "file://host/HOME", "stream": "shop"}, UsageError),
    ],
)
def test_options_that_make_no_sense_are_refused(home: Home, options: dict[str, str], error: type[Exception]) -> None:
    given = {name: str(home.path) if value == "HOME" else value for name, value in options.items()}
    with pytest.raises(error):
        SourceOptions.parse(given)


@pytest.mark.parametrize("where", ["s3://bucket/shop", "grpc+tls://host:8788"])
def test_a_log_on_another_machine_is_read_by_a_follower_or_by_flight(where: str) -> None:
    with pytest.raises(UsageError, match="can't be read") as refused:
        SourceOptions.parse({"path": where, "stream": "shop"})
    assert "millstream follow" in refused.value.hint
    assert "`flight`" in refused.value.hint


@pytest.mark.parametrize("prefix", ["", "file:", "file://", "file://localhost"])
def test_the_only_stream_of_a_home_needs_no_name(home: Home, prefix: str) -> None:
    assert SourceOptions.parse({"PATH": f"{prefix}{home.path}"}).wal == home.wal


def read(home: Home, schema: StructType | None = None, **options: str) -> list[dict[str, Any]]:
    """Read as Spark does, without Spark; `schema` is one of the user's own."""
    source = MillstreamSource({"path": str(home.path), "stream": "shop", **options})
    reader = source.reader(source.schema() if schema is None else schema)
    batches = [batch for one in reader.partitions() for batch in reader.read(one)]
    return [row for batch in batches if isinstance(batch, pa.RecordBatch) for row in batch.to_pylist()]


def test_a_table_goes_by_the_rule_of_names(home: Home) -> None:
    home.commit(insert(items_of(home), id=1, order=1), insert(home.table("public.It.ems", id=pa.int64()), id=2))
    home.commit(insert(home.table("public.Items", id=pa.int64()), id=3))
    named = {"items": 1, "PUBLIC.Items": 1, 'public."Items"': 3, '"public.It".ems': 2}
    assert {name: [row["id"] for row in read(home, table=name)] for name in named} == {
        name: [number] for name, number in named.items()
    }
    for name in ("public.It.ems", "", 'public."Items'):
        with pytest.raises(UsageError, match="is not the name of a table"):
            read(home, table=name)


def test_a_table_without_records_has_its_columns_and_is_streamed_from_the_first_one(home: Home) -> None:
    orders, items = orders_of(home), items_of(home)
    home.commit(insert(orders, id=1))
    assert read(home, table="public.items") == []
    with pytest.raises(UnknownTable, match=r"has no table 'public\.nothing'"):
        read(home, table="public.nothing")

    options = {"path": str(home.path), "stream": "shop", "table": "public.items"}
    source = MillstreamSource(options)
    assert source.schema().names[-2:] == ["id", "order"]
    stream = source.streamReader(source.schema())
    assert isinstance(stream, MillstreamStreamReader)
    begin = stream.initialOffset()
    home.commit(insert(orders, id=2))
    end = stream.latestOffset(begin, ReadAllAvailable())
    assert [batch for part in stream.partitions(begin, end) for batch in stream.read(part)] == []
    home.commit(insert(items, id=7, order=1))
    begin, end = end, stream.latestOffset(end, ReadAllAvailable())
    batches = [batch for part in stream.partitions(begin, end) for batch in stream.read(part)]
    assert [row["id"] for batch in batches for row in batch.to_pylist()] == [7]


def test_a_log_that_has_lost_all_records_of_a_table_is_not_read_as_if_it_had_none(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    items_of(home)
    home.commit(insert(orders_of(home), id=1))
    monkeypatch.setattr(StreamReader, "first_seq", lambda _: Seq(9))  # as after retention
    with pytest.raises(OffsetExpired, match=r"has no records of public\.items"):
        read(home, table="public.items")
    assert read(home, table="public.items", starting="latest") == []


def test_a_column_that_is_none_or_comes_twice_is_refused(home: Home) -> None:
    orders = orders_of(home)
    home.commit(insert(orders, id=1, note="old"))
    own = StructType([StructField("note", StringType()), StructField("id", LongType())])
    assert read(home, own, table="public.orders") == [{"note": "old", "id": 1}]
    for schema in (own.add("notes", StringType()), StructType([StructField("table", StringType())])):
        with pytest.raises(UsageError, match="there is no column"):
            read(home, schema, table="public.orders")
    with pytest.raises(UsageError, match="there is no column 'note'"):
        read(home, StructType([StructField("note", StringType())]))
    for options in ({"columns": "id,__seq,id", "table": "public.orders"}, {"columns": "row,row"}):
        with pytest.raises(UsageError, match="is named twice"):
            read(home, **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"table": "public.nothing"}, UnknownTable),
        ({"table": "public.items", "columns": "id,nothing"}, UsageError),
        ({"ending": "LATER"}, TokenFromFuture),
    ],
)
def test_spark_tells_the_errors_of_the_source(
    spark: SparkSession, home: Home, options: dict[str, str], error: type[Exception]
) -> None:
    items = items_of(home)
    upto = home.commit(insert(items, id=1, order=0))
    later = str(StreamToken.scalar(home.stream, Seq(upto + 1000)))
    given = {name: later if value == "LATER" else value for name, value in options.items()}
    with pytest.raises(Exception, match=error.__name__):
        load(spark, home, **given).collect()


def test_a_table_that_is_named_is_read_up_to_records_that_were_not_decoded(home: Home) -> None:
    orders = orders_of(home)
    home.commit(insert(orders, id=1, total=None, note="a"))
    aside = home._put(
        replace(orders, columns=(Column("message", pa.binary()),), kind=TableKind.RAW, identity=(), key=())
    )
    start = home.log.persisted_upto()
    home.commit(Change(aside, Op.CREATE, {"message": b"I"}), insert(items_of(home), id=10, order=1))
    behind = home.log.persisted_upto()

    def notes(table: str | None, **bounds: int) -> list[str]:
        given = {name: str(StreamToken.scalar(home.stream, Seq(at))) for name, at in bounds.items()}
        source = MillstreamSource({"path": str(home.path), **({} if table is None else {"table": table}), **given})
        reader = source.reader(source.schema())
        batches = [batch for one in reader.partitions() for batch in reader.read(one)]
        rows = [row for batch in batches if isinstance(batch, pa.RecordBatch) for row in batch.to_pylist()]
        return [str(row.get("note")) for row in rows]

    def refused(table: str) -> dict[str, Any]:
        with pytest.raises(MillstreamError, check=coded("table_quarantined")) as raised:
            notes(table)
        return raised.value.details

    before, end = (str(StreamToken.scalar(home.stream, at)) for at in (start, behind))
    assert refused("public.orders") == {"table": "public.orders", "before": before, "behind": end}
    assert notes("public.orders", ending=start) == ["a"]
    home.commit(insert(replace(orders, version=SchemaVersion(aside.version + 1)), id=2, total=None, note="b"))
    assert refused("public.orders") == {"table": "public.orders", "before": before, "behind": end}
    assert notes("public.orders", starting=behind) == ["b"]
    assert len(notes(None)) == 3

    hidden = home.table("public.hidden", message=pa.binary())
    hidden = home._put(replace(hidden, kind=TableKind.RAW, identity=(), key=()))
    home.commit(Change(hidden, Op.CREATE, {"message": b"I"}))
    assert refused("public.hidden")["table"] == "public.hidden"
