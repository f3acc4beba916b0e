"""Calls between nodes in addition to shipments: a stream's state, and a promise. Over Flight's `DoAction`, as JSON.

The caller needs the right to admin the stream there, as a follower does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from millstream.errors import (
    AccessError,
    ConfigError,
    LinkLost,
    MillstreamError,
    ReplicationError,
    ShipmentUnreadable,
    UsageError,
)
from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.positions import Seq
from millstream.model.replication import NodeName, check_node_name, region_node
from millstream.protocol.replication.node_promises import Promise, Rank, RoleFact, claimant_of
from millstream.replication.flight.address import LeaderAddress
from millstream.replication.flight.wire import FLIGHT_FAILURES, error_of_flight
from millstream.wal.files import RealFiles
from millstream.wal.misplacement import stream_of

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths

ACTION: Final = "millstream-node"
_ANSWER_BYTES_MAX: Final = 1 << 20
_EPOCHS: Final = 1 << 62
"""Upper bound of epochs, with room above for later ones: a promise can't be taken back."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node's state of a stream."""

    node: NodeName
    fact: RoleFact
    group: GroupNumber
    """The last commit group that it has, whole and durable."""
    persisted_upto: Seq
    is_candidate: bool
    """Whether a promotion goes on there."""
    home: str
    """Id of the answering home (`home_identity.instance_of`)."""
    dropped_upto: Seq
    """The number up to which its log has dropped records; 0: it has everything."""
    stream: StreamId | None
    """Id of its stream of that name; None: it has no log."""

    @property
    def rank(self) -> Rank:
        """Return how much acknowledged data it has."""
        return self.fact.rank(self.group)

    def as_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "node": self.node,
            "fact": json.loads(self.fact.to_json()),
            "group": int(self.group),
            "persisted_upto": int(self.persisted_upto),
            "is_candidate": self.is_candidate,
            "home": self.home,
            "dropped_upto": int(self.dropped_upto),
            "stream": None if self.stream is None else str(self.stream),
        }

    @classmethod
    def of_dict(cls, facts: Mapping[str, Any]) -> NodeState:
        """Parse the result of `as_dict`; `ShipmentUnreadable` if it is something else."""
        try:
            fact = RoleFact.from_json(json.dumps(facts["fact"]).encode())
            return cls(
                NodeName(str(facts["node"])),
                fact,
                GroupNumber(int(facts["group"])),
                Seq(int(facts["persisted_upto"])),
                facts["is_candidate"] is True,
                str(facts["home"]),
                Seq(int(facts["dropped_upto"])),
                _stream_id_in(facts),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ShipmentUnreadable(f"a node answers what can't be read: {error!r}") from error


def this_node(home: Home) -> NodeName:
    """Return this node's name. `ConfigError` if the configuration gives it none."""
    name = home.config.replication.node
    if name is None:
        raise ConfigError(
            f"{home.config_file} doesn't name this node",
            hint="Set [replication] node, and in [replication.nodes] the address of each node.",
        )
    return NodeName(name)


def address_of(home: Home, node: str) -> LeaderAddress:
    """Return the address of a node's Flight server, or of another region's.

    Raises:
        ReplicationError (`unknown_node`): it isn't configured.
        ConfigError: the variable that has this node's token isn't set.
    """
    replication = home.config.replication
    regions = {region_node(region): address for region, address in replication.region_addresses.items()}
    address = replication.nodes.get(node) or regions.get(NodeName(node))
    if address is None:
        known = ", ".join(sorted(replication.nodes)) or "none"
        raise ReplicationError(
            f"{home.config_file} names no node {node}; nodes: {known}", code="unknown_node", node=node
        )
    scheme, _, place = address.partition("://")
    token = home.loaded_config.node_token()

    def file(path: str | None) -> Path | None:
        return None if path is None else home.path / Path(path).expanduser()

    return LeaderAddress(
        place,
        is_tls=scheme == "grpc+tls",
        authority=file(replication.authority),
        certificate=file(replication.certificate),
        key=file(replication.key),
        token=lambda: token,
    )


def told_by(address: LeaderAddress, node: str, error: MillstreamError) -> MillstreamError:
    """Rephrase an error of another node, or of the link, for this side: whose token it is, and what to check."""
    if isinstance(error, AccessError):
        return type(error)(
            f"node {node} refuses this one: {error.message}",
            code=error.code,
            hint=f"[replication] token has to be one that {node} knows, with the right to admin the stream: `millstream token create --all admin` there.",
            **error.details,
        )
    if isinstance(error, LinkLost) and not address.is_tls and "Socket closed" in error.message:
        hint = f"Where {node} has a certificate, its address begins with grpc+tls://."
        return LinkLost(f"node {node} ends the connection: {error.message}", hint=hint, **error.details)
    return error


def ask_node(home: Home, node: str, asked: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Return a node's answer.

    Raises:
        ReplicationError (`unknown_node`): as `address_of`.
        LinkLost: it can't be reached, or doesn't answer in time: the request may be carried out all the
            same.
        MillstreamError: any error of our tree that the node raised.
    """
    import pyarrow.flight as fl

    address = address_of(home, node)
    address.probe(timeout_s)
    token = address.token()
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    options = fl.FlightCallOptions(headers=headers, timeout=timeout_s)
    try:
        with address.client() as client:
            answers = list(client.do_action(fl.Action(ACTION, json.dumps(dict(asked)).encode()), options))
            body = answers[0].body.to_pybytes()
    except FLIGHT_FAILURES as error:
        raise told_by(address, node, error_of_flight(error)) from error
    except IndexError as error:
        raise LinkLost(f"node {node} answers nothing") from error
    if len(body) > _ANSWER_BYTES_MAX:
        raise ShipmentUnreadable(f"node {node} answers {len(body)} bytes")
    try:
        found = json.loads(body)
    except ValueError as error:
        raise ShipmentUnreadable(f"node {node} answers no JSON") from error
    if not isinstance(found, dict):
        raise ShipmentUnreadable(f"node {node} answers no object")
    return found


def state_of_node(home: Home, node: str, stream: str, *, timeout_s: float = 5.0) -> NodeState:
    """Return a node's state of a stream. Raises as `ask_node`."""
    return NodeState.of_dict(ask_node(home, node, {"op": "state", "stream": stream}, timeout_s=timeout_s))


def state_of_peer(home: Home, node: str, stream: str, *, timeout_s: float = 5.0) -> NodeState:
    """Return the state of a node of this region.

    Raises:
        ReplicationError (`other_stream`): it has another stream of that name.
        MillstreamError: as `ask_node`.
    """
    state = state_of_node(home, node, stream, timeout_s=timeout_s)
    check_same_stream(home, stream, state.stream, node)
    return state


def check_same_stream(home: HomePaths, stream: str, theirs: StreamId | None, node: str) -> None:
    """Raise `ReplicationError` (`other_stream`) if this node and another one have two streams of one name."""
    own = _stream_here(home, stream)
    if None not in (own, theirs) and own != theirs:
        raise ReplicationError(
            f"{node} has stream {theirs} under the name {stream}, not {own}",
            code="other_stream",
            hint=f"If {node}'s address in [replication.nodes] is another cluster's, correct it. If both nodes lead, choose "
            f"one; on the other, stop `millstream run`, move data/wal/{stream} away (its records aren't in the other log), "
            "then run `millstream follow`.",
            stream=str(own),
            node=node,
        )


def _stream_here(home: HomePaths, stream: str) -> StreamId | None:
    folder = home.wal_folder(stream)
    return stream_of(RealFiles(), str(folder)) if folder.is_dir() else None


def _stream_id_in(facts: Mapping[str, Any]) -> StreamId | None:
    found = facts.get("stream")
    return None if found is None else StreamId(UUID(found))


def ask_promise(home: Home, node: str, stream: str, promise: Promise, claimant: str, *, timeout_s: float) -> NodeState:
    """Request a node's promise; return its state after giving it.

    Raises:
        Fenced: it has promised something higher.
        NodeNameTaken: it has promised the same to another claimant, one of the same name.
        ReplicationError (`other_stream`): it has another stream of that name; it promised nothing.
        LinkLost …: as `ask_node`.
    """
    own = _stream_here(home, stream)
    asked = {
        "op": "promise",
        "stream": stream,
        "stream_id": None if own is None else str(own),
        "epoch": int(promise.epoch),
        "to": promise.node,
        "claimant": claimant,
    }
    return NodeState.of_dict(ask_node(home, node, asked, timeout_s=timeout_s))


def promise_in(asked: Mapping[str, Any]) -> tuple[Promise, str, StreamId | None]:
    """Return the promise that a call asks for, its claimant, and its stream's id. `UsageError` if no node could ever keep it."""
    epoch, node = asked.get("epoch"), asked.get("to")
    if type(epoch) is not int or not 0 < epoch < _EPOCHS or not isinstance(node, str):
        raise UsageError(f"epoch {epoch!r} of {node!r} is no promise")
    try:
        claimant = claimant_of(asked.get("claimant", ""))
    except (TypeError, ValueError) as error:
        raise UsageError(f"epoch {epoch} is asked for by {error}") from error
    found = asked.get("stream_id")
    try:
        stream = None if found is None else StreamId(UUID(found))
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"epoch {epoch} is asked for in stream {found!r}, which is no id") from error
    return Promise(Epoch(epoch), check_node_name(node)), claimant, stream
