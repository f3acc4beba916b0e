"""The log compared with the disk's rates: large batches, one table of many, and reading it back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.figures import Figure, asked, compared, measures, say
from bench.places import folder
from bench.wal import BATCH_ROWS, EVENTS, ROW_BYTES, log_in, operation
from millstream.model.ids import TableId
from millstream.model.operations import one_after_another
from millstream.model.positions import Seq
from millstream.wal.reader import StreamReader

COLUMNAR_BATCHES = 300
COLUMNAR_ROWS = 1 << 20 >> 7
"""Rows of 128 bytes: a batch of 1 MiB."""
TABLES = 100
REPLAY_ROWS = 2_000_000


@measures("wal_append_columnar_vs_raw")
def columnar_vs_raw() -> Iterator[Figure]:
    """Measure large batches that come as Arrow; the peer writes the same bytes raw."""
    size = COLUMNAR_ROWS * 128
    count = COLUMNAR_BATCHES if asked.rows is None else max(1, asked.rows // COLUMNAR_ROWS)
    say(f"wal_append_columnar_vs_raw: {count} batches of {size >> 20} MiB")
    # Random, so that the log's compression gains nothing.
    data = np.random.default_rng(1).bytes(size)
    values = [data[at : at + 128] for at in range(0, size, 128)]
    ready = [operation(values[at : at + BATCH_ROWS]) for at in range(0, COLUMNAR_ROWS, BATCH_ROWS)]
    one = replace(
        ready[0],
        tables=(replace(ready[0].tables[0], rows=_joined([ops.tables[0].rows for ops in ready])),),
    )

    def ours() -> float:
        with folder("log") as path, log_in(path) as writer:
            began = time.perf_counter()
            for _ in range(count):
                writer.append(one)
            return count * size / (time.perf_counter() - began) / 1e6

    def raw() -> float:
        with folder("raw") as path:
            file = os.open(path / "raw", os.O_WRONLY | os.O_CREAT)
            began = time.perf_counter()
            for number in range(count):
                os.pwrite(file, data, number * size)
                os.fdatasync(file)
            took_s = time.perf_counter() - began
            os.close(file)
            return count * size / took_s / 1e6

    yield compared(
        "wal_append_columnar_vs_raw", ours, raw, unit="MB/s", goal=">= 0.7", rows=count * COLUMNAR_ROWS,
        size_bytes=count * size,
        note=f"{count} batches of {COLUMNAR_ROWS} random values of 128 B, ready as Arrow, one caller, each durable before the next; the peer"
        " writes the same bytes by pwrite and fdatasync into a new file",
    )  # fmt: skip


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    whole = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    place = whole.schema.get_field_index("__index")
    index = pa.array(np.arange(whole.num_rows, dtype=np.int64))
    columns = [index if at == place else column for at, column in enumerate(whole.columns)]
    return pa.RecordBatch.from_arrays(columns, schema=whole.schema)


@measures("wal_read_one_of_100_tables")
def one_of_many_tables() -> Iterator[Figure]:
    """Measure reading a table's records out of a log of a hundred; the peer is a log that holds it alone."""
    rows = asked.rows or 400 * BATCH_ROWS
    say(f"wal_read_one_of_100_tables: {rows:,} rows of each of {TABLES} tables")
    with folder("many") as many, folder("alone") as alone:
        tables = [replace(EVENTS, table_id=TableId(number), name=f"events_{number}") for number in range(1, TABLES + 1)]
        for path, kept in ((many, tables), (alone, tables[:1])):
            with log_in(path) as writer:
                for _ in range(rows // BATCH_ROWS):
                    values = [os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)]
                    parts = [operation(values, table=table) for table in kept]
                    writer.append(replace(parts[0], tables=one_after_another([part.tables for part in parts], 1)))

        def read_s(path: Path) -> float:
            reader = StreamReader(str(path / "wal"))
            began = time.perf_counter()
            count = sum(
                found.batch.num_rows for found in reader.read_between(Seq(0), reader.persisted_upto(), table=TableId(1))
            )
            assert count == rows
            return (time.perf_counter() - began) * 1000

        yield compared(
            "wal_read_one_of_100_tables", lambda: read_s(many), lambda: read_s(alone), unit="ms", goal="<= 1.3", rows=rows,
            size_bytes=rows * ROW_BYTES,
            note=f"{rows:,} rows of {ROW_BYTES} random bytes of one table, read by number; in ours a frame holds {BATCH_ROWS} rows of each of {TABLES}"
            " tables, in the peer's of that table alone",
        )  # fmt: skip


@measures("wal_replay_rows_per_s", "wal_replay_vs_parquet_threads")
def replay_vs_parquet() -> Iterator[Figure]:
    """Measure reading all records of a log, in order; the peer reads the same rows from a Parquet file."""
    rows = asked.rows or REPLAY_ROWS
    say(f"wal_replay_rows_per_s: {rows:,} rows")
    with folder("replay") as path:
        with log_in(path) as writer:
            for _ in range(rows // BATCH_ROWS):
                writer.append(operation([os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)]))
        reader = StreamReader(str(path / "wal"))
        batches = [found.batch for found in reader.read_between(Seq(0), reader.persisted_upto())]
        file = path / "rows.parquet"
        pq.write_table(pa.Table.from_batches(batches), file, compression="lz4", write_page_checksum=True)
        said = f"{rows:,} records of {ROW_BYTES} random bytes in frames of {BATCH_ROWS}, with all columns of a record, by one thread, checksums verified"
        for name, goal, peer, how in (
            (
                "wal_replay_rows_per_s",
                ">= 0.8",
                partial(_parquet_rows_s, file, rows, threads=False, checksums=True),
                "in one thread with the checksums of its pages",
            ),
            (
                "wal_replay_vs_parquet_threads",
                "reported",
                partial(_parquet_rows_s, file, rows, threads=True, checksums=False),
                "with all threads and without checksums, the ceiling",
            ),
        ):
            yield compared(
                name, partial(_replayed_rows_s, path / "wal", rows), peer, unit="rows/s", goal=goal, rows=rows,
                size_bytes=rows * ROW_BYTES,
                note=f"{said}; the peer reads the same rows from one Parquet file (lz4) with pyarrow, {how}, in batches as large as it likes them",
            )  # fmt: skip


def _replayed_rows_s(wal: Path, rows: int) -> float:
    began = time.perf_counter()
    reader = StreamReader(str(wal))
    count = sum(found.batch.num_rows for found in reader.read_between(Seq(0), reader.persisted_upto()))
    assert count == rows
    return rows / (time.perf_counter() - began)


def _parquet_rows_s(path: Path, rows: int, *, threads: bool, checksums: bool) -> float:
    began = time.perf_counter()
    with pq.ParquetFile(path, page_checksum_verification=checksums) as file:
        count = sum(batch.num_rows for batch in file.iter_batches(use_threads=threads))
    assert count == rows
    return rows / (time.perf_counter() - began)
