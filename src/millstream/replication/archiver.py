"""Ships one stream's log to an object store, as a backup that is never old.

It reports what is stored to the stream's shipper, for writes that are acknowledged once they are in the object store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import structlog

from millstream.backoff import Backoff
from millstream.errors import Fenced, FollowerBehindRetention, LogError, MillstreamError
from millstream.model.ids import Epoch, GroupNumber
from millstream.model.positions import Seq
from millstream.model.replication import Acknowledgement, Document, NodeName, ReplicaPosition
from millstream.ports import FollowerLink
from millstream.protocol.replication.leader_events import Heard, StoredUpto
from millstream.protocol.replication.leader_machine import is_covered
from millstream.protocol.replication.node_promises import LINEAGE, NOBODY, SESSIONS, Greeting, Lineage, Promise
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.replication.object_store.transport import ObjectStoreTransport, StoredState
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.replica.set_aside import ends_behind
from millstream.wal.replica.ship_source import ShipSource
from millstream.wal.writing.session_file import covered_in
from millstream.workers import Worker

logger = structlog.get_logger("millstream.ship")

_ACCEPTS_WITHIN_S: Final = 10.0
_HEARS_FOR_S: Final = 0.02
"""Seconds that it waits for acknowledgements before it looks for more to store: a store takes as long for any object.
"""

_HOLE_HINT: Final = (
    "Name another place in [replication] object_store; the present one keeps its objects, and can be restored from."
)


class WalArchiver:
    """The archiver of one stream, with its own thread from `start` until `stop`.

    Args:
        connect: returns the object store's link; acknowledged shipments are durable there. Called
            from the thread, again if it fails.
        tell: called with what is stored, and with another node's claim.
        lineage: the document with the history of leaders.
    """

    def __init__(
        self,
        name: str,
        folder: str,
        promise: Promise,
        connect: Callable[[], ObjectStoreTransport],
        tell: Callable[[StoredUpto | Heard], None],
        lineage: Document,
        *,
        documents: Callable[[], tuple[Document, ...]] = tuple,
    ) -> None:
        self._name = name
        self._promise = promise
        self._connect = connect
        self._store: ObjectStoreTransport | None = None
        self._tell = tell
        self._lineage = lineage
        self._documents = documents
        self._clock = SystemClock()
        self._folder = folder
        self._files = RealFiles()
        self._source = ShipSource(folder, tells_shown=False)
        self._ending = threading.Event()
        self._backoff = Backoff()
        self.stored_group = GroupNumber(0)
        self._stored_at: ReplicaPosition = {}
        self.error: MillstreamError | None = None
        """Reason why nothing is stored just now."""
        self._worker = Worker(f"archive-{name}", self._run)

    def start(self) -> None:
        """Start, once there is a log."""
        self._worker.start()

    def stop(self, within_s: float) -> None:
        """Stop once everything durable now is stored, or after `within_s` seconds."""
        self._ending.set()
        self._worker.join(within_s)
        if self._store is not None:
            self._store.close()

    def facts(self) -> dict[str, object]:
        """Return the current state, JSON-able."""
        return {"group": int(self.stored_group), "error": None if self.error is None else self.error.as_dict()}

    def _run(self) -> None:
        link: FollowerLink | None = None
        while True:
            try:
                if link is None:
                    if self._store is None:
                        self._store = self._connect()
                    self._store.begin(self._promise.epoch, self._common_end)
                    link = self._store.accept(_ACCEPTS_WITHIN_S)
                if link is not None:
                    self._store_all(link)
            except Exception as error:  # noqa: BLE001 - it is told, and tried again
                # Any error stays here: followers and readers don't depend on the store.
                self.error = _reported(error)
                claimed = _claimed_by(error)
                if claimed > self._promise:
                    self._tell(Heard(claimed))
                    return
                say = logger.warning if isinstance(error, MillstreamError | OSError) else logger.exception
                say(
                    "the object store lacks what is new",
                    stream=self._name,
                    error=self.error.message,
                    code=self.error.code,
                )
                if link is not None:
                    link.close()  # the store accepts no other link before
                    link = None
                if self._backoff.wait(self._ending):
                    return
                continue
            if self._ending.is_set():
                return

    def _common_end(self, stored: StoredState) -> ReplicaPosition | None:
        """Return where this node's log diverges from the stored one; None if it doesn't.

        Raises:
            FollowerBehindRetention: that lies before what this node has kept.
        """
        mine = Greeting.from_json(self._lineage.data).lineage
        group = max((mark.group for mark in stored.marks.values()), default=GroupNumber(0))
        document = stored.documents.get(LINEAGE)
        theirs = (Lineage() if document is None else Greeting.from_json(document).lineage).covered_by(group)
        parts_behind = mine.common_with(theirs)[1]
        if parts_behind is None:
            return None
        ends = ends_behind(self._files, self._folder, parts_behind)
        for shard, end in ends.items():
            if not end.position and end.base_offset:
                raise FollowerBehindRetention(
                    f"the object store has to go on after group {parts_behind}; the log here begins with offset {end.base_offset} of shard {shard}",
                    hint=_HOLE_HINT,
                )
        return ends

    def _store_all(self, link: FollowerLink) -> None:
        """Store until it is to stop and nothing is left, or something fails."""
        claimed = link.hello.promised
        if claimed > self._promise.epoch:
            # The store may hold another log by now, which must not be compared with this one.
            raise Fenced(
                f"another node has claimed the object store of {self._name}: epoch {claimed}, and this is {self._promise.epoch}",
                epoch=int(claimed),
            )
        position = dict(link.hello.position)
        versions = dict(link.hello.documents)
        self._source.restart()
        under_way = 0
        while True:
            documents = tuple(
                one for one in (self._lineage, *self._documents()) if one.version != versions.get(one.name)
            )
            shipment = self._source.read(position)
            if shipment is None and documents:
                shipment = self._source.without_records()
                documents = tuple(one for one in documents if shipment and not _is_ahead(one, shipment.leader_end))
                shipment = shipment if documents else None
            elif shipment is not None:
                upto = stream_cut(shipment.marks.values()) if shipment.marks else Seq(0)
                documents = tuple(one for one in documents if not _is_ahead(one, upto))
            if shipment is not None:
                position = dict(self._source.position_after(position))
                link.send(
                    replace(
                        shipment,
                        epoch=self._promise.epoch,
                        leader=self._promise.node,
                        documents=documents,
                        sent_ns=self._clock.now_ns(),
                        leader_end=self._source.leader_end(),
                    )
                )
                versions |= {one.name: one.version for one in documents}
                under_way += 1
            elif self._ending.is_set() and not under_way:
                return
            while (message := link.recv(_HEARS_FOR_S if shipment is None else 0.0)) is not None:
                if isinstance(message, Acknowledgement):
                    self._backoff.reset()
                    self.error = None
                    # Shipments that waited go as one object: what is acknowledged covers all of
                    # them so far, or some.
                    under_way = 0 if is_covered(position, message.position) else under_way
                    if (message.group, message.position) != (self.stored_group, self._stored_at):
                        self.stored_group, self._stored_at = message.group, message.position
                        self._tell(StoredUpto(message.group, message.persisted_upto, message.position))


def _is_ahead(document: Document, upto: Seq) -> bool:
    """Return whether a document covers sessions' writes after a number. It goes with the next shipment.

    A node that restored the log up to that number would have to discard the whole copy.
    """
    return document.name == SESSIONS and (covered_in(document.data) or Seq(0)) > upto


def _claimed_by(error: Exception) -> Promise:
    """Return the promise of the node that leads, if an error names it.

    A late write of this node's own earlier attempt is no claim: it is read, and writing continues
    after it.
    """
    details = error.details if isinstance(error, Fenced) else {}
    return Promise(Epoch(int(details.get("epoch", 0))), NodeName(str(details.get("leader", NOBODY))))


def _reported(error: Exception) -> MillstreamError:
    if isinstance(error, FollowerBehindRetention):
        return FollowerBehindRetention(
            f"the object store lacks what was dropped here: {error.message}", hint=_HOLE_HINT
        )
    if isinstance(error, MillstreamError):
        return error
    what = "the log can't be read" if isinstance(error, OSError) else "a fault of Millstream's"
    return LogError(f"{what}: {error!r}")
