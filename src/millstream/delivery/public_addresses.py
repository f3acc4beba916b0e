"""Which IP addresses are public: a webhook goes to no other unless its consumer allows it.

Otherwise a person who may make consumers could reach, through the server, services that only the server's own
network can reach.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final, TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_PUBLIC: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # shared by the customers of a provider
        "192.0.0.0/24",
        "192.88.99.0/24",  # relays from IPv6 to IPv4
        "198.18.0.0/15",
        "::/96",  # IPv4-compatible
        "::ffff:0:0/96",  # IPv4-mapped
        "::ffff:0:0:0/96",  # IPv4-translated
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # NAT64 of a local network
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fec0::/10",  # site-local
    )
)
"""Networks that Python's own classes don't count among the special ones in every version.

An IPv6 address that contains an IPv4 address is refused whichever that is, since a gateway would unpack it.
"""


def literal(host: str) -> Address | None:
    """Return the address that a host is written as; None if it is a name.

    The forms that only the C library reads as an address count, too: `127.1`, `0x7f.0.0.1`, `2130706433`.
    """
    host = host.rstrip(".")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def is_public(address: Address) -> bool:
    """Return whether an address belongs to the public internet."""
    if (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
    ):
        return False
    return not any(address in network for network in _NOT_PUBLIC if network.version == address.version)
