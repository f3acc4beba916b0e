"""The leader's check whether another node was promoted: a leader that was away or cut off isn't notified.

A node that can't be asked means nothing: the leader continues without the others, and they fence it when
they meet. Nor does a node that has another stream of that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from millstream.errors import MillstreamError, ReplicationError
from millstream.leadership.node_calls import state_of_peer
from millstream.leadership.node_roles import Roles
from millstream.protocol.replication.promises_and_fencing import Promise, Role
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.nodes")

_ANSWERS_WITHIN_S: Final = 2.0
"""Longest wait of a start for silent nodes."""
_EVERY_S: Final = 3.0


def hear_of_promotions(home: Home, stream: str) -> bool:
    """Ask the other nodes for their promises, if this one leads; return whether it still does.

    A promise of theirs to another node is noted here durably, and fences this node.

    Raises:
        RoleUnreadable: whether it leads isn't known.
        ConfigError: the variable that has this node's token isn't set, so no node would answer.
    """
    roles = Roles(home)
    fact = roles.of(stream)
    others = sorted(home.config.replication.nodes.keys() - {home.config.replication.node})
    if fact.role is not Role.LEADS or not others:
        return fact.role is Role.LEADS
    home.loaded_config.node_token()

    def promised_by(node: str) -> tuple[Promise, str]:
        with contextlib.suppress(MillstreamError):
            theirs = state_of_peer(home, node, stream, timeout_s=_ANSWERS_WITHIN_S).fact
            return theirs.promise, theirs.claimant
        return fact.promise, fact.claimant

    with ThreadPoolExecutor(len(others), thread_name_prefix="ask-nodes") as pool:
        highest, claimant = max(pool.map(promised_by, others))
    if highest <= fact.promise:
        return True
    with roles.changing(stream) as changing:
        changing.put(changing.fact.heard_of(highest, claimant))
    leads = changing.fact.role is Role.LEADS
    if not leads:
        logger.warning("another node was promoted", stream=stream, leader=changing.fact.leader)
    return leads


@contextmanager
def hearing_of_promotions(home: Home) -> Iterator[None]:
    """Ask repeatedly during the block, for all streams that are led here."""

    def ask() -> bool:
        for stream in home.config.streams:
            if not worker.stopping.is_set():
                with contextlib.suppress(MillstreamError, OSError):  # it is asked again
                    hear_of_promotions(home, stream)
        return True

    worker = Worker("ask-nodes", ask, every_s=_EVERY_S)
    with worker:
        yield


def two_leaders(stream: str, node: str) -> ReplicationError:
    """Return the error if this node leads and another one does too, neither of them promoted."""
    return ReplicationError(
        f"this node leads stream {stream}, and so does {node}", code="two_leaders", stream=stream, node=node
    )
