"""The main job with the lake as Iceberg tables: from PostgreSQL to queries and to other programs, as with Delta."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table
from tests.commands import run_command
from tests.e2e.harness import Home
from tests.servers.store_proxy import Fault, FaultRule, StoreProxy

from millstream.testing.iceberg_rest import EmbeddedIcebergCatalog
from millstream.testing.pytest_plugin import Database
from millstream.testing.s3 import EmbeddedS3


def table(home: Home, view: str, name: str) -> Table:
    """Return a table as another program opens it."""
    catalog = SqlCatalog("millstream", uri=f"sqlite:///{home.path}/data/iceberg.db")
    return catalog.load_table((f"shop_{view}", name))


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_iceberg_tables_follow_the_source_and_other_programs_read_them(postgres: Database, tmp_path: Path) -> None:
    source = postgres.connect()
    source.execute("CREATE TABLE items (id int PRIMARY KEY, v text, small smallint, tags text[])")
    source.execute("CREATE TABLE bag (a text, b numeric(10,2))")
    source.execute("ALTER TABLE bag REPLICA IDENTITY FULL")
    source.execute("INSERT INTO items SELECT i, 'v' || i, i, ARRAY['t' || i] FROM generate_series(1, 300) AS i")
    source.execute("INSERT INTO bag VALUES ('x', 'NaN'), ('x', 1), ('x', 1)")
    home = Home(tmp_path / "shop", postgres.dsn)
    home.init()
    home.set_lake('format = "iceberg"\n')

    def queried(sql: str, *options: str) -> list[dict[str, Any]]:
        return list(json.loads(home.command("query", sql, "--format", "json", *options)))

    assert home.caught_up_here() == {}
    first = home.status()["streams"][0]["tokens"]["landed"]
    everything = "SELECT id, v, small, tags FROM public.items ORDER BY id"
    copied = queried(everything)
    assert copied == [{"id": i, "v": f"v{i}", "small": i, "tags": [f"t{i}"]} for i in range(1, 301)]
    assert table(home, "current", "public__items").scan().to_arrow().sort_by("id").to_pylist() == copied
    assert queried("SELECT count(*) n, count(b) b FROM public.bag") == [{"n": 3, "b": 2}]

    source.execute("UPDATE items SET v = 'new' WHERE id <= 100")
    source.execute("DELETE FROM items WHERE id > 290")
    source.execute("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE b = 1)")
    source.execute("ALTER TABLE items RENAME COLUMN v TO value")
    source.execute("ALTER TABLE items ALTER COLUMN small TYPE bigint, ADD COLUMN price numeric(10,2)")
    source.execute("INSERT INTO items VALUES (1000, 'priced', 70000000000, NULL, 9.99)")
    assert home.caught_up_here() == {}
    changed = "SELECT id, value, small, price FROM public.items ORDER BY id"
    expected = [
        {"id": i, "value": "new" if i <= 100 else f"v{i}", "small": i, "price": None} for i in range(1, 291)
    ] + [{"id": 1000, "value": "priced", "small": 70_000_000_000, "price": "9.99"}]
    assert [row | {"price": row["price"] and str(row["price"])} for row in queried(changed)] == expected
    assert queried(everything, "--as-of", first) == copied
    home.command("pipeline", "fold")
    assert [row | {"price": row["price"] and str(row["price"])} for row in queried(changed, "--lake-only")] == expected
    current = table(home, "current", "public__items").scan().to_arrow().sort_by("id")
    assert current.column("value").to_pylist() == [row["value"] for row in expected]
    assert current.column("small").to_pylist() == [row["small"] for row in expected]
    renamed = table(home, "current", "public__items")
    assert [
        schema.find_field(name).field_id for schema, name in ((renamed.schemas()[0], "v"), (renamed.schema(), "value"))
    ] == [2, 2]
    copies = """SELECT count(*) FILTER (__op = 'r') n FROM history."public.items" """
    copied_rows = queried(copies)[0]["n"]
    assert table(home, "current", "public__bag").scan().to_arrow().num_rows == 2
    home.command("diff")
    home.command("pipeline", "rebuild", "public.items")
    assert home.caught_up_here() == {}
    assert [row["value"] for row in queried(changed, "--lake-only")] == [row["value"] for row in expected]
    home.command("pipeline", "rebuild", "public.items", "--from", "source")
    assert home.caught_up_here() == {}
    assert queried(copies)[0]["n"] == copied_rows + len(expected)
    assert [row["value"] for row in queried(changed, "--lake-only")] == [row["value"] for row in expected]
    home.command("diff")
    before = {view: table(home, view, "public__items").snapshots() for view in ("current", "history")}
    with home.running_here():  # the pipeline erases
        home.command("tables", "copy", "public.items", "--forget")
        for view, snapshots in before.items():
            left = {snapshot.snapshot_id for snapshot in table(home, view, "public__items").snapshots()}
            assert left.isdisjoint(snapshot.snapshot_id for snapshot in snapshots)
    assert home.caught_up_here() == {}
    assert queried(copies)[0]["n"] == len(expected)
    with pytest.raises(AssertionError, match="its history begins after"):
        queried(everything, "--as-of", first)
    home.command("diff")
    assert home.status()["streams"][0]["tables"][0]["state"] == "streaming"
    assert [row["value"] for row in queried(changed, "--lake-only")] == [row["value"] for row in expected]
    source.execute("ALTER TABLE items RENAME COLUMN price TO cost")
    source.execute("UPDATE items SET cost = 5 WHERE id = 1")
    assert home.caught_up_here() == {}
    costs = queried("SELECT id, cost FROM public.items WHERE cost IS NOT NULL ORDER BY id", "--lake-only")
    assert [(row["id"], str(row["cost"])) for row in costs] == [(1, "5.00"), (1000, "9.99")]
    assert queried(copies)[0]["n"] == len(expected), "a table with a renamed column was copied again"
    checks = json.loads(home.command("doctor", "--json", check=False))["checks"]
    assert {c["name"]: c["ok"] for c in checks if c["name"] == "lake.catalog"} == {"lake.catalog": True}


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_a_rest_catalog_says_where_tables_lie_and_may_be_gone_for_a_while(
    postgres: Database, iceberg_catalog: EmbeddedIcebergCatalog, tmp_path: Path
) -> None:
    source = postgres.connect()
    source.execute("CREATE TABLE items (id int PRIMARY KEY, v text)")
    source.execute("INSERT INTO items SELECT i, 'v' || i FROM generate_series(1, 300) AS i")
    home = Home(tmp_path / "shop", postgres.dsn)
    home.init()
    with StoreProxy(tmp_path / "proxy", iceberg_catalog.uri) as proxy:
        home.set_lake(f'format = "iceberg"\n[streams.shop.lake.catalog]\ntype = "rest"\nuri = "{proxy.url}"\n')
        proxy.set_rules(
            [
                FaultRule(Fault.CUT_AFTER, "POST", r"shop/tables/_commits$", times=1),
                FaultRule(Fault.CUT, "POST", r"shop_history/tables/public__items$", times=1),
                FaultRule(Fault.CUT, times=2),
            ]
        )
        assert home.caught_up_here() == {}
        assert sum(one.fault is not None for one in proxy.requests()) == 4
        assert home.status()["streams"][0]["lake"] == {"state": "ok"}
        home.command("diff")
        expected = [{"id": i, "v": f"v{i}"} for i in range(1, 301)]
        everything = "SELECT id, v FROM public.items ORDER BY id"
        assert json.loads(home.command("query", everything, "--format", "json")) == expected
        catalog = RestCatalog("millstream", uri=iceberg_catalog.uri)
        current = catalog.load_table(("shop_current", "public__items"))
        assert current.location().startswith(iceberg_catalog.warehouse)
        assert current.scan().to_arrow().sort_by("id").to_pylist() == expected
        assert not (home.path / "lake").exists(), "a part of the lake lies in the home"
    found = json.loads(home.command("doctor", "--json", check=False))
    assert {c["name"]: c["ok"] for c in found["checks"]}["lake.catalog"] is False
    assert "catalog_unreachable" in {one["code"] for one in found["findings"]}
    assert "catalog_unreachable" in run_command(home._words(["query", "SELECT 1", "--lake-only"]), timeout=300).stderr


@pytest.mark.siege
@pytest.mark.usefixtures("spark")
def test_iceberg_tables_lie_in_an_object_store(postgres: Database, tmp_path: Path) -> None:
    source = postgres.connect()
    source.execute("CREATE TABLE items (id int PRIMARY KEY, v text)")
    source.execute("INSERT INTO items SELECT i, 'v' || i FROM generate_series(1, 300) AS i")
    home = Home(tmp_path / "shop", postgres.dsn)
    home.init()
    with EmbeddedS3(tmp_path / "s3") as store:
        keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in store.lake_options.items())
        home.set_lake(f'format = "iceberg"\nlocation = "{store.url}/lake"\n[streams.shop.lake.storage_options]\n{keys}')
        assert home.caught_up_here() == {}
        first = home.status()["streams"][0]["tokens"]["landed"]
        source.execute("UPDATE items SET v = 'new' WHERE id <= 100")
        source.execute("ALTER TABLE items ADD COLUMN price numeric(10,2)")
        assert home.caught_up_here() == {}
        home.command("diff")

        def queried(*options: str) -> list[str]:
            sql = "SELECT v FROM public.items ORDER BY id"
            return [row["v"] for row in json.loads(home.command("query", sql, "--format", "json", *options))]

        assert queried("--lake-only") == ["new"] * 100 + [f"v{i}" for i in range(101, 301)]
        assert queried("--as-of", first) == [f"v{i}" for i in range(1, 301)]
        assert not (home.path / "lake").exists(), "a part of the lake lies in the home"
        checks = json.loads(home.command("doctor", "--json", check=False))["checks"]
        assert {c["name"]: c["ok"] for c in checks} == {
            "lake.credentials": True,
            "lake.bucket": True,
            "lake.catalog": True,
        }
