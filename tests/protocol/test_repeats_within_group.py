"""Writes of one commit group get the answers that they would get one by one."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import examples

from millstream.errors import MillstreamError, SessionGap
from millstream.model.ids import ShardId
from millstream.model.operations import Ack
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import WriteId
from millstream.protocol.deduplication import known_writes as module
from millstream.protocol.deduplication.known_writes import AHEAD_MAX, SessionLimits, Sessions
from millstream.protocol.deduplication.repeats_within_group import GroupLookup

FAR = 4
"""`AHEAD_MAX` in these tests: so small that a few numbers reach it."""
IDS = st.builds(WriteId, st.sampled_from("ab"), st.integers(1, 12)) | st.builds(WriteId, key=st.sampled_from("kl"))
WRITES = st.lists(st.tuples(IDS, st.integers(0, 1)), max_size=14)


def ack(seq: int) -> Ack:
    return Ack({ShardId(0): (Offset(seq), Offset(seq + 1))}, SeqRange(Seq(seq), 1))


def one_by_one(sessions: Sessions, writes: list[tuple[WriteId, int]], first: int) -> list[object]:
    """Return the answer to each write; each is noted before the next is looked up."""
    told: list[object] = []
    for seq, (write_id, digest) in enumerate(writes, first):
        try:
            found = sessions.look(write_id, digest)
        except MillstreamError as error:
            told.append(type(error))
            continue
        if found is None:
            sessions.note(write_id, digest, ack(seq), seq)
        told.append(found)
    return told


def together(sessions: Sessions, writes: list[tuple[WriteId, int]], first: int) -> list[object]:
    """Return the answers to the writes of one group, which are noted afterwards, in their order."""
    asked = GroupLookup(sessions)
    told: list[object] = []
    for seq, (write_id, digest) in enumerate(writes, first):
        try:
            found = asked.ask(write_id, digest, seq)
        except MillstreamError as error:
            told.append(type(error))
            continue
        told.append(ack(found) if isinstance(found, int) else found)
    for seq, ((write_id, digest), one) in enumerate(zip(writes, told, strict=True), first):
        if one is None:
            sessions.note(write_id, digest, ack(seq), seq)
    return told


@given(WRITES, WRITES, st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_a_group_is_told_what_its_writes_are_told_one_by_one(
    before: list[tuple[WriteId, int]], group: list[tuple[WriteId, int]], cold: bool
) -> None:
    """A number counted as too far ahead, though earlier ones of its own group came before it.

    Numbers 1, 3, 2 left the mark at 2, and 1027 was refused.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "AHEAD_MAX", FAR)
        patched.setattr(module, "_HOT_MAX", 1 if cold else 1024)
        sessions = Sessions()
        one_by_one(sessions, before, 1)
        other = deepcopy(sessions)
        assert together(sessions, group, 100) == one_by_one(other, group, 100)
        assert b"".join(sessions.copied()()) == b"".join(other.copied()())


def test_numbers_in_an_odd_order_leave_no_gap_behind_them() -> None:
    sessions = Sessions()
    asked = GroupLookup(sessions)
    for place, number in enumerate((1, 3, 2, AHEAD_MAX + 3)):
        assert asked.ask(WriteId("s", number), 7, place) is None
    with pytest.raises(SessionGap):  # number 1 may come again, as nothing is there yet
        asked.ask(WriteId("s", 2 * AHEAD_MAX), 7, 4)
    sessions.note(WriteId("t", 2), 7, ack(1), 1)
    assert asked.ask(WriteId("t", 1), 7, 5) is None
    assert asked.ask(WriteId("t", AHEAD_MAX + 2), 7, 6) is None


def test_a_session_that_is_forgotten_in_its_own_group_stays_so() -> None:
    """If it were noted again, it would have a number and none below it.

    Each of those would be accepted again.
    """
    sessions = Sessions(SessionLimits(sessions_max=1))
    for seq, name in enumerate(("s", "t", "s")):
        sessions.note(WriteId(name, seq + 1), 7, ack(seq), seq)
    assert sessions.facts("s").expired
    assert sessions.facts("t").mark == 0
    assert sessions.facts("t").above == (2,)
