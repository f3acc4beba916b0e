"""Facts of a table as capture found it last, which go with an export of its whole log.

They are the columns, key and partitions that the log's rows have, and the partitions that records name. Capture that goes on
from an import finds by them what changed at the source since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId

_KINDS: Final = ("layout", "leaves")
"""Ends of scopes of the catalog: `rewrite_detection.KnownLayouts` and `detached_leaves.KnownLeaves`."""


def facts_of_tables(catalog: Catalog, stream: StreamId) -> dict[TableId, dict[str, Any]]:
    """Return the facts of a stream's tables, JSON-able."""
    found: dict[TableId, dict[str, Any]] = {}
    for kind in _KINDS:
        for id_, fact in catalog.facts(_scope(stream, kind)).items():
            found.setdefault(TableId(int(id_)), {})[kind] = fact
    return found


def put_facts_of_table(catalog: Catalog, stream: StreamId, id_: TableId, facts: Mapping[str, Any]) -> None:
    """Store a table's facts, as `facts_of_tables` returned them; others than its own are left out."""
    for kind in _KINDS:
        if kind in facts:
            catalog.put_fact(_scope(stream, kind), str(id_), facts[kind])


def _scope(stream: StreamId, kind: str) -> str:
    return f"capture/{stream}/{kind}"
