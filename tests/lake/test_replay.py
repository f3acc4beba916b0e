"""A range of a table's records as a table of its own: complete or absent, and the same when asked for again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.lake.landing import append_history

from millstream.errors import LakeError, PositionError, TokenFromFuture, UnknownTable, UsageError
from millstream.lake.commit_cuts import Cut, commit_cut, last_cut
from millstream.lake.damaged_tables import restart_history
from millstream.lake.layout import LakeLayout
from millstream.lake.replay import replay_path, replay_range
from millstream.model.positions import Seq, StreamToken
from millstream.model.schema import TableSchema
from millstream.testing.errors import coded

Records = Callable[..., pa.RecordBatch]


@pytest.fixture
def cut(layout: LakeLayout, orders: TableSchema, records: Records) -> Cut:
    for first in (1, 4, 7):
        rows = [("c", seq, {"id": seq}) for seq in range(first, first + 3)]
        commit = append_history(layout, orders, [records(orders, *rows)], Seq(first + 2))
        cut = commit_cut(layout, Seq(first + 2), [commit], committed_at=datetime.now(UTC))
    return cut


def seqs(path: str) -> list[int]:
    return sorted(DeltaTable(path).to_pyarrow_table().column("__seq").to_pylist())


def test_a_range_becomes_a_table_once_however_often_it_is_asked_for(layout: LakeLayout, cut: Cut):
    first = replay_range(layout, cut, "public.orders", after=Seq(2), upto=Seq(7), into="march")
    assert seqs(first.path) == [3, 4, 5, 6, 7]
    assert first.path == f"{layout.root}/replays/march"
    again = replay_range(layout, cut, "public.orders", after=Seq(2), upto=Seq(7), into="march")
    assert again == replace(first, already=True)
    assert (first.rows, DeltaTable(first.path).version()) == (5, 1)
    assert last_cut(layout) == cut


def test_a_path_counts_from_the_current_folder_and_is_told_in_full(
    layout: LakeLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert replay_path(layout, "../../x/") == str(tmp_path.resolve() / "x")
    assert replay_path(layout, "./x") == str(tmp_path.resolve() / "a" / "b" / "x")
    assert replay_path(layout, "s3://bucket/../x/") == "s3://bucket/../x"
    assert replay_path(layout, "x") == f"{layout.root}/replays/x"


def test_nothing_is_overwritten(layout: LakeLayout, cut: Cut, tmp_path: Path):
    replay_range(layout, cut, "public.orders", after=Seq(2), upto=Seq(7), into="march")
    with pytest.raises(LakeError, check=coded("lake_table_exists")):
        replay_range(layout, cut, "public.orders", after=Seq(2), upto=Seq(8), into="march")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.parquet").write_bytes(b"precious")
    with pytest.raises(LakeError, check=coded("lake_table_exists")):
        replay_range(layout, cut, "public.orders", after=Seq(0), upto=Seq(9), into=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "letters.parquet").read_bytes() == b"precious"


def test_a_history_that_began_again_is_replayed_from_there(
    layout: LakeLayout, orders: TableSchema, records: Records, cut: Cut
):
    restart_history(layout, orders, cut.n, forget=True)
    commit = append_history(layout, orders, [records(orders, ("c", 12, {"id": 12}))], Seq(12))
    newest = commit_cut(layout, Seq(12), [commit], committed_at=datetime.now(UTC))
    assert seqs(replay_range(layout, newest, "public.orders", after=None, upto=Seq(12), into="all").path) == [12]
    with pytest.raises(PositionError, check=coded("beyond_retention")) as refused:
        replay_range(layout, newest, "public.orders", after=Seq(2), upto=Seq(12), into="earlier")
    assert refused.value.hint == (
        f"Begin at {StreamToken.scalar(layout.stream_id, cut.n)} or later; "
        "without --from, all records are taken that the lake has."
    )


def test_what_can_not_be_replayed_is_said_by_name(layout: LakeLayout, cut: Cut):
    for name, after, upto, error in [
        ("public.nothing", 0, 9, UnknownTable),
        ("public.orders", 0, 10, TokenFromFuture),
        ("public.orders", 5, 5, UsageError),
    ]:
        with pytest.raises(error):
            replay_range(layout, cut, name, after=Seq(after), upto=Seq(upto), into="odd")
    assert not Path(layout.root, "replays").exists()


@pytest.mark.parametrize("point", ["lake.replay.before_commit", "lake.replay.after_commit"])
def test_killed_anywhere_it_is_there_whole_or_not_at_all_and_leaves_nothing(
    layout: LakeLayout, cut: Cut, point: str, tmp_path: Path
):
    asked = (
        "import sys, pickle; from millstream.lake.replay import replay_range; from millstream.lake.commit_cuts import last_cut\n"
        "layout = pickle.load(open(sys.argv[1], 'rb')); cut = last_cut(layout)\n"
        "replay_range(layout, cut, 'public.orders', after=2, upto=7, into='march')\n"
    )
    import pickle

    (tmp_path / "layout").write_bytes(pickle.dumps(layout))
    environment = os.environ | {"MILLSTREAM_FAILPOINTS": point}
    done = subprocess.run([sys.executable, "-c", asked, tmp_path / "layout"], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    found = replay_range(layout, cut, "public.orders", after=Seq(2), upto=Seq(7), into="march")
    assert found.already == (point == "lake.replay.after_commit")
    assert seqs(found.path) == [3, 4, 5, 6, 7]
    files = [file.name for file in Path(found.path).glob("*.parquet")]
    assert sorted(files) == sorted(Path(uri).name for uri in DeltaTable(found.path).file_uris())
