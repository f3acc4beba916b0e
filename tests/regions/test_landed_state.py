"""Readers begin with the state in the lake, whatever it lacks; and an operator builds the view again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import write_deltalake
from tests.regions.test_lake_folds import folded, landed, rounded, views_of
from tests.regions.two_homes import CONFIG, both, follow

import millstream
from millstream.cli.main import cli
from millstream.home.home import Home
from millstream.regions.merged_table import RegionTable
from millstream.regions.state_cache import MergedStates

VIEWS = '[streams.shop.lake]\nviews = ["current", "history", "merged"]\n'


def with_view(home: Path) -> None:
    (home / "millstream.toml").write_text(CONFIG.format(region=1) + VIEWS)


def read(home: Path) -> pa.Table:
    """Read as a process that has read nothing so far."""
    return MergedStates().read(Home(home), "shop", "posts")


def from_logs(home: Path) -> pa.Table:
    table = RegionTable(Home(home), "shop", "posts")
    return table.engine.value(table.merged_state())


def test_a_reader_begins_with_the_state_in_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(tmp_path) as (one, two):
        with_view(one)
        folded(one)
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 3, "likes": 8, "heat": 5.0, "added": "a column"}])
        follow(one, two, 2)
        with millstream.open(one) as home:
            home.append("shop", "posts", [{"id": 1, "likes": 9, "heat": 1.0}, {"id": 4, "title": "new"}])
        expected = from_logs(one)
        with monkeypatch.context() as patch:
            patch.setattr(RegionTable, "merged_state", lambda *_, **__: pytest.fail("the logs were read whole"))
            assert read(one).equals(expected)
            answered = CliRunner().invoke(
                cli, ["--home", str(one), "query", "--format", "json", 'select id, likes from merged."public.posts"']
            )
        assert {(row["id"], row["likes"]) for row in json.loads(answered.stdout)["rows"]} == {
            (row["id"], row["likes"]) for row in expected.to_pylist()
        }


@pytest.mark.long
def test_a_reader_takes_the_logs_where_the_lake_does_not_fit_them(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        with_view(one)
        before = tmp_path / "before"
        shutil.copytree(two, before, ignore=shutil.ignore_patterns("run"))
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 5, "likes": 100}])
        follow(one, two, 2)
        folded(one)
        follow(one, before, 2)
        assert 5 not in read(one).column("id").to_pylist(), "the region has lost it"
        shutil.rmtree(one / "lake" / "shop" / "regions")
        assert read(one).equals(from_logs(one))
        views_of(one).fold_all()
        write_deltalake(str(one / "lake" / "shop" / "regions" / "public.posts"), pa.table({"__part": ["rows"], "x": [1]}), mode="overwrite", schema_mode="overwrite")  # fmt: skip
        assert read(one).equals(from_logs(one))


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["none", "gone", "foreign"])
def test_an_operator_rebuilds_the_view(tmp_path: Path, damage: str) -> None:
    with both(tmp_path) as (one, _):
        with_view(one)
        views = views_of(one)
        whole = folded(one, views)
        folder = one / "lake" / "shop" / "merged" / "public.posts"
        if damage == "gone":
            shutil.rmtree(folder)
        elif damage == "foreign":
            write_deltalake(str(folder), pa.table({"id": [9]}), mode="overwrite", schema_mode="overwrite")
        words = ["--home", str(one), "pipeline", "rebuild", "posts", "--view", "merged", "--json"]
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        (told,) = json.loads(done.stdout)
        assert (told["view"], told["rows"]) == ("merged", 3)
        assert (told["set_aside"] is None) == (damage != "foreign")
        assert rounded(landed(one)) == whole
        # The pipeline that runs goes on from the new tables.
        with millstream.open(one) as home:
            home.append("shop", "posts", [{"id": 7, "likes": 7}])
        assert [row["id"] for row in folded(one, views)] == [1, 2, 3, 7]


def test_a_lake_without_the_view_has_none_to_rebuild(tmp_path: Path) -> None:
    with both(tmp_path) as (one, _):
        words = ["--home", str(one), "pipeline", "rebuild", "posts", "--view", "merged"]
        refused = CliRunner().invoke(cli, words)
        assert "has no merged" in str(refused.exception)
        with_view(one)
        refused = CliRunner().invoke(cli, [*words, "--from", "source"])
        assert "no source" in str(refused.exception)
