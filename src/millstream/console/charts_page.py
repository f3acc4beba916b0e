"""The charts of a stream over the last hour, day or week, as SVG of the server, with all their numbers in one table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from millstream.console.html import Html, Part, Piece, opened, tag
from millstream.console.page_frame import link
from millstream.home.figure_ring import PERIODS, Figure, Period, Values
from millstream.model.human_text import human_bytes, human_seconds
from millstream.serving.chart_history import OF_HOME, OF_STREAM

if TYPE_CHECKING:
    from millstream.serving.chart_history import Figures

_WIDTH: Final = 1000
_HEIGHT: Final = 100
_FIGURES: Final = {one.name: one for one in (*OF_STREAM, *OF_HOME)}


@dataclass(frozen=True, slots=True)
class Chart:
    """Figures of one unit that are shown together."""

    name: str
    title: str
    figures: tuple[str, ...]


CHARTS: Final = (
    Chart("throughput", "Throughput", ("records_s",)),
    Chart("durable", "Commit to durable", ("durable_mean_s", "durable_p99_s")),
    Chart("lake", "Commit to lake", ("lake_s",)),
    Chart("lag", "Records that wait", ("lake_records", "consumer_records")),
    Chart("source", "WAL that waits", ("source_bytes",)),
    Chart("disk", "Disk", ("log_bytes", "lake_bytes", "disk_free_bytes")),
    Chart("memory", "Memory", ("memory_bytes",)),
)


def area(figures: Figures, streams: Sequence[str], name: str, period: str, *, whole_home: bool) -> Iterator[Piece]:
    """Yield the live area. It changes with the figures' `version` alone.

    Args:
        streams: names of the streams that the viewer may read.
        whole_home: whether the viewer may see what concerns the whole home.
    """
    if name not in streams:
        yield tag("p", f"There is no stream {name[:64]}." if name else "There are no streams so far.")
        return
    yield _choices(streams, name, period)
    own, note = figures.of(name, period)
    shared, shared_note = figures.of("", period) if whole_home else ([], "")
    rows = _joined(own, shared)
    for text in filter(None, dict.fromkeys((note, shared_note))):
        yield tag("p", f"Some figures are missing: {text}.", class_="trouble warning")
    if not rows:
        yield Part("charts", tag("p", "The first figures come within a minute.", id="charts"))
        return
    shown = [one for one in CHARTS if any(_column(rows, name) for name in one.figures)]
    names = [name for one in shown for name in one.figures if _column(rows, name)]
    charts = [
        _chart(one, [name for name in one.figures if name in names], names, rows, PERIODS[period]) for one in shown
    ]
    yield Part("charts", tag("div", *charts, id="charts", class_="charts"))
    yield Part("numbers", _numbers(names, rows, PERIODS[period]))


_Rows = list[tuple[int, dict[str, float]]]


def _joined(own: Sequence[tuple[int, Values]], shared: Sequence[tuple[int, Values]]) -> _Rows:
    found: dict[int, dict[str, float]] = {}
    for figures, samples in ((OF_STREAM, own), (OF_HOME, shared)):
        for start, values in samples:
            found.setdefault(start, {}).update((one.name, value) for one, value in zip(figures, values, strict=True))
    return sorted(found.items())


def _column(rows: _Rows, name: str) -> list[tuple[int, float]]:
    """Return the known values of a figure."""
    return [(start, values[name]) for start, values in rows if not math.isnan(values.get(name, math.nan))]


def _choices(streams: Sequence[str], name: str, period: str) -> Html:
    periods = [tag("li", _choice(one, name, one, is_now=one == period)) for one in PERIODS]
    others = [tag("li", _choice(one, one, period, is_now=one == name)) for one in streams] if len(streams) > 1 else []
    return tag(
        "nav",
        tag("ul", *periods),
        tag("ul", *others) if others else None,
        aria_label="Period and stream",
        class_="choices",
    )


def _choice(text: str, stream: str, period: str, *, is_now: bool) -> Html:
    return tag("strong", text, aria_current="true") if is_now else link(text, "charts", period, stream)


def _chart(chart: Chart, own: Sequence[str], names: Sequence[str], rows: _Rows, period: Period) -> Html:
    columns = {name: _column(rows, name) for name in own}
    unit = _FIGURES[own[0]].unit
    most = max(value for column in columns.values() for _, value in column) or 1.0
    end = rows[-1][0] + period.step_s
    begin = end - period.step_s * period.samples
    lines = [
        tag("polyline", points=points, class_=f"line-{number}")
        for number, column in enumerate(columns.values())
        for points in _points(column, begin, end, most, period.step_s)
    ]
    latest = [f"{_FIGURES[name].title} {in_words(unit, column[-1][1])}" for name, column in columns.items()]
    keys = [tag("span", words, class_=f"key key-{number}") for number, words in enumerate(latest)]
    svg = (
        opened("svg", viewBox=f"0 0 {_WIDTH} {_HEIGHT}", preserveAspectRatio="none", aria_hidden="true")
        + "".join(lines)
        + "</svg>"
    )
    return tag(
        "figure",
        tag("figcaption", tag("strong", chart.title), *keys),
        tag(
            "div",
            Html(svg),
            tag("span", in_words(unit, most), class_="most"),
            class_="plot",
            tabindex=0,
            role="img",
            aria_label=f"{chart.title}: {', '.join(latest)}; at most {in_words(unit, most)}. The arrow keys show each time.",
            data_columns=" ".join(str(names.index(name) + 1) for name in own),
        ),
        tag(
            "p",
            tag("span", _time(begin, period)),
            tag("output"),
            tag("span", f"{_time(end, period)} UTC"),
            class_="times",
        ),
        id=f"chart-{chart.name}",
    )


def _points(column: Sequence[tuple[int, float]], begin: int, end: int, most: float, step_s: int) -> Iterator[str]:
    """Yield the points of a figure's lines; where a sample is missing, a line ends."""
    line: list[str] = []
    before = begin
    for start, value in column:
        if line and start - before > 2 * step_s:
            yield _line(line)
            line = []
        x = round(_WIDTH * (start + step_s / 2 - begin) / (end - begin), 1)
        line.append(f"{x},{_HEIGHT - round((_HEIGHT - 4) * value / most, 1)}")
        before = start
    if line:
        yield _line(line)


def _line(points: list[str]) -> str:
    """Return a line; one point alone is drawn by a line to itself."""
    return " ".join(points * 2 if len(points) == 1 else points)


def _numbers(names: Sequence[str], rows: _Rows, period: Period) -> Html:
    """Return the table of all figures, the newest first: a browser's script reads a chart's numbers in it, too."""
    figures = [_FIGURES[name] for name in names]
    titles = {name: chart.title for chart in CHARTS for name in chart.figures}
    heads = [tag("th", f"{titles[one.name]}: {one.title}", scope="col", class_="number") for one in figures]
    end = rows[-1][0] + period.step_s
    begin = end - period.step_s * period.samples
    body = []
    for start, values in reversed(rows):
        cells = "".join(f'<td class="number">{_cell(one, values)}</td>' for one in figures)
        place = round((start + period.step_s / 2 - begin) / (end - begin), 4)
        body.append(Html(f'<tr data-at="{place}"><th scope="row">{_time(start, period)}</th>{cells}</tr>'))
    table = tag("table", tag("thead", tag("tr", tag("th", "Time (UTC)", scope="col"), *heads)), tag("tbody", *body))
    scroll = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="Numbers")
    return tag("details", tag("summary", "The numbers of these charts"), scroll, id="numbers")


def _cell(figure: Figure, values: dict[str, float]) -> str:
    value = values.get(figure.name, math.nan)
    return "" if math.isnan(value) else in_words(figure.unit, value)


def in_words(unit: str, value: float) -> str:
    """Return a value with its unit."""
    if unit == "bytes":
        return human_bytes(value)
    if unit == "seconds":
        return f"{value * 1000:,.3g} ms" if value < 1 else human_seconds(value)
    return f"{value:,.0f} {unit}"


def _time(at_s: int, period: Period) -> str:
    # A day and a week end at the time, or on the weekday, that they begin at: their dates tell the ends apart.
    form = {"hour": "%H:%M:%S", "day": "%d %b %H:%M", "week": "%a %d %b %H:%M"}[period.name]
    return datetime.fromtimestamp(at_s, UTC).strftime(form)
