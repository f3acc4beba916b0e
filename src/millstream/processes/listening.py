"""The socket that a server listens on."""

from __future__ import annotations

import errno
import socket
from typing import Final

from millstream.errors import MillstreamError

BACKLOG: Final = 2048
"""Connections that may wait to be accepted."""


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens there.

    Args:
        is_shared: whether the kernel spreads connections over several such sockets on the port.

    Raises:
        MillstreamError (`address_in_use`): another process listens there, or the address isn't this machine's.
    """
    try:
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(facts[0], facts[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind(facts[4])
            # The announced address is already open: connections before the server runs wait.
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        why = "; requests to it reach another process, not this home" if error.errno == errno.EADDRINUSE else ""
        raise MillstreamError(
            f"can't listen on {host}:{port}: {error}{why}", code="address_in_use", address=f"{host}:{port}"
        ) from error
    return listener
