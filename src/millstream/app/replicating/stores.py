"""The object store of a home, for who ships to it, who stands for leader, and who brings a log back from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.app.replicating.node_calls import this_node
from millstream.app.replicating.roles import Roles
from millstream.errors import ConfigError, FollowerBehindRetention, ReplicaGap, ShipmentUnreadable, UnknownStream
from millstream.model.ids import Epoch, GroupNumber, RegionId
from millstream.model.positions import Seq
from millstream.model.replication import Document, Hello, NodeName, Shipment
from millstream.protocol.replication.roles import LINEAGE, Greeting, Lineage, Rank, RoleFact
from millstream.replication.object_store import ObjectStoreTransport
from millstream.wal.mark import stream_cut
from millstream.wal.replica.log import ReplicaEnd, ReplicaLog

if TYPE_CHECKING:
    from millstream.app.home import Home

_CONNECTS_WITHIN_S: Final = 10.0
_LOOKS_FOR_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came out of a store."""

    end: ReplicaEnd
    documents: dict[str, Document]
    size_bytes: int

    @property
    def lineage(self) -> Lineage:
        """Who has led, as far as this log goes."""
        found = self.documents.get(LINEAGE)
        return Lineage() if found is None else Greeting.from_json(found.data).lineage.covered_by(self.end.group)


def store_of(home: Home, stream: str) -> ObjectStoreTransport:
    """The object store that the home's configuration names, for one of its streams. `ConfigError` where it names none."""
    url = home.config.replication.object_store
    if url is None:
        raise ConfigError(f"{home.config_file} names no object store", hint="Set [replication] object_store.")
    region = RegionId(home.config.streams[stream].region)
    me, fact = this_node(home), Roles(home).of(stream)
    claimant = fact.claimant if fact.promise.node == me else ""
    return ObjectStoreTransport(url, stream, region=region, node=me, claimant=claimant)


def stored_lineage(store: ObjectStoreTransport) -> tuple[Rank | None, Lineage, Seq]:
    """How much a store has of what was acknowledged (None: nothing), who led up to there, and up to which number. Raises `StoreUnavailable`."""
    found = store.newest()
    if not found.marks:
        return None, Lineage(), Seq(0)
    group = max(mark.group for mark in found.marks.values())
    document = found.documents.get(LINEAGE)
    lineage = (Lineage() if document is None else Greeting.from_json(document).lineage).covered_by(group)
    return Rank(lineage.last.promise, group), lineage, stream_cut(found.marks.values())


def lineage_document(fact: RoleFact) -> Document:
    """Who has led, as a document for a store: one a promise."""
    greeting = Greeting(fact.lineage, fact.lineage.last.behind)
    return Document(LINEAGE, int(fact.promise.epoch), greeting.to_json())


def fetch(
    store: ObjectStoreTransport,
    stream: str,
    folder: Path,
    *,
    upto: GroupNumber | None = None,
    withholds: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda _: None,
) -> Fetched:
    """Take everything that a store has of a stream and a log hasn't into that log.

    Args:
        store: the store.
        stream: its name, for errors.
        folder: the log's; nobody has it open. It is made where it isn't there.
        upto: with that group it is enough, whatever is stored meanwhile; None: with what is there when nothing comes any more.
        withholds: whether readers of the log see nothing of it before a leader says so.
        stop: whether to break off.
        tell: told how far it is, now and then.

    Raises:
        UnknownStream: the store has nothing of that stream, nor has the folder.
        Diverged: the log has other bytes than the store; nothing of it was changed.
        ShipmentUnreadable, StoreUnavailable, FollowerBehindRetention, DiskFull …: as what it does.
    """
    documents: dict[str, Document] = {}
    size_bytes = 0
    log = ReplicaLog.open(str(folder), withholds=withholds)
    try:
        hello = Hello(log.stream, NodeName("restore"), Epoch(0), log.position())
        link = store.connect(hello, _CONNECTS_WITHIN_S)
        told_s = time.monotonic()
        while not stop() and (shipment := link.recv(_LOOKS_FOR_S)) is not None:
            # Shipments that are still there may have older ones than came first.
            documents |= {
                one.name: one
                for one in shipment.documents
                if one.name not in documents or one.version >= documents[one.name].version
            }
            if shipment.parts or shipment.marks:
                _apply(log, shipment)
                size_bytes += sum(len(part.data) for part in shipment.parts)
            if time.monotonic() - told_s > 1.0:
                told_s = time.monotonic()
                tell(f"{size_bytes >> 20} MiB are here")
            if upto is not None and log.end().group >= upto:
                break
        link.close()
        if log.stream is None and not stop():
            raise UnknownStream(f"the store has nothing of stream {stream}", stream=stream)
        end = log.end()
    finally:
        log.close()
    return Fetched(end, documents, size_bytes)


def _apply(log: ReplicaLog, shipment: Shipment) -> None:
    try:
        log.apply(shipment)
    except ReplicaGap as error:
        raise FollowerBehindRetention(
            f"the object store lacks what comes next here: {error.message}",
            hint="Its bytes from there on are older than the store, or were deleted there: put them back, from an older version or a copy of "
            "the store. `millstream follow --rebuild` begins with what the store has.",
        ) from error
    except ShipmentUnreadable as error:
        raise ShipmentUnreadable(
            f"what the object store has is damaged: {error.message}",
            hint="Put the object back, from an older version or a copy of the store.",
        ) from error
