"""The file of acknowledgements: stored ones are read back, and the file is bounded.

A torn or damaged slot costs no more than its own content.
"""

from __future__ import annotations

import json
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.codec.checksums import crc32c
from millstream.errors import LogError, UsageError
from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.positions import Seq
from millstream.model.replication import LOCAL, AckLevel
from millstream.protocol.replication.ack_levels import Holding, Holdings
from millstream.testing.files import MemoryFiles
from millstream.wal.replica.acks import FOLLOWERS_MAX, AcksFile, AcksReader

GOLDEN = Path(__file__).parent.parent / "golden"
STREAM = StreamId(UUID(int=77))
PATH = "/replication/shop.acks"
NUMBERS = st.integers(0, (1 << 63) - 1)
PLACES = st.builds(
    Holding,
    st.sampled_from(["a", "b", "c" * 63]),
    NUMBERS.map(Epoch),
    NUMBERS.map(GroupNumber),
    NUMBERS.map(Seq),
    NUMBERS,
    st.booleans(),
)


def made() -> MemoryFiles:
    files = MemoryFiles()
    files.makedirs("/replication")
    return files


def holding(name: str, group: int, *, promised: int = 1, is_store: bool = False, told_ns: int = 0) -> Holding:
    return Holding(name, Epoch(promised), GroupNumber(group), Seq(10 * group), told_ns, is_store)


@given(told=st.lists(PLACES, max_size=8), promised=NUMBERS)
def test_what_was_told_last_of_each_place_is_found_by_the_other_process_and_by_the_next_one(
    told: list[Holding], promised: int
) -> None:
    files = made()
    reader = AcksReader(files, PATH, STREAM)
    assert reader.look() == Holdings()
    acks = AcksFile(files, PATH, STREAM, Epoch(promised))
    wanted = {}
    for place in told:
        acks.tell(place)
        wanted["" if place.is_store else place.name] = place
        assert reader.look() == Holdings(Epoch(promised), tuple(wanted.values()))
    acks.close()
    assert AcksFile(files, PATH, STREAM, Epoch(promised)).holdings == reader.look()


@given(cut=st.integers(0, 8000), value=st.integers(0, 255))
def test_a_torn_or_damaged_slot_leaves_what_was_said_before(cut: int, value: int) -> None:
    files = made()
    acks = AcksFile(files, PATH, STREAM, Epoch(1))
    acks.tell(holding("a", 5))
    reader = AcksReader(files, PATH, STREAM)
    assert reader.look().places == (holding("a", 5),)
    before = files.read(PATH)
    acks.tell(holding("a", 6))
    after = files.read(PATH)
    changed = [i for i in range(len(after)) if i >= len(before) or before[i] != after[i]]
    torn = bytearray(after)
    at = changed[cut % len(changed)]
    torn[at] = value
    file = files.open_write(PATH)
    file.pwrite(bytes(torn), 0)
    assert reader.look().places in {(holding("a", 5),), (holding("a", 6),)}
    assert AcksReader(files, PATH, STREAM).look().places in {(holding("a", 5),), (holding("a", 6),)}
    acks.tell(holding("a", 7))
    assert reader.look().places == (holding("a", 7),)


def test_a_file_that_is_no_such_file_says_nothing_and_never_unsays_what_was_known() -> None:
    files = made()
    acks = AcksFile(files, PATH, STREAM, Epoch(1))
    acks.tell(holding("a", 5))
    reader = AcksReader(files, PATH, STREAM)
    reader.look()
    files.open_write(PATH).pwrite(b"\xff" * 16384, 0)
    assert reader.look().places == (holding("a", 5),)
    assert AcksReader(files, PATH, STREAM).look() == Holdings()
    assert AcksFile(files, PATH, STREAM, Epoch(2)).holdings == Holdings(Epoch(2))


def test_what_holds_another_stream_doesnt_count() -> None:
    files = made()
    AcksFile(files, PATH, StreamId(UUID(int=1)), Epoch(1)).tell(holding("a", 5))
    assert AcksReader(files, PATH, STREAM).look() == Holdings()
    assert AcksFile(files, PATH, STREAM, Epoch(1)).holdings.places == ()


def test_a_newer_version_is_refused() -> None:
    files = made()
    AcksFile(files, PATH, STREAM, Epoch(1))
    slot = bytearray(files.read(PATH)[8192 : 8192 + 48])
    slot[12] = 9
    slot[8:12] = crc32c(bytes(slot[12:])).to_bytes(4, "little")
    files.open_write(PATH).pwrite(bytes(slot), 8192)
    with pytest.raises(LogError, match="version 9"):
        AcksReader(files, PATH, STREAM).look()


def test_more_followers_than_there_may_be_are_refused_and_the_store_has_its_own_place() -> None:
    files = made()
    acks = AcksFile(files, PATH, STREAM, Epoch(1))
    for number in range(FOLLOWERS_MAX):
        acks.tell(holding(f"{number:02}" + "x" * 61, number))
    acks.tell(holding("store", 3, is_store=True))
    with pytest.raises(UsageError, match="64 followers"):
        acks.tell(holding("one-more", 1))
    found = AcksReader(files, PATH, STREAM).look()
    assert len(found.places) == FOLLOWERS_MAX + 1
    assert found.group_reached(AckLevel.parse("object")) == 3
    acks.forget("00" + "x" * 61)
    acks.tell(holding("one-more", 1))


def test_who_claims_more_than_the_log_has_at_its_open_doesnt_count_before_it_says_otherwise() -> None:
    files = made()
    acks = AcksFile(files, PATH, STREAM, Epoch(1))
    acks.tell(holding("a", 100))
    acks.tell(holding("b", 7))
    reader = AcksReader(files, PATH, STREAM)
    reader.begin(GroupNumber(9))
    one = AckLevel.parse("durable(1)")
    assert reader.look().group_reached(one) == 7
    acks.tell(holding("b", 12))
    assert reader.look().group_reached(one) == 12
    acks.tell(holding("a", 13, told_ns=5))
    assert reader.look().group_reached(one) == 13


@given(ends=st.lists(NUMBERS, max_size=6), wanted=st.integers(1, 7), store=st.integers(0, 9))
def test_a_level_is_reached_where_so_many_followers_are(ends: list[int], wanted: int, store: int) -> None:
    places = [Holding(f"n{i}", Epoch(1), GroupNumber(e), Seq(e), 0) for i, e in enumerate(ends)]
    found = Holdings(Epoch(1), (*places, holding("s3", store, is_store=True)))
    reached = found.group_reached(AckLevel.parse(f"durable({wanted})"))
    assert sum(end >= reached for end in ends) >= wanted or reached == 0
    assert sum(end > reached for end in ends) < wanted
    assert found.group_reached(AckLevel.parse("object")) == store


def test_local_takes_nobody_else() -> None:
    for found in (Holdings(), Holdings(Epoch(1), (holding("a", 9),))):
        assert found.group_reached(LOCAL) == found.seq_reached(LOCAL) == 2**63 - 1


def test_what_a_leader_knows_takes_the_place_of_what_was_told_and_keeps_the_time_of_what_stays() -> None:
    files = made()
    acks = AcksFile(files, PATH, STREAM, Epoch(1))
    for place in (holding("a", 100, told_ns=1), holding("b", 7, told_ns=1), holding("s3", 8, is_store=True, told_ns=1)):
        acks.tell(place)
    acks.take_over(Holdings(Epoch(2), (holding("a", 100), holding("c", 9))), 5)
    store = holding("s3", 8, is_store=True, told_ns=1)
    wanted = {holding("a", 100, told_ns=1), holding("c", 9, told_ns=5), store}
    found = AcksReader(files, PATH, STREAM).look()
    assert (found.promised, set(found.places)) == (Epoch(2), wanted)
    # So an entry that claims too much doesn't count as another follower's.
    reader = AcksReader(files, PATH, STREAM)
    reader.begin(GroupNumber(10))
    acks.take_over(Holdings(Epoch(2), (holding("a", 100), holding("c", 10))), 6)
    assert reader.look().group_reached(AckLevel.parse("durable(1)")) == 10


def test_who_has_promised_another_leader_doesnt_count() -> None:
    found = Holdings(Epoch(4), (holding("a", 9, promised=5), holding("b", 3, promised=4)))
    assert found.group_reached(AckLevel.parse("durable(1)")) == 3
    assert found.group_reached(AckLevel.parse("durable(2)")) == 0
    assert found.behind(GroupNumber(3), AckLevel.parse("durable(2)")) == ("a",)


def test_the_golden_file_is_read_as_it_was_written() -> None:
    files = made()
    files.create(PATH).pwrite((GOLDEN / "acks-v1.acks").read_bytes(), 0)
    found = AcksReader(files, PATH, STREAM).look()
    told = json.loads((GOLDEN / "acks-v1.json").read_text())
    assert [[p.name, p.promised, p.group, p.persisted_upto, p.told_ns, p.is_store] for p in found.places] == told[
        "places"
    ]
    assert found.promised == told["promised"]
