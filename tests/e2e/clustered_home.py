"""A home whose pipeline runs on a standalone cluster, with its lake in an object store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from tests.e2e.harness import Home, Run, wait_for
from tests.e2e.standalone_cluster import StandaloneCluster, worker_python

from millstream.testing._servers.ports import free_port
from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.s3 import EmbeddedS3

KEY = "kept-from-the-eyes-of-others"
"""The lake's secret key, and its catalog's token: the servers accept any."""


@dataclass
class Setting:
    """A home, its source and its cluster."""

    home: Home
    cluster: StandaloneCluster
    store: EmbeddedS3
    source: psycopg.Connection[Any]
    marks: int = 0

    def queried(self, sql: str) -> list[dict[str, Any]]:
        return list(json.loads(self.home.command("query", sql, "--format", "json", "--lake-only")))

    def check(self) -> None:
        """Check that `current` equals the source, and that `history` has each change once."""
        self.home.command("diff")
        source = self.source.execute("SELECT id, n FROM items ORDER BY id").fetchall()
        assert [(row["id"], row["n"]) for row in self.queried("SELECT id, n FROM public.items ORDER BY id")] == source
        history = self.queried('SELECT count(*) AS c, count(DISTINCT __seq) AS d FROM history."public.items"')
        assert history[0]["c"] == history[0]["d"]
        # Each update adds one to n, so the last image tells how many images there must have been.
        updates = self.queried(
            "SELECT id, count(*) AS u FROM history.\"public.items\" WHERE __op = 'u' GROUP BY id ORDER BY id"
        )
        copied = self.queried(
            "SELECT id, max(n) AS n FROM history.\"public.items\" WHERE __op IN ('r', 'c') GROUP BY id"
        )
        first = {row["id"]: row["n"] for row in copied}
        expected = {key: n - first[key] for key, n in source if n > first[key]}
        assert {row["id"]: row["u"] for row in updates if row["id"] in dict(source)} == expected

    def lands(self, run: Run, what: str) -> None:
        """Change rows until a change of now is in the lake."""
        self.marks += 1
        key = 1_000_000 + self.marks
        self.source.execute("INSERT INTO items (id, v) VALUES (%s, 'mark')", (key,))

        def landed() -> bool:
            assert run.process.poll() is None, run.output()[-4000:]
            self.source.execute("UPDATE items SET n = n + 1 WHERE id <= 1000 AND id %% 100 = %s", (self.marks % 100,))
            return bool(self.queried(f'SELECT id FROM history."public.items" WHERE id = {key}'))

        wait_for(landed, what, timeout_s=400)

    def texts(self, run: Run) -> str:
        """Return what a run shows of itself: logs, environments, command lines and files of the cluster's processes."""
        cluster = self.cluster
        found = [cluster.said("master"), cluster.said("worker"), cluster.executors_said(), run.output()]
        for process in [*cluster.processes(""), *map(psutil.Process, run.children())]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [" ".join(process.cmdline()), json.dumps(process.environ())]
        folders = [cluster.path / "work", self.home.path / "data" / "spark", *Path("/tmp").glob("spark-*")]
        for file in (file for folder in folders for file in folder.rglob("*") if is_written_by_a_run(file)):
            with contextlib.suppress(OSError):
                found.append(file.read_bytes().decode("latin-1"))
        said = "\n".join(found)
        assert "org.apache.spark.executor.CoarseGrainedExecutorBackend" in said, "the executors were looked at"
        return said

    def kill(self, run: Run, victim: str) -> None:
        """Kill a part of the cluster or of the run; a worker and a master are started again."""
        cluster = self.cluster
        if victim == "worker":
            cluster.kill_workers()
            cluster.start_worker()
        elif victim == "master":
            cluster.kill_master()
            cluster.start_master()
        else:
            killed = victims(cluster, run, victim)
            assert killed
            for process in killed:
                process.kill()

    def change(self, rows: int) -> None:
        """Update rows, delete the last 500 of them, add a column, and insert a row."""
        self.source.execute("UPDATE items SET n = n + 1, v = repeat('x', 100) WHERE id <= 1000")
        self.source.execute("DELETE FROM items WHERE id > %s", (rows - 500,))
        self.source.execute("ALTER TABLE items ADD COLUMN price numeric(10,2)")
        self.source.execute("INSERT INTO items VALUES (100000, 'priced', 0, 9.99)")


@contextlib.contextmanager
def clustered(
    server: EmbeddedPostgres,
    folder: Path,
    database: str,
    store: EmbeddedS3,
    rows: int,
    lake: Mapping[str, Mapping[str, str]],
) -> Iterator[Setting]:
    """Run a cluster, load rows into the table `items`, and yield once the first load has landed.

    Args:
        server: gets the database.
        folder: for the home, next to the packages.
        database: its name, and the slot's.
        store: where the lake lies.
        rows: how many.
        lake: settings of the stream's lake: by section (empty: its own), name and value.
    """
    home = Home(folder / "shop", server.create_database(database), slot=database)
    with StandaloneCluster(home.path) as cluster, server.connect(database, autocommit=True) as source:
        home.init()
        keys = {"storage_options": store.lake_options | {"AWS_SECRET_ACCESS_KEY": KEY}}
        sections = (
            (f"[streams.shop.lake.{name}]\n" if name else "")
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            for name, values in (dict(lake) | keys).items()
        )
        home.set_lake("".join(sections))
        packed = json.loads(home.command("pipeline", "env", str(folder / "packages.tar.gz"), "--json", home=False))
        conf = packed["conf"] | {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "1g"}
        if (python := worker_python()) is None:
            pytest.skip("another user's workers need a Python of this minor version in /usr/bin")
        conf["spark.pyspark.python"] = python
        lines = "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in conf.items())
        config = home.path / "millstream.toml"
        config.write_text(
            f"{config.read_text()}\n[spark]\nmaster = {json.dumps(cluster.url)}\n[spark.conf]\n{lines}"
            f'[http]\nlisten = "127.0.0.1:{free_port()}"\ntokens_required = true\n'
            f'[flight]\nlisten = "127.0.0.1:{free_port()}"\n'
        )
        source.execute("CREATE TABLE items (id int PRIMARY KEY, v text, n int NOT NULL DEFAULT 0)")
        source.execute("INSERT INTO items SELECT i, 'v' || i FROM generate_series(1, %s) AS i", (rows,))
        home.caught_up()
        yield Setting(home, cluster, store, source)


def victims(cluster: StandaloneCluster, run: Run, victim: str) -> list[psutil.Process]:
    """Return the processes to kill."""
    if victim == "driver":
        driver = run.child("pipeline run")
        return [] if driver is None else [psutil.Process(driver)]
    return cluster.processes({"python worker": "pyspark.daemon", "executor": "CoarseGrainedExecutorBackend"}[victim])


def is_written_by_a_run(file: Path) -> bool:
    """Whether a file isn't one of the packages, which were packed before there was a secret."""
    return "millstream-executor" not in str(file) and not file.name.endswith((".jar", ".tar.gz")) and file.is_file()
