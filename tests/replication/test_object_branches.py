"""A store that has more than the leader that goes on.

Its history becomes the leader's, wherever that breaks off on the way, and nothing is taken away.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.app.homes import wait_for
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.codec.checksums import Bytes
from millstream.errors import LinkLost, StoreUnavailable
from millstream.model.ids import Epoch, GroupNumber, ShardId, StreamId
from millstream.model.positions import Seq
from millstream.model.replication import Document, Hello, NodeName, Shipment
from millstream.nodes.object_stores import FetchedStream, fetch, lineage_document, stored_lineage
from millstream.nodes.restore import restore_stream
from millstream.protocol.replication.leader_events import Heard, StoredUpto
from millstream.protocol.replication.node_promises import SESSIONS, UNPROMISED, Promise, Rank, RoleFact
from millstream.replication.archiver import WalArchiver
from millstream.replication.object_store.reader import StoreReader
from millstream.replication.object_store.store_client import Objects
from millstream.replication.object_store.transport import ObjectStoreTransport
from millstream.wal.files import RealFiles
from millstream.wal.layout import SESSIONS_NAME
from millstream.wal.reader import StreamReader
from millstream.wal.replica.prepare_promotion import prepare_promotion
from millstream.wal.replica.ship_source import durable_marks
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.session_file import write_copy
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=7))
SHARDS = (ShardId(0), ShardId(1))
TABLES = (plain_table(1), plain_table(2))
NEW = Promise(Epoch(1), NodeName("b"))


def write(folder: Path, epoch: int, count: int, mark: str, *, first: int = 0, shards: int = 2) -> None:
    """Write groups on two shards, or on the first alone, over several segments."""
    reservations = MemoryReservations()
    if epoch > 1:
        reservations.reserve_to(Seq(1_000_000 * epoch), epoch=Epoch(epoch))
    options = LogOptions(segment_bytes=40_000)
    with closing(LogWriter.open(str(folder), stream=STREAM, shards=SHARDS, epoch=Epoch(epoch), reservations=reservations, options=options)) as log:  # fmt: skip
        for number in range(first, first + count):
            log.append(plain_ops({number + 1: [(TABLES[number % shards], 1, mark * 2_000)]}, shard_of={1: 0, 2: 1}))


def group_of(folder: Path) -> GroupNumber:
    return max(mark.group for mark in durable_marks(RealFiles(), str(folder)).values())


class Scene:
    """A store, an old leader's log, and a new leader's log: its part of the old one, and its own groups."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.old, self.new, self.store = folder / "old", folder / "new", folder / "store"

    def transport(self, node: str, store: Path | None = None) -> ObjectStoreTransport:
        return ObjectStoreTransport((store or self.store).as_uri(), "web", node=node, polls_s=0.02)

    def archive(
        self,
        folder: Path,
        fact: RoleFact,
        *,
        store: Path | None = None,
        wrap: Callable[[Objects], Any] = lambda objects: objects,
        until: Callable[[WalArchiver], object] | None = None,
        documents: tuple[Document, ...] = (),
    ) -> WalArchiver:
        """Ship a log to the store until the store has everything, or until `until` holds."""
        transport = self.transport(str(fact.promise.node) or "a", store)
        transport._objects = wrap(transport._objects)
        told: list[StoredUpto | Heard] = []
        archiver = WalArchiver(
            "web",
            str(folder),
            fact.promise,
            lambda: transport,
            told.append,
            lineage_document(fact),
            documents=lambda: documents,
        )
        archiver.start()
        group = group_of(folder)
        wait_for(
            lambda: archiver.stored_group >= group or (until is not None and until(archiver)),
            what=archiver.facts,
        )
        archiver.stop(10.0)
        return archiver

    def restored(self, name: str, store: Path | None = None) -> tuple[FetchedStream, StreamReader]:
        """Restore a log from the store alone."""
        folder = self.folder / name
        with closing(self.transport("restore", store)) as transport:
            found = fetch(transport, "web", folder)
        return found, StreamReader(str(folder))

    def names(self, under: str = "web") -> set[str]:
        return {listed.name for listed in self.transport("x")._objects.listed(under)}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Build a store that has more of the old branch than the new one shares; the new branch has grown separately."""
    scene = Scene(tmp_path)
    write(scene.old, 1, 60, "a")
    scene.archive(scene.old, RoleFact())
    shutil.copytree(scene.old, scene.new)
    write(scene.old, 2, 45, "a", first=60)
    scene.archive(scene.old, RoleFact())
    prepare_promotion(str(scene.new))
    return scene


def promoted(scene: Scene) -> RoleFact:
    fact = RoleFact().candidate_for(NEW).promoted(group_of(scene.new))
    write(scene.new, 3, 60, "b", first=60)
    return fact


def same_segments(one: Path, other: Path) -> None:
    names = {path.relative_to(other) for path in other.rglob("*.wal")}
    assert len(names) > 4
    for name in names:
        theirs, ours = (one / name).read_bytes(), (other / name).read_bytes()
        assert theirs[: len(ours)] == ours, name


def test_a_store_that_is_ahead_goes_on_with_the_new_leaders_log_and_keeps_what_it_had(scene: Scene) -> None:
    behind = group_of(scene.new)
    fact = promoted(scene)
    before = scene.names("web/0000000000/groups/00000000000000000000")
    with closing(scene.transport("c")) as transport:
        assert stored_lineage(transport)[0] == Rank(UNPROMISED, group_of(scene.old))
    scene.archive(scene.new, fact)
    found, reader = scene.restored("restored")
    assert reader.token() == StreamReader(str(scene.new)).token()
    same_segments(scene.new, scene.folder / "restored")
    assert found.lineage == fact.lineage
    assert found.lineage.last.behind == behind
    assert before <= scene.names(), "what only the old leader had stored is still there"
    with closing(scene.transport("c")) as transport:
        assert transport.set_aside() == (0,)
    aside = scene.folder / "aside"
    with closing(ObjectStoreTransport(scene.store.as_uri(), "web", upto=Epoch(0))) as transport:
        assert fetch(transport, "web", aside).lineage == RoleFact().lineage
    assert StreamReader(str(aside)).token() == StreamReader(str(scene.old)).token()
    same_segments(scene.old, aside)
    with closing(scene.transport("c")) as transport:
        assert stored_lineage(transport)[0] == Rank(NEW, group_of(scene.new))
    # The leader returns, twice; the store continues where it was.
    write(scene.new, 4, 40, "b", first=120)
    scene.archive(scene.new, fact)
    assert scene.restored("again")[1].token() == StreamReader(str(scene.new)).token()
    same_segments(scene.new, scene.folder / "again")


def test_a_reader_that_was_beyond_where_they_part_is_told(scene: Scene) -> None:
    with closing(scene.transport("reader")) as transport:
        link = transport.connect(Hello(None, NodeName("reader"), Epoch(0), {}), 1.0)
        while link.recv(0.05) is not None:
            pass
        scene.archive(scene.new, promoted(scene))
        with pytest.raises(LinkLost, match="parts from"):
            link.recv(30.0)


def test_a_promotion_without_loss_begins_no_branch(scene: Scene) -> None:
    shutil.rmtree(scene.new)
    shutil.copytree(scene.old, scene.new)
    prepare_promotion(str(scene.new))
    fact = promoted(scene)
    scene.archive(scene.new, fact)
    assert not scene.names("web/0000000000/branches")
    assert scene.restored("restored")[1].token() == StreamReader(str(scene.new)).token()
    same_segments(scene.new, scene.folder / "restored")


class Dying:
    """A store that is gone for good once so many objects were written; the last of them may be there or not."""

    def __init__(self, objects: Objects, writes: int, *, with_last: bool) -> None:
        self._objects = objects
        self._left = writes
        self._with_last = with_last
        self.is_gone = False

    def __getattr__(self, name: str) -> Any:
        if self.is_gone:
            raise StoreUnavailable("it is gone")
        return getattr(self._objects, name)

    def put_new(self, name: str, buffers: Sequence[Bytes]) -> bool:
        return bool(self._write(lambda: self._objects.put_new(name, buffers)))

    def put_large(self, name: str, pieces: Any) -> None:
        self._write(lambda: self._objects.put_large(name, pieces))

    def _write(self, put: Callable[[], Any]) -> Any:
        if self.is_gone:
            raise StoreUnavailable("it is gone")
        self._left -= 1
        if self._left > 0:
            return put()
        self.is_gone = True
        if self._with_last:
            put()
        raise StoreUnavailable("it is gone")


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("with_last", [False, True])
def test_whatever_of_a_branch_is_there_what_is_restored_is_one_leaders_log(scene: Scene, with_last: bool) -> None:
    fact = promoted(scene)
    old, new = StreamReader(str(scene.old)), StreamReader(str(scene.new))
    seen = set()
    for writes in range(1, 40):
        store = scene.folder / f"store-{writes}"
        shutil.copytree(scene.store, store)
        made: list[Dying] = []

        def dying(objects: Objects, writes: int = writes, made: list[Dying] = made) -> Dying:
            made.append(Dying(objects, writes, with_last=with_last))
            return made[0]

        archiver = scene.archive(scene.new, fact, store=store, wrap=dying, until=lambda _, made=made: made[0].is_gone)
        found, reader = scene.restored(f"half-{writes}", store)
        is_new = found.lineage == fact.lineage
        seen.add(is_new)
        if is_new:
            assert reader.persisted_upto() <= new.persisted_upto()
            same_segments(scene.new, scene.folder / f"half-{writes}")
        else:
            assert reader.token() == old.token()
            same_segments(scene.old, scene.folder / f"half-{writes}")
        assert is_new or archiver.stored_group == 0, "what was said to be stored is what is restored"
        if not made[0].is_gone:
            break
        scene.archive(scene.new, fact, store=store)
        assert scene.restored(f"whole-{writes}", store)[1].token() == new.token()
        same_segments(scene.new, scene.folder / f"whole-{writes}")
        shutil.rmtree(store)
    assert seen == {False, True}
    assert not made[0].is_gone, "all of them were played"


def test_two_processes_of_one_leader_meet_in_the_store_and_both_go_on(scene: Scene) -> None:
    """A write of a killed process may arrive after the next process has begun.

    The next process reads what is there, and continues after it.
    """
    with closing(scene.transport("a")) as transport:
        lineage = lineage_document(RoleFact())
        other = WalArchiver("web", str(scene.old), UNPROMISED, lambda: transport, lambda _: None, lineage)
        other.start()
        for epoch in (3, 4):
            write(scene.old, epoch, 10, "a", first=200 * epoch)
            group = group_of(scene.old)
            scene.archive(scene.old, RoleFact())
            wait_for(lambda group=group: other.stored_group >= group, what=other.facts)
        other.stop(10.0)
    assert scene.restored("restored")[1].token() == StreamReader(str(scene.old)).token()
    same_segments(scene.old, scene.folder / "restored")


def test_sessions_that_know_more_than_is_stored_wait_for_it(tmp_path: Path) -> None:
    """A log restored from the store would have to forget them.

    A log restored up to a token has the sessions that know no more than that.
    """
    scene = Scene(tmp_path)
    files = RealFiles()

    def sessions(version: int, upto: int) -> tuple[Document, ...]:
        write_copy(files, str(tmp_path), STREAM, Seq(upto), [b"what they are"])
        return (Document(SESSIONS, version, (tmp_path / SESSIONS_NAME).read_bytes()),)

    write(scene.old, 1, 10, "a")
    scene.archive(scene.old, RoleFact(), documents=sessions(1, 11))
    assert SESSIONS not in scene.restored("before")[0].documents
    write(scene.old, 2, 10, "a", first=10)
    known = sessions(2, 2_000_001)
    scene.archive(scene.old, RoleFact(), documents=known)
    assert scene.restored("behind")[0].documents[SESSIONS] == known[0]
    for at, is_there in ((10, False), (2_000_002, True)):
        home = tmp_path / f"at-{at}"
        restore_stream(scene.store.as_uri(), "web", home, at=f"{STREAM.hex[:8]}.s{at}")
        assert (home / "data" / "wal" / "web" / SESSIONS_NAME).exists() is is_there


def test_a_restore_ends_while_a_leader_goes_on_storing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended once a look found nothing more: never, next to a leader that stored faster than it could read."""
    scene = Scene(tmp_path)
    write(scene.old, 1, 60, "a")
    scene.archive(scene.old, RoleFact())
    upto, added, plain = StreamReader(str(scene.old)).persisted_upto(), [0], StoreReader.recv

    def recv(reader: StoreReader, timeout_s: float) -> Shipment | None:
        found = plain(reader, timeout_s)
        if found is None and added[0] < 5:
            added[0] += 1
            write(scene.old, 1 + added[0], 1, "a", first=59 + added[0])
            scene.archive(scene.old, RoleFact())
            found = plain(reader, timeout_s)
        return found

    monkeypatch.setattr(StoreReader, "recv", recv)
    found = restore_stream(scene.store.as_uri(), "web", tmp_path / "restored")
    assert added[0] < 5
    assert found["persisted_upto"] >= upto
    reader = StreamReader(str(tmp_path / "restored" / "data" / "wal" / "web"))
    assert sum(part.batch.num_rows for part in reader.read_between(Seq(0), reader.persisted_upto())) >= 60
