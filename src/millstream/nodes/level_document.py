"""What a leader's acknowledgements are worth, as a document that goes along with the log: its level, and the nodes that it counts.

A promotion goes by it: the candidate's own configuration may say something else, and what was acknowledged was so at the leader's level.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.errors import UsageError
from millstream.model.replication import AckKind, AckLevel, Document, NodeName, check_node_name
from millstream.protocol.replication.levels import promises_wanted

if TYPE_CHECKING:
    from millstream.home.home import Home

LEVEL: Final = "level"


@dataclass(frozen=True, slots=True)
class Terms:
    """At which level something was acknowledged, by which nodes."""

    level: AckLevel
    nodes: frozenset[NodeName]

    @classmethod
    def configured(cls, home: Home, stream: str) -> Terms:
        """Those of a home's own."""
        nodes = frozenset(NodeName(node) for node in home.config.replication.nodes)
        return cls(AckLevel.parse(home.config.streams[stream].acks), nodes)

    @classmethod
    def from_json(cls, data: bytes) -> Terms:
        """What was kept. Damaged, it may have been the least of all levels."""
        try:
            facts = json.loads(data)
            return cls(AckLevel.parse(str(facts["acks"])), frozenset(check_node_name(node) for node in facts["nodes"]))
        except (ValueError, KeyError, TypeError, AttributeError, UsageError):
            return cls(AckLevel(AckKind.LOCAL), frozenset())

    def document(self) -> Document:
        """As it goes along; made once while a process ships."""
        facts = {"acks": str(self.level), "nodes": sorted(self.nodes)}
        return Document(LEVEL, time.time_ns() // 1000, json.dumps(facts).encode())

    def with_leaders(self, its: Terms) -> Terms:
        """What a candidate goes by: all nodes of both, and of the levels the one that takes more promises."""
        nodes = self.nodes | its.nodes
        return Terms(max((self.level, its.level), key=lambda level: promises_wanted(level, len(nodes))), nodes)
