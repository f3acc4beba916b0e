"""The sequencer's machines: small worlds played whole, large ones at random, and the errors of bad input."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.protocol import sequencer_search as search
from tests.protocol.sequencer_search import Budget, Scope
from tests.seeds import examples

from millstream.errors import SequencingError, StaleEpoch
from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import SEQ_MAX, Seq, SeqRange, StreamToken
from millstream.protocol.sequencer import Ledger, LedgerView, WriterNumbers, WriterPhase
from millstream.testing.errors import coded

A, B = WriterId(1), WriterId(2)

WHOLE = {
    "three writers, four numbers": Scope(3, 4, Budget(3), eager=True),
    "crash and restart": Scope(2, 3, Budget(3, kills=1), eager=True),
    "crash, restart and takeover": Scope(2, 2, Budget(2, kills=1, takeovers=1), eager=True),
    "lost and late replies": Scope(1, 3, Budget(2, kills=1, losses=2, late=1), in_flight=2, eager=True),
    "forgotten, and back": Scope(2, 2, Budget(3, kills=1, forgets=1), eager=True),
    "ranges of several numbers": Scope(2, 4, Budget(2, kills=1), counts=(2, 1), eager=True),
    "reports at any time": Scope(2, 2, Budget(2, kills=1)),
    "reports and losses at any time": Scope(1, 2, Budget(2, kills=1, losses=2, late=1)),
}
LARGER = {
    "three writers, three numbers": Scope(3, 3, Budget(3), eager=True),
    "three writers, four numbers, crash and restart": Scope(3, 4, Budget(4, kills=1), eager=True),
    "two writers, crashes, restarts and takeover": Scope(2, 3, Budget(3, kills=2, takeovers=1), eager=True),
    "two writers, losses": Scope(2, 3, Budget(2, kills=1, losses=1, late=1), eager=True),
}


def _play(scope: Scope, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    states, played = search.run(scope)
    with capsys.disabled():
        sys.stdout.write(f" [{name}: {states} states, {played} steps]")
        sys.stdout.flush()
    assert states > 1000


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.siege) if scope.numbers > 3 else name for name, scope in WHOLE.items()],
)
def test_small_worlds_whole(name: str, capsys: pytest.CaptureFixture[str]):
    _play(WHOLE[name], name, capsys)


@pytest.mark.soak
@pytest.mark.parametrize("name", LARGER)
def test_larger_worlds_whole(name: str, capsys: pytest.CaptureFixture[str]):
    _play(LARGER[name], name, capsys)


class LargeWorlds(RuleBasedStateMachine):
    """Random walks through worlds too large to play whole, with readers that see the store as it was a while ago."""

    def __init__(self) -> None:
        super().__init__()
        self.scope = Scope(1, 1, Budget(1))
        self.world = search.begin(self.scope)
        self.views: list[LedgerView] = []
        self.read: list[SeqRange] = []
        self.cut = StreamToken("00000000", Seq(0), {})

    @initialize(writers=st.integers(2, 4), in_flight=st.integers(1, 3), eager=st.booleans())
    def begins(self, *, writers: int, in_flight: int, eager: bool):
        budget = Budget(starts=8, kills=4, takeovers=3, losses=4, late=2, forgets=2)
        self.scope = Scope(writers, 40, budget, in_flight=in_flight, counts=(1, 2, 3), eager=eager)
        self.world = search.begin(self.scope)

    @rule(data=st.data())
    def anything_happens(self, data: st.DataObject):
        options = list(search.steps(self.world, self.scope))
        if not options:
            return
        _, after = options[data.draw(st.integers(0, len(options) - 1))]
        search.check_step(self.world, after)
        self.world = after
        if self.scope.eager:
            self.world = search.all_report(self.world)
        search.check(self.world)
        self.views.append(self.world.ledger.view(0))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def a_reader_sees_the_store_as_it_was(self, data: st.DataObject):
        """It reads the rows between two tokens, as a vector reader does; a view from before its last one has none."""
        token = search.token_of(self.views[-data.draw(st.integers(1, min(len(self.views), 8)))])
        if not self.cut <= token:
            return
        for truth in search.undecided(self.world):
            assert truth.given.first > token.of(truth.writer), (token, truth)
        for given, writer in self.world.shown:
            if self.cut.of(writer) < given.last <= token.of(writer):
                assert given not in self.read, f"{given} is read twice"
                self.read.append(given)
        self.cut = token
        there = [given for given, writer in self.world.shown if given.last <= token.of(writer)]
        assert sorted(self.read, key=lambda g: g.first) == sorted(there, key=lambda g: g.first)


LargeWorlds.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
TestLargeWorlds = LargeWorlds.TestCase


def opened(*names: str) -> Ledger:
    ledger = Ledger()
    for name in names:
        ledger, registered = ledger.register(name, "home", now_us=0, lease_us=10)
        ledger, _ = ledger.recovered(registered.writer, registered.epoch, now_us=0, lease_us=10)
    return ledger


def test_an_idle_writer_holds_nobody_up():
    ledger = opened("a", "b")
    numbers = WriterNumbers(B, ledger.entry(B).epoch, Seq(0))
    ledger, given = ledger.draw(A, ledger.entry(A).epoch, 5, position=Seq(0), now_us=0, lease_us=10)
    ledger, view = ledger.report(A, ledger.entry(A).epoch, position=given.given.last, now_us=0, lease_us=10)
    assert view.persisted_upto == 0
    for _ in range(2):
        ledger, view = ledger.report(B, numbers.epoch, position=numbers.position, now_us=0, lease_us=10)
        numbers.observe(view.newest)
    assert view.persisted_upto == 5


def test_a_dead_writer_holds_linear_readers_until_it_is_settled_or_forgotten_and_never_vector_ones():
    ledger = opened("a", "b")
    ledger, _ = ledger.draw(A, ledger.entry(A).epoch, 5, position=Seq(0), now_us=0, lease_us=10)
    ledger, mine = ledger.draw(B, ledger.entry(B).epoch, 1, position=Seq(5), now_us=0, lease_us=10)
    ledger, view = ledger.report(B, ledger.entry(B).epoch, position=mine.given.last, now_us=9, lease_us=10)
    assert str(search.token_of(view)) == "00000000.m0~2.6"
    assert not view.expired
    assert ledger.view(10).expired == {A}
    ledger = ledger.forget(A, now_us=10)
    assert str(search.token_of(ledger.view(10))) == "00000000.s6"
    _, again = ledger.register("a", "home", now_us=11, lease_us=10)
    assert (again.writer, again.cut_at) == (A, 0)


def test_a_writer_that_has_recovered_holds_nobody_up_from_then_on():
    ledger, given = opened("a", "b").draw(B, Epoch(2), 5, position=Seq(0), now_us=0, lease_us=10)
    ledger, registered = ledger.register("a", "home", now_us=0, lease_us=10)
    assert ledger.entry(A).position == 0
    ledger, told = ledger.recovered(A, registered.epoch, now_us=0, lease_us=10)
    assert (ledger.entry(A).position, told.given.last) == (5, given.given.last)


def test_an_abandoned_range_is_closed_at_once():
    numbers = WriterNumbers(A, Epoch(1), Seq(0))
    numbers.asks()
    numbers.given(SeqRange(Seq(1), 4))
    assert numbers.position == 0
    assert numbers.abort(SeqRange(Seq(1), 4)) == 4


def test_an_older_incarnation_is_refused_everything():
    ledger = opened("a")
    old = ledger.entry(A).epoch
    ledger, registered = ledger.register("a", "home", now_us=0, lease_us=10)
    for late in (
        lambda: ledger.draw(A, old, 1, position=Seq(0), now_us=0, lease_us=1),
        lambda: ledger.report(A, old, position=Seq(9), now_us=0, lease_us=1),
        lambda: ledger.settle(A, old),
        lambda: ledger.recovered(A, old, now_us=0, lease_us=1),
        lambda: ledger.draw(A, registered.epoch, 1, position=Seq(0), now_us=0, lease_us=1),
    ):
        with pytest.raises(StaleEpoch):
            late()
    assert ledger.entry(A).phase is WriterPhase.RECOVERING


@pytest.mark.parametrize("count", [0, -1, SEQ_MAX])
def test_counts_that_no_range_has(count: int):
    ledger = opened("a")
    ledger, _ = ledger.draw(A, Epoch(1), 1, position=Seq(0), now_us=0, lease_us=1)
    with pytest.raises(SequencingError, check=coded("invalid_count")) as caught:
        ledger.draw(A, Epoch(1), count, position=Seq(0), now_us=0, lease_us=1)
    assert caught.value.details["count"] == count
    assert ledger.draw(A, Epoch(1), 1, position=Seq(0), now_us=0, lease_us=1)[1].given == SeqRange(Seq(2), 1)


def test_what_is_not_in_flight_cannot_be_ended_and_nothing_is_wedged():
    numbers = WriterNumbers(A, Epoch(1), Seq(0))
    for first in (1, 4):
        numbers.asks()
        numbers.given(SeqRange(Seq(first), 3))
    for wrong in (SeqRange(Seq(1), 2), SeqRange(Seq(2), 3), SeqRange(Seq(7), 1), SeqRange(Seq(0), 0)):
        with pytest.raises(SequencingError, check=coded("not_in_flight")):
            numbers.finish(wrong)
    numbers.finish(SeqRange(Seq(4), 3))
    with pytest.raises(SequencingError, check=coded("not_in_flight")):
        numbers.abort(SeqRange(Seq(4), 3))
    assert numbers.finish(SeqRange(Seq(1), 3)) == 6


def test_a_position_only_grows_though_its_messages_come_late():
    ledger = opened("a")
    ledger, drawn = ledger.draw(A, Epoch(1), 5, position=Seq(0), now_us=0, lease_us=10)
    for position in (5, 3, 0):
        ledger, view = ledger.report(A, Epoch(1), position=Seq(position), now_us=0, lease_us=10)
        assert view.positions[A] == ledger.entry(A).position == 5
    ledger, _ = ledger.draw(A, Epoch(1), 1, position=Seq(2), now_us=0, lease_us=10)
    assert (drawn.given.last, ledger.entry(A).position) == (5, 5)


def test_a_position_stands_while_it_isnt_known_what_a_draw_gave():
    numbers = WriterNumbers(A, Epoch(1), Seq(0))
    numbers.asks()
    assert numbers.observe(Seq(20)) == 0
    numbers.given(SeqRange(Seq(11), 5))
    assert numbers.position == 10
    assert numbers.finish(SeqRange(Seq(11), 5)) == 20


def test_a_clock_that_steps_back_is_no_lease_that_lasts_for_an_hour():
    ledger = opened("a")
    hour_us = 3_600_000_000
    ledger, _ = ledger.report(A, Epoch(1), position=Seq(0), now_us=hour_us, lease_us=10)
    ledger, _ = ledger.report(A, Epoch(1), position=Seq(0), now_us=100, lease_us=10)
    assert ledger.take_over(A, now_us=110, lease_us=10)[1].epoch == 2


def test_who_was_forgotten_is_fenced():
    ledger = opened("a").forget(A, now_us=10)
    assert ledger.entry(A).epoch == ledger.epoch == 2
    with pytest.raises(StaleEpoch, match="fenced"):
        ledger.draw(A, Epoch(1), 1, position=Seq(0), now_us=11, lease_us=10)


def test_a_name_in_use_elsewhere_is_refused_and_so_is_a_log_that_is_not_here():
    ledger = opened("a")
    with pytest.raises(SequencingError, check=coded("writer_name_taken"), match="lives"):
        ledger.register("a", "another home", now_us=9, lease_us=10)
    with pytest.raises(SequencingError, check=coded("writer_name_taken"), match="undecided"):
        ledger.register("a", "another home", now_us=10, lease_us=10)
    ledger = ledger.settle(A, Epoch(1))
    moved, registered = ledger.register("a", "another home", now_us=0, lease_us=10)
    assert (registered.writer, moved.entry(A).location) == (A, "another home")


def test_only_what_is_dead_is_taken_over_or_forgotten():
    ledger = opened("a")
    for early in (lambda: ledger.take_over(A, now_us=9, lease_us=1), lambda: ledger.forget(A, now_us=9)):
        with pytest.raises(SequencingError, check=coded("writer_alive")) as caught:
            early()
        assert caught.value.details["lease_s"] > 0
    assert ledger.take_over(A, now_us=10, lease_us=1)[1].epoch == 2
    with pytest.raises(SequencingError, check=coded("unknown_writer")):
        ledger.take_over(B, now_us=0, lease_us=1)
    settled = ledger.settle(A, Epoch(1))
    for needless in (lambda: settled.take_over(A, now_us=99, lease_us=1), lambda: settled.forget(A, now_us=99)):
        with pytest.raises(StaleEpoch):
            needless()


def test_ending_a_range_costs_the_same_however_many_are_in_flight():
    looked_at = 0

    class Counted(SeqRange):
        def __hash__(self) -> int:
            nonlocal looked_at
            looked_at += 1
            return hash(self.first)

    def cost(in_flight: int) -> int:
        numbers = WriterNumbers(A, Epoch(1), Seq(0))
        given = [Counted(Seq(first), 1) for first in range(1, in_flight + 1)]
        for one in given:
            numbers.asks()
            numbers.given(one)
        before = looked_at
        for one in reversed(given[-99:]):
            numbers.finish(one)
        return looked_at - before

    assert cost(100) == cost(10_000) > 0
