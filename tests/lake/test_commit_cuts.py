"""Commit cuts: all tables at one position, idle ones too."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from deltalake import DeltaTable, write_deltalake
from pyarrow.parquet import ParquetFile

from millstream.errors import LakeTableForeign
from millstream.lake.commit_cut_maintenance import compact_cuts
from millstream.lake.commit_cuts import (
    CutTable,
    commit_cut,
    cut_at,
    cut_at_time,
    cut_from,
    first_cut,
    last_cut,
)
from millstream.lake.data_files import TableFiles
from millstream.lake.layout import LakeLayout, TableCommit, View
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def landed(folder: str, view: View, version: int, n: int, table: int = 1) -> TableCommit:
    return TableCommit(TableId(table), folder, folder, view, version, 1, Seq(n))


def test_before_the_first_there_is_none(layout: LakeLayout):
    assert last_cut(layout) is None
    compact_cuts(layout, now=NOON)


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


@pytest.mark.parametrize("tables", [1, 40])
def test_a_cut_names_the_tables_that_it_leaves_out_until_a_later_one_has_them(layout: LakeLayout, tables: int):
    """In full rows, and in those that build on one; a rebuilt table changes nothing of it."""
    all_of_them = [landed(f"s.t{number}", "history", 1, 1, number) for number in range(1, tables + 1)]
    commit_cut(layout, Seq(1), all_of_them, committed_at=NOON, held={TableId(90): Seq(0)})
    for n in (2, 3):
        held = {TableId(90): Seq(0), TableId(1): Seq(1)}
        cut = commit_cut(layout, Seq(n), [landed("s.t1", "current", n, 1)], committed_at=NOON, held=held)
        assert last_cut(layout) == cut
        assert commit_cut(layout, Seq(n), [landed("s.t1", "scd2", n, 1)], committed_at=NOON).held == held
    done = commit_cut(layout, Seq(3), [], committed_at=NOON, held={})
    assert (last_cut(layout), done.held, len(done.tables)) == (done, {}, tables)
    assert commit_cut(layout, Seq(3), [], committed_at=NOON) == done


def test_commit_times_never_run_backward(layout: LakeLayout):
    hour = timedelta(hours=1)
    commit_cut(layout, Seq(1), [], committed_at=NOON, commit_ts_max=NOON)
    commit_cut(layout, Seq(2), [], committed_at=NOON, commit_ts_max=NOON - hour)
    cut = commit_cut(layout, Seq(3), [], committed_at=NOON)
    assert cut.commit_ts_max == NOON


def test_cuts_at_one_position_have_the_time_at_which_it_was_reached(layout: LakeLayout):
    """A fold, or a table that is built again, must not make a lake look newer than the log that it has."""
    commit_cut(layout, Seq(5), [landed("s.a", "history", 3, 5)], committed_at=NOON)
    cut = commit_cut(layout, Seq(5), [landed("s.a", "current", 1, 5)], committed_at=NOON + timedelta(hours=1))
    assert (cut.number, cut.committed_at) == (2, NOON)


def test_a_cut_that_somebody_else_wrote_is_refused(layout: LakeLayout):
    commit_cut(layout, Seq(1), [], committed_at=NOON)
    table = DeltaTable(layout.commits_path)
    write_deltalake(layout.commits_path, table.to_pyarrow_table(), mode="append")
    with pytest.raises(LakeTableForeign):
        last_cut(layout)


def test_many_cuts_become_few_files_and_stay_readable(layout: LakeLayout):
    for n in range(1, 26):
        commit_cut(layout, Seq(n), [landed("s.a", "history", n, n)], committed_at=NOON)
        compact_cuts(layout, now=NOON, files=10)
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
            compact_cuts(layout, now=NOON, files=7)
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
    assert caught.value.hint == "Name another lake location, or give the stream another name."
    write_deltalake(layout.commits_path, DeltaTable(layout.commits_path).to_pyarrow_table(), mode="append")
    with pytest.raises(LakeTableForeign) as caught:
        last_cut(layout)
    assert "rebuild" not in caught.value.hint


def aged(layout: LakeLayout, cuts: int, *, tables: int, every: timedelta, first: datetime = NOON) -> None:
    """Commit cuts, each after one table got a new version."""
    some = [landed(f"s.t{number}", "history", 1, 1, number + 1) for number in range(tables)]
    commit_cut(layout, Seq(1), some, committed_at=first, commit_ts_max=first)
    for n in range(2, cuts + 1):
        at, number = first + every * (n - 1), n % tables
        commit = landed(f"s.t{number}", "history", n, n, number + 1)
        commit_cut(layout, Seq(n), [commit], committed_at=at, commit_ts_max=at)


def texts(layout: LakeLayout) -> dict[int, str]:
    rows = DeltaTable(layout.commits_path).to_pyarrow_dataset().to_table(columns=["number", "tables"])
    return {row["number"]: row["tables"] for row in rows.to_pylist()}


def versions(layout: LakeLayout, n: int) -> dict[str, int]:
    cut = cut_at(layout, Seq(n))
    assert cut is not None
    return {folder: table.history for folder, table in cut.tables.items()}


@pytest.mark.long
def test_a_cut_costs_the_tables_that_changed_and_gives_all(layout: LakeLayout):
    """Every row named all tables: 140 KB with 1,000 tables, 33 GB a month."""
    aged(layout, 60, tables=200, every=timedelta(seconds=5))
    sizes = texts(layout)
    assert sum(map(len, sizes.values())) < 10 * len(sizes[1])
    expected = dict.fromkeys((f"s.t{number}" for number in range(200)), 1)
    for n in range(2, 61):
        expected[f"s.t{n % 200}"] = n
    assert versions(layout, 60) == expected
    assert versions(layout, 1) == dict.fromkeys(expected, 1)


def test_a_renamed_table_is_not_named_twice_by_a_row_of_changes(layout: LakeLayout):
    aged(layout, 20, tables=50, every=timedelta(seconds=5))
    renamed = TableCommit(TableId(8), "s.new", "s.new", "history", 0, 1, Seq(21), since=Seq(21))
    cut = commit_cut(layout, Seq(21), [renamed], committed_at=NOON)
    assert "null" in texts(layout)[cut.number], "it isn't a full row"
    assert last_cut(layout) == cut
    assert "s.t7" not in cut.tables
    assert cut.tables["s.new"].table_id == 8


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("tables", [1, 40])
def test_old_cuts_become_one_an_hour_and_stay_whole(layout: LakeLayout, tables: int):
    aged(layout, 48, tables=tables, every=timedelta(minutes=10))
    expected = {n: versions(layout, n) for n in range(1, 49)}
    last = last_cut(layout)
    compact_cuts(layout, now=NOON + timedelta(days=80), files=2)
    assert len(texts(layout)) == 48
    assert len(DeltaTable(layout.commits_path).file_uris()) == 1
    removed = compact_cuts(layout, now=NOON + timedelta(days=100))
    left = sorted(texts(layout))
    assert removed == 48 - len(left)
    assert len(left) < 24
    assert {1, *range(6, 49, 6)} <= set(left)
    for n in left:
        assert versions(layout, n) == expected[n]
    assert last_cut(layout) == last
    assert versions(layout, 29) == expected[max(n for n in left if n <= 29)]


def test_cuts_older_than_historys_retention_go_except_the_one_at_the_bound(layout: LakeLayout):
    aged(layout, 40, tables=40, every=timedelta(hours=1))
    compact_cuts(layout, now=NOON, files=2)
    late = NOON + timedelta(days=40)
    commit_cut(layout, Seq(200), [landed("s.t1", "history", 200, 200, 2)], committed_at=late, commit_ts_max=late)
    expected = versions(layout, 200)
    compact_cuts(layout, now=NOON + timedelta(days=41), kept_s=30 * 86_400)
    assert len(texts(layout)) <= 4
    assert versions(layout, 200) == expected
    assert cut_at(layout, Seq(5)) is None
    at = cut_at_time(layout, NOON + timedelta(days=20))
    assert at is not None
    assert at.n == 40


def test_a_look_up_reads_two_files_however_many_there_are(layout: LakeLayout, monkeypatch: pytest.MonkeyPatch):
    """A moment was looked up by a scan of every file from the newest on: 240 ms with 500 files."""
    aged(layout, 40, tables=40, every=timedelta(minutes=1))
    opened: list[str] = []
    real = TableFiles.open

    def counted(files: TableFiles, path: str) -> AbstractContextManager[ParquetFile]:
        opened.append(path)
        return real(files, path)

    monkeypatch.setattr(TableFiles, "open", counted)
    cut = cut_at_time(layout, NOON + timedelta(minutes=4, seconds=30))
    assert cut is not None
    assert cut.n == 5
    assert len(opened) <= 3
