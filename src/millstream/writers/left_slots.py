"""The slots that streams have left at their sources: the configuration no longer has the stream, or gives it another slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.capture.noted_slots import NotedSlot, noted_slots
from millstream.errors import MillstreamError
from millstream.model.ids import default_name

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.model.ids import StreamId


def left_slots(home: Home, catalog: Catalog, stream: StreamId) -> list[NotedSlot]:
    """Return the slots that a stream has left; none if the configuration can't be read, or another writer captures."""
    try:
        config = home.config
    except MillstreamError:
        return []  # reported elsewhere
    own = config.writer.name
    if own is not None and catalog.fact(f"capture/{stream}", "writer", default=own) != own:
        return []
    sources = {name: one.source for name, one in config.streams.items() if one.source is not None}
    used = {source.slot or default_name(name) for name, source in sources.items()}
    return [noted for noted in noted_slots(catalog, stream) if noted.slot not in used]


def left_words(noted: NotedSlot) -> str:
    """Return what is wrong with a slot that was left."""
    return (
        f"the slot {noted.slot} is left at {noted.source}: millstream.toml no longer names it, and the source keeps WAL for it"
        " until its disk is full"
    )


def left_hint(stream: str, noted: NotedSlot) -> str:
    """Return the command that removes the slot."""
    return (
        f"Run `millstream slot drop --stream {stream} --slot {noted.slot}`, which drops its publications too and keeps the "
        "log's records; or put the stream and its slot back into millstream.toml."
    )
