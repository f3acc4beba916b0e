"""Watches the links of one Flight transport: a thread cuts the connection of a link that is silent, or doesn't end.

A thread that writes to a link may be stuck in gRPC for as long as the other end hangs. So a
separate thread cuts connections; it never writes to a link.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Final

from millstream.errors import LinkLost, MillstreamError
from millstream.replication.flight.wire import BEATS_IN_SILENCE, CLOSES_WITHIN_S
from millstream.workers import Worker

_LOOKS_S: Final = 0.25


class WatchedLink(ABC):
    """A link that is watched: the other end has to send something within `silent_s`."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._beats_s = silent_s / BEATS_IN_SILENCE
        self._heard_s = time.monotonic()
        """The time of the other end's last message."""
        self._closing = threading.Event()
        self._closed_s = 0.0

    def look(self, now_s: float) -> None:
        """Cut the connection if the other end is silent or takes too long to close. Never blocks."""
        silent_s = now_s - self._heard_s
        if self._closing.is_set():
            if now_s - self._closed_s > CLOSES_WITHIN_S:
                self._cut()
        elif silent_s >= self._silent_s:
            lost = f"the other end has sent nothing for {silent_s:.1f} s"
            self._break(LinkLost(lost, silent_s=round(silent_s, 1)))
            self._cut()

    def close(self) -> None:
        """See the port. A thread of the link notifies the other end, and ends the call."""
        self._break(LinkLost("the link was closed"), forget=True)

    @abstractmethod
    def _cut(self) -> None:
        """Cut the connection, without waiting."""

    def _break(self, error: MillstreamError, *, forget: bool = False) -> None:  # noqa: ARG002 - for the ends' queues
        """End the link for this error, unless it has ended; with `forget`, drop received messages that weren't read."""
        if not self._closing.is_set():
            self._closed_s = time.monotonic()
            self._closing.set()


class LinkWatch:
    """The watching thread; it runs while there are links."""

    def __init__(self) -> None:
        self._links: set[WatchedLink] = set()
        self._lock = threading.Lock()
        self._runs = False

    def add(self, link: WatchedLink) -> None:
        """Watch a link from now on."""
        with self._lock:
            if not self._runs:
                Worker("replication-watch", self._run).start()
                self._runs = True
            self._links.add(link)

    def remove(self, link: WatchedLink) -> None:
        """Remove a link that has ended."""
        with self._lock:
            self._links.discard(link)

    def links(self) -> list[WatchedLink]:
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
