"""Promotion of a node to leader: each rule of `protocol.replication.promotion_machine`, one contest at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from millstream.errors import LinkLost, NodeNameTaken, ReplicationError
from millstream.model.ids import Epoch, GroupNumber
from millstream.model.positions import Seq
from millstream.model.replication import AckLevel, NodeName
from millstream.protocol.replication import promotion_machine as promoting
from millstream.protocol.replication.leader_events import PersistRole
from millstream.protocol.replication.node_promises import UNPROMISED, Promise, Rank, Role, RoleFact
from millstream.protocol.replication.promotion_machine import NodeReport, Promotion
from millstream.testing.errors import code_of

A, B, C = NodeName("a"), NodeName("b"), NodeName("c")
_T = TypeVar("_T")


def report(group: int, promise: Promise = UNPROMISED, *, role: Role = Role.FOLLOWS) -> NodeReport:
    return NodeReport(promise, role, Rank(UNPROMISED, GroupNumber(group)), Seq(group))


def of(kind: type[_T], effects: list[promoting.Effect]) -> list[_T]:
    return [effect for effect in effects if isinstance(effect, kind)]


class Contest:
    """A contest in which B stands against A, who leads, and C, who follows."""

    def __init__(
        self, level: str = "durable(1)", *, group: int = 5, accept_loss: bool = False, has_store: bool = False
    ) -> None:
        fact = RoleFact(Role.FOLLOWS, leader=A)
        self.one = Promotion(
            B,
            frozenset({A, B, C}),
            fact,
            AckLevel.parse(level),
            accept_loss=accept_loss,
            has_store=has_store,
        )
        self.now = 0.0
        self.group = GroupNumber(group)
        self.effects = self.step(promoting.BeginPromotion())

    def step(self, event: promoting.Event) -> list[promoting.Effect]:
        self.effects = self.one.step(event, self.now)
        self.stood = of(promoting.BecomeCandidate, self.effects)
        if self.stood:
            fact = RoleFact(Role.FOLLOWS, leader=A).candidate_for(self.stood[0].promise)
            self.effects = self.one.step(promoting.BecameCandidate(fact, self.group), self.now)
        return self.effects

    def all_say(self, **groups: int | None) -> list[promoting.Effect]:
        """Let each node answer that isn't named None, with its report and what it is asked for."""
        for name, group in groups.items():
            node = NodeName(name)
            if group is None:
                self.step(promoting.Unanswered(node))
            else:
                promise = self.one.fact.promise if self.one.state is promoting.PromotionState.ASKING else UNPROMISED
                self.step(promoting.Answered(node, report(group, promise)))
        return self.effects

    def error(self) -> Exception:
        (failed,) = of(promoting.Failed, self.effects)
        return failed.error


def test_with_enough_promises_it_takes_over_and_its_reign_begins_behind_its_last_group():
    one = Contest()
    effects = one.all_say(a=None, c=4)
    promise = Promise(Epoch(1), B)
    assert effects == [promoting.AskPromise(A, promise), promoting.AskPromise(C, promise)]
    assert one.all_say(a=None, c=4) == [promoting.TakeOverLog(promise)]
    persisted, lead = one.step(promoting.LogTakenOver(GroupNumber(5)))
    assert isinstance(persisted, PersistRole)
    assert isinstance(lead, promoting.Lead)
    assert (lead.fact.role, lead.fact.leader, lead.losses) == (Role.LEADS, B, ())
    assert lead.fact.lineage.last == (promise, 5)


def test_who_stood_still_before_isnt_waited_for_where_the_others_are_enough():
    one = Contest()
    one.all_say(a=None, c=4)
    assert one.all_say(c=4) == [promoting.TakeOverLog(Promise(Epoch(1), B))]
    one = Contest()
    one.all_say(a=5, c=4)
    assert one.all_say(c=4) == [], "who answers has to step down"
    one = Contest("local", accept_loss=True)
    one.all_say(a=None, c=4)
    assert one.all_say(c=4) == [], "what may be lost with it isn't given up before time"


def test_too_few_that_answer_change_nothing():
    one = Contest()
    one.all_say(a=None, c=None)
    assert code_of(one.error()) == "not_caught_up"
    assert not of(promoting.BecomeCandidate, one.effects)
    one = Contest("local")
    one.all_say(a=None, c=5)
    assert "a can't be asked, and 3 of 3" in str(one.error()), "what only the leader may have"


def test_too_few_promises_fail_it_and_what_may_be_lost_is_said_where_that_is_accepted():
    one = Contest()
    one.all_say(a=None, c=4)
    one.all_say(a=None, c=None)
    assert code_of(one.error()) == "not_caught_up"
    one = Contest("local", accept_loss=True)
    one.all_say(a=None, c=4)
    one.all_say(a=None, c=4)
    *_, lead = one.step(promoting.LogTakenOver(GroupNumber(5)))
    assert isinstance(lead, promoting.Lead)
    assert lead.losses == ("what only a may have is lost; what was acknowledged at durable(1) or a higher level isn't",)


def test_what_another_has_more_is_fetched_or_named():
    one = Contest()
    one.all_say(a=None, c=9)
    (catch_up,) = one.all_say(a=None, c=9)
    assert isinstance(catch_up, promoting.CatchUp)
    assert (catch_up.node, catch_up.rank.group) == (C, 9)
    assert of(promoting.TakeOverLog, one.step(promoting.CaughtUp(one.one.fact, GroupNumber(9))))
    for accept_loss in (False, True):
        one = Contest(accept_loss=accept_loss)
        one.all_say(a=None, c=9)
        one.all_say(a=None, c=9)
        one.step(promoting.CatchUpFailed(LinkLost("gone")))
        said = "c has group 9 of epoch 0, up to number 9; b has group 5 of epoch 0"
        assert one.one.losses == [said]
        assert bool(of(promoting.TakeOverLog, one.effects)) is accept_loss
        assert bool(of(promoting.Failed, one.effects)) is not accept_loss


def test_the_claim_decides_before_anybody_is_asked():
    one = Contest("object", has_store=True)
    one.all_say(a=None, c=None)
    promise = Promise(Epoch(1), B)
    assert one.effects[-1] == promoting.Claim(promise)
    # No other node's promise is needed, and none has answered: they are asked, and not waited for.
    *_, catch_up = one.step(promoting.Claimed(Rank(UNPROMISED, GroupNumber(8)), Seq(80)))
    assert isinstance(catch_up, promoting.CatchUp)
    assert catch_up.node == promoting.STORE
    one = Contest("object", has_store=True)
    one.all_say(a=None, c=None)
    one.step(promoting.ClaimFailed(ReplicationError("c was faster", code="promotion_lost")))
    assert one.error().code == "promotion_lost"


def test_of_two_at_once_the_lower_promise_loses():
    one = Contest()
    one.all_say(a=None, c=4)
    assert one.step(promoting.Superseded(Promise(Epoch(1), A))) == [], "lower than its own"
    one.step(promoting.Superseded(Promise(Epoch(1), C)))
    assert one.error().code == "promotion_lost"
    assert one.all_say(c=4) == [], "it is over"


def test_who_has_the_claim_stands_again_above_one_that_lost_it():
    """… and keeps its own promise, which is as high. Otherwise no node would lead."""
    one = Contest("object", has_store=True)
    one.all_say(a=None, c=5)
    one.step(promoting.Claimed())
    effects = one.step(promoting.Superseded(Promise(Epoch(1), C)))
    assert [survey.node for survey in of(promoting.Survey, effects)] == [A, C]
    assert one.step(promoting.Superseded(Promise(Epoch(1), C))) == [], "told twice"
    one.step(promoting.Answered(C, replace(report(5, Promise(Epoch(1), C)), is_candidate=True)))
    assert one.step(promoting.Unanswered(A)) == [promoting.Claim(Promise(Epoch(2), B))], "it may not have ended yet"
    one.step(promoting.ClaimFailed(ReplicationError("c was faster", code="promotion_lost")))
    assert one.error().code == "promotion_lost", "this time"


def test_one_of_two_gives_way_before_it_stands():
    one = Contest()
    ahead = replace(report(4, Promise(Epoch(1), C)), is_candidate=True)
    one.step(promoting.Answered(C, ahead))
    one.step(promoting.Unanswered(A))
    assert one.error().code == "promotion_lost", "it sees that another one stands"
    one = Contest()
    one.step(promoting.Answered(C, replace(report(4), is_candidate=True)))
    assert not one.step(promoting.Unanswered(A)) or one.stood, "that one doesn't stand yet"
    assert one.one.state is promoting.PromotionState.ASKING


@pytest.mark.parametrize(("node", "error"), [(C, "promotion_lost"), (B, "node_name_taken")])
def test_who_has_promised_something_since_it_began_doesnt_stand(node: NodeName, error: str) -> None:
    one = Promotion(B, frozenset({A, B, C}), RoleFact(Role.FOLLOWS, leader=A), AckLevel.parse("durable(2)"))
    one.step(promoting.BeginPromotion(), 0.0)
    for other in (A, C):
        effects = one.step(promoting.Unanswered(other), 0.0)
    assert of(promoting.BecomeCandidate, effects)
    (failed,) = of(promoting.Failed, one.step(promoting.Superseded(Promise(Epoch(1), node)), 0.0))
    assert failed.error.code == error


@pytest.mark.parametrize("accept_loss", [False, True])
def test_another_home_of_its_name_is_refused(*, accept_loss: bool) -> None:
    one = Contest("object", has_store=True, accept_loss=accept_loss)
    one.all_say(a=None, c=None)
    one.step(promoting.ClaimFailed(NodeNameTaken("it is the other one's")))
    assert isinstance(one.error(), NodeNameTaken)
    one = Contest(accept_loss=accept_loss)
    one.all_say(a=None, c=4)
    one.step(promoting.Refused(C, NodeNameTaken("it is the other one's")))
    assert isinstance(one.error(), NodeNameTaken)
    assert one.all_say(c=4) == [], "it is over"


def test_time_is_up_for_who_doesnt_answer_and_a_late_answer_to_the_survey_is_no_promise():
    one = Contest()
    one.step(promoting.Answered(C, report(4)))
    one.now = 5.0
    assert of(promoting.AskPromise, one.step(promoting.Tick()))
    one.step(promoting.Answered(A, report(9)))
    one.step(promoting.Answered(C, report(4)))
    one.now = 10.0
    one.step(promoting.Tick())
    assert code_of(one.error()) == "not_caught_up"


def test_who_leads_already_goes_on_leading():
    fact = RoleFact(Role.LEADS)
    one = Promotion(A, frozenset({A, B}), fact, AckLevel.parse("local"))
    assert one.step(promoting.BeginPromotion(), 0.0) == [promoting.Lead(fact, ())]


def test_the_only_node_there_is_promotes_itself():
    fact = RoleFact(Role.FENCED, Promise(Epoch(3), B), B)
    one = Promotion(A, frozenset({A}), fact, AckLevel.parse("local"))
    assert one.step(promoting.BeginPromotion(), 0.0) == [promoting.BecomeCandidate(Promise(Epoch(4), A))]
    stood = promoting.BecameCandidate(fact.candidate_for(Promise(Epoch(4), A)), GroupNumber(5))
    assert one.step(stood, 0.0) == [promoting.TakeOverLog(Promise(Epoch(4), A))]


def test_what_was_promised_to_its_name_and_it_never_stood_for_went_to_another_home():
    one = Contest()
    one.step(promoting.Unanswered(A))
    one.step(promoting.Answered(C, report(5, Promise(Epoch(1), B))))
    assert isinstance(one.error(), NodeNameTaken)
    # An operator who accepts a loss asserts that this node is the right one.
    one = Contest(accept_loss=True)
    one.step(promoting.Unanswered(A))
    one.step(promoting.Answered(C, report(5, Promise(Epoch(1), B))))
    assert one.one.state is promoting.PromotionState.ASKING
