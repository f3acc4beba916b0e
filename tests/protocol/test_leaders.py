"""The map of leaders: it is the same in whatever order messages arrive, and never goes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.model.ids import Epoch, GroupNumber, ShardId
from millstream.model.replication import NodeName
from millstream.protocol.replication.leader_map import LeaderMap, Leadership, leader_by, leaders_known
from millstream.protocol.replication.node_promises import UNPROMISED, Lineage, Promise, Role, RoleFact

A, B, C = NodeName("a"), NodeName("b"), NodeName("c")
NODES = st.sampled_from([A, B, C])


def promise(epoch: int, node: NodeName) -> Promise:
    return Promise(Epoch(epoch), node)


PROMOTED = st.builds(
    lambda epoch, node: Leadership(promise(epoch, node), node, GroupNumber(10 * epoch)), st.integers(1, 6), NODES
)
SET_UP = NODES.map(lambda node: Leadership(UNPROMISED, node))
MAPS = st.lists(PROMOTED | SET_UP, max_size=8).map(LeaderMap.of)


@given(MAPS, MAPS, MAPS)
def test_maps_come_together_in_any_order_and_never_go_back(one: LeaderMap, two: LeaderMap, three: LeaderMap) -> None:
    both = one.joined(two)
    assert both == two.joined(one) == both.joined(one)
    assert both.joined(three) == one.joined(two.joined(three))
    for part in (one, two):
        if part.newest is not None:
            assert both.newest is not None
            assert both.newest.since >= part.newest.since
    assert len({entry.since for entry in both.leaderships}) == len(both.leaderships)
    assert both.leader_of(ShardId(0)) == both.leader_of(ShardId(7)) == both.newest


def test_a_node_knows_promotions_and_itself_and_not_what_it_was_told_by_a_person() -> None:
    alone = RoleFact()
    assert leaders_known(alone, A).newest == Leadership(UNPROMISED, A)
    follows = RoleFact(role=Role.FOLLOWS, leader=A)
    assert leaders_known(follows, B).newest is None
    asked = follows.asked(promise(1, B))
    assert leaders_known(asked, B).newest is None, "a promise is no promotion"
    led = asked.promoted(GroupNumber(7))
    first = Leadership(promise(1, B), B, GroupNumber(7))
    assert leaders_known(led, B).leaderships == (first,)
    fenced = led.heard_of(promise(2, C))
    assert leaders_known(fenced, B).leaderships == (first,), "what it doesn't lead any more it has led"


@given(st.integers(0, 5), NODES, MAPS)
def test_what_is_known_elsewhere_counts_where_it_is_newer_than_the_role(
    epoch: int, node: NodeName, elsewhere: LeaderMap
) -> None:
    own = promise(epoch, node) if epoch else UNPROMISED
    fact = RoleFact(role=Role.FOLLOWS, promise=own, leader=node)
    found = leader_by(fact, A, elsewhere)
    assert found is not None
    assert found.since == max(own, elsewhere.newest.since if elsewhere.newest else own)
    assert found.node == (node if found.since == own else found.since.node)


def test_who_leads_is_the_truth_about_itself() -> None:
    lineage = Lineage().with_term(promise(3, B), GroupNumber(5))
    fact = RoleFact(promise=promise(3, B), leader=B, lineage=lineage)
    older = LeaderMap.of([Leadership(promise(2, C), C)])
    assert leader_by(fact, B, older) == Leadership(promise(3, B), B, GroupNumber(5))
    restored = RoleFact(promise=promise(3, B), lineage=lineage)
    assert leader_by(restored, A, LeaderMap.of([Leadership(promise(3, B), B)])) == Leadership(
        promise(3, B), A, GroupNumber(5)
    )
