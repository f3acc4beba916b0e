"""A process that takes a status repeatedly keeps the catalog open, and opens it again if it must."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from tests.app.homes import make_home

from millstream.app import lag
from millstream.app.lag import backlog_counter, trim
from millstream.app.open_home import OpenHome
from millstream.app.repeated_status import StatusCache
from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.model.positions import Seq
from millstream.wal.backlog import Backlogs


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(make_home(tmp_path / "home", "[streams.shop]\n"))
    home.prepare()
    with OpenHome(home) as opened:
        opened.append("shop", "public.orders", [{"id": 1}])
    return home


def _append(home: Home) -> None:
    with OpenHome(home) as opened:
        opened.append("shop", "public.orders", [{"id": 2}])


def test_a_status_that_is_taken_again_opens_no_catalog(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, open_catalog = [0], Home.open_catalog

    def counted(self: Home, **named: float | None) -> object:
        opened[0] += 1
        return open_catalog(self, **named)

    monkeypatch.setattr(Home, "open_catalog", counted)
    with contextlib.closing(StatusCache()) as cache:
        first = collect_status(home, cache)
        _append(home)
        opened[0] = 0
        second = collect_status(home, cache)
    assert opened[0] == 0
    assert (first["problems"], second["problems"]) == ([], [])
    assert second["streams"][0]["lag"]["lake"]["records"] == first["streams"][0]["lag"]["lake"]["records"] + 1


def test_a_catalog_that_was_replaced_is_reported_once_and_then_opened_again(home: Home) -> None:
    copy = home.catalog_file.with_name("copy.db")
    shutil.copyfile(home.catalog_file, copy)
    with contextlib.closing(StatusCache()) as cache:
        assert collect_status(home, cache)["problems"] == []
        copy.rename(home.catalog_file)
        (problem,) = collect_status(home, cache)["problems"]
        assert "replaced" in problem
        after = collect_status(home, cache)
        assert after["problems"] == []
        assert [table["name"] for table in after["streams"][0]["tables"]] == ["public.orders"]


def test_indexes_of_many_small_logs_stay_and_the_largest_goes_first(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexes of 64 logs were kept, whatever their size, and the others' logs read again for each status."""
    count: dict[str, Backlogs] = {}
    for number in range(100):
        found = backlog_counter(home, f"s{number}", Seq(1), count, [])(Seq(0))
        assert found is not None
    assert len(count) == 100
    trim(count)
    assert len(count) == 100
    large = Backlogs(str(home.wal_folder("shop")))
    large.between(Seq(0), Seq(10**6))
    assert large.frames_kept > 0
    count["large"] = large
    monkeypatch.setattr(lag, "_FRAMES_MAX", large.frames_kept)
    trim(count)
    assert "large" in count
    monkeypatch.setattr(lag, "_FRAMES_MAX", large.frames_kept - 1)
    trim(count)
    assert len(count) == 100
    assert "large" not in count
