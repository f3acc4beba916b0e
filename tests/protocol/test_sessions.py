"""Sessions against a plain model: any writes in any order, copied and restored in between."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.seeds import examples

from millstream.errors import DedupWindowExpired, IdempotencyKeyReused, SessionExpired, SessionGap
from millstream.model.ids import ShardId
from millstream.model.operations import Ack
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import SessionFacts, WriteId
from millstream.protocol.deduplication import known_writes as module
from millstream.protocol.deduplication.known_writes import (
    AHEAD_MAX,
    NO_DIGEST,
    RESULTS_KEPT,
    SessionLimits,
    Sessions,
)

NAMES = st.sampled_from(["a", "b", "ü", "a" * 200])
DAY_US = 86_400_000_000


def ack(seq: int, shards: int = 1) -> Ack:
    return Ack({ShardId(s): (Offset(seq), Offset(seq + 2)) for s in range(shards)}, SeqRange(Seq(seq), 2 * shards))


def sent(sessions: Sessions, write_id: WriteId, given: Ack, digest: int = 7, now_us: int = 0) -> Ack | None:
    """Note a write as a writer does; return its earlier acknowledgement, or None if it is new."""
    found = sessions.look(write_id, digest)
    if found is None:
        sessions.note(write_id, digest, given, now_us)
    return found


class AgainstModel(RuleBasedStateMachine):
    """Every write ever noted stays known, exactly once, with its acknowledgement while that is kept."""

    @initialize()
    def begin(self) -> None:
        self.sessions = Sessions()
        self.known: dict[WriteId, tuple[int, Ack]] = {}
        self.clock = 0

    def mark(self, name: str) -> int:
        mark = 0
        while WriteId(name, mark + 1) in self.known:
            mark += 1
        return mark

    def send(self, write_id: WriteId, digest: int, shards: int) -> None:
        self.clock += 10
        given = ack(self.clock, shards)
        was = self.known.get(write_id)
        name, number = write_id.session, write_id.number
        mark = 0 if name is None else self.mark(name)
        forgotten = number is not None and number <= mark - RESULTS_KEPT
        try:
            found = sent(self.sessions, write_id, given, digest, self.clock)
        except DedupWindowExpired:
            assert forgotten
        except IdempotencyKeyReused:
            assert was is not None
            assert was[0] != digest
        except SessionGap:
            assert number is not None
            assert number > mark + AHEAD_MAX
        except SessionExpired:
            assert number is not None
            assert number > AHEAD_MAX
            assert not any(one.session == name for one in self.known)
        else:
            assert not forgotten
            if was is None:
                assert found is None
                self.known[write_id] = (digest, given)
            else:
                assert was == (digest, found)

    @rule(name=NAMES, step=st.integers(-20, 3), digest=st.integers(0, 1), shards=st.integers(1, 3))
    def write_near_mark(self, name: str, step: int, digest: int, shards: int) -> None:
        self.send(WriteId(name, max(1, self.mark(name) + step)), digest, shards)

    @rule(name=NAMES, count=st.integers(1, 30))
    def write_on(self, name: str, count: int) -> None:
        for _ in range(count):
            self.send(WriteId(name, self.mark(name) + 1), 0, 1)

    @rule(name=NAMES, beyond=st.integers(-1, 1))
    def write_far_ahead(self, name: str, beyond: int) -> None:
        self.send(WriteId(name, self.mark(name) + AHEAD_MAX + beyond), 0, 1)

    @rule(key=NAMES, digest=st.integers(0, 1))
    def write_key(self, key: str, digest: int) -> None:
        self.send(WriteId(key=key), digest, 1)

    @rule()
    def restore(self) -> None:
        self.sessions = Sessions.restored(b"".join(self.sessions.copied()()))

    @invariant()
    def tells_what_it_has(self) -> None:
        for name in {one.session for one in self.known if one.session is not None}:
            mark = self.mark(name)
            above = tuple(
                sorted(one.number or 0 for one in self.known if one.session == name and (one.number or 0) > mark)
            )
            assert self.sessions.facts(name) == SessionFacts(mark, above)
            assert self.sessions.mark(name) == mark


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


class AgainstModelOfFewObjects(AgainstModel):
    """The same rules for a state in which nearly all sessions are bytes."""

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.before = module._HOT_MAX
        module._HOT_MAX = 1  # type: ignore[misc]

    def teardown(self) -> None:
        module._HOT_MAX = self.before  # type: ignore[misc]


TestOfFewObjects = AgainstModelOfFewObjects.TestCase
TestOfFewObjects.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def test_numbers_that_come_out_of_order_are_all_taken() -> None:
    sessions = Sessions()
    for number in (1, 2, 3, 4, 5, 7, 6):
        assert sent(sessions, WriteId("s", number), ack(number)) is None
    assert sessions.facts("s") == SessionFacts(7)
    assert [sent(sessions, WriteId("s", number), ack(99)) for number in (5, 6, 7)] == [ack(5), ack(6), ack(7)]


@pytest.mark.parametrize("shards", [0, 1, 254, 255, 256, 1024])
def test_a_write_may_lie_on_as_many_shards_as_a_stream_has(shards: int) -> None:
    """Regression: with a one-byte count, a keyed write on more than 255 shards broke the writer.

    The copy then broke every later writer.
    """
    sessions = Sessions()
    ids = [WriteId(key="k"), WriteId("s", 1), WriteId("s", 3)]
    for n, write_id in enumerate(ids):
        sessions.note(write_id, n, ack(n, shards), n)
    restored = Sessions.restored(b"".join(sessions.copied()()))
    for state in (sessions, restored):
        assert [state.look(write_id, n) for n, write_id in enumerate(ids)] == [ack(n, shards) for n in range(3)]


def test_a_session_goes_on_in_a_log_that_lacks_its_beginning_once_no_lower_number_may_be_missing() -> None:
    """Seventy thousand of them, noted one by one, were more than a copy has room for: no writer could open the log."""
    sessions = Sessions()
    for number in range(5_000, 75_000):
        sessions.note(WriteId("s", number), 7, ack(number), number)
    for number in range(5_000, 5_100):
        sessions.note(WriteId("r", number), 7, ack(number), number)
    sessions.note(WriteId("t", 3), 7, ack(1), 1)
    sessions.note(WriteId("u", 1), 7, ack(1), 1)
    sessions.forget_gaps()
    restored = Sessions.restored(b"".join(sessions.copied()()))
    for state in (sessions, restored):
        assert [state.facts(name) for name in "rstu"] == [
            SessionFacts(0, expired=True), SessionFacts(74_999), SessionFacts(0, expired=True), SessionFacts(1),
        ]  # fmt: skip
        for number in (1, 5_099, 5_100):
            with pytest.raises(SessionExpired):
                state.look(WriteId("r", number), 7)
        with pytest.raises(DedupWindowExpired):
            state.look(WriteId("s", 1), 7)
        assert state.look(WriteId("s", 75_000), 7) is None


def test_rows_that_nobody_summed_are_any_rows() -> None:
    sessions = Sessions()
    sessions.note(WriteId("s", 1), NO_DIGEST, ack(1), 0)
    assert sessions.look(WriteId("s", 1), 5) == ack(1)


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_too_many_goes_longest_unused_first_and_says_so(copied: bool) -> None:
    limits = SessionLimits(sessions_max=10, keys_max=10)
    sessions = Sessions(limits)
    for i in range(10):
        sent(sessions, WriteId(f"s{i}", 1), ack(i), now_us=i)
        sent(sessions, WriteId(key=f"k{i}"), ack(i), now_us=i)
    sent(sessions, WriteId("s0", 2), ack(50), now_us=50)
    for i in range(10, 13):
        sent(sessions, WriteId(f"s{i}", 1), ack(i), now_us=100 + i)
        sent(sessions, WriteId(key=f"k{i}"), ack(i), now_us=100 + i)
    if copied:
        sessions = Sessions.restored(b"".join(sessions.copied()()), limits)
    assert (len(sessions), len(sessions._keys)) == (10, 10)
    for i in (1, 2, 3):
        for number in (1, 2):
            with pytest.raises(SessionExpired):
                sessions.look(WriteId(f"s{i}", number), 7)
        assert sessions.facts(f"s{i}").expired
    for i in (0, 1, 2):
        with pytest.raises(DedupWindowExpired):
            sessions.look(WriteId(key=f"k{i}"), 7)
    assert sessions.look(WriteId("s0", 2), 7) == ack(50)
    assert sessions.look(WriteId("s4", 1), 7) == ack(4)
    assert sessions.look(WriteId(key="k3"), 7) == ack(3)


def test_what_is_too_old_goes() -> None:
    sessions = Sessions(SessionLimits(age_us=DAY_US))
    for i in range(5000):
        sent(sessions, WriteId(f"old{i}", 1), ack(i), now_us=i)
        sent(sessions, WriteId(key=f"old{i}"), ack(i), now_us=i)
    for i in range(5000):
        sent(sessions, WriteId("new", i + 1), ack(i), now_us=3 * DAY_US + i)
        sent(sessions, WriteId(f"new{i}", 1), ack(i), now_us=3 * DAY_US + i)
        sent(sessions, WriteId(key=f"new{i}"), ack(i), now_us=3 * DAY_US + i)
    assert len(sessions) == 5001
    assert len(sessions._keys) == 5000
    restored = Sessions.restored(b"".join(sessions.copied()()))
    for state in (sessions, restored):
        for i in (0, 4999):
            with pytest.raises(SessionExpired):
                state.look(WriteId(f"old{i}", 1), 7)
            with pytest.raises(DedupWindowExpired):
                state.look(WriteId(key=f"old{i}"), 7)
        assert state.look(WriteId(key="new4999"), 7) == ack(4999)


def test_what_was_forgotten_is_remembered_as_that_for_long() -> None:
    sessions = Sessions(SessionLimits(keys_max=1, expired_max=16384))
    for i in range(60_000):
        sent(sessions, WriteId(key=f"k{i}"), ack(i))
    for i in range(60_000 - 16_384, 59_999, 97):
        with pytest.raises(DedupWindowExpired):
            sessions.look(WriteId(key=f"k{i}"), 7)
    assert len(b"".join(sessions.copied()())) < 8 * 3 * 16384


@pytest.mark.parametrize("cut", [1, 8, 20, -1])
def test_a_copy_that_is_cut_off_is_none(cut: int) -> None:
    sessions = Sessions()
    for number in range(1, 40):
        sent(sessions, WriteId("s", number), ack(number))
    sent(sessions, WriteId(key="k"), ack(1))
    whole = b"".join(sessions.copied()())
    for wrong in (whole[:cut], whole + b"x"):
        with pytest.raises(ValueError, match=r"copy|hashes"):
            Sessions.restored(wrong)
