"""The logs that this node takes from others: its region's own streams, and the other regions' logs of them.

`follower_process` follows each; `regions` merges what they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from millstream.errors import ConfigError
from millstream.leadership.node_roles import Roles
from millstream.model.ids import RegionId, region_log_name
from millstream.model.replication import NodeName, region_node
from millstream.protocol.replication.node_promises import Role

if TYPE_CHECKING:
    from millstream.home.home import Home


@dataclass(frozen=True, slots=True)
class FollowedLog:
    """A log that another node leads, and its place here."""

    stream: str
    """The log's name there."""
    log: str
    """The log's name here."""
    follower: NodeName | None = None
    """This node's name over there; None: its own name."""
    only: NodeName | None = None
    """The node to take it from; None: the leader."""


def own_copy(name: str) -> FollowedLog:
    """Return this node's copy of a stream of its own region."""
    return FollowedLog(name, name)


def region_copies(home: Home) -> list[FollowedLog]:
    """Return other regions' logs that the configuration says to follow; new ones are noted as followed."""
    found = []
    roles = Roles(home)
    for name, config in sorted(home.config.streams.items()):
        for number in sorted(home.config.replication.region_addresses) if config.region else ():
            if number == config.region:
                raise ConfigError(
                    f"region {number} is this home's own in stream {name}, and stands among [replication.regions]",
                    hint="Name the others there.",
                )
            there = region_node(number)
            copy = FollowedLog(name, region_log_name(name, number), region_node(RegionId(config.region)), there)
            found.append(copy)
            with roles.changing(copy.log) as changing:
                if changing.fact.role is not Role.FOLLOWS:
                    changing.put(replace(changing.fact, role=Role.FOLLOWS, leader=there))
    return found


def logs_to_rebuild(home: Home, streams: Sequence[str], followed: Iterable[str]) -> list[str]:
    """Return the logs of a rebuild: the named ones, other regions' too.

    Without names: all logs that are followed from other nodes, or, if there are none, from other regions.
    """
    return list(streams) or sorted(followed) or [copy.log for copy in region_copies(home)]
