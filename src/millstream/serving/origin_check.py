"""The check whether a request may come from a web page that this machine's user has open.

A browser sends a page's requests to this machine's own ports, too. It names the page (`Origin`), and the
host name that the request was sent to (`Host`). A page whose name was rebound to 127.0.0.1 (DNS
rebinding) sends its own name there.

If callers need tokens, a page has none, and any host name may be in use. But browsers add client
certificates and passwords automatically, so pages are checked in that case too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from millstream.errors import AccessError

_KNOWN_MAX: Final = 1000
"""Limit of cached names that were checked and accepted: the next request costs a look into a set."""
_PORTS: Final = {"http": 80, "https": 443}


class Origins:
    """Checks a request's `Host` and `Origin`.

    Args:
        listen: the host that the server listens on, as it is configured.
        hosts: other names that it is reached by, through a proxy on this machine.
        any_host: whether every name is accepted: callers present tokens.
    """

    def __init__(self, listen: str, hosts: Iterable[str], *, any_host: bool) -> None:
        self._proxies: Final = frozenset(_plain(name) for name in hosts)
        self._named: Final = self._proxies | {_plain(listen)}
        self._any_host = any_host
        self._right: set[tuple[bytes, bytes | None]] = set()

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request that another site's page may have made.

        Args:
            headers: ASGI's, with one `Host` at most (see `request_heads`).

        Raises:
            AccessError (`unknown_host`): it was sent to a name that isn't the server's.
            AccessError (`foreign_origin`): another server's page has made it.
        """
        host, origin = b"", None
        for name, value in headers:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        if (host, origin) in self._right:
            return
        said = host.decode("latin-1")
        if not (self._any_host or self._is_own(said)):
            raise AccessError(
                f"the request was sent to {said[:100]}, which isn't a name of this server",
                code="unknown_host",
                host=said[:100],
            )
        if origin is not None:
            self._check_origin(origin.decode("latin-1"), said)
        if len(self._right) < _KNOWN_MAX:
            self._right.add((host, origin))

    def _is_own(self, host: str) -> bool:
        name = _name_in(host)
        # Only clients that aren't browsers omit it.
        return not name or name in self._named or _is_this_machine(name)

    def _check_origin(self, origin: str, host: str) -> None:
        try:
            parts = urlsplit(origin)
            page = (_plain(parts.hostname or ""), parts.port or _PORTS.get(parts.scheme))
        except ValueError:
            page = ("", None)
        name, port = _name_in(host), _port_in(host)
        same = bool(page[0]) and page[0] == name and (page[1] == port or (port is None and page[1] in _PORTS.values()))
        # Behind a proxy the request may name the server as the proxy knows it.
        if not (same or (page[0] in self._proxies and not _is_this_machine(page[0]))):
            raise AccessError(
                f"the request comes from a page of {origin[:100]}, which isn't this server",
                code="foreign_origin",
                origin=origin[:100],
            )


def _name_in(host: str) -> str:
    """Return the host without the port."""
    if host.startswith("["):
        return _plain(host.partition("]")[0])
    return _plain(host.partition(":")[0])


def _port_in(host: str) -> int | None:
    port = host.rpartition("]")[2].rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
    return int(port) if port.isdecimal() and port.isascii() and len(port) <= len("65535") else None


def _plain(name: str) -> str:
    return name.strip().strip("[]").rstrip(".").lower()


def _is_this_machine(name: str) -> bool:
    """Return whether a name always means this machine: no page elsewhere can have it."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
