"""What this node answers other nodes: how it stands with a stream, and its promises. Part of `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import HomeBusy, ShardLocked, UnknownStream, UsageError
from millstream.leadership.node_calls import NodeState, address_of, promise_in, this_node
from millstream.leadership.roles import Roles
from millstream.model.ids import GroupNumber
from millstream.model.positions import Seq
from millstream.nodes.instances import instance_of
from millstream.nodes.staleness import has_followed_since_boot
from millstream.processes.locks import holder, once_let_go
from millstream.protocol.replication.roles import Promise, Role
from millstream.wal.files import RealFiles
from millstream.wal.layout import list_shards, shard_folder
from millstream.wal.mark import read_dropped, stream_cut
from millstream.wal.replica.log import ReplicaLog
from millstream.wal.replica.shipping import durable_marks
from millstream.wal.shards import lock_shards

if TYPE_CHECKING:
    from millstream.home.home import Home

_ENDS_WITHIN_S: Final = 10.0
"""How long this node's writer may take to end: the group that it is writing, and those who wait."""
_LOOK_EVERY_S: Final = 0.05


def answer_node(home: Home, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to another node's call; who asks has the right to admin the stream.

    Raises:
        UnknownStream, UsageError: there is none of that name, or no such call.
        UnknownNode: a node asks for a promise that isn't configured here: this node would follow somebody that it can't find.
        Fenced: this node has promised something higher.
        NodeNameTaken: it has promised the same to another home of the name that it is asked by.
        HomeBusy: it has promised; but its writer doesn't end: asked again, it answers once that has.
    """
    stream = str(asked.get("stream"))
    if stream not in home.config.streams:
        raise UnknownStream(f"no stream {stream} in {home.config_file}", stream=stream)
    op = asked.get("op")
    if op == "state":
        return node_state(home, stream).as_dict()
    if op == "promise":
        promise, claimant = promise_in(asked)
        address_of(home, promise.node)
        return give_promise(home, stream, promise, claimant).as_dict()
    raise UsageError(f"nodes can't be asked for {op!r}")


def node_state(home: Home, stream: str) -> NodeState:
    """How this node stands with a stream."""
    fact = Roles(home).of(stream)
    folder = home.wal_folder(stream)
    marks = durable_marks(RealFiles(), str(folder)) if folder.is_dir() else {}
    group = min((mark.group for mark in marks.values()), default=GroupNumber(0))
    is_candidate = fact.role is not Role.LEADS and holder(home.run_folder, "promote").get("stream") == stream
    upto = stream_cut(marks.values()) if marks else Seq(0)
    files = RealFiles()
    dropped = [read_dropped(files, shard_folder(str(folder), shard)) for shard in marks]
    gone = max((one.seq for one in dropped if one is not None), default=Seq(0))
    return NodeState(this_node(home), fact, group, upto, is_candidate, instance_of(home), gone)


def give_promise(home: Home, stream: str, promise: Promise, claimant: str = "") -> NodeState:
    """Give a promise, durably; what was under way of a lower one has ended when this returns. Raises as `answer_node`."""
    with Roles(home).changing(stream) as changing:
        changing.put(changing.fact.asked(promise, claimant))
        led = changing.fact.role is Role.FENCED
    if led:
        wait_for_writer(home, stream)
    _find_what_is_durable(home, stream)
    # Who follows here looks at the promise in front of each acknowledgement: whatever was acknowledged is in this.
    return node_state(home, stream)


def _find_what_is_durable(home: Home, stream: str) -> None:
    """Have the marks say all that is: after a power cut they may be older than what was acknowledged, until somebody has opened the log.

    Who follows does so when it begins, and steps aside for a promise; who led begins no more.
    """
    folder = home.wal_folder(stream)
    if not any(folder.glob("*/*.wal")) or has_followed_since_boot(home, stream):
        return
    try:
        once_let_go(lambda: ReplicaLog.open(str(folder)).close(), _ENDS_WITHIN_S)
    except ShardLocked:
        raise HomeBusy(
            f"this node has promised to follow nobody else in stream {stream}, and its log is in use: how far it goes isn't known",
            hint="Ask again; `millstream status` shows who it is.",
        ) from None


def wait_for_writer(home: Home, stream: str) -> None:
    """Wait until nobody has the log's locks."""
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
            f"this node has promised to write stream {stream} no more, but who writes it hasn't ended",
            hint="Ask again; `millstream status` shows who it is.",
        ) from None
