"""How a figure is measured and reported: runs interleaved with the peer's, medians, one JSON line.

The machines are noisy and drift, so a figure is a ratio of medians of runs that took turns: ours, the peer's,
ours, the peer's. Without a peer there is no ratio, and the figure is the value on that machine. Each figure has the
least and the greatest run too. If the runs of both sides overlap, the figure calls them equal, whatever the ratio.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

RUNS: Final = 5
RESULTS: Final = Path(__file__).parent / "results" / "latest.jsonl"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some runs, with the least and the greatest of them."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def overlaps(self, other: Spread) -> bool:
        """Return whether a value could have come from either side."""
        return self.least <= other.greatest and other.least <= self.greatest

    def facts(self, name: str) -> dict[str, float]:
        """Return the fields of a line, to six digits."""
        values = {name: self.median, f"{name}_least": self.least, f"{name}_greatest": self.greatest}
        return {key: float(f"{value:.6g}") for key, value in values.items()}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the results."""

    figure: str
    ours: Spread
    unit: str
    runs: int
    goal: str
    rows: int
    bytes: int
    note: str
    """The measurement: shapes, settings, begin and end."""
    peer: Spread | None = None
    ratio: Spread | None = None
    """Ours over the peer's: of the two medians, and the least and the greatest of any round."""
    p99: Spread | None = None
    """The 99th percentile, if `ours` is a 50th percentile; else not in the line."""

    @property
    def equal(self) -> bool | None:
        """Whether the runs of both sides overlap, so that the ratio shows no difference; None without a peer."""
        return None if self.peer is None else self.ours.overlaps(self.peer)

    def line(self) -> str:
        """Return the figure as one JSON line."""
        facts: dict[str, Any] = {"figure": self.figure}
        for name, spread in (("ratio", self.ratio), ("ours", self.ours), ("peer", self.peer), ("p99", self.p99)):
            if spread is not None:
                facts |= spread.facts(name)
        facts |= {"equal": self.equal, "unit": self.unit, "runs": self.runs, "goal": self.goal}
        return json.dumps(facts | {"rows": self.rows, "bytes": self.bytes, "note": self.note})


@dataclass(slots=True)
class Asked:
    """Settings that differ from the documented ones: to try a figure small, or to measure it large."""

    rows: int | None = None
    seconds: int | None = None
    runs: int | None = None

    @property
    def is_a_try(self) -> bool:
        """Whether the figures aren't the documented ones."""
        return (self.rows, self.seconds, self.runs) != (None, None, None)


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


def names(measure: Measure | None = None) -> list[str]:
    """Return the names of all figures, or of those that one function yields."""
    return [name for name, behind in _MEASURES.items() if measure in (None, behind)]


def interleaved(
    ours: Callable[[], float], peer: Callable[[], float], *, runs: int = RUNS
) -> tuple[list[float], list[float]]:
    """Return the runs of `ours` and of `peer`, which take turns; the side that starts changes from round to round.

    Args:
        ours: one run; returns the figure in its unit.
        peer: the same for the peer.
        runs: counted rounds, after one that isn't.
    """
    values: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range((asked.runs or runs) + 1):
        turn = [("ours", ours), ("peer", peer)]
        for name, run in turn if number % 2 else reversed(turn):
            value = run()
            say(f"  {'warm-up' if number == 0 else f'run {number}'}: {name} {value:,.4g}")
            if number:
                values[name].append(value)
    return values["ours"], values["peer"]


def repeated(run: Callable[[], float], *, runs: int = RUNS, warm_up: bool = True) -> list[float]:
    """Return the runs of a figure without a peer, after one that isn't counted if `warm_up`."""
    values = []
    for number in range(0 if warm_up else 1, (asked.runs or runs) + 1):
        values.append(run())
        say(f"  {f'run {number}' if number else 'warm-up'}: {values[-1]:,.4g}")
    return values[1:] if warm_up else values


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
    values = interleaved(ours, peer, runs=runs)
    return reported(name, *values, unit=unit, goal=goal, rows=rows, size_bytes=size_bytes, note=note)


def reported(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float] | None = None,
    *,
    unit: str,
    goal: str,
    rows: int,
    size_bytes: int,
    note: str,
    p99: Sequence[float] | None = None,
) -> Figure:
    """Return the figure of these runs; the peer's are those of the same rounds."""
    mine, theirs = Spread.of(ours), None if peer is None else Spread.of(peer)
    ratio = None
    if peer is not None and theirs is not None:
        rounds = [one / other for one, other in zip(ours, peer, strict=True)]
        ratio = Spread(mine.median / theirs.median, min(rounds), max(rounds))
    return Figure(
        figure=name,
        ours=mine,
        unit=unit,
        runs=len(ours),
        goal=goal,
        rows=rows,
        bytes=size_bytes,
        note=note,
        peer=theirs,
        ratio=ratio,
        p99=None if p99 is None else Spread.of(p99),
    )


def table() -> str:
    """Return the kept results as a Markdown table, in the order of their registration."""
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    by_name = {line["figure"]: line for line in kept}
    rows = ["| figure | ours | peer | ratio | goal |", "| --- | ---: | ---: | ---: | --- |"]
    for line in (by_name[name] for name in names() if name in by_name):
        ours, ratio = _cell(line, "ours"), _cell(line, "ratio")
        if "p99" in line:
            ours = f"p50 {ours}, p99 {_cell(line, 'p99')}"
        if line["equal"]:
            ratio += ", equal"
        rows.append(
            f"| `{line['figure']}` | {ours} {line['unit']} | {_cell(line, 'peer')} | {ratio} | {line['goal']} |"
        )
    return "\n".join(rows)


def _cell(line: dict[str, Any], name: str) -> str:
    """Return a median with the least and the greatest run, if there was more than one."""
    if name not in line:
        return "–"
    least, median, greatest = (_number(line[key]) for key in (f"{name}_least", name, f"{name}_greatest"))
    return median if least == greatest else f"{median} ({least}–{greatest})"


def _number(value: float) -> str:
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
