"""The figures over time: their ring on disk, how they are taken from a status, and the charts that show them."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.console.homes import Site, filled_home, site_of

from millstream.app.status import collect_status
from millstream.console import charts_page
from millstream.console.html import Rendered
from millstream.home.figure_ring import PERIODS, Figure, FigureRing, Period
from millstream.serving.chart_history import OF_STREAM, Figures

START_S: Final = 1_800_000_000
FIGURES: Final = (Figure("a", "A", "records", "mean"), Figure("b", "B", "bytes"), Figure("c", "C", "bytes", "least"))
DAY, HOUR, WEEK = PERIODS["day"], PERIODS["hour"], PERIODS["week"]


def test_a_period_has_its_samples_and_a_longer_one_has_them_joined(tmp_path: Path) -> None:
    ring = FigureRing(tmp_path / "a.ring", FIGURES)
    for number in range(20):
        ring.add(START_S + 15 * number, (number, number, number))
    now_s = START_S + 300
    assert [start for start, _ in ring.samples(HOUR, now_s)] == [START_S + 15 * number for number in range(20)]
    assert ring.samples(DAY, now_s) == [(START_S, (9.5, 19, 0))]
    assert ring.samples(WEEK, now_s) == [(START_S, (9.5, 19, 0))]


def test_what_is_not_known_stays_unknown_and_hides_nothing(tmp_path: Path) -> None:
    ring = FigureRing(tmp_path / "a.ring", FIGURES)
    ring.add(START_S, (math.nan, 7, math.nan))
    ring.add(START_S, (4, math.nan, math.nan))
    ((_, (mean, most, least)),) = ring.samples(HOUR, START_S)
    assert (mean, most) == (4, 7)
    assert math.isnan(least)


@settings(max_examples=25)
@given(times=st.lists(st.integers(0, 3 * 7 * 86400), min_size=1, max_size=60).map(sorted))
def test_another_process_reads_what_one_has_written_and_the_file_never_grows(
    tmp_path_factory: pytest.TempPathFactory, times: list[int]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "a.ring"
    ring = FigureRing(path, FIGURES)
    size = path.stat().st_size
    for at_s in times:
        ring.add(START_S + at_s, (at_s, at_s, at_s))
    again = FigureRing(path, FIGURES)
    assert again.note == ""
    now_s = START_S + times[-1]
    for period in PERIODS.values():
        found = ring.samples(period, now_s)
        assert [start for start, _ in again.samples(period, now_s)] == [start for start, _ in found]
        assert len(found) <= period.samples
        assert all(now_s - period.step_s * period.samples < start <= now_s for start, _ in found)
    assert path.stat().st_size == size
    ring.close()
    again.close()


@pytest.mark.parametrize("how", ["short", "long", "head", "none"])
def test_a_damaged_file_is_begun_again_and_says_so(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.ring"
    ring = FigureRing(path, FIGURES)
    ring.add(START_S, (1, 2, 3))
    data = path.read_bytes()
    path.write_bytes({"short": data[:-1], "long": data + b"\0", "head": b"x" + data[1:], "none": b""}[how])
    again = FigureRing(path, FIGURES)
    assert "begun again" in again.note
    assert again.samples(HOUR, START_S) == []
    again.add(START_S, (1, 2, 3))
    assert FigureRing(path, FIGURES).samples(HOUR, START_S) == [(START_S, (1, 2, 3))]
    assert path.stat().st_size == len(data)


def test_a_torn_sample_is_left_out_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    ring = FigureRing(path, FIGURES)
    ring.add(START_S, (1, 2, 3))
    before = path.read_bytes()
    ring.add(START_S + 15, (4, 5, 6))
    after = bytearray(path.read_bytes())
    at = next(n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    after[at + 14] ^= 1
    path.write_bytes(after)
    again = FigureRing(path, FIGURES)
    assert "1 damaged sample was left out" in again.note
    assert again.samples(HOUR, START_S + 15) == [(START_S, (1, 2, 3))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_of(filled_home(tmp_path_factory.mktemp("charts") / "home")) as opened:
        yield opened


def test_a_sample_has_what_the_status_says_since_the_one_before(site: Site) -> None:
    status: dict[str, Any] = collect_status(site.home)
    shop = next(one for one in status["streams"] if one["name"] == "shop")
    buckets = [0] * 17

    def measured(records: int, commits: int, slow: int) -> dict[str, Any]:
        counts = [*buckets]
        counts[3], counts[9] = commits, slow
        times = {"labels": [shop["id"]], "counts": counts, "sum_s": commits * 0.001 + slow * 0.1}
        counted = {"labels": [shop["id"]], "value": records}
        return {"owner": {"millstream_log_records_total": [counted], "millstream_log_commit_seconds": [times]}}

    clock = iter([START_S, START_S + 15, START_S + 15, START_S + 15])
    figures = Figures(site.home, lambda: status, lambda: next(clock))
    status["measures"] = measured(100, 10, 0)
    shop["tables"][0] |= {"live_bytes": 1 << 20, "disk_bytes": 5 << 20}
    figures.take()
    status["measures"] = measured(400, 100, 10)
    figures.take()
    samples, note = figures.of("shop", "hour")
    (_, first), (_, second) = samples
    found = dict(zip([one.name for one in OF_STREAM], second, strict=True))
    assert note == ""
    assert math.isnan(first[0])
    assert found["records_s"] == pytest.approx(20)
    assert found["durable_mean_s"] == pytest.approx((90 * 0.001 + 10 * 0.1) / 100)
    assert found["durable_p99_s"] == pytest.approx(0.1)
    assert found["log_bytes"] == pytest.approx(shop["log"]["bytes"])
    assert found["lake_bytes"] == 5 << 20, "files, not the part of them that the newest version needs"
    ((_, (memory, free)), _) = figures.of("", "hour")[0]
    assert free > 1 << 20
    assert math.isnan(memory), "no process of the home runs"
    figures.close()


def test_a_writer_that_starts_again_makes_no_negative_rate(site: Site) -> None:
    status: dict[str, Any] = collect_status(site.home)
    shop = next(one["id"] for one in status["streams"] if one["name"] == "shop")
    clock = iter([START_S + 3600, START_S + 3615, START_S + 3615])
    figures = Figures(site.home, lambda: status, lambda: next(clock))
    for records in (100, 7):
        status["measures"] = {"owner": {"millstream_log_records_total": [{"labels": [shop], "value": records}]}}
        figures.take()
    assert all(math.isnan(values[0]) for start, values in figures.of("shop", "hour")[0] if start >= START_S + 3600)
    figures.close()


def test_the_first_sample_is_taken_at_once(site: Site) -> None:
    figures = Figures(site.home, lambda: collect_status(site.home))
    figures.start()
    deadline_s = time.monotonic() + 0.9 * HOUR.step_s
    while not figures.version:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    figures.close()


@pytest.mark.long
def test_a_status_that_counts_a_backlog_imports_no_pandas(site: Site) -> None:
    program = (
        "import pathlib, sys; from millstream.app.status import collect_status; from millstream.home.home import Home\n"
        "lag = collect_status(Home(pathlib.Path(sys.argv[1])))['streams'][0]['lag']['lake']\n"
        "sys.exit('pandas' in sys.modules or not lag['seconds'])"
    )
    subprocess.run([sys.executable, "-c", program, str(site.home.path)], check=True)


def charts(figures: Figures, *, whole_home: bool = True) -> str:
    return Rendered(list(charts_page.area(figures, ["shop", "web"], "shop", "hour", whole_home=whole_home))).whole


def test_the_charts_have_every_figure_in_a_table_and_no_others_memory(site: Site) -> None:
    status = collect_status(site.home)
    status["resources"]["memory_bytes"] = {"serve": 1 << 20}
    figures = Figures(site.home, lambda: status)
    figures.take()
    shown = charts(figures)
    assert '<figure id="chart-disk">' in shown
    assert "Memory: all processes" in shown
    assert shown.count("<tr data-at=") == len(figures.of("shop", "hour")[0])
    assert "Memory" not in charts(figures, whole_home=False)
    figures.close()


def test_a_line_ends_where_samples_are_missing() -> None:
    column = [(0, 1.0), (15, 2.0), (300, 1.0)]
    assert list(charts_page._points(column, 0, 1500, 2.0, 15)) == ["5.0,52.0 15.0,4.0", "205.0,52.0 205.0,52.0"]


@pytest.mark.parametrize(
    ("period", "first", "last"),
    [
        (HOUR, "08:00:00", "09:00:00"),
        (DAY, "14 Jan 08:00", "15 Jan 08:00"),
        (WEEK, "Fri 08 Jan 08:00", "Fri 15 Jan 08:00"),
    ],
)
def test_the_ends_of_an_axis_differ_in_each_period(period: Period, first: str, last: str) -> None:
    end_s = START_S + (0 if period is not HOUR else 3600)
    begin_s = end_s - period.step_s * period.samples
    assert (charts_page._time(begin_s, period), charts_page._time(end_s, period)) == (first, last)


def test_the_page_names_its_streams_and_periods(site: Site) -> None:
    shown = site.get("/charts").text
    assert 'href="/charts/day/shop"' in shown
    assert 'href="/charts/hour/web"' in shown
    assert site.get("/charts/year/shop").status_code == 404
    assert site.get("/charts/hour/nothing").status_code == 404
    assert site.get("/charts/hour/web").status_code == 200
