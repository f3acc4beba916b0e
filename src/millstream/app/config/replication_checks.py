"""What is right by itself and wrong together in a stream's level and `[replication]`."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.app.config.replication_model import ReplicationConfig
from millstream.app.config.toml_lines import KeyPath
from millstream.model.replication import AckKind, AckLevel


def clashes_of_level(at: KeyPath, acks: str, replication: ReplicationConfig) -> Iterator[tuple[KeyPath, str]]:
    """Where a stream's level can never hold: nobody would be answered."""
    level = AckLevel.parse(acks)
    others = len(replication.nodes.keys() - {replication.node})
    if level.kind is AckKind.DURABLE and level.followers > others:
        yield (
            (*at, "acks"),
            f"{level} asks for {level.followers} followers, and [replication.nodes] has {others} nodes beside this one",
        )
    if level.kind is AckKind.OBJECT and replication.object_store is None:
        yield (*at, "acks"), "object asks for an object store, and [replication] names none"
