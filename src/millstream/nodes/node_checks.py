"""The checks of `doctor` for a node: whether it and other nodes can reach each other, and one leads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.errors import ConfigError, MillstreamError, NodeNameTaken, ReplicationError
from millstream.leadership.node_calls import check_same_stream, state_of_node, this_node
from millstream.leadership.node_roles import Roles
from millstream.leadership.promotion_check import two_leaders
from millstream.model.replication import region_node
from millstream.nodes.home_identity import instance_of
from millstream.protocol.replication.node_promises import Role

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.leadership.node_calls import NodeState

_ANSWERS_WITHIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """One thing that was checked."""

    check: str
    message: str
    error: MillstreamError | None = None
    """The error, and what to do; None: all is well."""


def examine_nodes(home: Home) -> Iterator[NodeFinding]:
    """Check this node, each other node and region, and the object store; yield nothing if the home is no node.

    Other nodes are asked, which takes a few seconds for each that doesn't answer. An object of its own is
    written into the store, read and deleted; nothing else is changed.
    """
    replication = home.config.replication
    if replication.node is None:
        return
    me = this_node(home)
    yield _own(home)
    others = [node for node in sorted(replication.nodes) if node != me]
    regions = [region_node(region) for region in sorted(replication.region_addresses)]
    for stream, config in sorted(home.config.streams.items()):
        for node in (*others, *(regions if config.region else ())):
            yield _other(home, node, stream, is_region=node in regions)
        if replication.object_store is not None:
            yield _store(home, stream, replication.object_store)


def _own(home: Home) -> NodeFinding:
    check, replication = "this node", home.config.replication
    roles = Roles(home)
    parts = []
    try:
        for stream in sorted(home.config.streams):
            fact = roles.of(stream)
            whom = {Role.LEADS: "", Role.FOLLOWS: f" {fact.leader}", Role.FENCED: f" by {fact.leader}"}[fact.role]
            parts.append(f"{stream} {fact.role.value}{whom}")
    except MillstreamError as error:
        return NodeFinding(check, error.message, error)
    if home.config.flight.listen is None and (replication.regions or len(replication.nodes) > 1):
        message = f"{replication.node} has no Flight server: no node can follow it, or ask it for a promise"
        hint = 'Set [flight] listen, such as "0.0.0.0:8788": where the others\' [replication.nodes] have this one.'
        return NodeFinding(check, message, ConfigError(message, hint=hint))
    taken = _taken_by_another(home)
    return NodeFinding(check, taken.message if taken else f"{replication.node}: {', '.join(parts)}", taken)


def _taken_by_another(home: Home) -> NodeNameTaken | None:
    """Return an error if another home answers at this node's address: a copy or an original, so both might lead."""
    node = this_node(home)
    stream = min(home.config.streams, default=None)
    with contextlib.suppress(MillstreamError):  # its server may not run, or it has no address here
        there = None if stream is None else state_of_node(home, node, stream, timeout_s=_ANSWERS_WITHIN_S)
        if there is not None and there.home != instance_of(home):
            at = home.config.replication.nodes.get(node)
            return NodeNameTaken(f"at {at}, where the others have {node}, another home answers", node=str(node))
    return None


def _other(home: Home, node: str, stream: str, *, is_region: bool) -> NodeFinding:
    check = f"node {node} of {stream}"
    try:
        state = state_of_node(home, node, stream, timeout_s=_ANSWERS_WITHIN_S)
    except MillstreamError as error:
        return NodeFinding(check, error.message, error)
    role = state.fact.role.value + (f" {state.fact.leader}" if state.fact.role is Role.FOLLOWS else "")
    message = f"answers, {role}, has group {state.group}"
    if is_region:
        return NodeFinding(check, message)
    return NodeFinding(check, message, _disagreement(home, node, stream, state))


def _disagreement(home: Home, node: str, stream: str, state: NodeState) -> MillstreamError | None:
    """Return what is wrong between this node and another one that answers."""
    own = Roles(home).of(stream)
    if state.node != node:
        return ConfigError(
            f"at the address of {node} is a node that calls itself {state.node}",
            hint="Each home has a [replication] node of its own, and all have the same [replication.nodes].",
        )
    try:
        check_same_stream(home, stream, state.stream, node)
    except MillstreamError as error:
        return error
    theirs = state.fact
    if own.role is Role.LEADS and theirs.role is Role.LEADS:
        return two_leaders(stream, node)
    if own.role is not Role.LEADS and theirs.role is not Role.LEADS and own.leader == node:
        return ReplicationError(
            f"this node follows {node}, which doesn't lead stream {stream}",
            hint="Run `millstream replicas` on each node to find the leader; if there is none, run `millstream promote` "
            "on the node with the highest group.",
        )
    return None


def _store(home: Home, stream: str, url: str) -> NodeFinding:
    from millstream.nodes.object_stores import store_of, stored_lineage

    check = f"object store of {stream}"
    try:
        with contextlib.closing(store_of(home, stream)) as store:
            store.check()
            rank, _, _ = stored_lineage(store)
    except MillstreamError as error:
        return NodeFinding(check, error.message, error)
    return NodeFinding(
        check,
        f"{url}: an object could be written, read and deleted; "
        + ("nothing is stored yet" if rank is None else f"it has group {rank.group}"),
    )
