"""A node's durable part in a stream: its promise, whether it leads, and which nodes have led before.

The facts
---------
- A *promise* is a pair of a number (epoch) and a node. Pairs are ordered, and no two nodes ever hold the same
  one, even if both begin at the same time with the same number. A node that has promised never again takes
  anything from a leader with a lower promise.
- Two homes may use one node name: a copy and its original. So a promise is bound to a claimant, a word that a candidate
  draws for each attempt. A node that has promised one home refuses the other, by name, and doesn't follow it under that
  promise. The claimant is empty if the node has only learned of the promise, and in notes older than claimants.
- A *term* names the commit group behind which a leader went on. The terms of a log, in order, are its
  *lineage*. Two logs have the same bytes up to the group of the first term in which they differ. Groups
  behind that in one log aren't in the other.
- A node notes its leader's terms before it takes anything from that leader: a log that is ahead of its lineage
  would be taken for another's after a crash. A term counts once the log has everything that the leader had when
  it began. So of two nodes the one with the later last term has everything that was acknowledged; if the last
  terms are equal, the one with the greater group: `Rank`.

Transitions of a node (its promise: p):

    | event                      | leads                       | follows              | fenced               |
    |----------------------------|-----------------------------|----------------------|----------------------|
    | is asked for a promise > p | fenced by it                | follows its node     | fenced by it         |
    | is asked for p, or less    | refuses, unless it is asked for p by the same claimant                   |||
    | learns of a promise > p    | fenced by it                | follows its node     | fenced by it         |
    | was promoted under p       | (leads)                     | leads                | leads                |
    | follows, what the others   |                             |                      |                      |
    | lack is set aside          | refused                     | (follows)            | follows              |

Every change is durable before the node sends or does anything that depends on it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from millstream.errors import Fenced, NodeNameTaken, RoleUnreadable
from millstream.model.ids import Epoch, GroupNumber
from millstream.model.replication import NodeName

NOBODY: Final = NodeName("")
LINEAGE: Final = "lineage"
"""The document that holds a lineage."""
CONSUMERS: Final = "consumers"
"""The document of the leader's consumers."""
CONSUMERS_KEY: Final = "consumers_key"
"""The document of the key that signs the ids of their deliveries."""
SESSIONS: Final = "sessions"
"""The document of the log's writes up to some number; useless to a log that ends before that number."""
_VERSION: Final = 1
_CLAIMANT_MAX: Final = 64


class Promise(NamedTuple):
    """A promise to take nothing from a leader with a lower one. Orders by number, then by node."""

    epoch: Epoch
    node: NodeName


UNPROMISED: Final = Promise(Epoch(0), NOBODY)
"""The promise before any promotion: the leader was set up as such."""


class Term(NamedTuple):
    """The period in which one leader leads."""

    promise: Promise
    behind: GroupNumber
    """The last group that was there when it began; its first group is the next."""


class Rank(NamedTuple):
    """How much of the acknowledged groups a node has: the greater rank has everything that the lower one has."""

    promise: Promise
    """The promise of the last term in its lineage."""
    group: GroupNumber
    """The last group that it has, whole and durable."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The terms of a log, oldest first."""

    terms: tuple[Term, ...] = (Term(UNPROMISED, GroupNumber(0)),)

    @property
    def last(self) -> Term:
        """The newest term."""
        return self.terms[-1]

    def covered_by(self, group: GroupNumber) -> Lineage:
        """Return the terms that count if the log ends at that group: those whose whole past is there."""
        return Lineage((self.terms[0], *(term for term in self.terms[1:] if term.behind <= group)))

    def common_with(self, other: Lineage) -> tuple[Lineage, GroupNumber | None]:
        """Return the common beginning of both, and the group behind which they part; None if they are equal.

        If one of them only has more terms, they part behind the group at which the first of these began.
        """
        count = 0
        for mine, its in zip(self.terms, other.terms, strict=False):
            if mine != its:
                break
            count += 1
        parts = [terms.terms[count].behind for terms in (self, other) if len(terms.terms) > count]
        return Lineage(self.terms[:count] or Lineage().terms), min(parts, default=None)

    def with_term(self, promise: Promise, behind: GroupNumber) -> Lineage:
        """Return the lineage of the node that is promoted."""
        assert promise > self.last.promise, "a promotion is under a higher promise than all before"
        return Lineage((*self.terms, Term(promise, behind)))


class Role(StrEnum):
    """A node's part in a stream."""

    LEADS = "leads"
    FOLLOWS = "follows"
    FENCED = "fenced"
    """It has led. It may have more than the other nodes; it writes nothing, and takes nothing from others."""


@dataclass(frozen=True, slots=True)
class RoleFact:
    """A node's durable notes about one stream."""

    role: Role = Role.LEADS
    promise: Promise = UNPROMISED
    leader: NodeName = NOBODY
    """The node that it follows, or that fenced it; its own name or `NOBODY` if it leads."""
    lineage: Lineage = Lineage()
    claimant: str = ""
    """Claimant of the promise; empty: not known."""

    def lineage_of_log(self, group: GroupNumber) -> Lineage:
        """Return the lineage of this node's log, which ends at that group.

        A leader's own terms count whatever its marks say: after a power cut they may be older than its log.
        """
        return self.lineage if self.role is Role.LEADS else self.lineage.covered_by(group)

    def rank(self, group: GroupNumber) -> Rank:
        """Return the rank of this node if its log ends at that group."""
        return Rank(self.lineage.covered_by(group).last.promise, group)

    def refusal_of_old_leader(self, promise: Promise) -> Fenced | None:
        """Return the error that an old leader gets: one under a promise lower than this node's. None if it isn't lower."""
        return fenced_error(self.promise) if promise < self.promise else None

    def heard_of(self, promise: Promise, claimant: str = "") -> RoleFact:
        """Return the role after the node learns of a promise, or gives it; unchanged unless the promise is higher."""
        if promise <= self.promise:
            return self
        role = Role.FOLLOWS if self.role is Role.FOLLOWS else Role.FENCED
        return replace(self, role=role, promise=promise, leader=promise.node, claimant=claimant)

    def asked(self, promise: Promise, claimant: str = "") -> RoleFact:
        """Return the role after the node gives a promise that was asked for: durable before it is answered.

        Raises:
            Fenced: a higher promise was given; the error names its node.
            NodeNameTaken: this promise was given, but to another claimant.
        """
        if (refusal := self.refusal_of_old_leader(promise)) is not None:
            raise refusal
        if promise > self.promise:
            return self.heard_of(promise, claimant)
        if self.claimant and claimant != self.claimant:
            raise name_taken(promise)
        # The claimant is empty if the promise was only learned of: another node was asked before, and reported it.
        return replace(self, claimant=claimant)

    def candidate_for(self, promise: Promise, claimant: str = "") -> RoleFact:
        """Return the role of a candidate, which gives itself the promise that it asks of others.

        It follows as before.
        """
        assert promise > self.promise, "a candidate asks for more than it has promised"
        role = Role.FENCED if self.role is Role.LEADS else self.role
        return replace(self, role=role, promise=promise, claimant=claimant)

    def led_by(self, claimant: str) -> RoleFact:
        """Return the role after its leader has sent its claimant.

        `NodeNameTaken` if the promise has another claimant.
        """
        if claimant and self.claimant and claimant != self.claimant:
            raise name_taken(self.promise)
        return replace(self, claimant=claimant or self.claimant)

    def promoted(self, behind: GroupNumber) -> RoleFact:
        """Return the role as the leader under its own promise; the log ends at that group."""
        lineage = self.lineage.covered_by(behind).with_term(self.promise, behind)
        return replace(self, role=Role.LEADS, leader=self.promise.node, lineage=lineage)

    def following(self, leader: NodeName) -> RoleFact:
        """Return the role as a follower. Groups that the leader lacks are set aside when it meets the leader."""
        if self.role is Role.LEADS:
            raise AssertionError("who leads was promised something higher before it follows")
        return replace(self, role=Role.FOLLOWS, leader=leader)

    def to_json(self) -> bytes:
        """Return the stored form, one line."""
        facts = {
            "version": _VERSION,
            "role": self.role.value,
            "epoch": self.promise.epoch,
            "promised_to": self.promise.node,
            "leader": self.leader,
            "lineage": _terms_to_json(self.lineage),
            "claimant": self.claimant,
        }
        return json.dumps(facts).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> RoleFact:
        """Return the role of a stored form; `RoleUnreadable` if it is damaged or of a newer Millstream."""
        facts = _object(data, "the role")
        try:
            promise = Promise(Epoch(_whole(facts["epoch"])), NodeName(_text(facts["promised_to"])))
            lineage = _lineage_of(facts["lineage"])
            claimant = claimant_of(facts.get("claimant", ""))
            return cls(Role(facts["role"]), promise, NodeName(_text(facts["leader"])), lineage, claimant)
        except (KeyError, TypeError, ValueError) as error:
            raise RoleUnreadable(f"the role that this node has noted isn't one: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first document on each connection, `lineage`: it shows the follower which of its groups the leader lacks."""

    lineage: Lineage
    group: GroupNumber
    """The leader's last durable group. If a follower of the same lineage has more, the leader has lost something."""
    claimant: str = ""
    """Claimant of the promise under which it leads; empty: not known."""

    def to_json(self) -> bytes:
        """Return the transmitted form."""
        facts = {"version": _VERSION, "group": self.group, "lineage": _terms_to_json(self.lineage)}
        return json.dumps(facts | {"claimant": self.claimant}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Greeting:
        """Return the greeting of a transmitted form; `RoleUnreadable` if it is damaged or of a newer Millstream."""
        facts = _object(data, "a lineage")
        try:
            claimant = claimant_of(facts.get("claimant", ""))
            return cls(_lineage_of(facts["lineage"]), GroupNumber(_whole(facts["group"])), claimant)
        except (KeyError, TypeError, ValueError) as error:
            raise RoleUnreadable(f"the lineage that came isn't one: {error!r}") from error


def fenced_error(promise: Promise) -> Fenced:
    """Return the error for a node that leads, or wants to lead, under less than that promise."""
    return Fenced(
        f"{promise.node or 'another node'} was promoted with epoch {promise.epoch}",
        epoch=int(promise.epoch),
        leader=str(promise.node),
    )


def name_taken(promise: Promise) -> NodeNameTaken:
    """Return the error for a home that uses another home's node name, which has the promise."""
    return NodeNameTaken(
        f"epoch {promise.epoch} was promised to another home that calls itself {promise.node}",
        node=str(promise.node),
        epoch=int(promise.epoch),
    )


def claimant_of(value: object) -> str:
    """Return the value if it may be a claimant; else raise `ValueError` or `TypeError`."""
    text = _text(value)
    if len(text) > _CLAIMANT_MAX:
        raise ValueError(f"a claimant of {len(text)} characters")
    return text


def _terms_to_json(lineage: Lineage) -> list[dict[str, Any]]:
    return [{"epoch": promise.epoch, "leader": promise.node, "behind": behind} for promise, behind in lineage.terms]


def _lineage_of(terms: Sequence[dict[str, Any]]) -> Lineage:
    found = [
        Term(
            Promise(Epoch(_whole(term["epoch"])), NodeName(_text(term["leader"]))),
            GroupNumber(_whole(term["behind"])),
        )
        for term in terms
    ]
    if not found or any(a.promise >= b.promise or a.behind > b.behind for a, b in itertools.pairwise(found)):
        raise ValueError("the terms aren't in order")
    return Lineage(tuple(found))


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        facts = json.loads(data)
    except ValueError as error:
        raise RoleUnreadable(f"{what} isn't JSON") from error
    if not isinstance(facts, dict) or facts.get("version") != _VERSION:
        raise RoleUnreadable(f"{what} is of another version than {_VERSION}")
    return facts


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
