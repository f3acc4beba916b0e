"""How a node becomes the leader: fence first, then take over.

| state       | action                                                  | then                                                      |
|-------------|---------------------------------------------------------|-----------------------------------------------------------|
| surveying   | asks every node for its promise and its rank            | all have answered, or time is up: another node is a candidate -> failed (`promotion_lost`), or has promised this name an epoch that this home never asked for -> failed (NodeNameTaken); too few for the level -> failed, both with nothing changed; else BecomeCandidate -> candidate |
| candidate   | takes nothing more from the leader, and notes its own promise | noted -> claiming or asking; this node has given a promise since it began -> failed (`promotion_lost`) |
| claiming    | if a store decides between candidates: claims there     | claimed -> asking; another node has claimed -> failed (`promotion_lost`) |
| asking      | asks every node for its promise, which makes the leader step down | a node has promised higher -> failed (`promotion_lost`), but surveying again if the store has decided against that promise; or the same to another home of this name -> failed (NodeNameTaken); all have answered (or enough, and every node that answered the survey), or time is up: too few -> failed (`not_caught_up`); a node has more -> catching up; else -> promoting |
| catching up | takes what it lacks from the node that has most, whose log can no longer grow | it has it -> promoting; can't -> failed (`not_caught_up`) |
| promoting   | recovers the log, takes the catalog                     | PersistRole(leads, a term behind its last group) -> leads |
| leads       |                                                         |                                                           |
| failed      | the promise stays: a leader with a lower promise is fenced when it meets it. Any node can be promoted then |                |

A candidate may win if it has enough promises, its own among them: without one of these nodes no old leader can
have anything acknowledged at the stream's level, and one of them has everything that was
(`promotion_quorum.promises_wanted`). It must also have as much as the node among them that has most (`node_promises.Rank`). A node
doesn't run if it sees another candidate. If two run, the higher promise wins: the nodes that gave the lower
promise give the higher one as well, or refuse the lower. The lower candidate's promises are too few, or rank
below in every later contest. With `accept_loss` neither condition holds: `losses` names what may be lost, and
the old leader is fenced when it meets a higher promise.

Facts about the log are as of a moment at or after the promise: a node that has promised takes nothing from an
older leader, so it has no more than it reported.

Pure: no I/O, clock or randomness. Effects are carried out in order; if one fails, none of the later ones is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from millstream.errors import MillstreamError, NodeNameTaken, ReplicationError
from millstream.model.ids import Epoch, GroupNumber
from millstream.model.positions import Seq
from millstream.model.replication import AckKind, AckLevel, NodeName
from millstream.protocol.replication.leader_events import PersistRole
from millstream.protocol.replication.node_promises import Promise, Rank, Role, RoleFact, name_taken
from millstream.protocol.replication.promotion_quorum import level_kept, promises_wanted

STORE: Final = NodeName("")
"""Stands for the object store among the holders of the log."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's report about itself."""

    promise: Promise
    role: Role
    rank: Rank
    persisted_upto: Seq = Seq(0)
    is_candidate: bool = False
    """Whether a promotion is running there."""


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginPromotion:
    """An operator requests the promotion."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A node's answer to `Survey`; or to `AskPromise`, with the promise given and durable."""

    node: NodeName
    report: NodeReport


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A node can't be reached, or fails."""

    node: NodeName


@dataclass(frozen=True, slots=True)
class BecameCandidate:
    """`BecomeCandidate` was carried out."""

    fact: RoleFact
    group: GroupNumber
    """The last group in its log, which takes no more."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The store took the claim."""

    stored: Rank | None = None
    """The rank of what the object store has, looked up after the claim; None if the store isn't an object store."""
    persisted_upto: Seq = Seq(0)


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """The store can't be reached, or has a claim as high."""

    error: MillstreamError


@dataclass(frozen=True, slots=True)
class Refused:
    """A node will never give this one the promise that it asks for: `NodeNameTaken`."""

    node: NodeName
    error: MillstreamError


@dataclass(frozen=True, slots=True)
class Superseded:
    """A node has given a promise as high or higher to another one; or this node has given any since it began."""

    promise: Promise


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """`CatchUp` was carried out."""

    fact: RoleFact
    """The role as it is after following the node that has more."""
    group: GroupNumber


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    """`CatchUp` failed."""

    error: MillstreamError


@dataclass(frozen=True, slots=True)
class LogTakenOver:
    """`TakeOverLog` was carried out: the log ends at that group."""

    group: GroupNumber


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    BeginPromotion
    | Answered
    | Unanswered
    | Refused
    | BecameCandidate
    | Claimed
    | ClaimFailed
    | Superseded
    | CaughtUp
    | CatchUpFailed
    | LogTakenOver
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Survey:
    """Ask a node for its `NodeReport`; then `Answered` or `Unanswered`."""

    node: NodeName


@dataclass(frozen=True, slots=True)
class BecomeCandidate:
    """Stop following, then note the result of `RoleFact.candidate_for` on the role noted at that moment; then `BecameCandidate`.

    `Superseded` if this node has given another promise since the candidate began: the node that got it is ahead.
    """

    promise: Promise


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim the stream for a promise, at a store where one claim wins; look up what is stored only then."""

    promise: Promise


@dataclass(frozen=True, slots=True)
class AskPromise:
    """Ask a node for its promise; then `Answered`, `Unanswered` or `Superseded`.

    A leader ends its writes before it answers.
    """

    node: NodeName
    promise: Promise


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Follow a node that has promised, under that promise, until this node has as much.

    Then `CaughtUp` or `CatchUpFailed`.
    """

    node: NodeName
    """The node; `STORE`: the object store."""
    rank: Rank
    promise: Promise


@dataclass(frozen=True, slots=True)
class TakeOverLog:
    """Take the shipped catalog, recover the log, and begin numbers above all reserved ones; then `LogTakenOver`.

    Nothing is written so far. Cursors of followers (`PersistCursor`) go back to the beginning. They are of logs of
    earlier leaders: since then a follower may have set aside what it had acknowledged, and it needs this log from there.
    """

    promise: Promise


@dataclass(frozen=True, slots=True)
class Lead:
    """Open for writes, and take followers."""

    fact: RoleFact
    losses: tuple[str, ...]
    """Descriptions of what may be lost, for operators."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The promotion failed."""

    error: MillstreamError


Effect = Survey | BecomeCandidate | PersistRole | Claim | AskPromise | CatchUp | TakeOverLog | Lead | Failed


class PromotionState(StrEnum):
    """The state of a promotion."""

    NEW = "new"
    SURVEYING = "surveying"
    CANDIDATE = "candidate"
    CLAIMING = "claiming"
    ASKING = "asking"
    CATCHING_UP = "catching up"
    PROMOTING = "promoting"
    LEADS = "leads"
    FAILED = "failed"


class Promotion:
    """One attempt to promote a node; see the module.

    Args:
        node: this one.
        nodes: all nodes that have the stream, this one included.
        fact: this node's noted role; the node may go on following until it becomes a candidate.
        level: the stream's; what was acknowledged at this level, or a higher one, isn't lost.
        has_store: a store decides between candidates; required if the level is `object`.
        accept_loss: promote it though something may be lost.
        answer_s: time that nodes have to answer.
    """

    def __init__(
        self,
        node: NodeName,
        nodes: frozenset[NodeName],
        fact: RoleFact,
        level: AckLevel,
        *,
        has_store: bool = False,
        accept_loss: bool = False,
        answer_s: float = 5.0,
    ) -> None:
        assert node in nodes, "a candidate is one of the nodes"
        self._node: Final = node
        self._others: Final = nodes - {node}
        self._level: Final = level
        self._has_store: Final = has_store or level.kind is AckKind.OBJECT
        self._accepts_loss: Final = accept_loss
        self._answer_s: Final = answer_s
        self.fact = fact
        self.group = GroupNumber(0)
        self.state = PromotionState.NEW
        self._promise = fact.promise
        """The promise that it asks for, from the end of the survey on."""
        self.losses: list[str] = []
        self._silent: set[NodeName] = set()
        self._absent: frozenset[NodeName] = frozenset()
        """Nodes that didn't answer the survey: the candidate doesn't wait for them again if the others are enough."""
        self._reports: dict[NodeName, NodeReport] = {}
        self._won = Epoch(0)
        """The last epoch that it has claimed: no other node leads under it."""
        self._until = 0.0

    def step(self, event: Event, now_s: float) -> list[Effect]:  # noqa: C901, PLR0911, PLR0912 - one branch an event
        """Return the effects of an event, at a moment of a clock that never goes back."""
        if isinstance(event, Superseded):
            return self._superseded(event.promise, now_s)
        if isinstance(event, Refused):
            return [] if self.state in {PromotionState.LEADS, PromotionState.FAILED} else self._fail(event.error)
        match self.state, event:
            case PromotionState.NEW, BeginPromotion():
                if self.fact.role is Role.LEADS:
                    self.state = PromotionState.LEADS
                    return [Lead(self.fact, ())]
                return self._begin(now_s)
            case ((PromotionState.SURVEYING | PromotionState.ASKING), Answered(node, report)):
                if self.state is PromotionState.ASKING and report.promise != self._promise:
                    return []  # a late answer to the survey
                self._reports[node] = report
                self._silent.discard(node)
                return self._when_answered(now_s)
            case ((PromotionState.SURVEYING | PromotionState.ASKING), Unanswered(node)):
                self._silent.add(node)
                return self._when_answered(now_s)
            case ((PromotionState.SURVEYING | PromotionState.ASKING), Tick()):
                return self._when_answered(now_s)
            case PromotionState.CANDIDATE, BecameCandidate(fact, group):
                self.fact, self.group = fact, group
                if not self._has_store:
                    return self._ask(now_s)
                self.state = PromotionState.CLAIMING
                return [Claim(self._promise)]
            case PromotionState.CLAIMING, Claimed(stored, persisted_upto):
                self._won = self._promise.epoch
                if stored is not None:
                    self._reports[STORE] = NodeReport(self._promise, Role.FOLLOWS, stored, persisted_upto)
                return self._ask(now_s)
            case PromotionState.CLAIMING, ClaimFailed(error):
                if self._accepts_loss and error.code not in {"promotion_lost", NodeNameTaken.code}:
                    self.losses.append(
                        f"the store that decides who leads doesn't answer ({error}): another node may be promoted, too"
                    )
                    return self._ask(now_s)
                return self._fail(error)
            case PromotionState.CATCHING_UP, CaughtUp(fact, group):
                self.fact, self.group = fact, group
                return self._compare(may_fetch=False)
            case PromotionState.CATCHING_UP, CatchUpFailed():
                return self._compare(may_fetch=False)
            case PromotionState.PROMOTING, LogTakenOver(group):
                self.state, self.fact = PromotionState.LEADS, self.fact.promoted(group)
                return [PersistRole(self.fact), Lead(self.fact, tuple(self.losses))]
            case _:
                return []

    # --- its steps -------------------------------------------------------------------------------------------------

    def _begin(self, now_s: float) -> list[Effect]:
        self.state, self._until = PromotionState.SURVEYING, now_s + self._answer_s
        self._reports.clear()
        self._silent.clear()
        asked: list[Effect] = [Survey(node) for node in sorted(self._others)]
        return asked + self._when_answered(now_s)

    def _when_answered(self, now_s: float) -> list[Effect]:
        answered = self._reports.keys() - {STORE}
        here = 1 + len(answered)
        waits_for = self._others - answered - self._silent
        if self.state is PromotionState.ASKING and here >= self._wanted:
            waits_for -= self._absent
        if now_s < self._until and waits_for:
            return []
        if self.state is PromotionState.ASKING:
            return self._judge()
        ahead = [
            one.promise
            for node, one in self._reports.items()
            if one.is_candidate and one.promise.node == node and one.promise.epoch != self._won
        ]
        if ahead and max(ahead) >= self.fact.promise:
            return self._fail(_lost_to(max(ahead)))
        # This home notes each promise that it will ask for before it asks. A higher one under its name went
        # to another home.
        others = [one.promise for one in self._reports.values() if one.promise.node == self._node]
        if others and max(others) > self.fact.promise and not self._accepts_loss:
            return self._fail(name_taken(max(others)))
        if here < self._wanted and not self._accepts_loss:
            return self._fail(self._too_few(here, "nothing was changed"))
        highest = max([self.fact.promise, *(one.promise for one in self._reports.values())])
        self.state, self._promise = PromotionState.CANDIDATE, Promise(Epoch(highest.epoch + 1), self._node)
        self._absent = self._others - answered
        self._reports.clear()
        return [BecomeCandidate(self._promise)]

    @property
    def _wanted(self) -> int:
        return promises_wanted(self._level, 1 + len(self._others))

    def _ask(self, now_s: float) -> list[Effect]:
        self.state, self._until = PromotionState.ASKING, now_s + self._answer_s
        self._silent.clear()
        asked: list[Effect] = [AskPromise(node, self._promise) for node in sorted(self._others)]
        return asked + self._when_answered(now_s)

    def _judge(self) -> list[Effect]:
        here = 1 + len(self._reports.keys() - {STORE})
        if here < self._wanted:
            error = self._too_few(here, "their promises are missing")
            if not self._accepts_loss:
                return self._fail(error)
            kept = level_kept(here, 1 + len(self._others))
            rest = "" if kept is None else f"; what was acknowledged at {kept} or a higher level isn't"
            silent = ", ".join(sorted(self._others - self._reports.keys()))
            self.losses.append(f"what only {silent} may have is lost{rest}")
        return self._compare(may_fetch=True)

    def _compare(self, *, may_fetch: bool) -> list[Effect]:
        mine = self.fact.rank(self.group)
        more = {node: one for node, one in self._reports.items() if one.rank > mine}
        if more and may_fetch:
            self.state = PromotionState.CATCHING_UP
            node = max(more, key=lambda name: (more[name].rank, name))
            return [CatchUp(node, more[node].rank, self._promise)]
        for node, one in sorted(more.items()):
            self.losses.append(
                f"{node or 'the object store'} has group {one.rank.group} of epoch {one.rank.promise.epoch}, up to number {one.persisted_upto}; "
                f"{self._node} has group {mine.group} of epoch {mine.promise.epoch}"
            )
        if more and not self._accepts_loss:
            return self._fail(
                ReplicationError(
                    "; ".join(self.losses), code="not_caught_up", nodes=sorted(more), group=int(mine.group)
                )
            )
        self.state = PromotionState.PROMOTING
        return [TakeOverLog(self._promise)]

    def _superseded(self, promise: Promise, now_s: float) -> list[Effect]:
        if self.state in {PromotionState.LEADS, PromotionState.FAILED}:
            return []
        if self.state is PromotionState.SURVEYING:
            return []  # late: no promise is asked for now
        if self.state is PromotionState.ASKING and promise.epoch == self._won and promise.node != self._node:
            # The other candidate lost the claim but keeps the promise, so no node would lead under either. BecomeCandidate
            # again, above both.
            return self._begin(now_s)
        if self.state is PromotionState.CANDIDATE:
            return self._fail(name_taken(promise) if promise.node == self._node else _lost_to(promise))
        return [] if promise < self._promise or promise.node == self._node else self._fail(_lost_to(promise))

    def _too_few(self, here: int, what: str) -> ReplicationError:
        silent = sorted(self._others - self._reports.keys())
        return ReplicationError(
            f"{', '.join(silent)} can't be asked, and {self._wanted} of {1 + len(self._others)} nodes must answer, of which {here} do, "
            f"so that nothing acknowledged at {self._level} is lost: {what}",
            code="not_caught_up",
            nodes=silent,
        )

    def _fail(self, error: MillstreamError) -> list[Effect]:
        self.state = PromotionState.FAILED
        return [Failed(error)]


def _lost_to(promise: Promise) -> ReplicationError:
    return ReplicationError(
        f"{promise.node} is being promoted with epoch {promise.epoch}",
        code="promotion_lost",
        leader=str(promise.node),
        epoch=int(promise.epoch),
    )
