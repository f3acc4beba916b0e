"""Ports for servers of tests that have to be known before somebody listens on them, and that stay a server's while it is down."""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path
from typing import Final

_FIRST: Final = 10_000
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SHARES: Final = 32
"""Processes whose ids differ in this choose among ports of their own: two that look at the same moment find no port together."""

_turns = itertools.count(random.SystemRandom().randrange(1 << 16))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has, and that the system gives nobody by itself.

    One of those that it gives to whoever connects somewhere was another connection's by the time that its server listened, or while
    its server was down; and who connected to nobody there could meet itself.
    """
    low = _first_ephemeral()
    shares = range(_FIRST + os.getpid() % _SHARES, low, _SHARES)
    for turn in itertools.islice(_turns, len(shares)):
        port = shares[turn % len(shares)]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of 127.0.0.1 between {_FIRST} and {low} is free")


def _first_ephemeral() -> int:
    """Where the ports begin that the system gives by itself; where it doesn't say, RFC 6335's: others keep above it."""
    try:
        low = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        low = 32_768
    # A system that gives nearly all of them leaves nothing better than what it may give.
    return low if low > _FIRST + 100 * _SHARES else 32_768
