"""Spark's rows in a stream: each once and unchanged to the last digit, through kills, replays and retries."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t
from tests.app.homes import make_home, wait_for
from tests.app.served import serving

import millstream
from millstream.errors import UsageError
from millstream.spark.log_sink import MillstreamStreamWriter, MillstreamWriter, SinkOptions, check_type
from millstream.spark.staged_rows import forget_abandoned, parts_of, stage
from millstream.testing.errors import coded

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n'


@pytest.fixture
def web(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", WEB)


def records(home: Path, table: str) -> list[dict[str, Any]]:
    with millstream.open(home) as opened:
        return [row for batch in opened.read("web", table=table) for row in batch.to_pylist()]


def operations(home: Path, table: str) -> int:
    """Count the operations that brought the rows, by their commit times."""
    return len({row["__commit_ts"] for row in records(home, table)})


def write(frame: DataFrame, **options: str) -> None:
    frame.write.format("millstream").options(**{"stream": "web", **options}).mode("append").save()


EVERY_TYPE = t.StructType(
    [
        t.StructField("yes", t.BooleanType()),
        t.StructField("tiny", t.ByteType()),
        t.StructField("small", t.ShortType()),
        t.StructField("int", t.IntegerType()),
        t.StructField("long", t.LongType()),
        t.StructField("real", t.FloatType()),
        t.StructField("double", t.DoubleType()),
        t.StructField("exact", t.DecimalType(38, 9)),
        t.StructField("text", t.StringType()),
        t.StructField("bytes", t.BinaryType()),
        t.StructField("day", t.DateType()),
        t.StructField("moment", t.TimestampType()),
        t.StructField("wall", t.TimestampNTZType()),
        t.StructField("list", t.ArrayType(t.DecimalType(5, 2))),
        t.StructField("nested", t.StructType([t.StructField("a", t.LongType()), t.StructField("b", t.StringType())])),
    ]
)
MOMENT = dt.datetime(2026, 3, 1, 12, 30, 0, 123456, tzinfo=dt.UTC)
VALUES = {
    "yes": True,
    "tiny": -128,
    "small": 32767,
    "int": -(2**31),
    "long": 2**63 - 1,
    "real": 0.5,
    "double": 0.1,
    "exact": Decimal("12345678901234567890123456789.123456789"),
    "text": "ü\u0001",
    "bytes": b"\x00\xff",
    "day": dt.date(1, 1, 1),
    "moment": MOMENT,
    "wall": MOMENT.replace(year=9999, tzinfo=None),
    "list": [Decimal("1.50"), None],
    "nested": {"a": 1, "b": "x"},
}


def test_values_are_the_same_to_the_last_digit(spark: SparkSession, web: Path) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        for number, zone in enumerate(("UTC", "America/St_Johns")):
            spark.conf.set("spark.sql.session.timeZone", zone)
            frame = spark.createDataFrame([tuple(VALUES.values()), (None,) * len(VALUES)], EVERY_TYPE)
            write(frame.coalesce(1), path=str(web), table=f"t{number}")
            first, second = records(web, f"t{number}")
            assert {name: first[name] for name in VALUES} == VALUES | {"nested": '{"a":1,"b":"x"}'}
            assert {name: second[name] for name in VALUES} == dict.fromkeys(VALUES)
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))


@pytest.mark.parametrize(
    ("sql", "column"),
    [
        ("map('a', 1)", "x"),
        ("interval '1' day", "x"),
        ("array(map(1, 2))", "x.element"),
        ("named_struct('m', map(1, 2))", "x.m"),
    ],
)
def test_a_type_that_the_log_lacks_is_refused_by_name(spark: SparkSession, web: Path, sql: str, column: str) -> None:
    with pytest.raises(UsageError, match=column):
        check_type("x", spark.sql(f"select {sql} as x").schema["x"].dataType)
    with pytest.raises(PySparkException, match=f"column {column} is "):
        write(spark.sql(f"select {sql} as x"), path=str(web), table="t")
    assert not (web / "data" / "wal").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"stream": "web", "table": "t"},
        {"path": "x", "url": "http://127.0.0.1", "stream": "web", "table": "t"},
        {"path": "x", "stream": "web"},
        {"path": "x", "table": "t"},
        {"path": "x", "stream": "web", "table": "t", "on_clash": "both"},
        {"path": "x", "stream": "web", "table": "t", "deadline_s": "soon"},
        {"path": "x", "stream": "web", "table": "t", "tabel": "t"},
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        SinkOptions.parse(options)


@pytest.mark.parametrize("writer", [MillstreamWriter, MillstreamStreamWriter])
def test_a_url_without_the_client_is_refused_when_the_query_starts(
    writer: type[MillstreamWriter | MillstreamStreamWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SinkOptions.parse({"url": "http://127.0.0.1:1", "stream": "web", "table": "t"})
    schema = t.StructType([t.StructField("id", t.LongType())])
    writer(options, schema, overwrite=False)
    monkeypatch.delitem(sys.modules, "millstream.client.remote_home")
    monkeypatch.delitem(vars(millstream), "connect")
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UsageError, check=coded("missing_extra")) as refused:
        writer(options, schema, overwrite=False)
    assert "httpx" in refused.value.message
    assert "millstream[client]" in refused.value.hint


def test_a_token_is_no_part_of_what_is_shown() -> None:
    options = SinkOptions.parse({"url": "http://a", "stream": "web", "table": "t", "token": "mst_secret"})
    assert options.token == "mst_secret"
    assert "secret" not in repr(options)


def test_what_others_keep_in_a_shared_folder_stays(tmp_path: Path) -> None:
    """`staging` is a folder that executors share; the first query deleted files in it older than a day."""
    for name in ("others", "a" * 32, "b" * 32, "c" * 32):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.arrow").write_bytes(b"")
    (tmp_path / ("b" * 32) / "thesis.odt").write_bytes(b"")
    (tmp_path / ("d" * 32)).symlink_to(tmp_path / "others")
    for name in ("others", "a" * 32, "b" * 32):
        os.utime(tmp_path / name, (1, 1))
    forget_abandoned(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["b" * 32 + "/thesis.odt", "c" * 32 + "/rows.arrow", "others/rows.arrow"]
    assert not (tmp_path / ("a" * 32)).exists()


@pytest.mark.long
def test_a_job_is_appended_whole_here_and_through_a_server(spark: SparkSession, web: Path, tmp_path: Path) -> None:
    frame = spark.range(0, 10_000, 1, 8).selectExpr("id", "concat('n', id) as name")
    write(frame, path=str(web), table="here")
    with serving(web) as url:
        write(frame, url=url, table="there")
        write(frame, url=url, table="shared", staging=str(tmp_path / "staging"))
    for table in ("here", "there", "shared"):
        rows = records(web, table)
        assert sorted((row["id"], row["name"]) for row in rows) == sorted((n, f"n{n}") for n in range(10_000))
        assert operations(web, table) == 1
    for folder in (web / "data" / "staged", tmp_path / "staging"):
        assert [file for file in folder.rglob("*") if file.is_file()] == []
    write(spark.range(0).selectExpr("id"), path=str(web), table="none")
    with pytest.raises(PySparkException, match="can't be written over"):
        frame.write.format("millstream").options(path=str(web), stream="web", table="here").mode("overwrite").save()


@pytest.mark.long
def test_tasks_that_fail_and_are_tried_again_double_nothing(spark: SparkSession, web: Path, tmp_path: Path) -> None:
    def sometimes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            witness = tmp_path / f"failed-{batch.column(0)[0].as_py()}"
            if batch.num_rows and batch.column(0)[0].as_py() % 2 == 0 and not witness.exists():
                witness.touch()
                raise RuntimeError("this task fails once")

    frame = spark.range(0, 1000, 1, 4).mapInArrow(sometimes, "id long")
    tries = 0
    while True:
        tries += 1
        try:
            write(frame, path=str(web), table="t", idempotency_id="nightly 7")
            break
        except PySparkException:
            assert tries < 10
    assert tries > 1 or list(tmp_path.glob("failed-*"))
    # And the whole job once more, divided differently.
    write(
        spark.range(0, 1000, 1, 3).orderBy("id", ascending=False), path=str(web), table="t", idempotency_id="nightly 7"
    )
    assert sorted(row["id"] for row in records(web, "t")) == list(range(1000))
    with pytest.raises(PySparkException, match="was another write's"):
        write(spark.range(0, 1001), path=str(web), table="t", idempotency_id="nightly 7")
    assert len(records(web, "t")) == 1000


def stream_of(spark: SparkSession, source: Path, checkpoint: Path, parts: int, **options: str) -> None:
    """Take everything that the source has, a few files a batch."""
    frame = spark.readStream.schema("id long, name string").option("maxFilesPerTrigger", 2).parquet(str(source))
    query = (
        frame.repartition(parts)
        .writeStream.format("millstream")
        .options(**{"stream": "web", "table": "t", **options})
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def source_files(spark: SparkSession, folder: Path, count: int) -> None:
    for number in range(count):
        fresh = spark.range(number * 1000, (number + 1) * 1000, 1, 1).selectExpr("id", "concat('n', id) as name")
        fresh.coalesce(1).write.mode("append").parquet(str(folder))


def replay_last_batch(checkpoint: Path) -> None:
    """Leave the checkpoint as a kill between the sink's commit and Spark's own note does."""
    last = max(int(file.name) for file in (checkpoint / "commits").iterdir() if file.name.isdecimal())
    for name in (str(last), f".{last}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.siege
def test_a_batch_that_spark_runs_again_is_there_once(
    spark: SparkSession, web: Path, tmp_path: Path, named: bool
) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    options = {"path": str(web)} | ({"idempotency_id": "of the shop"} if named else {})
    source_files(spark, source, 5)
    stream_of(spark, source, checkpoint, 4, **options)
    rows = records(web, "t")
    assert Counter(row["id"] for row in rows) == Counter(range(5000))
    assert operations(web, "t") == 3
    for parts in (1, 7):
        replay_last_batch(checkpoint)
        stream_of(spark, source, checkpoint, parts, **options)
        assert records(web, "t") == rows
    source_files(spark, source, 6)  # a thousand of them again, and more
    stream_of(spark, source, checkpoint, 2, **options)
    assert Counter(row["id"] for row in records(web, "t")) == Counter([*range(5000), *range(6000)])


@pytest.mark.long
def test_a_replay_that_comes_out_otherwise_leaves_what_is_there(spark: SparkSession, web: Path, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source_files(spark, source, 1)

    def run() -> None:
        frame = (
            spark.readStream.schema("id long, name string").parquet(str(source)).selectExpr("id", "uuid() as chance")
        )
        made = frame.writeStream.format("millstream").options(path=str(web), stream="web", table="t")
        made.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()

    run()
    rows = records(web, "t")
    replay_last_batch(checkpoint)
    run()
    assert records(web, "t") == rows
    assert len(rows) == 1000


@pytest.mark.siege
def test_a_batch_too_large_for_one_operation_is_there_once_too(spark: SparkSession, web: Path, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    wide = spark.range(0, 60_000, 1, 2).selectExpr("id % 59000 as id", "repeat(cast(id as string), 250) as name")
    wide.coalesce(2).write.parquet(str(source))
    stream_of(spark, source, checkpoint, 3, path=str(web))
    rows = records(web, "t")
    found = Counter((row["id"], row["name"]) for row in rows)
    assert found == Counter((n % 59000, str(n) * 250) for n in range(60_000))
    assert operations(web, "t") > 2
    replay_last_batch(checkpoint)
    stream_of(spark, source, checkpoint, 5, path=str(web))
    assert records(web, "t") == rows


def rows_of(count: int, seed: int) -> pa.Table:
    numbers = list(range(count))
    return pa.table(
        {
            "id": numbers,
            "f": [n / 7 * (-1) ** n for n in numbers],
            "text": [None if n % 5 == 0 else "x" * (n % (50 + seed)) for n in numbers],
            "list": [[n, None] * (n % 3) for n in numbers],
            "row": [None if n % 4 == 0 else {"a": n, "b": str(n)} for n in numbers],
        }
    )


@pytest.mark.parametrize("ordered", [False, True])
def test_parts_depend_on_the_rows_alone(tmp_path: Path, ordered: bool) -> None:
    import random

    table = rows_of(3000, 3)
    sizes: set[int] = set()
    cuts: list[list[list[dict[str, Any]]]] = []
    for part_bytes in (1 << 30, 20_000):
        cuts.clear()
        for seed in range(4):
            chance = random.Random(seed)
            order = list(range(table.num_rows))
            chance.shuffle(order)
            shuffled = table.take(pa.array(order))
            tasks, at = [], 0
            while at < table.num_rows:
                some = shuffled.slice(at, chance.randrange(1, 1500))
                at += some.num_rows
                batches = some.to_batches(max_chunksize=chance.randrange(1, 400))
                tasks.append(stage(iter(batches), table.schema, tmp_path / "x" if seed % 2 else None, "q"))
            sizes.add(sum(task.size for task in tasks))
            parts = list(parts_of(tasks, table.schema, ordered=ordered, part_bytes=part_bytes))
            assert sorted(map(repr, table.to_pylist())) == sorted(
                repr(row) for part in parts for row in part.to_pylist()
            )
            cuts.append([part.to_pylist() for part in parts])
            for task in tasks:
                task.drop()
        if ordered or part_bytes == 20_000:
            assert all(cut == cuts[0] for cut in cuts)
        assert (len(cuts[0]) > 1) == (part_bytes == 20_000)
    assert len(sizes) == 1
    assert list((tmp_path / "x").iterdir()) == []


DRIVER = """
import sys
from pathlib import Path
from tests.spark.test_sink import stream_of
from pyspark.sql import SparkSession
from millstream.spark.session import SparkOptions, open_context
open_context(SparkOptions(Path(sys.argv[1])))
spark = SparkSession.builder.getOrCreate()
stream_of(spark, Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[5]), path=sys.argv[4])
print("done", flush=True)
"""


@pytest.mark.parametrize("point", ["spark.sink.before_append", "spark.sink.appended"])
@pytest.mark.siege
def test_a_driver_that_is_killed_brings_each_row_once(
    spark: SparkSession, web: Path, tmp_path: Path, point: str
) -> None:
    source, checkpoint, witnesses = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "witnesses"
    witnesses.mkdir()
    source_files(spark, source, 4)
    environ = {**os.environ, "MILLSTREAM_FAILPOINTS": point, "MILLSTREAM_FAILPOINTS_DIR": str(witnesses)}
    (tmp_path / "spark").mkdir()
    command = [sys.executable, "-c", DRIVER, *map(str, (tmp_path / "spark", source, checkpoint, web, 3))]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ)
    try:
        # The appending process is killed there; then the driver itself, whatever it made of that.
        wait_for(lambda: (witnesses / point).exists() or driver.poll() is not None, seconds=600)
        driver.kill()
        output, _ = driver.communicate(timeout=300)
    finally:
        driver.kill()
        driver.wait()
    assert (witnesses / point).exists()
    assert not list((checkpoint / "commits").glob("[0-9]*"))
    assert "done" not in output
    if point == "spark.sink.appended":
        assert len(records(web, "t")) == 2000
    stream_of(spark, source, checkpoint, 2, path=str(web))
    assert Counter(row["id"] for row in records(web, "t")) == Counter(range(4000))
    assert operations(web, "t") == 2
