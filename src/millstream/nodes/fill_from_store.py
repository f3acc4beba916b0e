"""Fetches the part of a stream that an object store has and this node lacks into the node's log, which is closed.

It serves a follower that has nothing yet, or whose leader has dropped what the follower lacks; and a node
that is to be promoted. It can be interrupted anywhere: the position is the log, and the next call
continues there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from millstream.leadership.node_roles import Roles
from millstream.model.positions import Seq
from millstream.model.replication import AckKind, AckLevel
from millstream.nodes.follower_state import FollowerState
from millstream.nodes.object_stores import FetchedStream, fetch, stored_lineage
from millstream.protocol.replication.node_promises import LINEAGE, SESSIONS, Lineage, Role, RoleFact
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.writing.session_file import covered_in

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths
    from millstream.replication.object_store.transport import ObjectStoreTransport


def has_log(home: HomePaths, stream: str) -> bool:
    """Return whether this node has anything of a stream's log."""
    return any(home.wal_folder(stream).glob("*/*.wal"))


def fill(
    home: Home,
    stream: str,
    store: ObjectStoreTransport,
    *,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda _: None,
) -> FetchedStream | None:
    """Fetch the acknowledged part that a store has and this node lacks.

    The part of this node's log that the store's history doesn't have is set aside first.

    Returns:
        The fetched part; None if the store has no more than this node: then nothing was changed.

    Raises:
        As `fetch`, and `StoreUnavailable` if the store doesn't answer.
    """
    roles, notes = Roles(home), FollowerState(home, stream)
    folder = home.wal_folder(stream)
    stored, lineage, _ = stored_lineage(store)
    if stored is None:
        return None
    if has_log(home, stream):
        fact = roles.of(stream)
        with contextlib.closing(ReplicaLog.open(str(folder))) as log:
            group = log.end().group
        if stored <= fact.rank(group):
            return None
        parts_behind = fact.lineage.covered_by(group).common_with(lineage)[1]
        if parts_behind is not None:
            notes.set_aside(parts_behind)
    with roles.changing(stream) as changing:  # before the log is ahead of it
        changing.put(_with_lineage(changing.fact, lineage))
    # The store may have groups that too few followers have.
    withholds = AckLevel.parse(home.config.streams[stream].acks).kind is AckKind.DURABLE
    found = fetch(store, stream, folder, upto=stored.group, withholds=withholds, stop=stop, tell=tell)
    notes.documents(
        tuple(
            one
            for one in found.documents.values()
            if one.name != LINEAGE
            and one.version > notes.versions().get(one.name, -1)
            and not (one.name == SESSIONS and (covered_in(one.data) or Seq(0)) > found.end.persisted_upto)
        )
    )
    return found


def _with_lineage(fact: RoleFact, lineage: Lineage) -> RoleFact:
    """Note the terms of the log that comes; its last leader may be newer than this node has heard of."""
    last = lineage.last.promise
    if last > fact.promise:
        fact = fact.heard_of(last)
        if fact.role is Role.FOLLOWS:
            fact = fact.following(last.node)
    return replace(fact, lineage=lineage)
