"""Ships what this home leads: part of `serve`, which has the Flight server that followers connect to.

Each stream has a thread that acts by the stream's role. If this node leads, it ships to all nodes. If it
was fenced, it ships what it has to the node that it has promised to, so that nothing durable here is
lost. If it follows, it names its leader, but ships what it has to a candidate that it has promised to:
the candidate may have less.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.errors import FollowerBehindRetention, MillstreamError, UnknownStream
from millstream.leadership.known_leaders import note_leaders
from millstream.leadership.node_roles import LOOK_EVERY_S, Roles, replication_folder
from millstream.leadership.promotion_check import OtherStreams, hearing_of_promotions
from millstream.model.durations import duration_s
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.model.replication import Document, NodeName, ReplicaPosition, follower_holder, region_node
from millstream.nodes.catalog_document import CatalogDocument
from millstream.nodes.consumers_document import ConsumersDocuments
from millstream.nodes.follower_state import FollowerState
from millstream.nodes.level_document import Terms
from millstream.private_files import make_folder
from millstream.protocol.replication.ack_levels import Holdings
from millstream.protocol.replication.leader_events import Heard
from millstream.protocol.replication.leader_machine import LinkPhase
from millstream.protocol.replication.node_promises import CONSUMERS_KEY, SESSIONS, Promise, Role, RoleFact
from millstream.protocol.retention import HolderKind
from millstream.replication.archiver import WalArchiver
from millstream.replication.flight.transport import FlightTransport
from millstream.replication.flight.wire import FollowRequest
from millstream.replication.shipper import WalShipper
from millstream.wal.files import RealFiles
from millstream.wal.layout import SESSIONS_NAME
from millstream.wal.replica.acks import AcksFile
from millstream.workers import Worker
from millstream.writers.stream_writer import resolve_stream

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.ship")

_AGAIN_S: Final = 2.0


class Shipping:
    """A home's shippers, one per stream, while `serve` runs. Made if the home names itself a node.

    Concurrency: any number of threads.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._within_s = duration_s(home.config.replication.ship_timeout)
        self._ending = threading.Event()
        self._hearing = contextlib.ExitStack()
        self._other_streams: Mapping[str, OtherStreams] = {}
        self._streams = {name: _StreamShipping(home, name, self._ending) for name in home.config.streams}

    def start(self) -> None:
        """Begin to ship, and to ask whether another node was promoted.

        A node that was cut off isn't notified, and perhaps no other process here asks.
        """
        self._other_streams = self._hearing.enter_context(hearing_of_promotions(self._home))
        for stream in self._streams.values():
            stream.worker.start()

    def end(self) -> None:
        """Ship what is durable now, within the configured time; then end."""
        self._ending.set()
        self._hearing.close()
        for stream in self._streams.values():
            stream.worker.join(self._within_s + 10)
            stream.transport.close()

    def facts(self) -> dict[str, Any]:
        """Return the known facts about other nodes by stream, JSON-able."""
        return {
            name: stream.facts()
            | {"other_streams": {node: its.as_dict() for node, its in self._other_streams.get(name, {}).items()}}
            for name, stream in self._streams.items()
        }

    def serve_exchange(
        self, request: FollowRequest, reader: Any, writer: Any, *, cut: Callable[[], object], check: Callable[[], None]
    ) -> None:
        """Serve a follower in Flight's `do_exchange`: see `FlightTransport.serve_exchange`.

        Raises:
            UnknownStream: there is none of that name.
            ReadOnly: this node follows another one, which the details name.
        """
        stream = self._streams.get(request.stream)
        if stream is None:
            raise UnknownStream(
                f"no stream {request.stream} here", hint=f"Streams: {', '.join(sorted(self._streams)) or 'none'}."
            )
        fact = Roles(self._home).of(request.stream)
        if fact.role is Role.FOLLOWS:
            hello = request.hello
            if Promise(hello.promised, hello.promised_to) != fact.promise or hello.node != fact.promise.node:
                Roles(self._home).check_leads(request.stream)
            stream.candidate_came.set()
        stream.transport.serve_exchange(request, reader, writer, cut=cut, check=check)


class _StreamShipping:
    """The shipping of one stream, by its role as that changes."""

    def __init__(self, home: Home, name: str, ending: threading.Event) -> None:
        self._home = home
        self._name = name
        self._ending = ending
        self._roles = Roles(home)
        self.transport: Final = FlightTransport(name)
        self.worker: Final = Worker(f"shipping-{name}", self._run)
        self.candidate_came: Final = threading.Event()
        """Set on a following node when a candidate for leader wants its log."""
        self._shipper: WalShipper | None = None
        self._archiver: WalArchiver | None = None

    def facts(self) -> dict[str, Any]:
        shipper, archiver = self._shipper, self._archiver
        return {
            "followers": [] if shipper is None else shipper.facts(),
            "object_store": None if archiver is None else archiver.facts(),
        }

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                fact = self._roles.of(self._name)
                # Without a log there is nothing to ship, and no stream needs to be created: this node may
                # still follow.
                is_wanted = fact.role is not Role.FOLLOWS or self.candidate_came.is_set()
                if is_wanted and self._home.wal_folder(self._name).is_dir():
                    self._ship(fact)
            except MillstreamError as error:
                logger.warning("can't ship", stream=self._name, error=error.message, code=error.code, in_s=_AGAIN_S)
                self._ending.wait(_AGAIN_S)
            except Exception:
                logger.exception("shipping fails", stream=self._name)
                self._ending.wait(_AGAIN_S)
            self._ending.wait(LOOK_EVERY_S)

    def _ship(self, fact: RoleFact) -> None:
        """Ship under a role until that changes, or until this process is to end."""
        replication = self._home.config.replication
        others = frozenset(NodeName(node) for node in replication.nodes if node != replication.node)
        only = None if fact.role is Role.LEADS else fact.promise.node
        with contextlib.ExitStack() as stack:
            catalog = stack.enter_context(self._home.open_catalog())
            stream = resolve_stream(self._home, catalog, self._name)
            note_leaders(self._home, self._name, catalog)
            notes = stack.enter_context(contextlib.closing(_Notes(self._home, self._name, catalog, stream, fact)))
            of_role = _Kept if fact.role is Role.FOLLOWS else _Documents
            documents: _Documents | _Kept = of_role(self._home, self._name)
            stack.callback(documents.close)
            shipper = WalShipper(
                self._name,
                str(self._home.wal_folder(self._name)),
                fact,
                others,
                self.transport,
                notes,
                documents=documents.now,
                only=only,
                observers=frozenset(region_node(region) for region in replication.region_addresses),
            )
            self._shipper = shipper
            try:
                shipper.start()
                if replication.object_store is not None and only is None:
                    self._archiver = stack.enter_context(self._archiving(fact, shipper, documents))
                while not self._ending.wait(LOOK_EVERY_S) and not shipper.ended.is_set():
                    if self._roles.of(self._name) != shipper.fact:
                        shipper.hear(Heard(self._roles.of(self._name).promise))
                    if fact.role is Role.FOLLOWS and self._is_left(shipper):
                        break
            finally:
                within_s = duration_s(replication.ship_timeout) if self._ending.is_set() else 0.0
                lacking = shipper.stop(within_s)
                self._shipper, self._archiver = None, None
                if lacking and within_s:
                    logger.warning(
                        "ends before all followers have everything", stream=self._name, lacking=list(lacking)
                    )
        if shipper.failure is not None:
            raise shipper.failure

    def _is_left(self, shipper: WalShipper) -> bool:
        """Return whether the candidate has come and gone; it may come again."""
        followers = shipper.facts()
        if not followers or any(one["phase"] != LinkPhase.APART for one in followers):
            return False
        self.candidate_came.clear()
        return True

    @contextlib.contextmanager
    def _archiving(self, fact: RoleFact, shipper: WalShipper, documents: _Documents | _Kept) -> Iterator[WalArchiver]:
        """Ship to the object store during the block."""
        from millstream.nodes.object_stores import lineage_document, store_of

        archiver = WalArchiver(
            self._name,
            str(self._home.wal_folder(self._name)),
            fact.promise,
            lambda: store_of(self._home, self._name),
            shipper.hear,
            lineage_document(fact),
            documents=lambda: tuple(one for one in documents.now() if one.name != CONSUMERS_KEY),
        )
        archiver.start()
        try:
            yield archiver
        finally:
            archiver.stop(duration_s(self._home.config.replication.ship_timeout))


class _Documents:
    """The documents shipped with a stream's log. Any thread."""

    def __init__(self, home: Home, name: str) -> None:
        self._lock = threading.Lock()
        self._catalog = CatalogDocument(home)
        self._sessions = SessionDocument(home.wal_folder(name))
        self._consumers = ConsumersDocuments(home.delivery_folder(name))
        self._level = Terms.configured(home, name).document()

    def now(self) -> tuple[Document, ...]:
        with self._lock:
            found = self._level, self._catalog.newest(), self._sessions.newest(), *self._consumers.newest()
            return tuple(one for one in found if one is not None)

    def close(self) -> None:
        with self._lock:
            self._catalog.close()


class _Kept:
    """The documents shipped from a follower: its leader's. This home's own catalog lacks what the log needs."""

    def __init__(self, home: Home, name: str) -> None:
        notes = FollowerState(home, name)
        kept = [(one, version, notes.document(one)) for one, version in notes.versions().items()]
        self._documents = tuple(Document(one, version, data) for one, version, data in kept if data is not None)

    def now(self) -> tuple[Document, ...]:
        return self._documents

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class _Notes:
    """See `ShipperNotes`."""

    def __init__(self, home: Home, name: str, catalog: Catalog, stream: StreamId, fact: RoleFact) -> None:
        self._roles = Roles(home)
        self._name = name
        self._catalog = catalog
        self._stream = stream
        make_folder(replication_folder(home, name))
        self._acks = AcksFile(RealFiles(), str(home.acks_file(name)), stream, fact.promise.epoch)

    def role(self, fact: RoleFact) -> None:
        with self._roles.changing(self._name) as changing:
            if fact.promise > changing.fact.promise:
                changing.put(fact)

    def cursor(self, node: NodeName, needed_from: Seq, position: ReplicaPosition, *, anew: bool) -> None:
        if anew:  # it may have been cut off, or have held less
            self._catalog.release(self._stream, follower_holder(node))
        try:
            self._hold(node, needed_from, position)
        except FollowerBehindRetention:
            # It has the missing records by now, from here or from elsewhere: otherwise the read would
            # have failed.
            self._catalog.release(self._stream, follower_holder(node))
            self._hold(node, needed_from, position)

    def _hold(self, node: NodeName, needed_from: Seq, position: ReplicaPosition) -> None:
        self._catalog.set_needed_from(
            self._stream, follower_holder(node), needed_from, kind=HolderKind.FOLLOWER, position=position or None
        )

    def acks(self, holdings: Holdings, now_ns: int) -> None:
        self._acks.take_over(holdings, now_ns)

    def close(self) -> None:
        self._acks.close()


class SessionDocument:
    """The writer's current `sessions.state`, shipped with the log: facts of sessions that retention has dropped from it.

    Not for sharing between threads.
    """

    def __init__(self, wal_folder: Path) -> None:
        self._file = wal_folder / SESSIONS_NAME
        self._newest: Document | None = None

    def newest(self) -> Document | None:
        """Return the current document; None if there is none."""
        try:
            version = self._file.stat().st_mtime_ns
            if self._newest is None or self._newest.version != version:
                # If it was replaced in between, it is newer than the version claims, and comes again.
                self._newest = Document(SESSIONS, version, self._file.read_bytes())
        except FileNotFoundError:
            return self._newest
        return self._newest
