"""The lake's view `merged`: folds that follow the changed keys give the rows of `home.merged`, whatever interrupts them."""

from __future__ import annotations

import errno
import os
import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.app.homes import wait_for
from tests.regions.two_homes import CONFIG, both, follow, made

import millstream
from millstream import failpoints
from millstream.home.config_mapping import lake_layout
from millstream.home.home import Home
from millstream.lake.folded.current_table import FoldSizes
from millstream.lake.maintenance import MaintenanceRules
from millstream.model.ids import RegionId
from millstream.regions.lake_folds import MergedRules, MergedViews
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader

SMALL = FoldSizes(leaf_bytes=8 << 10, small_bytes=0)


class KilledError(Exception):
    """Stands for a kill of the process."""


def views_of(home: Path, **rules: Any) -> MergedViews:
    opened = Home(home)
    stream = StreamReader(str(opened.wal_folder("shop"))).stream_id
    layout = lake_layout(opened, "shop", opened.config.streams["shop"], stream)
    return MergedViews(opened, "shop", layout, MergedRules(**{"interval_s": 0.0, "sizes": SMALL} | rules))


def landed(home: Path, table: str = "public.posts") -> pa.Table:
    return DeltaTable(str(home / "lake" / "shop" / "merged" / table)).to_pyarrow_table().sort_by("id")


def merged(home: Path, table: str = "posts") -> list[dict[str, Any]]:
    with millstream.open(home) as opened:
        return rounded(opened.merged("shop", table))


def rounded(rows: pa.Table) -> list[dict[str, Any]]:
    """Return rows with signals as of about now: the lake has them as of a fold, a reader as of the newest event."""
    return [{name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()} for row in rows.to_pylist()]  # fmt: skip


def folded(home: Path, views: MergedViews | None = None) -> list[dict[str, Any]]:
    """Fold everything, and return what readers of the lake see, which is what `home.merged` returns."""
    views = views or views_of(home)
    views.fold_all()
    assert views.failed == {}
    return rounded(landed(home))


def fold_or_die(point: str, views: MergedViews, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Fold everything; return whether the process would have been killed at a point."""

    def hit(name: str) -> None:
        if name == point:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", hit)
        try:
            views.fold_all()
        except KilledError:
            return True
    assert views.failed == {}
    return False


def test_the_view_has_the_rows_of_all_regions_and_follows_them(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        views = views_of(one)
        first = folded(one, views)
        assert first == merged(one)
        assert [row["likes"] for row in first] == [3, 1, 7]
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 3, "likes": 8, "title": "again", "heat": 5.0}])
            home.append("shop", "notes", [{"id": "a", "text": "of two alone"}])
        follow(one, two, 2)
        second = folded(one, views)
        assert (second[2]["likes"], second[2]["heat"]) == (8, 5.0)
        assert [row["id"] for row in second] == [1, 2, 3]
        assert landed(one, "public.notes").to_pylist() == [{"id": "a", "text": "of two alone"}]
        # Another process takes up where this one ended, and a column that comes later is in all rows.
        with millstream.open(one) as home:
            home.append("shop", "posts", [{"id": 4, "likes": 1, "size": 2}, {"id": 1, "likes": 5, "heat": 1.0}])
        third = folded(one)
        assert third == merged(one)
        assert (third[0]["heat"], third[0]["heat__1h"]) == (4.0 + 2.0 + 1.0 + 1.0, 4)
        assert [row["size"] for row in third] == [None, None, None, 2]


@pytest.mark.long
def test_columns_have_one_order_in_all_regions(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        homes, others = (one, two), {one: (two, 2), two: (one, 1)}
        for home in homes:
            folded(home)
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 5, "of_two": 2}])
        with millstream.open(one) as home:
            home.append("shop", "posts", [{"id": 4, "of_one": 1}])
        for home in homes:  # the view of each gets its own column before the other one's
            folded(home)
        for home, other in others.items():
            follow(home, *other)
            folded(home)
        # Those of the region with the least number first, each followed by its windows.
        names = ["id", "likes", "title", "tags", "heat", "heat__1h", "heat__24h", "heat__7d", "hidden", "of_one", "more", "of_two"]  # fmt: skip
        for home in homes:
            assert landed(home).column_names == names
            with millstream.open(home) as opened:
                assert opened.merged("shop", "posts").column_names == names
                assert opened.merged_schema("shop", "posts").names == names


def test_a_fold_rewrites_only_files_of_changed_keys(tmp_path: Path) -> None:
    home = made(tmp_path / "one", 1)
    rows = [{"id": number, "likes": number, "title": f"{number:0100}"} for number in range(6_000)]
    with millstream.open(home) as opened:
        opened.append("shop", "posts", rows)
    views = views_of(home)
    folded(home, views)
    tables = [DeltaTable(str(home / "lake" / "shop" / view / "public.posts")) for view in ("merged", "regions")]
    before = [set(table.file_uris()) for table in tables]
    assert min(map(len, before)) > 4
    with millstream.open(home) as opened:
        opened.append("shop", "posts", [{"id": 10, "likes": 0, "title": "new"}])
    assert folded(home, views)[10] == {"id": 10, "likes": 0, "title": "new"}
    for table, files, own in zip(tables, before, (1, 2), strict=True):
        table.update_incremental()
        # One file of rows; and in the state the file with its position.
        assert len(files - set(table.file_uris())) == own


@pytest.mark.long
def test_a_fold_that_is_killed_between_its_commits_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(tmp_path) as (one, two):

        def write(number: int) -> None:
            with millstream.open(two) as home:
                home.append("shop", "posts", [{"id": 1, "likes": number}, {"id": 9 + number, "likes": 1}])
            follow(one, two, 2)

        for number, point in enumerate(("lake.merged_between_commits", "lake.fold_file_written")):
            write(2 * number)
            assert fold_or_die(point, views_of(one), monkeypatch)
            write(2 * number + 1)
            assert folded(one) == merged(one)


def test_a_table_that_was_removed_or_merges_otherwise_is_written_whole(tmp_path: Path) -> None:
    with both(tmp_path) as (one, _):
        whole = folded(one)
        shutil.rmtree(one / "lake" / "shop" / "merged" / "public.posts")
        assert folded(one) == whole
        shutil.rmtree(one / "lake" / "shop" / "regions" / "public.posts")
        assert folded(one) == whole
        (one / "millstream.toml").write_text(CONFIG.format(region=1).replace('likes = "pn_counter"', 'likes = "lww"'))
        assert [row["likes"] for row in folded(one)] == [-2, 1, 7]
        assert folded(one) == merged(one)
        (one / "millstream.toml").write_text(CONFIG.format(region=1).replace('"union_set"', '"or_set"'))
        assert folded(one) == merged(one)


def test_what_a_region_lost_leaves_the_view(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        before = tmp_path / "before"
        shutil.copytree(two, before, ignore=shutil.ignore_patterns("run"))
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 3, "likes": 100}, {"id": 5, "likes": 1}])
        follow(one, two, 2)
        assert [row["likes"] for row in folded(one)] == [3, 1, 100, 1]
        with millstream.open(before) as home:
            home.append("shop", "posts", [{"id": 6, "likes": 6}])
        follow(one, before, 2)
        assert [(row["id"], row["likes"]) for row in folded(one)] == [(1, 3), (2, 1), (3, 7), (6, 6)]


@pytest.mark.long
def test_tables_that_fail_are_named_and_others_go_on(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        with millstream.open(one) as home:
            home.append("shop", "notes", [{"id": 1, "text": "x"}])
        with millstream.open(two) as home:
            home.append("shop", "notes", [{"id": "text", "text": "x"}])
        follow(one, two, 2)
        views = views_of(one)
        views.fold_all()
        assert list(views.failed) == ["public.notes"]
        assert "in one region" in str(views.failed["public.notes"])
        assert landed(one).num_rows == 3
        for path, column in ((one, "size"), (two, "Size")):
            with millstream.open(path) as opened:
                opened.append("shop", "posts", [{"id": 9, column: "x"}])
        follow(one, two, 2)
        views.fold_all()
        assert (
            str(views.failed["public.posts"])
            == "public.posts: columns size and Size differ by case alone, and have one name in the lake"
        )
        assert landed(one).num_rows == 3


def test_the_thread_folds_what_comes_and_deletes_replaced_files(tmp_path: Path) -> None:
    home = made(tmp_path / "one", 1)
    with millstream.open(home) as opened:
        opened.append("shop", "posts", [{"id": 1, "likes": 1}])
    views = views_of(home, maintenance=MaintenanceRules(keep_s=0.0, interval_s=0.0))
    folded(home, views)
    with millstream.open(home) as opened:
        opened.append("shop", "posts", [{"id": 1, "likes": 2}])
    # The thread's step, without its second of waiting. The first fold's duration decides when the next is due.
    wait_for(lambda: views._look() and landed(home).to_pylist() == [{"id": 1, "likes": 2}])
    files = list((home / "lake" / "shop" / "merged" / "public.posts").glob("*.parquet"))
    assert len(files) == 1


class DroppedFiles(RealFiles):
    """The files of a log whose segments retention drops once a reader has listed them."""

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        if path.endswith(".wal"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return super().read(path, position, length)


def test_a_segment_that_is_dropped_while_it_is_read_ends_no_thread(tmp_path: Path) -> None:
    """The error of the read ended the thread, and with it the pipeline, which isn't begun again after such an error."""
    with both(tmp_path) as (one, _):
        views = views_of(one)
        views._readers[RegionId(2)] = StreamReader(str(one / "data" / "wal" / "shop@2"), files=DroppedFiles())
        assert views._look()
        views.fold_all()
        assert landed(one).column("id").to_pylist() == [1, 2, 3]


TALLIES = """
[streams.shop]
region = {region}
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.keys]
tallies = ["id"]
[streams.shop.merge.tallies]
likes = "pn_counter(increments)"
heat = "signal(1000d)"
hidden = "hide"
tags = "union_set"
"""
POINTS = ("lake.merged_between_commits", "lake.fold_file_written", "none")


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
def test_any_course_of_writes_and_kills_ends_with_the_merged_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    homes = [made(tmp_path / name, region, TALLIES) for region, name in ((1, "one"), (2, "two"))]
    views: MergedViews | None = None
    with ExitStack() as stack:
        opened = [stack.enter_context(millstream.open(home)) for home in homes]
        for step in range(30):
            if step < 2 or chance.random() < 0.5:
                row = {"id": chance.randrange(6), "likes": chance.randrange(-3, 9), "heat": float(chance.randrange(4))}
                some = {"hidden": chance.random() < 0.5, "tags": [chance.choice("abc")], "title": f"title {step}"}
                opened[step % 2].append("shop", "tallies", row | dict(chance.sample(sorted(some.items()), 2)))
            elif chance.random() < 0.4:
                follow(homes[0], homes[1], 2)
            else:
                # A killed process ends; the next one knows nothing.
                views = views or views_of(homes[0])
                if fold_or_die(chance.choice(POINTS), views, monkeypatch):
                    views = None
        follow(homes[0], homes[1], 2)
        (views or views_of(homes[0])).fold_all()
        expected = opened[0].merged("shop", "tallies")
    found = landed(homes[0], "public.tallies")
    assert found.schema.names == expected.schema.names
    assert found.drop(["heat"]).to_pylist() == expected.drop(["heat"]).to_pylist()
    assert found.column("heat").to_pylist() == pytest.approx(expected.column("heat").to_pylist(), rel=1e-6)
