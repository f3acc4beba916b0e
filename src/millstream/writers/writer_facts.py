"""Facts about the writers that share a stream: for `writers`, `status`, `doctor`, and for a sole owner's checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError, SequencingError
from millstream.protocol.sequencer import WriterPhase
from millstream.writers.one_of_several import (
    EMBEDDED,
    EMBEDDED_HINT,
    WriterPlace,
    check_round_trip,
    inherit,
    refuse_embedded,
    store_of,
)

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.model.ids import StreamId
    from millstream.protocol.sequencer import WriterEntry


def writers_of(catalog: Catalog, stream: StreamId) -> list[WriterEntry]:
    """Return the writers that share a stream; empty if one owns it."""
    if catalog.database.address is None:
        return []
    return [entry for entry in store_of(catalog, stream, 0.0).writers() if entry.location]


def writer_facts(home: Home, catalog: Catalog, stream: StreamId) -> dict[str, Any]:
    """Return the writers that share a stream, JSON-able.

    Returns:
        `newest`: the greatest number given to any of them; `persisted_upto`: the number up to which
            linear readers of all their logs may read.
        `writers`: for each its `number` in tokens, `name`, `state`, `epoch`, `position`, how many numbers
            `behind` the newest that is, and the `location` of its log (this home's folder, or another
            home's id).
        The states are `alive`, `recovering`, `expired` (its lease has expired and its log isn't
        recovered), `stopped`, `forgotten`. Empty if one writer owns the stream.
    """
    here = home.identity().id
    entries = writers_of(catalog, stream)
    if not entries:
        return {"newest": None, "persisted_upto": None, "writers": []}
    view = store_of(catalog, stream, 0.0).view()
    return {
        "newest": int(view.newest),
        "persisted_upto": int(view.persisted_upto),
        "writers": [
            {
                "number": int(entry.writer),
                "name": entry.name,
                "state": _state(entry, is_expired=entry.writer in view.expired),
                "epoch": int(entry.epoch),
                "position": int(position := view.positions.get(entry.writer, entry.position)),
                "behind": max(0, int(view.newest) - int(position)),
                "location": str(home.path) if entry.location == here else entry.location,
            }
            for entry in entries
        ],
    }


def list_writers(home: Home, stream: str | None) -> dict[str, Any]:
    """Return `writer_facts` of a stream of a home, with the `stream`'s name; `UnknownStream` if there is none."""
    with home.open_catalog() as catalog:
        name = home.pick_stream(stream, of=[row.name for row in catalog.streams()])
        return {"stream": name, **writer_facts(home, catalog, catalog.stream(name).id)}


def forget_writer(home: Home, stream: str | None, name: str) -> tuple[int, bool]:
    """Give up a dead writer's undecided numbers; if its log is in this home, recover it instead.

    Returns:
        The number up to which linear readers may read from now on, and whether its log was recovered.

    Raises:
        SequencingError (`unknown_writer`): the stream has none of that name.
        SequencingError (`writer_alive`): its lease hasn't expired.
        StaleEpoch: it left nothing undecided.
        CorruptWal, DiskFull, ShardLocked …: its log is here, and can't be recovered; nothing is given up.
    """
    with home.open_catalog() as catalog:
        row = home.pick_stream(stream, of=[row.name for row in catalog.streams()])
        found = catalog.stream(row).id
        entries = {entry.name: entry for entry in writers_of(catalog, found)}
        if name not in entries:
            known = sorted(entries)
            raise SequencingError(
                f"the stream has no writer {name}",
                code="unknown_writer",
                hint=f"Use one of {', '.join(known)}." if known else "One writer owns it.",
                writer=name,
                known=known,
            )
        entry, lease_s = entries[name], home.config.writer.lease_s
        store = store_of(catalog, found, lease_s)
        is_here = entry.location == home.identity().id
        if is_here:
            # Nothing has to be given up.
            inherit(store, WriterPlace(found, str(home.wal_folder(row)), None, lease_s), entry)
        else:
            store.forget(entry.writer)
        return int(store.view().persisted_upto), is_here


def _state(entry: WriterEntry, *, is_expired: bool) -> str:
    if entry.phase is WriterPhase.SETTLED:
        return "stopped" if entry.cut_at is None else "forgotten"
    if is_expired:
        return "expired"
    return "alive" if entry.phase is WriterPhase.OPEN else "recovering"


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
