"""A running home folds merged tables itself before retention deletes their records; no crash in between changes a sum."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.app.homes import make_home, wait_for
from tests.commands import Command
from tests.regions.test_region_holders import MERGES, configure, let_go, write

import millstream
from millstream.app.open_home import open_other
from millstream.cli.main import cli
from millstream.home.home import Home
from millstream.home.paths import PIPELINE
from millstream.model.positions import Seq
from millstream.processes.role_locks import RoleLock
from millstream.regions.merged_table import RegionTable
from millstream.wal.reader import StreamReader
from millstream.writers.owner import OwnedStream
from millstream.writers.stream_writer import stream_writer

ADDS = MERGES.replace('"pn_counter"', '"pn_counter(increments)"')


def keep(folder: Path) -> int:
    """Do the owner's round of retention once, with a complete lake; return the log's first number then."""
    home = Home(folder)
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        catalog.set_needed_from(stream, PIPELINE, Seq(10**12))
        catalog.set_landed(stream, PIPELINE, Seq(10**12))
        owned = OwnedStream(home, catalog, "shop", home.config.streams["shop"], open_other)
        with stream_writer(home, catalog, "shop", owned.config, open_other) as owned.writer:
            owned.fold_merged_tables()
            owned.drop_old_segments()
    return int(StreamReader(str(home.wal_folder("shop"))).first_seq())


def add(folder: Path, *likes: int) -> None:
    """Add to one row, an increment in each segment."""
    for count in likes:
        with millstream.open(folder) as home:
            home.append("shop", "posts", {"id": 1, "likes": count})


def total(folder: Path) -> int:
    with millstream.open(folder) as home:
        (likes,) = home.merged("shop", "posts").column("likes").to_pylist()
        *_, newest = home.read_latest("shop", "posts")
    assert newest.rows.column("likes").to_pylist() == [likes], "the running total, too"
    return int(likes)


def test_a_segment_that_only_a_merged_table_needs_is_folded_and_deleted(tmp_path: Path) -> None:
    configure(tmp_path, ADDS, most="0B")
    add(tmp_path, 1, 2, 4)
    first = keep(tmp_path)
    assert first > 1
    assert total(tmp_path) == 7
    add(tmp_path, 8)
    assert keep(tmp_path) > first
    assert total(tmp_path) == 15


def test_nothing_is_folded_while_the_log_is_young_and_small(tmp_path: Path) -> None:
    configure(tmp_path, ADDS)
    config = tmp_path / "millstream.toml"
    config.write_text(config.read_text().replace('"0B"', '"1GiB"', 1).replace('"0s"', '"1d"'))
    add(tmp_path, 1, 2)
    assert keep(tmp_path) == 1
    assert not (tmp_path / "data" / "regions").exists()


def test_a_fold_takes_the_logs_of_other_regions_when_their_copies_are_due(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    configure(one, MERGES, most="0B")
    configure(two, MERGES, most="0B", region=2)
    write(one, 1)
    write(two, 2, 3, 4)
    shutil.copytree(two / "data" / "wal" / "shop", one / "data" / "wal" / "shop@2")
    assert let_go(one, "shop@2") == 0
    keep(one)
    assert let_go(one, "shop@2") == 2
    with millstream.open(one) as home:
        assert sorted(home.merged("shop", "posts").column("likes").to_pylist()) == [1, 2, 3, 4]


def test_a_table_that_fails_holds_the_log_and_no_other_table(tmp_path: Path) -> None:
    configure(tmp_path, ADDS, most="0B")
    add(tmp_path, 1, 2)
    with millstream.open(tmp_path) as home:
        home.append("shop", "never", {"id": 1, "n": 1})
    kept = tmp_path / "data" / "regions" / "shop"
    kept.mkdir(parents=True)
    (kept / "public.posts.state").write_bytes(b"damaged")
    assert keep(tmp_path) == 1
    assert (kept / "public.never.state").exists()
    (kept / "public.posts.state").unlink()
    assert keep(tmp_path) > 1
    add(tmp_path, 4)
    assert total(tmp_path) == 7


def test_a_reconciliation_at_the_same_time_is_left_to_do_it(tmp_path: Path) -> None:
    configure(tmp_path, ADDS, most="0B")
    add(tmp_path, 1, 2)
    with RoleLock.take(Home(tmp_path).run_folder, "reconcile"):
        assert keep(tmp_path) == 1
    assert keep(tmp_path) > 1
    assert total(tmp_path) == 3


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("point", ["before the state is kept", "before the deletion", "amid the deletion"])
def test_a_crash_between_the_fold_and_the_deletion_changes_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    configure(tmp_path, ADDS, most="0B")
    add(tmp_path, 1, 2, 4)

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if point == "before the state is kept":
            patch.setattr(RegionTable, "keep", dies)
        elif point == "before the deletion":
            patch.setattr(OwnedStream, "drop_old_segments", dies)
        else:
            # The mark has moved, and the files are still there.
            patch.setattr("millstream.wal.files.RealFiles.remove", dies)
        with pytest.raises(Killed):
            keep(tmp_path)
    assert total(tmp_path) == 7
    add(tmp_path, 8)
    assert keep(tmp_path) > 1
    assert total(tmp_path) == 15
    folders = list((tmp_path / "data" / "wal" / "shop" / "00000").glob("*.wal"))
    assert len(folders) <= 3, "what the crash left was deleted"


@pytest.mark.long
def test_a_home_that_runs_and_is_killed_folds_increments_before_it_deletes_them(tmp_path: Path) -> None:
    folder = make_home(
        tmp_path / "home",
        '[streams.shop]\n[streams.shop.keys]\nposts = ["id"]\n[streams.shop.merge.posts]\n'
        'likes = "pn_counter(increments)"\n[streams.shop.log]\nretention_age = "0s"\nretention_bytes = "0B"\n'
        'retention_bytes_max = "0B"\nretention_interval = "0.2s"\ndisk_used_max = 1.0\n',
    )
    added = 0
    with millstream.open(folder) as home:
        home.append("shop", "posts", {"id": 1, "likes": 1})
        added += 1
    with Home(folder).open_catalog() as catalog:
        stream = catalog.stream("shop").id
        catalog.set_needed_from(stream, PIPELINE, Seq(10**12))
        catalog.set_landed(stream, PIPELINE, Seq(10**12))
    reader = StreamReader(str(Home(folder).wal_folder("shop")))
    for _ in range(3):
        owner = Command(("--home", str(folder), "capture", "run"))
        try:
            first = reader.first_seq()
            with millstream.open(folder) as home:
                home.append("shop", "posts", {"id": 1, "likes": 1}, deadline_s=60)
                added += 1
            # The segments of the processes before this one go; the increment just written stays.
            wait_for(lambda first=first: reader.first_seq() > first)
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait(60)
        assert total(folder) == added
    said = CliRunner().invoke(cli, ["--home", str(folder), "reconcile", "posts", "--json"])
    (taken,) = json.loads(said.stdout)["tables"][0]["taken"]
    assert taken["begins_at"] is None, "nothing was dropped that the state lacked"
