"""The first load of a table, source to `current`; the peer is COPY piped into delta-rs's own append."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyarrow import csv

from bench.costs import Cost, cost_figures, cost_names, run_watched
from bench.figures import Figure, asked, compared, measures, say
from bench.homes import make_home
from bench.places import folder
from bench.source import COLUMNS, DATABASE, ROW_BYTES, SHAPE, VALUES, postgres
from millstream.codec.pgoutput import warm
from millstream.testing.postgres import EmbeddedPostgres

LOAD_ROWS = 10_000_000
LOAD_RUNS = 3
"""Fewer than for other figures: a round of ten million rows takes a minute or two."""
TABLE = "loaded"
APPEND_BYTES = 256 << 20
"""Bytes of COPY's text in an append of the peer: some 2.5 million rows, so that its files have a good size."""
_PEER_TYPES = {
    "id": pa.int64(),
    "customer": pa.int32(),
    "status": pa.string(),
    "total": pa.decimal128(12, 2),
    "placed_at": pa.timestamp("us", tz="UTC"),
    "note": pa.string(),
}


def fill(server: EmbeddedPostgres, rows: int) -> None:
    """Make a table of so many rows, all visible to every transaction, its pages written."""
    with server.connect(DATABASE) as connection:
        connection.execute(f"CREATE TABLE {TABLE} ({COLUMNS})")
        connection.execute(f"INSERT INTO {TABLE} SELECT {VALUES} FROM generate_series(1, {rows}) AS n")
        connection.execute(f"VACUUM (FREEZE, ANALYZE) {TABLE}")
        connection.execute("CHECKPOINT")


@measures("initial_load_vs_copy_and_append", *cost_names("first_load"))
def initial_load() -> Iterator[Figure]:
    """Measure `millstream run --until-caught-up` on a fresh home."""
    rows = asked.rows or LOAD_ROWS
    say(f"initial_load_vs_copy_and_append: {rows:,} rows")
    warm()
    with postgres() as server, folder("first-load") as path:
        fill(server, rows)
        numbers = count()
        costs: list[Cost] = []
        yield compared(
            "initial_load_vs_copy_and_append",
            lambda: _loaded_rows_s(server, path / f"home{next(numbers)}", rows, costs),
            lambda: _appended_rows_s(server, path / f"delta{next(numbers)}", rows),
            unit="rows/s",
            goal=">= 0.35",
            rows=rows,
            size_bytes=rows * ROW_BYTES,
            runs=LOAD_RUNS,
            note=f"{SHAPE}; ours is the whole command `millstream run --until-caught-up` on a fresh home, processes and Spark started,"
            " until the log, history and `current` have all rows (machine code compiled by an earlier run); the peer is one client: COPY … TO STDOUT (csv) by psycopg, parsed by"
            f" pyarrow, appended by write_deltalake each {APPEND_BYTES >> 20} MiB, with its defaults; medians of {LOAD_RUNS} rounds",
        )
        yield from cost_figures(
            "first_load", costs[1:], row_bytes=ROW_BYTES,
            note=f"the commands of initial_load_vs_copy_and_append: {rows:,} rows by `millstream run --until-caught-up`; {SHAPE}",
        )  # fmt: skip


def _loaded_rows_s(server: EmbeddedPostgres, path: Path, rows: int, costs: list[Cost]) -> float:
    home = make_home(server, path, [f"public.{TABLE}"])
    try:
        took_s, cost = run_watched(home.command("run", "--until-caught-up"), rows)
        costs.append(cost)
        check_count(home.path / "lake" / "bench" / "current" / f"public.{TABLE}", rows)
        return rows / took_s
    finally:
        home.forget(server)
        shutil.rmtree(path, ignore_errors=True)


def _appended_rows_s(server: EmbeddedPostgres, path: Path, rows: int) -> float:
    names = list(_PEER_TYPES)
    reading = csv.ReadOptions(column_names=names, block_size=4 << 20)
    converting = csv.ConvertOptions(column_types=_PEER_TYPES)
    try:
        began_at = time.perf_counter()
        with (
            server.connect(DATABASE) as connection,
            connection.cursor().copy(f"COPY {TABLE} TO STDOUT (FORMAT csv)") as copy,
        ):
            held: list[bytes | bytearray | memoryview] = []
            size = 0
            for line in copy:
                held.append(line)
                size += len(line)
                if size >= APPEND_BYTES:
                    _append(path, held, reading, converting)
                    held, size = [], 0
            if held:
                _append(path, held, reading, converting)
        took_s = time.perf_counter() - began_at
        check_count(path, rows)
        return rows / took_s
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _append(
    path: Path, lines: list[bytes | bytearray | memoryview], reading: csv.ReadOptions, converting: csv.ConvertOptions
) -> None:
    text = pa.BufferReader(b"".join(lines))
    write_deltalake(str(path), csv.read_csv(text, read_options=reading, convert_options=converting), mode="append")


def check_count(path: Path, rows: int) -> None:
    """Raise AssertionError if a Delta table hasn't so many rows."""
    found = sum(pa.table(DeltaTable(str(path)).get_add_actions()).column("num_records").to_pylist())
    if found != rows:
        raise AssertionError(f"{path} has {found} rows, the source {rows}")
