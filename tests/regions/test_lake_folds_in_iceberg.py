"""The lake's view `merged` in Iceberg tables: the same folds as in Delta's, read as other programs read them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from tests.regions.test_lake_folds import fold_or_die, merged, rounded, views_of
from tests.regions.two_homes import CONFIG, both, follow

import millstream
from millstream.cli.main import cli
from millstream.home.home import Home
from millstream.lake.iceberg.catalog import catalog_of
from millstream.lake.maintenance import MaintenanceRules
from millstream.regions.lake_folds import MergedViews
from millstream.regions.merged_table import RegionTable
from millstream.regions.state_cache import MergedStates

LAKE = '[streams.shop.lake]\nformat = "iceberg"\nviews = ["current", "history", "merged"]\n'


def iceberg(home: Path, config: str = CONFIG) -> MergedViews:
    (home / "millstream.toml").write_text(config.format(region=1) + LAKE)
    return views_of(home, maintenance=MaintenanceRules(keep_s=0.0, interval_s=0.0))


def landed(views: MergedViews) -> pa.Table:
    return catalog_of(views._layout).load_table("shop_merged.public__posts").scan().to_arrow().sort_by("id")


def folded(home: Path, views: MergedViews) -> list[dict[str, object]]:
    views.fold_all()
    assert views.failed == {}
    found = rounded(landed(views))
    assert found == merged(home)
    return found


def test_the_view_follows_all_regions_over_kills_new_columns_and_other_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with both(tmp_path) as (one, two):
        views = iceberg(one)
        assert [row["likes"] for row in folded(one, views)] == [3, 1, 7]
        small = pa.table({"id": [4], "likes": [1], "size": pa.array([2], pa.int16())})
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 3, "likes": 8, "title": "again", "heat": 5.0, "tags": ["d"]}])
        with millstream.open(one) as home:
            home.append("shop", "posts", small)
        follow(one, two, 2)
        for point in ("lake.merged_between_commits", "lake.fold_file_written"):
            assert fold_or_die(point, iceberg(one), monkeypatch)
        assert [row["size"] for row in folded(one, iceberg(one))] == [None, None, None, 2]
        # A fold of one key rewrites nothing else, and a reader has the logs' types: the format has no int16.
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 1, "likes": 9, "heat": 1.0}])
        follow(one, two, 2)
        replaced: list[bool] = []
        with monkeypatch.context() as patch:
            patch.setattr(MergedViews, "_replaced", lambda *_: replaced.append(True))
            folded(one, iceberg(one))
        assert not replaced
        other = CONFIG.replace('likes = "pn_counter"', 'likes = "lww"').replace('"union_set"', '"or_set"')
        folded(one, iceberg(one, other))


def test_a_reader_begins_with_the_state_and_an_operator_builds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with both(tmp_path) as (one, _):
        views = iceberg(one)
        with millstream.open(one) as home:
            home.append("shop", "posts", pa.table({"id": [4], "size": pa.array([2], pa.int16())}))
        folded(one, views)
        table = RegionTable(Home(one), "shop", "posts")
        expected = table.engine.value(table.merged_state())
        with monkeypatch.context() as patch:
            patch.setattr(RegionTable, "merged_state", lambda *_, **__: pytest.fail("the logs were read whole"))
            assert MergedStates().read(Home(one), "shop", "posts").equals(expected)
        found = catalog_of(views._layout).load_table("shop_merged.public__posts")
        found.append(found.scan().to_arrow().slice(0, 1))
        views = iceberg(one)
        with millstream.open(one) as home:
            home.append("shop", "posts", [{"id": 7, "likes": 7}])
        views.fold_all()
        assert "pipeline rebuild public.posts --view merged" in views.failed["public.posts"].hint
        words = ["--home", str(one), "pipeline", "rebuild", "posts", "--view", "merged", "--json"]
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        assert [view["rows"] for view in json.loads(done.stdout)] == [5]
        with millstream.open(one) as home:
            home.append("shop", "posts", [{"id": 8, "likes": 8}])
        assert len(folded(one, iceberg(one))) == 6
