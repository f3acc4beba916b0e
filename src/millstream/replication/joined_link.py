"""A follower's end of a link that joins waiting shipments into one.

While a follower's disk syncs one shipment, others arrive. Taken one by one, each would cost an
fdatasync, marks and an acknowledgement. Joined, they cost that once, as with appends that wait for
a writer. So a follower that is far behind goes at its disk's speed, and one that keeps up gets each
shipment alone, at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from millstream.errors import MillstreamError
from millstream.model.replication import Acknowledgement, Hello, Shipment
from millstream.ports import LeaderLink

BYTES_MAX: Final = 16 << 20
"""Bytes of joined shipments: at most half of a leader's window, so that more arrive while these are written."""


def joined(earlier: Shipment, later: Shipment, bytes_max: int = BYTES_MAX) -> Shipment | None:
    """Return one shipment in place of two consecutive ones; None if they have to be taken one by one.

    Args:
        earlier: the first of them, or the result of an earlier join.
        bytes_max: bound of both together.
    """
    if (earlier.stream, earlier.region, earlier.epoch, earlier.leader) != (
        later.stream,
        later.region,
        later.epoch,
        later.leader,
    ):
        return None
    # Documents are stored one after the other, and a lineage is a greeting.
    if earlier.documents or later.documents or earlier.size_bytes + later.size_bytes > bytes_max:
        return None
    if earlier.marks and not later.marks:
        return None  # the marks would be shown later, at a place in the midst of the bytes
    return replace(later, parts=earlier.parts + later.parts, first_kept={**earlier.first_kept, **later.first_kept})


class JoinedLink:
    """See `ports.LeaderLink`. Wraps another link, which it closes.

    Args:
        bytes_max: bound of joined shipments; a single one may exceed it.
    """

    def __init__(self, link: LeaderLink, bytes_max: int = BYTES_MAX) -> None:
        self._link: Final = link
        self._bytes_max: Final = bytes_max
        self._next: Shipment | None = None
        """A shipment that came, and can't be joined with those before it."""
        self._error: MillstreamError | None = None
        """Reason why nothing more comes, raised after the shipments before it."""

    def recv(self, timeout_s: float) -> Shipment | None:
        """See the port: shipments that came before the link broke are returned first."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        shipment, self._next = self._next, None
        if shipment is None:
            shipment = self._link.recv(timeout_s)
        while shipment is not None:
            try:
                later = self._link.recv(0.0)
            except MillstreamError as error:
                self._error = error
                break
            if later is None:
                break
            both = joined(shipment, later, self._bytes_max)
            if both is None:
                self._next = later
                break
            shipment = both
        return shipment

    def send(self, message: Acknowledgement | Hello | MillstreamError) -> None:
        """See the port."""
        self._link.send(message)

    def close(self) -> None:
        """See the port."""
        self._next = None
        self._link.close()
