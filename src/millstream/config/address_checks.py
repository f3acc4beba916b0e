"""Faults in addresses of a stream's lake, buffer and sinks: a shown secret, or a slip that hides one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from millstream.config.model import StreamConfig
from millstream.config.toml_lines import KeyPath
from millstream.libpq import is_address
from millstream.model.addresses import MASK, is_brokers, mask_address, split_url

_ENCODE: Final = "%-encode special characters in user and password (@ is %40, / is %2F)"


def clashes_of_addresses(at: KeyPath, stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and its description; never the address."""
    location = stream.lake.location
    if stream.lake.format != "postgres" and not is_address(location) and mask_address(location) != location:
        yield (
            (*at, "lake", "location"),
            "is neither a folder nor the URL of an object store, or has a user, a password or a key in it: those belong into storage_options",
        )
    places: list[tuple[KeyPath, str, str]] = []
    if stream.buffer is not None:
        places.append(((*at, "buffer", "location"), stream.buffer.kind, stream.buffer.location))
    if stream.routing is not None:
        for name, sink in stream.routing.sinks.items():
            places.append(((*at, "routing", "sinks", name, "location"), sink.kind, sink.location))
    for path, kind, place in places:
        what = _wrong(kind, place)
        if what is not None:
            yield path, what


def _wrong(kind: str, place: str) -> str | None:
    """The fault in the place of a buffer or a sink; None if nothing is, or its kind is another package's."""
    shown = mask_address(place)
    if kind == "kafka" and not is_brokers(place):
        return "isn't a list of brokers, host:9092,host:9092; user and password belong into client (`sasl.username`, `sasl.password`)"
    if kind == "redis" and (split_url(place) is None or shown == MASK):
        return f"isn't an address such as redis://host:6379/0, or can be read in two ways: {_ENCODE}"
    if kind == "log" and (shown != place or "://" in place):
        return 'isn\'t a folder: set kind = "redis" or "kafka" if it is a server\'s address'
    if kind == "millstream" and shown != place:
        return "is neither https://host:8787 nor a folder, or has a user or a password in it: an access token belongs into token"
    return None
