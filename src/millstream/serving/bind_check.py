"""The rule for listening addresses: reachable from other machines only with TLS and access tokens."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from millstream.errors import AccessError

if TYPE_CHECKING:
    from millstream.config.serving_model import HttpConfig


def check_protected(section: str, address: tuple[str, int], http: HttpConfig) -> None:
    """Refuse an address that other machines reach, if its protection is missing.

    Raises:
        AccessError (`unprotected`): protection is missing; details: listen, missing.
    """
    host, port = address
    given = {
        "tls_certificate": http.tls_certificate,
        "tls_key": http.tls_key,
        "tokens_required = true": http.tokens_required,
    }
    missing = [name for name, value in given.items() if not value]
    if missing and not is_loopback(host):
        listen = f"{host}:{port}"
        raise AccessError(
            f"[{section}] listens on {listen}, which other machines reach, without {' and '.join(_said(missing))}",
            code="unprotected",
            hint=f"Set {', '.join(missing)} in [http]; or listen on 127.0.0.1 alone.",
            listen=listen,
            missing=[name.partition(" ")[0] for name in missing],
        )


def is_loopback(host: str) -> bool:
    """Return whether every address of a host is this machine's own; False if it resolves to none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False
    addresses = [ipaddress.ip_address(str(facts[4][0]).partition("%")[0]) for facts in found]
    return bool(addresses) and all(address.is_loopback for address in addresses)


def _said(missing: list[str]) -> list[str]:
    said = []
    if any(name.startswith("tls") for name in missing):
        said.append("TLS")
    if any(name.startswith("tokens") for name in missing):
        said.append("access tokens")
    return said
