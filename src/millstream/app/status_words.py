"""Parts of a stream's status in words, for the command line and the console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millstream.model.human_text import human_seconds

TRIED_AGAIN: Final = "lake: tried again: "
"""Begins the reason of a table that the lake can't take at the moment."""


def retention_waits(stream: Mapping[str, Any]) -> str:
    """Return the holder of the oldest segment, if that is older, or the log larger, than retention keeps."""
    oldest, bounds = stream["log"]["oldest"], stream["log"]["retention"]
    if oldest is None or bounds is None or not oldest["needed_by"]:
        return ""
    if oldest["seconds"] < bounds["age_s"] and (stream["log"]["bytes"] or 0) <= bounds["bytes"]:
        return ""
    holders = ", ".join(holder_words(stream, holder) for holder in oldest["needed_by"])
    return f"retention waits: the oldest segment has been needed for {human_seconds(oldest['seconds'])}, by {holders}"


def holder_words(stream: Mapping[str, Any], holder: str) -> str:
    """Return a holder of the log with its kind, and a table by its name."""
    held = stream["log"]["held"].get(holder)
    if held is None:  # the log's own, which `held` leaves out
        return "the writer, which hasn't copied its sessions and idempotency keys yet"
    kind = held["kind"]
    if kind == "pipeline" and held["from"] == 1:
        return f"the pipeline {holder}, which needs all of the log until `millstream run` has landed it"
    if kind != "backlog":
        return f"the {holder}" if holder.startswith(f"{kind} ") else f"the {kind} {holder.removeprefix(f'{kind}:')}"
    _, _, table_id = holder.partition("/")
    name = next((table["name"] for table in stream["tables"] if str(table["id"]) == table_id), None)
    return f"{name or f'table {table_id}'}, which is quarantined"


def undelivered(alerts: Mapping[str, Any]) -> str:
    """Return how the deliveries of alerts fail."""
    return f"{alerts['receiver']} has taken no alert since {alerts['failing_since']}: {alerts['error']}"


def how_it_stands(part: str, error: Mapping[str, Any]) -> str:
    """Return that a part of a stream stands still with an error; only the part's name if it is the log itself."""
    if part == "log":
        return part
    return f"{part} has given up" if error["gave_up"] else f"{part} waits, and retries"


def why_and_since(error: Mapping[str, Any]) -> str:
    """Return an error's message, and since when it stops its part of a stream, if that is known."""
    return str(error["message"]) if error["since"] is None else f"{error['message']} (since {error['since']})"
