"""The laws of merging, for every kind: any order, any duplication, any batching of deliveries gives one state, and one encoding of it."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.crdt.counters import Actor, GrowCounters, PnCounters
from millstream.crdt.hlc import HybridTime
from millstream.crdt.lattice import Lattice
from millstream.crdt.registers import HardNegatives, Hiding, LastWriteWins, Register
from millstream.crdt.scalars import encode_value, order_of
from millstream.crdt.sets import ObservedSet, ObservedSets, UnionSets
from millstream.crdt.signals import DECAY_TERMS, DecayedSignals, Signal, decay
from millstream.errors import InvalidValue, MergeStateUnreadable

GOLDEN = Path(__file__).parent.parent / "golden" / "crdt-v1.json"
HALF = settings(max_examples=settings().max_examples // 2)
"""Settings for tests over each of seven kinds."""
DAY_NS = 86_400 * 10**9

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0, 1.5]),
    st.decimals(allow_nan=True, allow_infinity=True, places=2),
    st.sampled_from([Decimal(1), Decimal("1.00"), Decimal("-0"), Decimal(0), Decimal("sNaN")]),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.just(dt.UTC)),
    st.lists(st.integers(0, 1) | st.none() | st.text(max_size=1), max_size=2),
)
TIMES = st.builds(HybridTime, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2))
ACTORS = st.builds(Actor, st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))


@st.composite
def observed_states(draw: st.DrawFn) -> list[ObservedSet]:
    """Draw all deltas and states of three replicas that add, remove, and receive from each other."""
    lattice = ObservedSets()
    replicas = [lattice.empty() for _ in range(3)]
    made = [lattice.empty()]
    for step in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)), max_size=12)):
        who, what, value = step
        if what == 2:
            replicas[who] = lattice.join(replicas[who], replicas[value % 3])
            made.append(replicas[who])
            continue
        own = replicas[who]
        delta = lattice.add(Actor(who), own, value) if what == 0 else lattice.remove(own, value)
        replicas[who] = lattice.join(own, delta)
        made += [delta, replicas[who]]
    return made


@dataclass(frozen=True)
class Case:
    lattice: Lattice[Any, Any]
    states: st.SearchStrategy[list[Any]]
    """States that one run of the world has made; each addition has one value."""


def _any(states: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(states, min_size=1, max_size=6)


CASES = {
    "grow_counter": Case(GrowCounters(), _any(st.dictionaries(ACTORS, st.integers(0, 2**65)))),
    "pn_counter": Case(
        PnCounters(), _any(st.dictionaries(ACTORS, st.tuples(st.integers(0, 9), st.integers(0, 2**65))))
    ),
    "register": Case(LastWriteWins(), _any(st.builds(Register, TIMES, SCALARS))),
    "hide": Case(HardNegatives(), _any(st.builds(Hiding, TIMES, TIMES))),
    "union_set": Case(UnionSets(), _any(st.lists(SCALARS, max_size=4).map(UnionSets().of))),
    "observed_set": Case(ObservedSets(), observed_states()),
    "signal": Case(
        DecayedSignals(DAY_NS, 2 * DAY_NS),
        _any(
            st.dictionaries(
                st.integers(0, 2),
                st.builds(Signal, st.integers(0, 3), st.floats(), st.integers(0, 2 * DAY_NS)),
                max_size=3,
            )
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
@HALF
@given(data=st.data())
def test_joins_commute_associate_repeat_without_effect_and_only_grow(name: str, data: st.DataObject) -> None:
    lattice, states = CASES[name].lattice, data.draw(CASES[name].states)
    a, b, c = (data.draw(st.sampled_from(states)) for _ in range(3))
    join, encode = lattice.join, lattice.encode
    assert encode(join(a, b)) == encode(join(b, a))
    assert encode(join(join(a, b), c)) == encode(join(a, join(b, c)))
    assert encode(join(a, a)) == encode(a)
    assert encode(join(a, join(a, b))) == encode(join(a, b))
    assert encode(join(lattice.empty(), a)) == encode(a)


@pytest.mark.parametrize("name", CASES)
@HALF
@given(data=st.data())
def test_any_order_duplication_and_batching_of_deliveries_converges(name: str, data: st.DataObject) -> None:
    lattice, states = CASES[name].lattice, data.draw(CASES[name].states)
    whole = reduce(lattice.join, states)
    delivered = data.draw(st.permutations(states + data.draw(st.lists(st.sampled_from(states), max_size=4))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(delivered)), max_size=3)))
    batches = [delivered[low:high] for low, high in zip([0, *cuts], [*cuts, len(delivered)], strict=True)]
    arrived = reduce(lattice.join, (reduce(lattice.join, batch, lattice.empty()) for batch in batches))
    assert lattice.encode(arrived) == lattice.encode(whole)
    assert encode_value(lattice.value(arrived)) == encode_value(lattice.value(whole))


@pytest.mark.parametrize("name", CASES)
@HALF
@given(data=st.data())
def test_bytes_come_back_as_their_state_and_damaged_ones_are_refused(name: str, data: st.DataObject) -> None:
    lattice, states = CASES[name].lattice, data.draw(CASES[name].states)
    encoded = lattice.encode(states[-1])
    assert lattice.encode(lattice.decode(encoded)) == encoded
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded)
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MergeStateUnreadable):
        lattice.decode(bytes(damaged))
    with pytest.raises(MergeStateUnreadable):
        lattice.decode(encoded[:at])


@given(st.binary(max_size=40), st.sampled_from(sorted(CASES)))
def test_a_body_of_any_bytes_under_a_right_checksum_is_a_state_or_refused(body: bytes, name: str) -> None:
    import google_crc32c

    lattice = CASES[name].lattice
    framed = lattice.encode(lattice.empty())[:4] + body
    data = framed + google_crc32c.value(framed).to_bytes(4, "big")
    try:
        state = lattice.decode(data)
    except MergeStateUnreadable:
        return
    assert lattice.encode(state) == data


@given(st.lists(SCALARS, min_size=2, max_size=2))
def test_values_of_all_kinds_have_one_order_in_which_only_those_that_encode_alike_are_equal(values: list[Any]) -> None:
    a, b = values
    assert (order_of(a) == order_of(b)) == (encode_value(a) == encode_value(b))
    assert (order_of(a) < order_of(b)) != (order_of(b) <= order_of(a))


def test_a_value_that_columns_do_not_have_is_refused() -> None:
    with pytest.raises(InvalidValue, match="object"):
        encode_value(object())
    with pytest.raises(InvalidValue, match="text"):
        encode_value("\ud800")


# --- each kind's purpose -------------------------------------------------------------------------------------------


def test_a_counter_counts_what_every_site_has_counted_up_and_down() -> None:
    lattice = PnCounters()
    here, there, again = Actor(1, 0, 7), Actor(2, 0, 3), Actor(1, 0, 8)
    state = lattice.empty()
    for actor, by in ((here, 5), (there, -2), (here, -1), (again, 4)):
        state = lattice.join(state, lattice.add(actor, state, by))
    assert lattice.value(state) == 6
    with pytest.raises(InvalidValue, match="only grow"):
        GrowCounters().add(here, {}, -1)


def test_a_register_takes_the_later_write_and_at_one_time_the_greater_node_then_the_greater_value() -> None:
    lattice = LastWriteWins()
    early, late = Register(HybridTime(5, 9, 2), "early"), Register(HybridTime(6, 0, 1), "late")
    assert lattice.join(early, late) == late
    assert lattice.join(Register(HybridTime(5, 0, 1), "z"), Register(HybridTime(5, 0, 2), "a")).value == "a"
    tied = HybridTime(5, 0, 1)
    assert lattice.join(Register(tied, None), Register(tied, Decimal("1.0"))).value == Decimal("1.0")


def test_a_removal_takes_back_what_its_site_has_seen_and_an_adding_elsewhere_survives_it() -> None:
    lattice = ObservedSets()
    here = lattice.add(Actor(1), lattice.empty(), "red")
    there = lattice.join(lattice.add(Actor(2), here, "blue"), here)
    removed = lattice.join(here, lattice.remove(here, "red"))
    assert lattice.value(lattice.join(removed, there)) == ("blue",)
    anew = lattice.join(there, lattice.add(Actor(2), there, "red"))
    assert lattice.value(lattice.join(removed, anew)) == ("blue", "red")


def test_hiding_applies_at_once_and_showing_takes_a_strictly_later_moment_whatever_the_node() -> None:
    lattice = HardNegatives()
    hidden = Hiding(hidden=HybridTime(5, 1, 1))
    assert lattice.value(hidden)
    assert lattice.value(lattice.join(hidden, Hiding(shown=HybridTime(5, 1, 9))))
    assert not lattice.value(lattice.join(hidden, Hiding(shown=HybridTime(5, 2, 0))))
    assert not lattice.value(lattice.join(lattice.empty(), Hiding(shown=HybridTime(9, 0, 0))))


def test_signals_halve_in_their_half_life_and_are_summed_over_nodes() -> None:
    lattice = DecayedSignals(half_life_ns=DAY_NS, at_ns=10 * DAY_NS)
    state = lattice.join({1: Signal(4, 8.0, 8 * DAY_NS)}, {2: Signal(1, 3.0, 11 * DAY_NS), 1: Signal(3, 99.0, 0)})
    assert lattice.value(state) == 2.0 + 3.0
    with pytest.raises(InvalidValue, match="half-life"):
        DecayedSignals(0, 0)


@given(st.integers(0, 70 * 10**6))
def test_decay_is_a_power_of_two_to_the_last_bits(age: int) -> None:
    exact = 2.0 ** -(age / 10**6) if age < 62 * 10**6 else 0.0
    assert decay(age, 10**6) == pytest.approx(exact, rel=4e-16)
    assert len(DECAY_TERMS) == 19


# --- golden bytes --------------------------------------------------------------------------------------------------

_T = HybridTime(1_700_000_000_000_000_000, 42, 2)
SAMPLES: dict[str, Any] = {
    "grow_counter": {Actor(1, 0, 7): 5, Actor(2, 3, 1): 2**40},
    "pn_counter": {Actor(1): (5, 2), Actor(2): (0, 9)},
    "register": Register(_T, ("text", None, 1.5, Decimal("1.00"), b"\x00", dt.date(2024, 2, 29), True)),
    "hide": Hiding(_T, HybridTime(1)),
    "union_set": UnionSets().of(["b", "a", 3, None]),
    "observed_set": reduce(
        ObservedSets().join,
        [
            ObservedSets().add(Actor(1), ObservedSet(seen={Actor(1): 4}), "x"),
            ObservedSets().add(Actor(2), ObservedSet(), dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
        ],
    ),
    "signal": {1: Signal(9, 0.5, 12), 7: Signal(1, -2.0, 13)},
}


def test_the_golden_bytes_are_written_and_read() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden == {name: CASES[name].lattice.encode(state).hex() for name, state in SAMPLES.items()}
    for name, state in SAMPLES.items():
        assert CASES[name].lattice.decode(bytes.fromhex(golden[name])) == state
