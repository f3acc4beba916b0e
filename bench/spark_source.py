"""The Spark source compared with Spark's own Parquet stream, on the same rows, each to Spark's noop sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from bench.figures import Figure, asked, compared, measures, say
from bench.made_lakes import decimals
from bench.places import folder
from bench.spark_sessions import session
from bench.wal import ReservationsInMemory
from millstream.model.ids import Epoch, SchemaVersion, SourceId, StreamId, TableId
from millstream.model.operations import FIRST_SHARD, OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.records import INSTANT, Op, append_row_schema
from millstream.model.schema import Column, TableSchema
from millstream.spark.session import SparkOptions
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

SOURCE_ROWS = 5_000_000
TRANSACTION_ROWS = 10_000
_COLUMNS = (
    Column("id", pa.int64()),
    Column("customer", pa.int64()),
    Column("net", pa.decimal128(12, 2)),
    Column("gross", pa.decimal128(12, 2)),
    Column("placed_at", INSTANT),
    Column("paid_at", INSTANT),
    *(Column(name, pa.string()) for name in ("city", "street", "product", "note")),
)
ORDERS = TableSchema(TableId(1), SchemaVersion(1), SourceId(1), "public", "orders", _COLUMNS, ("id",), ("id",))
ROW_BYTES = 8 + 8 + 16 + 16 + 8 + 8 + 4 * 20
_BEGIN_US = 1_767_225_600_000_000
"""2026-01-01."""


@measures("spark_source_vs_parquet", "spark_source_records_vs_parquet")
def source_vs_parquet() -> Iterator[Figure]:
    """Run both as streams with an AvailableNow trigger, in one session."""
    rows = asked.rows or SOURCE_ROWS
    say(f"spark_source_vs_parquet: {rows:,} rows")
    with folder("spark-source") as path:
        write_log(path / "wal", rows)
        parts = _partitions(path / "wal")
        narrow, whole = path / "narrow", path / "whole"
        _write_parquet(path / "wal", (narrow, whole), rows, parts)
        # The settings of Millstream's own sessions (a compiler that starts fast and optimises little) are left out here.
        conf = {"spark.driver.extraJavaOptions": "-Xss4m", "spark.driver.memory": "2g"}
        with session(SparkOptions(path / "work", conf=conf)) as spark:
            # One file a task, as many as the log has spans.
            spark.conf.set("spark.sql.files.openCostInBytes", str(1 << 30))
            spark.conf.set("spark.sql.files.maxPartitionBytes", str(1 << 30))
            names = ",".join(column.name for column in _COLUMNS)
            for name, columns, files, said in (
                ("spark_source_vs_parquet", {"columns": names}, narrow, "the table's ten columns"),
                ("spark_source_records_vs_parquet", {}, whole, "all 21: the `__` columns of a record too"),
            ):
                yield compared(
                    name,
                    _timed(path, rows, partial(_log_stream, spark, path / "wal", columns)),
                    _timed(path, rows, partial(_parquet_stream, spark, files)),
                    unit="rows/s",
                    goal=">= 0.6" if name == "spark_source_vs_parquet" else "reported",
                    rows=rows,
                    size_bytes=rows * ROW_BYTES,
                    note=f"10 columns (2 int8, 2 numeric(12,2), 2 timestamptz, 4 texts of 20 B) in transactions of {TRANSACTION_ROWS:,} rows;"
                    f" {said}; a stream with trigger AvailableNow into the noop sink, from start() to its end, both in one session of"
                    f" local[*]; {parts} partitions each; the peer's files are zstd by pyarrow, decimals as integers, one a partition",
                )


def write_log(path: Path, rows: int) -> None:
    """Write a log of so many inserted rows, as capture would have written it."""
    writer = LogWriter.open(
        str(path),
        stream=StreamId(uuid4()),
        shards=[FIRST_SHARD],
        epoch=Epoch(1),
        reservations=ReservationsInMemory(),
    )
    with closing(writer):
        for first in range(0, rows, TRANSACTION_ROWS):
            writer.append(_transaction(first, min(TRANSACTION_ROWS, rows - first)))


def _transaction(first: int, count: int) -> WriteOps:
    schema = append_row_schema(ORDERS)
    n = np.arange(first, first + count, dtype=np.int64)
    random = np.random.default_rng(first)
    cents = random.integers(100, 10_000_000, count)
    values: dict[str, Any] = {
        "__operation": np.zeros(count, np.int32),
        "__index": np.arange(count, dtype=np.int64),
        "__op": np.full(count, int(Op.CREATE), np.uint8),
        "id": n,
        "customer": random.integers(1, 1_000_000, count),
        "net": decimals(cents),
        "gross": decimals(cents * 119 // 100),
        "placed_at": pa.array(_BEGIN_US + n * 1000).cast(INSTANT),
        "paid_at": pa.array(_BEGIN_US + n * 1000 + random.integers(0, 10**9, count)).cast(INSTANT),
        "city": _texts(random.integers(0, 5_000, count)),
        "street": _texts(random.integers(0, 100_000, count)),
        "product": _texts(random.integers(0, 1_000, count)),
        "note": _texts(random.integers(0, 2**62, count)),
    }
    arrays = [
        pa.array(values[field.name]).cast(field.type) if field.name in values else pa.nulls(count, field.type)
        for field in schema
    ]
    facts: dict[str, Any] = {
        "kind": int(OperationKind.TRANSACTION),
        "source": 1,
        "commit_lsn": 1_000_000 + first * 200,
        "commit_end_lsn": 1_000_000 + first * 200 + 8,
        "xid": 1000 + first // TRANSACTION_ROWS,
        "commit_ts": _BEGIN_US + first * 1000,
    }
    operation = pa.RecordBatch.from_arrays(
        [pa.array([facts.get(field.name)], field.type) for field in OPERATION_SCHEMA], schema=OPERATION_SCHEMA
    )
    return WriteOps(operation, (TableRows(ORDERS, pa.RecordBatch.from_arrays(arrays, schema=schema)),))


def _texts(numbers: np.ndarray) -> pa.Array:
    """Return texts of 20 bytes."""
    return pa.array(np.char.zfill(numbers.astype("U20"), 20).tolist(), pa.string())


def _partitions(wal: Path) -> int:
    from millstream.spark.log_source import PARTITION_BYTES

    log = StreamReader(str(wal))
    return len(log.spans(type(log.first_seq())(0), log.persisted_upto(), bytes_target=PARTITION_BYTES))


def _write_parquet(wal: Path, folders: tuple[Path, Path], rows: int, parts: int) -> None:
    """Write the log's records into `parts` files: the table's columns alone, and all of them."""
    log = StreamReader(str(wal))
    names = [column.name for column in _COLUMNS]
    for one in folders:
        one.mkdir()
    each = -(-rows // parts)
    held: list[pa.RecordBatch] = []
    number = 0
    for piece in log.read_between(type(log.first_seq())(0), log.persisted_upto()):
        held.append(piece.batch)
        if sum(batch.num_rows for batch in held) >= each:
            number = _write_file(held, folders, names, number)
            held = []
    if held:
        _write_file(held, folders, names, number)


def _write_file(held: list[pa.RecordBatch], folders: tuple[Path, Path], names: list[str], number: int) -> int:
    table = pa.Table.from_batches(held).replace_schema_metadata()
    for one, some in zip(folders, (table.select(names), table), strict=True):
        # Decimals as Spark itself writes them: whole numbers of 8 bytes, which it reads fastest.
        pq.write_table(
            some,
            one / f"part-{number:05}.parquet",
            compression="zstd",
            compression_level=1,
            store_decimal_as_integer=True,
        )
    return number + 1


def _parquet_stream(spark: SparkSession, files: Path) -> DataFrame:
    return spark.readStream.schema(spark.read.parquet(str(files)).schema).parquet(str(files))


def _log_stream(spark: SparkSession, wal: Path, columns: dict[str, str]) -> DataFrame:
    return spark.readStream.format("millstream").options(wal=str(wal), table="public.orders", **columns).load()


def _timed(path: Path, rows: int, stream: Callable[[], DataFrame]) -> Callable[[], float]:
    def run() -> float:
        frame = stream()
        notes = path / f"notes-{uuid4()}"
        began_at = time.perf_counter()
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", notes.as_uri())
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        took_s = time.perf_counter() - began_at
        found = sum(progress["numInputRows"] for progress in query.recentProgress)
        if found != rows:
            raise AssertionError(f"Spark has seen {found} rows of {rows}")
        return rows / took_s

    return run
