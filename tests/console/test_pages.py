"""The lists of the console, made of a status."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.console.homes import filled_home

from millstream.app.status import collect_status
from millstream.console import pages, table_page
from millstream.console.html import Part, Piece
from millstream.model.human_text import human_bytes


@pytest.fixture
def status(tmp_path: Path) -> dict[str, Any]:
    return collect_status(filled_home(tmp_path / "home"))


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.html if isinstance(piece, Part) else piece for piece in pieces)


def test_a_table_shows_its_last_figures_with_their_age_while_no_pipeline_runs(status: dict[str, Any]) -> None:
    (table,) = status["streams"][0]["tables"]
    assert "ago" not in text_of(list(pages.tables(status)))
    as_of = (datetime.now(UTC) - timedelta(hours=3)).isoformat(timespec="milliseconds")
    table["last_figures"] = {"as_of": as_of, "landed_rows": 1234, "live_bytes": 5_000_000, "disk_bytes": 9_000_000}
    listed = text_of(list(pages.tables(status)))
    assert listed.count("3.0 h ago") == 2
    assert "1,234" in listed
    assert human_bytes(5_000_000) in listed
    own = text_of(list(table_page.area(status, "shop", table["name"])))
    assert human_bytes(9_000_000) in own
    # Figures of a running pipeline are current.
    table |= {"landed_rows": 77, "live_bytes": 6_000_000, "disk_bytes": 8_000_000, "last_figures": None}
    listed = text_of(list(pages.tables(status)))
    assert "77" in listed
    assert "ago" not in listed


def test_the_age_of_figures_changes_once_a_minute_at_most(status: dict[str, Any]) -> None:
    (table,) = status["streams"][0]["tables"]
    now = datetime.now(UTC)
    found = {}
    for seconds in (1, 20, 40, 70, 100):
        as_of = (now - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
        table["last_figures"] = {"as_of": as_of, "landed_rows": 1, "live_bytes": 1, "disk_bytes": 1}
        found[seconds] = text_of(list(pages.tables(status)))
    assert found[1] == found[20] == found[40] != found[70] == found[100]
    assert "less than a minute ago" in found[1]
    assert "1 min ago" in found[100]


def consumer(name: str, records: int | None, seconds: float | None = None) -> dict[str, Any]:
    lag = {"records": records, "bytes": None if records is None else records * 1000, "seconds": seconds}
    return {"name": name, "state": "active", "lag": lag, "dead": 0, "in_flight": 3}


def test_the_overview_shows_the_last_consumers_lag_in_time_and_all_consumers_rate(status: dict[str, Any]) -> None:
    shop = status["streams"][0]
    shop["consumers"] = [consumer("search", 5, 2.0), consumer("mail", 40, 90.0), consumer("new", None)]
    rates = {"shop": 7.0, "shop/search": 100.0, "shop/mail": 20.0, "web/one": 1.0}
    shown = text_of(list(pages.overview(status, rates)))
    for words in (
        "3 consumers",
        "40 records behind",
        f"{human_bytes(40_000)}, 2 min",
        "the last of them",
        "120 messages/s",
    ):
        assert words in shown, words
    shop["consumers"] = [consumer("search", 0, 0.0)]
    shown = text_of(list(pages.overview(status, {})))
    assert "nothing waits" in shown
    assert "messages/s" not in shown
    shop["consumers"] = [consumer("new", None)]
    assert "unknown" in text_of(list(pages.overview(status, {})))
