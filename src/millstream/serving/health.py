"""How a home does, for load balancers, for Prometheus and for people: it only reads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from millstream.app.status import collect_status
from millstream.leadership.roles import Roles
from millstream.protocol.replication.roles import Role
from millstream.writers.appending import append_socket, will_write
from millstream.writers.trouble import troubles

if TYPE_CHECKING:
    from millstream.home.home import Home

_KEEP_S: Final = 1.0
"""Who asks oftener than this gets the same answer: a status reads the lake's last cut."""


class Health:
    """A home's status, and whether its server takes requests. Any number of threads.

    Args:
        home: which.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._roles = Roles(home)
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._status_s = -_KEEP_S
        self.draining = False
        """Whether the server was told to end."""

    def status(self) -> dict[str, Any]:
        """As `millstream status --json` prints it."""
        with self._lock:
            if time.monotonic() - self._status_s >= _KEEP_S:
                self._status = collect_status(self._home)
                self._status_s = time.monotonic()
            return self._status

    def healthy(self) -> tuple[bool, dict[str, Any]]:
        """Whether capture and pipeline run and nothing is unreadable; and what of it isn't so."""
        found = self.status()
        parts = {part: found["processes"].get(part) is not None for part in ("owner", "pipeline")}
        healthy = all(parts.values()) and not found["problems"]
        # Restarting wouldn't help these, so they don't make anything unhealthy.
        waiting = [t["name"] for s in found["streams"] for t in s.get("tables", ()) if t["state"] == "set_aside"]
        facts = {"healthy": healthy, **parts, "problems": found["problems"], "set_aside": waiting}
        return healthy, {**facts, "errors": self.errors()}

    def errors(self) -> list[dict[str, Any]]:
        """The troubles of streams while writes are taken, each with `stream`, `part`, `code`, `message`, `hint` and `gave_up`."""
        return troubles(self._home)

    def ready(self) -> tuple[bool, str]:
        """Whether writes are taken now: whoever writes the home listens, or this process may write itself. And why they aren't."""
        if self.draining:
            return False, "the server is about to end"
        writer = self._home.config.writer.name
        if will_write(self._home, writer) and not append_socket(self._home, writer).exists():
            return False, "the process that writes the home doesn't listen yet"
        streams = self._home.config.streams
        roles = [self._roles.of(name) for name in streams] if self._home.config.replication.nodes else []
        if roles and not any(fact.role is Role.LEADS for fact in roles):
            # Of several streams some may be led here: those who write the others are told where they go.
            return False, f"{roles[0].leader or 'another node'} leads: writes go there"
        return True, "writes are taken"
