"""`replicas`: the nodes that have a stream, and how far each is, as this node knows it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from millstream.errors import MillstreamError, RoleUnreadable
from millstream.leadership.known_leaders import leader_facts, leaders_of
from millstream.leadership.node_calls import this_node
from millstream.leadership.node_roles import Roles
from millstream.nodes.peer_requests import node_state
from millstream.nodes.staleness import age_of_replica
from millstream.processes.control_socket import ask
from millstream.protocol.replication.leader_map import LeaderMap
from millstream.protocol.replication.promises_and_fencing import Role, RoleFact

if TYPE_CHECKING:
    from millstream.home.home import Home


def list_replicas(home: Home) -> dict[str, Any]:
    """Return this node and, by stream, its role, the leader and the followers, JSON-able.

    If a stream's role or marks can't be read, its entry is the error.

    Raises:
        ConfigError: the home is no node.
    """
    serving = ask(home, "serve", "replication") or {}
    following = (ask(home, "follow", "status") or {}).get("streams", {})
    found = []
    roles = Roles(home)
    # Other regions' logs have a role as well.
    for name in sorted({*home.config.streams, *roles.streams()}):
        error: MillstreamError | None = None
        fact, state, leaders = RoleFact(), None, LeaderMap()
        try:
            fact = roles.of(name)
            leaders = leaders_of(home, name)
            state = node_state(home, name)
        except MillstreamError as failed:
            error = failed  # an error of this stream: the facts about other nodes are shown all the same
        role = None if isinstance(error, RoleUnreadable) else fact.role
        shipped = serving.get(name, {})
        found.append(
            {
                "stream": name,
                "role": None if role is None else role.value,
                "leader": fact.leader or (str(this_node(home)) if role is Role.LEADS else None),
                "writes_go_to": leader_facts(home, leaders),
                "led": [
                    {"epoch": int(one.since.epoch), "node": str(one.node), "behind": int(one.behind)}
                    for one in leaders.leaderships
                ],
                "promised": {"epoch": int(fact.promise.epoch), "node": fact.promise.node or None},
                "group": None if state is None else int(state.group),
                "persisted_upto": None if state is None else int(state.persisted_upto),
                "age_s": age_of_replica(home, name) if fact.role is Role.FOLLOWS else None,
                "following": following.get(name) if fact.role is Role.FOLLOWS else None,
                "followers": shipped.get("followers", []),
                "other_streams": shipped.get("other_streams", {}),
                "object_store": shipped.get("object_store"),
                "lineage": json.loads(fact.to_json())["lineage"],
                "error": None if error is None else error.as_dict(),
            }
        )
    return {
        "node": this_node(home),
        "nodes": dict(home.config.replication.nodes),
        "serves": bool(serving),
        "follows": bool(following),
        "streams": found,
    }
