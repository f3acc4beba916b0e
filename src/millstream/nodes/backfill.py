"""What an object store has more of a stream than this node: taken into the node's log, which nobody has open meanwhile.

A follower comes here whose leader has dropped what it lacks, or who has nothing yet; and who is to be promoted. It can be broken off anywhere:
the position is the log, and the next call goes on from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from millstream.leadership.roles import Roles
from millstream.model.positions import Seq
from millstream.model.replication import AckKind, AckLevel
from millstream.nodes.follower_state import FollowingNotes
from millstream.nodes.stores import Fetched, fetch, stored_lineage
from millstream.protocol.replication.roles import LINEAGE, SESSIONS, Role, RoleFact
from millstream.wal.replica.log import ReplicaLog
from millstream.wal.writing.session_file import covered_in

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.replication.object_store import ObjectStoreTransport


def has_log(home: Home, stream: str) -> bool:
    """Whether this node has anything of a stream's log."""
    return any(home.wal_folder(stream).glob("*/*.wal"))


def fill(
    home: Home,
    stream: str,
    store: ObjectStoreTransport,
    *,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda _: None,
) -> Fetched | None:
    """Take what a store has more of what was acknowledged. What this node has and the store's history hasn't is set aside first.

    Args:
        home: whose node.
        stream: its name.
        store: the store, for that stream.
        stop: whether to break off.
        tell: told how far it is, now and then.

    Returns:
        What came; None where the store has no more than this node: then nothing was changed.

    Raises:
        As `fetch`, and `StoreUnavailable` where the store doesn't answer.
    """
    roles, notes = Roles(home), FollowingNotes(home, stream)
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
    # The store may have what too few followers have.
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
    with roles.changing(stream) as changing:
        changing.put(_with_lineage(changing.fact, found))
    return found


def _with_lineage(fact: RoleFact, found: Fetched) -> RoleFact:
    """Reigns whose past is here now; who has led last may be more than this node has heard of."""
    last = found.lineage.last.promise
    if last > fact.promise:
        fact = fact.heard_of(last)
        if fact.role is Role.FOLLOWS:
            fact = fact.following(last.node)
    return replace(fact, lineage=found.lineage)
