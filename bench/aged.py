"""The cost of a lake with months of state, and of many idle tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from deltalake import DeltaTable

from bench.costs import CostWatch
from bench.figures import Figure, asked, interleaved, measures, reported, say
from bench.homes import STREAM, make_home, wait_for
from bench.made_lakes import ACCOUNTS, ACCOUNTS_SHAPE, Ids, Lake, uniform
from bench.places import folder
from bench.source import DATABASE, postgres
from millstream.lake.commit_cuts import last_cut
from millstream.lake.history import open_history
from millstream.lake.layout import COMMITS
from millstream.lake.maintenance import maintain_cuts, maintain_table
from millstream.lake.query.query_session import LakeSession

DAYS = 182
BATCHES_A_DAY = 8
_ROWS = 10_000
_CHANGED = 50
_ROWS_A_DAY = 2_000
"""When the figure is tried with fewer rows: so many rows stand for a day."""
_LATER_MS = 7_200_000
"""The clock of maintenance is ahead by so much: Delta stamps commits by the machine's, which can't be injected."""
TABLES = 1000
IDLE_S = 60


@measures("batch_cost_aged")
def batch_cost_aged() -> Iterator[Figure]:
    """Measure a batch, its fold, the opening of the lake and a query; the peer is a young lake with the same rows."""
    days = DAYS if asked.rows is None else max(2, asked.rows // _ROWS_A_DAY)
    say(f"batch_cost_aged: {days} days of {BATCHES_A_DAY} batches")
    with folder("aged") as path:
        aged, young = _loaded(path / "aged"), _loaded(path / "young")
        _grow_old(aged, days)
        parts: dict[str, list[float]] = {}
        values = interleaved(lambda: _batch_ms(aged, parts, "aged"), lambda: _batch_ms(young, parts, "young"))
        yield reported(
            "batch_cost_aged",
            *values,
            unit="ms",
            goal="<= 1.2",
            rows=_ROWS,
            size_bytes=days * BATCHES_A_DAY * _CHANGED * 100,
            note=f"{days} days of {BATCHES_A_DAY} batches of {_CHANGED} updates, a fold and maintenance a day, made by the product's writers"
            f" under an injected clock; a table of {_ROWS:,} rows, {ACCOUNTS_SHAPE}; timed: append of {_CHANGED} updates with its cut, fold with its"
            " cut, opening of the last cut and of history, a point query; the peer is a young lake with equal rows."
            f" Processor time in ms, medians with least and greatest: {_said(parts)}",
        )


def _loaded(path: Path) -> Lake:
    lake = Lake(path)
    lake.load(_ROWS)
    return lake


def _grow_old(lake: Lake, days: int) -> None:
    first = datetime.now(UTC) - timedelta(days=days)
    for day in range(days):
        for batch in range(BATCHES_A_DAY):
            at = first + timedelta(days=day, hours=batch * 24 / BATCHES_A_DAY)
            lake.append("u", uniform(_ROWS, _CHANGED, seed=day * BATCHES_A_DAY + batch), cut=True, at=at)
        lake.fold()
        _maintain(lake)


def _maintain(lake: Lake) -> None:
    now_ms = time.time_ns() // 1_000_000 + _LATER_MS
    for view in ("history", "current"):
        maintain_table(lake.layout, view, ACCOUNTS, now_ms=now_ms)
    maintain_cuts(lake.layout, now_ms=now_ms)


def _batch_ms(lake: Lake, parts: dict[str, list[float]], side: str) -> float:
    """Return the milliseconds of one round; `parts` gets the processor time of each step."""
    ids: Ids = uniform(_ROWS, _CHANGED, seed=int(lake.n))
    total = whole = 0.0
    for name, step in (
        ("append", lambda: lake.append("u", ids, cut=True)),
        ("fold", lake.fold),
        ("open", lambda: (last_cut(lake.layout), open_history(lake.layout, ACCOUNTS))),
        ("query", lambda: _asked(lake, int(ids[0]))),
    ):
        began_at, cpu_at = time.perf_counter(), time.process_time()
        step()
        took = (time.perf_counter() - began_at) * 1000
        cpu = (time.process_time() - cpu_at) * 1000
        whole += cpu
        parts.setdefault(f"{name} {side}", []).append(cpu)
        total += took
    parts.setdefault(f"all {side}", []).append(whole)
    return total


def _asked(lake: Lake, key: int) -> None:
    with LakeSession(lake.layout) as session:
        session.query(f"SELECT total FROM public.accounts WHERE id = {key}")


def _said(parts: dict[str, list[float]]) -> str:
    return ", ".join(
        f"{name} {float(np.median(values)):.0f} ({min(values):.0f}–{max(values):.0f})"
        for name, values in sorted(parts.items())
    )


@measures("tables_1000_idle")
def tables_1000_idle() -> Iterator[Figure]:
    """Measure the processor time of `millstream run` while no table changes."""
    tables = TABLES if asked.rows is None else max(2, asked.rows // _ROWS_A_DAY)
    seconds = asked.seconds or IDLE_S
    say(f"tables_1000_idle: {tables} tables, {seconds} s")
    with postgres() as server, folder("idle") as path:
        with server.connect(DATABASE) as connection:
            for number in range(tables):
                connection.execute(f"CREATE TABLE idle{number} (id bigint PRIMARY KEY, note text)")
                connection.execute(f"INSERT INTO idle{number} VALUES (1, 'one')")
        home = make_home(server, path / "home", ["public.*"])
        home.run("run", "--until-caught-up")
        cuts = str(home.path / "lake" / STREAM / COMMITS)
        with home.running("run") as run:
            before = DeltaTable(cuts).version()
            with server.connect(DATABASE) as connection:
                connection.execute("INSERT INTO idle0 VALUES (2, 'two')")
            wait_for("the row in the lake", lambda: DeltaTable(cuts).version() > before, process=run)
            time.sleep(seconds)
            watch = CostWatch(run.pid)
            began_at = time.perf_counter()
            time.sleep(seconds)
            took_s = time.perf_counter() - began_at
            cost = watch.stop(0)
    yield reported(
        "tables_1000_idle",
        [100 * cost.cpu_s / took_s],
        unit="%",
        goal="<= 10",
        rows=tables,
        size_bytes=cost.written_bytes,
        note=f"CPU of all processes of `millstream run` over {seconds} s, from {seconds} s after it landed a last row; one core is 100 %; {tables} tables of a row"
        f" each, all landed and folded before; {cost.written_bytes / 1e6:.1f} MB written, {cost.peak_bytes / 1e6:.0f} MB of memory",
    )
