"""The limits of a connection of HTTP, which `connections` applies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The limits of a connection."""

    connections_max: int
    request_s: float
    """Seconds for a request to arrive, header and body."""
    idle_s: float
    """Seconds between two requests, and for a client to take nothing of an answer."""
    unread_bytes_max: int
    """Bytes of a body that is read and dropped: its request was answered before it was whole."""
    half_closed_s: float = 10.0
    """Seconds without a byte of the answer until a client that has ended its side counts as gone."""
