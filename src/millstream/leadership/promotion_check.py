"""The leader's check whether another node was promoted: a leader that was away or cut off isn't notified.

A node that can't be asked means nothing: the leader continues without the others, and they fence it when
they meet. A node that has another stream of that name fences no one, as its address may be a mistake. But it may also
have been promoted while this node, without its log, began another: that is logged and shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from millstream.errors import MillstreamError, ReplicationError
from millstream.leadership.node_calls import state_of_peer
from millstream.leadership.node_roles import Roles
from millstream.protocol.replication.node_promises import Promise, Role
from millstream.workers import Pool, Worker

if TYPE_CHECKING:
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.nodes")

_ANSWERS_WITHIN_S: Final = 2.0
"""Longest wait of a start for silent nodes."""
_EVERY_S: Final = 3.0
OtherStreams: TypeAlias = Mapping[str, ReplicationError]
"""The nodes that have another stream under a name, with their errors (`other_stream`)."""


def hear_of_promotions(home: Home, stream: str) -> bool:
    """Ask the other nodes for their promises, if this one leads; return whether it still does.

    A promise of theirs to another node is noted here durably, and fences this node.

    Raises:
        RoleUnreadable: whether it leads isn't known.
        ConfigError: the variable that has this node's token isn't set, so no node would answer.
    """
    return _heard(home, stream, {})[0]


def _heard(home: Home, stream: str, before: OtherStreams) -> tuple[bool, OtherStreams]:
    """Do as `hear_of_promotions`; return also the nodes with another stream, of which those not found before are logged."""
    roles = Roles(home)
    fact = roles.of(stream)
    others = sorted(home.config.replication.nodes.keys() - {home.config.replication.node})
    if fact.role is not Role.LEADS or not others:
        return fact.role is Role.LEADS, {}
    home.loaded_config.node_token()
    found: dict[str, ReplicationError] = {}

    def promised_by(node: str) -> tuple[Promise, str]:
        try:
            theirs = state_of_peer(home, node, stream, timeout_s=_ANSWERS_WITHIN_S).fact
        except MillstreamError as error:
            if isinstance(error, ReplicationError) and error.code == "other_stream":
                found[node] = error
            elif node in before:
                found[node] = before[node]  # it doesn't answer now
            return fact.promise, fact.claimant
        return theirs.promise, theirs.claimant

    with Pool(len(others), thread_name_prefix="ask-nodes") as pool:
        highest, claimant = max(pool.map(promised_by, others))
    for node, error in found.items():
        if node not in before or before[node].message != error.message:
            logger.error(error.message, code=error.code, stream=stream, node=node, hint=error.hint)
    if highest <= fact.promise:
        return True, found
    with roles.changing(stream) as changing:
        changing.put(changing.fact.heard_of(highest, claimant))
    leads = changing.fact.role is Role.LEADS
    if not leads:
        logger.warning("another node was promoted", stream=stream, leader=changing.fact.leader)
    return leads, found if leads else {}


@contextmanager
def hearing_of_promotions(home: Home) -> Iterator[Mapping[str, OtherStreams]]:
    """Ask repeatedly during the block, for all streams that are led here; yield by stream the nodes that have another one."""
    found: dict[str, OtherStreams] = {}

    def ask() -> bool:
        for stream in home.config.streams:
            if not worker.stopping.is_set():
                with contextlib.suppress(MillstreamError, OSError):  # it is asked again
                    _, found[stream] = _heard(home, stream, found.get(stream, {}))
        return True

    worker = Worker("ask-nodes", ask, every_s=_EVERY_S)
    with worker:
        yield found


def two_leaders(stream: str, node: str) -> ReplicationError:
    """Return the error if this node leads and another one does too, neither of them promoted."""
    return ReplicationError(
        f"this node leads stream {stream}, and so does {node}", code="two_leaders", stream=stream, node=node
    )
