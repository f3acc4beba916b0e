"""Follows a leader in one stream: performs what `protocol.replication.Follower` decides, on a log of this node's own.

One thread receives from the leader, writes, syncs and answers. The position is the log itself, so
nothing has to be kept in step with it.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import structlog

from millstream.errors import AccessError, Diverged, LogError, MillstreamError
from millstream.model.ids import GroupNumber
from millstream.model.positions import Seq
from millstream.model.replication import Acknowledgement, Document, Hello, NodeName
from millstream.ports import LeaderLink
from millstream.process_metrics import REPLICA_APPLY_SECONDS
from millstream.protocol.replication import follower_machine as following
from millstream.protocol.replication.leader_events import PersistRole, Tell
from millstream.protocol.replication.node_promises import RoleFact
from millstream.replication.joined_link import JoinedLink
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.replica.replica_log import ReplicaLog

logger = structlog.get_logger("millstream.follow")

_HEARS_FOR_S: Final = 0.1
"""Seconds that it waits for the leader's next message before it handles other requests."""
_CONNECTS_WITHIN_S: Final = 5.0


class FollowerNotes(Protocol):
    """Durable state of a follower apart from the log. Called from its one thread; an error ends the follower."""

    def role(self, fact: RoleFact) -> None:
        """Store durably which node it has promised what."""

    def check_promise(self, fact: RoleFact) -> None:
        """Return if no node was promised more than that.

        Called after something was made durable, before it is reported or shown.

        Raises:
            Fenced: another process of this node has given a higher promise. That process has
                reported what was durable before its promise.
        """

    def documents(self, documents: tuple[Document, ...]) -> None:
        """Store the documents durably, in place of the older ones."""

    def set_aside(self, behind: GroupNumber) -> None:
        """Durably move what lies after a group out of the log, and keep it for people.

        The log is closed during the call.
        """

    def lag(self, lag: following.Lag) -> None:
        """Publish the lag for readers in other processes, now and then."""

    def let_go(self, leader_dropped: Seq) -> None:
        """Drop what the leader's retention has dropped, up to that number.

        Called repeatedly, while the log is open and idle.

        Raises:
            MillstreamError, OSError: nothing, or less, is dropped this time.
        """


class WalFollower:
    """A follower of one stream, on a log of its own.

    Args:
        connect: returns a link to the named leader, or to the current one, with the latter's name.
            Raises `LinkLost` or the leader's error.
        home: identity of this home among homes of that node name.

    Raises (from making it):
        ShardLocked, CorruptWal, LogError (`unexpected_file`), DiskFull …: as `ReplicaLog.open`.
    """

    def __init__(
        self,
        name: str,
        folder: str,
        node: NodeName,
        fact: RoleFact,
        connect: Callable[[NodeName, Hello, float], tuple[NodeName, LeaderLink]],
        notes: FollowerNotes,
        *,
        documents: Mapping[str, int] | None = None,
        home: str = "",
    ) -> None:
        self._name = name
        self._connect = connect
        self._notes = notes
        self._clock = SystemClock()
        self._folder = folder
        self._files = RealFiles()
        self._log = self._open_log()
        self._machine = following.Follower(node, fact, self._log.stream, self._holding(), documents, home=home)
        self._link: LeaderLink | None = None
        self._leader: NodeName | None = None
        self._lag_told_s = 0.0
        self._leader_dropped = Seq(0)
        self._apart_since_s = 0.0
        self._told: tuple[str, ...] | None = ()
        """Last reported trouble, which isn't repeated with each try; None once it follows."""

    # --- queries, from any thread -----------------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        """Return the current state, JSON-able."""
        machine = self._machine
        lag, error = machine.lag(time.monotonic()), machine.stopped_by or machine.trouble
        return {
            "phase": machine.phase.value,
            "leader": machine.fact.leader or None,
            "promised": int(machine.fact.promise.epoch),
            "group": int(machine.holding.group),
            "persisted_upto": int(machine.holding.persisted_upto),
            "records_behind": lag.records if machine.has_heard else None,
            "bytes_behind": lag.size_bytes if machine.has_heard else None,
            "lag_s": None if lag.age_s == float("inf") else round(lag.age_s, 3),
            "leader_clock_off_s": round(machine.clock_off_s, 3),
            "error": None if error is None else error.as_dict(),
        }

    @property
    def fact(self) -> RoleFact:
        """The stored state."""
        return self._machine.fact

    @property
    def group(self) -> GroupNumber:
        """Last group that its log has whole."""
        return self._machine.holding.group

    def lag(self) -> following.Lag:
        """Return the current lag."""
        return self._machine.lag(time.monotonic())

    # --- the one thread ------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, *, until_caught_up: bool = False) -> None:
        """Follow until `stop` is set; or, with `until_caught_up`, until everything that the leader has is here.

        Raises:
            Diverged, ReplicationError (`other_stream`), FollowerBehindRetention: a person has to intervene.
            AccessError, LinkLost …: with `until_caught_up`, if the leader refuses this node, or
                can't be reached for a minute.
            ReplicationError (`replica_failed`): the disk failed.
            CatalogError, OSError …: durable state couldn't be stored.
        """
        self._apart_since_s = time.monotonic()
        try:
            while not stop.is_set():
                self._step(following.Tick())
                if until_caught_up:
                    self._give_up_in_time()
                if self._machine.stopped_by is not None:
                    raise self._machine.stopped_by
                if self._log.failure is not None:
                    raise self._log.failure
                self._tell_lag()
                if self._link is None:
                    stop.wait(_HEARS_FOR_S / 2)
                    continue
                self._hear(self._link)
                self._let_go()
                if until_caught_up and self._machine.has_all:
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Break the link, and release the log's locks."""
        self._break_link()
        self._log.close()

    def _give_up_in_time(self) -> None:
        """End a job with the error if waiting doesn't help: it would run for ever, unnoticed."""
        trouble = self._machine.trouble
        if trouble is None:
            self._apart_since_s = time.monotonic()
        elif isinstance(trouble, AccessError) or time.monotonic() - self._apart_since_s > _GIVES_UP_AFTER_S:
            raise trouble

    def _open_log(self) -> ReplicaLog:
        return ReplicaLog.open(self._folder, files=self._files, clock=self._clock)

    def _hear(self, link: LeaderLink) -> None:
        try:
            shipment = link.recv(_HEARS_FOR_S)
        except MillstreamError as error:
            self._break_link()
            self._step(following.LinkGone(error, random.random()))  # noqa: S311 - no secret
            return
        if shipment is not None:
            if self._told is not None:
                self._told = None
                logger.info("follows", stream=self._name, leader=self._leader)
            self._step(following.Received(shipment, self._clock.now_ns()))

    def _step(self, event: following.Event) -> None:
        """Process one event, and the events that follow from it at once."""
        events: list[following.Event] = [event]
        while events:
            for effect in self._machine.step(events.pop(0), time.monotonic()):
                found = self._carry_out(effect)
                if found is not None:
                    events.append(found)
                    if isinstance(found, following.LinkGone):
                        break

    def _carry_out(self, effect: following.Effect) -> following.Event | None:
        match effect:
            case following.Connect(leader):
                self._leader = leader
                return following.Connected()
            case following.Say(message):
                if isinstance(message, Acknowledgement):
                    self._notes.check_promise(self._machine.fact)
                return self._say(message)
            case following.Apply(shipment):
                began_ns = self._clock.monotonic_ns()
                try:
                    self._log.apply(shipment)
                except MillstreamError as error:
                    return following.ApplyFailed(error, random.random())  # noqa: S311 - no secret
                took_s = (self._clock.monotonic_ns() - began_ns) / 1e9
                REPLICA_APPLY_SECONDS.of(str(shipment.stream)).observe(took_s)
                self._leader_dropped = max(
                    self._leader_dropped, *(gone.seq for gone in shipment.first_kept.values()), Seq(0)
                )
                return following.Applied(self._holding(), self._clock.now_ns())
            case following.ShowAll():
                self._notes.check_promise(self._machine.fact)
                self._log.show_all()
            case following.SetAside(behind):
                self._log.close()
                self._notes.set_aside(behind)
                self._log = self._open_log()
                return following.WasSetAside(self._holding())
            case PersistRole(fact):
                self._notes.role(fact)
            case following.PersistDocuments(documents):
                self._notes.documents(documents)
            case following.BreakLink():
                self._break_link()
            case following.Stop(error):
                level = logger.error if isinstance(error, Diverged) else logger.warning
                level("follows no more", stream=self._name, error=error.message, code=error.code, hint=error.hint)
            case Tell(_, what, error):
                told = {} if error is None else {"error": error.message, "code": error.code, "hint": error.hint}
                words = (what, *told.values())
                if words != self._told:
                    self._told = words
                    logger.warning(what, stream=self._name, **told)
        return None

    def _say(self, message: object) -> following.Event | None:
        try:
            if self._link is None:
                if not isinstance(message, Hello) or self._leader is None:
                    return None
                leader, link = self._connect(self._leader, message, _CONNECTS_WITHIN_S)
                self._link = JoinedLink(link)
                if leader != self._leader:
                    logger.info("another node leads", stream=self._name, leader=leader)
                    self._leader = leader
                return None
            self._link.send(message)  # type: ignore[arg-type] # a Hello, an Acknowledgement or an error
        except MillstreamError as error:
            self._break_link()
            return following.LinkGone(error, random.random())  # noqa: S311 - no secret
        return None

    def _break_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _holding(self) -> following.OwnHolding:
        end = self._log.end()
        return following.OwnHolding(self._log.position(), end.group, end.persisted_upto)

    def _tell_lag(self) -> None:
        now_s = time.monotonic()
        if now_s - self._lag_told_s >= _LAG_EVERY_S:
            self._lag_told_s = now_s
            with contextlib.suppress(OSError, LogError):
                self._notes.lag(self.lag())

    def _let_go(self) -> None:
        if not self._leader_dropped:
            return
        try:
            self._notes.let_go(self._leader_dropped)
        except (MillstreamError, OSError) as error:
            logger.warning("retention waits", stream=self._name, error=str(error))


_GIVES_UP_AFTER_S: Final = 60.0
"""Seconds that a leader may take to restart, or another one to be promoted."""
_LAG_EVERY_S: Final = 0.2
"""Interval at which the age of what readers see is published: below any bound that a reader sets."""
