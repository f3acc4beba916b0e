"""Capture compared with `pg_recvlogical`, table copy with COPY, and capture's memory."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.costs import Cost, CostWatch, cost_figures, cost_names
from bench.debezium import VERSION, Rates, engine
from bench.figures import RUNS, Figure, asked, compared, interleaved, measures, reported, say
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
from millstream.protocol.catch_up_mode import CatchUpMode
from millstream.testing.postgres import EmbeddedPostgres

COPY_ROWS = 2_000_000
ENGINE_TRANSACTIONS = 2000
"""Transactions of 1000 rows: Java compiles its code during the first half of them."""
ENGINE_RUNS = 3
LARGE_TRANSACTION_ROWS = 10_000_000

_LIKE_WITH_LIKE = (
    "both read copies of one slot over the Unix socket with the same pgoutput options (proto_version 2, streaming on, messages"
    " true, text); timed from the answer to START_REPLICATION until the last commit is durable in our log (typed Arrow, LZ4,"
    " CRC32C, fdatasync a commit group), or pg_recvlogical, writing to /dev/null, has ended; our machine code was compiled before"
)


def _captured_rows_s(backlog: Backlog, *, tcp: bool = False, catch_up: CatchUpMode = CatchUpMode.NEVER) -> float:
    with (
        backlog.copied_slot() as slot,
        folder("capture") as path,
        captured(backlog.server, path, table=backlog.name, slot=slot, tcp=tcp, catch_up=catch_up) as capture,
    ):
        ended_at = capture.wait_until_durable(backlog.end)
    found = capture.writer.stats().records
    if found < backlog.rows:
        raise AssertionError(f"{found} records are in the log, {backlog.rows} rows were committed")
    return backlog.rows / (ended_at - capture.began_at)


def _transactions(usual: int, rows_each: int) -> int:
    return usual if asked.rows is None else max(1, asked.rows // rows_each)


def _beside_recvlogical(name: str, table: str, *, transactions: int, rows_each: int, goal: str) -> Figure:
    transactions = _transactions(transactions, rows_each)
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
    """Measure mid-size transactions."""
    yield _beside_recvlogical(
        "capture_stream_vs_pg_recvlogical", "mid", transactions=500, rows_each=1000, goal=">= 1.0"
    )


@measures("capture_small_tx_vs_pg_recvlogical")
def small_transactions() -> Iterator[Figure]:
    """Measure transactions of one row."""
    yield _beside_recvlogical(
        "capture_small_tx_vs_pg_recvlogical", "small", transactions=100_000, rows_each=1, goal=">= 0.95"
    )


@measures("capture_client_cpu_us_per_row")
def client_cpu() -> Iterator[Figure]:
    """Measure the CPU time of a row on our side."""
    transactions = _transactions(500, 1000)
    say(f"capture_client_cpu_us_per_row: {transactions:,} transactions of 1,000 rows")
    warm()
    with postgres() as server:
        backlog = make_backlog(server, "mid", transactions=transactions, rows_each=1000)
        yield compared(
            "capture_client_cpu_us_per_row",
            lambda: _captured_cpu_us(backlog),
            lambda: _recvlogical_cpu_us(backlog),
            unit="us/row",
            goal="<= 1.5",
            rows=backlog.rows,
            size_bytes=backlog.size_bytes,
            note=f"user and system time of the process that captures (all threads; the source's processes aren't in it), from the answer to"
            f" START_REPLICATION until all is durable; the peer's is pg_recvlogical's, its start included; {SHAPE}",
        )


def _captured_cpu_us(backlog: Backlog) -> float:
    with (
        backlog.copied_slot() as slot,
        folder("capture") as path,
        captured(backlog.server, path, table=backlog.name, slot=slot) as capture,
    ):
        capture.wait_until_durable(backlog.end)
        return (time.process_time() - capture.began_cpu_s) / backlog.rows * 1e6


def _recvlogical_cpu_us(backlog: Backlog) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    recvlogical_rows_s(backlog, options=PGOUTPUT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used_s / backlog.rows * 1e6


@measures("capture_vs_debezium_engine", "capture_vs_debezium_engine_second_half")
def debezium() -> Iterator[Figure]:
    """Compare with Debezium's embedded engine on the same backlog."""
    transactions = _transactions(ENGINE_TRANSACTIONS, 1000)
    say(f"capture_vs_debezium_engine: {transactions:,} transactions of 1,000 rows")
    warm()
    theirs: list[Rates] = []
    with engine() as peer, postgres(tcp=True) as server:
        backlog = make_backlog(server, "mid", transactions=transactions, rows_each=1000)

        def peer_rows_s() -> float:
            with folder("debezium") as path:
                theirs.append(peer.run(backlog, path))
            return theirs[-1].whole

        ours, whole = interleaved(lambda: _captured_rows_s(backlog, tcp=True), peer_rows_s, runs=ENGINE_RUNS)
    second_half = [rates.second_half for rates in theirs[1:]]  # The first round isn't counted.
    for figure, goal, peers, of_what in (
        ("capture_vs_debezium_engine", ">= 5", whole, "all of its run"),
        (
            "capture_vs_debezium_engine_second_half",
            ">= 4",
            second_half,
            "the second half of its rows, when its code is compiled",
        ),
    ):
        yield reported(
            figure,
            ours,
            peers,
            unit="rows/s",
            goal=goal,
            rows=backlog.rows,
            size_bytes=backlog.size_bytes,
            note=f"{transactions} transactions of 1000 rows; {SHAPE}; both read copies of one slot over the loopback; ours as in"
            f" capture_stream_vs_pg_recvlogical; the peer is Debezium {VERSION}, embedded, its records as JSON without their schemas in a file,"
            f" fdatasynced a batch of at most 8192, from when its slot is taken until the last row is on disk: {of_what}",
        )


@measures("capture_catchup_vs_pg_recvlogical")
def catch_up() -> Iterator[Figure]:
    """Measure a backlog large enough to be read in chunks, by capture's own choice."""
    name, rows_each = "capture_catchup_vs_pg_recvlogical", 1000
    transactions = _transactions(1000, rows_each)
    say(f"{name}: {transactions:,} transactions of {rows_each:,} rows")
    warm()
    with postgres() as server:
        backlog = make_backlog(server, "backlog", transactions=transactions, rows_each=rows_each)
        yield compared(
            name,
            lambda: _captured_rows_s(backlog, catch_up=CatchUpMode.AUTO),
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
    """Measure a transaction streamed before its commit; the peer asks for protocol 1, which sends it at its commit."""
    name, rows = "capture_one_1m_row_tx_vs_proto1", asked.rows or 1_000_000
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
    """Measure the copy of existing rows into the log by one worker."""
    rows = asked.rows or COPY_ROWS
    say(f"table_copy_vs_copy_to_null: {rows:,} rows")
    warm()
    with postgres() as server:
        yield compared(
            "table_copy_vs_copy_to_null",
            lambda: _copied_rows_s(server, rows, workers=1),
            lambda: _copy_to_null_rows_s(server, rows, ["whole"]),
            unit="rows/s",
            goal=">= 0.8",
            rows=rows,
            size_bytes=_make_whole(server, rows),
            note=f"{SHAPE}; ours with one worker, from the answer to START_REPLICATION until the table counts as copied, all of its"
            " rows durable in the log (typed Arrow, LZ4, CRC32C, fdatasync a commit group); the peer is a client too:"
            " psql's \\copy whole TO '/dev/null' (text) over the same socket, its start included",
        )


@measures("table_copy_4_workers")
def table_copy_by_four() -> Iterator[Figure]:
    """Measure the same rows by four workers; the peers are four clients that take a quarter each."""
    rows = asked.rows or COPY_ROWS
    say(f"table_copy_4_workers: {rows:,} rows")
    warm()
    quarters = [f"(SELECT * FROM whole WHERE id > {rows * n // 4} AND id <= {rows * (n + 1) // 4})" for n in range(4)]
    with postgres() as server:
        yield compared(
            "table_copy_4_workers",
            lambda: _copied_rows_s(server, rows, workers=4),
            lambda: _copy_to_null_rows_s(server, rows, quarters),
            unit="rows/s",
            goal=">= 0.8",
            rows=rows,
            size_bytes=_make_whole(server, rows),
            note=f"{SHAPE}; ours with four workers, as table_copy_vs_copy_to_null has it with one; the peers are four psql side by side, each"
            " with \\copy (SELECT … of a quarter of the keys) TO '/dev/null', from their start until the last has ended",
        )


def _make_whole(server: EmbeddedPostgres, rows: int) -> int:
    """Make the table, settled; return the bytes of its rows as text."""
    with server.connect(DATABASE) as connection:
        connection.execute(f"CREATE TABLE whole ({COLUMNS})")
        connection.execute(f"INSERT INTO whole SELECT {VALUES} FROM generate_series(1, {rows}) AS n")
        connection.execute("CREATE PUBLICATION whole FOR TABLE whole")
        connection.execute("VACUUM (FREEZE, ANALYZE) whole")
        row = connection.execute("SELECT sum(length(w::text)) FROM whole w").fetchone()
    assert row is not None
    return int(row[0])


def _copied_rows_s(server: EmbeddedPostgres, rows: int, *, workers: int) -> float:
    slot = "whole_run"
    with server.connect(DATABASE) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        connection.execute("CHECKPOINT")
    try:
        with (
            folder("copy") as path,
            captured(server, path, table="whole", slot=slot, copy=True, copy_workers=workers) as capture,
        ):
            copied_at = capture.wait_until_copied()
        found = capture.writer.stats().records
        if found < rows:
            raise AssertionError(f"{found} records are in the log, the table has {rows} rows")
        return rows / (copied_at - capture.began_at)
    finally:
        drop_slot(server, slot)


def _copy_to_null_rows_s(server: EmbeddedPostgres, rows: int, parts: list[str]) -> float:
    """Return the rate of clients that copy a part each, in parallel."""
    command = [str(server.program("psql")), "--no-psqlrc", "--quiet", server.dsn(DATABASE), "--command"]
    began_at = time.perf_counter()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(subprocess.Popen([*command, f"\\copy {part} TO '/dev/null'"])) for part in parts]
        codes = [peer.wait() for peer in peers]
    if any(codes):
        raise RuntimeError(f"psql ended with {codes}")
    return rows / (time.perf_counter() - began_at)


@measures("capture_rss_mib", *cost_names("capture"))
def resident_memory() -> Iterator[Figure]:
    """Measure `millstream capture run`, over many transactions and a large streamed one: peak memory, and its cost."""
    yield from _capture_command(
        "capture_rss_mib",
        "capture",
        mid=_transactions(500, 1000),
        large=asked.rows or 2_000_000,
        runs=asked.runs or RUNS,
    )


@measures("capture_rss_10m_tx_mib", *cost_names("capture_10m_tx"))
def resident_memory_of_one() -> Iterator[Figure]:
    """Measure the same with one transaction of 10 M rows; once, since it takes minutes and 6 GB of disk."""
    rows = asked.rows or LARGE_TRANSACTION_ROWS
    yield from _capture_command("capture_rss_10m_tx_mib", "capture_10m_tx", mid=0, large=rows, runs=1)


def _capture_command(name: str, cost_name: str, *, mid: int, large: int, runs: int) -> Iterator[Figure]:
    say(f"{name}: {mid} transactions of 1,000 rows and one of {large:,}")
    rows = mid * 1000 + large
    with postgres() as server, folder("rss") as path:
        with server.connect(DATABASE) as connection:
            connection.execute(f"CREATE TABLE big ({COLUMNS})")
        home = make_home(server, path / "home", ["public.big"])
        home.run("capture", "run", "--until-caught-up")
        peaks, costs = [], []
        for number in range(runs):
            with server.connect(DATABASE) as connection:
                first = number * rows
                if mid:
                    insert_transactions(connection, "big", transactions=mid, rows_each=1000, after=first)
                insert_transactions(connection, "big", transactions=1, rows_each=large, after=first + mid * 1000)
            peak, cost = _peak_mib(home.command("capture", "run", "--until-caught-up"), rows)
            peaks.append(peak)
            costs.append(cost)
            say(f"  run {number + 1}: {peaks[-1]:.0f} MiB")
    before = f"{mid} transactions of 1000 rows, then " if mid else ""
    said = (
        f"`millstream capture run --until-caught-up`; {SHAPE}; {before}one transaction of"
        f" {large} rows, which the source streams before its commit (logical_decoding_work_mem 64MB)"
    )
    yield reported(
        name,
        peaks,
        unit="MiB",
        goal="< 512",
        rows=rows,
        size_bytes=rows * ROW_BYTES,
        note=f"VmHWM of the process {said}",
    )
    yield from cost_figures(
        cost_name, costs, row_bytes=ROW_BYTES, note=f"{said}; start and end of the process included"
    )


def _peak_mib(command: list[str], rows: int) -> tuple[float, Cost]:
    """Return the peak resident memory of a process, read until it ends, and its cost for so many rows."""
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        status, watch = Path(f"/proc/{process.pid}/status"), CostWatch(process.pid)
        while process.poll() is None:
            with contextlib.suppress(OSError):
                lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
                peak = max([peak, *(int(line.split()[1]) / 1024 for line in lines)])
            time.sleep(0.02)
        cost = watch.stop(rows)
        assert process.stderr is not None
        messages = process.stderr.read()
    if process.returncode:
        raise RuntimeError(f"capture ended with {process.returncode}: {messages[-2000:]}")
    return peak, cost
