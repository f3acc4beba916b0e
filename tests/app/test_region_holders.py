"""What other regions haven't followed, and what hasn't been merged, holds a region's log."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import millstream
from millstream.app.home import PIPELINE, Home
from millstream.app.opened import open_other
from millstream.app.status import collect_status
from millstream.app.writing.owner import OwnedStream
from millstream.app.writing.stream_writer import stream_writer
from millstream.cli.main import cli
from millstream.errors import FollowerBehindRetention
from millstream.model.positions import Seq
from millstream.protocol.retention import HolderKind

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


def configure(folder: Path, more: str, most: str = "1GiB") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "millstream.toml").write_text(STREAM.format(most=most) + more)


def write(folder: Path, *likes: int) -> None:
    """A segment each: each opening of a log begins one."""
    for count in likes:
        with millstream.open(folder) as home:
            home.append("shop", "posts", {"id": count, "likes": count})


def retain(folder: Path) -> tuple[int, dict[str, Any]]:
    """One look of retention, as the owner takes it, where the lake has everything: segments that are left, and who holds them."""
    home = Home(folder)
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
    # A state of other words isn't gone on from, nor one that is gone: then what is left is needed.
    configure(tmp_path, MERGES.replace('likes = "pn_counter"', 'likes = "lww"'), most="0B")
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
        # Of the node itself, from the time before it was promoted, and of a node that was taken away.
        for name in ("follower one", "follower gone"):
            catalog.set_needed_from(stream, name, Seq(1), kind=HolderKind.FOLLOWER)
    assert list(retain(tmp_path)[1]["held"]) == ["follower region-2", "lake"]
    configure(tmp_path, REGIONS.format(3))
    assert list(retain(tmp_path)[1]["held"]) == ["follower region-3", "lake"]
    configure(tmp_path, "")
    after, log = retain(tmp_path)
    assert list(log["held"]) == ["lake"]
    assert after < before
