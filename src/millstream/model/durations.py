"""Durations as people write them: `500ms`, `30s`, `7d`."""

from __future__ import annotations

import re
from typing import Final

_DURATION: Final = re.compile(r"\s*(\d{1,15}(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*\Z")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str) -> float:
    """Return seconds; `ValueError` for text that is no duration."""
    found = _DURATION.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not a duration; write a number with ms, s, min, h or d, such as 500ms or 7d")
    return float(found[1]) * _SECONDS[found[2]]
