"""The requests of `diff --repair` to capture: rows to be read again by key, kept in the catalog for the next capture.

A request is some chunks of keys, each a fact of its own; capture drops a chunk's fact once its rows are durable in
the log. So a request is done when none of its chunks is left, and an interrupted request goes on with the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.protocol.copy_conflicts import Key

CHUNK_KEYS: Final = 500
"""Number of keys read by one query."""
SCANNED_KEYS: Final = 10_000
"""Number of hashed keys looked for in one scan of their table."""


@dataclass(frozen=True, slots=True)
class RepairChunk:
    """Some keys of a table, to be read again."""

    table: TableId
    request: str
    number: int
    columns: tuple[str, ...]
    """The key's columns, in the order of the texts."""
    keys: tuple[Key, ...]
    failed: str = ""
    """Why it can't be done; empty while it is still to do."""

    @property
    def name(self) -> str:
        """Name of the fact."""
        return f"{self.table}/{self.request}/{self.number}"

    def value(self) -> dict[str, Any]:
        """Return the fact's value."""
        return {"columns": list(self.columns), "keys": [list(key) for key in self.keys], "failed": self.failed}

    @classmethod
    def of(cls, name: str, value: Mapping[str, Any]) -> RepairChunk:
        """Return the chunk of a fact."""
        table, request, number = name.split("/")
        keys = tuple(tuple(key) for key in value["keys"])
        return cls(TableId(int(table)), request, int(number), tuple(value["columns"]), keys, value["failed"])

    def ordered(self, columns: Sequence[str]) -> RepairChunk:
        """Return the same chunk with the key's columns in another order."""
        places = [self.columns.index(name) for name in columns]
        keys = tuple(tuple(key[place] for place in places) for key in self.keys)
        return replace(self, columns=tuple(columns), keys=keys)

    def part(self, number: int, keys: Sequence[Key]) -> RepairChunk:
        """Return another chunk of the same request."""
        return replace(self, number=number, keys=tuple(keys))


def repair_scope(stream: StreamId) -> str:
    """Return the catalog's scope of a stream's chunks."""
    return f"repair/{stream}"


def ask_repair(
    catalog: Catalog,
    stream: StreamId,
    table: TableId,
    columns: Sequence[str],
    keys: Sequence[Key],
    *,
    keys_each: int = CHUNK_KEYS,
) -> str:
    """Request rows to be read again by key; return the request's name.

    Args:
        table: one that is streaming and has a key.
        columns: the key's columns, in any order.
        keys: PostgreSQL's texts, in the order of `columns`; rows that the source lacks are logged as deleted. In
            hashed columns hashes.
    """
    request = f"repair-{time.time_ns() // 1000:x}"
    for chunk in repair_chunks(catalog, stream):
        if chunk.failed and chunk.table == table:
            catalog.drop_fact(repair_scope(stream), chunk.name)
    for number, first in enumerate(range(0, len(keys), keys_each)):
        some = tuple(keys[first : first + keys_each])
        chunk = RepairChunk(table, request, number, tuple(columns), some)
        catalog.put_fact(repair_scope(stream), chunk.name, chunk.value())
    return request


def repair_chunks(catalog: Catalog, stream: StreamId) -> list[RepairChunk]:
    """Return all chunks that are still to do, and those that failed."""
    found = catalog.facts(repair_scope(stream))
    return sorted((RepairChunk.of(*fact) for fact in found.items()), key=lambda c: (c.table, c.request, c.number))


def open_chunks(catalog: Catalog, stream: StreamId, requests: Sequence[str]) -> Iterator[RepairChunk]:
    """Return the remaining chunks of some requests."""
    return (chunk for chunk in repair_chunks(catalog, stream) if chunk.request in requests)
