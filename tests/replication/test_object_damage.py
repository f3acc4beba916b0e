"""An object store in which an object is damaged or gone.

Everything before the object can be restored, and a node that still has the object puts it back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from uuid import uuid4

import pytest
from tests.app.homes import run, wait_for
from tests.replication.test_object_branches import STREAM, Scene, write

from millstream.codec.log_segment import SegmentHeader
from millstream.errors import PositionError, ShipmentUnreadable, UsageError
from millstream.home.home import Home
from millstream.model.ids import StreamId
from millstream.model.marks import DroppedMark
from millstream.model.positions import Offset, Seq
from millstream.nodes.restore import restore_stream
from millstream.protocol.replication.node_promises import RoleFact
from millstream.replication.object_store.scrub import Scrubbed
from millstream.replication.object_store.transport import ObjectStoreTransport
from millstream.testing.errors import coded
from millstream.wal.durable_mark import MarkFile
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader

KEPT = f"{STREAM.hex[:8]}.s"
"""Prefix of the stream's tokens."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A log of two shards with several segments, and the store that has it."""
    scene = Scene(tmp_path_factory.mktemp("stored"))
    write(scene.old, 1, 90, "a")
    scene.archive(scene.old, RoleFact())
    seal(scene)
    return scene


def seal(scene: Scene) -> None:
    """Ship until the store has every sealed segment of the log whole."""
    with closing(scene.transport("a")) as transport:
        assert transport.accept(10.0) is not None
        for shard in (0, 1):
            *sealed, _ = sorted((scene.old / f"{shard:05}").glob("*.wal"))
            wait_for(
                lambda shard=shard, sealed=sealed: (
                    [path.stat().st_size for path in segments(scene.store, shard)]
                    == [path.stat().st_size for path in sealed]
                ),
                what=scene.names,
            )


def segments(store: Path, shard: int = 0) -> list[Path]:
    """Return a shard's sealed segments in a store."""
    return sorted((store / "web" / "0000000000" / f"{shard:010}").glob("*/0*"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def seqs(folder: Path) -> list[int]:
    reader = StreamReader(str(folder))
    found = reader.read_between(Seq(0), reader.persisted_upto())
    return sorted(seq for part in found for seq in part.batch.column("__seq").to_pylist())


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit of its rows": lambda path: flip(path, 20_000),
    "a bit of its header": lambda path: flip(path, 100),
    "its end": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "nothing is left": lambda path: path.write_bytes(b""),
    "it is gone": lambda path: path.unlink(),
}


def broken(stored: Scene, folder: Path, what: str, which: int) -> tuple[Path, Path]:
    """Return a copy of the store with such damage, and the damaged file."""
    store = folder / "store"
    shutil.copytree(stored.store, store)
    damaged = segments(store)[which]
    DAMAGE[what](damaged)
    return store, damaged


def scrubbed(store: Path, log: Path, *, mend: bool = True) -> Scrubbed:
    with closing(ObjectStoreTransport(store.as_uri(), "web")) as transport:
        return transport.scrub(STREAM, str(log), mend=mend, tell=lambda _: None)


@pytest.mark.sampled
@pytest.mark.parametrize(("what", "which"), [*((what, 2) for what in DAMAGE), ("its end", 0), ("it is gone", 0)])
def test_what_lies_in_front_of_a_damaged_segment_is_restored_and_who_has_it_puts_it_back(
    stored: Scene, tmp_path: Path, what: str, which: int
) -> None:
    store, damaged = broken(stored, tmp_path, what, which)
    home = tmp_path / "restored"
    wal = home / "data" / "wal" / "web"
    base, behind = (int(path.name) for path in segments(stored.store)[which : which + 2])
    with pytest.raises(ShipmentUnreadable, check=coded("store_damaged")) as refused:
        restore_stream(store.as_uri(), "web", home)
    details = refused.value.details
    assert (details["shard"], details["base_offset"]) == (0, base)
    assert damaged.exists() == (str(damaged.relative_to(store)) in refused.value.message)
    upto, token = details["persisted_upto"], details["token"]
    # Each record is its own group, on the two shards in turn.
    if what == "a bit of its rows":
        assert 2 * base < upto < 2 * behind
    else:
        assert upto == 2 * (behind if what == "its end" else base)
    if upto:
        assert f"--at {token}" in refused.value.hint
        for at in (f"{KEPT}{upto + 1}", "now"):
            with pytest.raises(ShipmentUnreadable, check=coded("store_damaged")):
                restore_stream(store.as_uri(), "web", home, at=at)
    else:
        assert token is None
        assert "nothing in front of it" in refused.value.message
    # A leader whose own log has the segment whole restores it, and what was begun continues.
    elsewhere = segments(stored.store)[which].read_bytes()
    assert [(one.shard, one.base_offset) for one in scrubbed(store, stored.old, mend=False).mended] == [(0, base)]
    assert damaged.exists() is (what != "it is gone")
    (mended,) = scrubbed(store, stored.old).mended
    assert (damaged.read_bytes(), mended.size_bytes) == (elsewhere, len(elsewhere))
    again = scrubbed(store, stored.old)
    assert (again.mended, again.damaged) == ([], [])
    assert again.size_bytes == sum(path.stat().st_size for shard in (0, 1) for path in segments(store, shard)) + sum(
        path.stat().st_size for path in (store / "web" / "0000000000" / "groups").rglob("0*/*")
    )
    if which:
        assert restore_stream(store.as_uri(), "web", home)["token"] == str(StreamReader(str(stored.old)).token())
        assert seqs(wal) == seqs(stored.old)


def test_a_restore_in_front_of_damage_is_a_log_to_be_written_and_gives_no_number_twice(
    stored: Scene, tmp_path: Path
) -> None:
    store, _ = broken(stored, tmp_path, "a bit of its header", 2)
    home = tmp_path / "restored"
    upto = 2 * int(segments(stored.store)[2].name)
    # A moment is a commit's, in microseconds. As with `query --as-of`, nothing after it is there.
    moment = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC) + timedelta(microseconds=upto - 7)
    told: list[str] = []
    with pytest.raises(ShipmentUnreadable, check=coded("store_damaged")):
        restore_stream(store.as_uri(), "web", home, at=(moment + timedelta(microseconds=7)).isoformat())
    with pytest.raises(UsageError, match="was committed after"):
        restore_stream(store.as_uri(), "web", home, at="2023-11-14")
    for wrong, code in (("soon", "invalid_time"), ("2999-01-01", "time_from_future"), ("ffffffff.s1", "invalid_token")):
        with pytest.raises(PositionError, check=coded(code)):
            restore_stream(store.as_uri(), "web", home, at=wrong)
    found = restore_stream(
        store.as_uri(), "web", home, at=moment.astimezone(timezone(timedelta(hours=-3))).isoformat(), tell=told.append
    )
    assert found["token"] == f"{KEPT}{upto - 7}"
    assert any("is damaged" in line for line in told)
    wal = home / "data" / "wal" / "web"
    assert seqs(wal) == seqs(stored.old)[: upto - 7]
    # The numbers lost with the damage have been seen, and aren't given again.
    with Home(home, needs_source=False).open_catalog() as catalog:
        reserved = catalog.reservations(catalog.stream("web").id).reserved()
    assert reserved >= StreamReader(str(stored.old)).persisted_upto()


@pytest.mark.parametrize("what", ["a bit of its rows", "a bit of its header"])
def test_of_a_log_whose_beginning_is_dropped_only_what_is_known_to_follow_it_is_restored(
    stored: Scene, tmp_path: Path, what: str
) -> None:
    scene = Scene(tmp_path)
    shutil.copytree(stored.old, scene.old)
    first, second, third, *_ = sorted((scene.old / "00000").glob("*.wal"))
    begin = int(third.stem)
    with closing(MarkFile.open(RealFiles(), str(scene.old / "00000"))) as mark:
        mark.move_dropped(DroppedMark(Seq(2 * begin - 1), Offset(begin)))
    first.unlink()
    second.unlink()
    scene.archive(scene.old, RoleFact())
    seal(scene)
    # The other shard lacks everything before its first segment, or before the beginning of the
    # dropped one.
    DAMAGE[what](segments(scene.store, 1)[0 if what == "a bit of its header" else 2])
    with pytest.raises(ShipmentUnreadable, check=coded("store_damaged")) as refused:
        restore_stream(scene.store.as_uri(), "web", tmp_path / "restored")
    upto = refused.value.details["persisted_upto"]
    if what == "a bit of its header":
        assert upto == 0
        return
    assert upto > 2 * begin
    restore_stream(scene.store.as_uri(), "web", tmp_path / "restored", at=f"{KEPT}{upto}")
    reader = StreamReader(str(tmp_path / "restored" / "data" / "wal" / "web"))
    assert (reader.first_seq(), reader.persisted_upto()) == (2 * begin, upto)
    assert upto % 2, "the next number is the damaged shard's"
    assert (
        sum(part.batch.num_rows for part in reader.read_between(Seq(2 * begin - 1), Seq(upto))) == upto - 2 * begin + 1
    )


def test_a_segment_is_put_back_by_nobody_who_cant_show_that_it_is_the_same(stored: Scene, tmp_path: Path) -> None:
    store, damaged = broken(stored, tmp_path, "its end", 2)
    before = damaged.read_bytes()
    other, lacks = tmp_path / "other", tmp_path / "lacks"
    write(other, 1, 90, "b")
    shutil.copytree(stored.old, lacks)
    (lacks / "00000" / f"{int(damaged.name):020}.wal").unlink()
    for log, why in ((other, "nothing that is stored shows"), (lacks, "doesn't have it")):
        found = scrubbed(store, log)
        assert found.mended == []
        (error,) = found.damaged
        assert why in error.message
        assert error.details["object"] == str(damaged.relative_to(store))
    assert damaged.read_bytes() == before
    # Nor is anything overwritten that a damaged shipment would have named.
    (shipment,) = (store / "web" / "0000000000" / "groups").rglob("0*/*")
    flip(shipment, 200)
    found = scrubbed(store, stored.old)
    assert [one.name for one in found.mended] == [str(damaged.relative_to(store))]
    assert [error.details["object"] for error in found.damaged] == [str(shipment.relative_to(store))]


@pytest.mark.parametrize("of", ["another place", "another log"])
def test_a_segment_in_another_ones_place_is_never_put_into_the_store(stored: Scene, tmp_path: Path, of: str) -> None:
    store, damaged = broken(stored, tmp_path, "it is gone", 2)
    log = tmp_path / "log"
    shutil.copytree(stored.old, log)
    own = log / "00000" / f"{damaged.name}.wal"
    if of == "another place":
        shutil.copy(log / "00000" / f"{segments(stored.store)[1].name}.wal", own)
    else:
        data = own.read_bytes()
        header = replace(SegmentHeader.decode(data), stream=StreamId(uuid4()))
        own.write_bytes(header.encode() + data[len(header.encode()) :])
    found = scrubbed(store, log)
    assert not found.mended
    (error,) = found.damaged
    assert error.details["base_offset"] == int(damaged.name)
    assert ("another segment" if of == "another place" else "to stream") in error.message
    assert not damaged.exists()


def test_a_last_segment_that_lost_its_end_is_stored_once_more_by_whoever_leads(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    write(scene.old, 1, 6, "a")
    for epoch in (2, 3):  # opening seals what was left open; nothing follows in shard 1
        write(scene.old, epoch, 30, "a", first=40 * epoch, shards=1)
        scene.archive(scene.old, RoleFact())
        seal(scene)
    (last,) = segments(scene.store, 1)
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    write(scene.old, 4, 1, "a", first=200, shards=1)
    scene.archive(scene.old, RoleFact())
    seal(scene)
    assert last.read_bytes() == whole
    assert scene.restored("restored")[1].token() == StreamReader(str(scene.old)).token()


def test_scrub_is_a_command(stored: Scene, tmp_path: Path) -> None:
    store, damaged = broken(stored, tmp_path, "it is gone", 1)
    folder = tmp_path / "home"
    shutil.copytree(stored.old, folder / "data" / "wal" / "web")
    (folder / "millstream.toml").write_text(
        f'[streams.web]\n[replication]\nnode = "a"\nobject_store = "{store.as_uri()}"\n'
    )
    would, does = (run(folder, "scrub", *more, "--json") for more in (("--dry-run",), ()))
    assert (would.returncode, does.returncode) == (3, 0), (would.stderr, does.stderr)
    for done in (would, does):
        (found,) = json.loads(done.stdout)
        assert [one["base_offset"] for one in found["mended"]] == [int(damaged.name)]
        assert found["damaged"] == []
    assert damaged.read_bytes() == segments(stored.store)[1].read_bytes()
