"""A process that reads a merged table again reads only what is new; what can't be read on is read from the beginning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.regions.two_homes import CONFIG, both, follow

import millstream
from millstream.errors import UnknownTable
from millstream.home.home import Home
from millstream.regions.merged_table import RegionTable
from millstream.regions.state_cache import MergedStates

Rows = list[dict[str, Any]]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each table that was opened had its kept state: it was then read from the beginning."""
    found: list[bool] = []
    made = RegionTable.__init__

    def note(*args: Any, with_kept: bool = True, **named: Any) -> None:
        found.append(with_kept)
        made(*args, with_kept=with_kept, **named)

    monkeypatch.setattr(RegionTable, "__init__", note)
    return found


def read(states: MergedStates, home: Path, table: str = "posts") -> Rows:
    """Return the rows by these states, which are those that are read from the beginning."""
    found: Rows = states.read(Home(home), "shop", table).to_pylist()
    assert found == MergedStates().read(Home(home), "shop", table).to_pylist()
    return found


def test_what_is_new_is_read_on(tmp_path: Path, built: list[bool]) -> None:
    states = MergedStates()
    with both(tmp_path) as (one, two):
        with millstream.open(one) as home:
            home.append("shop", "posts", {"id": 1, "likes": 5})  # by a writer of its own
            assert [row["likes"] for row in read(states, one)] == [3, 1, 7]
            built.clear()
            for likes in (6, 7):
                home.append("shop", "posts", {"id": 1, "likes": likes, "heat": 1.0})
                home.append("shop", "notes", {"id": 1, "text": "another table"})
                found = states.read(Home(one), "shop", "posts").to_pylist()[0]
                # Before these, the regions had 4, 2 and 1: what accumulates goes on from what is held.
                assert (found["likes"], found["heat__1h"]) == (likes - 2, likes - 2)
                assert found["heat"] == pytest.approx(likes + 2, rel=1e-3)
                # The other region's log is replaced, as a follower's is that begins again: same epoch, same end.
                follow(one, two, 2)
                assert states.read(Home(one), "shop", "posts").num_rows == 3
            assert built == []
        with millstream.open(two) as home:
            home.append("shop", "posts", {"id": 9, "size": 1})
        follow(one, two, 2)
        assert read(states, one)[-1]["size"] == 1
        assert built == [False, True]  # by new readers, and the comparison


def test_a_log_that_was_cut_or_is_another_one_is_read_anew(tmp_path: Path) -> None:
    states = MergedStates()
    with both(tmp_path) as (one, two):
        before = tmp_path / "before"
        shutil.copytree(two, before, ignore=shutil.ignore_patterns("run"))
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 3, "likes": 100}, {"id": 5, "likes": 1}])
        follow(one, two, 2)
        assert [row["likes"] for row in read(states, one)] == [3, 1, 100, 1]
        with millstream.open(before) as home:
            for likes in range(5):
                home.append("shop", "posts", [{"id": 6, "likes": likes}])
        follow(one, before, 2)
        assert [(row["id"], row["likes"]) for row in read(states, one)] == [(1, 3), (2, 1), (3, 7), (6, 4)]
        shutil.rmtree(one / "data" / "wal" / "shop@2")
        assert [row["likes"] for row in read(states, one)] == [5, 1]
        (one / "millstream.toml").write_text(CONFIG.format(region=1).replace('"pn_counter"', '"lww"'))
        follow(one, before, 2)
        assert [row["likes"] for row in read(states, one)] == [-2, 1, 7, 4]


def test_states_beyond_the_bound_are_dropped(tmp_path: Path, built: list[bool]) -> None:
    with both(tmp_path) as (one, _):
        with millstream.open(one) as home:
            home.append("shop", "notes", {"id": 1, "text": "x" * 10_000})
        states = MergedStates(bytes_max=9_000)
        for table in ("posts", "notes", "posts"):
            states.read(Home(one), "shop", table)
        assert built == [True, True, True]
        states.read(Home(one), "shop", "posts")
        assert len(built) == 3


def test_tables_that_are_not_there_are_not_remembered(tmp_path: Path) -> None:
    with both(tmp_path) as (one, _):
        states = MergedStates()
        for number in range(3):
            with pytest.raises(UnknownTable):
                states.read(Home(one), "shop", f"t{number}")
        states.read(Home(one), "shop", "posts")
        assert [key[2] for key in states._held] == ["public.posts"]
