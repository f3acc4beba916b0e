"""Everything that is wrong in a status, each with the command that helps: conditions that last, and present errors.

`app.trouble_rules` decides which conditions hold, and the command for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millstream.app.record_rates import Status
from millstream.app.status_words import how_it_stands, undelivered, why_and_since
from millstream.app.trouble_rules import node_errors

_STOPPED: Final = ("capture_stalled", "pipeline_stalled", "replication_stalled")
"""Conditions that repeat a stream's own error."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong, and what to do about it."""

    code: str
    message: str
    hint: str
    stream: str = ""
    is_error: bool = True
    """False for what an operator chose, or what passes on its own."""


def troubles_of(status: Status) -> list[Trouble]:
    """Return everything that is wrong, errors first."""
    found = [Trouble("problem", text, "Run `millstream doctor`.") for text in status["problems"]]
    for stream in status["streams"]:
        found += _of_stream(stream)
    for one in status["conditions"]:
        errors = {part for s in status["streams"] if s["name"] == one["stream"] for part in s.get("errors", ())}
        failing = errors | {"replication"}  # it has no other cause
        if one["kind"] not in _STOPPED or one["kind"].removesuffix("_stalled") not in failing:
            hint = _with_command(one["hint"])
            found.append(Trouble(one["kind"], one["message"], hint, one["stream"], is_error=one["is_alert"]))
    if (alerts := status["alerts"]) is not None and alerts["error"] is not None:
        found.append(Trouble("alerts", undelivered(alerts), "Check `[alerts]` in millstream.toml.", is_error=False))
    return sorted(found, key=lambda trouble: not trouble.is_error)


def _of_stream(stream: Mapping[str, Any]) -> Iterator[Trouble]:
    name = stream["name"]
    for part, error in stream.get("errors", {}).items():
        message = f"{how_it_stands(part, error)}: {why_and_since(error)}"
        yield Trouble(error["code"], message, _with_command(error.get("hint") or ""), name)
    for its in filter(None, [stream.get("replication"), *stream.get("regions", ())]):
        for error in node_errors(its):
            yield Trouble(error["code"], error["message"], _with_command(error.get("hint") or ""), name)


def _with_command(hint: str) -> str:
    """Return a hint with a command in any case."""
    return hint if "`" in hint else f"{hint} Run `millstream doctor`.".strip()
