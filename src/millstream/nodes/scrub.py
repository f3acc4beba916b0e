"""`scrub`: verifies an object store's copy of a home's streams, and repairs it from the home's own log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millstream.errors import UnknownStream
from millstream.model.addresses import mask_address
from millstream.nodes.object_stores import store_of
from millstream.wal.reader import StreamReader

if TYPE_CHECKING:
    from millstream.home.home import Home


def scrub_home(
    home: Home, streams: Sequence[str] = (), *, dry_run: bool = False, tell: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Verify every byte that the store has of streams' logs.

    Args:
        home: a node of theirs, leader or not.
        streams: names; none: all configured ones.
        dry_run: whether nothing is put back.
        tell: called with the progress, a line each.

    Returns:
        By stream `objects` and `bytes` that were read; `mended`, the objects put back (in a dry run:
        those that could be); `damaged`, errors for what is still damaged.

    Raises:
        ConfigError: the home has no object store.
        UnknownStream: there is no such stream, or this node has nothing of it.
        StoreUnavailable, ReplicationError (`other_stream`), ShipmentUnreadable: as `Scrub.run`.
    """
    found = []
    for name in streams or sorted(home.config.streams):
        if name not in home.config.streams:
            raise UnknownStream(f"no stream {name} in {home.config_file}", stream=name)
        wal = home.wal_folder(name)
        with contextlib.closing(store_of(home, name)) as store:
            stream = StreamReader(str(wal)).stream_id
            tell(f"reading what {mask_address(str(home.config.replication.object_store))} has of {name}")
            done = store.scrub(stream, str(wal), mend=not dry_run, tell=tell)
        found.append(
            {
                "stream": name,
                "objects": done.objects,
                "bytes": done.size_bytes,
                "mended": [
                    {
                        "object": one.name,
                        "shard": int(one.shard),
                        "base_offset": int(one.base_offset),
                        "bytes": one.size_bytes,
                        "was": one.was,
                    }
                    for one in done.mended
                ],
                "damaged": [error.as_dict() for error in done.damaged],
            }
        )
    return found
