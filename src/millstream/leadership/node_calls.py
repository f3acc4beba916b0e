"""What nodes ask of one another beside shipments: how somebody stands with a stream, and a promise. Over Flight's `DoAction`, as JSON.

Who asks needs the right to admin the stream there, as a follower does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import (
    AccessError,
    ConfigError,
    LinkLost,
    MillstreamError,
    ShipmentUnreadable,
    UnknownNode,
    UsageError,
)
from millstream.model.ids import Epoch, GroupNumber
from millstream.model.positions import Seq
from millstream.model.replication import NodeName, check_node_name, region_node
from millstream.protocol.replication.roles import Promise, Rank, RoleFact, claimant_of
from millstream.replication.flight_address import LeaderAddress
from millstream.replication.flight_wire import FLIGHT_FAILURES, error_of_flight

if TYPE_CHECKING:
    from millstream.home.home import Home

ACTION: Final = "millstream-node"
_ANSWER_BYTES_MAX: Final = 1 << 20
_EPOCHS: Final = 1 << 62
"""More than there will ever be, and room for later ones above the highest: a promise can't be taken back."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """How a node stands with a stream."""

    node: NodeName
    fact: RoleFact
    group: GroupNumber
    """The last commit group that it has, whole and durable."""
    persisted_upto: Seq
    is_candidate: bool = False
    """A promotion goes on there."""
    home: str = ""
    """Which home of that name answers: `instances.instance_of`. Empty: one of before that was said."""
    dropped_upto: Seq | None = None
    """Up to where its log has let go of what there was; 0: it has all from the beginning. None: one of before that was said."""

    @property
    def rank(self) -> Rank:
        """How much it has of what was acknowledged."""
        return self.fact.rank(self.group)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "node": self.node,
            "fact": json.loads(self.fact.to_json()),
            "group": int(self.group),
            "persisted_upto": int(self.persisted_upto),
            "is_candidate": self.is_candidate,
            "home": self.home,
            "dropped_upto": None if self.dropped_upto is None else int(self.dropped_upto),
        }

    @classmethod
    def of_dict(cls, facts: Mapping[str, Any]) -> NodeState:
        """What `as_dict` gave; `ShipmentUnreadable` where it is something else."""
        try:
            fact = RoleFact.from_json(json.dumps(facts["fact"]).encode())
            dropped = facts.get("dropped_upto")
            return cls(
                NodeName(str(facts["node"])),
                fact,
                GroupNumber(int(facts["group"])),
                Seq(int(facts["persisted_upto"])),
                facts.get("is_candidate") is True,
                str(facts.get("home", "")),
                None if dropped is None else Seq(int(dropped)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ShipmentUnreadable(f"a node answers what can't be read: {error!r}") from error


def this_node(home: Home) -> NodeName:
    """This node's name. `ConfigError` where the configuration gives it none."""
    name = home.config.replication.node
    if name is None:
        raise ConfigError(
            f"{home.config_file} doesn't say which node this is",
            hint="Set [replication] node, and in [replication.nodes] the address of each node.",
        )
    return NodeName(name)


def address_of(home: Home, node: str) -> LeaderAddress:
    """Where a node's Flight server is, or another region's.

    Raises:
        UnknownNode: the configuration doesn't say.
        ConfigError: the variable that has this node's token isn't set.
    """
    replication = home.config.replication
    regions = {region_node(region): address for region, address in replication.region_addresses.items()}
    address = replication.nodes.get(node) or regions.get(NodeName(node))
    if address is None:
        known = ", ".join(sorted(replication.nodes)) or "none"
        raise UnknownNode(f"{home.config_file} names no node {node}; nodes: {known}", node=node)
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
    """What another node, or the way to it, made of a call, in words that fit here: whose token it is, and what to look at."""
    if isinstance(error, AccessError):
        return type(error)(
            f"node {node} refuses this one: {error.message}",
            hint=f"[replication] token has to be one that {node} knows, with the right to admin the stream: `millstream token create --all admin` there.",
            **error.details,
        )
    if isinstance(error, LinkLost) and not address.is_tls and "Socket closed" in error.message:
        hint = f"Where {node} has a certificate, its address begins with grpc+tls://."
        return LinkLost(f"node {node} ends the connection: {error.message}", hint=hint, **error.details)
    return error


def ask_node(home: Home, node: str, asked: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """A node's answer.

    Raises:
        UnknownNode: as `address_of`.
        LinkLost: it can't be reached, or doesn't answer in time: what was asked of it may be done all the same.
        Whatever of our tree of errors it raised.
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
    """How a node stands with a stream. Raises as `ask_node`."""
    return NodeState.of_dict(ask_node(home, node, {"op": "state", "stream": stream}, timeout_s=timeout_s))


def ask_promise(home: Home, node: str, stream: str, promise: Promise, claimant: str, *, timeout_s: float) -> NodeState:
    """A node's promise, and how it stands once it has given it.

    Raises:
        Fenced: it has promised something higher.
        NodeNameTaken: it has promised the same to another claimant, one of the same name.
        LinkLost …: as `ask_node`.
    """
    asked = {"op": "promise", "stream": stream, "epoch": int(promise.epoch), "to": promise.node, "claimant": claimant}
    return NodeState.of_dict(ask_node(home, node, asked, timeout_s=timeout_s))


def promise_in(asked: Mapping[str, Any]) -> tuple[Promise, str]:
    """The promise that a call asks for, and for which claimant. `UsageError` where it is none that a node could ever keep."""
    epoch, node = asked.get("epoch"), asked.get("to")
    if type(epoch) is not int or not 0 < epoch < _EPOCHS or not isinstance(node, str):
        raise UsageError(f"epoch {epoch!r} of {node!r} is no promise")
    try:
        claimant = claimant_of(asked.get("claimant", ""))
    except (TypeError, ValueError) as error:
        raise UsageError(f"epoch {epoch} is asked for by {error}") from error
    return Promise(Epoch(epoch), check_node_name(node)), claimant
