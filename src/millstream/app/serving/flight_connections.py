"""What pyarrow's server leaves out: it can't end a call that waits for its caller. Here the caller's connection is cut, and the call ends.

gRPC keeps its connections to itself; they are found among the process's descriptors, by their addresses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import structlog

logger = structlog.get_logger("millstream.serve")

READS_WITHIN_S: Final = 60.0
"""How long a reader may take for one batch, of 4 MiB at the most."""


def cut_connections(port: int, peer: str | None = None) -> int:
    """End this process's connections of a local port; returns how many.

    Args:
        port: the server's.
        peer: of this caller alone, as gRPC names it: `ipv4:192.0.2.1:5000`, `ipv6:[2001:db8::1]:5000`.
    """
    wanted = None if peer is None else _address(peer)
    count = 0
    for name in [int(entry.name) for entry in Path("/dev/fd").iterdir()]:
        # Others open and close descriptors meanwhile, and most are no sockets.
        with contextlib.suppress(OSError), _shared(name) as connection:
            if connection.family not in {socket.AF_INET, socket.AF_INET6} or connection.getsockname()[1] != port:
                continue
            host, of_peer = connection.getpeername()[:2]
            if wanted is None or wanted == (_host(host), of_peer):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


@contextlib.contextmanager
def _shared(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that is somebody else's, by one of our own."""
    own = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with connection:
        yield connection


class Readers:
    """Calls that send records, and when each caller took the last batch. Those that take none for too long are cut off."""

    def __init__(self, within_s: float = READS_WITHIN_S) -> None:
        self._within_s = within_s
        self._lock = threading.Lock()
        self._taken: dict[object, tuple[str, float]] = {}

    @contextlib.contextmanager
    def reading(self, peer: str) -> Iterator[_Reader]:
        """One call, for as long as it lasts."""
        reader = _Reader(self, peer)
        reader.took()
        try:
            yield reader
        finally:
            with self._lock:
                del self._taken[reader]

    def watch(self, port: int, ended: threading.Event) -> None:
        """Look now and then, until `ended`."""
        while not ended.wait(self._within_s / 4):
            now = time.monotonic()
            with self._lock:
                late = {peer for peer, taken_s in self._taken.values() if now - taken_s > self._within_s}
            for peer in late:
                logger.warning("a Flight reader takes nothing and is cut off", peer=peer, after_s=self._within_s)
                cut_connections(port, peer)

    def note(self, reader: object, peer: str) -> None:
        """A caller took what it was sent."""
        with self._lock:
            self._taken[reader] = (peer, time.monotonic())


class _Reader:
    def __init__(self, readers: Readers, peer: str) -> None:
        self._readers = readers
        self._peer = peer

    def took(self) -> None:
        self._readers.note(self, self._peer)


def _address(peer: str) -> tuple[str, int] | None:
    _, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (_host(host.strip("[]")), int(port)) if port.isdigit() else None


def _host(text: str) -> str:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
