"""The object store of a home: for a leader that ships to it, a candidate, a restore, and `scrub`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import (
    ConfigError,
    Diverged,
    FollowerBehindRetention,
    MillstreamError,
    ReplicaGap,
    ShipmentUnreadable,
    UnknownStream,
)
from millstream.leadership.node_calls import this_node
from millstream.leadership.node_roles import Roles
from millstream.model.addresses import mask_address
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd, Document, Hello, NodeName
from millstream.protocol.replication.node_promises import LINEAGE, Greeting, Lineage, Rank, RoleFact
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.replication.object_store.transport import ObjectStoreTransport
from millstream.wal.reader import StreamReader
from millstream.wal.replica.replica_log import ReplicaEnd, ReplicaLog

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.ports import LeaderLink

_CONNECTS_WITHIN_S: Final = 10.0
_LOOKS_FOR_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class FetchedStream:
    """The result of a fetch from a store."""

    end: ReplicaEnd
    documents: dict[str, Document]
    size_bytes: int
    damage: tuple[ShipmentUnreadable, ...] = ()
    """The unreadable objects: the first object of each shard."""

    @property
    def lineage(self) -> Lineage:
        """Return the leaders, as far as this log goes."""
        found = self.documents.get(LINEAGE)
        return Lineage() if found is None else Greeting.from_json(found.data).lineage.covered_by(self.end.group)


def store_of(home: Home, stream: str) -> ObjectStoreTransport:
    """Return the configured object store for one of the home's streams. `ConfigError` if none is configured."""
    url = home.config.replication.object_store
    if url is None:
        raise ConfigError(f"{home.config_file} names no object store", hint="Set [replication] object_store.")
    region = RegionId(home.config.streams[stream].region)
    me, fact = this_node(home), Roles(home).of(stream)
    claimant = fact.claimant if fact.promise.node == me else ""
    return ObjectStoreTransport(url, stream, region=region, node=me, claimant=claimant)


def stored_lineage(store: ObjectStoreTransport) -> tuple[Rank | None, Lineage, Seq]:
    """Return how much acknowledged data a store has (None: nothing), who led up to there, and up to which number.

    Raises `StoreUnavailable`.
    """
    found = store.newest()
    if not found.marks:
        return None, Lineage(), Seq(0)
    group = max(mark.group for mark in found.marks.values())
    document = found.documents.get(LINEAGE)
    lineage = (Lineage() if document is None else Greeting.from_json(document).lineage).covered_by(group)
    return Rank(lineage.last.promise, group), lineage, stream_cut(found.marks.values())


def lineage_document(fact: RoleFact) -> Document:
    """Return the leaders as a document for a store: one per promise."""
    greeting = Greeting(fact.lineage, fact.lineage.last.behind)
    return Document(LINEAGE, int(fact.promise.epoch), greeting.to_json())


def fetch(
    store: ObjectStoreTransport,
    stream: str,
    folder: Path,
    *,
    upto: GroupNumber | None = None,
    withholds: bool = False,
    past_damage: bool = False,
    beside_leader: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda _: None,
) -> FetchedStream:
    """Fetch everything that a store has of a stream and a log lacks into that log.

    Args:
        folder: the log's; no process has it open. It is made if it doesn't exist.
        upto: stop with that group, whatever is stored later; None: stop when nothing more comes.
        withholds: whether readers of the log see nothing of it before a leader says so.
        past_damage: if objects are damaged or missing, fetch what precedes them on each shard; `damage`
            names them then.
        beside_leader: end with what the store has once its documents have come: a leader that goes on may
            store more for as long as it is read.

    Raises:
        UnknownStream: neither the store nor the folder has anything of that stream.
        Diverged: the log has other bytes than the store; nothing of it was changed.
        ShipmentUnreadable (`store_damaged`): an object is damaged.
        ShipmentUnreadable, StoreUnavailable, FollowerBehindRetention, DiskFull …: as its parts raise
            them.
    """
    marks = store.newest().marks if past_damage else {}
    damage: dict[ShardId, _Damage] = {}
    taking = _Taking(tell)
    log = ReplicaLog.open(str(folder), withholds=withholds)
    try:
        while True:
            ends = {shard: one.end for shard, one in damage.items()}
            hello = Hello(log.stream, NodeName("restore"), Epoch(0), log.position())
            link = store.connect(hello, _CONNECTS_WITHIN_S, ends)
            try:
                taking.take(log, link, upto, stop, partial(_has_all, store, ends) if beside_leader else None)
                break
            except (ReplicaGap, FollowerBehindRetention, ShipmentUnreadable, Diverged) as error:
                if isinstance(error, Diverged) and not past_damage:
                    raise  # an operator has to decide which of the two is right
                found = _damage_in(error, log, store)
                if not past_damage or found is None:
                    raise _told_of(error, found) from error
                known = damage.get(found.end_of)
                assert known is None or found.end < known.end, f"it was read up to {known}, and failed"
                damage[found.end_of] = found
                tell(found.error.message)
            finally:
                link.close()
        if log.stream is None and not stop():
            if damage:
                raise next(iter(damage.values())).error
            raise UnknownStream(f"the store has nothing of stream {stream}", stream=stream)
        end = log.end()
    finally:
        log.close()
    if damage:
        end = _show_in_front(folder, marks)
    return FetchedStream(end, taking.documents, taking.size_bytes, tuple(one.error for one in damage.values()))


class _Taking:
    """The documents and groups fetched from a store, over several passes."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told_s = time.monotonic()
        self.documents: dict[str, Document] = {}
        self.size_bytes = 0

    def take(
        self,
        log: ReplicaLog,
        link: LeaderLink,
        upto: GroupNumber | None,
        stop: Callable[[], bool],
        has_all: Callable[[], Callable[[ReplicaLog], bool]] | None,
    ) -> None:
        """Take what comes until nothing more does. Raises as `ReplicaLog.apply`, and as the link.

        Args:
            log: the log.
            link: the store's.
            upto: as `fetch`'s.
            stop: as `fetch`'s.
            has_all: called once the documents have come; returns whether a log is complete then.
        """
        is_over: Callable[[ReplicaLog], bool] | None = None
        while not stop() and (shipment := link.recv(_LOOKS_FOR_S)) is not None:
            # Remaining shipments may have older documents than the first ones.
            self.documents |= {
                one.name: one
                for one in shipment.documents
                if one.name not in self.documents or one.version >= self.documents[one.name].version
            }
            if shipment.parts or shipment.marks:
                log.apply(shipment)
                self.size_bytes += sum(len(part.data) for part in shipment.parts)
            if time.monotonic() - self._told_s > 1.0:
                self._told_s = time.monotonic()
                self._tell(f"{self.size_bytes >> 20} MiB are here")
            if upto is not None and log.end().group >= upto:
                return
            if has_all is not None:
                is_over = is_over or has_all()
                if is_over(log):
                    return


def _has_all(store: ObjectStoreTransport, ends: Mapping[ShardId, ByteEnd]) -> Callable[[ReplicaLog], bool]:
    """Return whether a log has what a store has now, as far as it can be read: up to `ends`, without marks if there are any."""
    marks = store.newest().marks

    def has_all(log: ReplicaLog) -> bool:
        if not ends:
            shown = log.marks()
            return all(
                shard in shown
                and shown[shard].durable_offset >= mark.durable_offset
                and shown[shard].group >= mark.group
                for shard, mark in marks.items()
            )
        position = log.position()
        wanted = {shard: ByteEnd(mark.base_offset, mark.byte_end) for shard, mark in marks.items()}
        return all(
            end.position == 0 or (shard in position and position[shard] >= min(end, ends.get(shard, end)))
            for shard, end in wanted.items()
        )

    return has_all


@dataclass(frozen=True, slots=True)
class _Damage:
    """The point from which a shard can't be read."""

    end_of: ShardId
    end: ByteEnd
    """End of the readable part."""
    error: ShipmentUnreadable


def _damage_in(error: MillstreamError, log: ReplicaLog, store: ObjectStoreTransport) -> _Damage | None:
    """Return the damage of the store's bytes that an error reports; None if it is about something else."""
    if "shard" not in error.details or (
        isinstance(error, ShipmentUnreadable | Diverged) and "verified" not in error.details
    ):
        return None
    shard = ShardId(int(error.details["shard"]))
    if isinstance(error, ShipmentUnreadable | Diverged):
        end = ByteEnd(Offset(int(error.details["base_offset"])), int(error.details["verified"]))
    else:
        end = log.position().get(shard, ByteEnd(Offset(0), 0))
    name = store.segment_named(shard, end.base_offset)
    of = f"segment {end.base_offset} of shard {shard}"
    message = (
        f"the object store has no {of}, though it has what follows"
        if name is None
        else f"object {name} is damaged: {error.message}"
    )
    facts: dict[str, Any] = {"shard": int(shard), "base_offset": int(end.base_offset), "byte": end.position}
    return _Damage(shard, end, ShipmentUnreadable(message, code="store_damaged", object=name, **facts))


def _told_of(error: MillstreamError, found: _Damage | None) -> MillstreamError:
    """Return the error for a caller that takes a whole log or nothing."""
    if isinstance(error, ReplicaGap | FollowerBehindRetention):
        return FollowerBehindRetention(
            f"the object store lacks what comes next here: {error.message}",
            hint="Run `millstream scrub` at a node that still has these bytes in its log, or restore them from an older "
            "version or a copy of the store; `millstream follow --rebuild` starts from the store's objects.",
        )
    if found is None and isinstance(error, ShipmentUnreadable) and "object" not in error.details:
        return ShipmentUnreadable(
            f"what the object store has is damaged: {error.message}", code="store_damaged", **error.details
        )
    return error if found is None else found.error


def _show_in_front(folder: Path, marks: Mapping[ShardId, DurableMark]) -> ReplicaEnd:
    """Make a log show its whole groups; return how far that is. The usual marks cover parts that can't be read."""
    writers = {mark.writer for mark in marks.values() if mark.writer}
    alone = len(writers) == 1 and not any(mark.elsewhere is not None and mark.writer for mark in marks.values())
    with contextlib.closing(ReplicaLog.open(str(folder), unmarked=frozenset(marks) if alone else frozenset())) as log:
        return log.end()


def scrub_home(
    home: Home, streams: Sequence[str] = (), *, dry_run: bool = False, tell: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Verify every byte that the store has of streams' logs.

    Args:
        home: a node of theirs, leader or not.
        dry_run: whether nothing is put back.

    Returns:
        By stream `objects` and `bytes` that were read; `mended`, the objects put back (in a dry run:
        those that could be); `damaged`, errors for what is still damaged.

    Raises:
        ConfigError: the home has no object store.
        UnknownStream: there is no such stream, or this node has nothing of it.
        StoreUnavailable, ReplicationError (`other_stream`), ShipmentUnreadable: as `Scrub.run`.
    """
    found = []
    for name in streams or sorted(home.config.streams):
        if name not in home.config.streams:
            raise UnknownStream(f"no stream {name} in {home.config_file}", stream=name)
        wal = home.wal_folder(name)
        with contextlib.closing(store_of(home, name)) as store:
            stream = StreamReader(str(wal)).stream_id
            tell(f"reading what {mask_address(str(home.config.replication.object_store))} has of {name}")
            done = store.scrub(stream, str(wal), mend=not dry_run, tell=tell)
        found.append(
            {
                "stream": name,
                "objects": done.objects,
                "bytes": done.size_bytes,
                "mended": [
                    {
                        "object": one.name,
                        "shard": int(one.shard),
                        "base_offset": int(one.base_offset),
                        "bytes": one.size_bytes,
                        "was": one.was,
                    }
                    for one in done.mended
                ],
                "damaged": [error.as_dict() for error in done.damaged],
            }
        )
    return found
