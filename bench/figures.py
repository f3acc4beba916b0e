"""How a figure is measured and reported: runs interleaved with the peer's, medians, one JSON line.

The machines are noisy and drift, so a figure is a ratio of medians of runs that took turns: ours, the peer's,
ours, the peer's. Without a peer, the ratio is null and the figure is the value on that machine.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

RUNS: Final = 5
RESULTS: Final = Path(__file__).parent / "results" / "latest.jsonl"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the results; `ratio` is ours / peer in the figure's unit."""

    figure: str
    ratio: float | None
    ours: float
    peer: float | None
    unit: str
    runs: int
    goal: str
    rows: int
    bytes: int
    note: str = ""
    """The measurement: shapes, settings, begin and end."""
    p99: float | None = None
    """The 99th percentile, if `ours` is a 50th percentile; else not in the line."""

    def line(self) -> str:
        """Return the figure as one JSON line."""
        facts = asdict(self)
        if self.p99 is None:
            del facts["p99"]
        return json.dumps(facts)


@dataclass(slots=True)
class Asked:
    """Settings that differ from the documented ones: to try a figure small, or to measure it large."""

    rows: int | None = None
    seconds: int | None = None


asked: Final = Asked()
"""Filled in from the command line before any measurement."""

Measure = Callable[[], Iterator[Figure]]
_MEASURES: dict[str, Measure] = {}


def measures(*names: str) -> Callable[[Measure], Measure]:
    """Register a function that yields the figures of these names."""

    def register(measure: Measure) -> Measure:
        _MEASURES.update(dict.fromkeys(names, measure))
        return measure

    return register


def selected(prefix: str) -> list[Measure]:
    """Return the functions behind the figures whose name starts with `prefix`, once each, as registered."""
    return list(dict.fromkeys(measure for name, measure in _MEASURES.items() if name.startswith(prefix)))


def names() -> list[str]:
    """Return the names of all figures."""
    return list(_MEASURES)


def interleaved(ours: Callable[[], float], peer: Callable[[], float], *, runs: int = RUNS) -> tuple[float, float]:
    """Return the medians of `ours` and of `peer`, which take turns; the side that starts changes from round to round.

    Args:
        ours: one run; returns the figure in its unit.
        peer: the same for the peer.
        runs: counted rounds, after one that isn't.
    """
    figures: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(runs + 1):
        turn = [("ours", ours), ("peer", peer)]
        for name, run in turn if number % 2 else reversed(turn):
            figure = run()
            say(f"  {'warm-up' if number == 0 else f'run {number}'}: {name} {figure:,.4g}")
            if number:
                figures[name].append(figure)
    return statistics.median(figures["ours"]), statistics.median(figures["peer"])


def compared(
    name: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    *,
    unit: str,
    goal: str,
    rows: int,
    size_bytes: int,
    note: str,
    runs: int = RUNS,
) -> Figure:
    """Return a figure whose ratio is ours over the peer's, both in `unit` (more is better in rows/s, less in ms)."""
    mine, theirs = interleaved(ours, peer, runs=runs)
    return Figure(
        figure=name,
        ratio=round(mine / theirs, 3),
        ours=round(mine, 1),
        peer=round(theirs, 1),
        unit=unit,
        runs=runs,
        goal=goal,
        rows=rows,
        bytes=size_bytes,
        note=note,
    )


def table() -> str:
    """Return the kept results as a Markdown table, in the order of their registration."""
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    by_name = {line["figure"]: line for line in kept}
    rows = ["| figure | ours | peer | ratio | goal |", "| --- | ---: | ---: | ---: | --- |"]
    for line in (by_name[name] for name in names() if name in by_name):
        ours, peer, ratio = _number(line["ours"]), _number(line["peer"]), _number(line["ratio"])
        if "p99" in line:
            ours = f"p50 {ours}, p99 {_number(line['p99'])}"
        rows.append(f"| `{line['figure']}` | {ours} {line['unit']} | {peer} | {ratio} | {line['goal']} |")
    return "\n".join(rows)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def say(text: str) -> None:
    """Print progress, for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def keep(figures: list[Figure]) -> None:
    """Write the figures to `results/latest.jsonl`, replacing those of the same name."""
    RESULTS.parent.mkdir(exist_ok=True)
    old = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    fresh = {figure.figure for figure in figures}
    lines = [json.dumps(line) for line in old if line["figure"] not in fresh] + [figure.line() for figure in figures]
    RESULTS.write_text("\n".join(sorted(lines)) + "\n")
