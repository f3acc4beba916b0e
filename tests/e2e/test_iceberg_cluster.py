"""Iceberg tables on a cluster: executors have pyiceberg without SQLAlchemy, and reach the catalog's server and the store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from pyiceberg.catalog.rest import RestCatalog
from tests.e2e.clustered_home import KEY, Setting, clustered

from millstream.testing.iceberg_rest import EmbeddedIcebergCatalog
from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.s3 import EmbeddedS3

pytestmark = pytest.mark.siege


ROWS = 3000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture(scope="module")
def catalog(store: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedIcebergCatalog]:
    folder = tmp_path_factory.mktemp("catalog")
    with EmbeddedIcebergCatalog(folder, store.options, f"{store.url}/warehouse") as server:
        yield server


@pytest.fixture(scope="module")
def setting(
    postgres_server: EmbeddedPostgres,
    store: EmbeddedS3,
    catalog: EmbeddedIcebergCatalog,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Setting]:
    lake = {"": {"format": "iceberg"}, "catalog": {"type": "rest", "uri": catalog.uri, "token": KEY}}
    folder = tmp_path_factory.mktemp("cluster")
    with clustered(postgres_server, folder, "iceberg_clustered", store, ROWS, lake) as setting:
        yield setting


def test_changes_land_in_the_catalogs_tables(
    setting: Setting, store: EmbeddedS3, catalog: EmbeddedIcebergCatalog
) -> None:
    setting.check()
    setting.change(ROWS)
    setting.home.caught_up()
    setting.check()
    assert setting.home.status()["streams"][0]["pipeline"] == {"log_access": "flight", "waits_for": None}
    keys = {"endpoint": store.endpoint, "access-key-id": "test", "secret-access-key": "test", "region": "us-east-1"}
    other = RestCatalog("other", uri=catalog.uri, **{f"s3.{name}": value for name, value in keys.items()})
    current = other.load_table(("shop_current", "public__items"))
    assert current.location().startswith(f"{store.url}/warehouse/")
    rows = current.scan(selected_fields=("id", "n", "price")).to_arrow().sort_by("id")
    source = setting.source.execute("SELECT id, n, price FROM items ORDER BY id").fetchall()
    assert [tuple(row.values()) for row in rows.to_pylist()] == source


def test_doctor_asks_the_executors_and_the_catalog(setting: Setting) -> None:
    checks = json.loads(setting.home.command("doctor", "--json"))["checks"]
    executors = ("spark.master", "spark.python", "executor.log", "executor.lake", "clocks")
    lake = ("lake.credentials", "lake.bucket", "lake.catalog")
    assert {check["name"]: check["ok"] for check in checks} == dict.fromkeys((*executors, *lake), True)


def test_the_catalogs_token_is_in_no_file_environment_or_command_line_of_the_cluster(setting: Setting) -> None:
    with setting.home.running() as run:
        setting.lands(run, "batches land")
        said = setting.texts(run)
        assert run.stop() == 0
    assert KEY not in said
    assert not re.findall(r"mst_[0-9a-f]{12}_\w{43}", said)


@pytest.mark.parametrize("victim", ["python worker", "worker"])
def test_a_kill_loses_and_doubles_nothing(setting: Setting, victim: str) -> None:
    with setting.home.running() as run:
        setting.lands(run, "batches land")
        setting.kill(run, victim)
        setting.lands(run, "landing goes on")
        assert run.stop() == 0
    setting.home.caught_up()
    setting.check()
