"""Which process may be a stream's writer: its only one, one of several, or the one that captures.

A process without a writer's name doesn't own a stream that named writers share, and only one of them captures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import ConfigError
from millstream.writers.leased_writer import EMBEDDED, EMBEDDED_HINT, check_round_trip, refuse_embedded, store_of
from millstream.writers.writer_facts import writer_facts, writers_of

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.model.ids import StreamId


def refuse_to_own(catalog: Catalog, stream: StreamId, name: str) -> None:
    """Raise `ConfigError` if a stream has several writers, for a process that wants to be its only one."""
    others = writers_of(catalog, stream)
    if others:
        known = ", ".join(entry.name for entry in others)
        captures = catalog.fact(f"capture/{stream}", "writer", default="…")
        raise ConfigError(
            f"stream {name} has writers with names ({known}), and this home's configuration gives it none",
            hint=f'Name this writer: `[writer] name = "{captures}"` in millstream.toml.',
        )


def refuse_to_capture(catalog: Catalog, stream: StreamId, name: str, writer: str) -> None:
    """Raise `ConfigError` if another of a stream's writers captures.

    That writer's log has the source's position, and its shards hold the tables.
    """
    captures = catalog.fact(f"capture/{stream}", "writer", default=writer)
    if captures != writer:
        raise ConfigError(
            f"stream {name} is captured by its writer {captures}, and this process is to be its writer {writer}",
            hint=f'Capture under that name: `[writer] name = "{captures}"`, or MILLSTREAM_WRITER__NAME.',
        )


def note_capturing_writer(catalog: Catalog, stream: StreamId, writer: str) -> None:
    """Record this writer as the one that captures."""
    catalog.put_fact(f"capture/{stream}", "writer", writer)


def examine_writers(home: Home, stream: str) -> str:
    """Check whether this home's process can be the configured writer of a stream; nothing is changed.

    Returns:
        The finding, in a line.

    Raises:
        ConfigError: several writers need a name each, and a catalog that they share.
        SequencingError (`lease_too_short`): the catalog takes too long to answer for `[writer] lease`.
        SequencingError (`sequence_unusable`): the sequence of the stream's numbers was changed from outside.
        CatalogError …: the catalog can't be asked.
    """
    from millstream.catalog import examine_catalog

    own = home.config.writer
    found = examine_catalog(home.catalog_place())
    if found.revision != found.known:
        return "looked at once there is a catalog of today's schema"
    with home.open_catalog() as catalog:
        known = next((row.id for row in catalog.streams() if row.name == stream), None)
        if own.name is None:
            if known is not None:
                refuse_to_own(catalog, known, stream)
            return "one, which owns it"
        refuse_embedded(catalog)
        took_s = check_round_trip(catalog.streams, own.lease_s)
        waits = "" if known is None else _examine_stream(home, catalog, known, stream, own.name)
    return (
        f"{own.name} is one of several; the catalog answers in {took_s * 1000:.1f} ms, the lease is {own.lease_s:g} s"
        + waits
    )


def _examine_stream(home: Home, catalog: Catalog, stream: StreamId, name: str, own: str) -> str:
    """Check a stream that has or will have writers; return which ones its readers wait for, as a line's end."""
    refuse_to_capture(catalog, stream, name, own)
    store_of(catalog, stream, 0.0).check()
    waits = [
        f"{one['name']} (its log lies in {one['location']})"
        for one in writer_facts(home, catalog, stream)["writers"]
        if one["state"] == "expired" and one["behind"]
    ]
    return f"; readers wait for {', '.join(waits)}, until a writer there recovers it" if waits else ""


def refuse_embedded_catalog(home: Home) -> None:
    """Check as `refuse_embedded`, before there is a catalog: an unusable one isn't made."""
    if home.catalog_address() is None:
        raise ConfigError(EMBEDDED, hint=EMBEDDED_HINT)
