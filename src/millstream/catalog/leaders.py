"""The leaders of a stream, as facts of the catalog: an entry for each promotion, which is never changed.

So the newest entry never goes back to a lower version, even with concurrent writers, and calls need no lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from millstream.catalog.store import Catalog
from millstream.errors import CatalogError
from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.replication import NodeName
from millstream.protocol.replication.leader_map import LeaderMap, Leadership
from millstream.protocol.replication.node_promises import Promise

_KIND: Final = "leaders"


class StreamLeaders:
    """The leaders of one stream. Any process of any node may read them, and add what it knows."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"{_KIND}/{stream}"

    def map(self) -> LeaderMap:
        """Return the map of leaders; empty if no leader was noted.

        Raises:
            CatalogError: the catalog's facts are malformed; or as any call.
        """
        try:
            return LeaderMap.of(_leadership(name, facts) for name, facts in self._catalog.facts(self._scope).items())
        except (KeyError, TypeError, ValueError) as error:
            raise CatalogError(f"what the catalog has of the stream's leaders makes no sense: {error}") from error

    def note(self, known: Iterable[Leadership]) -> None:
        """Add the entries that are missing; raises as `map`."""
        there = {one.since for one in self.map().leaderships}
        for one in known:
            if one.since not in there:
                self._catalog.add_fact(self._scope, _name(one), {"node": one.node, "behind": int(one.behind)})


def _name(one: Leadership) -> str:
    return f"{one.since.epoch} {one.since.node}"


def _leadership(name: str, facts: dict[str, Any]) -> Leadership:
    epoch, _, node = name.partition(" ")
    since = Promise(Epoch(int(epoch)), NodeName(node))
    return Leadership(since, NodeName(str(facts["node"])), GroupNumber(int(facts["behind"])))
