"""Text for people: text from outside made safe to show, since a terminal acts on some characters, and sizes."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""C0, DEL and C1; and surrogates, which can't be printed at all."""
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def readable(text: str) -> str:
    r"""Return the text on one line, with each control character written as an escape, such as `\n` or `\x1b`.

    For terminals and log lines. A backslash isn't escaped, so the text can't be read back; programs
    get JSON or CSV.
    """
    return _CONTROL.sub(_escape, text)


def human_bytes(count: float | None) -> str:
    """Return a size for people."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    number = ord(character)
    return _NAMED.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
