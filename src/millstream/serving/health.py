"""The health of a home, for load balancers, Prometheus and people: it only reads."""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final

from millstream.app.repeated_status import StatusCache
from millstream.app.status import collect_status
from millstream.errors import DiskFull, MillstreamError
from millstream.home.missing_logs import find_missing_part
from millstream.leadership.node_roles import Roles
from millstream.model.replication import LOCAL
from millstream.nodes.replicas import list_replicas
from millstream.protocol.replication.node_promises import Role
from millstream.wal.disk_space import check_disk
from millstream.wal.files import RealFiles
from millstream.workers import call_in_thread
from millstream.writers.home_appender import append_socket, will_write
from millstream.writers.stall_reasons import sorted_troubles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.home.home import Home

_PATIENCE_S: Final = 2.0
"""How long a status waits for a catalog that has gone away: a health check has to report that."""
_READY_WITHIN_S: Final = 0.5
"""How long a probe of readiness waits for the errors that it reports along."""


class Health:
    """A home's status, and whether its server takes requests. Any number of threads.

    Args:
        keep_s: more frequent requests than this get the same answer: a status reads the lake's last cut.
        closes_within_s: how long `close` waits for a status under way.
        answers_within_s: how long a new status may take before requests get the last one: half of Prometheus's patience.
        hangs_after_s: how long a status may take before that is a problem; in a home of thousands of tables it takes seconds.
    """

    def __init__(
        self,
        home: Home,
        *,
        keep_s: float = 1.0,
        closes_within_s: float = 2.0,
        answers_within_s: float = 5.0,
        hangs_after_s: float = 15.0,
    ) -> None:
        self.keep_s, self.closes_within_s = keep_s, closes_within_s
        self.answers_within_s, self.hangs_after_s = answers_within_s, hangs_after_s
        self._home = home
        self._roles = Roles(home)
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._status_s = -math.inf
        self._request_lock = threading.Lock()
        self._asking: Future[dict[str, Any]] | None = None
        """The status that requests wait for, which may hang."""
        self._asked_s = 0.0
        self._cache = StatusCache(patience_s=_PATIENCE_S)
        self.draining = False
        """Whether the server was told to end."""

    def close(self) -> None:
        """Close what the status keeps open, unless a status hangs: the server ends all the same."""
        if self._lock.acquire(timeout=self.closes_within_s):
            try:
                self._cache.close()
            finally:
                self._lock.release()

    def status(self) -> dict[str, Any]:
        """Return the status that `millstream status --json` prints."""
        with self._lock:
            return self._status if time.monotonic() - self._status_s < self.keep_s else self._renewed()

    def answer(self, *, within_s: float | None = None) -> dict[str, Any]:
        """Return the status and its age in seconds, `age_s`; the last one if a new one takes too long.

        Raises:
            MillstreamError (`status_hangs`): there is no last one.
        """
        with self._request_lock:
            if self._asking is None or self._asking.done():
                self._asking, self._asked_s = call_in_thread("status", self.status), time.monotonic()
            asking, asked_s = self._asking, self._asked_s
        patience_s = self.answers_within_s if within_s is None else within_s
        wait([asking], max(0.0, asked_s + patience_s - time.monotonic()))
        status = asking.result() if asking.done() else self._status
        now_s = time.monotonic()
        age_s = round(now_s - self._status_s, 3)
        if not status:
            raise MillstreamError(f"no status could be taken for {now_s - asked_s:.1f} s", code="status_hangs")
        if not asking.done() and now_s - asked_s > self.hangs_after_s:
            problem = f"this status is {age_s:.0f} s old: what a newer one reads (catalog, log, lake) doesn't answer"
            status = {**status, "problems": [*status["problems"], problem]}
        return {**status, "age_s": age_s}

    def last(self) -> tuple[dict[str, Any], float] | None:
        """Return the last status, and when it was taken on the monotonic clock; None if there is none."""
        return (self._status, self._status_s) if self._status else None

    def renewed(self) -> dict[str, Any]:
        """Return the status as of now."""
        with self._lock:
            return self._renewed()

    def _renewed(self) -> dict[str, Any]:
        self._status = collect_status(self._home, self._cache)
        self._status_s = time.monotonic()
        return self._status

    def healthy(self) -> tuple[bool, dict[str, Any]]:
        """Return whether capture and pipeline run and everything is readable; and what isn't."""
        found = self.answer()
        parts = {part: found["processes"].get(part) is not None for part in ("owner", "pipeline")}
        healthy = all(parts.values()) and not found["problems"]
        # A restart wouldn't help these, so they don't make the home unhealthy.
        waiting = [t["name"] for s in found["streams"] for t in s.get("tables", ()) if t["state"] == "quarantined"]
        facts = {"healthy": healthy, **parts, "problems": found["problems"], "quarantined": waiting}
        return healthy, {**facts, "errors": _errors(found)}

    def errors(self) -> list[dict[str, Any]]:
        """Return the troubles of streams that still take writes, as of the last status if a new one takes too long.

        Each has `stream`, `part`, `code`, `message`, `hint`, `gave_up` and `since`.
        """
        try:
            return _errors(self.answer(within_s=_READY_WITHIN_S))
        except MillstreamError:
            return []

    def ready(self) -> tuple[bool, str]:
        """Return whether writes are taken now, and if not, why.

        They are if the home's writer listens, or this process may write itself, and some stream led here has its log, room on its disk and
        the followers that its acknowledgement level needs.
        """
        if self.draining:
            return False, "the server is about to end"
        writer = self._home.config.writer.name
        if will_write(self._home, writer) and not append_socket(self._home, writer).exists():
            return False, "the process that writes the home doesn't listen yet"
        streams = self._home.config.streams
        roles = [self._roles.of(name) for name in streams] if self._home.config.replication.nodes else []
        if roles and not any(fact.role is Role.LEADS for fact in roles):
            # Some of several streams may be led here: writers to the others get the leader's address.
            return False, f"{roles[0].leader or 'another node'} leads: writes go there"
        led = [name for name, fact in zip(streams, roles, strict=False) if fact.role is Role.LEADS]
        if led and all(streams[name].acks != str(LOCAL) for name in led):
            few = [one for one in list_replicas(self._home)["streams"] if one["too_few_followers"]]
            if {one["stream"] for one in few} >= set(led):
                return False, f"too few nodes follow for {few[0]['acks']}, the level of stream {few[0]['stream']}"
        refusals = [self._refusal(name) for name in (led if roles else streams)]
        if refusals and all(refusals):
            return False, refusals[0]
        return True, "writes are taken"

    def _refusal(self, stream: str) -> str:
        """Return why a stream's log refuses writes: it is missing, or its disk has no room or is read-only. Empty if it doesn't."""
        home = self._home
        missing = find_missing_part(home, stream)
        if missing is not None:
            return missing.message
        folder = next((one for one in (home.wal_folder(stream), home.data) if one.is_dir()), home.path)
        if not os.access(folder, os.W_OK):
            return f"{folder} can't be written: its disk is read-only, or this user lacks the right"
        try:
            check_disk(RealFiles(), str(folder), home.config.streams[stream].log.disk_used_max)
        except DiskFull as error:
            return error.message
        except MillstreamError:
            return ""  # a write reports it
        return ""


def _errors(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    return sorted_troubles(
        (one["name"], part, error) for one in status["streams"] for part, error in one["errors"].items()
    )
