"""Shipments through an object store, a folder and S3's protocol.

The tests of all transports, and those of leadership, retention and refusals.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from tests.app.homes import wait_for

from millstream.codec.checksums import Bytes
from millstream.errors import Fenced, LinkLost, ShipmentUnreadable, StoreUnavailable, UsageError
from millstream.model.ids import Epoch, ShardId
from millstream.model.positions import Offset
from millstream.model.replication import OBJECT_STORE, ByteEnd, Document, ReplicaPosition, Shipment
from millstream.ports import FollowerLink
from millstream.replication.object_store.store_client import Objects
from millstream.replication.object_store.transport import ObjectStoreTransport
from millstream.testing.errors import code_of, coded
from millstream.testing.s3 import EmbeddedS3
from millstream.testing.transport import (
    EPOCH,
    STREAM,
    Arrived,
    TransportConformance,
    arrived,
    hello_of,
    next_error,
    next_word,
    shipments_of,
    take_all,
    take_until,
    whole_position,
)
from millstream.workers import Worker

NOTHING: Final[ReplicaPosition] = {}
NO_OPTIONS: Final[Mapping[str, str]] = {}


class StoreStage:
    window_bytes = 4 << 20

    def __init__(self, url: str, options: Mapping[str, str] = NO_OPTIONS) -> None:
        self._url = url
        self._options = options
        self._made: list[ObjectStoreTransport] = []
        self._leader = self.node("north-1")

    def node(self, name: str) -> ObjectStoreTransport:
        """Return a node's own transport."""
        transport = ObjectStoreTransport(
            self._url, "web", node=name, options=self._options, window_bytes=self.window_bytes, polls_s=0.02
        )
        self._made.append(transport)
        return transport

    def leader(self) -> ObjectStoreTransport:
        return self._leader

    def follower(self) -> ObjectStoreTransport:
        return self.node("north-2")

    def spoil(self, link: FollowerLink) -> None:
        wait_for(lambda: link._number > 0, what=lambda: "nothing is stored")  # type: ignore[attr-defined]
        self.objects.put_new(self._leader._layout.group(EPOCH, link._number), [b"nonsense"])  # type: ignore[attr-defined]

    @property
    def objects(self) -> Objects:
        return self._leader._objects

    def names(self, under: str = "web") -> list[str]:
        return [listed.name for listed in self.objects.listed(under)]

    def close(self) -> None:
        for transport in self._made:
            transport.close()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreStage]:
    if request.param == "folder":
        stage = StoreStage((tmp_path / "store").as_uri())
    else:
        server = request.getfixturevalue("s3")
        stage = StoreStage(f"{server.url}/{tmp_path.name}", server.options)
    yield stage
    stage.close()


class TestFolder(TransportConformance):
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[StoreStage]:
        stage = StoreStage((tmp_path / "store").as_uri())
        yield stage
        stage.close()


class TestS3(TransportConformance):
    large_bytes = 20_000_000  # the S3 server is written in Python

    @pytest.fixture
    def stage(self, s3: EmbeddedS3, tmp_path: Path) -> Iterator[StoreStage]:
        stage = StoreStage(f"{s3.url}/{tmp_path.name}", s3.options)
        yield stage
        stage.close()


def ship(link: FollowerLink, shipments: list[Shipment], *, singly: bool = False) -> None:
    """Send, and return once everything is acknowledged. `singly` waits for each, so that each is its own object."""
    for number, shipment in enumerate(shipments, 1):
        link.send(shipment)
        if singly or number == len(shipments):
            while next_word(link).group < max(mark.group for mark in shipment.marks.values()):
                pass


def leads(stage: StoreStage, transport: ObjectStoreTransport | None = None) -> FollowerLink:
    link = (transport or stage.leader()).accept(30.0)
    assert link is not None
    return link


def read(stage: StoreStage, shipments: list[Shipment], begun: int = 0) -> Arrived:
    """Return what a follower gets that has the first `begun` shipments."""
    position = whole_position(shipments[:begun])
    link = stage.follower().connect(hello_of(position=position), 30.0)
    end = arrived(shipments)
    found = take_until(link, lambda found: found.marks == end.marks and ends(found, position) == ends(end), position)
    link.close()
    return found


def ends(found: Arrived, begun: ReplicaPosition = NOTHING) -> dict[ShardId, ByteEnd]:
    """Return the end in each shard of a follower that started with `begun`."""
    reached = dict(begun)
    for (shard, base), data in found.segments.items():
        start = begun[shard].position if shard in begun and begun[shard].base_offset == base else 0
        reached[shard] = max(ByteEnd(base, start + len(data)), reached.get(shard, ByteEnd(base, 0)))
    return reached


def test_what_is_stored_is_acknowledged_and_where_it_ends_is_said_at_the_next_link(stage: StoreStage):
    sent = shipments_of(is_sealed=False)
    link = leads(stage)
    assert (link.hello.stream, link.hello.node, link.hello.position) == (None, OBJECT_STORE, {})
    for shipment in sent:
        link.send(shipment)
    while (word := next_word(link)).group < len(sent):
        assert word.position != whole_position(sent)
    assert (word.node, word.promised, word.position) == (OBJECT_STORE, EPOCH, whole_position(sent))
    assert word.persisted_upto == sent[-1].marks[ShardId(0)].persisted_upto
    assert stage.leader().accept(0.0) is None
    link.close()
    again = leads(stage)
    assert again.hello.stream == STREAM
    assert again.hello.position == whole_position(sent)
    assert again.hello.promised == EPOCH
    assert again.hello.documents == {"catalog": 7}


def test_sealed_segments_are_objects_and_what_they_cover_goes(stage: StoreStage):
    sent = shipments_of(segments=4)
    ship(leads(stage), sent, singly=True)
    wait_for(lambda: len(stage.names("web/0000000000/groups")) == 1, what=stage.names)
    for key, data in arrived(sent).segments.items():
        name = stage.leader()._layout.segment(key[0], EPOCH, key[1])
        assert stage.objects.get(name) == data
    assert len(stage.names("web/0000000000/documents")) == 1
    for begun in (0, 1, 9, len(sent) - 1):
        assert read(stage, sent, begun).marks == sent[-1].marks
    whole = read(stage, sent)
    assert whole.segments == arrived(sent).segments
    assert whole.documents == arrived(sent).documents


def test_a_leader_that_comes_back_goes_on_and_seals_what_it_had_begun(stage: StoreStage):
    sent = shipments_of(segments=3)
    link = leads(stage)
    ship(link, sent[:10], singly=True)
    link.close()
    ship(leads(stage), sent[10:], singly=True)
    wait_for(lambda: len(stage.names("web/0000000000/groups")) == 1, what=stage.names)
    assert read(stage, sent).same_as(arrived(sent))


@pytest.mark.parametrize("begun", [0, 3, 9])
def test_a_reader_that_lags_while_shipments_go_misses_nothing(stage: StoreStage, begun: int):
    sent = shipments_of(segments=3)
    link = leads(stage)
    ship(link, sent[:4], singly=True)
    follower = stage.follower().connect(hello_of(position=whole_position(sent[:begun])), 30.0)
    first = follower.recv(1.0)
    ship(link, sent[4:], singly=True)
    wait_for(lambda: len(stage.names("web/0000000000/groups")) == 1, what=stage.names)
    position = whole_position(sent[:begun])
    found = Arrived()
    if first is not None:
        found.add(first, position)
    wanted = arrived(sent)
    while found.marks != wanted.marks or ends(found, position) != ends(wanted):
        shipment = follower.recv(30.0)
        assert shipment is not None
        found.add(shipment, position)


def test_a_follower_that_says_hello_again_gets_all_from_there(stage: StoreStage):
    sent = shipments_of(is_sealed=False)
    ship(leads(stage), sent)
    link = stage.follower().connect(hello_of(), 30.0)
    take_all(link, sent)
    position = whole_position(sent[:9])
    link.send(hello_of(position=position))
    again = take_until(link, lambda found: found.marks == sent[-1].marks, position)
    assert ends(again, position) == whole_position(sent)


def test_another_stream_of_that_name_is_refused(stage: StoreStage):
    ship(leads(stage), shipments_of(is_sealed=False))
    other = hello_of(position=whole_position(shipments_of()))
    link = stage.follower().connect(type(other)(type(STREAM)(int=7), other.node, other.promised, {}), 30.0)
    assert code_of(next_error(link.recv)) == "other_stream"


# --- leadership ------------------------------------------------------------------------------------------------------


def test_a_claim_is_won_by_one(stage: StoreStage):
    assert stage.leader().greatest_claim() == 0
    nodes = [stage.node(f"north-{number}") for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda pair: pair[1].claim(Epoch(5), f"north-{pair[0]}"), enumerate(nodes)))
    assert sum(won) == 1
    winner = won.index(True)
    assert nodes[winner].claim(Epoch(5), f"north-{winner}")
    assert not nodes[winner].claim(Epoch(4), f"north-{winner}")
    assert stage.leader().greatest_claim() == 5
    assert nodes[winner].claim(Epoch(7), "another")
    assert not nodes[winner].claim(Epoch(5), f"north-{winner}")


def test_whoever_claims_fences_who_leads_and_has_all_that_was_stored(stage: StoreStage):
    sent = shipments_of(is_sealed=False)
    old = leads(stage)
    ship(old, sent[:5], singly=True)
    promoted = stage.node("north-2")
    assert promoted.claim(Epoch(EPOCH + 1), "north-2")
    assert promoted.stored().position == whole_position(sent[:5])
    old.send(sent[5])
    error = next_error(old.recv)
    assert isinstance(error, Fenced)
    assert error.details["epoch"] == EPOCH + 1
    with pytest.raises(Fenced):
        old.send(sent[5])
    assert read(stage, sent[:5]).same_as(arrived(sent[:5]))
    # The old leader returns, and still doesn't know: its first write is refused, too.
    again = leads(stage)
    again.send(sent[5])
    assert isinstance(next_error(again.recv), Fenced)
    follower = stage.follower().connect(hello_of(), 30.0)
    new = leads(stage, promoted)
    assert new.hello.position == whole_position(sent[:5])
    later = [
        Shipment(one.stream, one.region, Epoch(EPOCH + 1), one.parts, one.marks, {}, (), one.leader_end)
        for one in sent[5:]
    ]
    ship(new, later, singly=True)
    found = take_until(follower, lambda found: found.marks == sent[-1].marks)
    assert found.segments == arrived(sent).segments


def test_the_first_leader_is_fenced_as_any_other_and_goes_on_after_a_restart(stage: StoreStage):
    """Regression: the first leader's epoch is 0, with which a link also began.

    The leader had claimed nothing, so nothing ended it, and it began again at the first name.
    """
    sent = [replace(one, epoch=Epoch(0)) for one in shipments_of(is_sealed=False)]
    ship(leads(stage), sent[:2], singly=True)
    restarted = leads(stage, stage.node("north-1"))
    ship(restarted, sent[2:4], singly=True)
    promoted = stage.node("north-2")
    assert promoted.claim(Epoch(1), "north-2")
    restarted.send(sent[4])
    assert isinstance(next_error(restarted.recv), Fenced)
    assert promoted.stored().position == whole_position(sent[:4])
    again = leads(stage, stage.node("north-1"))
    again.send(sent[4])
    assert isinstance(next_error(again.recv), Fenced)


def test_two_that_lead_under_one_epoch_cant_both_store(stage: StoreStage):
    sent = shipments_of(is_sealed=False)
    first = leads(stage)
    ship(first, sent[:2])
    second = leads(stage, stage.node("north-1"))
    ship(second, sent[2:3])
    first.send(sent[3])
    assert isinstance(next_error(first.recv), Fenced)
    ship(second, sent[3:4])
    other = leads(stage, stage.node("north-9"))
    other.send(sent[3])
    assert isinstance(next_error(other.recv), Fenced)


def test_whoever_claims_looks_again_where_more_was_stored_meanwhile(stage: StoreStage):
    sent = shipments_of(is_sealed=False)
    old = leads(stage)
    ship(old, sent[:2])
    promoted = stage.node("north-2")
    new = leads(stage, promoted)
    ship(old, sent[2:3])
    later = [Shipment(one.stream, one.region, Epoch(EPOCH + 1), one.parts, one.marks) for one in sent]
    new.send(later[2])
    assert isinstance(next_error(new.recv), LinkLost)
    new = leads(stage, promoted)
    assert new.hello.position == whole_position(sent[:3])
    ship(new, later[3:])
    assert read(stage, sent).segments == arrived(sent).segments


# --- refusals --------------------------------------------------------------------------------------------------------


class Careless:
    """A store that overwrites existing objects, even if asked not to."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def put_new(self, name: str, buffers: Sequence[Bytes]) -> bool:
        self._objects.put_large(name, buffers)
        return True


def test_a_store_that_ignores_conditions_is_found_out(stage: StoreStage):
    stage.leader().check()
    transport = stage.node("north-1")
    transport._objects = Careless(transport._objects)
    with pytest.raises(StoreUnavailable, check=coded("store_unusable"), match="If-None-Match"):
        transport.accept(30.0)
    assert stage.names() == []


def test_what_others_have_put_there_is_passed_over(stage: StoreStage):
    """Such as a file manager's files, or an object that a console keeps for a folder."""
    sent = shipments_of()
    ship(leads(stage), sent)
    wait_for(lambda: any("/0000000001/" in name for name in stage.names()), what=stage.names)
    for folder in {name.rpartition("/")[0] for name in stage.names()}:
        stage.objects.put_new(f"{folder}/.DS_Store", [b"x"])
        stage.objects.put_new(f"{folder}/~", [b"x"])
    for folder in ("groups", "documents", "branches"):
        stage.objects.put_new(f"web/0000000000/{folder}/.keep", [b""])
    assert read(stage, sent).same_as(arrived(sent))
    assert leads(stage, stage.node("north-1")).hello.position == whole_position(sent)
    assert stage.node("north-2").claim(Epoch(EPOCH + 1), "north-2")


def test_an_object_that_is_damaged_is_named(stage: StoreStage):
    sent = shipments_of(is_sealed=False)
    link = leads(stage)
    ship(link, sent)
    link.close()
    *_, last = stage.names("web/0000000000/groups")
    data = bytes(stage.objects.get(last) or b"")
    stage.objects.delete([last])
    stage.objects.put_new(last, [data[:-1]])
    for found in (
        lambda: stage.node("north-1").accept(30.0),
        lambda: take_all(stage.follower().connect(hello_of(), 30.0), sent),
    ):
        with pytest.raises(ShipmentUnreadable) as unreadable:
            found()
        assert unreadable.value.details["object"] == last


def test_the_document_that_was_stored_last_is_the_newest_whatever_its_version(stage: StoreStage):
    """The leader counts versions by a clock, which may be set back while the leader restarts."""
    sent = shipments_of(is_sealed=False)
    for clock, shipment in zip((2000, 1000, 1500), sent, strict=False):
        link = leads(stage)
        told = b"at %d" % clock
        link.send(replace(shipment, documents=(Document("catalog", clock, told),)))
        next_word(link)
        assert stage.node("north-2").newest().documents["catalog"] == told
        link.close()
        stage.leader().close()
        stage._leader = stage.node("north-1")


def test_what_is_no_store_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for url in ("bucket/prefix", "file://elsewhere/folder"):
        with pytest.raises(UsageError):
            ObjectStoreTransport(url, "web")
    with pytest.raises(StoreUnavailable, check=coded("store_unusable")):
        ObjectStoreTransport("carrier-pigeon://loft", "web")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreUnavailable, match="folder"):
        ObjectStoreTransport((tmp_path / "file").as_uri(), "web").accept(1.0)
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(UsageError, check=coded("missing_extra")) as caught:
        ObjectStoreTransport("s3://bucket", "web")
    assert caught.value.details["extra"] == "s3"


def test_a_store_that_is_gone_or_refuses_is_told_of_and_its_link_ends(tmp_path: Path):
    with EmbeddedS3(tmp_path) as server:
        transport = ObjectStoreTransport(server.url, "web", options=server.options)
        link = leads(None, transport)  # type: ignore[arg-type]
        sent = shipments_of(is_sealed=False)
        ship(link, sent[:2])
        with pytest.raises(StoreUnavailable):
            ObjectStoreTransport("s3://nobucket", "web", options=server.options).accept(1.0)
        server.kill()
        link.send(sent[2])
        assert isinstance(next_error(link.recv), StoreUnavailable)
        with pytest.raises(StoreUnavailable):
            transport.accept(1.0)
        transport.close()
        with pytest.raises(LinkLost):
            transport.connect(hello_of(), 1.0)


def test_a_folder_that_cant_be_written_loses_nothing(tmp_path: Path):
    stage = StoreStage((tmp_path / "store").as_uri())
    link = leads(stage)
    sent = shipments_of(is_sealed=False)
    ship(link, sent[:3], singly=True)
    folder = tmp_path / "store" / "web"
    folder.rename(tmp_path / "away")
    folder.write_text("in the way")
    link.send(sent[3])
    assert isinstance(next_error(link.recv), StoreUnavailable)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    again = leads(stage)
    assert again.hello.position == whole_position(sent[:3])
    ship(again, sent[3:])
    assert read(stage, sent).same_as(arrived(sent))
    stage.close()


def test_a_segment_of_one_leader_is_the_same_bytes_whoever_reads_it(stage: StoreStage):
    """A large segment goes in parts and arrives in pieces; its footer isn't cut."""
    body = bytearray(os.urandom(20_000_000))
    body[-60:-56] = (5_000_000).to_bytes(4, "little")
    (made,) = shipments_of(segments=1, shards=1, segment_bytes=10, part_bytes=10)
    part = made.parts[0]
    whole = Shipment(
        STREAM,
        made.region,
        EPOCH,
        (type(part)(ShardId(0), Offset(0), 0, bytes(body), True),),
        made.marks,
        {},
        (),
        made.leader_end,
    )
    ship(leads(stage), [whole])
    name = stage.leader()._layout.segment(ShardId(0), EPOCH, Offset(0))
    wait_for(lambda: stage.objects.get(name) == body, what=stage.names)
    link = stage.follower().connect(hello_of(), 30.0)
    found = take_until(link, lambda found: bool(found.ended))
    assert bytes(found.segments[ShardId(0), Offset(0)]) == body
    assert [size for size in found.sizes if size] == [8 << 20, 20_000_000 - (8 << 20)]


def test_a_link_that_lacks_a_thread_leaves_none_behind(stage: StoreStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one waited for work for ever, one more with each try."""
    start = Worker.start

    def begun(worker: Worker) -> Worker:
        if worker.name == "object-store-seals":
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", begun)
        with pytest.raises(OSError, match="no more threads"):
            stage.leader().accept(30.0)
    wait_for(
        lambda: not [one for one in threading.enumerate() if one.name == "object-store-writes"],
        what=threading.enumerate,
    )
    ship(leads(stage), shipments_of(segments=1))
