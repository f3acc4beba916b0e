"""Commit cuts: all tables at one position, idle ones too."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from deltalake import DeltaTable, write_deltalake

from millstream.errors import LakeTableForeign
from millstream.lake.layout import LakeLayout, TableCommit, View
from millstream.lake.snapshots import (
    CutTable,
    commit_cut,
    compact_cuts,
    cut_at,
    cut_at_time,
    cut_from,
    first_cut,
    last_cut,
)
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def landed(folder: str, view: View, version: int, n: int, table: int = 1) -> TableCommit:
    return TableCommit(TableId(table), folder, folder, view, version, 1, Seq(n))


def test_before_the_first_there_is_none(layout: LakeLayout):
    assert last_cut(layout) is None
    compact_cuts(layout)


def test_a_cut_tells_every_table_the_idle_ones_as_they_stood(layout: LakeLayout):
    commit_cut(layout, Seq(5), [landed("s.a", "history", 3, 5), landed("s.b", "history", 7, 5, 2)], committed_at=NOON)
    commit_cut(layout, Seq(9), [landed("s.a", "history", 4, 9)], committed_at=NOON)
    cut = commit_cut(layout, Seq(9), [landed("s.b", "current", 1, 5, 2)], committed_at=NOON)
    assert last_cut(layout) == cut
    assert cut.number == 3
    assert cut.tables == {
        "s.a": CutTable(TableId(1), "s.a", 4, history_n=Seq(9)),
        "s.b": CutTable(TableId(2), "s.b", 7, 1, Seq(5), history_n=Seq(5)),
    }


def test_a_table_that_was_built_anew_is_named_by_its_new_versions(layout: LakeLayout):
    commit_cut(layout, Seq(5), [landed("s.a", "history", 3, 5), landed("s.a", "current", 9, 5)], committed_at=NOON)
    cut = commit_cut(layout, Seq(5), [landed("s.a", "current", 1, 5), landed("s.a", "scd2", 4, 5)], committed_at=NOON)
    assert cut.tables["s.a"] == CutTable(TableId(1), "s.a", 3, 1, Seq(5), 4, Seq(5), Seq(5))
    late = commit_cut(layout, Seq(6), [landed("s.a", "current", 8, 4), landed("s.a", "scd2", 9, 4)], committed_at=NOON)
    assert late.tables == cut.tables


def test_a_repeated_or_older_cut_adds_nothing(layout: LakeLayout):
    first = commit_cut(layout, Seq(5), [landed("s.a", "history", 3, 5)], committed_at=NOON)
    assert commit_cut(layout, Seq(5), [landed("s.a", "history", 3, 5)], committed_at=NOON) == first
    assert commit_cut(layout, Seq(4), [landed("s.a", "history", 2, 4)], committed_at=NOON) == first
    assert DeltaTable(layout.commits_path).to_pyarrow_dataset().count_rows() == 1


def test_commit_times_never_run_backward(layout: LakeLayout):
    hour = timedelta(hours=1)
    commit_cut(layout, Seq(1), [], committed_at=NOON, commit_ts_max=NOON)
    commit_cut(layout, Seq(2), [], committed_at=NOON, commit_ts_max=NOON - hour)
    cut = commit_cut(layout, Seq(3), [], committed_at=NOON)
    assert cut.commit_ts_max == NOON


def test_a_cut_that_somebody_else_wrote_is_refused(layout: LakeLayout):
    commit_cut(layout, Seq(1), [], committed_at=NOON)
    table = DeltaTable(layout.commits_path)
    write_deltalake(layout.commits_path, table.to_pyarrow_table(), mode="append")
    with pytest.raises(LakeTableForeign):
        last_cut(layout)


def test_many_cuts_become_few_files_and_stay_readable(layout: LakeLayout):
    for n in range(1, 26):
        commit_cut(layout, Seq(n), [landed("s.a", "history", n, n)], committed_at=NOON)
        compact_cuts(layout, files=10)
    cut = last_cut(layout)
    assert cut is not None
    assert (cut.n, cut.number, cut.tables["s.a"].history) == (25, 25, 25)
    assert len(DeltaTable(layout.commits_path).file_uris()) < 12
    assert Path(layout.commits_path, "_delta_log").is_dir()


def test_a_moment_or_a_position_finds_the_last_cut_that_holds_no_more(layout: LakeLayout):
    minute = timedelta(minutes=1)
    assert cut_at(layout, Seq(5)) is cut_from(layout, Seq(5)) is cut_at_time(layout, NOON) is None
    # The third transaction was committed before the second one; two cuts have no commit at all.
    times = [None, None, NOON, NOON + 3 * minute, NOON + minute, NOON + 5 * minute]
    for at, time in enumerate(times, 1):
        commit_cut(layout, Seq(10 * at), [], committed_at=NOON - minute * (7 - at), commit_ts_max=time)
    for compacted in (False, True):
        if compacted:
            for n in range(7):
                commit_cut(layout, Seq(70 + n), [], committed_at=NOON + 9 * minute)
            compact_cuts(layout, files=7)
            assert len(DeltaTable(layout.commits_path).file_uris()) < 13
            commit_cut(layout, Seq(99), [], committed_at=NOON + 9 * minute, commit_ts_max=NOON + 8 * minute)
        found = [
            cut_at_time(layout, NOON + offset * minute)
            for offset in (-7, -6, -5.5, -1, 0, 2.9, 3, 4.9, 5)  # a copy counts by the time when it landed
        ]
        last = 76 if compacted else 60
        assert [None if c is None else c.n for c in found] == [None, 10, 10, 20, 30, 30, 50, 50, last]
        by_n = [cut_at(layout, Seq(n)) for n in (9, 10, 19, 55, 60)]
        assert [None if c is None else c.n for c in by_n] == [None, 10, 10, 50, 60]
        after = [cut_from(layout, Seq(n)) for n in (0, 10, 11, 60, 100)]
        assert [None if c is None else c.n for c in after] == [10, 10, 20, 60, None]
        assert first_cut(layout) == after[0]


def test_what_cannot_be_built_anew_has_no_such_hint(layout: LakeLayout):
    commit_cut(layout, Seq(1), [], committed_at=NOON)
    another = replace(layout, stream_id=StreamId(UUID(int=43)))
    with pytest.raises(LakeTableForeign) as caught:
        last_cut(another)
    assert caught.value.hint == "Name another lake location."
    write_deltalake(layout.commits_path, DeltaTable(layout.commits_path).to_pyarrow_table(), mode="append")
    with pytest.raises(LakeTableForeign) as caught:
        last_cut(layout)
    assert "rebuild" not in caught.value.hint
