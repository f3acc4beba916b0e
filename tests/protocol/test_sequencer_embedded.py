"""The embedded sequencer against a model that remembers every number."""

from __future__ import annotations

import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.errors import SequencingError
from millstream.model.positions import Seq
from millstream.protocol.sequencer import EmbeddedNumbers
from millstream.testing.errors import coded


class SequencerAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = 0
        self.given: set[int] = set()
        self.in_flight: list = []
        self.durable: set[int] = set()
        self.sequencer = EmbeddedNumbers(reserved_to=Seq(0), persisted_upto=Seq(0), block=7)
        self.last_persisted = 0
        self.gave = False

    @rule(count=st.integers(1, 12))
    def allocate(self, count: int):
        upto = self.sequencer.to_reserve(count)
        if upto is not None:
            assert upto > self.store
            self.store = upto
            self.sequencer.reserved(upto)
        given = self.sequencer.allocate(count)
        numbers = set(range(given.first, given.last + 1))
        assert len(numbers) == count
        assert not numbers & self.given, "a number was given twice"
        assert max(numbers) <= self.store, "a number was given that isn't reserved"
        self.given |= numbers
        self.gave = True
        self.in_flight.append(given)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), durable=st.booleans())
    def end_any(self, data: st.DataObject, *, durable: bool):
        given = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        if durable:
            self.durable |= set(range(given.first, given.last + 1))
            self.sequencer.finish(given)
        else:
            self.sequencer.abort(given)

    @rule()
    def restart(self):
        """Recover: each number in flight is either durable now or will never be."""
        upto = self.sequencer.persisted_upto
        self.in_flight.clear()
        self.gave = False
        self.sequencer = EmbeddedNumbers(reserved_to=Seq(self.store), persisted_upto=upto, block=7)

    @invariant()
    def persisted_upto_is_below_what_is_in_flight_and_follows_the_newest(self):
        persisted = self.sequencer.persisted_upto
        assert persisted >= self.last_persisted
        self.last_persisted = persisted
        assert all(given.first > persisted for given in self.in_flight)
        if self.gave and not self.in_flight:
            assert persisted == self.sequencer.newest


TestSequencerAgainstModel = SequencerAgainstModel.TestCase


def test_with_nothing_in_flight_it_follows_the_newest_number():
    sequencer = EmbeddedNumbers(reserved_to=Seq(100), persisted_upto=Seq(42))
    sequencer.reserved(Seq(1000))
    first, second = sequencer.allocate(3), sequencer.allocate(2)
    assert (first.first, second.last) == (101, 105)
    assert sequencer.finish(second) == 42
    assert sequencer.finish(first) == 105


def test_numbers_are_not_given_before_they_are_reserved_nor_ended_twice():
    sequencer = EmbeddedNumbers(reserved_to=Seq(0), persisted_upto=Seq(0))
    with pytest.raises(AssertionError):
        sequencer.allocate(1)
    sequencer.reserved(Seq(10))
    given = sequencer.allocate(1)
    sequencer.finish(given)
    with pytest.raises(SequencingError, check=coded("not_in_flight")):
        sequencer.abort(given)


def test_ending_a_range_costs_the_same_however_many_are_in_flight():
    def cost(in_flight: int) -> float:
        sequencer = EmbeddedNumbers(reserved_to=Seq(0), persisted_upto=Seq(0), block=10**6)
        sequencer.reserved(Seq(10**6))
        given = [sequencer.allocate(1) for _ in range(in_flight)]
        started = time.perf_counter()
        for one in reversed(given[-100:]):
            sequencer.finish(one)
        return time.perf_counter() - started

    best = [min(cost(count) for _ in range(20)) for count in (100, 10_000)]
    # Finishing the last 100 of 100 also moves the position over them; leave room for a noisy machine.
    assert best[1] <= 5 * best[0]
