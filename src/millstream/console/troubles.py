"""Everything that is wrong in a status, each with the command that helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millstream.app.record_rates import Status
from millstream.app.status_words import TRIED_AGAIN, how_it_stands, why_and_since

_STOPPED: Final = ("capture_stalled", "pipeline_stalled")
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
    processes = status["processes"]
    waits = any(stream["lag"]["lake"]["records"] for stream in status["streams"] if stream.get("id"))
    if processes.get("run") is not None and processes.get("pipeline") is None and waits:
        message = "the pipeline's process isn't running, and records wait for the lake"
        hint = "`millstream run` starts it again within seconds; if it doesn't, read its log."
        found.append(Trouble("pipeline_down", message, hint, is_error=False))
    for one in status["conditions"]:
        failing = {part for s in status["streams"] if s["name"] == one["stream"] for part in s.get("errors", ())}
        if one["kind"] not in _STOPPED or one["kind"].removesuffix("_stalled") not in failing:
            found.append(Trouble(one["kind"], one["message"], one["hint"], one["stream"]))
    alerts = status["alerts"] or {}
    if alerts.get("error") is not None:
        message = f"{alerts['receiver']} has taken no alert since {alerts['failing_since']}: {alerts['error']}"
        found.append(Trouble("alerts", message, "Check `[alerts]` in millstream.toml.", is_error=False))
    return sorted(found, key=lambda trouble: not trouble.is_error)


def _of_stream(stream: Mapping[str, Any]) -> Iterator[Trouble]:
    name = stream["name"]
    for part, error in stream.get("errors", {}).items():
        hint = error.get("hint") or ""
        if "`" not in hint:  # an operator gets a command in any case
            hint = f"{hint} Run `millstream doctor`.".strip()
        yield Trouble(error["code"], f"{part} {how_it_stands(error)}: {why_and_since(error)}", hint, name)
    for its in filter(None, [stream.get("replication"), *stream.get("regions", ())]):
        yield from _of_node(its, name)
    if not stream.get("id"):
        return
    if stream["source"]["slot_dropped"]:
        message = "the slot was dropped: the next run makes a new one and copies every table again"
        yield Trouble("slot_dropped", message, "Run `millstream run`.", name)
    waiting = [table for table in stream["tables"] if (table["reason"] or "").startswith(TRIED_AGAIN)]
    if waiting:
        more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        message = f"{waiting[0]['name']}{more}: {waiting[0]['reason']}"
        yield Trouble("lake_waits", message, "Run `millstream doctor`.", name, is_error=False)
    for writer in stream["writers"]:
        if writer["state"] == "expired" and writer["behind"]:
            message = f"readers wait for {writer['name']}, a writer with an expired lease ({writer['location']})"
            hint = f"Start it again. If its log is lost for good: `millstream writers forget {writer['name']}`."
            yield Trouble("writer_expired", message, hint, name)
    for holder, facts in stream["log"].get("cut_off", {}).items():
        if facts["kind"] != "consumer":  # a consumer's is a condition
            message = f"the {facts['kind']} {holder} was cut off: the log began at {facts['first']} then"
            yield Trouble("cut_off", message, "Build the follower again: `millstream restore`.", name)


def _of_node(its: Mapping[str, Any], stream: str) -> Iterator[Trouble]:
    for error in (its["error"], (its.get("following") or {}).get("error")):
        if error is not None:
            yield Trouble(error["code"], error["message"], error.get("hint") or "", stream)
    if its["role"] == "fenced":
        message = f"writes go to {its['leader']}"
        yield Trouble("fenced", message, f"Run `millstream follow {its['leader']}` to follow it.", stream)
    if its["role"] == "follows" and not its["following"]:
        message = f"this node follows {its['leader']}, but no process of it does"
        yield Trouble("not_following", message, "Run `millstream run` or `millstream follow`.", stream)
