"""The main job with the lake in an object store: from PostgreSQL to queries, as with a lake in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.commands import run_command
from tests.e2e.harness import Home
from tests.servers.store_proxy import Fault, FaultRule, StoreProxy

from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.s3 import EmbeddedS3

pytestmark = pytest.mark.siege


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path / "s3") as server:
        yield server


@pytest.mark.usefixtures("spark")
def test_every_command_works_on_a_lake_in_an_object_store(
    store: EmbeddedS3, postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("stored"), slot="stored")
    home.init()
    options = store.lake_options
    keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    views = 'views = ["current", "history", "scd2"]'
    home.set_lake(f'location = "{store.url}/lake"\n{views}\n[streams.shop.lake.storage_options]\n{keys}')

    def queried(sql: str, *options: str) -> list[dict[str, object]]:
        said = home.command("query", sql, "--format", "json", *options)
        return list(json.loads(said))

    everything = "SELECT id, v FROM public.items ORDER BY id"
    with postgres_server.connect("stored", autocommit=True) as connection:
        run = connection.execute
        run("CREATE TABLE items (id int PRIMARY KEY, v text)")
        run("INSERT INTO items SELECT i, 'v' || i FROM generate_series(1, 500) AS i")
        assert home.caught_up_here() == {}
        first = home.status()["streams"][0]["tokens"]["landed"]
        copied = queried(everything)
        assert copied == [{"id": i, "v": f"v{i}"} for i in range(1, 501)]
        run("UPDATE items SET v = 'new' WHERE id <= 100")
        run("DELETE FROM items WHERE id > 490")
        run("ALTER TABLE items ADD COLUMN price numeric(10,2)")
        run("INSERT INTO items VALUES (1000, 'priced', 9.99)")
        assert home.caught_up_here() == {}
        changed = [
            {"id": i, "v": "new" if i <= 100 else "priced" if i == 1000 else f"v{i}"} for i in (*range(1, 491), 1000)
        ]
        assert queried(everything) == changed
        assert queried(everything, "--lake-only") == changed
        assert queried(everything, "--as-of", first) == copied
        home.command("pipeline", "fold")
        home.command("diff")
        home.command("pipeline", "rebuild", "public.items")
        home.command("diff")
        assert queried(everything) == changed
    current = DeltaTable(f"{store.url}/lake/shop/current/public.items", storage_options=options).to_pyarrow_table()
    assert sorted(current["id"].to_pylist()) == [row["id"] for row in changed]
    scd2 = DeltaTable(f"{store.url}/lake/shop/scd2/public.items", storage_options=options).to_pyarrow_table()
    assert scd2.num_rows == 500 + 100 + 1
    assert sum(scd2["is_current"].to_pylist()) == len(changed)
    assert not (home.path / "lake").exists(), "a part of the lake lies in the home"
    store.kill()
    said = home.command("doctor", "--json", check=False)
    assert "lake_unavailable" in said


@pytest.mark.usefixtures("spark")
def test_a_store_that_refuses_ends_a_job_at_once_and_one_that_stumbles_does_not(
    store: EmbeddedS3, postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("stumbling"), slot="stumbling")
    home.init()
    with (
        StoreProxy(tmp_path / "proxy", store.endpoint) as proxy,
        postgres_server.connect("stumbling", autocommit=True) as connection,
    ):
        options = store.lake_options | {"AWS_ENDPOINT_URL": proxy.url}
        keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
        home.set_lake(f'location = "{store.url}/lake"\n[streams.shop.lake.storage_options]\n{keys}')
        connection.execute("CREATE TABLE items (id int PRIMARY KEY, v text)")
        connection.execute("INSERT INTO items SELECT i, 'v' || i FROM generate_series(1, 500) AS i")
        proxy.set_rules([FaultRule(Fault.FORBIDDEN, "PUT"), FaultRule(Fault.FORBIDDEN, "POST")])
        done = run_command(home._words(["run", "--until-caught-up"]), timeout=300)
        refused = [one for one in proxy.requests() if one.fault is not None]
        assert done.returncode == 1
        assert "lake_forbidden" in done.stderr
        assert len(refused) == len({one.path for one in refused}), "a refused request was sent again"
        assert home.status()["streams"][0]["lake"] == {"state": "lake_forbidden"}
        proxy.set_rules(
            [
                FaultRule(Fault.CUT_AFTER, "PUT", r"_commits/_delta_log/\d+\.json", times=1),
                FaultRule(Fault.BUSY_AFTER, "PUT", r"history/.*/_delta_log/\d+\.json", times=2),
                FaultRule(Fault.BUSY, times=20),
            ]
        )
        assert home.caught_up_here() == {}
        assert sum(one.fault is not None for one in proxy.requests()) == len(refused) + 23
        assert home.status()["streams"][0]["lake"] == {"state": "ok"}
        home.command("diff")
