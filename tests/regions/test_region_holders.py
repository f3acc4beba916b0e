"""Records that other regions haven't followed, and records that aren't merged, hold a region's log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import millstream
from millstream.app.open_home import open_other
from millstream.app.status import collect_status
from millstream.cli.main import cli
from millstream.errors import FollowerBehindRetention, OffsetExpired, ReplicationError, UnknownStream
from millstream.home.home import Home
from millstream.home.paths import PIPELINE
from millstream.model.positions import Seq
from millstream.model.replication import OBJECT_STORE, Document, follower_holder
from millstream.nodes.follower_log_retention import CopyRetention
from millstream.nodes.follower_state import FollowerState
from millstream.protocol.replication.node_promises import SESSIONS
from millstream.protocol.retention import HolderKind
from millstream.testing.errors import coded
from millstream.wal.files import RealFiles
from millstream.wal.layout import SESSIONS_NAME
from millstream.wal.reader import StreamReader
from millstream.wal.writing.session_file import write_copy
from millstream.writers.owner import OwnedStream
from millstream.writers.stream_writer import stream_writer

STREAM = """
[streams.shop]
region = 1
[streams.shop.log]
disk_used_max = 1.0
retention_age = "0s"
retention_bytes = "0B"
retention_bytes_max = "{most}"
"""
MERGES = '[streams.shop.keys]\nposts = ["id"]\nnever = ["id"]\n[streams.shop.merge.posts]\nlikes = "pn_counter"\n[streams.shop.merge.never]\nn = "lww"\n'
REGIONS = '[replication]\nnode = "one"\nregions = {{ {} = "grpc://127.0.0.1:1" }}\n'


def configure(folder: Path, more: str, most: str = "1GiB", region: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    text = STREAM.format(most=most).replace("region = 1", f"region = {region}")
    (folder / "millstream.toml").write_text(text + more)


def write(folder: Path, *likes: int) -> None:
    """Write one segment per row: each opening of a log begins one."""
    for count in likes:
        with millstream.open(folder) as home:
            home.append("shop", "posts", {"id": count, "likes": count})


def retain(folder: Path, home: Home | None = None) -> tuple[int, dict[str, Any]]:
    """Run retention once as the owner does, with a complete lake; return the segments left, and their holders."""
    home = home or Home(folder)
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        catalog.set_needed_from(stream, PIPELINE, Seq(10**12))
        catalog.set_landed(stream, PIPELINE, Seq(10**12))
        owned = OwnedStream(home, catalog, "shop", home.config.streams["shop"], open_other)
        with stream_writer(home, catalog, "shop", owned.config, open_other) as owned.writer:
            owned.drop_old_segments()
    (told,) = collect_status(home)["streams"]
    return len(list((home.wal_folder("shop") / "00000").glob("*.wal"))), told["log"]


def merged(folder: Path) -> list[int]:
    with millstream.open(folder) as home:
        return sorted(home.merged("shop", "posts").column("likes").to_pylist())


def test_what_was_not_merged_yet_holds_the_log_whatever_its_size(tmp_path: Path) -> None:
    configure(tmp_path, MERGES, most="0B")
    write(tmp_path, 1, 2, 3)
    before, log = retain(tmp_path)
    assert before >= 3
    assert log["oldest"]["needed_by"] == ["merge public.posts"]
    assert (log["held"]["merge public.posts"]["kind"], log["held"]["merge public.posts"]["from"]) == ("merge", 1)
    assert CliRunner().invoke(cli, ["--home", str(tmp_path), "reconcile", "posts"]).exit_code == 0
    write(tmp_path, 4)
    after, log = retain(tmp_path)
    assert after < before
    assert log["held"]["merge public.posts"]["from"] == log["first_seq"] > 1
    assert merged(tmp_path) == [1, 2, 3, 4], "what was merged is there, and what wasn't yet"
    # A kept state of another configuration can't be continued, nor can a missing one: then all remaining
    # records are needed.
    configure(tmp_path, MERGES.replace('likes = "pn_counter"', 'likes = "g_counter"'), most="0B")
    assert retain(tmp_path)[1]["held"]["merge public.posts"]["from"] == 1
    configure(tmp_path, MERGES, most="0B")
    shutil.rmtree(tmp_path / "data" / "regions")
    assert retain(tmp_path)[1]["held"]["merge public.posts"]["from"] == 1


def test_a_region_that_has_never_come_holds_the_log_until_it_is_cut_off_by_name(tmp_path: Path) -> None:
    configure(tmp_path, REGIONS.format(2))
    write(tmp_path, 1, 2, 3)
    before, log = retain(tmp_path)
    assert log["oldest"]["needed_by"] == ["follower region-2"]
    assert log["held"]["follower region-2"]["kind"] == "follower"
    configure(tmp_path, REGIONS.format(2), most="1B")
    after, log = retain(tmp_path)
    assert after < before
    assert log["cut_off"]["follower region-2"]["kind"] == "follower"
    with Home(tmp_path).open_catalog() as catalog:
        stream = catalog.stream("shop").id
        with pytest.raises(FollowerBehindRetention, match="region-2"):
            catalog.set_needed_from(stream, "follower region-2", Seq(1), kind=HolderKind.FOLLOWER)


def test_who_may_follow_no_more_holds_nothing(tmp_path: Path) -> None:
    configure(tmp_path, REGIONS.format(2))
    write(tmp_path, 1, 2, 3)
    before, _ = retain(tmp_path)
    with Home(tmp_path).open_catalog() as catalog:
        stream = catalog.stream("shop").id
        # A holder of the node itself, from before its promotion, and one of a node that was removed.
        for name in ("follower one", "follower gone"):
            catalog.set_needed_from(stream, name, Seq(1), kind=HolderKind.FOLLOWER)
    assert list(retain(tmp_path)[1]["held"]) == ["follower region-2", "lake"]
    began_with = Home(tmp_path)
    assert began_with.config.replication.regions
    configure(tmp_path, REGIONS.format(3))
    # The configuration file as it is now decides: the owner may have started long before.
    assert list(retain(tmp_path, began_with)[1]["held"]) == ["follower region-3", "lake"]
    configure(tmp_path, "")
    after, log = retain(tmp_path)
    assert list(log["held"]) == ["lake"]
    assert after < before


def test_an_object_store_holds_the_log_for_as_long_as_there_is_one(tmp_path: Path) -> None:
    """The store was taken for a removed node: segments that weren't stored yet went, and the store had a hole."""
    stores = f'[replication]\nnode = "one"\nobject_store = "{(tmp_path / "store").as_uri()}"\n'
    configure(tmp_path, stores)
    write(tmp_path, 1, 2, 3)
    with Home(tmp_path).open_catalog() as catalog:
        stream = catalog.stream("shop").id
        catalog.set_needed_from(stream, follower_holder(OBJECT_STORE), Seq(1), kind=HolderKind.FOLLOWER)
    before, log = retain(tmp_path)
    assert list(log["held"]) == ["follower object-store", "lake"]
    configure(tmp_path, "")
    after, log = retain(tmp_path)
    assert list(log["held"]) == ["lake"]
    assert after < before


def let_go(folder: Path, name: str, leader_dropped: int = 10**12) -> int:
    """Run a follower's retention once, with its leader's first number; return the count of dropped segments."""
    return CopyRetention(Home(folder), name).look(Seq(leader_dropped))


def test_the_copy_of_another_regions_log_goes_with_that_once_it_was_merged_here(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    configure(one, MERGES, most="0B")
    configure(two, MERGES, most="0B", region=2)
    write(one, 1)
    write(two, 2, 3, 4)
    copy = one / "data" / "wal" / "shop@2"
    shutil.copytree(two / "data" / "wal" / "shop", copy)
    assert let_go(one, "shop@2") == 0, "it isn't merged"
    assert CliRunner().invoke(cli, ["--home", str(one), "reconcile", "posts"]).exit_code == 0
    assert let_go(one, "shop@2", leader_dropped=0) == 0, "its leader has it yet"
    assert let_go(one, "shop@2", leader_dropped=1) == 1, "as much as its leader"
    assert let_go(one, "shop@2") == 1, "all that is sealed"
    assert merged(one) == [1, 2, 3, 4]


def test_what_was_dropped_before_it_was_merged_is_said_once_and_the_rest_is_merged(tmp_path: Path) -> None:
    """A region that was cut off, and whose copy was rebuilt, could be merged again only by giving up the kept state."""
    one, two = tmp_path / "one", tmp_path / "two"
    configure(one, MERGES)
    configure(two, '[streams.shop.keys]\nposts = ["id"]\n', region=2)
    copy = one / "data" / "wal" / "shop@2"
    write(one, 1)
    write(two, 2)
    shutil.copytree(two / "data" / "wal" / "shop", copy)
    assert CliRunner().invoke(cli, ["--home", str(one), "reconcile", "posts"]).exit_code == 0
    write(two, 3, 4)
    retain(two)
    shutil.rmtree(copy)
    shutil.copytree(two / "data" / "wal" / "shop", copy)
    first = StreamReader(str(copy)).first_seq()
    with pytest.raises(OffsetExpired):
        merged(one)
    said = CliRunner().invoke(cli, ["--home", str(one), "reconcile", "posts", "--json"])
    (_, taken) = json.loads(said.stdout)["tables"][0]["taken"]
    assert (taken["begins_at"], taken["rows"]) == (int(first), 1)
    assert merged(one) == [1, 2, 4], "3 was dropped over there"
    again = CliRunner().invoke(cli, ["--home", str(one), "reconcile", "posts", "--json"])
    assert [one["begins_at"] for one in json.loads(again.stdout)["tables"][0]["taken"]] == [None, None]


def test_another_regions_log_is_rebuilt_by_its_name(tmp_path: Path) -> None:
    configure(tmp_path, REGIONS.format(2))
    write(tmp_path, 1)
    copy = tmp_path / "data" / "wal" / "shop@2"
    for words in (["--stream", "shop@2"], []):
        shutil.copytree(tmp_path / "data" / "wal" / "shop", copy)
        done = CliRunner().invoke(cli, ["--home", str(tmp_path), "follow", "--rebuild", "--only-note", *words])
        assert done.exit_code == 0, done.output
        assert not copy.exists()
    assert len(list((tmp_path / "data" / "replication" / "shop@2").glob("replaced-*"))) == 2
    assert (tmp_path / "data" / "wal" / "shop").is_dir()
    unknown = CliRunner().invoke(
        cli, ["--home", str(tmp_path), "follow", "--rebuild", "--only-note", "--stream", "shop@3"]
    )
    assert isinstance(unknown.exception, UnknownStream)


def test_a_nodes_copy_goes_with_its_leaders_log_but_for_sessions_that_it_would_lack(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    configure(a, "", most="0B")
    write(a, 1, 2, 3)
    configure(b, "", most="0B")
    shutil.copytree(a / "data" / "wal", b / "data" / "wal")
    notes = FollowerState(Home(b), "shop")
    stream = StreamReader(str(b / "data" / "wal" / "shop")).stream_id
    write_copy(RealFiles(), str(tmp_path), stream, Seq(0), [b""])
    notes.documents((Document(SESSIONS, 1, (tmp_path / SESSIONS_NAME).read_bytes()),))
    (b / "data" / "wal" / "shop" / SESSIONS_NAME).unlink(missing_ok=True)
    segments = b / "data" / "wal" / "shop" / "00000"
    before = len(list(segments.glob("*.wal")))
    FollowerState(Home(b), "shop").let_go(Seq(10**12))
    assert len(list(segments.glob("*.wal"))) == before
    write_copy(RealFiles(), str(tmp_path), stream, Seq(10**12), [b""])
    notes.documents((Document(SESSIONS, 2, (tmp_path / SESSIONS_NAME).read_bytes()),))
    FollowerState(Home(b), "shop").let_go(Seq(10**12))
    assert len(list(segments.glob("*.wal"))) < before
    configure(b, "", most="1GiB")
    (b / "millstream.toml").write_text(
        (b / "millstream.toml").read_text().replace('"0B"', '"1GiB"').replace('"0s"', '"1d"')
    )
    assert let_go(b, "shop") == 0, "by its own bounds"


def test_the_latest_rows_keep_the_totals_of_records_that_retention_has_dropped(tmp_path: Path) -> None:
    configure(tmp_path, MERGES.replace('"pn_counter"', '"pn_counter(increments)"'))
    for count in (1, 2, 4):
        with millstream.open(tmp_path) as home:
            home.append("shop", "posts", {"id": 1, "likes": count})
    before, _ = retain(tmp_path)
    assert CliRunner().invoke(cli, ["--home", str(tmp_path), "reconcile", "posts"]).exit_code == 0
    after, _ = retain(tmp_path)
    assert after < before
    with millstream.open(tmp_path) as home:
        token = home.append("shop", "posts", [{"id": 1, "likes": 8}, {"id": 2, "likes": 1}]).token
        found = {row["id"]: row["likes"] for some in home.read_latest("shop", "posts") for row in some.rows.to_pylist()}
        assert found == {1: 15, 2: 1}
        home.append("shop", "posts", {"id": 1, "likes": 16})
        (last,) = home.read_latest("shop", "posts", after=token)
        assert last.rows.column("likes").to_pylist() == [31]
        assert sorted(home.merged("shop", "posts").column("likes").to_pylist()) == [1, 31]


def test_a_region_whose_log_is_recreated_takes_no_totals_of_the_others_with_it(tmp_path: Path) -> None:
    """The hint was to delete the merged state: totals that retention had dropped from the own log were gone."""
    increments = MERGES.replace('"pn_counter"', '"pn_counter(increments)"')
    one, two, again = (tmp_path / name for name in ("one", "two", "again"))
    for folder, region in ((one, 1), (two, 2), (again, 2)):
        configure(folder, increments, region=region)
    for folder, counts in ((one, (1, 2, 4)), (two, (100,)), (again, (1000,))):
        for likes in counts:
            with millstream.open(folder) as home:
                home.append("shop", "posts", {"id": 1, "likes": likes})
    copy = one / "data" / "wal" / "shop@2"
    shutil.copytree(two / "data" / "wal" / "shop", copy)
    assert CliRunner().invoke(cli, ["--home", str(one), "reconcile", "posts"]).exit_code == 0
    retain(one)
    assert StreamReader(str(one / "data" / "wal" / "shop")).first_seq() > 1
    assert merged(one) == [107]
    shutil.rmtree(copy)
    shutil.copytree(again / "data" / "wal" / "shop", copy)
    with pytest.raises(ReplicationError, check=coded("other_stream")):
        merged(one)
    done = CliRunner().invoke(cli, ["--home", str(one), "reconcile", "posts", "--json"])
    assert [taken["anew"] for taken in json.loads(done.stdout)["tables"][0]["taken"]] == [False, True]
    assert merged(one) == [1007]
