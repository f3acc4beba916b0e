"""The home's file of alerts: the open ones, what was observed, and how deliveries fail. Any process reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.app.alerts.observations import Observations
from millstream.app.alerts.open_alerts import Book
from millstream.app.trouble_rules import Bounds, Condition, judge
from millstream.errors import MillstreamError
from millstream.model.addresses import mask_path
from millstream.model.durations import duration_s
from millstream.private_files import replace_file

if TYPE_CHECKING:
    from millstream.config.alerts_model import AlertsConfig
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.alerts")


class Kept:
    """The contents of the home's file of alerts."""

    def __init__(self, seen: Observations, book: Book, failing: dict[str, Any] | None) -> None:
        self.seen: Final = seen
        self.book: Final = book
        self.failing = failing
        """The `error` of the last delivery and the time `since` which deliveries have failed; None if none has."""

    @classmethod
    def empty(cls, alerts: AlertsConfig) -> Kept:
        """Return what a new home has."""
        return cls(Observations(duration_s(alerts.look_every)), Book(duration_s(alerts.repeat_every)), None)

    @classmethod
    def read(cls, home: Home, alerts: AlertsConfig) -> Kept:
        """Return the contents of the file; those of a new home if there is none, or it is damaged."""
        empty = cls.empty(alerts)
        try:
            data = json.loads(home.alerts_file.read_bytes())
            seen = Observations.from_dict(data["seen"], empty.seen.every_s)
            return cls(seen, Book.from_list(data["alerts"], empty.book.repeat_s), data["failing"])
        except FileNotFoundError:
            return empty
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning(
                "the file of alerts can't be read: it is begun again", file=str(home.alerts_file), error=str(error)
            )
            return empty

    def write(self, home: Home) -> None:
        """Replace the file."""
        data = {"seen": self.seen.as_dict(), "alerts": self.book.as_list(), "failing": self.failing}
        replace_file(home.alerts_file, json.dumps(data).encode(), durable=False)


def found_conditions(home: Home, status: Mapping[str, Any]) -> list[Condition]:
    """Return the conditions of a status, with what the process that sends alerts has observed, if one does.

    If the configuration can't be read, its bounds are the default ones.
    """
    from millstream.config.alerts_model import AlertsConfig

    try:
        alerts = home.config.alerts
    except MillstreamError:
        alerts = AlertsConfig()
    return judge(status, Kept.read(home, alerts).seen, Bounds.of(alerts), time.time())


def delivery_facts(home: Home) -> dict[str, Any] | None:
    """Return the `receiver` of alerts, without its path, which may be secret, and how its deliveries fail; None without one.

    Raises:
        MillstreamError: the configuration can't be read.
    """
    alerts = home.config.alerts
    if alerts.url is None:
        return None
    failing = Kept.read(home, alerts).failing
    return {
        "receiver": mask_path(alerts.url),
        "failing_since": None if failing is None else moment_text(failing["since"]),
        "error": None if failing is None else failing["error"],
    }


def moment_text(seconds: float) -> str:
    """Return a time, seconds since 1970-01-01 UTC, as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
