"""The page that compares a stream's tables with their source: it starts `millstream diff`, and shows its progress and outcome.

The comparison is a process of its own: one at a time, of low priority, which ends with its time. So it takes none of the
server's memory, and can be stopped at any moment.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from millstream.console.html import Content, Html, Part, Piece, grid, shortened, tag, with_code
from millstream.console.page_frame import link
from millstream.errors import UsageError
from millstream.processes.run import part_command
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.home.home import Home

KEYS_LISTED: Final = 100
"""Differing keys of a table that are listed; others are counted."""
TIME_MAX_S: Final = 1800.0
_ANSWER_BYTES_MAX: Final = 8 << 20
_SAID_BYTES_MAX: Final = 2000
_VALUE_MAX: Final = 400
_LOOKS_EVERY_S: Final = 0.5
_ENDS_WITHIN_S: Final = 5.0
_MARKS: Final = {
    "equal": ("", "✓ "),
    "different": ("error", "✖ "),
    "not_compared": ("warning", "▲ "),
    "skipped": ("", ""),
}


@dataclass(slots=True)
class Comparison:
    """One comparison."""

    stream: str
    table: str
    """The table; empty for all."""
    who: str
    began: str
    state: str = "runs"
    """`runs`, `done`, `stopped` or `failed`."""
    said: str = ""
    """Its progress; how it failed."""
    seconds: float = 0.0
    """The time that it took."""
    stopped_by: str = ""
    """The name of the token that stopped it; empty if its bounds or the server's end did."""
    report: Mapping[str, Any] | None = None

    @property
    def outcome(self) -> str:
        """Its end: `equal`, `differences`, `not_compared` if no table differs and some weren't compared, `stopped` or `failed`."""
        if self.report is None:
            return self.state
        counts = self.report["counts"]
        return "differences" if counts["different"] else "not_compared" if counts["not_compared"] else "equal"


class Diffs:
    """The comparisons of a server, one at a time. Any thread."""

    def __init__(self, home: Home) -> None:
        self._command = part_command(home)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._worker: Worker | None = None
        self.time_max_s = TIME_MAX_S
        self.last: Comparison | None = None
        """The one that runs, or the last one."""

    def start(
        self, who: str, stream: str, table: str, on_end: Callable[[Comparison], None] = lambda _one: None
    ) -> None:
        """Start a comparison, and call `on_end` after it on another thread. Raises `UsageError` if one runs."""
        if "\0" in table:  # no argument of a process holds one
            raise UsageError("a table's name has no zero byte")
        arguments = ["diff", "--json", "--limit", str(KEYS_LISTED), "--stream", stream, "--", *filter(None, [table])]
        with self._lock:
            if self._process is not None:
                raise UsageError("a comparison runs already", hint="Wait for its end, or stop it on `/diff`.")
            start_s = time.monotonic()
            out, said = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - the worker closes them
            self._process = process = subprocess.Popen(
                [*self._command, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=said, start_new_session=True
            )
            before, self.last = self.last, Comparison(stream, table, who, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}")
        _make_nice(process.pid)
        follow = partial(self._follow, process, self.last, start_s, out, said, on_end)
        try:
            self._worker = Worker("console-diff", follow).start()
        except BaseException:
            with out, said, self._lock:
                process.kill()
                process.wait()
                self._process, self.last = None, before
            raise

    def stop(self, who: str = "") -> None:
        """Stop the comparison that runs, for a token of a name."""
        with self._lock:
            if self._process is not None and self.last is not None and self.last.state == "runs":
                self.last.state, self.last.stopped_by = "stopped", who
                self._process.kill()

    def close(self) -> None:
        """Stop the comparison that runs, and return once it has ended."""
        self.stop()
        if self._worker is not None:
            self._worker.join(_ENDS_WITHIN_S)

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        one: Comparison,
        start_s: float,
        out: IO[bytes],
        said: IO[bytes],
        on_end: Callable[[Comparison], None],
    ) -> None:
        with out, said:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOKS_EVERY_S)
                text = _end_of(said)
                if process.returncode is not None:
                    break
                one.said = text.rpartition("\n")[2]
                if time.monotonic() > start_s + self.time_max_s or out.seek(0, 2) > _ANSWER_BYTES_MAX:
                    self.stop()
            report = None
            with suppress(ValueError):
                out.seek(0)
                report = json.loads(out.read(_ANSWER_BYTES_MAX))
        with self._lock:
            one.seconds = round(time.monotonic() - start_s, 3)
            if one.state == "runs":
                one.state, one.said, one.report = ("failed", text, None) if report is None else ("done", "", report)
        try:
            on_end(one)
        finally:
            with self._lock:
                self._process = None


def _make_nice(pid: int) -> None:
    """Give way to the home: for a core, and when memory runs out."""
    import os

    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 10)
        Path(f"/proc/{pid}/oom_score_adj").write_text("500")


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, 2)
    file.seek(max(0, size - _SAID_BYTES_MAX))
    return file.read().decode(errors="replace").strip()


def form(streams: Sequence[str], tables: Sequence[str]) -> list[Content]:
    """Return what starts a comparison.

    Args:
        streams: names of the streams that the viewer may compare.
        tables: names of their tables.
    """
    if not streams:
        note = "A comparison asks the source, so it needs a token with the right `admin` on a stream with a source."
        return [tag("p", with_code(note), class_="note")]
    options = [tag("option", name, value=name) for name in streams]
    limits = (
        f"One comparison runs at a time, for {TIME_MAX_S / 60:.0f} minutes at most. It lists the first {KEYS_LISTED} differing "
        "keys of each table. The source is read once, under one snapshot, which vacuum waits for."
    )
    return [
        tag(
            "form",
            tag("label", "Stream ", tag("select", *options, name="stream")),
            tag(
                "label",
                "Table ",
                tag("input", name="table", list="tables", placeholder="all", size=28, autocomplete="off"),
            ),
            tag("datalist", *(tag("option", value=name) for name in tables), id="tables"),
            tag("button", "Compare with the source", type="submit", name="do", value="start"),
            tag("button", "Stop the one that runs", type="submit", name="do", value="stop"),
            tag("p", limits, class_="note wide"),
            method="post",
            action="/diff",
            class_="row",
        )
    ]


def area(one: Comparison | None, *, may_see: bool) -> Iterator[Piece]:
    """Yield the live area: the last comparison, if the viewer may see it."""
    if one is None or not may_see:
        yield Part("diff", tag("p", "Nothing was compared since the server began.", id="diff"))
        return
    what = f"{one.table or 'all tables'} of stream {one.stream}, begun {one.began} UTC by {one.who}"
    contents: list[Content] = [tag("h2", f"Comparison of {what}")]
    if one.state == "runs":
        contents.append(tag("p", tag("span", "… runs", class_="state busy"), " ", one.said))
    elif one.report is None:
        contents.append(
            tag("p", f"It {one.state}. {one.said}" if one.said else f"It {one.state}.", class_="trouble error")
        )
    else:
        counts = ", ".join(f"{n} {state.replace('_', ' ')}" for state, n in one.report["counts"].items() if n)
        contents.append(tag("p", f"At {one.report['lsn']}: {counts or 'no tables'}."))
        contents += [_outcome(one.stream, table) for table in one.report["tables"]]
    yield Part("diff", tag("section", *contents, id="diff"))


def _outcome(stream: str, table: Mapping[str, Any]) -> Html:
    level, mark = _MARKS[table["state"]]
    different, rows = table["different"], table["rows"]
    words = {
        "equal": f"equal, {rows['source']:,} rows",
        "different": f"{different:,} {'key differs' if different == 1 else 'keys differ'}, "
        f"{rows['lake']:,} rows in the lake, {rows['source']:,} in the source",
    }.get(table["state"], f"{table['state'].replace('_', ' ')}: {table['reason']}")
    notes = [tag("p", note, class_="note") for note in table["notes"]]
    listed = None
    if table["differences"]:
        body = (row for one in table["differences"] for row in _rows(one))
        left = different - table["listed"]
        more = (
            tag("p", *with_code(f"{left:,} more keys differ. `millstream diff --json` lists them."), class_="note")
            if left
            else None
        )
        listed = [grid(("Key", "Difference", "Lake", "Source"), body, tabindex=0), more]
    name = tag("h3", link(table["table"], "tables", stream, table["table"]))
    return tag("article", name, tag("p", tag("span", f"{mark}{words}", class_=f"state {level}".strip())), notes, listed)


def _rows(one: Mapping[str, Any]) -> Iterator[Html]:
    """Yield a row for each column of a key that differs, or one for the key."""
    key = ", ".join(f"{name}={_text(value)}" for name, value in one["key"].items())
    if one["what"] == "values":
        cells = [(name, _text(both["lake"]), _text(both["source"])) for name, both in one["columns"].items()]
    elif one["what"] == "count":
        cells = [("number of rows", f"{one['rows']['lake']:,}", f"{one['rows']['source']:,}")]
    else:
        cells = [(one["what"].replace("_", " "), "", "")]
    for row in cells:
        yield tag("tr", tag("th", key, scope="row"), *(tag("td", cell) for cell in row))


def _text(value: str | None) -> str:
    return "NULL" if value is None else shortened(value, _VALUE_MAX)
