"""The laws of merging, for every kind: any order, any duplication, any batching of deliveries gives one state, and one encoding of it."""

from __future__ import annotations

import datetime as dt
import json
import math
import pickle
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import crdt
from millstream.crdt import HLC, Actor, GCounter, HideFlag, LWWRegister, ObservedSet, PNCounter, SignalState, UnionSet
from millstream.crdt.lattice import Lattice
from millstream.crdt.scalars import encode_value, order_of
from millstream.crdt.sets import Dot
from millstream.crdt.signals import DECAY_TERMS, HOUR_NS, MINUTE_NS, SUM_MAX, decays
from millstream.errors import InvalidValue, MergeStateUnreadable

GOLDEN = Path(__file__).parent.parent / "golden" / "crdt-v1.json"
HALF = settings(max_examples=settings().max_examples // 2)
"""Settings for tests over each of seven kinds."""
DAY_NS = 86_400 * 10**9
HALF_LIFE_NS = 6 * HOUR_NS

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
TIMES = st.builds(HLC, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2))
ACTORS = st.builds(Actor, st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))


@st.composite
def observed_states(draw: st.DrawFn) -> list[ObservedSet]:
    """Draw all states of three replicas that add, remove, and receive from each other."""
    replicas = [ObservedSet() for _ in range(3)]
    made = [ObservedSet()]
    for who, what, value in draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)), max_size=12)
    ):
        own = replicas[who]
        replicas[who] = [own.add(Actor(who), value), own.remove(value), own.join(replicas[value % 3])][what]
        made.append(replicas[who])
    return made


EVENTS = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 1e308]) | st.floats(0, 9),
    st.integers(0, 3 * MINUTE_NS) | st.integers(0, 400 * HOUR_NS),
)


@st.composite
def signal_states(draw: st.DrawFn) -> list[SignalState]:
    """Draw states of two nodes; one of the nodes may have two histories."""
    nodes = st.integers(0, 1).map(Actor)
    made = []
    for _ in range(draw(st.integers(1, 5))):
        state = SignalState(HALF_LIFE_NS)
        for node, events in draw(st.lists(st.tuples(nodes, st.lists(EVENTS, max_size=3)), max_size=3)):
            state = state.add_all(node, events)
            made.append(state)
    return made or [SignalState(HALF_LIFE_NS)]


@dataclass(frozen=True)
class Case:
    empty: Any
    states: st.SearchStrategy[list[Any]]
    """States that one run of the world has made; each addition has one value."""


def _any(states: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(states, min_size=1, max_size=6)


CASES = {
    "grow_counter": Case(GCounter(), _any(st.builds(GCounter, st.dictionaries(ACTORS, st.integers(0, 2**65))))),
    "pn_counter": Case(
        PNCounter(),
        _any(st.builds(PNCounter, st.dictionaries(ACTORS, st.tuples(st.integers(0, 9), st.integers(0, 2**65))))),
    ),
    "register": Case(LWWRegister(), _any(st.builds(LWWRegister, SCALARS, TIMES))),
    "hide": Case(HideFlag(), _any(st.builds(HideFlag, TIMES, TIMES))),
    "union_set": Case(UnionSet(), _any(st.builds(UnionSet, st.lists(SCALARS, max_size=4)))),
    "observed_set": Case(ObservedSet(), observed_states()),
    "signal": Case(SignalState(HALF_LIFE_NS), signal_states()),
}


@pytest.mark.parametrize("name", CASES)
@HALF
@given(data=st.data())
def test_joins_commute_associate_repeat_without_effect_and_only_grow(name: str, data: st.DataObject) -> None:
    states = data.draw(CASES[name].states)
    a, b, c = (data.draw(st.sampled_from(states)) for _ in range(3))
    assert a.join(b).encode() == b.join(a).encode()
    assert a.join(b).join(c).encode() == a.join(b.join(c)).encode()
    assert a.join(a).encode() == a.encode()
    assert a.join(a.join(b)).encode() == a.join(b).encode()
    assert CASES[name].empty.join(a).encode() == a.encode()


@pytest.mark.parametrize("name", CASES)
@HALF
@given(data=st.data())
def test_any_order_duplication_and_batching_of_deliveries_converges(name: str, data: st.DataObject) -> None:
    states, empty = data.draw(CASES[name].states), CASES[name].empty
    whole = reduce(_joined, states)
    delivered = data.draw(st.permutations(states + data.draw(st.lists(st.sampled_from(states), max_size=4))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(delivered)), max_size=3)))
    batches = [delivered[low:high] for low, high in zip([0, *cuts], [*cuts, len(delivered)], strict=True)]
    arrived = reduce(_joined, (reduce(_joined, batch, empty) for batch in batches))
    assert arrived.encode() == whole.encode()
    assert encode_value(arrived.value) == encode_value(whole.value)
    assert pickle.loads(pickle.dumps(arrived)).encode() == whole.encode()


def _joined(one: Any, other: Any) -> Any:
    return one.join(other)


@pytest.mark.parametrize("name", CASES)
@HALF
@given(data=st.data())
def test_bytes_come_back_as_their_state_and_damaged_ones_are_refused(name: str, data: st.DataObject) -> None:
    state = data.draw(CASES[name].states)[-1]
    encoded = state.encode()
    assert state.decode(encoded).encode() == encoded
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded)
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MergeStateUnreadable):
        state.decode(bytes(damaged))
    with pytest.raises(MergeStateUnreadable):
        state.decode(encoded[:at])


@given(st.binary(max_size=40), st.sampled_from(sorted(CASES)))
def test_a_body_of_any_bytes_under_a_right_checksum_is_a_state_or_refused(body: bytes, name: str) -> None:
    import google_crc32c

    empty: Lattice = CASES[name].empty
    framed = empty.encode()[:4] + body
    data = framed + google_crc32c.value(framed).to_bytes(4, "big")
    try:
        state = empty.decode(data)
    except MergeStateUnreadable:
        return
    assert state.encode() == data


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


def test_every_public_name_is_there_and_no_other() -> None:
    assert {"GCounter", "HLC", "LWWRegister", "ObservedSet", "PNCounter", "SignalState"} < set(dir(crdt))
    assert all(getattr(crdt, name).__doc__ for name in crdt.__all__)
    with pytest.raises(AttributeError, match="Register"):
        _ = crdt.Register


def test_a_counter_counts_what_every_site_has_counted_up_and_down() -> None:
    here, there, again = Actor(1, 0, 7), Actor(2, 0, 3), Actor(1, 0, 8)
    state = PNCounter()
    for actor, by in ((here, 5), (there, -2), (here, -1), (again, 4)):
        state = state.join(state.add(actor, by))
    assert state.value == 6
    assert GCounter().add(here).add(here, 2).value == 3
    for wrong in (lambda: GCounter().add(here, -1), lambda: GCounter({here: -1}), lambda: PNCounter({here: (1, -1)})):
        with pytest.raises(InvalidValue, match="grow by -"):
            wrong()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-9, 9), st.integers(0, 2)), max_size=20))
def test_a_counter_is_monotone_and_sums_what_was_added_once_however_often_states_travel(
    steps: list[tuple[int, int, int]],
) -> None:
    sites = [PNCounter() for _ in range(3)]
    for at, by, other in steps:
        sites[at] = sites[at].add(Actor(at), by)
        before = sites[other]
        sites[other] = before.join(sites[at])
        assert sites[other].join(before) == sites[other], "nothing is lost"
    assert reduce(PNCounter.join, sites).value == sum(by for _, by, _ in steps)


def test_a_register_takes_the_later_write_and_at_one_time_the_greater_node_then_the_greater_value() -> None:
    early, late = LWWRegister("early", HLC(5, 9, 2)), LWWRegister("late", HLC(6, 0, 1))
    assert early.join(late) == late
    assert late.write("older", HLC(5, 0, 9)) == late
    assert LWWRegister("z", HLC(5, 0, 1)).join(LWWRegister("a", HLC(5, 0, 2))).value == "a"
    tied = HLC(5, 0, 1)
    assert LWWRegister(None, tied).join(LWWRegister(Decimal("1.0"), tied)).value == Decimal("1.0")


def test_a_removal_takes_back_what_its_site_has_seen_and_an_adding_elsewhere_survives_it() -> None:
    here = ObservedSet().add(Actor(1), "red")
    there = here.add(Actor(2), "blue")
    removed = here.remove("red")
    assert removed.join(there).value == ("blue",)
    assert removed.join(there.add(Actor(2), "red")).value == ("blue", "red")


def test_hiding_applies_at_once_and_showing_takes_a_strictly_later_moment_whatever_the_node() -> None:
    hidden = HideFlag().hide(HLC(5, 1, 1))
    assert hidden.value
    assert hidden.show(HLC(5, 1, 9)).value
    assert not hidden.show(HLC(5, 2, 0)).value
    assert not HideFlag().show(HLC(9, 0, 0)).value


def test_signals_halve_in_their_half_life_and_are_summed_over_nodes() -> None:
    one, two = Actor(1), Actor(2)
    state = SignalState(DAY_NS).add(one, 8.0, 8 * DAY_NS).join(SignalState(DAY_NS).add(two, 3.0, 9 * DAY_NS))
    assert state.value == 4.0 + 3.0
    assert state.score(10 * DAY_NS) == 2.0 + 1.5
    assert state.score(DAY_NS) == state.value, "a moment before the newest event counts as that event's time"
    assert state.add(one, 1.0, 7 * DAY_NS).value == 4.25 + 3.0, "an event that comes late has decayed already"
    for wrong in (
        lambda: SignalState(0),
        lambda: SignalState(1.5),  # type: ignore[arg-type]
        lambda: state.add(one, -1.0, 0),
        lambda: state.add(one, float("nan"), 0),
        lambda: state.add(one, 1.0, -1),
        lambda: state.add(one, 1.0, 5.5),  # type: ignore[arg-type]
        lambda: state.add(one, 1.0, True),
        lambda: state.count("2h"),
        lambda: state.join(SignalState(1)),
    ):
        with pytest.raises(InvalidValue):
            wrong()
    full = SignalState(DAY_NS).add(one, SUM_MAX, 0).add(one, SUM_MAX, 0)
    assert full.score(DAY_NS) == SUM_MAX / 2, "a sum beyond doubles stays at the greatest of them"
    both = SignalState(DAY_NS).add(one, 1.7e308, 0).add(two, 1.7e308, 0)
    assert both.value == SUM_MAX, "so does the sum over the nodes"


def test_signals_are_read_as_of_any_moment_however_far_from_1970() -> None:
    state = SignalState(DAY_NS).add(Actor(1), 8.0, 8 * DAY_NS)
    for early in (-(2**64), -1, 0):
        assert (state.score(early), state.count("1h", early)) == (8.0, 1)
    for late in (2**63 - 1, 2**63, 2**64):
        assert (state.score(late), state.count("1h", late)) == (0.0, 0)
    slow = SignalState(2**62).add(Actor(1), 8.0, 0)
    assert slow.score(2**64) == slow.score(2**63 - 1) == pytest.approx(2.0)


@pytest.mark.parametrize("by", [1.5, 1.0, 0.0, float("nan"), True, False, "1", None])
def test_a_counter_counts_in_whole_numbers_alone(by: Any) -> None:
    one = Actor(1)
    for wrong in (
        lambda: GCounter().add(one, by),
        lambda: PNCounter().add(one, by),
        lambda: GCounter({one: by}),
        lambda: PNCounter({one: (by, 0)}),
        lambda: PNCounter({one: (0, by)}),
    ):
        with pytest.raises(InvalidValue, match="whole number"):
            wrong()


def test_a_counter_takes_integers_of_numpy() -> None:
    for counter in (GCounter(), PNCounter()):
        assert counter.add(Actor(1), np.int64(3)).encode() == counter.add(Actor(1), 3).encode()  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["as they happened", "backwards", "in any order"])
def test_ten_thousand_events_sum_and_count_as_brute_force_does(order: str) -> None:
    chance = np.random.default_rng(7)
    times = np.sort(chance.integers(1_700_000_000 * 10**9, 1_702_000_000 * 10**9, 10_000))
    if order != "as they happened":
        times = times[::-1] if order == "backwards" else chance.permutation(times)
    weights = chance.uniform(0, 10, len(times))
    nodes = chance.integers(0, 3, len(times))
    state = SignalState(DAY_NS)
    for node in range(3):
        mine = nodes == node
        state = state.add_all(Actor(node), zip(weights[mine].tolist(), times[mine].tolist(), strict=True))
    for later in (0, 90 * 10**9, 30 * HOUR_NS):
        at = int(times.max()) + later
        brute = math.fsum(weights * np.exp(-math.log(2.0) / DAY_NS * (at - times)))
        assert state.score(at) == pytest.approx(brute, abs=5e-7)
        minutes, hours = at // MINUTE_NS - times // MINUTE_NS, at // HOUR_NS - times // HOUR_NS
        assert state.count("1h", at) == np.count_nonzero(minutes < 60)
        assert state.count("24h", at) == np.count_nonzero(hours < 24)
        assert state.count("7d", at) == np.count_nonzero(hours < 168)
    assert all(len(held.minutes) <= 60 and len(held.hours) <= 168 for held in state.nodes.values())


@given(st.lists(EVENTS, max_size=12), st.data())
def test_events_of_a_node_fold_to_the_same_bits_however_they_are_cut_into_pieces(
    events: list[tuple[float, int]], data: st.DataObject
) -> None:
    whole = SignalState(HALF_LIFE_NS).add_all(Actor(1), events)
    state = SignalState(HALF_LIFE_NS)
    while events:
        size = data.draw(st.integers(1, len(events)))
        state, events = state.add_all(Actor(1), events[:size]), events[size:]
        assert whole.join(state) == whole, "a state that has more events holds one that has fewer"
    assert state.encode() == whole.encode()


@given(st.integers(0, 70 * 10**6))
def test_decay_is_a_power_of_two_to_the_last_bits(age: int) -> None:
    exact = 2.0 ** -(age / 10**6) if age < 62 * 10**6 else 0.0
    assert decays(np.array([age]), 10**6)[0] == pytest.approx(exact, rel=4e-16)
    assert len(DECAY_TERMS) == 19


# --- golden bytes --------------------------------------------------------------------------------------------------

_T = HLC(1_700_000_000_000_000_000, 42, 2)
SAMPLES: dict[str, Any] = {
    "grow_counter": GCounter({Actor(1, 0, 7): 5, Actor(2, 3, 1): 2**40}),
    "pn_counter": PNCounter({Actor(1): (5, 2), Actor(2): (0, 9)}),
    "register": LWWRegister(("text", None, 1.5, Decimal("1.00"), b"\x00", dt.date(2024, 2, 29), True), _T),
    "hide": HideFlag(_T, HLC(1)),
    "union_set": UnionSet(["b", "a", 3, None]),
    "observed_set": ObservedSet(seen={Actor(1): 4})
    .add(Actor(1), "x")
    .join(ObservedSet(cloud=frozenset({Dot(Actor(2), 3)})).add(Actor(2), dt.datetime(2024, 1, 1, tzinfo=dt.UTC))),
    "signal": SignalState(HALF_LIFE_NS).add(Actor(7), 2.0, 5 * HOUR_NS).add_all(Actor(1), [(0.5, 12), (1.0, HOUR_NS)]),
}


def test_the_golden_bytes_are_written_and_read() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden == {name: state.encode().hex() for name, state in SAMPLES.items()}
    for name, state in SAMPLES.items():
        assert state.decode(bytes.fromhex(golden[name])) == state
