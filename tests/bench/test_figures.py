"""Reports of benches: medians with the least and the greatest run, and equal sides if their runs overlap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.figures import Figure, compared, interleaved, keep, repeated, reported, table

from bench import figures


def _figure(ours: list[float], peer: list[float] | None = None) -> Figure:
    return reported("capture_rows", ours, peer, unit="rows/s", goal=">= 1.0", rows=1, size_bytes=2, note="how")


def test_a_line_has_the_median_the_least_and_the_greatest_of_both_sides_and_of_the_rounds_ratios() -> None:
    line = json.loads(_figure([90, 100, 120], [180, 200, 150]).line())

    assert (line["ours"], line["ours_least"], line["ours_greatest"]) == (100, 90, 120)
    assert (line["peer"], line["peer_least"], line["peer_greatest"]) == (180, 150, 200)
    assert (line["ratio"], line["ratio_least"], line["ratio_greatest"]) == (0.555556, 0.5, 0.8)
    assert (line["runs"], line["equal"]) == (3, False)


@pytest.mark.parametrize(
    ("ours", "peer", "is_equal"),
    [
        ([0.8, 0.9, 1.0], [0.95, 1.0, 1.1], True),
        ([0.95, 1.0, 1.1], [0.8, 0.9, 1.0], True),
        ([0.8, 0.9, 0.94], [0.95, 1.0, 1.1], False),
        ([1.0], [1.0], True),
    ],
)
def test_sides_are_equal_if_their_runs_overlap(ours: list[float], peer: list[float], is_equal: bool) -> None:
    assert _figure(ours, peer).equal is is_equal


def test_a_figure_without_a_peer_has_no_ratio() -> None:
    line = json.loads(_figure([3.0, 1.0, 2.0]).line())

    assert line["ours"] == 2.0
    assert line["equal"] is None
    assert not {"peer", "ratio", "p99"} & set(line)


def test_sides_take_turns_after_an_uncounted_round() -> None:
    turns: list[str] = []
    values: Iterator[int] = iter(range(100))

    def side(name: str) -> float:
        turns.append(name)
        return float(next(values))

    ours, peer = interleaved(lambda: side("ours"), lambda: side("peer"), runs=3)

    assert turns == ["peer", "ours", "ours", "peer", "peer", "ours", "ours", "peer"]
    assert (ours, peer) == ([2, 5, 6], [3, 4, 7])


def test_the_first_of_repeated_runs_is_a_warm_up() -> None:
    values: Iterator[int] = iter(range(100))

    assert repeated(lambda: float(next(values)), runs=2) == [1, 2]
    assert repeated(lambda: float(next(values)), runs=2, warm_up=False) == [3, 4]


def test_the_table_shows_the_ranges_and_says_which_sides_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results" / "latest.jsonl")
    monkeypatch.setattr(figures, "_MEASURES", {})
    figures.measures("capture_rows", "capture_alone")(lambda: iter(()))
    ours, peer = iter([0, 900, 1000, 1100]), iter([0, 1000, 1000, 1200])

    keep(
        [
            compared(
                "capture_rows", lambda: float(next(ours)), lambda: float(next(peer)), unit="rows/s", goal=">= 1.0",
                rows=1, size_bytes=2, note="", runs=3,
            ),
            reported("capture_alone", [7.0], unit="ms", goal="reported", rows=1, size_bytes=2, note="", p99=[9.5]),
        ]
    )  # fmt: skip

    assert table().splitlines()[2:] == [
        "| `capture_rows` | 1,000 (900–1,100) rows/s | 1,000 (1,000–1,200) | 1 (0.9–1), equal | >= 1.0 |",
        "| `capture_alone` | p50 7, p99 9.5 ms | – | – | reported |",
    ]
