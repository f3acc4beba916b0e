"""A follower's end of a link, by which what came meanwhile is taken together.

While a follower's disk syncs one shipment, others come. Taken one by one, each of them costs an fdatasync, marks and an acknowledgement; together
they cost that once, as the appends do that wait for a writer. So a follower that is far behind goes at its disk's speed, and one that keeps up gets
each shipment by itself, at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from millstream.errors import MillstreamError
from millstream.model.replication import Acknowledgement, Hello, Shipment
from millstream.ports import LeaderLink

BYTES_MAX: Final = 16 << 20
"""Of shipments that are taken together: half of what a leader has on its way to a follower at most, so that more comes while these are written."""


def joined(earlier: Shipment, later: Shipment, bytes_max: int = BYTES_MAX) -> Shipment | None:
    """The shipment that says what two do that came one behind the other; None where they are to be taken one by one.

    Args:
        earlier: the first of them, or what was joined before.
        later: the next.
        bytes_max: of both together.
    """
    if (earlier.stream, earlier.region, earlier.epoch, earlier.leader) != (
        later.stream,
        later.region,
        later.epoch,
        later.leader,
    ):
        return None
    # Documents are noted one behind the other, and a lineage is a greeting.
    if earlier.documents or later.documents or earlier.size_bytes + later.size_bytes > bytes_max:
        return None
    if earlier.marks and not later.marks:
        return None  # what the marks show would be shown later, and looked for in the midst of what lies there
    return replace(later, parts=earlier.parts + later.parts, first_kept={**earlier.first_kept, **later.first_kept})


class JoinedLink:
    """See `ports.LeaderLink`. Made of another one, which it closes.

    Args:
        link: where shipments come.
        bytes_max: of shipments that are taken together; a single one may be larger.
    """

    def __init__(self, link: LeaderLink, bytes_max: int = BYTES_MAX) -> None:
        self._link: Final = link
        self._bytes_max: Final = bytes_max
        self._next: Shipment | None = None
        """It came, and isn't to be taken with those before it."""
        self._error: MillstreamError | None = None
        """Likewise: why nothing comes any more."""

    def recv(self, timeout_s: float) -> Shipment | None:
        """See the port: what came before the link broke is given out first."""
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

    def send(self, word: Acknowledgement | Hello | MillstreamError) -> None:
        """See the port."""
        self._link.send(word)

    def close(self) -> None:
        """See the port."""
        self._next = None
        self._link.close()
