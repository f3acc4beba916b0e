"""The main job on a Spark standalone cluster whose workers can't read the home, with the lake in an object store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from tests.e2e.harness import Home, Run, wait_for
from tests.e2e.standalone_cluster import StandaloneCluster

from millstream.testing._servers.ports import free_port
from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.s3 import EmbeddedS3

pytestmark = pytest.mark.siege

ROWS = 20_000
KEY = "kept-from-the-eyes-of-others"
"""The lake's secret key: the store accepts any."""


@dataclass
class Setting:
    """A home, its source and its cluster; the first load has landed."""

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


@pytest.fixture(scope="module")
def setting(postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("cluster")
    home = Home(folder / "shop", postgres_server.create_database("clustered"), slot="clustered")
    with (
        EmbeddedS3(folder / "s3") as store,
        StandaloneCluster(home.path) as cluster,
        postgres_server.connect("clustered", autocommit=True) as source,
    ):
        home.init()
        options = store.lake_options | {"AWS_SECRET_ACCESS_KEY": KEY}
        keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
        home.set_lake(f'location = "{store.url}/lake"\n[streams.shop.lake.storage_options]\n{keys}')
        packed = json.loads(home.command("pipeline", "env", str(folder / "packages.tar.gz"), "--json", home=False))
        conf = packed["conf"] | {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "1g"}
        # /usr/bin has the same minor version as this Python, and none of its packages.
        conf["spark.pyspark.python"] = worker_python()
        lines = "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in conf.items())
        config = home.path / "millstream.toml"
        config.write_text(
            f"{config.read_text()}\n[spark]\nmaster = {json.dumps(cluster.url)}\n[spark.conf]\n{lines}"
            f'[http]\nlisten = "127.0.0.1:{free_port()}"\ntokens_required = true\n'
            f'[flight]\nlisten = "127.0.0.1:{free_port()}"\n'
        )
        source.execute("CREATE TABLE items (id int PRIMARY KEY, v text, n int NOT NULL DEFAULT 0)")
        source.execute("INSERT INTO items SELECT i, 'v' || i FROM generate_series(1, %s) AS i", (ROWS,))
        home.caught_up()
        yield Setting(home, cluster, store, source)


def worker_python() -> str:
    """Return a Python for workers: of this minor version, outside of this environment."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    system = Path("/usr/bin") / name
    if os.geteuid() == 0:
        if not system.exists():
            pytest.skip(f"another user's workers need {system}")
        return str(system)
    return str(Path(sys.base_prefix) / "bin" / name)


def test_first_load_and_changes_land_as_on_one_machine(setting: Setting) -> None:
    setting.check()
    setting.source.execute("UPDATE items SET n = n + 1, v = repeat('x', 100) WHERE id <= 1000")
    setting.source.execute("DELETE FROM items WHERE id > %s", (ROWS - 500,))
    setting.source.execute("ALTER TABLE items ADD COLUMN price numeric(10,2)")
    setting.source.execute("INSERT INTO items VALUES (100000, 'priced', 0, 9.99)")
    setting.home.caught_up()
    setting.check()
    assert setting.home.status()["streams"][0]["pipeline"] == {"log_access": "flight", "waits_for": None}
    # Tokens of executors end with their driver.
    assert json.loads(setting.home.command("token", "ls", "--json")) == []


def test_doctor_asks_the_executors(setting: Setting) -> None:
    checks = json.loads(setting.home.command("doctor", "--json"))["checks"]
    assert {check["name"]: check["ok"] for check in checks} == dict.fromkeys(
        ("spark.master", "spark.python", "executor.log", "executor.lake", "clocks", "lake.credentials", "lake.bucket"),
        True,
    )


def test_secrets_are_in_no_file_environment_or_command_line_of_the_cluster(setting: Setting) -> None:
    cluster = setting.cluster
    with setting.home.running() as run:
        setting.lands(run, "batches land")
        texts = [cluster.said("master"), cluster.said("worker"), cluster.executors_said(), run.output()]
        for process in [*cluster.processes(""), *map(psutil.Process, run.children())]:
            with contextlib.suppress(psutil.NoSuchProcess):
                texts += [" ".join(process.cmdline()), json.dumps(process.environ())]
        folders = [cluster.path / "work", setting.home.path / "data" / "spark", *Path("/tmp").glob("spark-*")]
        for file in (file for folder in folders for file in folder.rglob("*") if is_written_by_a_run(file)):
            with contextlib.suppress(OSError):
                texts.append(file.read_bytes().decode("latin-1"))
        assert run.stop() == 0
    said = "\n".join(texts)
    assert "org.apache.spark.executor.CoarseGrainedExecutorBackend" in said, "the executors were looked at"
    assert not re.findall(r"mst_[0-9a-f]{12}_\w{43}", said)
    assert KEY not in said


def is_written_by_a_run(file: Path) -> bool:
    """Whether a file isn't one of the packages, which were packed before there was a secret."""
    return "millstream-executor" not in str(file) and not file.name.endswith((".jar", ".tar.gz")) and file.is_file()


@pytest.mark.parametrize("victim", ["python worker", "executor", "worker", "driver", "master"])
def test_a_kill_loses_and_doubles_nothing(setting: Setting, victim: str) -> None:
    cluster = setting.cluster
    with setting.home.running() as run:
        setting.lands(run, "batches land")
        if victim == "worker":
            cluster.kill_worker()
            cluster.start_worker()
        elif victim == "master":
            cluster.kill_master()
            cluster.start_master()
        else:
            killed = victims(cluster, run, victim)
            assert killed
            for process in killed:
                process.kill()
        setting.lands(run, "landing goes on")
        assert run.stop() == 0
    setting.home.caught_up()
    setting.check()


def victims(cluster: StandaloneCluster, run: Run, victim: str) -> list[psutil.Process]:
    """Return the processes to kill."""
    if victim == "driver":
        driver = run.child("pipeline run")
        return [] if driver is None else [psutil.Process(driver)]
    return cluster.processes({"python worker": "pyspark.daemon", "executor": "CoarseGrainedExecutorBackend"}[victim])
