"""The progress of a running command: lines on stderr, redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

from millstream.cli.context import note, print_raw
from millstream.cli.main import say_error
from millstream.model.human_text import copy_words, counted, human_bytes, human_seconds, readable
from millstream.processes.run import by_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from millstream.processes.run import RunOutcome
    from millstream.processes.supervisor import Event

_EVERY_S: Final = 10.0
"""Seconds between lines if they can't be redrawn."""
_WIDTH: Final = 110
_WAITING_COPIES: Final = {"paused": "paused", "copy_held": "held, until `millstream tables copy` asks for it"}


class StatusLine:
    """The current progress: one line that is overwritten on a terminal; elsewhere changed lines, every ten seconds."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._shown = ""
        self._at_s = 0.0

    def show(self, lines: Sequence[str]) -> None:
        """Show the current state."""
        text = "  ".join(lines)
        if self._terminal:
            sys.stderr.write("\r\x1b[K" + readable(text)[:_WIDTH])
            sys.stderr.flush()
            self._shown = text
        elif text != self._shown and time.monotonic() - self._at_s >= _EVERY_S:
            for line in lines:
                note(line)
            self._shown, self._at_s = text, time.monotonic()

    def say(self, text: str) -> None:
        """Print a line that stays, above the current state."""
        self.clear()
        note(text)

    def clear(self) -> None:
        """Remove the current state."""
        if self._terminal and self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


class RunReport:
    """Prints what `run`'s parts do, for people."""

    def __init__(self, *, terminal: bool, until_caught_up: bool) -> None:
        self._line = StatusLine(terminal=terminal)
        self._given_up = "the run will fail" if until_caught_up else "the other parts continue"
        self._parts: dict[str, dict[str, dict[str, Any]]] = {"capture": {}, "pipeline": {}}
        self._waits: dict[str, str] = {}
        """The parts that wait for an address, each with the error that was printed."""
        self._since_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()

    def heard(self, event: Event) -> None:
        """Take an event of the supervisor."""
        name, what, facts = event
        if what == "started" and name in self._waits:
            pass  # it is tried again, and wasn't heard of since
        elif what == "started":
            again = f" again ({facts['restarts']})" if facts["restarts"] else ""
            self._line.say(f"{name}: started{again}, process {facts['pid']}")
        elif what == "died":
            error = facts.get("error") or {}
            if error.get("code") == "address_in_use":
                self._say_taken(name, error)
                return
            self._waits.pop(name, None)
            why = (
                f": {error['code']}: {'; '.join(error['message'].splitlines())}"
                if error
                else f" (exit code {facts['exit_code']})"
            )
            self._line.say(f"{name}: ended{why}; again in {facts['restart_in_s']:.1f} s")
        elif what == "given_up":
            self._line.clear()
            say_error({**facts, "message": f"{name}: {facts.get('message', '')}"})
            self._line.say(f"{name}: given up; {'the run ends' if facts.get('ends_run') else self._given_up}")
        elif what == "stream_failed":
            self._line.clear()
            say_error({**facts, "message": f"{name}, stream {facts.get('stream')}: {facts.get('message', '')}"})
        elif what == "ended":
            self._line.say(f"{name}: done")
        elif what == "stopping":
            self._line.say("stopping; interrupt again to kill the parts")
        elif what == "spark":
            self._line.say(f"{name}: {_spark_words(facts)}")
        elif what == "listening":
            self._waits.pop(name, None)
            self._line.say(f"{name}: the console is at {facts.get('url')}, next to /metrics, /healthz and /status")
        elif what == "progress" and name in self._parts:
            self._parts[name][str(facts.get("stream"))] = facts
            self._line.show(self._summary())

    def conclude(self, outcome: RunOutcome) -> None:
        """Print how it ended, and what the source still keeps for us."""
        hint = "Read the reason with `millstream tables`, then run `millstream tables retry T`."
        _say_quarantined(outcome.quarantined, outcome.fold_errors, hint)
        _say_paused(outcome.paused)
        _say_held(outcome.copies_held)
        if outcome.caught_up:
            _say_caught_up(self._since_s)
        for slot, held in outcome.slots.items():
            what = "" if held is None else f", {human_bytes(held)} now"
            note(
                f"the source keeps WAL for the slot {slot}{what}; run again, or release it with `millstream slot drop`"
            )

    def _say_taken(self, name: str, error: Mapping[str, Any]) -> None:
        """Print once that a part waits for its address, which only HTTP and Flight need."""
        if self._waits.get(name) != error["message"]:
            self._line.say(
                f"{name}: warning: {error['message']}; until the address is free, this run continues without the console, "
                "HTTP writes and reads, /metrics and /healthz"
            )
            self._line.say(f"  {error['hint']}")
        self._waits[name] = error["message"]

    def _summary(self) -> list[str]:
        return [
            line
            for part, streams in self._parts.items()
            for facts in streams.values()
            for line in lines_of(part, facts)
        ]


class JsonReport:
    """Prints what `run`'s parts do, for programs: a JSON object per line, in the form of the parts' own."""

    def __init__(self) -> None:
        self._progress_s: dict[tuple[str, str], float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no line is redrawn."""

    def heard(self, event: Event) -> None:
        """Take an event of the supervisor; progress is printed every ten seconds per stream."""
        name, what, facts = event
        if what == "progress":
            now_s, of = time.monotonic(), (name, str(facts.get("stream")))
            if now_s - self._progress_s.get(of, -_EVERY_S) < _EVERY_S:
                return
            self._progress_s[of] = now_s
        self._say({"event": what, "part": name or "run", **{k: v for k, v in facts.items() if k != "event"}})

    def conclude(self, outcome: RunOutcome) -> None:
        """Print how it ended."""
        self._say({"event": "concluded", "part": "run", **dataclasses.asdict(outcome)})

    def _say(self, facts: dict[str, Any]) -> None:
        print_raw(json.dumps({**facts, "timestamp": datetime.now(UTC).isoformat()}, default=str), err=True)


class PartReport:
    """Prints what one part does, for people; silent if a supervisor does."""

    def __init__(self, part: str, *, silent: bool, terminal: bool) -> None:
        self._part = part
        self._silent = silent
        self._line = StatusLine(terminal=terminal)
        self._since_s = time.monotonic()

    def heard(self, facts: dict[str, Any]) -> None:
        """Take progress, from any thread."""
        if not self._silent:
            self._line.show(lines_of(self._part, facts))

    def conclude(self, outcome: dict[str, Any], *, must_catch_up: bool) -> int:
        """Print how it ended; return the exit code."""
        self._line.clear()
        quarantined, copies_held, fold_errors = (
            by_table(outcome.items(), what) for what in ("quarantined", "copies_held", "fold_errors")
        )
        _say_quarantined(quarantined, fold_errors)
        paused = [f"{stream}: {table}" for stream, facts in outcome.items() for table in facts.get("paused", ())]
        _say_paused(paused)
        _say_held(copies_held)
        if not must_catch_up:
            return 0
        caught_up = bool(outcome) and all(facts.get("caught_up") for facts in outcome.values())
        if caught_up:
            _say_caught_up(self._since_s)
        return 0 if caught_up and not quarantined and not paused and not copies_held else 1


def _spark_words(facts: Mapping[str, Any]) -> str:
    """Return how far Spark's start is."""
    if facts["state"] == "waiting":
        return f"waiting for Spark's master at {facts['master']}, which doesn't answer; the log goes on"
    return "starting Spark …" if facts["state"] == "starting" else f"ready after {facts['seconds']:.0f} s"


def _say_caught_up(since_s: float) -> None:
    """Print that all is done: the last line of progress is from before."""
    note(f"caught up in {human_seconds(time.monotonic() - since_s)}")


def _say_quarantined(tables: Mapping[str, str], fold_errors: Mapping[str, Mapping[str, str]], hint: str = "") -> None:
    """Print the error of each table; of one that only its fold holds back, the fold's own code and hint."""
    for table, reason in sorted(tables.items()):
        own = fold_errors.get(table) or {"code": "table_quarantined", "hint": hint}
        say_error({"code": own["code"], "message": f"{table}: {reason}", "hint": own["hint"]})


def _say_paused(tables: Sequence[str]) -> None:
    for table in sorted(tables):
        say_error(
            {
                "code": "copy_paused",
                "message": f"{table}: its copy is paused; this run didn't wait for it",
                "hint": "Run `millstream tables resume T` to continue it.",
            }
        )


def _say_held(tables: Mapping[str, str]) -> None:
    for table, reason in sorted(tables.items()):
        say_error(
            {
                "code": "copy_held",
                "message": f"{table}: {reason}",
                "hint": "Run `millstream tables copy T` when the source can bear it.",
            }
        )


def lines_of(part: str, facts: dict[str, Any]) -> list[str]:
    """Return the lines of one stream of one part: one for it, and one for each table that is being copied."""
    copies = ((facts.get("progress") or {}).get("copies") or {}) if part == "capture" else {}
    return [describe(part, facts), *(_describe_copy(table, copy) for table, copy in copies.items())]


def describe(part: str, facts: dict[str, Any]) -> str:
    """Describe one stream of one part in some words."""
    progress = facts.get("progress") or {}
    name = facts.get("stream")
    if part == "capture":
        behind = max(0, progress.get("source_end", 0) - progress.get("durable", 0))
        words = f"{name}: {progress.get('records', 0):,} records captured, {human_bytes(behind)} behind"
        if progress.get("mode") == "catching up":
            words += ", catching up in chunks"
        return words
    if not progress:
        return "→ lake: nothing landed yet"
    if progress.get("replay") is not None:
        return _describe_replay(progress["replay"], progress["rows_per_s"])
    # Landed records aren't counted: with an earlier run's rest, or a rebuild's, they never equal the
    # captured ones.
    waiting = progress["lag_records"]
    if not waiting and not progress["n"]:
        return "→ lake: the log has no record yet"
    if not waiting:
        aside = progress.get("quarantined") or {}
        words = "→ lake: has every record of the log"
        return f"{words} except those of {', '.join(sorted(aside))}" if aside else words
    words = f"→ lake: at most {counted(waiting, 'record')} behind, {progress['rows_per_s'] or 0:,.0f}/s"
    lag = progress["lag_s"]
    return words if lag is None else f"{words}, lag {human_seconds(lag)}"


def _describe_replay(replay: dict[str, Any], rows_per_s: float | None) -> str:
    """Describe the replay of what it found at its start, without later records."""
    size = replay["bytes"]
    share = int(100 * size["done"] / size["total"])
    words = f"→ lake: replaying, {share} % of {human_bytes(size['total'])}, {rows_per_s or 0:,.0f}/s"
    return words if replay["eta_s"] is None else f"{words}, about {human_seconds(replay['eta_s'])} left"


def _describe_copy(table: str, copy: dict[str, Any]) -> str:
    if (word := _WAITING_COPIES.get(copy.get("state", ""))) is not None:
        return f"the copy of {table} is {word}"
    return f"copying {table}: {copy_words(copy)}"
