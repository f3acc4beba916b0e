"""Capture beside `pg_recvlogical`, table copy beside COPY, and capture's memory."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figures import RUNS, Figure, compared, measures, say
from bench.homes import make_home
from bench.ours import PGOUTPUT, captured
from bench.places import folder
from bench.source import (
    COLUMNS,
    DATABASE,
    ROW_BYTES,
    SHAPE,
    VALUES,
    Backlog,
    drop_slot,
    insert_transactions,
    make_backlog,
    postgres,
    recvlogical_rows_s,
)
from millstream.codec.pgoutput import warm
from millstream.protocol.catching_up import CatchUp
from millstream.testing.postgres import EmbeddedPostgres

COPY_ROWS = 2_000_000

_LIKE_WITH_LIKE = (
    "both read copies of one slot over the Unix socket with the same pgoutput options (proto_version 2, streaming on, messages"
    " true, text); timed from the answer to START_REPLICATION until the last commit is durable in our log (typed Arrow, LZ4,"
    " CRC32C, fdatasync a commit group), or pg_recvlogical, writing to /dev/null, has ended; our machine code was compiled before"
)


def _captured_rows_s(backlog: Backlog, *, catch_up: CatchUp = CatchUp.NEVER) -> float:
    with (
        backlog.copied_slot() as slot,
        folder("capture") as path,
        captured(backlog.server, path, table=backlog.name, slot=slot, catch_up=catch_up) as capture,
    ):
        ended_at = capture.wait_until_durable(backlog.end)
    found = capture.writer.stats().records
    if found < backlog.rows:
        raise AssertionError(f"{found} records are in the log, {backlog.rows} rows were committed")
    return backlog.rows / (ended_at - capture.began_at)


def _beside_recvlogical(name: str, table: str, *, transactions: int, rows_each: int, goal: str) -> Figure:
    say(f"{name}: {transactions:,} transactions of {rows_each:,} rows")
    warm()
    with postgres() as server:
        backlog = make_backlog(server, table, transactions=transactions, rows_each=rows_each)
        return compared(
            name,
            lambda: _captured_rows_s(backlog),
            lambda: recvlogical_rows_s(backlog, options=PGOUTPUT),
            unit="rows/s",
            goal=goal,
            rows=backlog.rows,
            size_bytes=backlog.size_bytes,
            note=f"{transactions} transactions of {rows_each} rows; {SHAPE}; {_LIKE_WITH_LIKE}",
        )


@measures("capture_stream_vs_pg_recvlogical")
def stream() -> Iterator[Figure]:
    """Mid-size transactions."""
    yield _beside_recvlogical(
        "capture_stream_vs_pg_recvlogical", "mid", transactions=500, rows_each=1000, goal=">= 1.0"
    )


@measures("capture_small_tx_vs_pg_recvlogical")
def small_transactions() -> Iterator[Figure]:
    """One row a transaction."""
    yield _beside_recvlogical(
        "capture_small_tx_vs_pg_recvlogical", "small", transactions=100_000, rows_each=1, goal=">= 0.9"
    )


@measures("capture_catchup_vs_pg_recvlogical")
def catch_up() -> Iterator[Figure]:
    """A backlog that is large enough to be read in chunks, by capture's own choice."""
    name, transactions, rows_each = "capture_catchup_vs_pg_recvlogical", 1000, 1000
    say(f"{name}: {transactions:,} transactions of {rows_each:,} rows")
    warm()
    with postgres() as server:
        backlog = make_backlog(server, "backlog", transactions=transactions, rows_each=rows_each)
        yield compared(
            name,
            lambda: _captured_rows_s(backlog, catch_up=CatchUp.AUTO),
            lambda: recvlogical_rows_s(backlog, options=PGOUTPUT),
            unit="rows/s",
            goal=">= 2",
            rows=backlog.rows,
            size_bytes=backlog.size_bytes,
            note=f"{transactions} transactions of {rows_each} rows; {SHAPE}; catch_up = auto; {_LIKE_WITH_LIKE}, but that ours is timed"
            " from where the first chunk is asked for, what is left for the stream included",
        )


@measures("capture_one_1m_row_tx_vs_proto1")
def one_large_transaction() -> Iterator[Figure]:
    """A transaction that the source streams before its commit; the peer asks for protocol 1, which sends it at its commit."""
    name, rows = "capture_one_1m_row_tx_vs_proto1", 1_000_000
    say(f"{name}: one transaction of {rows:,} rows")
    warm()
    with postgres() as server:
        backlog = make_backlog(server, "large", transactions=1, rows_each=rows)
        yield compared(
            name,
            lambda: _captured_rows_s(backlog),
            lambda: recvlogical_rows_s(backlog, options={"proto_version": "1", "messages": "true"}),
            unit="rows/s",
            goal=">= 1.3",
            rows=backlog.rows,
            size_bytes=backlog.size_bytes,
            note=f"one transaction of {rows} rows; {SHAPE}; {_LIKE_WITH_LIKE}, but that the peer's is proto_version 1 without streaming,"
            " and ours streams and spills (catch_up = never)",
        )


@measures("table_copy_vs_copy_to_null")
def table_copy() -> Iterator[Figure]:
    """Existing rows into the log by one worker."""
    say(f"table_copy_vs_copy_to_null: {COPY_ROWS:,} rows")
    warm()
    with postgres() as server:
        with server.connect(DATABASE) as connection:
            connection.execute(f"CREATE TABLE whole ({COLUMNS})")
            connection.execute(f"INSERT INTO whole SELECT {VALUES} FROM generate_series(1, {COPY_ROWS}) AS n")
            connection.execute("CREATE PUBLICATION whole FOR TABLE whole")
            connection.execute("VACUUM (FREEZE, ANALYZE) whole")
            row = connection.execute("SELECT sum(length(w::text)) FROM whole w").fetchone()
        assert row is not None
        yield compared(
            "table_copy_vs_copy_to_null",
            lambda: _copied_rows_s(server),
            lambda: _copy_to_null_rows_s(server),
            unit="rows/s",
            goal=">= 0.8",
            rows=COPY_ROWS,
            size_bytes=int(row[0]),
            note=f"{SHAPE}; ours with one worker, from the answer to START_REPLICATION until the table counts as copied, all of its"
            " rows durable in the log (typed Arrow, LZ4, CRC32C, fdatasync a commit group); the peer is a client too:"
            " psql's \\copy whole TO '/dev/null' (text) over the same socket, its start included",
        )


def _copied_rows_s(server: EmbeddedPostgres) -> float:
    slot = "whole_run"
    with server.connect(DATABASE) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        connection.execute("CHECKPOINT")
    try:
        with (
            folder("copy") as path,
            captured(server, path, table="whole", slot=slot, copy=True, copy_workers=1) as capture,
        ):
            copied_at = capture.wait_until_copied()
        found = capture.writer.stats().records
        if found < COPY_ROWS:
            raise AssertionError(f"{found} records are in the log, the table has {COPY_ROWS} rows")
        return COPY_ROWS / (copied_at - capture.began_at)
    finally:
        drop_slot(server, slot)


def _copy_to_null_rows_s(server: EmbeddedPostgres) -> float:
    command = [str(server.program("psql")), "--no-psqlrc", "--quiet", "--command", "\\copy whole TO '/dev/null'"]
    began_at = time.perf_counter()
    subprocess.run([*command, server.dsn(DATABASE)], check=True)
    return COPY_ROWS / (time.perf_counter() - began_at)


@measures("capture_rss_mib")
def resident_memory() -> Iterator[Figure]:
    """The most that `millstream capture run` ever held, streaming many transactions and a large streamed one."""
    mid, large = 500, 2_000_000
    say(f"capture_rss_mib: {mid} transactions of 1,000 rows and one of {large:,}")
    with postgres() as server, folder("rss") as path:
        with server.connect(DATABASE) as connection:
            connection.execute(f"CREATE TABLE big ({COLUMNS})")
        home = make_home(server, path / "home", ["public.big"])
        home.run("capture", "run", "--until-caught-up")
        peaks = []
        for number in range(RUNS):
            with server.connect(DATABASE) as connection:
                first = number * (mid * 1000 + large)
                insert_transactions(connection, "big", transactions=mid, rows_each=1000, after=first)
                insert_transactions(connection, "big", transactions=1, rows_each=large, after=first + mid * 1000)
            peaks.append(_peak_mib(home.command("capture", "run", "--until-caught-up")))
            say(f"  run {number + 1}: {peaks[-1]:.0f} MiB")
    yield Figure(
        figure="capture_rss_mib",
        ratio=None,
        ours=round(statistics.median(peaks), 1),
        peer=None,
        unit="MiB",
        runs=RUNS,
        goal="< 512",
        rows=mid * 1000 + large,
        bytes=(mid * 1000 + large) * ROW_BYTES,
        note=f"VmHWM of the process `millstream capture run --until-caught-up`; {SHAPE}; {mid} transactions of 1000 rows, then one of"
        f" {large} rows, which the source streams before its commit (logical_decoding_work_mem 64MB)",
    )


def _peak_mib(command: list[str]) -> float:
    """The high-water mark of a process's resident memory, read until it ends."""
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            with contextlib.suppress(OSError):
                lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
                peak = max([peak, *(int(line.split()[1]) / 1024 for line in lines)])
            time.sleep(0.02)
        assert process.stderr is not None
        messages = process.stderr.read()
    if process.returncode:
        raise RuntimeError(f"capture ended with {process.returncode}: {messages[-2000:]}")
    return peak
