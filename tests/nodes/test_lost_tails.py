"""A region's log loses its tail, and copies are cut back: merged rows of the tail go, and the regions agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import millstream
from millstream.cli.main import cli
from millstream.errors import ReplicationError
from millstream.home.home import Home
from millstream.model.ids import GroupNumber, RegionId
from millstream.model.positions import Seq
from millstream.nodes.follower_state import FollowerState
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.regions.merged_table import RegionTable
from millstream.regions.state_files import KeptVectors
from millstream.testing.errors import coded
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader, TableRecords
from millstream.wal.replica.set_aside import last_group_upto
from millstream.wal.segment_deletion import drop_segments

CONFIG = """
[streams.shop]
region = {region}
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.keys]
posts = ["id"]
notes = ["id"]
[streams.shop.merge.posts]
likes = "pn_counter"
tags = "union_set"
[streams.shop.merge.notes]
text = "lww"
"""
NOT_RUNNING = shutil.ignore_patterns("run")
"""A process's own files, which a copy of a home leaves out."""


def home(folder: Path, region: int) -> Path:
    folder.mkdir()
    (folder / "millstream.toml").write_text(CONFIG.format(region=region))
    return folder


def write(folder: Path, table: str = "posts", **row: Any) -> None:
    """Write one segment per row: each opening of a log begins one."""
    with millstream.open(folder) as opened:
        opened.append("shop", table, row)


def follow(folder: Path, other: Path, name: str) -> Path:
    copy = folder / "data" / "wal" / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(other / "data" / "wal" / "shop", copy)
    return copy


def merged(folder: Path) -> list[dict[str, Any]]:
    with millstream.open(folder) as opened:
        return list(opened.merged("shop", "posts").to_pylist())


def reconcile(folder: Path, *tables: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(
        cli, ["--home", str(folder), "reconcile", "--json", *(tables or ("posts",))], catch_exceptions=False
    )
    return [taken for table in json.loads(done.stdout)["tables"] for taken in table["taken"]]


def group_of(log: Path) -> GroupNumber:
    return last_group_upto(RealFiles(), str(log), StreamReader(str(log)).persisted_upto())


class Sites:
    """Region 1 has nodes `a`, a leader that is lost, and `b`, which lacks its tail; region 2 follows `a`, then `b`."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b, self.two = home(folder / "a", 1), folder / "b", home(folder / "two", 2)
        write(self.a, id=1, likes=3, tags=["a"])
        write(self.a, id=2, likes=1)
        write(self.a, "notes", id=1, text="kept")
        shutil.copytree(self.a, self.b, ignore=NOT_RUNNING)
        write(self.two, id=1, likes=10)
        self.common = group_of(self.a / "data" / "wal" / "shop")
        self.copy = self.two / "data" / "wal" / "shop@1"

    def lose(self) -> None:
        """Set aside the tail of `a`, as a follower does that learns of the promotion of `b`."""
        FollowerState(Home(self.two), "shop@1").set_aside(self.common)

    def follow_b(self) -> None:
        """Copy the log of `b`. The removed records are noted, so the copy goes on from the common part."""
        shutil.rmtree(self.copy)
        follow(self.two, self.b, "shop@1")

    def check_same(self) -> None:
        follow(self.b, self.two, "shop@2")
        assert merged(self.two) == merged(self.b)
        reconcile(self.two)
        assert merged(self.two) == merged(self.b)


@pytest.mark.parametrize("looks_between", [False, True])
def test_what_was_merged_of_a_lost_tail_goes_with_it(tmp_path: Path, looks_between: bool) -> None:
    """Region 2 had merged rows that region 1 lost, and never removed them.

    The regions differed for ever, and region 1's new rows under the lost numbers were left out.
    """
    sites = Sites(tmp_path)
    for likes in (7, 8):
        write(sites.a, id=1, likes=likes, tags=["lost"])
    write(sites.a, id=3, likes=5)
    follow(sites.two, sites.a, "shop@1")
    reconcile(sites.two)
    assert [row["likes"] for row in merged(sites.two)] == [18, 1, 5]
    sites.lose()
    if looks_between:
        assert [(row["likes"], row["tags"]) for row in merged(sites.two)] == [(13, ["a"]), (1, None)]
        assert [taken["anew"] for taken in reconcile(sites.two)] == [False, True]
        assert [taken["anew"] for taken in reconcile(sites.two)] == [False, False]
    write(sites.b, id=2, likes=2)
    sites.follow_b()
    assert [(row["likes"], row["tags"]) for row in merged(sites.two)] == [(13, ["a"]), (2, None)]
    sites.check_same()
    for likes in range(20, 24):
        write(sites.b, id=4, likes=likes)
    sites.follow_b()
    sites.check_same()


def test_a_node_that_led_and_follows_forgets_what_it_had_merged_of_its_own_tail(tmp_path: Path) -> None:
    sites = Sites(tmp_path)
    write(sites.a, id=1, likes=7)
    reconcile(sites.a)
    FollowerState(Home(sites.a), "shop").set_aside(sites.common)
    write(sites.b, id=2, likes=9)
    follow(sites.a, sites.b, "shop")
    assert merged(sites.a) == merged(sites.b)
    (taken,) = reconcile(sites.a)
    assert (taken["anew"], taken["own"], taken["rows"]) == (True, True, 2)


class CutBeforeReading(RegionTable):
    """The log is cut back between reading its end and reading the records."""

    sites: Sites
    is_cut = False

    def cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self.sites.lose()

    def _parts(self, region: RegionId, after: Seq, upto: Seq) -> Iterator[TableRecords]:
        if region == 1:
            self.cut()
        return super()._parts(region, after, upto)


class CutBehindReading(CutBeforeReading):
    """The log is cut back right after the records are read."""

    def _parts(self, region: RegionId, after: Seq, upto: Seq) -> Iterator[TableRecords]:
        yield from RegionTable._parts(self, region, after, upto)
        if region == 1:
            self.cut()


@pytest.mark.parametrize("kind", [CutBeforeReading, CutBehindReading])
def test_a_cut_while_a_log_is_merged_leaves_nothing_of_the_lost_tail(
    tmp_path: Path, kind: type[CutBeforeReading]
) -> None:
    sites = Sites(tmp_path)
    write(sites.a, id=1, likes=7)
    follow(sites.two, sites.a, "shop@1")
    reconcile(sites.two)
    write(sites.a, id=3, likes=8)
    follow(sites.two, sites.a, "shop@1")
    table = kind(Home(sites.two), "shop", "posts")
    table.sites = sites
    table.keep(table.merged_state())
    assert table.is_cut
    assert [row["likes"] for row in merged(sites.two)] == [13, 1]


def drop(log: Path) -> None:
    """Drop all sealed segments."""
    drop_segments(str(log), Retention(), RetentionBounds(0.0, 0, 0))


def test_what_retention_has_dropped_of_rows_that_the_tail_changed_is_an_error_and_of_others_none(
    tmp_path: Path,
) -> None:
    sites = Sites(tmp_path)
    write(sites.a, "notes", id=1, text="middle")
    shutil.rmtree(sites.b)
    shutil.copytree(sites.a, sites.b, ignore=NOT_RUNNING)
    sites.common = group_of(sites.a / "data" / "wal" / "shop")
    write(sites.a, id=1, likes=7)
    follow(sites.two, sites.a, "shop@1")
    reconcile(sites.two, "posts", "notes")
    sites.lose()
    drop(sites.copy)
    assert StreamReader(str(sites.copy)).first_seq() > 1
    before = {file.name: file.read_bytes() for file in (sites.two / "data" / "regions" / "shop").iterdir()}
    with pytest.raises(ReplicationError, check=coded("lost_tail_merged"), match="region 1") as caught:
        merged(sites.two)
    assert "move" in caught.value.hint
    with pytest.raises(ReplicationError, check=coded("lost_tail_merged")):
        reconcile(sites.two, "posts", "notes")
    after = {file.name: file.read_bytes() for file in (sites.two / "data" / "regions" / "shop").iterdir()}
    assert after["public.posts.state"] == before["public.posts.state"]
    assert after["public.notes.state"] != before["public.notes.state"], "the other table went on"
    with millstream.open(sites.two) as opened:
        assert opened.merged("shop", "notes").to_pylist() == [{"id": 1, "text": "middle"}]
    (sites.two / "data" / "regions" / "shop" / "public.posts.state").rename(tmp_path / "away")
    (_, taken) = reconcile(sites.two)
    assert taken["begins_at"] > 1
    assert [row["likes"] for row in merged(sites.two)] == [10], "as the hint says"


def test_a_log_that_was_cut_back_is_held_until_it_was_merged_anew(tmp_path: Path) -> None:
    sites = Sites(tmp_path)
    for likes in range(5):
        write(sites.a, id=1, likes=likes)
    follow(sites.two, sites.a, "shop@1")
    reconcile(sites.two)
    kept, config = KeptVectors(Home(sites.two)), Home(sites.two).config.streams["shop"]
    upto = StreamReader(str(sites.copy)).persisted_upto()
    heard = kept.of("shop", config, "posts", RegionId(1))
    assert heard is not None
    assert heard.linear() == upto
    sites.lose()
    assert kept.of("shop", config, "posts", RegionId(1)) is None
    for likes in range(9):
        write(sites.b, id=1, likes=likes)
    sites.follow_b()
    assert StreamReader(str(sites.copy)).persisted_upto() >= upto
    assert kept.of("shop", config, "posts", RegionId(1)) is None, "the numbers alone say that it has all"
    reconcile(sites.two)
    assert kept.of("shop", config, "posts", RegionId(1)) is not None
