"""Observations of the process that sends alerts: for how long each fact of a home's status has not changed.

A status is of one moment. Some conditions are a lack of progress, which shows only over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

FRESH_S: Final = 60.0
"""Observations older than this, and than some intervals between looks, say nothing about now."""
_LOOKS: Final = 4


@dataclass(slots=True)
class Observations:
    """Facts by key, each with the time since which it has been so.

    Times are seconds since 1970-01-01 UTC. A time in which no process looked doesn't count: after a pause of the whole
    home, nothing has been stalled for as long as the pause was.
    """

    every_s: float
    """The interval between looks."""
    looked_s: float = 0.0
    facts: dict[str, tuple[Any, float]] = field(default_factory=dict)
    slots: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By stream: whether the slot `is_read`, and the bytes of WAL that it `holds`, when it was last looked at."""

    @property
    def gap_s(self) -> float:
        """The time between two looks from which on it counts as a pause."""
        return max(FRESH_S, _LOOKS * self.every_s)

    def observe(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Take the facts of a look. A fact that isn't among them is forgotten."""
        pause_s = now_s - self.looked_s if now_s - self.looked_s > self.gap_s else 0.0
        kept = {}
        for key, value in facts.items():
            before, since_s = self.facts.get(key, (None, now_s))
            kept[key] = (value, min(now_s, since_s + pause_s) if before == value else now_s)
        self.facts, self.looked_s = kept, now_s

    def unchanged_s(self, key: str, value: Any, now_s: float) -> float:
        """Return for how long a fact has had this value; 0 if it was another one, or no process has looked of late."""
        before, since_s = self.facts.get(key, (None, now_s))
        is_fresh = now_s - self.looked_s <= self.gap_s
        return max(0.0, now_s - since_s) if is_fresh and before == value else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return them, JSON-able."""
        return {
            "looked": self.looked_s,
            "facts": {key: [value, since_s] for key, (value, since_s) in self.facts.items()},
            "slots": self.slots,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], every_s: float) -> Self:
        """Return those of `as_dict`. Raises `KeyError`, `TypeError` or `ValueError` for other data."""
        facts = {str(key): (value, float(since_s)) for key, (value, since_s) in data["facts"].items()}
        slots = {
            str(stream): {"is_read": slot["is_read"], "holds": slot["holds"]} for stream, slot in data["slots"].items()
        }
        return cls(every_s, float(data["looked"]), facts, slots)
