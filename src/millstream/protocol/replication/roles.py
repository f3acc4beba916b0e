"""What a node durably knows of its part in a stream: whom it has promised what, whether it leads, and who has led before.

The facts
---------
- A *promise* is a pair of a number (epoch) and a node; pairs are ordered, so that no two nodes ever hold the same one, whoever began at
  the same time with the same number. Who has promised takes nothing from a leader with a lower one, ever again.
- Two homes may go by one node's name, a copy and what it was copied from: so a promise is bound to who claims it, by a word that a candidate draws for
  each attempt. Whoever has promised one of them refuses the other, by name, and follows no other under that promise. The word is empty where the promise was
  only heard of, and in what was noted before there was one.
- A *reign* says behind which commit group a leader went on. The reigns of a log, in their order, are its *lineage*. Of two logs
  the groups up to the first reign in which they differ are the same bytes; what lies behind that in one of them isn't in the other.
- A reign is noted by a node once it has all that the leader had when it began, never before. So of two nodes the one with the later
  last reign has everything that was acknowledged, and among those with the same one the one with the greater group: `Rank`.

What becomes of a node (its promise: p):

    | event                      | leads                       | follows              | fenced               |
    |----------------------------|-----------------------------|----------------------|----------------------|
    | is asked for a promise > p | fenced by it                | follows whom it is to| fenced by it         |
    | is asked for p, or less    | refuses, unless it is asked for p by the same claimant                   |||
    | hears of a promise > p     | fenced by it                | follows whom it is to| fenced by it         |
    | was promoted under p       | (leads)                     | leads                | leads                |
    | follows, what the others   |                             |                      |                      |
    | lack is set aside          | refused                     | (follows)            | follows              |

Every change is durable before anything is said or done that rests on it.
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
"""The document that bears one."""
SESSIONS: Final = "sessions"
"""The document that knows the log's writes up to some number: of no use to a log that ends in front of that."""
_VERSION: Final = 1
_CLAIMANT_MAX: Final = 64


class Promise(NamedTuple):
    """To take nothing from a leader with a lower one. Orders by number, then by node."""

    epoch: Epoch
    node: NodeName


UNPROMISED: Final = Promise(Epoch(0), NOBODY)
"""Nobody was ever promoted: who leads was set up so."""


class Reign(NamedTuple):
    """One leader's."""

    promise: Promise
    behind: GroupNumber
    """The last group that was there when it began; its first is the next."""


class Rank(NamedTuple):
    """How much of what was acknowledged somebody has: the greater one has all that the lower one has of it."""

    promise: Promise
    """Of the last reign in its lineage."""
    group: GroupNumber
    """The last that it has, whole and durable."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Who has led, the first one first."""

    reigns: tuple[Reign, ...] = (Reign(UNPROMISED, GroupNumber(0)),)

    @property
    def last(self) -> Reign:
        """The newest."""
        return self.reigns[-1]

    def covered_by(self, group: GroupNumber) -> Lineage:
        """The part of it that somebody may note who has the log up to that group: reigns whose whole past is there."""
        return Lineage((self.reigns[0], *(reign for reign in self.reigns[1:] if reign.behind <= group)))

    def common_with(self, other: Lineage) -> tuple[Lineage, GroupNumber | None]:
        """What both begin with, and behind which group they part: None where they are the same.

        Where one of them has only more reigns, that is behind which group the first of these began.
        """
        count = 0
        for mine, its in zip(self.reigns, other.reigns, strict=False):
            if mine != its:
                break
            count += 1
        parts = [reigns.reigns[count].behind for reigns in (self, other) if len(reigns.reigns) > count]
        return Lineage(self.reigns[:count] or Lineage().reigns), min(parts, default=None)

    def with_reign(self, promise: Promise, behind: GroupNumber) -> Lineage:
        """The lineage of whom is promoted."""
        assert promise > self.last.promise, "a promotion is under a higher promise than all before"
        return Lineage((*self.reigns, Reign(promise, behind)))


class Role(StrEnum):
    """A node's part in a stream."""

    LEADS = "leads"
    FOLLOWS = "follows"
    FENCED = "fenced"
    """It has led. What it has may be more than what the others have; nothing is written, and nothing taken from others."""


@dataclass(frozen=True, slots=True)
class RoleFact:
    """What a node has noted, durably, of one stream."""

    role: Role = Role.LEADS
    promise: Promise = UNPROMISED
    leader: NodeName = NOBODY
    """Whom it follows, or by whom it was fenced; its own name, or nobody's, where it leads."""
    lineage: Lineage = Lineage()
    claimant: str = ""
    """Which home of that name the promise is of; empty: not known."""

    def rank(self, group: GroupNumber) -> Rank:
        """How much this node has, whose log ends at that group."""
        return Rank(self.lineage.covered_by(group).last.promise, group)

    def heard_of(self, promise: Promise, claimant: str = "") -> RoleFact:
        """After hearing of a promise, or giving it: the same where it isn't higher."""
        if promise <= self.promise:
            return self
        role = Role.FOLLOWS if self.role is Role.FOLLOWS else Role.FENCED
        return replace(self, role=role, promise=promise, leader=promise.node, claimant=claimant)

    def asked(self, promise: Promise, claimant: str = "") -> RoleFact:
        """After giving a promise that was asked for: durable before it is answered.

        Raises:
            Fenced: another was given that is higher: whom it was given to is said.
            NodeNameTaken: this one was, and not to who asks now.
        """
        if promise < self.promise:
            raise fenced_error(self.promise)
        if promise > self.promise:
            return self.heard_of(promise, claimant)
        if self.claimant and claimant != self.claimant:
            raise name_taken(promise)
        # Of one that was only heard of: another node was asked before, and has told.
        return replace(self, claimant=claimant)

    def standing_for(self, promise: Promise, claimant: str = "") -> RoleFact:
        """It asks the others for that promise, and has given it itself; whom it follows is as before."""
        assert promise > self.promise, "a candidate stands for more than it has promised"
        role = Role.FENCED if self.role is Role.LEADS else self.role
        return replace(self, role=role, promise=promise, claimant=claimant)

    def led_by(self, claimant: str) -> RoleFact:
        """After its leader has said which home of its name it is. `NodeNameTaken` where the promise is another one's."""
        if claimant and self.claimant and claimant != self.claimant:
            raise name_taken(self.promise)
        return replace(self, claimant=claimant or self.claimant)

    def promoted(self, behind: GroupNumber) -> RoleFact:
        """It leads under its own promise; the log ends at that group."""
        lineage = self.lineage.covered_by(behind).with_reign(self.promise, behind)
        return replace(self, role=Role.LEADS, leader=self.promise.node, lineage=lineage)

    def following(self, leader: NodeName) -> RoleFact:
        """It follows, and what it has more than the leader is set aside when it meets it."""
        if self.role is Role.LEADS:
            raise AssertionError("who leads was promised something higher before it follows")
        return replace(self, role=Role.FOLLOWS, leader=leader)

    def to_json(self) -> bytes:
        """How it is kept, one line."""
        facts = {
            "version": _VERSION,
            "role": self.role.value,
            "epoch": self.promise.epoch,
            "promised_to": self.promise.node,
            "leader": self.leader,
            "lineage": _reigns_to_json(self.lineage),
            "claimant": self.claimant,
        }
        return json.dumps(facts).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> RoleFact:
        """What was kept; `RoleUnreadable` where it is damaged or of a newer Millstream."""
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
    """What a leader says first on each connection, as the document `lineage`: the follower finds out what of its own the leader lacks."""

    lineage: Lineage
    group: GroupNumber
    """The leader's last durable one. A follower of the same lineage that has more knows that the leader has lost something."""
    claimant: str = ""
    """Of the promise under which it leads; empty: not known."""

    def to_json(self) -> bytes:
        """How it travels."""
        facts = {"version": _VERSION, "group": self.group, "lineage": _reigns_to_json(self.lineage)}
        return json.dumps(facts | {"claimant": self.claimant}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Greeting:
        """What came; `RoleUnreadable` where it is damaged or of a newer Millstream."""
        facts = _object(data, "a lineage")
        try:
            claimant = claimant_of(facts.get("claimant", ""))
            return cls(_lineage_of(facts["lineage"]), GroupNumber(_whole(facts["group"])), claimant)
        except (KeyError, TypeError, ValueError) as error:
            raise RoleUnreadable(f"the lineage that came isn't one: {error!r}") from error


def fenced_error(promise: Promise) -> Fenced:
    """What somebody is told who leads, or wants to lead, under less than that promise."""
    return Fenced(
        f"{promise.node or 'another node'} was promoted with epoch {promise.epoch}",
        epoch=int(promise.epoch),
        leader=str(promise.node),
    )


def name_taken(promise: Promise) -> NodeNameTaken:
    """What a home is told that goes by the name of another one, which a promise was given to."""
    return NodeNameTaken(
        f"epoch {promise.epoch} was promised to another home that calls itself {promise.node}",
        node=str(promise.node),
        epoch=int(promise.epoch),
    )


def claimant_of(value: object) -> str:
    """The word itself where it may be one; else `ValueError` or `TypeError`."""
    text = _text(value)
    if len(text) > _CLAIMANT_MAX:
        raise ValueError(f"a claimant of {len(text)} characters")
    return text


def _reigns_to_json(lineage: Lineage) -> list[dict[str, Any]]:
    return [{"epoch": promise.epoch, "leader": promise.node, "behind": behind} for promise, behind in lineage.reigns]


def _lineage_of(reigns: Sequence[dict[str, Any]]) -> Lineage:
    found = [
        Reign(
            Promise(Epoch(_whole(reign["epoch"])), NodeName(_text(reign["leader"]))),
            GroupNumber(_whole(reign["behind"])),
        )
        for reign in reigns
    ]
    if not found or any(a.promise >= b.promise or a.behind > b.behind for a, b in itertools.pairwise(found)):
        raise ValueError("the reigns aren't in order")
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
