"""Shipments over Arrow Flight.

The follower is a client of the leader's Flight server, and each link is one `DoExchange`.

The server is the home's, and has its TLS, its tokens and its threads. It authenticates the caller
and checks that it may `admin` the stream (a follower reads all of it, and gets the catalog). Then
it hands the exchange to `FlightTransport.serve_exchange`, whose call lasts as long as the link.

A window bounds the bytes in flight: the follower reports what it has taken. The leader waits while
more than the window, or than gRPC accepts, is in flight. Both ends send heartbeats. If one is
silent, the link and its connection are cut, so that neither end waits for a process that hangs or a
cable that was pulled.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from millstream.errors import LinkLost
from millstream.model.replication import Hello
from millstream.ports import FollowerLink, LeaderLink
from millstream.replication.flight.address import LeaderAddress
from millstream.replication.flight.follower_link import ConnectedLink
from millstream.replication.flight.leader_link import ServedLink
from millstream.replication.flight.link_watch import LinkWatch
from millstream.replication.flight.wire import SILENT_S, FollowRequest
from millstream.replication.queues import WINDOW_BYTES


class FlightTransport:
    """One stream's links, at its leader or at a follower.

    Args:
        leader: the leader's address, at a follower; None at the leader.
        window_bytes: bound of the bytes in flight to one follower; a single shipment may exceed it.
        silent_s: seconds of silence after which the other end counts as gone.
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
        self._watch = LinkWatch()
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
        """See `ports.Transport`.

        Raises `AccessError` (`certificate_unusable`) if a certificate has expired, or isn't trusted at the other
        end.
        """
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
        """Serve a follower's call in a Flight server's `do_exchange`; return when the link has ended.

        Args:
            request: from the descriptor's command. The caller has the right to admin the stream.
            cut: ends the caller's connection, without waiting for it.
            check: raises the error to refuse the follower with; called every few seconds, because a
                link outlasts a token.

        Raises:
            LinkLost: the transport was closed.
        """
        if self._is_closed:
            raise LinkLost("this node no longer ships the stream")
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
        """See `ports.Transport`. Calls that serve links end within seconds; stop a server after its transports."""
        self._is_closed = True
        self._accepted.put(None)
        for link in self._watch.links():
            link.close()
