"""`follow`: this home's copy of streams that other nodes lead. A part of `run`, or a process of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.errors import (
    DiskFull,
    Fenced,
    FollowerBehindRetention,
    MillstreamError,
    ReplicationError,
    Retry,
    RoleUnreadable,
    ShipmentUnreadable,
    StoreUnavailable,
    UnknownStream,
    UsageError,
)
from millstream.leadership.known_leaders import note_leaders
from millstream.leadership.node_calls import (
    NodeState,
    address_of,
    state_of_node,
    state_of_peer,
    this_node,
    told_by,
)
from millstream.leadership.node_roles import LOOK_EVERY_S, Roles, replication_folder
from millstream.leadership.promotion_check import hearing_of_promotions, two_leaders
from millstream.model.replication import Hello, NodeName
from millstream.nodes.fill_from_store import fill, has_log
from millstream.nodes.follower_state import FollowerState
from millstream.nodes.home_identity import instance_of
from millstream.nodes.object_stores import store_of
from millstream.nodes.region_copies import FollowedLog, own_copy, region_copies
from millstream.processes.catalog_watch import watched_catalog
from millstream.processes.control_socket import ControlServer
from millstream.processes.role_locks import LOCK_PATIENCE_S, RoleLock, holder, nobody_writes
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.replication.flight.transport import FlightTransport
from millstream.replication.follower import WalFollower
from millstream.wal.disk_space import NO_SPACE
from millstream.workers import Worker, watching

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.ports import LeaderLink
    from millstream.processes.child_process import Lifeline

logger = structlog.get_logger("millstream.follow")

_AGAIN_S: Final = 1.0
_LOOKS_AGAIN_S: Final = 60.0
"""Pause of a stream that waits for an operator, while others go on."""


def begin_to_follow(home: Home, leader: NodeName | None, streams: Sequence[str]) -> dict[str, RoleFact]:
    """Note durably that this home follows a node in streams; nothing is fetched yet.

    Args:
        leader: the node; None: the one it follows already, or the only other one.
        streams: names; empty for all configured ones. For other regions' logs (`shop@2`) the
            configuration names the leader.

    Raises:
        UnknownStream, ReplicationError (`unknown_node`), ConfigError: there is no such stream or node.
        UsageError: no leader is named.
        ReplicationError: this node leads the stream, and the other one wasn't promoted.
    """
    me = this_node(home)
    home.prepare()
    own = [name for name in streams if "@" not in name]
    for copy in set(streams) - set(own) - {copy.log for copy in region_copies(home)}:
        raise UnknownStream(f"{home.config_file} has no region that {copy} is a log of", stream=copy)
    if streams and not own:
        return {}
    if leader is None and home.config.replication.regions and set(home.config.replication.nodes) <= {me}:
        return {}  # other regions only: the configuration names their leaders
    found: dict[str, RoleFact] = {}
    roles = Roles(home)
    for stream in own or sorted(home.config.streams):
        if stream not in home.config.streams:
            raise UnknownStream(f"no stream {stream} in {home.config_file}", stream=stream)
        whom = leader or _only_other(home, me, roles.of(stream))
        if whom == me:
            raise UsageError(f"{me} is this node itself", hint="Name another one of [replication] nodes.")
        address_of(home, whom)
        with roles.changing(stream) as changing:
            fact = changing.fact
            if fact.role is Role.LEADS:
                fact = _led_so_far(home, stream, whom, fact)
            changing.put(fact.following(whom))
            found[stream] = changing.fact
    return found


def _only_other(home: Home, me: NodeName, fact: RoleFact) -> NodeName:
    if fact.role is Role.FOLLOWS and fact.leader:
        return fact.leader
    others = sorted(node for node in home.config.replication.nodes if node != me)
    if len(others) != 1:
        where = "[replication.nodes], or of regions that write the stream, too, in [replication] regions,"
        raise UsageError(
            "no node to follow was named",
            hint=f"Name the node: {', '.join(others)}."
            if others
            else f"Write the addresses of others in {where} first.",
        )
    return NodeName(others[0])


def _led_so_far(home: Home, stream: str, whom: NodeName, fact: RoleFact) -> RoleFact:
    """Turn a leader's fact into a follower's, if it never wrote anything or another node was promoted since."""
    if not any(home.wal_folder(stream).glob("*/*.wal")):
        return replace(fact, role=Role.FENCED, leader=whom)
    theirs = state_of_peer(home, whom, stream).fact
    fenced = fact.heard_of(theirs.promise)
    if fenced.role is Role.LEADS and theirs.role is Role.LEADS:
        raise two_leaders(stream, whom)
    if fenced.role is Role.LEADS:
        raise ReplicationError(
            f"this node leads stream {stream} itself, and {whom} wasn't promoted",
            hint=f"Run `millstream promote` on {whom}, then follow it; to discard this node's log instead, move "
            f"{home.wal_folder(stream)} away first.",
        )
    return fenced


def follow_home(
    home: Home, lifeline: Lifeline, *, until_caught_up: bool = False, on_progress: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Follow every stream that this node follows, until told to stop, or until it has everything.

    Returns:
        The final facts by stream.

    Raises:
        HomeBusy: another process follows already.
        ConfigError: the home is no node, or the variable that has its token isn't set.
        Diverged, FollowerBehindRetention, ReplicationError (`other_stream`) …: no stream can go on (the first one's error). A
            stream that can't looks again after a minute while others go on.
    """
    this_node(home)
    home.loaded_config.node_token()
    home.prepare()
    with (
        RoleLock.take(home.run_folder, "follow", patience_s=LOCK_PATIENCE_S if lifeline.supervised else 0.5),
        watched_catalog(home, lifeline),
    ):
        all_gave_up = threading.Event()
        streams = {
            copy.log: _FollowedStream(home, copy, lifeline.stop, all_gave_up)
            for copy in (*map(own_copy, sorted(home.config.streams)), *region_copies(home))
        }

        def facts() -> dict[str, Any]:
            return {"streams": {name: stream.facts() for name, stream in streams.items()}}

        with ControlServer(home, "follow", {"status": facts}), hearing_of_promotions(home):
            workers = [
                Worker(
                    f"follow-{name}",
                    partial(stream.run, until_caught_up=until_caught_up),
                    on_failure=lambda _: lifeline.stop.set(),
                ).start()
                for name, stream in streams.items()
            ]
            while any(worker.is_alive for worker in workers):
                lifeline.tell("progress", facts())
                on_progress(facts())
                if all(
                    one.gave_up or not worker.is_alive for one, worker in zip(streams.values(), workers, strict=True)
                ):
                    all_gave_up.set()
                for worker in workers:
                    worker.join(1.0 / len(workers))
        found: dict[str, Any] = facts()["streams"]
    lifeline.tell("outcome", {"streams": found})
    for worker in workers:
        worker.check()
    for stream in streams.values():
        if stream.error is not None:
            raise stream.error
    return found


class _FollowedStream:
    """One stream, handled by its role as that changes."""

    def __init__(self, home: Home, copy: FollowedLog, stop: threading.Event, all_gave_up: threading.Event) -> None:
        self._home = home
        self._all_gave_up = all_gave_up
        self.gave_up = False
        """Whether the stream waits for an operator."""
        self._copy = copy
        self._name = copy.log
        self._stop = stop
        self._roles = Roles(home)
        self._follower: WalFollower | None = None
        self._told: dict[str, Any] = {}
        self.error: MillstreamError | None = None

    def facts(self) -> dict[str, Any]:
        """Return the current facts, JSON-able."""
        follower = self._follower
        if follower is not None:
            self._told = follower.facts()
        role: Role | None = None
        with contextlib.suppress(RoleUnreadable):
            role = self._roles.of(self._name).role
        told = self._told if role is Role.FOLLOWS else {}
        # A follower that runs again reports its own errors.
        error = told.get("error") if self.error is None or follower is not None else self.error.as_dict()
        return {**told, "stream": self._name, "role": None if role is None else role.value, "error": error}

    def run(self, *, until_caught_up: bool) -> None:
        """Follow while this node's role is to follow, and it isn't promoted."""
        while not self._stop.is_set():
            is_done = True
            try:
                if self._roles.of(self._name).role is Role.FOLLOWS and not holder(self._home.run_folder, "promote"):
                    is_done = self._follow_or_fill(until_caught_up=until_caught_up)
                    self.error = None
                if until_caught_up and is_done:
                    return
            except (MillstreamError, OSError) as failed:
                self.error = error = _in_our_tree(failed, self._home)
                lasts = until_caught_up or error.retry in {Retry.OPERATOR, Retry.NEVER}
                if lasts and not isinstance(error, Fenced | DiskFull):
                    if until_caught_up or not self._waits_for_operator():
                        return
                    continue
                logger.warning("begins again", stream=self._name, error=error.message, code=error.code, in_s=_AGAIN_S)
                self._stop.wait(_AGAIN_S)
            self._stop.wait(LOOK_EVERY_S)

    def _waits_for_operator(self) -> bool:
        """Wait a while; return False if the process ends, also because no other stream goes on."""
        self.gave_up = True
        until_s = time.monotonic() + _LOOKS_AGAIN_S
        while time.monotonic() < until_s:
            if self._stop.wait(LOOK_EVERY_S) or self._all_gave_up.is_set():
                return False
        self.gave_up = False
        return True

    def _follow_or_fill(self, *, until_caught_up: bool) -> bool:
        """Follow, and fetch what the leader has dropped from the object store; return False if more remains."""
        fills = self._copy.only is None and self._home.config.replication.object_store is not None
        # An empty node would get only what the leader has kept, and nothing older.
        if fills and not has_log(self._home, self._name) and not self._begin_filled():
            return False
        try:
            self._follow(until_caught_up=until_caught_up)
        except FollowerBehindRetention as error:
            if not fills:
                raise
            logger.info("the leader has dropped what comes next", stream=self._name, error=error.message)
            if self._fill() is False:
                raise
            return False
        return True

    def _begin_filled(self) -> bool:
        """Fetch what the object store has, before anything comes from the leader; return False if it was interrupted.

        If the store can't be read, and the leader has dropped nothing yet, nothing is fetched: everything
        comes from the leader.
        """
        try:
            return self._fill() is not None
        except (StoreUnavailable, ShipmentUnreadable) as error:
            if not self._leader_has_all():
                raise
            logger.warning(
                "the object store can't be read: the leader has the whole log, and is followed from its beginning",
                stream=self._name, error=error.message, code=error.code,
            )  # fmt: skip
            return True

    def _leader_has_all(self) -> bool:
        leader = self._roles.of(self._name).leader
        if not leader:
            return False
        with contextlib.suppress(MillstreamError):
            return state_of_node(self._home, leader, self._name).dropped_upto == 0
        return False

    def _follow(self, *, until_caught_up: bool) -> None:
        fact = self._roles.of(self._name)
        note_leaders(self._home, self._name)
        notes = FollowerState(self._home, self._name)
        notes.report_what_was_set_aside()
        follower = _follower_of(self._home, self._copy, fact, notes)
        with self._unless_told_else(lambda: follower.fact) as ended:
            self._follower = follower
            try:
                follower.run(ended, until_caught_up=until_caught_up)
            finally:
                self._told, self._follower = follower.facts(), None

    def _fill(self) -> bool | None:
        """Fetch what the object store has and this node lacks; return whether it had anything.

        None: it was interrupted.
        """
        fact = self._roles.of(self._name)
        with (
            self._unless_told_else(lambda: fact) as ended,
            contextlib.closing(store_of(self._home, self._name)) as store,
        ):
            self._told = {"phase": "filling"}
            tell = partial(logger.info, "takes from the object store", stream=self._name)
            found = fill(self._home, self._name, store, stop=ended.is_set, tell=lambda what: tell(how_far=what))
            return None if ended.is_set() else found is not None

    @contextlib.contextmanager
    def _unless_told_else(self, fact: Callable[[], RoleFact]) -> Iterator[threading.Event]:
        """Yield an event that is set once this node is to stop, promises more than the fact has, or is promoted."""

        def look() -> bool:
            try:
                now = self._roles.of(self._name)
            except RoleUnreadable:
                return False
            stays = now.role is Role.FOLLOWS and now.promise <= fact().promise
            return stays and not holder(self._home.run_folder, "promote")

        with watching(f"follow-watch-{self._name}", LOOK_EVERY_S, look, stop=self._stop) as ended:
            yield ended


def _in_our_tree(error: MillstreamError | OSError, home: Home) -> MillstreamError:
    """Return our error for a role or document that couldn't be made durable: it is retried.

    It stops no other stream.
    """
    if isinstance(error, MillstreamError):
        return error
    if error.errno in NO_SPACE:
        return DiskFull(f"{home.data} has no space: {error}", hint="Free space; this node then continues.")
    return ReplicationError(f"the disk under {home.data} failed: {error}", code="replica_failed")


def make_follower(home: Home, name: str, fact: RoleFact, *, notes: FollowerState, only: NodeName) -> WalFollower:
    """Make a follower of a stream that takes from one node only. Raises as `WalFollower`."""
    return _follower_of(home, replace(own_copy(name), only=only), fact, notes)


def _follower_of(home: Home, copy: FollowedLog, fact: RoleFact, notes: FollowerState) -> WalFollower:
    return WalFollower(
        copy.log,
        str(home.wal_folder(copy.log)),
        copy.follower or this_node(home),
        fact,
        _Connecting(home, copy.stream, copy.only).connect,
        notes,
        documents=notes.versions(),
        home=instance_of(home),
    )


class _Connecting:
    """A link to the leader: to the node that led last, or to one that reports that it leads."""

    def __init__(self, home: Home, stream: str, only: NodeName | None) -> None:
        self._home = home
        self._stream = stream
        self._only = only

    def connect(self, leader: NodeName, hello: Hello, timeout_s: float) -> tuple[NodeName, LeaderLink]:
        """Connect; see `WalFollower`."""
        if self._only is not None:
            return self._only, self._link(self._only, hello, timeout_s)
        try:
            return leader, self._link(leader, hello, timeout_s)
        except MillstreamError:
            other = self._who_leads(leader, hello)
            if other is None:
                raise
        return other, self._link(other, hello, timeout_s)

    def _link(self, node: NodeName, hello: Hello, timeout_s: float) -> LeaderLink:
        address = address_of(self._home, node)
        try:
            return FlightTransport(self._stream, address).connect(hello, timeout_s)
        except MillstreamError as error:
            told = told_by(address, node, error)
            if told is error:
                raise
            raise told from error

    def _who_leads(self, but: NodeName, hello: Hello) -> NodeName | None:
        found: list[NodeState] = []
        for node in sorted(self._home.config.replication.nodes):
            if node not in (but, hello.node):
                with contextlib.suppress(MillstreamError):
                    found.append(state_of_node(self._home, node, self._stream, timeout_s=2.0))
        leads = [
            one
            for one in found
            if one.fact.role is Role.LEADS and one.fact.promise >= (hello.promised, hello.promised_to)
        ]
        return max(leads, key=lambda one: one.fact.promise).node if leads else None


def start_anew(home: Home, stream: str) -> Path | None:
    """Set this node's copy of a stream aside, so that it is rebuilt; return its new folder, None without a copy.

    Raises:
        HomeBusy: another process follows or writes here.
        ReplicationError: this node leads the stream.
    """
    if Roles(home).of(stream).role is not Role.FOLLOWS:
        raise ReplicationError(f"this node doesn't follow anybody in stream {stream}", hint="`millstream follow NODE`.")
    home.prepare()
    with RoleLock.take(home.run_folder, "follow"), nobody_writes(home.run_folder):
        folder = home.wal_folder(stream)
        if not folder.is_dir():
            return None
        aside = replication_folder(home, stream) / f"replaced-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        folder.rename(aside)
        return aside
