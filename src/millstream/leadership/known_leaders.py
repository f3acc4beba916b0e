"""Where a stream is written: a node's own role, and the map of leaders that the catalog keeps.

The role (`node_roles`) is authoritative, and every write is checked against it. The catalog's map is derived
from roles, never the other way round: no node leads, follows or is fenced by the map. If nodes share a
catalog, the map adds what this node hasn't heard of yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from millstream.errors import LogError, MillstreamError
from millstream.leadership.node_roles import Roles
from millstream.model.replication import NodeName
from millstream.protocol.replication.leader_map import LeaderMap, leader_by, leaders_known
from millstream.wal.files import RealFiles
from millstream.wal.replica.ship_source import durable_marks

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths
    from millstream.model.ids import StreamId

logger = structlog.get_logger("millstream.leaders")

_PATIENCE_S = 2.0
"""How long to wait for a catalog that nothing depends on."""


def leaders_of(home: Home, name: str) -> LeaderMap:
    """Return who has led a stream, and whom to write to last; empty if the home is no node.

    It comes from this node's role, and from the catalog if that knows more.

    Raises:
        RoleUnreadable: the role's file is damaged.
    """
    node = home.config.replication.node
    if node is None:
        return LeaderMap()
    me, fact = NodeName(node), Roles(home).of(name)
    known = leaders_known(fact, me).joined(_noted(home, name))
    leads = leader_by(fact, me, known)
    if leads is None:
        return known
    # The version comes from this node's role alone: an operator may have set whom it follows.
    others = [one for one in known.leaderships if one.since < leads.since]
    return LeaderMap.of((*others, leads))


def leader_facts(home: Home, leaders: LeaderMap) -> dict[str, Any] | None:
    """Return the leader, JSON-able.

    `node`, its Flight `address` if configured, whether it is `here`, and its promotion's `epoch` and
    `behind`.
    """
    leads = leaders.newest
    if leads is None:
        return None
    replication = home.config.replication
    return {
        "node": str(leads.node),
        "address": replication.nodes.get(leads.node),
        "here": leads.node == replication.node,
        "epoch": int(leads.since.epoch),
        "behind": int(leads.behind),
    }


def note_leaders(home: Home, name: str, catalog: Catalog | None = None) -> None:
    """Note in the catalog what this node knows of the stream's leaders.

    If it doesn't answer, log that and wait for the next time: nothing depends on it.
    """
    try:
        stream = _stream_id(home, name)
        if stream is None or not home.has_catalog():
            return
        from millstream.catalog.leaders import StreamLeaders

        me = NodeName(home.config.replication.node or "")
        known = leaders_known(Roles(home).of(name), me).leaderships
        if catalog is not None:
            StreamLeaders(catalog, stream).note(known)
            return
        with home.open_catalog(busy_timeout_s=_PATIENCE_S) as opened:
            StreamLeaders(opened, stream).note(known)
    except MillstreamError as error:
        logger.warning("who leads can't be noted in the catalog", stream=name, code=error.code, error=error.message)


def _noted(home: Home, name: str) -> LeaderMap:
    """Return the catalog's map; empty if the catalog doesn't answer at once."""
    try:
        stream = _stream_id(home, name)
        if stream is None or not home.has_catalog():
            return LeaderMap()
        from millstream.catalog.leaders import StreamLeaders

        with home.open_catalog(busy_timeout_s=_PATIENCE_S) as opened:
            return StreamLeaders(opened, stream).map()
    except MillstreamError as error:
        logger.warning("the catalog can't be asked who leads", stream=name, code=error.code, error=error.message)
        return LeaderMap()


def _stream_id(home: HomePaths, name: str) -> StreamId | None:
    """Return the id from the log itself: a follower's catalog doesn't have the stream before a promotion."""
    try:
        marks = durable_marks(RealFiles(), str(home.wal_folder(name)))
    except (LogError, FileNotFoundError):
        return None
    return next((mark.stream for mark in marks.values()), None)
