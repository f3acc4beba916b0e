"""Ships one stream's log to its followers: performs what `protocol.replication.Leader` decides.

One thread steps the machine and stores durable state. Each follower's link has a thread that reads
and sends, and one that receives. So a slow disk of one follower, or a follower that hangs, delays
no other. The log is read as any reader reads it: its writer may be another process, and may be
gone.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import structlog

from millstream.backoff import Backoff
from millstream.errors import LinkLost, LogError, MillstreamError
from millstream.model.ids import GroupNumber, ShardId, StreamId
from millstream.model.marks import DurableMark
from millstream.model.positions import Seq
from millstream.model.replication import Acknowledgement, Document, Hello, NodeName, ReplicaPosition, Shipment
from millstream.ports import Clock, Files, FollowerLink, Transport
from millstream.protocol.replication import leader_events as events
from millstream.protocol.replication.ack_levels import Holdings
from millstream.protocol.replication.leader_machine import FollowerProgress, Leader, LinkPhase
from millstream.protocol.replication.node_promises import LINEAGE, Greeting, RoleFact
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.replica.ship_source import LogMarks, ShipSource, durable_marks
from millstream.workers import Worker

logger = structlog.get_logger("millstream.ship")

_TICK_S: Final = 0.1
_HEARS_FOR_S: Final = 0.5
"""Seconds that a link's thread waits for messages before it checks whether the link has ended."""
_ENDS_WITHIN_S: Final = 5.0


class ShipperNotes(Protocol):
    """State that the shipper makes durable, or publishes to other processes.

    Called from one thread; an error ends the shipper.
    """

    def role(self, fact: RoleFact) -> None:
        """Store durably which node leads."""

    def cursor(self, node: NodeName, needed_from: Seq, position: ReplicaPosition, *, anew: bool) -> None:
        """Store durably where retention must keep the log for a follower from, by number and per shard.

        `anew`: the follower has less than before.
        """

    def acks(self, holdings: Holdings, now_ns: int) -> None:
        """Publish what each place holds at a moment of the clock, for callers that wait for a level.

        A place whose holding is unchanged keeps its time.
        """


class WalShipper:
    """The shipper of one stream; it runs from `start` until `stop`, or until another node leads.

    Args:
        folder: its log's. It may still be empty.
        documents: returns the current documents to ship; called now and then, from one thread.
        only, observers: as `Leader`'s.
    """

    def __init__(
        self,
        name: str,
        folder: str,
        fact: RoleFact,
        nodes: frozenset[NodeName],
        transport: Transport,
        notes: ShipperNotes,
        *,
        documents: Callable[[], tuple[Document, ...]] = tuple,
        only: NodeName | None = None,
        observers: frozenset[NodeName] = frozenset(),
    ) -> None:
        self._name = name
        self._folder = folder
        self._fact = fact
        self._nodes = nodes
        self._transport = transport
        self._notes = notes
        self._documents = documents
        self._only = only
        self._observers = observers
        self._files = RealFiles()
        self._clock = SystemClock()
        self._events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._links: dict[events.LinkId, _Link] = {}
        self._next_link = 0
        self._ending = threading.Event()
        self._leader: Leader | None = None
        self._newest_documents: tuple[Document, ...] = ()
        self._workers: list[Worker] = []
        self._world = _World(
            folder, self._files, self._clock, self._events.put, self._fact_now, self._newer_documents, self._counts
        )
        self.failure: Exception | None = None
        """Reason why it ended without `stop`: a Millstream error, or a bug."""
        self.ended: Final = threading.Event()
        self.lacking: tuple[NodeName, ...] = ()
        """After `stop`: the followers that lack something."""

    def start(self) -> None:
        """Start, once there is a log."""
        for name, run in (("ship", self._run), ("ship-watch", self._watch), ("ship-accept", self._accept)):
            self._workers.append(Worker(f"{name}-{self._name}", run).start())

    def stop(self, within_s: float) -> tuple[NodeName, ...]:
        """Ship what is durable now, for at most `within_s`; then end. Returns the followers that lack some of it."""
        self._events.put(events.Stopping(time.monotonic() + within_s))
        if self._workers:
            self.ended.wait(within_s + _ENDS_WITHIN_S)
        self._end()
        for worker in self._workers:
            worker.join(_ENDS_WITHIN_S)
        return self.lacking

    def hear(self, event: events.StoredUpto | events.Heard) -> None:
        """Take an event from elsewhere. Any thread."""
        self._events.put(event)

    @property
    def fact(self) -> RoleFact:
        """State that this node has stored, as the shipper last saw it. Any thread."""
        return self._fact_now()

    def facts(self) -> list[dict[str, object]]:
        """Return the state of each follower, JSON-able. Any thread."""
        leader = self._leader
        if leader is None:
            return []
        marks = leader.marks
        return [self._facts_of(one, marks) for _, one in sorted(dict(leader.followers).items())]

    def _facts_of(self, follower: FollowerProgress, marks: Mapping[ShardId, DurableMark]) -> dict[str, object]:
        acked = follower.acked
        records: int | None = None
        size: int | None = None
        # A follower that hangs acknowledges nothing: what it lacks is counted up to this log's end, not to the end that it
        # acknowledged last.
        if acked is not None:
            with contextlib.suppress(LogError, OSError):
                source = ShipSource(self._folder, files=self._files, clock=self._clock)
                size = source.bytes_behind(acked.position, marks)
                records = max(0, stream_cut(marks.values()) - acked.persisted_upto)
        is_silent = follower.phase is LinkPhase.APART or bool(records)
        silent_s = max(0.0, time.monotonic() - follower.heard_at) if is_silent else 0.0
        return {
            "node": follower.node,
            "phase": follower.phase.value,
            "counts": self._counts(follower.node),
            "group": None if acked is None else int(acked.group),
            "persisted_upto": None if acked is None else int(acked.persisted_upto),
            "records_behind": records,
            "bytes_behind": size,
            "lag_s": None if acked is None or acked.lag_s < 0 else round(acked.lag_s + silent_s, 3),
            "acknowledged_s": None if acked is None else acked.applied_ns / 1e9,
            "cut_off": None if follower.cut_off is None else follower.cut_off.as_dict(),
        }

    # --- the thread that decides ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            stream = self._wait_for_stream()
            if stream is None:
                return
            self._leader = leader = Leader(stream, self._fact, self._nodes, only=self._only, observers=self._observers)
            while not leader.is_stopped and not leader.is_fenced and not self._ending.is_set():
                try:
                    event = self._events.get(timeout=_TICK_S)
                except queue.Empty:
                    event = events.Tick()
                self._carry_out(leader.step(event, time.monotonic()))
                if isinstance(event, events.LinkGone):
                    self._carry_out([events.DropLink(event.link, None)])
        except Exception as error:
            self.failure = error
            if not isinstance(error, MillstreamError):
                logger.exception("the shipper fails", stream=self._name)
        finally:
            self._end()
            self.ended.set()

    def _wait_for_stream(self) -> StreamId | None:
        while not self._ending.is_set():
            with contextlib.suppress(LogError, FileNotFoundError):
                for mark in durable_marks(self._files, self._folder).values():
                    return mark.stream
            try:
                event = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if isinstance(event, events.Stopping):
                return None
            self._events.put(event)
            self._ending.wait(_TICK_S)
        return None

    def _carry_out(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.PersistRole(fact):
                    self._notes.role(fact)
                case events.PersistCursor(node, needed_from, position, anew):
                    self._notes.cursor(node, needed_from, position, anew=anew)
                case events.PersistAcks(holdings):
                    self._notes.acks(holdings, self._clock.now_ns())
                case events.Greet(link) | events.ReadAndSend(link):
                    if link in self._links:
                        self._links[link].jobs.put(effect)
                case events.DropLink(link, why):
                    found = self._links.pop(link, None)
                    if found is not None:
                        found.drop(why)
                case events.Tell(node, what, error):
                    say = logger.info if error is None else logger.warning
                    told = {} if error is None else {"error": error.message, "code": error.code, "hint": error.hint}
                    text = f"follower {node} {what}"
                    say(text, stream=self._name, **told)
                case events.Stopped(lacking):
                    self.lacking = lacking

    def _end(self) -> None:
        self._ending.set()
        for link in list(self._links.values()):
            link.drop(None)
        self._links.clear()

    # --- incoming events -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                came = self._transport.accept(_HEARS_FOR_S)
            except MillstreamError as error:
                logger.warning("followers can't come", stream=self._name, error=error.message, code=error.code)
                self._ending.wait(1.0)
                continue
            if came is not None:
                self._next_link += 1
                number = events.LinkId(self._next_link)
                link = _Link(self._world, number, came)
                self._links[number] = link
                self._events.put(events.Joined(number, came.hello))
                try:
                    link.start()
                except OSError as error:
                    logger.warning("a follower can't be served", stream=self._name, error=str(error))
                    self._events.put(events.LinkGone(number))
                    self._ending.wait(1.0)
                if self._ending.is_set():
                    link.drop(None)  # it came while all were dropped

    def _watch(self) -> None:
        """Notify the machine of marks and documents when they have changed."""
        source = ShipSource(self._folder, files=self._files, clock=self._clock)
        told: events.Durable | None = None
        pause = Backoff(*_WATCH_S, jitter=0)
        while not self._ending.is_set():
            try:
                self._newest_documents = self._documents()
                found = source.now()
                versions = {one.name: one.version for one in self._newest_documents}
                now = events.Durable(found.durable, versions, found.shown)
            except FileNotFoundError:
                self._ending.wait(_TICK_S)
                continue
            except (MillstreamError, OSError) as error:
                logger.warning("the log can't be read", stream=self._name, error=str(error))
                self._ending.wait(1.0)
                continue
            if now == told or not now.marks:
                pause.wait(self._ending)
                continue
            self._events.put(now)
            told = now
            pause.reset()

    def _newer_documents(self, than: Mapping[str, int]) -> tuple[Document, ...]:
        """Return the documents that a node with these versions lacks."""
        return tuple(one for one in self._newest_documents if one.version != than.get(one.name))

    def _counts(self, node: NodeName) -> bool:
        """Return whether a follower's acknowledgements count for levels."""
        return self._only is None and node in self._nodes and node not in self._observers

    def _fact_now(self) -> RoleFact:
        return self._fact if self._leader is None else self._leader.fact


_WATCH_S: Final = (0.0005, 0.01)
"""Shortest and longest pause in seconds between reads of the marks; it doubles each time nothing has moved."""


@dataclass(frozen=True, slots=True)
class _World:
    """The shipper's facilities that links use."""

    folder: str
    files: Files
    clock: Clock
    tell: Callable[[events.Event], None]
    fact: Callable[[], RoleFact]
    newer_documents: Callable[[Mapping[str, int]], tuple[Document, ...]]
    counts: Callable[[NodeName], bool]


class _Link:
    """One follower's link: two threads."""

    def __init__(self, world: _World, number: events.LinkId, link: FollowerLink) -> None:
        self._world = world
        self._number = number
        self._link = link
        self._source = ShipSource(world.folder, files=world.files, clock=world.clock)
        self._position: ReplicaPosition = link.hello.position
        self._asked_anew = threading.Event()
        self._dropped = threading.Event()
        self.jobs: Final[queue.SimpleQueue[events.Greet | events.ReadAndSend | None]] = queue.SimpleQueue()

    def start(self) -> None:
        """Start both threads."""
        for name, run in (("hear", self._hear), ("send", self._send)):
            Worker(f"ship-{name}-{self._link.hello.node}", run).start()

    def drop(self, why: MillstreamError | None) -> None:
        """Break the link, with the reason."""
        self._dropped.set()
        self.jobs.put(None)
        try:
            # It may wait for a follower that hangs.
            Worker("ship-part", partial(self._part, why)).start()
        except OSError:
            self._link.close()

    def _part(self, why: MillstreamError | None) -> None:
        if why is not None:
            self._link.refuse(why)
        self._link.close()

    def _hear(self) -> None:
        tell = self._world.tell
        try:
            while not self._dropped.is_set():
                message = self._link.recv(_HEARS_FOR_S)
                if isinstance(message, Hello):
                    self._position = message.position
                    self._asked_anew.set()
                    tell(events.Rejoined(self._number, message))
                elif isinstance(message, Acknowledgement):
                    tell(events.Acked(self._number, message))
        except MillstreamError as error:
            if not self._dropped.is_set():
                tell(events.LinkGone(self._number, None if isinstance(error, LinkLost) else error))

    def _send(self) -> None:
        tell = self._world.tell
        while (job := self.jobs.get()) is not None:
            try:
                shipment, position, is_all = self._made(job)
            except (MillstreamError, OSError) as error:
                told = error if isinstance(error, MillstreamError) else LogError(f"the log can't be read: {error}")
                tell(events.ReadFailed(self._number, told, random.random()))  # noqa: S311 - no secret
                continue
            try:
                self._link.send(shipment)
            except MillstreamError as error:
                tell(events.LinkGone(self._number, None if isinstance(error, LinkLost) else error))
                return
            tell(events.Sent(self._number, position, shipment.size_bytes, is_all))

    def _made(self, job: events.Greet | events.ReadAndSend) -> tuple[Shipment, ReplicaPosition, bool]:
        """Return the next shipment, the follower's position after it, and whether that is everything."""
        world, source, fact = self._world, self._source, self._world.fact()
        documents = world.newer_documents(job.documents)
        now = source.now()
        found: Shipment | None = None
        if isinstance(job, events.Greet):
            position, is_all = self._position, False
            group = max((mark.group for mark in now.durable.values()), default=GroupNumber(0))
            greeting = Document(
                LINEAGE, fact.promise.epoch, Greeting(fact.lineage_of_log(group), group, fact.claimant).to_json()
            )
            documents = (greeting, *documents)
        else:
            if self._asked_anew.is_set():
                self._asked_anew.clear()
                source.restart()
            found = source.read(job.after, job.bytes_max)
            position = source.position_after(job.after)
            is_all = found is None or _is_of_now(found, now)
        if found is None:
            stream = next(mark.stream for mark in now.durable.values())
            found = Shipment(stream, source.region(), fact.promise.epoch)
        shipment = replace(
            found,
            epoch=fact.promise.epoch,
            leader=fact.promise.node,
            documents=documents,
            leader_end=source.leader_end(),
            bytes_left=source.bytes_behind(position, now.durable),
            by_one=found.by_one and world.counts(self._link.hello.node),
            sent_ns=world.clock.now_ns(),
        )
        return shipment, position, is_all


def _is_of_now(shipment: Shipment, now: LogMarks) -> bool:
    """Return whether a shipment's marks cover at least the current ones."""
    if bool(shipment.shown) != bool(now.shown):
        return False
    return _covers(shipment.marks, now.durable) and (not now.shown or _covers(shipment.shown or {}, now.shown))


def _covers(marks: Mapping[ShardId, DurableMark], now: Mapping[ShardId, DurableMark]) -> bool:
    return bool(marks) and all(
        shard in marks
        and (marks[shard].base_offset, marks[shard].byte_end, marks[shard].persisted_upto, marks[shard].group)
        >= (mark.base_offset, mark.byte_end, mark.persisted_upto, mark.group)
        for shard, mark in now.items()
    )
