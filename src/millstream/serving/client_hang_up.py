"""Whether the other side of a connection still sends, even if what it sent before hasn't been read."""

from __future__ import annotations

import select
from enum import Enum, auto
from typing import Final

_READ_END: Final = getattr(select, "POLLRDHUP", 0)
"""Linux only. On macOS POLLHUP means the same."""


class PeerState(Enum):
    """The known state of the other side."""

    SENDS = auto()
    ENDED = auto()
    """It has ended its side: it is gone, or waits for the answer."""
    GONE = auto()


def peer_state(descriptor: int) -> PeerState:
    """Return the state of a TCP connection's other side; doesn't wait."""
    poll = select.poll()
    poll.register(descriptor, _READ_END)
    events = poll.poll(0)
    found = events[0][1] if events else 0
    if found & (select.POLLERR | select.POLLNVAL) or (found & select.POLLHUP and _READ_END):
        return PeerState.GONE
    return PeerState.ENDED if found & (select.POLLHUP | _READ_END) else PeerState.SENDS
