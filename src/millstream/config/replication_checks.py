"""Conflicts between a stream's acknowledgement level and `[replication]`."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.config.replication_model import ReplicationConfig
from millstream.config.toml_lines import KeyPath
from millstream.model.replication import AckLevel, Reach


def reach_of(replication: ReplicationConfig) -> Reach:
    """Return which machines can ever hold what this node writes."""
    return Reach(len(replication.nodes.keys() - {replication.node}), replication.object_store is not None)


def clashes_of_level(at: KeyPath, acks: str, replication: ReplicationConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield a stream's level that can never be reached: no append would be answered."""
    lacking = reach_of(replication).lacks(AckLevel.parse(acks))
    if lacking is not None:
        yield (*at, "acks"), lacking
