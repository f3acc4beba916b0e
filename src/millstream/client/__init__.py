"""Homes behind an address: the protocol and its clients. Needs only the core and `millstream[client]`."""
