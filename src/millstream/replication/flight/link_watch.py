"""Watches the links of one Flight transport: a thread cuts the connection of a link that is silent, or doesn't end.

A thread that writes to a link may be stuck in gRPC for as long as the other end hangs. So a
separate thread cuts connections; it never writes to a link.
"""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

from millstream.errors import LinkLost
from millstream.workers import Worker

_LOOKS_S: Final = 0.25


class Watched(Protocol):
    """A link that is watched."""

    def look(self, now_s: float) -> None:
        """Cut the connection if the other end is silent or takes too long to close. Never blocks."""

    def close(self) -> None:
        """End the link."""


class LinkWatch:
    """The watching thread; it runs while there are links."""

    def __init__(self) -> None:
        self._links: set[Watched] = set()
        self._lock = threading.Lock()
        self._runs = False

    def add(self, link: Watched) -> None:
        """Watch a link from now on."""
        with self._lock:
            self._links.add(link)
            if not self._runs:
                self._runs = True
                Worker("replication-watch", self._run).start()

    def remove(self, link: Watched) -> None:
        """Remove a link that has ended."""
        with self._lock:
            self._links.discard(link)

    def links(self) -> list[Watched]:
        """Return all links."""
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
    """The time of the other end's last message."""

    def __init__(self, bearable_s: float) -> None:
        self._bearable_s = bearable_s
        self._heard_s = time.monotonic()

    def heard(self) -> None:
        """Note a message."""
        self._heard_s = time.monotonic()

    def too_long(self, now_s: float) -> LinkLost | None:
        """Return the reason to give up the link, if it was silent for too long."""
        silent_s = now_s - self._heard_s
        if silent_s < self._bearable_s:
            return None
        return LinkLost(f"the other end has sent nothing for {silent_s:.1f} s", silent_s=round(silent_s, 1))
