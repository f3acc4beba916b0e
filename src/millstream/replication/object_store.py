"""Shipments through an object store: a leader writes to it, and whoever follows, rebuilds or restores reads from it. Neither needs the other.

The store is the one place that all nodes see, so it also says who leads: `claim` is won by one, and fences every lower epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millstream.errors import Fenced, LinkLost
from millstream.model.ids import Epoch, RegionId, ShardId, StreamId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset
from millstream.model.replication import ByteEnd, Hello, ReplicaPosition
from millstream.ports import FollowerLink, LeaderLink
from millstream.replication import object_layout
from millstream.replication.object_history import begin_branch, history_of
from millstream.replication.object_layout import Layout
from millstream.replication.object_leader import SegmentBytes, Stored, StoredLink, stored_of
from millstream.replication.object_reader import POLLS_S, StoreReader
from millstream.replication.object_scrub import Scrub, Scrubbed
from millstream.replication.objects import Objects, open_objects
from millstream.replication.queues import WINDOW_BYTES
from millstream.wal.files import RealFiles

__all__ = ["ObjectStoreTransport", "SegmentBytes"]

_ONE_REGION = RegionId(0)


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a store has of a log."""

    marks: Mapping[ShardId, DurableMark]
    """The newest; empty where nothing is stored."""
    documents: Mapping[str, bytes]


class ObjectStoreTransport:
    """One stream's log of one region in an object store, at either end.

    Args:
        url: `s3://bucket/prefix`, `gs://…`, `az://…`, or `file:///…` for a folder.
        stream: its name.
        region: whose log.
        node: who claims, and leads.
        claimant: which home of that name; empty: not known, or a new one in place of it.
        options: of the store, beside what the environment says (`AWS_…` and the like).
        window_bytes: how much may wait to be written.
        polls_s: how often a reader looks for what is new.
        upto: for readers: as if no higher epoch had been, so that what a promotion has set aside is read; None: what is the log now.
        segment_bytes: where the leader's sealed segments can be read more cheaply than from the store, in pieces; None where one can't.

    Raises:
        UsageError, MissingExtra, StoreUnusable: as `open_objects`.
    """

    def __init__(
        self,
        url: str,
        stream: str,
        *,
        region: RegionId = _ONE_REGION,
        node: str = "",
        claimant: str = "",
        options: Mapping[str, str] | None = None,
        window_bytes: int = WINDOW_BYTES,
        polls_s: float = POLLS_S,
        upto: Epoch | None = None,
        segment_bytes: SegmentBytes | None = None,
    ) -> None:
        self._objects: Objects = open_objects(url, options)
        self._layout = Layout(stream, region)
        self._node = node
        self._claimant = claimant
        self._window_bytes = window_bytes
        self._polls_s = polls_s
        self._upto = upto
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._link: StoredLink | None = None
        self._readers: list[StoreReader] = []
        self._closed = threading.Event()
        self._is_probed = False
        self._epoch: Epoch | None = None

    def check(self) -> None:
        """Find out whether the store does what is needed of it.

        Raises:
            StoreUnusable: it writes over an object that is there, whatever it is told.
            StoreUnavailable: it doesn't answer, or refuses.
        """
        object_layout.probe(self._objects, self._layout)
        self._is_probed = True

    def accept(self, timeout_s: float) -> FollowerLink | None:
        """The store, as the follower that it is: at once where the link before it has ended; else None, after that time.

        Raises:
            StoreUnusable, StoreUnavailable: as `check`, the first time; or what it has can't be read.
            ShipmentUnreadable: likewise.
        """
        with self._lock:
            if not self._closed.is_set() and (self._link is None or self._link.has_ended(timeout_s)):
                if not self._is_probed:
                    self.check()
                self._link = StoredLink(
                    self._objects,
                    self._layout,
                    self._node,
                    window_bytes=self._window_bytes,
                    claimant=self._claimant,
                    segment_bytes=self._segment_bytes,
                    epoch=self._epoch,
                )
                return self._link
        self._closed.wait(timeout_s)
        return None

    def connect(self, hello: Hello, timeout_s: float, ends: Mapping[ShardId, ByteEnd] | None = None) -> LeaderLink:
        """Read what is stored behind a position, and what comes; as `StoreReader` where shards can't be read beyond their `ends`."""
        del timeout_s
        if self._closed.is_set():
            raise LinkLost("the transport was closed")
        reader = StoreReader(
            self._objects, self._layout, hello, polls_s=self._polls_s, upto=self._upto, ends=ends or {}
        )
        with self._lock:
            self._readers = [one for one in self._readers if not one.is_closed] + [reader]
        return reader

    def close(self) -> None:
        """See `ports.Transport`."""
        self._closed.set()
        with self._lock:
            for link in (*self._readers, *(() if self._link is None else (self._link,))):
                link.close()

    # --- who leads -----------------------------------------------------------------------------------------------

    def claim(self, epoch: Epoch, holder: str, claimant: str = "") -> bool:
        """Claim the store for an epoch; whether it is the holder's, and of two of its name the claimant's. Then no lower one stores anything any more, and what it has stored can be read.

        Raises:
            StoreUnavailable: it may be claimed or not.
        """
        return object_layout.claim(self._objects, self._layout, epoch, holder, claimant)

    def holder_of(self, epoch: Epoch) -> str:
        """The node that has claimed an epoch; empty where none has. Raises `StoreUnavailable`."""
        return object_layout.holder_of(self._objects, self._layout, epoch)

    def begin(self, epoch: Epoch, common: Callable[[StoredState], ReplicaPosition | None]) -> None:
        """Claim the store for an epoch, under which this node leads, and note where its log parts from what is stored, where it does.

        Before `accept`; it can be repeated.

        Args:
            epoch: the node's.
            common: where what its log has in common with the stored one ends; None: it is the same one, as far as that goes.

        Raises:
            Fenced: another node has claimed it, or a higher one was claimed.
            StoreUnusable, StoreUnavailable, ShipmentUnreadable: as `accept`. And whatever `common` does.
        """
        if not self._is_probed:
            self.check()
        if not self.claim(epoch, self._node, self._claimant):
            leads = self.greatest_claim()
            raise Fenced(
                f"another node has claimed the object store of {self._layout.stream}: epoch {leads}, and this is {epoch}",
                epoch=int(leads),
            )
        stored = stored_of(self._objects, self._layout)
        state = self._state_of(stored)
        begin_branch(self._objects, self._layout, epoch, self._node, stored.reached(), lambda: common(state))
        self._epoch = epoch

    def greatest_claim(self) -> Epoch:
        """The highest epoch that was claimed; 0 where none was. Raises `StoreUnavailable`."""
        return object_layout.greatest_claim(self._objects, self._layout)

    def stored(self) -> Hello:
        """What the store has, as a follower would say it. Raises as `accept`."""
        return stored_of(self._objects, self._layout).hello(self.greatest_claim())

    def newest(self) -> StoredState:
        """What the store has of the log: the newest marks, and the newest documents. Raises as `accept`."""
        return self._state_of(stored_of(self._objects, self._layout, upto=self._upto))

    def segment_named(self, shard: ShardId, base: Offset) -> str | None:
        """The object that has a sealed segment of the log; None where there is none. Raises as `accept`."""
        history = history_of(self._objects, self._layout, self._upto)
        found = None
        for listed in object_layout.listed_in(self._objects, self._layout.shard(shard)):
            epoch, its_base = object_layout.segment_of(listed.name)
            if its_base == base and history.has(shard, epoch, base):
                found = listed.name
        return found

    def scrub(self, stream: StreamId, folder: str, *, mend: bool, tell: Callable[[str], None]) -> Scrubbed:
        """Verify all that is stored of the log, and put back what is damaged and lies whole in this node's own: see `Scrub`."""
        return Scrub(self._objects, self._layout, stream, RealFiles(), folder, mend=mend, tell=tell).run()

    def set_aside(self) -> tuple[Epoch, ...]:
        """Up to which epochs there is more than the log has: leaders that were promoted without the store have gone on from below. Raises as `accept`."""
        return history_of(self._objects, self._layout).set_aside

    def _state_of(self, stored: Stored) -> StoredState:
        documents = {}
        for name, (epoch, version) in stored.documents.items():
            data = self._objects.get(self._layout.document(name, epoch, version))
            if data is not None:
                documents[name] = bytes(data)
        return StoredState(stored.marks, documents)
