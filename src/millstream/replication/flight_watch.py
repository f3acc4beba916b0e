"""Looks after the links of one Flight transport: the thread that sees that one is silent, or doesn't end, and cuts its connection.

Whoever writes to a link may be stuck in gRPC for as long as the other end stands still. So what cuts is a thread of its own, which never
writes to any.
"""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

from millstream.errors import LinkLost

_LOOKS_S: Final = 0.25


class Watched(Protocol):
    """A link."""

    def look(self, now_s: float) -> None:
        """Cut the connection, where the other end is silent or takes too long to close. Doesn't wait for anything."""

    def close(self) -> None:
        """Have it end."""


class Watch:
    """The thread; it runs while there are links."""

    def __init__(self) -> None:
        self._links: set[Watched] = set()
        self._lock = threading.Lock()
        self._runs = False

    def add(self, link: Watched) -> None:
        """Look after it from now on."""
        with self._lock:
            self._links.add(link)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="replication-watch", daemon=True).start()

    def remove(self, link: Watched) -> None:
        """It has ended."""
        with self._lock:
            self._links.discard(link)

    def links(self) -> list[Watched]:
        """All that there are."""
        with self._lock:
            return list(self._links)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._links:
                    self._runs = False
                    return
                links = list(self._links)
            for link in links:
                link.look(time.monotonic())
            time.sleep(_LOOKS_S)


class Silence:
    """When the other end was last heard of."""

    def __init__(self, bearable_s: float) -> None:
        self._bearable_s = bearable_s
        self._heard_s = time.monotonic()

    def heard(self) -> None:
        """It said something."""
        self._heard_s = time.monotonic()

    def too_long(self, now_s: float) -> LinkLost | None:
        """Why the link is to be given up, where it said nothing for too long."""
        silent_s = now_s - self._heard_s
        if silent_s < self._bearable_s:
            return None
        return LinkLost(f"the other end has said nothing for {silent_s:.1f} s", silent_s=round(silent_s, 1))
