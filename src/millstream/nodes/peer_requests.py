"""This node's answers to other nodes: its state of a stream, and its promises. Part of `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import HomeBusy, ShardLocked, UnknownStream, UsageError
from millstream.leadership.node_calls import NodeState, address_of, check_same_stream, promise_in, this_node
from millstream.leadership.node_roles import Roles
from millstream.model.ids import GroupNumber
from millstream.model.positions import Seq
from millstream.nodes.home_identity import instance_of
from millstream.nodes.staleness import has_followed_since_boot
from millstream.processes.role_locks import holder, once_let_go
from millstream.protocol.replication.node_promises import Promise, Role
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.wal.durable_mark import read_dropped
from millstream.wal.files import RealFiles
from millstream.wal.layout import list_shards, shard_folder
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import durable_marks
from millstream.wal.shard_locks import lock_shards

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths

_ENDS_WITHIN_S: Final = 10.0
"""How long this node's writer may take to end: its current commit group, and the waiting callers."""


def answer_node(home: Home, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to another node's call; the caller has the right to admin the stream.

    Raises:
        UnknownStream, UsageError: there is none of that name, or no such call.
        ReplicationError (`unknown_node`): a node that isn't configured here asks for a promise: this node would follow one that
            it can't find.
        ReplicationError (`other_stream`): it asks for a promise about another stream of that name.
        Fenced: this node has promised something higher.
        NodeNameTaken: it has promised the same to another home with the caller's name.
        HomeBusy: it has promised, but its writer hasn't ended; a repeated call answers once it has.
    """
    stream = str(asked.get("stream"))
    if stream not in home.config.streams:
        raise UnknownStream(f"no stream {stream} in {home.config_file}", stream=stream)
    op = asked.get("op")
    if op == "state":
        return node_state(home, stream).as_dict()
    if op == "promise":
        promise, claimant, theirs = promise_in(asked)
        check_same_stream(home, stream, theirs, promise.node)
        address_of(home, promise.node)
        return give_promise(home, stream, promise, claimant).as_dict()
    raise UsageError(f"nodes can't be asked for {op!r}")


def node_state(home: Home, stream: str) -> NodeState:
    """Return this node's state of a stream."""
    fact = Roles(home).of(stream)
    folder = home.wal_folder(stream)
    marks = durable_marks(RealFiles(), str(folder)) if folder.is_dir() else {}
    group = min((mark.group for mark in marks.values()), default=GroupNumber(0))
    is_candidate = fact.role is not Role.LEADS and holder(home.run_folder, "promote").get("stream") == stream
    upto = stream_cut(marks.values()) if marks else Seq(0)
    files = RealFiles()
    dropped = [read_dropped(files, shard_folder(str(folder), shard)) for shard in marks]
    gone = max((one.seq for one in dropped if one is not None), default=Seq(0))
    stream_id = next((mark.stream for mark in marks.values()), None)
    return NodeState(this_node(home), fact, group, upto, is_candidate, instance_of(home), gone, stream_id)


def give_promise(home: Home, stream: str, promise: Promise, claimant: str = "") -> NodeState:
    """Give a promise, durably; work under a lower promise has ended when this returns. Raises as `answer_node`."""
    with Roles(home).changing(stream) as changing:
        changing.put(changing.fact.asked(promise, claimant))
        led = changing.fact.role is Role.FENCED
    if led:
        wait_for_writer(home, stream)
    _find_what_is_durable(home, stream)
    # The follower here checks the promise before each acknowledgement: whatever was acknowledged is in
    # this state.
    return node_state(home, stream)


def _find_what_is_durable(home: Home, stream: str) -> None:
    """Bring the marks up to date: after a power cut they may be older than what was acknowledged.

    Opening the log corrects them.

    A follower does so when it starts, and steps aside for a promise; a former leader doesn't start again.
    """
    folder = home.wal_folder(stream)
    if not any(folder.glob("*/*.wal")) or has_followed_since_boot(home, stream):
        return
    try:
        once_let_go(lambda: ReplicaLog.open(str(folder)).close(), _ENDS_WITHIN_S)
    except ShardLocked:
        raise HomeBusy(
            f"this node has promised to follow no other node in stream {stream}, and its log is in use: its end is "
            "unknown",
            hint="Repeat the call; `millstream status` shows that process.",
        ) from None


def wait_for_writer(home: HomePaths, stream: str) -> None:
    """Wait until no process has the log's locks."""
    folder = str(home.wal_folder(stream))
    files = RealFiles()

    def locked_once() -> None:
        for mark in lock_shards(files, folder, list_shards(files, folder)).values():
            mark.close()

    if not files.exists(folder):
        return
    try:
        once_let_go(locked_once, _ENDS_WITHIN_S)
    except ShardLocked:
        raise HomeBusy(
            f"this node has promised to stop writing stream {stream}, but its writer hasn't ended",
            hint="Repeat the call; `millstream status` shows that process.",
        ) from None
