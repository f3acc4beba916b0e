"""The follower's end of an object store: reads what is stored, from a position on, and what is added to it.

The store is read in this order: names of shipments, then the branches, then sealed segments, then
the shipments. A shipment is deleted only once segments have its bytes. So if one is gone when it is
read, a new segment has its bytes, and reading restarts from the present position.

This reader doesn't detect damage; the receiver does. It then reads once more, up to the damage
(`ends`): no bytes after it on that shard, and no marks, which would cover them.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Final

from millstream.errors import (
    Fenced,
    FollowerBehindRetention,
    LinkLost,
    MillstreamError,
    ReplicationError,
    ShipmentUnreadable,
)
from millstream.model.ids import Epoch, ShardId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset
from millstream.model.replication import Acknowledgement, ByteEnd, Document, Hello, SegmentPart, Shipment
from millstream.replication.object_store.branches import History, history_of
from millstream.replication.object_store.object_names import (
    Layout,
    document_of,
    group_of,
    listed_in,
    message_in,
    segment_of,
    shards_of,
)
from millstream.replication.object_store.store_client import Listed, Objects

POLLS_S: Final = 0.5
"""Interval between searches for new shipments: a listing costs about as much as a write."""
_PIECE_BYTES: Final = 8 << 20
_ALL: Final[Mapping[ShardId, ByteEnd]] = {}
_TRAILER: Final = struct.Struct("<II56s")
"""A segment's last 64 bytes: checksum, length of the index before it, the rest. See docs/internals/FORMAT.md."""


class StoreReader:
    """See `ports.LeaderLink`.

    Nothing is sent to a store: acknowledgements are dropped, and a hello sets the position to read
    from.

    Args:
        hello: has the position to begin from.
        upto: read as if no higher epoch existed; None: read the current log.
        ends: ends of the shards that can't be read further. If there are any, no marks come.
    """

    def __init__(
        self,
        objects: Objects,
        layout: Layout,
        hello: Hello,
        *,
        polls_s: float = POLLS_S,
        upto: Epoch | None = None,
        ends: Mapping[ShardId, ByteEnd] = _ALL,
    ) -> None:
        self._objects = objects
        self._layout = layout
        self._hello = hello
        self._polls_s = polls_s
        self._upto = upto
        self._ends = dict(ends)
        self._position: dict[ShardId, ByteEnd] = dict(hello.position)
        self._documents = dict(hello.documents)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._begins: Hello | None = None
        self._first_kept: Mapping[ShardId, DroppedMark] = {}
        """Marks of what was dropped before the first stored shipment."""
        self._history: History | None = None
        """History by which it has read so far."""
        self._shipments = self._read()

    def recv(self, timeout_s: float) -> Shipment | None:
        """See the port. Requests to the store may take longer than the timeout.

        Raises:
            StoreUnavailable: the store doesn't answer; the link is unusable.
            FollowerBehindRetention: the store lacks the bytes at the position.
            ReplicationError (`other_stream`): it has another stream of that name.
            LinkLost: a new leader's log diverges from what was read, at a lower position: the link
                is unusable.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            if self._closed.is_set():
                raise LinkLost("the link was closed")
            with self._lock:
                if self._begins is not None:
                    self._position, self._documents = dict(self._begins.position), dict(self._begins.documents)
                    self._begins, self._shipments = None, self._read()
            try:
                shipment = next(self._shipments)
            except MillstreamError:
                self.close()
                raise
            if self._closed.is_set():
                raise LinkLost("the link was closed")
            if shipment is not None:
                return shipment
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            self._closed.wait(min(left_s, self._polls_s))

    def send(self, message: Acknowledgement | Hello | MillstreamError) -> None:
        """See the port."""
        if self._closed.is_set():
            raise LinkLost("the link was closed")
        if isinstance(message, Hello):
            with self._lock:
                self._begins = message

    @property
    def is_closed(self) -> bool:
        """Whether it is unusable."""
        return self._closed.is_set()

    def close(self) -> None:
        """See the port."""
        self._closed.set()

    # --- reading -------------------------------------------------------------------------------------------------

    def _read(self) -> Iterator[Shipment | None]:
        """Yield the next shipments, for ever; None while there is nothing new."""
        while True:
            names = list(listed_in(self._objects, self._layout.groups))
            self._follow_history()
            newest = self._newest(names)
            if newest is None:
                yield None
                continue
            newest = yield from self._beginning(newest)
            yield from self._segments(newest)
            last = yield from self._groups(names, newest)
            while last is not None:
                last = yield from self._tail(last)

    def _follow_history(self) -> None:
        """Read which objects are the log now."""
        history = history_of(self._objects, self._layout, self._upto)
        if self._history is not None and history.parts_below(self._position, self._history):
            raise LinkLost("a new leader's log parts from what was read of the object store")
        self._history = history

    @property
    def _told(self) -> History:
        assert self._history is not None, "it is read first"
        return self._history

    def _newest(self, names: list[Listed]) -> Shipment | None:
        """Return the newest shipment without its parts."""
        for listed in reversed(names):
            if not self._told.tells(group_of(listed.name)[0]):
                continue
            found = self._shipment(listed.name)
            if isinstance(found, Shipment):
                if self._hello.stream is not None and found.stream != self._hello.stream:
                    raise ReplicationError(
                        f"the object store has another stream under the name {self._layout.stream}", code="other_stream"
                    )
                return dataclasses.replace(found, parts=(), marks={}, first_kept={}, documents=())
        return None

    def _beginning(self, newest: Shipment) -> Generator[Shipment, None, Shipment]:
        """Yield what was dropped before the first shipment, and the documents; return the newest shipment.

        The result includes what was dropped: any shard's first bytes may come next.
        """
        data = self._objects.get(self._layout.begins)
        first = None if data is None else message_in(self._layout.begins, data)
        if isinstance(first, Shipment):
            self._first_kept = first.first_kept
            newest = dataclasses.replace(newest, first_kept=first.first_kept)
        documents = self._newer_documents()
        if documents or (not self._position and newest.first_kept):
            yield dataclasses.replace(newest, documents=tuple(documents.values()))
        return newest

    def _newer_documents(self) -> dict[str, Document]:
        """Return the newest version of each document, if it isn't already known."""
        while True:
            newest: dict[str, Listed] = {}
            for listed in listed_in(self._objects, self._layout.documents):
                name, epoch, _ = document_of(listed.name)
                if self._told.tells(epoch):
                    newest[name] = listed
            found: dict[str, Document] = {}
            for name, listed in newest.items():
                version = document_of(listed.name)[2]
                if version != self._documents.get(name):
                    data = self._objects.get(listed.name)
                    if data is None:
                        break  # a newer one has replaced it
                    found[name] = Document(name, version, bytes(data))
            else:
                self._documents |= {name: document.version for name, document in found.items()}
                return found

    def _segments(self, newest: Shipment) -> Iterator[Shipment]:
        """Yield sealed segments, from the position on."""
        for shard in shards_of(self._objects, self._layout):
            stored = (
                (*segment_of(listed.name), listed) for listed in listed_in(self._objects, self._layout.shard(shard))
            )
            # If two leaders have stored one, use the later one's: it stored the segment because the
            # other's can't be read.
            own = {base: listed for epoch, base, listed in stored if self._told.has(shard, epoch, base)}
            for base, listed in sorted(own.items()):
                reached = self._position.get(shard, ByteEnd(base, 0))
                size = self._readable(shard, base, listed.size)
                start = reached.position if reached.base_offset == base else 0
                if reached.base_offset > base or start >= size:
                    continue
                for end in _cuts(start, size, self._index_start(listed)):
                    data = self._objects.get(listed.name, start, end - start)
                    if data is None or len(data) != end - start:
                        raise ShipmentUnreadable(f"the length of {listed.name} differs from the recorded one")
                    part = SegmentPart(shard, base, start, data, end == listed.size)
                    self._position[shard] = part.end
                    yield dataclasses.replace(newest, parts=(part,))
                    start = end

    def _readable(self, shard: ShardId, base: Offset, size: int) -> int:
        """Return how many bytes of a segment of `size` bytes to read."""
        last = self._ends.get(shard)
        if last is None or base < last.base_offset:
            return size
        return min(size, last.position) if base == last.base_offset else 0

    def _index_start(self, listed: Listed) -> int:
        """Return where a segment's footer begins, which isn't cut."""
        start = max(0, listed.size - _TRAILER.size)
        data = self._objects.get(listed.name, start, listed.size - start)
        if data is None or len(data) < _TRAILER.size:
            return 0
        return max(0, listed.size - _TRAILER.size - int(_TRAILER.unpack(data)[1]))

    def _groups(self, names: list[Listed], newest: Shipment) -> Generator[Shipment, None, str | None]:
        """Yield the new parts of the named shipments; return the last name. None if one has been deleted."""
        marks: dict[ShardId, DurableMark] = {}
        for listed in names:
            found = self._shipment(listed.name)
            if found is None:
                return None
            if isinstance(found, Shipment):
                epoch = group_of(listed.name)[0]
                if self._told.tells(epoch):
                    marks = {} if self._ends else dict(found.marks) or marks
                rest = self._rest(found, epoch)
                if rest.parts:
                    # The newest documents have come before.
                    yield dataclasses.replace(rest, marks=marks, documents=())
                    marks = {}
        if marks:
            yield dataclasses.replace(newest, marks=marks)
        return names[-1].name

    def _tail(self, last: str) -> Generator[Shipment | None, None, str | None]:
        """Yield the shipments after a name; return the last name. None if one is missing."""
        epoch, number = group_of(last)
        is_new = False
        behind = list(listed_in(self._objects, self._layout.groups, last))
        if (behind or self._told.has_begun) and history_of(self._objects, self._layout, self._upto) != self._told:
            return None
        for listed in behind:
            next_epoch, next_number = group_of(listed.name)
            found = self._shipment(listed.name)
            if found is None or next_number != (number + 1 if next_epoch == epoch else 0):
                return None
            epoch, number, last, is_new = next_epoch, next_number, listed.name, True
            if isinstance(found, Shipment) and self._told.tells(epoch):
                self._documents |= {document.name: document.version for document in found.documents}
                yield self._rest(found, epoch)
        if not is_new:
            yield None
        return last

    def _shipment(self, name: str) -> Shipment | Fenced | None:
        """Return the shipment of a name, or the end of its epoch; None if it has been deleted."""
        data = self._objects.get(name)
        if data is None:
            return None
        message = message_in(name, data)
        if not isinstance(message, Shipment | Fenced):
            raise ShipmentUnreadable(f"{name} is neither a shipment nor an end")
        return message

    def _rest(self, shipment: Shipment, epoch: Epoch) -> Shipment:
        """Return the part of a shipment after the position, and advance the position."""
        parts = []
        for part in shipment.parts:
            if not self._told.has(part.shard, epoch, part.base_offset):
                continue
            reached = self._position.get(part.shard)
            stop = self._readable(part.shard, part.base_offset, part.end.position)
            if stop <= part.position or (reached is not None and ByteEnd(part.base_offset, stop) <= reached):
                continue
            start = 0 if reached is None or part.base_offset > reached.base_offset else reached.position
            if part.position > start:
                raise FollowerBehindRetention(
                    f"the object store lacks bytes {start} to {part.position} of segment {part.base_offset} of shard {part.shard}",
                    hint="Objects are missing there: put them back, from an older version or a copy of the store.",
                    shard=int(part.shard),
                )
            data = memoryview(part.data)[start - part.position : stop - part.position]
            is_end = part.is_end and stop == part.end.position
            parts.append(SegmentPart(part.shard, part.base_offset, start, data, is_end))
            self._position[part.shard] = parts[-1].end
        return dataclasses.replace(
            shipment,
            parts=tuple(parts),
            marks={} if self._ends else shipment.marks,
            first_kept={**self._first_kept, **shipment.first_kept},
        )


def _cuts(start: int, size: int, index_start: int) -> list[int]:
    """Return the ends of a segment's pieces: each fits in memory, and the footer isn't cut."""
    ends = [end for end in range(start + _PIECE_BYTES, size, _PIECE_BYTES) if end <= index_start]
    return [*ends, size]
