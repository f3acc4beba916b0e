"""Freshness and size on disk of a table's lake while its rows are updated: `millstream run` as users run it."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

import millstream
from bench.costs import Cost, CostWatch, cost_figures, cost_names
from bench.figures import RUNS, Figure, asked, measures, reported, say
from bench.homes import Home, make_home, wait_for
from bench.landing import oldest_ages_s
from bench.latency import RATE, MarkWatcher, paced
from bench.load import CLIENTS, Load, percentiles_of_windows
from bench.places import as_installed, folder
from bench.poller import KEYS, View
from bench.source import COLUMNS, DATABASE, SHAPE, VALUES, postgres
from millstream.wal.reader import StreamReader

WINDOWS_S = 100
"""Five windows of 20 s."""
DISK_S = 600
ROWS = 1_000_000
ROWS_LARGE = 10_000_000
ROWS_SMALL = 10_000
OTHERS = 999
_ROWS_A_TABLE = 2_000
"""When the figure of many tables is tried with fewer rows: so many rows stand for a table."""
LOOK_S = 2.0
_ROW_BYTES = 130
_TABLE = "public.accounts"


@dataclass(slots=True)
class Look:
    """`current` at one moment, from outside."""

    at_ns: int
    n: int
    """The number up to which it was last folded."""
    live_bytes: int
    disk_bytes: int


@dataclass(slots=True)
class Observed:
    """Observations of one run."""

    load: Load
    cost: Cost
    """The cost of `millstream run` from the load's warm-up until its last change was shown."""
    seen: list[dict[str, int]] = field(default_factory=list)
    """The poller's answers."""
    looks: list[Look] = field(default_factory=list)
    upto: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    durable_ns: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Numbers up to which the log was readable, and when each was first seen."""

    def fold_lags_s(self) -> list[float]:
        """Return the age of the oldest record that `current` lacked, at each look."""
        looks = np.array([(look.at_ns, look.n) for look in self.looks], np.int64).reshape(-1, 2)
        return oldest_ages_s(looks, self.upto, self.durable_ns)


def observe(rows: int, *, seconds: int, view: View, lake: str = "", others: int = 0) -> Observed:
    """Load a table, then update it at random for some time, and observe it.

    Args:
        rows: of the table.
        seconds: duration, after a warm-up of five.
        view: the poller's table: `query`, or `current` alone.
        lake: lines of the stream's section `lake`.
        others: number of further tables, of one row; each transaction updates one of them, too.
    """
    with postgres(load_unsynced=False) as server, folder("fresh") as path:
        with server.connect(DATABASE) as connection:
            connection.execute("SET synchronous_commit = off")
            connection.execute(f"CREATE TABLE accounts ({COLUMNS}, client int, n bigint)")
            connection.execute(f"INSERT INTO accounts SELECT {VALUES}, -1, 0 FROM generate_series(1, {rows}) AS n")
            connection.execute("VACUUM ANALYZE accounts")
            for number in range(1, others + 1):
                connection.execute(f"CREATE TABLE other{number} (id int PRIMARY KEY, n bigint)")
                connection.execute(f"INSERT INTO other{number} VALUES (1, 0)")
        home = make_home(server, path / "home", ["public.*"], lake=lake)
        say("  first load")
        home.run("run", "--until-caught-up")
        with home.running("run") as run:
            poller = [sys.executable, "-m", "bench.poller", str(home.path), view]
            with subprocess.Popen(poller, stdout=subprocess.PIPE, text=True, env=as_installed()) as process:
                seen: list[dict[str, int]] = []
                looks = _Looks(home)
                marks = MarkWatcher(home.wal)
                reading = threading.Thread(target=_collect, args=(process, seen), daemon=True)
                try:
                    reading.start()
                    with server.connect(DATABASE) as connection:
                        connection.execute("UPDATE accounts SET client = -2, n = 1 WHERE id = 1")
                    wait_for("the pipeline runs", lambda: bool(seen) and "-2" in seen[-1], process=run)
                    say("  running")
                    set_id = f"\\set id random(1, {rows})\n"
                    statement = "UPDATE accounts SET total = total + 1, client = :client_id, n = :n WHERE id = :id"
                    if others:
                        set_id += f"\\set other random(1, {others})\n"
                        statement = f"WITH o AS (UPDATE other:other SET n = n + 1 WHERE id = 1) {statement}"
                    statement = set_id + statement
                    log, watch = StreamReader(home.wal), CostWatch(run.pid)
                    before = log.persisted_upto()
                    load = paced(server, path, statement, seconds=seconds, protocol="simple" if others else "prepared")
                    # Among the poller's keys: an answer that shows this change came after all of the load.
                    last = {c: int(load.number[load.client == c].max()) + 1 for c in range(CLIENTS)}
                    with server.connect(DATABASE) as connection:
                        for client, number in last.items():
                            sql = "UPDATE accounts SET client = %s, n = %s WHERE id = %s"
                            connection.execute(sql, [client, number, client + 1])
                    wait_for("the last update", lambda: _has_seen(seen[-1], last), process=run)
                    cost = watch.stop(log.persisted_upto() - before)
                finally:
                    process.terminate()
                    reading.join(10)
                    upto, durable_ns = marks.stop()
                    looked = looks.stop()
    began, ended = int(load.committed_ns.min()), int(load.committed_ns.max())
    return Observed(load, cost, seen, [look for look in looked if began <= look.at_ns <= ended], upto, durable_ns)


class _Looks:
    """A thread that looks at `current` every other second."""

    def __init__(self, home: Home) -> None:
        self._path = home.path / "lake" / "bench" / "current" / _TABLE
        self._found: list[Look] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._found.append(_look(self._path))
            except (DeltaError, OSError):
                continue  # A file was deleted between two steps.

    def stop(self) -> list[Look]:
        self._stop.set()
        self._thread.join()
        return self._found


def _look(path: Path) -> Look:
    table = DeltaTable(str(path))
    at_ns = time.time_ns()
    sizes = pa.table(table.get_add_actions(flatten=True)).column("size_bytes").to_pylist()
    stamp = json.loads(next(info["millstream"] for info in table.history(20) if "n" in info.get("millstream", "")))
    disk = sum(file.stat().st_size for file in path.rglob("*.parquet"))
    return Look(at_ns, int(stamp["n"]), sum(sizes), disk)


def _collect(process: subprocess.Popen[str], seen: list[dict[str, int]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(json.loads(line))  # noqa: PERF401 - others read it at the same time


def _has_seen(answer: dict[str, int], last: dict[int, int]) -> bool:
    return all(answer.get(str(client), 0) >= number for client, number in last.items())


def _latencies_ms(load: Load, seen: list[dict[str, int]]) -> np.ndarray:
    """Return how long each transaction took until an answer showed it or a later one of its client."""
    at = np.array([answer["at_ns"] for answer in seen], dtype=np.int64)
    latency = np.empty(len(load))
    for client in range(CLIENTS):
        shown = np.maximum.accumulate(np.array([answer.get(str(client), 0) for answer in seen], dtype=np.int64))
        mine = np.flatnonzero(load.client == client)
        place = np.minimum(np.searchsorted(shown, load.number[mine]), len(at) - 1)
        latency[mine] = (at[place] - load.committed_ns[mine]) / 1e6
    return latency


def _latency(name: str, observed: Observed, rows: int, what: str, goal: str) -> Figure:
    p50, p99 = percentiles_of_windows(observed.load, _latencies_ms(observed.load, observed.seen), RUNS)
    took_ms = statistics.median(answer["took_ms"] for answer in observed.seen)
    return reported(
        name,
        p50,
        unit="ms",
        goal=goal,
        rows=rows,
        size_bytes=rows * _ROW_BYTES,
        note=f"p50; table of {rows:,} rows, {SHAPE} and two more integers; {RATE} updates a second of uniformly random rows by"
        f" {CLIENTS} clients, folds run beside them; from the client's answer to its COMMIT until the answer of {what}"
        f" (count and greatest numbers of {min(rows, KEYS):,} keys) that shows it or what came behind it, by a process that asks {len(observed.seen)} times back to back,"
        f" {took_ms:.0f} ms each; medians over {RUNS} windows",
        p99=p99,
    )


def _fold_lag(name: str, observed: Observed, rows: int) -> Figure:
    lags = observed.fold_lags_s()
    return reported(
        name,
        lags,
        unit="s",
        goal="reported",
        rows=rows,
        size_bytes=rows * _ROW_BYTES,
        note=f"p50; the age of the oldest record that `current` of {rows:,} rows lacked, looked at every {LOOK_S:.0f} s in the run of"
        " commit_to_query_ms at that size",
        p99=[float(np.percentile(lags, 99))],
    )


def _queried(rows: int, suffix: str, *, goal: str, others: int = 0) -> Iterator[Figure]:
    rows, seconds = asked.rows or rows, asked.seconds or WINDOWS_S
    say(f"commit_to_query{suffix}_ms: {rows:,} rows, {RATE} updates a second for {seconds} s")
    observed = observe(rows, seconds=seconds, view="query", others=others)
    what = f" (each with one of a random one of {others} other tables)" if others else ""
    yield _latency(f"commit_to_query{suffix}_ms", observed, rows, f"a query by a home that stays open{what}", goal)
    yield _fold_lag(f"fold_lag{suffix}_s", observed, rows)
    yield from cost_figures(
        f"landing{suffix}", [observed.cost], row_bytes=_ROW_BYTES,
        note=f"`millstream run` while {observed.cost.rows:,} updates at {RATE} a second of uniformly random rows of {rows:,} are captured, landed and"
        f" folded; {SHAPE} and two more integers",
    )  # fmt: skip


@measures("commit_to_query_ms", "fold_lag_s", *cost_names("landing"))
def commit_to_query() -> Iterator[Figure]:
    """Measure uniform updates of a large table."""
    yield from _queried(ROWS, "", goal="p50 <= 500, p99 <= 1200")


@measures("commit_to_query_10m_ms", "fold_lag_10m_s", *cost_names("landing_10m"))
def commit_to_query_large() -> Iterator[Figure]:
    """Measure the same of a table ten times as large."""
    yield from _queried(ROWS_LARGE, "_10m", goal="reported")


@measures("commit_to_query_1000_tables_ms", "fold_lag_1000_tables_s", *cost_names("landing_1000_tables"))
def commit_to_query_of_many_tables() -> Iterator[Figure]:
    """Measure the same updates in a stream of a thousand tables, of which each transaction changes another one, too."""
    others = OTHERS if asked.rows is None else max(1, asked.rows // _ROWS_A_TABLE)
    yield from _queried(ROWS, "_1000_tables", goal="p50 <= 800, p99 <= 2000", others=others)


@measures("commit_to_current_ms")
def commit_to_current() -> Iterator[Figure]:
    """Measure uniform updates of a small table whose `current` is folded with every batch, by `fold_interval`."""
    rows, seconds = asked.rows or ROWS_SMALL, asked.seconds or WINDOWS_S
    say(f"commit_to_current_ms: {rows:,} rows, {RATE} updates a second for {seconds} s")
    observed = observe(rows, seconds=seconds, view="current", lake='fold_interval = "0s"')
    yield _latency(
        "commit_to_current_ms",
        observed,
        rows,
        "a query of `current` alone, as any reader of Delta has it (`fold_interval` 0),",
        "p50 <= 1500, p99 <= 4000",
    )


@measures("disk_factor")
def disk_factor() -> Iterator[Figure]:
    """Measure uniform updates for ten minutes."""
    rows, seconds = asked.rows or ROWS, asked.seconds or DISK_S
    say(f"disk_factor: {rows:,} rows, {RATE} updates a second for {seconds} s")
    observed = observe(rows, seconds=seconds, view="query")
    late = observed.looks[len(observed.looks) // 2 :]
    factors = [look.disk_bytes / look.live_bytes for look in late]
    yield reported(
        "disk_factor",
        [max(factors)],
        unit="x",
        goal="<= 5",
        rows=rows,
        size_bytes=late[-1].live_bytes,
        note=f"the most that all Parquet files in the folder of `current` ever had of bytes, over its live files' bytes, in the second half of"
        f" {seconds} s of {RATE} updates a second of uniformly random rows of {rows:,}; looked at every {LOOK_S:.0f} s; median {statistics.median(factors):.2f}",
    )


@measures("driver_back_s", "driver_back_whole_s")
def driver_back() -> Iterator[Figure]:
    """Kill the pipeline's driver with its JVM; measure the time until an answer has a row that was committed then."""
    rows = asked.rows or ROWS_SMALL
    runs = asked.runs or RUNS
    say(f"driver_back_s: {rows:,} rows, the driver killed {runs} times")
    with postgres(load_unsynced=False) as server, folder("back") as path, server.connect(DATABASE) as connection:
        connection.execute(f"CREATE TABLE accounts ({COLUMNS}, client int, n bigint)")
        connection.execute(f"INSERT INTO accounts SELECT {VALUES}, 0, -1 FROM generate_series(1, {rows}) AS n")
        home = make_home(server, path / "home", [_TABLE])
        home.run("run", "--until-caught-up")
        whole_s = []
        with home.running("run", "--log-format", "json") as run, millstream.open(str(home.path)) as opened:

            def shows(number: int) -> bool:
                found = opened.query("SELECT n FROM public.accounts WHERE id = 1", stream="bench", lake_only=True)
                return bool(found.column("n").to_pylist() == [number])

            for number in range(runs + 1):
                began_at = time.perf_counter()
                if number:
                    os.kill(int(opened.status()["processes"]["pipeline"]), signal.SIGKILL)
                connection.execute("UPDATE accounts SET n = %s WHERE id = 1", [number])
                wait_for("the driver to be back", partial(shows, number), process=run)
                if number:
                    whole_s.append(time.perf_counter() - began_at)
        starts_s = _driver_starts_s(path / "run.log")
    said = (
        "SIGKILL of the pipeline's process under `millstream run`; from there until a query shows a row that was committed right after;"
        f" table of {rows:,} rows"
    )
    for name, took_s, goal, note in (
        (
            "driver_back_s",
            [took - start for took, start in zip(whole_s, starts_s, strict=True)],
            "reported",
            (
                "less the time from when the supervisor noticed until Spark was ready again: its delay, which doubles from kill to kill, and the start"
                f" of process and Spark, {statistics.median(starts_s):.1f} s together at the median"
            ),
        ),
        ("driver_back_whole_s", whole_s, "<= 30", "all of it"),
    ):
        yield reported(
            name, took_s, unit="s", goal=goal, rows=rows, size_bytes=rows * _ROW_BYTES, note=f"{said}; {note}"
        )


def _driver_starts_s(log: Path) -> list[float]:
    """Return the seconds from each death of the driver until its successor's Spark was ready."""
    starts, died_at = [], None
    for line in log.read_text().splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("part") != "pipeline":
            continue
        at = datetime.fromisoformat(event["timestamp"])
        if event["event"] == "died":
            died_at = at
        elif event["event"] == "spark" and event["state"] == "ready" and died_at is not None:
            starts.append((at - died_at).total_seconds())
            died_at = None
    return starts
