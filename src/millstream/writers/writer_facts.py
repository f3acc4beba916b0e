"""The writers that share a stream: their facts for `writers`, `status` and `doctor`, and giving up a dead one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.errors import SequencingError, StaleEpoch
from millstream.protocol.sequencer import WriterPhase
from millstream.writers.leased_writer import WriterPlace, inherit, store_of

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
    ledger, now_us = catalog.shared_ledger(stream) or (None, 0)
    entries = [] if ledger is None else [entry for entry in ledger.writers if entry.location]
    if ledger is None or not entries:
        return {"newest": None, "persisted_upto": None, "writers": []}
    here, view = home.identity().id, ledger.view(now_us)
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


def check_undecided(home: Home, stream: str | None, name: str) -> None:
    """Check that a writer may have left numbers undecided, before someone is asked about them.

    Raises:
        SequencingError (`unknown_writer`), StaleEpoch: as `forget_writer`.
    """
    with home.open_catalog() as catalog:
        _undecided(home, catalog, stream, name)


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
        row, entry = _undecided(home, catalog, stream, name)
        found, lease_s = catalog.stream(row).id, home.config.writer.lease_s
        store = store_of(catalog, found, lease_s)
        is_here = entry.location == home.identity().id
        if is_here:
            # Nothing has to be given up.
            inherit(store, WriterPlace(found, str(home.wal_folder(row)), None, lease_s), entry)
        else:
            store.forget(entry.writer)
        return int(store.view().persisted_upto), is_here


def _undecided(home: Home, catalog: Catalog, stream: str | None, name: str) -> tuple[str, WriterEntry]:
    """Return the stream's name and the writer, which may have left something undecided."""
    row = home.pick_stream(stream, of=[row.name for row in catalog.streams()])
    entries = {entry.name: entry for entry in writers_of(catalog, catalog.stream(row).id)}
    if name not in entries:
        known = sorted(entries)
        raise SequencingError(
            f"the stream has no writer {name}",
            code="unknown_writer",
            hint=f"Use one of {', '.join(known)}." if known else "One writer owns it.",
            writer=name,
            known=known,
        )
    entry = entries[name]
    if entry.phase is WriterPhase.SETTLED:
        raise StaleEpoch(
            f"writer {name} has {'stopped' if entry.cut_at is None else 'been forgotten'}: there is nothing to forget",
            hint="Run `millstream writers` to list the writers, and the one that readers wait for.",
            epoch=int(entry.epoch),
        )
    return row, entry


def _state(entry: WriterEntry, *, is_expired: bool) -> str:
    if entry.phase is WriterPhase.SETTLED:
        return "stopped" if entry.cut_at is None else "forgotten"
    if is_expired:
        return "expired"
    return "alive" if entry.phase is WriterPhase.OPEN else "recovering"
