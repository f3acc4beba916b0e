"""A leader's acknowledgement level and the nodes that it counts, as a document shipped with the log.

A promotion goes by it: the candidate's own configuration may differ, and writes were acknowledged at the
leader's level.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.errors import UsageError
from millstream.model.replication import AckKind, AckLevel, Document, NodeName, check_node_name
from millstream.protocol.replication.promotion_quorum import promises_wanted

if TYPE_CHECKING:
    from millstream.home.home import Home

LEVEL: Final = "level"


@dataclass(frozen=True, slots=True)
class Terms:
    """The level at which something was acknowledged, and by which nodes."""

    level: AckLevel
    nodes: frozenset[NodeName]

    @classmethod
    def configured(cls, home: Home, stream: str) -> Terms:
        """Return the terms of a home's own configuration."""
        nodes = frozenset(NodeName(node) for node in home.config.replication.nodes)
        return cls(AckLevel.parse(home.config.streams[stream].acks), nodes)

    @classmethod
    def from_json(cls, data: bytes) -> Terms:
        """Parse the kept document. If it is damaged, assume the lowest of all levels."""
        try:
            facts = json.loads(data)
            return cls(AckLevel.parse(str(facts["acks"])), frozenset(check_node_name(node) for node in facts["nodes"]))
        except (ValueError, KeyError, TypeError, AttributeError, UsageError):
            return cls(AckLevel(AckKind.LOCAL), frozenset())

    def document(self) -> Document:
        """Return the document as shipped; made once while a process ships."""
        facts = {"acks": str(self.level), "nodes": sorted(self.nodes)}
        return Document(LEVEL, time.time_ns() // 1000, json.dumps(facts).encode())

    def with_leaders(self, its: Terms) -> Terms:
        """Return a candidate's terms: all nodes of both, and the level that needs more promises."""
        nodes = self.nodes | its.nodes
        return Terms(max((self.level, its.level), key=lambda level: promises_wanted(level, len(nodes))), nodes)
