"""The main job on a Spark standalone cluster whose workers can't read the home, with the lake in an object store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from tests.e2e.clustered_home import KEY, Setting, clustered

from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.s3 import EmbeddedS3

pytestmark = pytest.mark.siege

ROWS = 20_000


@pytest.fixture(scope="module")
def setting(postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("cluster")
    with EmbeddedS3(folder / "s3") as store:
        lake = {"": {"location": f"{store.url}/lake"}}
        with clustered(postgres_server, folder, "clustered", store, ROWS, lake) as setting:
            yield setting


def test_first_load_and_changes_land_as_on_one_machine(setting: Setting) -> None:
    setting.check()
    setting.change(ROWS)
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
    with setting.home.running() as run:
        setting.lands(run, "batches land")
        said = setting.texts(run)
        assert run.stop() == 0
    assert not re.findall(r"mst_[0-9a-f]{12}_\w{43}", said)
    assert KEY not in said


@pytest.mark.parametrize("victim", ["python worker", "executor", "worker", "driver", "master"])
def test_a_kill_loses_and_doubles_nothing(setting: Setting, victim: str) -> None:
    with setting.home.running() as run:
        setting.lands(run, "batches land")
        setting.kill(run, victim)
        setting.lands(run, "landing goes on")
        assert run.stop() == 0
    setting.home.caught_up()
    setting.check()
