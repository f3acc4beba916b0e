"""The open alerts: which notice is due, and what the receiver has acknowledged. It touches no clock and no network.

| alert | due |
| --- | --- |
| begun, and not acknowledged | `firing` |
| lasting, and last acknowledged `repeat_s` ago | `firing` again |
| ended, and its `firing` acknowledged | `resolved`; then it is forgotten |

An alert that ends before its `firing` was acknowledged is still sent, first as `firing`. One that begins again before
its `resolved` was acknowledged goes on. So there is one alert for each condition at most, however long the receiver is
away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from millstream.app.trouble_rules import Condition, Kind

_MISSES: Final = 3
"""Looks in a row that must not find a condition before its alert ends: a value next to its bound makes one alert."""


@dataclass(slots=True)
class Alert:
    """An alert. Times are seconds since 1970-01-01 UTC."""

    condition: Condition
    began_s: float
    ended_s: float | None = None
    misses: int = 0
    """Looks in a row that didn't find the condition."""
    sent_s: float | None = None
    """When the receiver acknowledged the last `firing`."""
    firings: int = 0
    """Number of `firing` notices that the receiver acknowledged."""

    @property
    def id(self) -> str:
        """The alert's id: the same in all its notices, and in no other alert."""
        return hashlib.sha256(f"{self.condition.key}/{self.began_s:.6f}".encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Notice:
    """One message about an alert."""

    alert: Alert
    is_resolved: bool

    @property
    def id(self) -> str:
        """The notice's id, which a retry repeats."""
        return f"{self.alert.id}-{'resolved' if self.is_resolved else self.alert.firings}"


@dataclass(slots=True)
class Book:
    """The alerts of a home. Not for sharing between threads."""

    repeat_s: float
    alerts: dict[str, Alert] = field(default_factory=dict)

    def update(self, conditions: Iterable[Condition], now_s: float, *, may_end: bool = True) -> None:
        """Take the conditions of a look.

        Args:
            may_end: whether the look saw everything, so that what it didn't find has ended.
        """
        found = {condition.key: condition for condition in conditions}
        for key, condition in found.items():
            alert = self.alerts.setdefault(key, Alert(condition, now_s))
            alert.condition, alert.misses, alert.ended_s = condition, 0, None
        for key, alert in self.alerts.items():
            if key not in found and may_end and alert.ended_s is None:
                alert.misses += 1
                if alert.misses >= _MISSES:
                    alert.ended_s = now_s

    def due(self, now_s: float) -> Notice | None:
        """Return the notice that is to be sent first; None if none is due."""
        for alert in self.alerts.values():
            if alert.sent_s is None or (
                alert.ended_s is None and not 0 <= now_s - alert.sent_s < self.repeat_s and not alert.misses
            ):
                return Notice(alert, is_resolved=False)
            if alert.ended_s is not None:
                return Notice(alert, is_resolved=True)
        return None

    def acknowledge(self, notice: Notice, now_s: float) -> None:
        """Note that the receiver has a notice."""
        if notice.is_resolved:
            del self.alerts[notice.alert.condition.key]
        else:
            notice.alert.sent_s = now_s
            notice.alert.firings += 1

    def as_list(self) -> list[dict[str, Any]]:
        """Return the alerts, JSON-able."""
        return [asdict(alert) for alert in self.alerts.values()]

    @classmethod
    def from_list(cls, data: Iterable[Mapping[str, Any]], repeat_s: float) -> Self:
        """Return the book of `as_list`. Raises `KeyError`, `TypeError` or `ValueError` for other data."""
        book = cls(repeat_s)
        for one in data:
            facts = dict(one["condition"])
            condition = Condition(**{**facts, "kind": Kind(facts["kind"])})
            book.alerts[condition.key] = Alert(**{**one, "condition": condition})
        return book
