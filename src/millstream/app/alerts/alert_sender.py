"""Looks for conditions at an interval, and sends their alerts, in the one process of the home that has the role `alerts`.

The open alerts and the observations are in a file: after a restart no alert is sent twice, and a failed delivery is
repeated. If the file is damaged, it is begun again, and lasting conditions are sent once more.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.app.alerts.alert_file import Kept, moment_text
from millstream.app.alerts.open_alerts import Notice
from millstream.app.status import collect_status
from millstream.app.trouble_rules import Bounds, facts_of, judge, led_streams
from millstream.backoff import Backoff
from millstream.delivery.sinks import Outcome, Verdict
from millstream.errors import HomeBusy, MillstreamError
from millstream.home.config_mapping import capture_config
from millstream.model.durations import duration_s
from millstream.processes.role_locks import RoleLock
from millstream.workers import watching

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.app.alerts.observations import Observations
    from millstream.config.alerts_model import AlertsConfig
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.alerts")

_RETRY_MIN_S: Final = 1.0
_RETRY_MAX_S: Final = 300.0

Post = Callable[[str, bytes], Outcome]
"""Sends a request with an id and a body; returns its outcome."""


@contextmanager
def watched_alerts(home: Home) -> Iterator[None]:
    """Send the home's alerts while the block lasts, if the home has an address for them and no other process sends them.

    Raises:
        UsageError (`missing_extra`): httpcore isn't installed.
    """
    alerts = home.config.alerts
    if alerts.url is None:
        yield
        return
    from millstream.delivery.webhook_settings import WebhookSettings
    from millstream.delivery.webhook_sink import webhook_of

    settings = WebhookSettings.parse(alerts.webhook(), may_allow_private=True, needs_secret=False)
    with ExitStack() as opened:
        webhook = webhook_of(settings)
        opened.callback(webhook.close)
        watch = Watch(home, alerts, webhook.post)
        opened.callback(watch.close)
        opened.enter_context(watching("alerts", duration_s(alerts.look_every), watch.look))
        yield


class Watch:
    """The looks of one process. One thread.

    Args:
        now_s: returns seconds since 1970-01-01 UTC.
    """

    def __init__(self, home: Home, alerts: AlertsConfig, post: Post, *, now_s: Callable[[], float] = time.time) -> None:
        self._home = home
        self._alerts = alerts
        self._post = post
        self._now_s = now_s
        self._bounds = Bounds.of(alerts)
        self._backoff = Backoff(_RETRY_MIN_S, _RETRY_MAX_S)
        self._due_s = 0.0
        """Before then nothing is sent: the last delivery failed."""
        self._role: RoleLock | None = None
        self._kept = Kept.empty(alerts)

    def look(self) -> bool:
        """Look once, and send what is due; return True. A failure is logged, and the next look may succeed."""
        try:
            if self._has_role():
                self._look()
        except (MillstreamError, OSError) as error:
            logger.warning("alerts can't be judged for now", error=str(error))
        except Exception:
            # Our bug. Alerts end with it otherwise, and capture may go on for long without them.
            logger.exception("alerts failed, and are tried again")
        return True

    def close(self) -> None:
        """Let another process send the alerts."""
        if self._role is not None:
            self._role.release()
            self._role = None

    def _has_role(self) -> bool:
        if self._role is None:
            self._home.prepare()
            try:
                self._role = RoleLock.take(self._home.run_folder, "alerts", patience_s=0.0)
            except HomeBusy:
                return False
            self._kept = Kept.read(self._home, self._alerts)
        return True

    def _look(self) -> None:
        status = collect_status(self._home)
        now_s, seen, book = self._now_s(), self._kept.seen, self._kept.book
        self._look_at_slots(status, seen)
        seen.observe(facts_of(status, seen), now_s)
        conditions = [one for one in judge(status, seen, self._bounds, now_s) if one.is_alert]
        book.update(conditions, now_s, may_end=not status["problems"])
        self._send(status)
        self._kept.write(self._home)

    def _look_at_slots(self, status: Mapping[str, Any], seen: Observations) -> None:
        """Ask the sources that capture doesn't read now. If a source can't be asked, its last answer is kept."""
        from millstream.capture.source_table_checks import look_at_slot

        for stream in led_streams(status):
            if not stream.get("id") or not stream["source"]["configured"]:
                continue
            name = stream["name"]
            if stream["source"]["mode"] is not None and "capture" not in stream["errors"]:
                seen.slots[name] = {"is_read": True, "holds": stream["source"]["slot_holds_bytes"]}
                continue
            try:
                slot = look_at_slot(capture_config(self._home, name, self._home.config.streams[name]))
            except (MillstreamError, ImportError) as error:
                logger.debug("a slot can't be looked at", stream=name, error=str(error))
                continue
            if slot is None:
                seen.slots.pop(name, None)
            else:
                seen.slots[name] = {"is_read": slot.active_pid is not None, "holds": slot.held_bytes}

    def _send(self, status: Mapping[str, Any]) -> None:
        """Send what is due, until a delivery fails."""
        kept = self._kept
        if time.monotonic() < self._due_s:
            return
        while (notice := kept.book.due(self._now_s())) is not None:
            outcome = self._post(notice.id, body_of(notice, status, self._home.config.replication.node))
            if outcome.verdict is not Verdict.ACCEPTED:
                since_s = self._now_s() if kept.failing is None else kept.failing["since"]
                kept.failing = {"since": since_s, "error": outcome.reason}
                wait_s = self._backoff.next_s() if outcome.retry_after_s is None else outcome.retry_after_s
                self._due_s = time.monotonic() + wait_s
                logger.warning("an alert can't be delivered, and is tried again", error=outcome.reason)
                return
            kept.failing = None
            self._backoff.reset()
            kept.book.acknowledge(notice, self._now_s())
            kept.write(self._home)


def body_of(notice: Notice, status: Mapping[str, Any], node: str | None) -> bytes:
    """Return a notice as the body of a request: JSON."""
    alert, condition = notice.alert, notice.alert.condition
    state = "resolved" if notice.is_resolved else "firing"
    ended = None if alert.ended_s is None or not notice.is_resolved else moment_text(alert.ended_s)
    began = moment_text(alert.began_s)
    place = f"{condition.stream} on {node or socket.gethostname()}"
    text = f"[{state}] {place}: {condition.message}"
    return json.dumps(
        {
            "type": f"alert.{state}",
            "timestamp": ended or began,
            "text": text if notice.is_resolved or not condition.hint else f"{text}. {condition.hint}",
            "data": {
                "id": alert.id,
                "state": state,
                "condition": str(condition.kind),
                "stream": condition.stream,
                "subject": condition.subject,
                "message": condition.message,
                "hint": condition.hint,
                "began": began,
                "ended": ended,
                "repeats": 0 if notice.is_resolved else alert.firings,
                "home": status["home"],
                "node": node,
                "host": socket.gethostname(),
            },
        }
    ).encode()
