"""The store of consumers' state: what was noted is there after a restart, also if the last write was torn."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import cast

import pytest

from millstream.delivery.ack_ids import AckIds
from millstream.delivery.consumer_store import LOG_NAME, Store, Stored, died_letters, put_consumers
from millstream.delivery.definition import Definition
from millstream.delivery.records.record_messages import Origin
from millstream.delivery.state_repair import repair
from millstream.errors import DeliveryError, MillstreamError
from millstream.protocol.delivery import Consumer, DeliveryId, Limits, Message, State, position_of
from millstream.testing.errors import coded
from millstream.wal.files import RealFile


def stored(name: str, incarnation: str = "aa") -> Stored:
    return Stored(Definition.parse({"name": name}), incarnation, State.begin(0))


def messages(count: int, begin: int = 1) -> list[Message]:
    return [
        Message(
            position_of(n), n - 1, f"web-0-1-{n}", (f"g{n}",), 1, barrier=False, size=10, origin=Origin(f"g{n}", "{}")
        )
        for n in range(begin, begin + count)
    ]


def played(store: Store, name: str) -> Consumer:
    """Play a consumer whose first message dies, whose second is in flight, and whose third is settled."""
    machine = Consumer(Limits(max_deliver=1), State.begin(0), run=7)
    machine.offer(messages(3), 3)
    first, _, third = machine.receive(1000, 3)
    machine.nack([first.delivery_id], 1001)
    machine.ack([third.delivery_id])
    changes = machine.take_changes()
    store.change(name, changes, died_letters(changes))
    return machine


def test_state_outlives_a_restart(tmp_path: Path) -> None:
    store, none = Store.open(tmp_path / "web")
    assert none == {}
    for name in ("one", "two", "gone"):
        store.create(stored(name))
    machine = played(store, "one")
    store.remove("gone")
    # No sync: a killed process loses nothing that was written.
    again, found = Store.open(tmp_path / "web")
    assert sorted(found) == ["one", "two"]
    state, expected = found["one"].state, machine.snapshot()
    assert (state.cursor, state.run, state.counters, list(state.dead)) == (1, 7, expected.counters, ["web-0-1-1"])
    assert state.facts == expected.facts
    assert found["one"].letters == {"web-0-1-1": ["g1", "{}"]}
    assert again.key == store.key
    for one in (store, again):
        one.close()


@pytest.mark.parametrize("harm", ["cut", "flip", "append", "zeros"])
def test_a_torn_end_is_dropped(tmp_path: Path, harm: str) -> None:
    store, _ = Store.open(tmp_path)
    store.create(stored("one"))
    played(store, "one")  # not durable: a power cut may tear it
    log = tmp_path / LOG_NAME
    data = bytearray(log.read_bytes())
    if harm == "cut":
        del data[-3:]
    elif harm == "flip":
        data[-3] ^= 1
    elif harm == "append":
        data += b"\x05\x00"
    else:
        data += bytes(4096)
    log.write_bytes(data)
    store, found = Store.open(tmp_path)
    assert found["one"].state.counters.delivered == (3 if harm in {"append", "zeros"} else 0)
    store.create(stored("two"))
    store.close()
    store, found = Store.open(tmp_path)
    assert sorted(found) == ["one", "two"]
    store.close()


@pytest.mark.parametrize("harm", ["flip", "zeros", "cut"])
def test_damage_below_the_durable_end_stops_everything_until_a_repair_accepts_the_loss(
    tmp_path: Path, harm: str
) -> None:
    store, _ = Store.open(tmp_path)
    store.create(stored("one"))
    before = (tmp_path / LOG_NAME).stat().st_size
    for name in ("two", "three"):
        store.create(stored(name))
    store.close()
    log = tmp_path / LOG_NAME
    data = bytearray(log.read_bytes())
    if harm == "flip":
        data[before + 20] ^= 1
    elif harm == "zeros":
        data[before:] = bytes(len(data) - before)
    else:
        del data[before:]
    log.write_bytes(data)
    for _ in range(2):
        with pytest.raises(DeliveryError, match=f"from byte {before} on", check=coded("consumer_state_unreadable")):
            Store.open(tmp_path)
        assert log.read_bytes() == data
    damage, aside = repair(tmp_path)
    assert damage is not None
    assert aside is not None
    assert (damage.byte, damage.kept) == (before, ("one",))
    assert (damage.lost_changes, damage.touched) == ((1, ("three",)) if harm == "flip" else (0, ()))
    assert Path(aside).read_bytes() == data[before:]
    store, found = Store.open(tmp_path)
    assert sorted(found) == ["one"]
    store.close()


def test_a_repair_cuts_at_an_entry_that_cannot_follow_the_earlier_ones(tmp_path: Path) -> None:
    store, _ = Store.open(tmp_path)
    store.create(stored("one"))
    before = (tmp_path / LOG_NAME).stat().st_size
    store.remove("two")  # as a log has it that lacks an entry
    store.create(stored("three"))
    store.close()
    with pytest.raises(DeliveryError, check=coded("consumer_state_unreadable")):
        Store.open(tmp_path)
    damage, _ = repair(tmp_path)
    assert damage is not None
    assert (damage.byte, damage.kept, damage.lost_changes) == (before, ("one",), 2)
    assert damage.touched == ("three", "two")
    store, found = Store.open(tmp_path)
    assert list(found) == ["one"]
    store.close()


def test_a_state_that_was_replaced_takes_nothing_more(tmp_path: Path) -> None:
    """A promotion replaces the state, perhaps while a process that was stopped still has the old one."""
    store, _ = Store.open(tmp_path)
    store.create(stored("old"))
    played(store, "old")
    put_consumers(tmp_path, store.key, [stored("new")])
    for note in (lambda: played(store, "old"), store.sync, lambda: store.compact([stored("old")])):
        with pytest.raises(DeliveryError, check=coded("consumer_state_missing")):
            note()
    assert list(Store.open(tmp_path)[1]) == ["new"]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path)[0].close()
    (tmp_path / LOG_NAME).write_bytes(b"something else")
    with pytest.raises(DeliveryError, check=coded("consumer_state_unreadable")):
        Store.open(tmp_path)


@pytest.mark.long
def test_compaction_keeps_the_state_and_shrinks_the_log(tmp_path: Path) -> None:
    store, _ = Store.open(tmp_path)
    store.create(stored("one"))
    machine = Consumer(Limits(), State.begin(0), run=7)
    n = 0
    while not store.wants_compaction:
        machine.offer(messages(500, n + 1), n + 500)
        n += 500
        machine.ack([delivery.delivery_id for delivery in machine.receive(n, 500)])
        store.change("one", machine.take_changes(), {})
    size = (tmp_path / LOG_NAME).stat().st_size
    assert size > 1 << 20
    store.compact([Stored(Definition.parse({"name": "one"}), "aa", machine.snapshot())])
    assert (tmp_path / LOG_NAME).stat().st_size < size / 100
    assert not store.wants_compaction
    played(store, "one")
    store.close()
    store, found = Store.open(tmp_path)
    assert (found["one"].state.counters.acked, found["one"].state.cursor) == (n + 1, 1)
    store.close()


def test_the_files_are_their_owners_alone(tmp_path: Path) -> None:
    Store.open(tmp_path / "web")[0].close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "web").iterdir()}
    assert modes == {"consumers.log": 0o600, "key": 0o600}


def test_an_ack_id_is_one_consumers() -> None:
    delivery = DeliveryId(3, 2**60, 1_790_000_000_000, 2**31)
    ids = AckIds(b"k" * 32, "aa")
    text = ids.text(delivery)
    assert ids.read(text) == delivery
    assert len(text) == 54
    assert (AckIds(b"k" * 32, "ab").read(text), AckIds(b"j" * 32, "aa").read(text)) == (None, None)
    for run, position, counts in ((0, 2**60 - 1, True), (1, 2**60, True), (1, 2**60 - 1, False)):
        bounded = AckIds(b"k" * 32, "aa", [[delivery.run + run, position]]).read(text)
        assert bounded == (delivery if counts else delivery._replace(generation=-1))
    for at in range(len(text)):
        changed = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        assert ids.read(changed) is None


class FailingDisk:
    """A log's file on a disk that takes nothing more, or whose fsync fails once."""

    def __init__(self, file: RealFile, fails: str) -> None:
        self._file = file
        self._fails = fails

    def pwrite(self, data: bytes, position: int) -> None:
        """Fail if writes do."""
        if self._fails == "write":
            raise OSError(errno.ENOSPC, "no space")
        self._file.pwrite(data, position)

    def sync(self) -> None:
        """Fail once if fsyncs do: the next one says that all is well, as the system's does."""
        if self._fails == "fsync":
            self._fails = ""
            raise OSError(errno.EIO, "failed")
        self._file.sync()

    def is_at(self, path: str) -> bool:
        """Return whether the path names this file."""
        return self._file.is_at(path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_nothing_counts_as_durable_after_a_failure_until_the_log_is_made_anew(tmp_path: Path, fails: str) -> None:
    store, _ = Store.open(tmp_path)
    store.create(stored("one"))
    store._file = cast("RealFile", FailingDisk(store._file, fails))
    machine = Consumer(Limits(), State.begin(0), run=7)
    machine.offer(messages(1), 1)
    machine.ack([machine.receive(1000, 1)[0].delivery_id])

    def noted() -> None:
        store.change("one", machine.take_changes(), {})
        store.sync()

    with pytest.raises(MillstreamError):
        noted()
    with pytest.raises(MillstreamError):
        store.sync()
    assert store.wants_compaction
    # The disk takes writes again, and a smaller entry fits. It may build on the one that is missing.
    store._file = cast("FailingDisk", store._file)._file
    size = (tmp_path / LOG_NAME).stat().st_size
    for note in (lambda: played(store, "one"), lambda: store.remove("one"), lambda: store.create(stored("two"))):
        with pytest.raises(MillstreamError, check=coded("disk_full" if fails == "write" else "io_failed")):
            note()
    assert (tmp_path / LOG_NAME).stat().st_size == size
    store.compact([Stored(Definition.parse({"name": "one"}), "aa", machine.snapshot(), {})])
    store.sync()
    store.close()
    store, found = Store.open(tmp_path)
    assert found["one"].state.cursor == 1
    store.close()
