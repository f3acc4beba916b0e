"""Text for people: text from outside made safe to show, since a terminal acts on some characters; and amounts in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0, DEL and C1; line ends and marks that turn the direction of other text; and surrogates, which can't be printed."""
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def readable(text: str) -> str:
    r"""Return the text on one line, with each control character written as an escape, such as `\n` or `\x1b`.

    For terminals and log lines. A backslash isn't escaped, so the text can't be read back; programs
    get JSON or CSV.
    """
    return _CONTROL.sub(_escape, text)


def counted(count: int, thing: str) -> str:
    """Return a number of things: `1 segment`, `1,234 segments`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def human_bytes(count: float | None) -> str:
    """Return a size for people."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float | None) -> str:
    """Return a time for people."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:.1f} d"


def copy_words(copy: Mapping[str, Any]) -> str:
    """Return the progress of a table's copy in words, from its facts in the status."""
    rows, estimate = copy.get("rows") or 0, copy.get("rows_estimate") or 0
    words = f"{rows:,}" + (f" of about {estimate:,}" if estimate > rows else "") + " rows"
    if copy.get("bytes"):
        words += f", {human_bytes(copy['bytes'])}"
    if copy.get("bytes_per_s"):
        words += f", {human_bytes(copy['bytes_per_s'])}/s"
    if copy.get("eta_s") is not None:
        words += f", about {human_seconds(copy['eta_s'])} left"
    return words + (", the stream waits for it" if copy.get("holds_stream") else "")


def consumer_state_words(consumer: Mapping[str, Any]) -> str:
    """Return a consumer's state, with its backfill's progress: the lag doesn't count the backfill's rows."""
    backfill = consumer["backfill"]
    if backfill is None:
        return str(consumer["state"])
    if backfill["of"] is None:
        return f"{consumer['state']}, backfill collects its rows"
    return f"{consumer['state']}, backfill {backfill['rows']:,} of {counted(backfill['of'], 'row')}"


def lag_words(lag: Mapping[str, Any]) -> str:
    """Return a stage's lag in words, as far as it is known.

    For a source that is ahead, neither records nor their age are.
    """
    if lag["bytes"] == 0:
        return "nothing waits"
    known = [
        None if lag["records"] is None else counted(lag["records"], "record"),
        None if lag["bytes"] is None else human_bytes(lag["bytes"]),
        None if lag["seconds"] is None else human_seconds(lag["seconds"]),
    ]
    return ", ".join(filter(None, known)) + " behind"


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    number = ord(character)
    return _NAMED.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
