"""Throughput from the source to the lake: a sustained load, a backlog, a thousand tables, the first rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql

import millstream
from bench.costs import Cost, CostWatch, cost_figures, cost_names, run_watched
from bench.figures import Figure, asked, measures, repeated, reported, say
from bench.first_load import TABLE, check_count, fill
from bench.homes import STREAM, Home, make_home, wait_for
from bench.latency import RATE, MarkWatcher, paced
from bench.places import folder
from bench.source import COLUMNS, DATABASE, ROW_BYTES, SHAPE, VALUES, insert_transactions, last_commit, postgres
from millstream.app.open_home import OpenHome
from millstream.errors import MillstreamError
from millstream.testing.postgres import EmbeddedPostgres

FIRST_ROWS = 10_000
BACKLOG_ROWS = 20_000_000
BACKLOG_RUNS = 1
CHANGED_ROWS = 10_000_000
SUSTAINED_S = 600
WARM_UP_S = 20
TRANSACTION = 1000
"""Rows of a transaction of the sustained loads and of the backlog."""
AHEAD = 2_000_000
"""The source waits while the lake lacks so many records."""
TABLES = 1000
ROWS_A_SECOND = 10
TOUCHED_S = 600
SESSIONS = 16
SESSIONS_ROWS = 1_000_000
SESSIONS_S = 100
LOOK_S = 0.5
_ROWS_A_TABLE = 2_000
"""When a figure of many tables is tried with fewer rows: so many rows stand for a table."""
_MIX = (500, 400, 100)
"""Rows that a transaction of mixed changes inserts, updates and deletes."""


class _LandedWatcher:
    """Looks from outside at the position that the lake has reached, twice a second."""

    def __init__(self, home: Home) -> None:
        self._home = millstream.open(str(home.path))
        self.seen: list[tuple[int, int]] = [(time.time_ns(), landed(self._home))]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.seen.append((time.time_ns(), landed(self._home)))

    @property
    def n(self) -> int:
        """The position at the last look."""
        return self.seen[-1][1]

    def stop(self) -> npt.NDArray[np.int64]:
        """Return the looks: wall-clock times in nanoseconds, and positions."""
        self._stop.set()
        self._thread.join()
        self._home.close()
        return np.array(self.seen, dtype=np.int64)


def landed(home: OpenHome) -> int:
    """Return the position of the lake; 0 before its first snapshot."""
    with suppress(MillstreamError), home.lake(STREAM, lake_only=True) as lake:
        return int(lake.token.minimum)
    return 0


@measures("first_rows_s")
def first_rows() -> Iterator[Figure]:
    """Measure `millstream run` on a fresh home, until a query of the lake alone has the table's rows."""
    rows = asked.rows or FIRST_ROWS
    say(f"first_rows_s: {rows:,} rows")
    with postgres() as server, folder("first-rows") as path:
        fill(server, rows)
        numbers = count()
        took_s = repeated(lambda: _first_rows_s(server, path / f"home{next(numbers)}", rows))
    yield reported(
        "first_rows_s",
        took_s,
        unit="s",
        goal="<= 15",
        rows=rows,
        size_bytes=rows * ROW_BYTES,
        note=f"from the start of `millstream run` on a fresh home, processes and Spark included, until a query of the lake alone counts the {rows:,} rows"
        f" of a table; {SHAPE}",
    )


def _first_rows_s(server: EmbeddedPostgres, path: Path, rows: int) -> float:
    path.mkdir()
    home = make_home(server, path / "home", [f"public.{TABLE}"])
    try:
        began_at = time.perf_counter()
        with home.running("run") as run, millstream.open(str(home.path)) as opened:
            wait_for("the first rows", partial(has_rows, opened, rows), process=run)
            return time.perf_counter() - began_at
    finally:
        home.forget(server)


def has_rows(home: OpenHome, rows: int) -> bool:
    """Whether the table has so many rows in the lake."""
    with suppress(MillstreamError):
        found = home.query(f"SELECT count(*) AS rows FROM public.{TABLE}", stream=STREAM, lake_only=True)
        return bool(found.column("rows").to_pylist() == [rows])
    return False


@measures("backlog_to_lake_rows_per_s", *cost_names("backlog_to_lake"))
def backlog_to_lake() -> Iterator[Figure]:
    """Measure `millstream run --until-caught-up` over changes that wait in the slot."""
    rows = asked.rows or BACKLOG_ROWS
    say(f"backlog_to_lake_rows_per_s: {rows:,} rows")
    with postgres() as server, folder("backlog") as path:
        fill(server, 0)
        home = make_home(server, path / "home", [f"public.{TABLE}"])
        home.run("run", "--until-caught-up")
        rates: list[float] = []
        costs: list[Cost] = []
        for number in range(asked.runs or BACKLOG_RUNS):
            with server.connect(DATABASE) as connection:
                insert_transactions(
                    connection, TABLE, transactions=rows // TRANSACTION, rows_each=TRANSACTION, after=number * rows
                )
                last_commit(connection)
                connection.execute("CHECKPOINT")
            say("  the backlog is made")
            took_s, cost = run_watched(home.command("run", "--until-caught-up"), rows)
            rates.append(rows / took_s)
            costs.append(cost)
            check_count(home.path / "lake" / STREAM / "current" / f"public.{TABLE}", (number + 1) * rows)
    what = (
        f"{rows:,} inserts in transactions of {TRANSACTION:,} that wait in the slot, {SHAPE}; the whole command `millstream run --until-caught-up`,"
        " processes and Spark started, until the log, history and `current` have all of them"
    )
    size_bytes = rows * ROW_BYTES
    yield reported(
        "backlog_to_lake_rows_per_s",
        rates,
        unit="rows/s",
        goal=">= 100,000",
        rows=rows,
        size_bytes=size_bytes,
        note=what,
    )
    yield from cost_figures("backlog_to_lake", costs, row_bytes=ROW_BYTES, note=what)


@measures("source_to_lake_inserts_rows_per_s", *cost_names("source_to_lake_inserts"))
def source_to_lake_inserts() -> Iterator[Figure]:
    """Measure inserts at the greatest rate that the lake sustains."""
    numbers = count()

    def insert(connection: psycopg.Connection) -> int:
        first = next(numbers) * TRANSACTION
        rows = f"generate_series({first + 1}, {first + TRANSACTION}) AS n"
        return connection.execute(f"INSERT INTO {TABLE} SELECT {VALUES} FROM {rows}").rowcount

    yield from _sustained("source_to_lake_inserts", insert, rows=0, goal=">= 80,000", what="inserts")


@measures("source_to_lake_changes_rows_per_s", *cost_names("source_to_lake_changes"))
def source_to_lake_changes() -> Iterator[Figure]:
    """Measure a mix of inserts, updates and deletes of a large table at the greatest rate that the lake sustains."""
    rows = asked.rows or CHANGED_ROWS
    numbers = count()
    inserts, updates, deletes = _MIX
    chosen = Random(7)

    def change(connection: psycopg.Connection) -> int:
        first = rows + next(numbers) * inserts
        keys = [chosen.randint(1, rows) for _ in range(updates + deletes)]
        with connection.transaction():
            inserted = f"generate_series({first + 1}, {first + inserts}) AS n"
            done = connection.execute(f"INSERT INTO {TABLE} SELECT {VALUES} FROM {inserted}").rowcount
            statement = f"UPDATE {TABLE} SET total = total + 1 WHERE id = ANY(%s)"
            done += connection.execute(statement, [keys[:updates]]).rowcount
            return done + connection.execute(f"DELETE FROM {TABLE} WHERE id = ANY(%s)", [keys[updates:]]).rowcount

    mix = "/".join(f"{part * 100 // TRANSACTION}" for part in _MIX)
    yield from _sustained(
        "source_to_lake_changes", change, rows=rows, goal=">= 30,000",
        what=f"inserts, updates and deletes ({mix}) of uniformly random rows of {rows:,}",
    )  # fmt: skip


def _sustained(
    name: str, change: Callable[[psycopg.Connection], int], *, rows: int, goal: str, what: str
) -> Iterator[Figure]:
    """Yield the rate at which changes land, and its costs.

    Args:
        change: commits a transaction; returns the rows that it changed.
        rows: of the table before.
        what: the changes, for the note.
    """
    seconds = asked.seconds or SUSTAINED_S
    say(f"{name}_rows_per_s: {rows:,} rows, {seconds} s")
    with postgres() as server, folder("sustained") as path, server.connect(DATABASE) as connection:
        fill(server, rows)
        home = make_home(server, path / "home", [f"public.{TABLE}"])
        home.run("run", "--until-caught-up")
        took_s, cost = sustained(home, partial(change, connection), seconds)
    note = (
        f"{what} in transactions of {TRANSACTION:,} rows, {SHAPE}, by a client that waits while the lake lacks {AHEAD:,} records, for {seconds} s"
        f" after a warm-up; `millstream run` with all its parts, folds included"
    )
    yield reported(
        f"{name}_rows_per_s",
        [cost.rows / took_s],
        unit="rows/s",
        goal=goal,
        rows=cost.rows,
        size_bytes=cost.rows * ROW_BYTES,
        note=f"records that landed; {note}",
    )
    yield from cost_figures(name, [cost], row_bytes=ROW_BYTES, note=note)


def sustained(home: Home, change: Callable[[], int], seconds: float) -> tuple[float, Cost]:
    """Run `millstream run` under changes as fast as they land.

    Args:
        home: it has caught up.
        change: commits a transaction; returns the rows that it changed.
        seconds: how long, after a warm-up.

    Returns:
        The seconds that it took, and the cost of the records that landed in them.
    """
    with home.running("run") as run:
        watcher = _LandedWatcher(home)
        before = made = watcher.n

        def load_for(duration_s: float) -> None:
            nonlocal made
            ends_at = time.monotonic() + duration_s
            while time.monotonic() < ends_at:
                if made - watcher.n < AHEAD:
                    made += change()
                else:
                    time.sleep(LOOK_S / 5)

        made += change()
        wait_for("the first change in the lake", lambda: watcher.n > before, process=run)
        load_for(min(WARM_UP_S, seconds))
        watch, began_n, began_at = CostWatch(run.pid), watcher.n, time.perf_counter()
        load_for(seconds)
        landed_rows, took_s = watcher.n - began_n, time.perf_counter() - began_at
        cost = watch.stop(max(1, landed_rows))
        watcher.stop()
    return took_s, cost


@measures("tables_1000_touched", *cost_names("tables_1000_touched"))
def tables_1000_touched() -> Iterator[Figure]:
    """Measure the age of the oldest record that the lake lacks while every table gets ten rows a second."""
    tables = TABLES if asked.rows is None else max(2, asked.rows // _ROWS_A_TABLE)
    seconds = asked.seconds or TOUCHED_S
    say(f"tables_1000_touched: {tables} tables, {seconds} s")
    with postgres() as server, folder("touched") as path:
        with server.connect(DATABASE) as connection:
            for number in range(tables):
                connection.execute(f"CREATE TABLE touched{number} ({COLUMNS})")
        home = make_home(server, path / "home", ["public.*"])
        home.run("run", "--until-caught-up")
        with home.running("run") as run:
            marks, watcher = MarkWatcher(home.wal), _LandedWatcher(home)
            before = watcher.n
            rounds = count()
            with _every_second(partial(_touch, server, tables, rounds)):
                wait_for("the first rows in the lake", lambda: watcher.n > before, process=run)
                time.sleep(min(WARM_UP_S, seconds))
                watch, began_n, began_ns = CostWatch(run.pid), watcher.n, time.time_ns()
                time.sleep(seconds)
                cost = watch.stop(max(1, watcher.n - began_n))
                files = sum(file.is_file() for file in (home.path / "lake").rglob("*"))
            looks, marked = watcher.stop(), marks.stop()
    ages = oldest_ages_s(looks[looks[:, 0] >= began_ns], *marked)
    note = (
        f"{tables} tables that each get {ROWS_A_SECOND} rows a second in a transaction of their own, {SHAPE}, for {seconds} s after a warm-up;"
        " `millstream run` with all its parts, folds included"
    )
    yield reported(
        "tables_1000_touched",
        ages,
        unit="s",
        goal="p99 <= 30",
        rows=cost.rows,
        size_bytes=cost.rows * ROW_BYTES,
        note=f"p50; the age of the oldest record that the lake lacks, looked at every {LOOK_S:g} s; the lake has {files:,} files at the end; {note}",
        p99=[float(np.percentile(ages, 99))],
    )
    yield from cost_figures("tables_1000_touched", [cost], row_bytes=ROW_BYTES, note=note)


def oldest_ages_s(
    looks: npt.NDArray[np.int64], upto: npt.NDArray[np.int64], durable_ns: npt.NDArray[np.int64]
) -> list[float]:
    """Return the age of the oldest record that a view lacked at each look.

    Args:
        looks: a row a look: its time in nanoseconds, and the position of the view.
        upto: positions up to which the log was readable; they rise.
        durable_ns: when each of them was first seen.
    """
    ages = []
    for at_ns, n in looks.tolist():
        first = int(np.searchsorted(upto, n, side="right"))
        seen_ns = int(durable_ns[first]) if first < len(upto) else at_ns
        ages.append(max(0.0, (at_ns - seen_ns) / 1e9))
    return ages


@contextmanager
def _every_second(step: Callable[[], None]) -> Iterator[None]:
    """Call `step` in a thread, at once and then once a second, or as often as it manages; raise what it raised."""
    stop = threading.Event()

    def repeat() -> None:
        due = time.monotonic()
        while not stop.is_set():
            step()
            due = max(due + 1, time.monotonic() - 1)
            stop.wait(max(0.0, due - time.monotonic()))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(repeat)
        try:
            yield
        finally:
            stop.set()
        running.result()


def _touch(server: EmbeddedPostgres, tables: int, rounds: Iterator[int]) -> None:
    first = next(rounds) * ROWS_A_SECOND
    rows = f"generate_series({first + 1}, {first + ROWS_A_SECOND}) AS n"
    insert = sql.Literal(f" SELECT {VALUES} FROM {rows}")
    with server.connect(DATABASE) as connection:
        connection.execute(
            sql.SQL(
                "DO $$ BEGIN FOR t IN 0 .. {last} LOOP EXECUTE 'INSERT INTO touched' || t || {insert}; COMMIT; END LOOP; END $$"
            ).format(last=tables - 1, insert=insert)
        )


@measures("point_16_sessions_p99_ms")
def point_16_sessions() -> Iterator[Figure]:
    """Measure point queries of homes that stay open, side by side, while the table is updated."""
    rows, seconds = asked.rows or SESSIONS_ROWS, asked.seconds or SESSIONS_S
    say(f"point_16_sessions_p99_ms: {rows:,} rows, {RATE} updates a second for {seconds} s")
    with postgres(load_unsynced=False) as server, folder("points") as path:
        fill(server, rows)
        home = make_home(server, path / "home", [f"public.{TABLE}"])
        home.run("run", "--until-caught-up")
        stop = threading.Event()
        with home.running("run") as run, ThreadPoolExecutor(SESSIONS) as pool:
            with millstream.open(str(home.path)) as opened:
                wait_for("the lake", partial(has_rows, opened, rows), process=run)
            asking = [pool.submit(_ask_points, home, rows, stop, seed) for seed in range(SESSIONS)]
            try:
                load = paced(
                    server,
                    path,
                    f"\\set id random(1, {rows})\nUPDATE {TABLE} SET total = total + 1 WHERE id = :id",
                    seconds=seconds,
                )
            finally:
                stop.set()
            began_ns = int(load.committed_ns.min())
            times_ms = [took for one in asking for at_ns, took in one.result() if at_ns >= began_ns]
    yield reported(
        "point_16_sessions_p99_ms",
        [float(np.percentile(times_ms, 99))],
        unit="ms",
        goal="<= 2000",
        rows=rows,
        size_bytes=rows * ROW_BYTES,
        note=f"99th percentile of {len(times_ms):,} queries of one row by its key, back to back by {SESSIONS} threads of a process, each with a home of its own"
        f" that stays open, while {RATE} rows a second of {rows:,} are updated; median {float(np.median(times_ms)):.0f} ms; {SHAPE}",
    )


def _ask_points(home: Home, rows: int, stop: threading.Event, seed: int) -> Sequence[tuple[int, float]]:
    """Return when each query began, in nanoseconds, and the milliseconds that it took."""
    chosen, took = Random(seed), []
    with millstream.open(str(home.path)) as opened:
        while not stop.is_set():
            at_ns, began_at = time.time_ns(), time.perf_counter()
            found = opened.query(
                f"SELECT total FROM public.{TABLE} WHERE id = {chosen.randint(1, rows)}", stream=STREAM
            )
            took.append((at_ns, (time.perf_counter() - began_at) * 1000))
            if len(found) != 1:
                raise AssertionError(f"a query by key answered {len(found)} rows")
    return took
