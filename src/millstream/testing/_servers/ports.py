"""Ports for test servers, known before the server listens, that stay the server's while it is down."""

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
"""Processes whose ids differ modulo this choose among disjoint ports: two that look at the same moment never
choose the same."""

_turns = itertools.count(random.SystemRandom().randrange(1 << 16))


def free_port() -> int:
    """Return a free port of 127.0.0.1 outside of the system's ephemeral range.

    The system gives ephemeral ports to outgoing connections: such a port could be another connection's
    before its server listened, or while its server was down. And a client that connected there in that
    time could connect to itself.
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
    """Return the first port of the ephemeral range; if it is unknown, RFC 6335's: other systems stay above it."""
    try:
        low = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        low = 32_768
    # A system whose ephemeral range covers nearly all ports leaves no better choice than that range.
    return low if low > _FIRST + 100 * _SHARES else 32_768
