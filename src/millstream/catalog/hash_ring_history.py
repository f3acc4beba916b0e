"""Eras of a stream's hash ring: which one was in force from which number on. Kept as facts.

An era is in force from its cut on, once that is recorded: in one transaction, before any row is placed by it. So
after a crash before the transaction the old era is in force, and after a crash behind it the new one. Records up to a
cut lie where the old ring put them, later ones where the new era's ring does. A reader by numbers needn't know any of
it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from millstream.catalog.store import Catalog
from millstream.errors import CatalogError
from millstream.model.ids import StreamId
from millstream.model.positions import Seq, StreamToken

_ERAS: Final = "eras"


@dataclass(frozen=True, slots=True)
class RingEra:
    """A ring, and the number from which on it places rows."""

    number: int
    """Number of the era, from 1."""
    shards: int
    """Number of shards of the ring: 0 to one below it."""
    virtual_nodes: int
    columns: tuple[str, ...]
    columns_of: Mapping[str, tuple[str, ...]]
    cut: Seq
    """Records with numbers up to it were placed before."""
    since_us: int = 0
    """Begin of the era, in microseconds since 1970."""

    def has_ring_of(self, other: RingEra) -> bool:
        """Return whether both place every row alike."""
        return (self.shards, self.virtual_nodes, self.columns, dict(self.columns_of)) == (
            other.shards,
            other.virtual_nodes,
            other.columns,
            dict(other.columns_of),
        )


class RingEras:
    """The eras of one stream. Only its writer changes them; any process may read."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"routing/{stream}"

    def all(self) -> list[RingEra]:
        """Return the eras that are or were in force, in order; none if the stream never had a ring.

        Raises:
            CatalogError: the catalog's facts are malformed.
        """
        found = self._catalog.fact(self._scope, _ERAS, default=[])
        try:
            return [_era_of(facts) for facts in found]
        except (KeyError, TypeError, ValueError) as error:
            raise CatalogError(f"what the catalog has of the stream's hash ring makes no sense: {error}") from error

    def newest(self) -> RingEra | None:
        """Return the era in force; None if the stream never had a ring."""
        return next(reversed(self.all()), None)

    def begin(self, era: RingEra) -> RingEra:
        """Put an era in force from now on. Its number must be the next."""
        known = self.all()
        assert era.number == len(known) + 1, "eras are numbered one behind the other"
        begun = replace(era, since_us=time.time_ns() // 1000)
        self._catalog.put_fact(self._scope, _ERAS, [asdict(one) for one in (*known, begun)])
        return begun


def eras_as_facts(stream: StreamId, eras: list[RingEra]) -> list[dict[str, Any]]:
    """Return eras for `status`, JSON-able."""
    return [
        {
            "era": era.number,
            "shards": era.shards,
            "virtual_nodes": era.virtual_nodes,
            "columns": list(era.columns),
            "columns_of": {table: list(columns) for table, columns in era.columns_of.items()},
            "token": str(StreamToken.scalar(stream, era.cut)),
            "since": era.since_us / 1_000_000,
        }
        for era in eras
    ]


def _era_of(facts: Mapping[str, Any]) -> RingEra:
    return RingEra(
        number=int(facts["number"]),
        shards=int(facts["shards"]),
        virtual_nodes=int(facts["virtual_nodes"]),
        columns=tuple(facts["columns"]),
        columns_of={table: tuple(columns) for table, columns in facts["columns_of"].items()},
        cut=Seq(int(facts["cut"])),
        since_us=int(facts["since_us"]),
    )
