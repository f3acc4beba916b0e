"""Merged rows where people ask: SQL, HTTP and the command line; each answer lists its regions."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from tests.app.served import serving
from tests.cli.in_process import command
from tests.regions.two_homes import CONFIG, both, follow, made

import millstream
from millstream.errors import InvalidQuery, ReplicationError, UnknownTable
from millstream.model.ids import RegionId
from millstream.model.positions import Seq, StreamToken
from millstream.model.region_ages import REGIONS_HEADER, REGIONS_METADATA, RegionAge, oldest
from millstream.testing.errors import coded

ROWS = 'SELECT id, likes, title, hidden FROM merged."public.posts" ORDER BY id'
OF_BOTH = [
    {"id": 1, "likes": 3, "title": "of two", "hidden": True},
    {"id": 2, "likes": 1, "title": "here alone", "hidden": False},
    {"id": 3, "likes": 7, "title": "there alone", "hidden": False},
]

REGIONS = [{"region": 1, "age_s": 0.0}, {"region": 2, "age_s": None}]


def listed(schema: pa.Schema) -> list[dict[str, object]]:
    """Return the regions in a schema's metadata."""
    found: list[dict[str, object]] = json.loads(schema.metadata[REGIONS_METADATA])
    return found


@pytest.mark.long
def test_sql_gives_the_merged_rows_and_their_regions_where_nothing_has_landed(tmp_path: Path) -> None:
    with (
        both(tmp_path) as (one, _),
        serving(one) as url,
        millstream.open(one) as here,
        millstream.connect(url) as there,
    ):
        for home in (here, there):
            found = home.query(ROWS)
            assert found.to_pylist() == OF_BOTH
            assert listed(found.schema) == REGIONS
            assert listed(home.merged("shop", "posts").schema) == REGIONS
            assert home.query("SELECT 1 AS one").schema.metadata is None
        told = httpx.post(f"{url}/v1/streams/shop/query", json={"sql": ROWS})
        assert json.loads(told.headers[REGIONS_HEADER]) == REGIONS
        assert pa.ipc.open_stream(told.content).read_all().to_pylist() == OF_BOTH
        told = httpx.get(f"{url}/v1/streams/shop/merged", params={"table": "posts"})
        assert json.loads(told.headers[REGIONS_HEADER]) == REGIONS
        told = httpx.post(f"{url}/v1/streams/shop/query", json={"sql": "SELECT 1 AS one"})
        assert REGIONS_HEADER not in told.headers


def test_the_command_line_lists_the_regions_by_format(tmp_path: Path) -> None:
    with both(tmp_path) as (one, _):
        told = command("--home", str(one), "query", "--format", "json", ROWS)
        found = json.loads(told.stdout)
        assert [row["likes"] for row in found["rows"]] == [3, 1, 7]
        assert [region["region"] for region in found["regions"]] == [1, 2]
        assert b"merged from" not in told.stderr
        empty = command("--home", str(one), "query", "--format", "json", f"FROM ({ROWS}) WHERE false")
        assert json.loads(empty.stdout)["rows"] == []
        assert json.loads(command("--home", str(one), "query", "--json", "SELECT 1 AS one").stdout) == [{"one": 1}]
        told = command("--home", str(one), "query", "--format", "arrow", ROWS)
        assert listed(pa.ipc.open_stream(told.stdout).schema) == found["regions"]
        told = command("--home", str(one), "query", "--format", "csv", ROWS)
        assert told.stdout.splitlines()[1] == b"1,3,of two,true"
        assert b"merged from region 1 (0.0 s old), 2 (of unknown age)" in told.stderr


def test_a_session_keeps_the_merged_rows_that_it_has_read(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two), millstream.open(one) as home, home.lake() as lake:
        listed = lake.query("SHOW TABLES").column("name").to_pylist()
        assert listed == ['history."public.posts"', 'merged."public.posts"', "public.posts"]
        assert lake.regions == ()
        assert lake.is_newest()
        assert lake.columns('merged."public.posts"')[0] == ("id", "BIGINT")
        assert lake.query(ROWS).to_pylist() == OF_BOTH
        with millstream.open(two) as other:
            other.append("shop", "posts", [{"id": 3, "likes": 8, "title": "later"}])
        follow(one, two, 2)
        assert lake.query(ROWS).to_pylist() == OF_BOTH
        assert [age.region for age in lake.regions] == [RegionId(1), RegionId(2)]
        assert not lake.is_newest()
        assert home.query(ROWS).to_pylist()[2]["likes"] == 8
        assert lake.query('FROM merged."public.posts"').to_pylist()[2]["likes"] == 7


def test_what_does_not_merge_is_refused_as_by_the_calls(tmp_path: Path) -> None:
    one = made(tmp_path / "one", 1, CONFIG.replace('"notes" =', "'\"Notes\"' ="))
    with millstream.open(one) as home:
        home.append("shop", '"Notes"', {"id": 1, "text": "x"})
        home.append("shop", "loose", {"n": 1})
        listed = home.query("SHOW TABLES").column("name").to_pylist()
        assert listed == ['history."public.Notes"', 'history."public.loose"', 'public."Notes"']
        assert home.query('FROM merged."public.Notes"').to_pylist() == [{"id": 1, "text": "x"}]
        with pytest.raises(ReplicationError, check=coded("merge_unsuitable"), match="loose has no key"):
            home.query('FROM merged."public.loose"')
        with pytest.raises(UnknownTable, match=r"no region of shop has records of public\.posts"):
            home.query(ROWS)
        with pytest.raises(InvalidQuery, match="only its present rows"):
            home.query(ROWS, as_of=StreamToken.scalar(home.reader("shop").stream_id, Seq(0)))


def test_a_region_counts_with_the_greatest_of_its_ages() -> None:
    one, two = RegionId(1), RegionId(2)
    ages = [RegionAge(two, 1.0), RegionAge(one, 0.0), RegionAge(two, 3.0), RegionAge(two, 2.0)]
    assert oldest(ages) == (RegionAge(one, 0.0), RegionAge(two, 3.0))
    assert oldest([*ages, RegionAge(one, None), RegionAge(one, 5.0)])[0] == RegionAge(one, None)
