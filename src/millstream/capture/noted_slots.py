"""The slots that capture uses at sources, noted in the catalog until `slot drop`: the configuration may forget one.

A slot without a reader keeps WAL at the source until its disk is full. The note tells an operator which slot a stream has left
that the configuration no longer has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream.libpq import describe_parameters, parse_address

if TYPE_CHECKING:
    from millstream.capture.config import CaptureConfig
    from millstream.catalog import Catalog
    from millstream.model.ids import StreamId


@dataclass(frozen=True, slots=True)
class NotedSlot:
    """A slot at a source."""

    slot: str
    publication: str
    """The first of its publications."""
    source: str
    """Host, port and database, without secrets."""


def slots_scope(stream: StreamId) -> str:
    """Return the scope of the facts that name a stream's slots."""
    return f"capture/{stream}/slots"


def note_slot(catalog: Catalog, stream: StreamId, config: CaptureConfig) -> None:
    """Record the slot that a stream uses, or is about to create; do nothing if it is recorded already."""
    noted = {"publication": config.publication, "source": describe_parameters(parse_address(config.dsn))}
    if catalog.fact(slots_scope(stream), config.slot) != noted:
        catalog.put_fact(slots_scope(stream), config.slot, noted)


def forget_slot(catalog: Catalog, stream: StreamId, slot: str) -> None:
    """Delete the record of a slot, which was dropped."""
    catalog.drop_fact(slots_scope(stream), slot)


def noted_slots(catalog: Catalog, stream: StreamId) -> list[NotedSlot]:
    """Return the slots that a stream has used and that weren't dropped since, by name."""
    return [NotedSlot(slot, **noted) for slot, noted in sorted(catalog.facts(slots_scope(stream)).items())]
