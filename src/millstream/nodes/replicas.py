"""`replicas`: the nodes that have a stream, and how far each is, as this node knows it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from millstream.errors import MillstreamError, RoleUnreadable
from millstream.leadership.known_leaders import leader_facts, leaders_of
from millstream.leadership.node_calls import this_node
from millstream.leadership.node_roles import Roles
from millstream.model.replication import AckLevel
from millstream.nodes.peer_requests import node_state
from millstream.nodes.staleness import age_of_replica
from millstream.processes.control_socket import ask
from millstream.protocol.replication.leader_machine import LinkPhase
from millstream.protocol.replication.leader_map import LeaderMap
from millstream.protocol.replication.node_promises import Role, RoleFact

if TYPE_CHECKING:
    from millstream.home.home import Home


def list_replicas(home: Home) -> dict[str, Any]:
    """Return this node and, by stream, its role, the leader and the followers, JSON-able.

    If a stream's role or marks can't be read, its entry is the error. While a server ships a log, the followers include each
    configured node that hasn't connected; `too_few_followers` is whether fewer are connected than the stream's `acks` need.

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
        followers, acks = shipped.get("followers", []), None
        # Without a log there is nothing to follow: this node itself may be about to follow another one.
        if role is Role.LEADS and shipped and state is not None and state.stream is not None:
            followers = [*followers, *_missing(home, followers)]
            acks = home.config.streams[name].acks
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
                "followers": followers,
                "acks": acks,
                "too_few_followers": acks is not None and _too_few(followers, AckLevel.parse(acks)),
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


def _missing(home: Home, known: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the followers that are configured and haven't connected since this node's server started."""
    connected = {one["node"] for one in known} | {this_node(home)}
    nothing = dict.fromkeys(
        ("group", "persisted_upto", "records_behind", "bytes_behind", "lag_s", "acknowledged_s", "cut_off")
    )
    return [
        {"node": node, "phase": LinkPhase.APART.value, "counts": True, **nothing}
        for node in sorted(home.config.replication.nodes)
        if node not in connected
    ]


def _too_few(followers: Iterable[dict[str, Any]], level: AckLevel) -> bool:
    connected = [one["node"] for one in followers if one["counts"] and one["phase"] != LinkPhase.APART]
    return len(connected) < level.followers
