"""The price of being distributed: a Spark standalone cluster on this machine; the peer is `local[*]` on its cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import psycopg
from tests.e2e.standalone_cluster import StandaloneCluster, worker_python

import millstream
from bench.costs import run_watched
from bench.figures import Figure, asked, measures, reported, say
from bench.first_load import TABLE, fill
from bench.homes import MILLSTREAM, STREAM, Home, make_home
from bench.landing import TRANSACTION, has_rows, sustained
from bench.places import as_installed, folder
from bench.source import DATABASE, ROW_BYTES, SHAPE, VALUES, postgres
from millstream.testing._servers.ports import free_port
from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.s3 import EmbeddedS3

ROWS = 1_000_000
SECONDS = 30
RUNS = 3
"""Fewer than for other figures: a round of the three sides takes some minutes."""
_LOCAL = "local"
_WORKERS = {"one_worker": 1, "two_workers": 2}
_FIGURES = ("first_load", "landing")


@measures(*(f"cluster_vs_local_{figure}_{workers}" for workers in _WORKERS for figure in _FIGURES))
def cluster_vs_local() -> Iterator[Figure]:
    """Measure a first load, and inserts that land as fast as they can, on one worker, on two, and without a cluster."""
    rows, seconds, cores = asked.rows or ROWS, asked.seconds or SECONDS, os.cpu_count() or 1
    if (python := worker_python()) is None:
        say("cluster_vs_local: left out, another user's workers need a Python of this minor version in /usr/bin")
        return
    say(f"cluster_vs_local: {rows:,} rows, {seconds} s")
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    with postgres() as server, folder("cluster") as path, ExitStack() as stack:
        fill(server, rows)
        sides = {_LOCAL: ""}
        for name, workers in _WORKERS.items():
            cluster = StandaloneCluster(path, cores=max(1, cores // workers), workers=workers)
            sides[name] = _spark_sections(path, stack.enter_context(cluster).url, python)
        for number in range((asked.runs or RUNS) + 1):
            for name, sections in sides.items() if number % 2 else reversed(sides.items()):
                loaded, landed = _rates(server, path, sections, rows, seconds)
                say(f"  {f'run {number}' if number else 'warm-up'}: {name} loads {loaded:,.0f}, lands {landed:,.0f}")
                if number:
                    rates[name, "first_load"].append(loaded)
                    rates[name, "landing"].append(landed)
    what = {
        "first_load": f"`millstream run --until-caught-up` on a fresh home, {rows:,} rows",
        "landing": f"inserts in transactions of {TRANSACTION:,} rows as fast as they land, for {seconds} s after a warm-up",
    }
    for name, workers in _WORKERS.items():
        for figure in _FIGURES:
            yield reported(
                f"cluster_vs_local_{figure}_{name}",
                rates[name, figure],
                rates[_LOCAL, figure],
                unit="rows/s",
                goal="reported",
                rows=rows,
                size_bytes=rows * ROW_BYTES,
                note=f"{what[figure]}; a standalone cluster of {workers} worker(s) that can't read the home, with {cores} cores in all: its executors read"
                f" the log by Flight; the peer is local[*]; both have a Delta lake in S3 (moto); {SHAPE}; medians of {RUNS} rounds",
            )


def _spark_sections(path: Path, master: str, python: str) -> str:
    """Return the configuration's sections for a cluster, whose executors get their packages from the driver."""
    packages = path / "packages.tar.gz"
    command = [MILLSTREAM, "pipeline", "env", str(packages), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, env=as_installed())
    conf = json.loads(done.stdout)["conf"] | {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "1g",
        "spark.pyspark.python": python,
    }
    lines = "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in conf.items())
    return f"[spark]\nmaster = {json.dumps(master)}\n[spark.conf]\n{lines}"


def _rates(server: EmbeddedPostgres, path: Path, sections: str, rows: int, seconds: int) -> tuple[float, float]:
    """Return the rows that a new home loads, and then lands, in a second."""
    with EmbeddedS3(path / "s3") as store, server.connect(DATABASE, autocommit=True) as connection:
        home = make_home(server, path / "home", [f"public.{TABLE}"])
        options = "".join(f"{name} = {json.dumps(value)}\n" for name, value in store.lake_options.items())
        file, own = home.path / "millstream.toml", 'location = "lake"'
        text = file.read_text()
        assert own in text, "init writes the lake's folder"
        text = text.replace(own, f'location = "{store.url}/lake"')
        file.write_text(
            f"{text}\n[streams.{STREAM}.lake.storage_options]\n{options}"
            f'[http]\nlisten = "127.0.0.1:{free_port()}"\ntokens_required = true\n'
            f'[flight]\nlisten = "127.0.0.1:{free_port()}"\n{sections}'
        )
        try:
            loaded_s, _ = run_watched(home.command("run", "--until-caught-up"), rows)
            _check_rows(home, rows)
            landed_s, cost = sustained(home, partial(_insert, connection, count(rows + 1, TRANSACTION)), seconds)
            return rows / loaded_s, cost.rows / landed_s
        finally:
            home.forget(server)
            connection.execute(f"DELETE FROM {TABLE} WHERE id > %s", [rows])
            connection.execute(f"VACUUM (FREEZE, ANALYZE) {TABLE}")
            shutil.rmtree(home.path, ignore_errors=True)
            shutil.rmtree(path / "s3", ignore_errors=True)


def _check_rows(home: Home, rows: int) -> None:
    with millstream.open(str(home.path)) as opened:
        if not has_rows(opened, rows):
            raise AssertionError(f"the lake doesn't have the source's {rows} rows")


def _insert(connection: psycopg.Connection, first_ids: Iterator[int]) -> int:
    first = next(first_ids)
    rows = f"generate_series({first}, {first + TRANSACTION - 1}) AS n"
    return connection.execute(f"INSERT INTO {TABLE} SELECT {VALUES} FROM {rows}").rowcount
