"""The leader's end of an object store.

Shipments and sealed segments become objects, and what is stored is acknowledged.

A thread writes shipments in their order; those that wait during a write go as one object. Another
thread builds each sealed segment, as one object, from the stored shipments. It then deletes the
shipments whose bytes are all in segments. The newest shipment stays, and so does the newest that
has marks.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from millstream.codec.checksums import Bytes
from millstream.codec.replication_messages import encode_message
from millstream.errors import Fenced, LinkLost, MillstreamError, ShipmentUnreadable
from millstream.model.ids import Epoch, GroupNumber, ShardId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import (
    OBJECT_STORE,
    Acknowledgement,
    ByteEnd,
    Document,
    Hello,
    ReplicaPosition,
    SegmentPart,
    Shipment,
)
from millstream.protocol.replication.node_promises import LINEAGE
from millstream.replication.object_store.branches import History, history_of, note_whole
from millstream.replication.object_store.epoch_claims import claim, end_of, greatest_claim
from millstream.replication.object_store.object_names import (
    TRAILER_BYTES,
    Layout,
    behind,
    document_of,
    group_of,
    listed_in,
    message_in,
    segment_of,
    shards_of,
)
from millstream.replication.object_store.store_client import Listed, Objects
from millstream.replication.queues import BytesInFlight, Inbox
from millstream.workers import Worker

_OBJECT_BYTES: Final = 8 << 20
"""Bytes up to which waiting shipments go into one object: a store takes tens of milliseconds for any object."""
_PIECE_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class _StoredRange:
    """Place of a segment's bytes in the store."""

    name: str
    start: int
    """Position in the object."""
    position: int
    """Position in the segment."""
    length: int


@dataclass(slots=True)
class StoreContents:
    """Contents of the store: read once when a link begins, and kept up to date by it."""

    marks: dict[ShardId, DurableMark] = field(default_factory=dict)
    position: dict[ShardId, ByteEnd] = field(default_factory=dict)
    documents: dict[str, tuple[Epoch, int]] = field(default_factory=dict)
    """By name, the epoch and the version of the newest document."""
    history: History = field(default_factory=History)
    sealed: set[tuple[ShardId, Offset]] = field(default_factory=set)
    """Segments that are stored whole."""
    pieces: dict[tuple[ShardId, Offset], list[_StoredRange]] = field(default_factory=dict)
    """Stored bytes of segments that aren't."""
    shipments: dict[str, set[tuple[ShardId, Offset]]] = field(default_factory=dict)
    """By shipment, in order, the segments that it has bytes of."""
    marked: str = ""
    """Name of the newest shipment with marks."""
    ended: set[tuple[ShardId, Offset]] = field(default_factory=set)
    """Segments whose end has been shipped, and that aren't stored whole."""
    last: str = ""
    """Last name with a shipment, or an epoch's end."""
    stream: Shipment | None = None
    """The newest shipment, without its bytes."""

    def add(self, name: str, shipment: Shipment, starts: Sequence[int]) -> None:
        """Add a shipment that is stored now; `starts` has the position of each part's bytes in it."""
        epoch = group_of(name)[0]
        keys: set[tuple[ShardId, Offset]] = set()
        for part, start in zip(shipment.parts, starts, strict=True):
            if not self.history.has(part.shard, epoch, part.base_offset):
                continue
            key = (part.shard, part.base_offset)
            if key not in self.sealed:
                self.pieces.setdefault(key, []).append(_StoredRange(name, start, part.position, len(part.data)))
                if part.is_end:
                    self.ended.add(key)
            keys.add(key)
            end = behind(part)
            self.position[part.shard] = max(end, self.position.get(part.shard, end))
        self.stream = dataclasses.replace(shipment, parts=(), documents=())
        if not self.history.tells(epoch):
            return  # it stays, even if segments cover it: it has records that the log no longer has
        self.shipments[name] = keys
        if shipment.marks:
            self.marks = dict(shipment.marks)
            self.marked = name
        for document in shipment.documents:
            self.documents[document.name] = max(
                (epoch, document.version), self.documents.get(document.name, (epoch, 0))
            )

    def reached(self) -> ReplicaPosition:
        """Return the store's position; after a segment's end, the beginning of the next one, if known."""
        found = dict(self.position)
        for shard, mark in self.marks.items():
            end = found.get(shard)
            # A segment that has lost its end has to come once more, from its beginning.
            if end is not None and end.position and mark.base_offset > end.base_offset:
                found[shard] = ByteEnd(mark.base_offset, 0)
        return found

    def hello(self, promised: Epoch) -> Hello:
        """Return the same as a follower's hello."""
        stream = None if self.stream is None else self.stream.stream
        versions = {name: version for name, (_, version) in self.documents.items()}
        return Hello(stream, OBJECT_STORE, promised, self.reached(), versions)

    def covered(self) -> list[str]:
        """Return the shipments whose bytes are all in stored segments."""
        kept = {self.marked, next(reversed(self.shipments), "")}
        return [name for name, keys in self.shipments.items() if keys <= self.sealed and name not in kept]


def stored_of(
    objects: Objects, layout: Layout, epoch: Epoch | None = None, *, upto: Epoch | None = None
) -> StoreContents:
    """Read what the store has: the names of segments, and the shipments after them.

    Args:
        epoch: the epoch of the reading leader, which may have begun a branch.
        upto: read as if no higher epoch existed.
    """
    names = list(listed_in(objects, layout.groups))
    found = StoreContents(history=history_of(objects, layout, upto).as_of(epoch))
    last: dict[ShardId, Listed] = {}
    for shard in shards_of(objects, layout):
        for listed in listed_in(objects, layout.shard(shard)):
            its_epoch, base = segment_of(listed.name)
            if found.history.has(shard, its_epoch, base):
                found.sealed.add((shard, base))
                if shard not in last or base >= segment_of(last[shard].name)[1]:
                    last[shard] = listed
    for shard, listed in last.items():
        base = segment_of(listed.name)[1]
        start = max(0, listed.size - TRAILER_BYTES)
        trailer = (objects.get(listed.name, start, listed.size - start) if listed.size else None) or memoryview(b"")
        end = behind(SegmentPart(shard, base, start, trailer, is_end=True))
        if end.base_offset == base:  # the stored bytes have no end: if nothing follows the segment, it comes once more
            found.sealed.discard((shard, base))
            end = ByteEnd(base, 0)
        found.position[shard] = end
    for listed in listed_in(objects, layout.documents):
        name, its_epoch, version = document_of(listed.name)
        if found.history.tells(its_epoch):
            found.documents[name] = max((its_epoch, version), found.documents.get(name, (its_epoch, 0)))
    for listed in names:
        data = objects.get(listed.name)
        message = None if data is None else message_in(listed.name, data)
        found.last = listed.name
        if isinstance(message, Shipment):
            found.add(listed.name, message, _starts(message, listed.size))
        elif message is not None and not isinstance(message, Fenced):
            raise ShipmentUnreadable(f"{listed.name} is no shipment")
    return found


class StoredLink:
    """See `ports.FollowerLink`: the store takes the place of a follower.

    Args:
        claimant: as `claim`'s.
        epoch: the epoch under which `node` leads; None: taken from the first shipment.

    Raises:
        StoreUnavailable, ShipmentUnreadable: the store's contents can't be read.
    """

    def __init__(
        self,
        objects: Objects,
        layout: Layout,
        node: str,
        *,
        window_bytes: int,
        claimant: str = "",
        epoch: Epoch | None = None,
    ) -> None:
        self._objects = objects
        self._layout = layout
        self._node = node
        self._claimant = claimant
        self._stored = stored_of(objects, layout, epoch)
        self._is_branching = False
        """Whether what is stored isn't the log yet."""
        self._lock = threading.Lock()
        self._epoch: Epoch | None = None
        """Epoch under which it writes; None: it hasn't begun. A node that was never promoted leads under 0."""
        self._number = 0
        self._hello = self._stored.hello(greatest_claim(objects, layout))
        self._is_empty = self._stored.stream is None and not self._stored.sealed
        self._window = BytesInFlight(window_bytes)
        self._written_bytes = 0
        self._waiting: deque[Shipment] = deque()
        self._comes = threading.Condition()
        self._inbox: Inbox[Acknowledgement] = Inbox(4 << 20)
        self._ended = threading.Event()
        self._sealing: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._workers = (
            Worker("object-store-writes", self._write_all),
            Worker("object-store-seals", self._seal_all),
        )
        try:
            for worker in self._workers:
                worker.start()
        except OSError:
            self.close()
            raise
        self._sealing.put(True)

    @property
    def hello(self) -> Hello:
        """State of the store when the link began."""
        return self._hello

    def has_ended(self, timeout_s: float) -> bool:
        """Return whether the link has ended and its threads have too; wait up to `timeout_s` for writes in progress.

        The next link would take this one's late writes for another leader's, and miss its
        deletions.
        """
        if not self._ended.is_set():
            return False
        deadline_s = time.monotonic() + timeout_s
        return all(worker.join(max(0.0, deadline_s - time.monotonic())) for worker in self._workers)

    def send(self, shipment: Shipment) -> None:
        """See the port. A reader of the store reads all of it: the leader's shown positions aren't stored."""
        shipment = dataclasses.replace(shipment, shown=None, by_one=False)
        self._window.send(shipment.size_bytes)
        with self._comes:
            self._waiting.append(shipment)
            self._comes.notify()

    def recv(self, timeout_s: float) -> Acknowledgement | Hello | None:
        """See the port: an acknowledgement covers what is stored.

        Raises `Fenced` if another node has claimed the store.
        """
        said = self._inbox.take(timeout_s)
        return None if said is None else said[0]

    def refuse(self, error: MillstreamError) -> None:
        """See the port; a store isn't notified."""
        del error
        self.close()

    def close(self) -> None:
        """See the port. Waiting shipments are dropped; one being written may still be stored."""
        self._end(LinkLost("the link was closed"), forget=True)

    # --- writing -------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            while True:
                with self._comes:
                    self._comes.wait_for(lambda: self._waiting or self._ended.is_set())
                    if self._ended.is_set():
                        return
                    taken, size = self._taken()
                self._write(taken)
                self._written_bytes += size
                self._window.taken(self._written_bytes)
        except MillstreamError as error:
            self._end(error)
        finally:
            self._end(LinkLost("writing to the object store has failed"))

    def _taken(self) -> tuple[Shipment, int]:
        """Take the waiting shipments as one, up to the size of an object."""
        taken = [self._waiting.popleft()]
        size = taken[0].size_bytes
        while self._waiting and self._waiting[0].epoch == taken[0].epoch:
            more = self._waiting[0].size_bytes
            if size + more > _OBJECT_BYTES:
                break
            size += more
            taken.append(self._waiting.popleft())
        return _joined(taken), size

    def _write(self, shipment: Shipment) -> None:
        epoch = shipment.epoch
        if epoch != self._epoch:
            self._begin(shipment)
        shipment = dataclasses.replace(shipment, documents=tuple(map(self._newest, shipment.documents)))
        for document in shipment.documents:
            name = self._layout.document(document.name, epoch, document.version)
            self._objects.put_new(name, [document.data])
        buffers = encode_message(shipment)
        name = self._layout.group(epoch, self._number)
        # One of our own attempts may have been reported as failed, and have succeeded.
        if not self._objects.put_new(name, buffers) and bytes(self._objects.get(name) or b"") != b"".join(buffers):
            leads = greatest_claim(self._objects, self._layout)
            raise Fenced(
                f"another node writes to the object store as the leader of {self._layout.stream}, under epoch {leads}",
                epoch=int(leads),
            )
        self._number += 1
        self._stored.last = name
        if self._is_branching and shipment.marks:
            note_whole(self._objects, self._layout, epoch)
            self._is_branching = False
        with self._lock:
            self._stored.add(name, shipment, _starts(shipment, sum(len(buffer) for buffer in buffers)))
            stored = self._stored
            message = Acknowledgement(
                OBJECT_STORE,
                epoch,
                stored.reached(),
                max((mark.group for mark in stored.marks.values()), default=GroupNumber(0)),
                max((mark.persisted_upto for mark in stored.marks.values()), default=Seq(0)),
                time.time_ns(),
                bytes_behind=sum(waiting.size_bytes for waiting in tuple(self._waiting)),
                lag_s=max(0.0, (time.time_ns() - shipment.sent_ns) / 1e9) if shipment.sent_ns else 0.0,
            )
        self._inbox.put(message, 200)
        if shipment.documents or any(part.is_end for part in shipment.parts):
            self._sealing.put(True)

    def _newest(self, document: Document) -> Document:
        """Return the document with a version no older than the stored one.

        The leader counts versions by its clock, which may have been set back.
        """
        _, stored = self._stored.documents.get(document.name, (None, -1))
        return document if document.version >= stored else dataclasses.replace(document, version=stored + 1)

    def _begin(self, shipment: Shipment) -> None:
        """Claim the epoch, and find where in it to continue."""
        if not claim(self._objects, self._layout, shipment.epoch, self._node, self._claimant):
            leads = greatest_claim(self._objects, self._layout)
            raise Fenced(
                f"another node has claimed the object store of {self._layout.stream}: epoch {leads}, and this is {shipment.epoch}",
                epoch=int(leads),
            )
        # The previous leader may have kept writing until now: the state that this link began with
        # would be outdated.
        for listed in listed_in(self._objects, self._layout.groups, self._stored.last):
            if end_of(self._objects.get(listed.name) or memoryview(b"")) is None:
                raise LinkLost("another node has written to the object store since")
            self._stored.last = listed.name
        last = group_of(self._stored.last) if self._stored.last else (Epoch(0), -1)
        self._epoch, self._number = shipment.epoch, last[1] + 1 if last[0] == shipment.epoch else 0
        branch = next(
            (one for one in history_of(self._objects, self._layout).branches if one.epoch == shipment.epoch), None
        )
        self._is_branching = branch is not None and not branch.is_whole
        if self._is_branching and self._stored.marks:
            note_whole(self._objects, self._layout, shipment.epoch)
            self._is_branching = False
        if self._is_empty and shipment.first_kept:
            begins = Shipment(shipment.stream, shipment.region, shipment.epoch, first_kept=shipment.first_kept)
            self._objects.put_new(self._layout.begins, encode_message(begins))
        self._is_empty = False

    # --- sealed segments -----------------------------------------------------------------------------------------

    def _seal_all(self) -> None:
        try:
            while self._sealing.get() and not self._ended.is_set():
                self._seal()
        except MillstreamError as error:
            self._end(error)
        finally:
            self._end(LinkLost("sealed segments can't be stored"))

    def _seal(self) -> None:
        """Build the segments that have ended, and delete the shipments that they cover."""
        with self._lock:
            todo = {key: list(self._stored.pieces[key]) for key in sorted(self._stored.ended)}
        for (shard, base), pieces in todo.items():
            if self._ended.is_set():
                return
            name = self._layout.segment(shard, group_of(pieces[-1].name)[0], base)
            self._objects.put_large(name, self._put_together(pieces))
            with self._lock:
                self._stored.sealed.add((shard, base))
                self._stored.ended.discard((shard, base))
                del self._stored.pieces[shard, base]
        with self._lock:
            gone = self._stored.covered()
        self._objects.delete(gone)
        with self._lock:
            for name in gone:
                del self._stored.shipments[name]
            newest = dict(self._stored.documents)
        old = []
        for listed in listed_in(self._objects, self._layout.documents):
            document, epoch, version = document_of(listed.name)
            is_older = document in newest and (epoch, version) < newest[document]
            # A lineage is small, and a reader may still need a listed one.
            if is_older and document != LINEAGE and self._stored.history.tells(epoch):
                old.append(listed.name)
        self._objects.delete(old)

    def _put_together(self, pieces: Sequence[_StoredRange]) -> Iterator[Bytes]:
        at = 0
        for piece in pieces:
            if piece.position > at:
                raise ShipmentUnreadable(
                    f"the store lacks bytes {at} to {piece.position} of a segment before {piece.name}"
                )
            skip = at - piece.position
            for start in range(skip, piece.length, _PIECE_BYTES):
                length = min(_PIECE_BYTES, piece.length - start)
                data = self._objects.get(piece.name, piece.start + start, length)
                if data is None or len(data) != length:
                    raise ShipmentUnreadable(f"{piece.name} isn't what was stored")
                yield data
            at = max(at, piece.position + piece.length)

    def _end(self, error: MillstreamError, *, forget: bool = False) -> None:
        self._inbox.end(error, forget=forget)
        self._window.end(error)
        self._ended.set()
        self._sealing.put(False)
        with self._comes:
            self._comes.notify_all()


def _joined(shipments: Sequence[Shipment]) -> Shipment:
    """Join consecutive shipments into one: their bytes, and the newest of everything else."""
    if len(shipments) == 1:
        return shipments[0]
    documents = {document.name: document for shipment in shipments for document in shipment.documents}
    return dataclasses.replace(
        shipments[-1],
        parts=tuple(part for shipment in shipments for part in shipment.parts),
        marks=next((shipment.marks for shipment in reversed(shipments) if shipment.marks), {}),
        first_kept=next((shipment.first_kept for shipment in reversed(shipments) if shipment.first_kept), {}),
        documents=tuple(documents.values()),
    )


def _starts(shipment: Shipment, size: int) -> list[int]:
    """Return where in its object each part's bytes begin: they come last, with the documents."""
    at = size - shipment.size_bytes
    found = []
    for part in shipment.parts:
        found.append(at)
        at += len(part.data)
    return found
