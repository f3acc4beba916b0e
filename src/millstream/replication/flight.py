"""Shipments over Arrow Flight: the follower is a client of the leader's Flight server, and each link is one `DoExchange`.

The server is the home's, and has its TLS, its tokens and its threads. It asks who the caller is and whether it may `admin` the stream (a
follower reads all of it, and gets the catalog), then hands the exchange to `FlightTransport.serve_exchange`, whose call lasts as long as the link.

Bytes on their way are bounded by a window: the follower says what it has taken, and the leader waits while more than that, or than gRPC takes, is out.
Both ends say now and then that they are there. One that is silent is given up and its connection cut, so that nobody waits for a
process that stands still or a cable that was pulled.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from millstream.errors import LinkLost
from millstream.model.replication import Hello
from millstream.ports import FollowerLink, LeaderLink
from millstream.replication.flight_address import LeaderAddress
from millstream.replication.flight_follower import ConnectedLink
from millstream.replication.flight_leader import ServedLink
from millstream.replication.flight_watch import Watch
from millstream.replication.flight_wire import SILENT_S, FollowRequest
from millstream.replication.queues import WINDOW_BYTES

__all__ = ["FlightTransport", "FollowRequest", "LeaderAddress"]


class FlightTransport:
    """One stream's links, at its leader or at a follower.

    Args:
        stream: its name.
        leader: where the leader is, at a follower; None at the leader.
        window_bytes: how much may be on its way to one follower that it hasn't taken; a single shipment may be larger.
        silent_s: after so long without a word the other end counts as gone.
    """

    def __init__(
        self,
        stream: str,
        leader: LeaderAddress | None = None,
        *,
        window_bytes: int = WINDOW_BYTES,
        silent_s: float = SILENT_S,
    ) -> None:
        self._stream = stream
        self._leader = leader
        self._window_bytes = window_bytes
        self._silent_s = silent_s
        self._accepted: queue.SimpleQueue[ServedLink | None] = queue.SimpleQueue()
        self._watch = Watch()
        self._is_closed = False

    def accept(self, timeout_s: float) -> FollowerLink | None:
        """See `ports.Transport`."""
        if self._is_closed:
            return None
        try:
            return self._accepted.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def connect(self, hello: Hello, timeout_s: float) -> LeaderLink:
        """See `ports.Transport`. `CertificateUnusable` where one of the two certificates has run out, or isn't trusted at the other end."""
        if self._is_closed or self._leader is None:
            raise LinkLost("the transport was closed" if self._is_closed else "no leader is known")
        until_s = time.monotonic() + timeout_s
        self._leader.probe(timeout_s)
        link = ConnectedLink(
            self._leader, FollowRequest(self._stream, self._window_bytes, hello), silent_s=self._silent_s
        )
        self._watch.add(link)
        link.begin(max(until_s - time.monotonic(), 0.05), lambda: self._watch.remove(link))
        return link

    def serve_exchange(
        self,
        request: FollowRequest,
        reader: Any,
        writer: Any,
        *,
        cut: Callable[[], object],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """What a Flight server's `do_exchange` does with a follower's call; returns when the link has ended.

        Args:
            request: of the descriptor's command. The caller has been found to have the right to admin the stream.
            reader: the call's.
            writer: likewise.
            cut: ends the caller's connection, and doesn't wait for it.
            check: raises what the follower is to be refused with; asked every few seconds: a link outlasts a token.

        Raises:
            LinkLost: the transport was closed.
        """
        if self._is_closed:
            raise LinkLost("this node doesn't ship the stream any more")
        link = ServedLink(
            request, writer, window_bytes=self._window_bytes, silent_s=self._silent_s, cut=cut, check=check
        )
        self._watch.add(link)
        try:
            link.welcome()
            self._accepted.put(link)
            link.keep(reader)
        finally:
            self._watch.remove(link)

    def close(self) -> None:
        """See `ports.Transport`. Calls that serve links end within seconds; a server is ended after its transports."""
        self._is_closed = True
        self._accepted.put(None)
        for link in self._watch.links():
            link.close()
