"""Shipments through an object store: the leader writes them; followers, rebuilds and restores read them without it.

All nodes see the store, so it also decides which node leads: one node wins a `claim`, which fences
every lower epoch.
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
from millstream.replication.object_store import epoch_claims, object_names
from millstream.replication.object_store.branches import begin_branch, history_of
from millstream.replication.object_store.object_names import Layout
from millstream.replication.object_store.reader import POLLS_S, StoreReader
from millstream.replication.object_store.scrub import Scrub, Scrubbed
from millstream.replication.object_store.store_client import Objects, open_objects
from millstream.replication.object_store.writer import StoreContents, StoredLink, stored_of
from millstream.replication.queues import WINDOW_BYTES
from millstream.wal.files import RealFiles

_ONE_REGION = RegionId(0)


@dataclass(frozen=True, slots=True)
class StoredState:
    """Contents of a store for a log."""

    marks: Mapping[ShardId, DurableMark]
    """The newest marks; empty if nothing is stored."""
    documents: Mapping[str, bytes]


class ObjectStoreTransport:
    """One stream's log of one region in an object store, at either end.

    Args:
        url: `s3://bucket/prefix`, `gs://…`, `az://…`, or `file:///…` for a folder.
        claimant: identity of the home with that node name; empty: not known, or a new home in its
            place.
        options: of the store, in addition to the environment (`AWS_…` and the like).
        polls_s: interval between a reader's searches for new shipments.
        upto: for readers: as if no higher epoch existed, so that they read what a promotion has set
            aside; None: the current log.

    Raises:
        UsageError, StoreUnavailable (`store_unusable`): as `open_objects`.
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
    ) -> None:
        self._objects: Objects = open_objects(url, options)
        self._layout = Layout(stream, region)
        self._node = node
        self._claimant = claimant
        self._window_bytes = window_bytes
        self._polls_s = polls_s
        self._upto = upto
        self._lock = threading.Lock()
        self._link: StoredLink | None = None
        self._readers: list[StoreReader] = []
        self._closed = threading.Event()
        self._is_probed = False
        self._epoch: Epoch | None = None

    def check(self) -> None:
        """Check that the store has the needed guarantees.

        Raises:
            StoreUnavailable (`store_unusable`): it overwrites an existing object despite the condition.
            StoreUnavailable: it doesn't answer, or refuses.
        """
        object_names.probe(self._objects, self._layout)
        self._is_probed = True

    def accept(self, timeout_s: float) -> FollowerLink | None:
        """Return the store as a follower, at once if the previous link has ended; else None, after that time.

        Raises:
            StoreUnavailable: as `check`, the first time; or its contents can't be
                read.
            ShipmentUnreadable: its contents can't be read.
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
                    epoch=self._epoch,
                )
                return self._link
        self._closed.wait(timeout_s)
        return None

    def connect(self, hello: Hello, timeout_s: float, ends: Mapping[ShardId, ByteEnd] | None = None) -> LeaderLink:
        """Read what is stored after a position, and what is added; `ends` as `StoreReader`'s, for unreadable shards."""
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

    # --- leadership -----------------------------------------------------------------------------------------------

    def claim(self, epoch: Epoch, holder: str, claimant: str = "") -> bool:
        """Claim the store for an epoch; return whether the holder has it, and among homes of its name the claimant.

        Lower epochs then store nothing more, and what they have stored can be read.

        Raises:
            StoreUnavailable: it may be claimed or not.
        """
        return epoch_claims.claim(self._objects, self._layout, epoch, holder, claimant)

    def holder_of(self, epoch: Epoch) -> str:
        """Return the node that has claimed an epoch; empty if none has. Raises `StoreUnavailable`."""
        return epoch_claims.holder_of(self._objects, self._layout, epoch)

    def begin(self, epoch: Epoch, common: Callable[[StoredState], ReplicaPosition | None]) -> None:
        """Claim the store for this node's epoch, and record where its log diverges from the stored one.

        Call it before `accept`; it can be repeated.

        Args:
            common: returns the end of what its log has in common with the stored one; None: the
                logs don't diverge.

        Raises:
            Fenced: another node has claimed it, or a higher one was claimed.
            StoreUnavailable, ShipmentUnreadable: as `accept`; and any error of
                `common`.
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
        """Return the highest claimed epoch; 0 if there is none. Raises `StoreUnavailable`."""
        return epoch_claims.greatest_claim(self._objects, self._layout)

    def stored(self) -> Hello:
        """Return what the store has, as a follower's hello. Raises as `accept`."""
        return stored_of(self._objects, self._layout).hello(self.greatest_claim())

    def newest(self) -> StoredState:
        """Return the newest marks and documents that the store has of the log. Raises as `accept`."""
        return self._state_of(stored_of(self._objects, self._layout, upto=self._upto))

    def segment_named(self, shard: ShardId, base: Offset) -> str | None:
        """Return the name of the object with a sealed segment of the log; None if there is none. Raises as `accept`."""
        history = history_of(self._objects, self._layout, self._upto)
        found = None
        for listed in object_names.listed_in(self._objects, self._layout.shard(shard)):
            epoch, its_base = object_names.segment_of(listed.name)
            if its_base == base and history.has(shard, epoch, base):
                found = listed.name
        return found

    def scrub(self, stream: StreamId, folder: str, *, mend: bool, tell: Callable[[str], None]) -> Scrubbed:
        """Verify the stored log, and restore damaged objects that are whole in this node's own log: see `Scrub`."""
        return Scrub(self._objects, self._layout, stream, RealFiles(), folder, mend=mend, tell=tell).run()

    def set_aside(self) -> tuple[Epoch, ...]:
        """Return the epochs at whose end the store has more than the log.

        Later leaders were promoted without the store, and continued from below. Raises as `accept`.
        """
        return history_of(self._objects, self._layout).set_aside

    def _state_of(self, stored: StoreContents) -> StoredState:
        documents = {}
        for name, (epoch, version) in stored.documents.items():
            data = self._objects.get(self._layout.document(name, epoch, version))
            if data is not None:
                documents[name] = bytes(data)
        return StoredState(stored.marks, documents)
