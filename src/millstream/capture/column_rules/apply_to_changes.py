"""Rules of columns, applied to the source's messages as they come: before anything holds, spills or decodes them.

Every later part sees a table without the excluded columns, with hashed and redacted columns as text. The messages of a
table whose rules can't be applied are dropped, and the table is quarantined. A message without a rule stays as it is.
In a block with rows of a table that has rules, all messages are copied to a new buffer: a spill file keeps the bytes
between two messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from millstream.capture.column_rules.binding import TEXT_OID
from millstream.capture.stream.frames import Block
from millstream.capture.stream.message_kinds import STREAM_ABORT, STREAM_COMMIT, STREAM_START, STREAM_STOP
from millstream.codec.pgoutput import MessageRun, Relation, parse_message
from millstream.errors import ProtocolViolation
from millstream.model.column_rules import REDACTED, Rule

Rules: TypeAlias = tuple[Rule | None, ...]
"""The rule of each column of a relation, in its order."""

_RELATION: Final = ord("R")
_TEXT, _BINARY, _UNCHANGED = ord("t"), ord("b"), ord("u")
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_TEXT_TYPE: Final = struct.Struct(">Ii").pack(TEXT_OID, -1)
_REDACTED: Final = b"t" + _U32.pack(len(REDACTED)) + REDACTED.encode()


Changes: TypeAlias = dict[int, tuple[bytes, ...]]
"""By number of a message, what takes its place."""


def _kinds(*kinds: int) -> npt.NDArray[np.bool_]:
    """Return by kind of message whether it is one of these."""
    found = np.zeros(256, dtype=np.bool_)
    found[list(kinds)] = True
    return found


_ROWS: Final = _kinds(*b"IUD")
_CONTROLS: Final = _kinds(_RELATION, STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT)


@dataclass(slots=True)
class _Plan:
    """The treatment of the rows of one relation."""

    relation: Relation
    rules: Rules | None
    """None: its rows are dropped."""


class RuleMessages:
    """The rules of one connection's relations. One thread uses them.

    Args:
        rules_of: returns the rules of a relation's columns, None for a table without rules. It quarantines a table
            whose rules can't be applied, and returns `()` for it.
        hashed: returns what stands for a text in a hashed column.
        is_undecoded: returns whether a relation's table is still quarantined.
    """

    def __init__(
        self,
        rules_of: Callable[[Relation], Rules | None],
        hashed: Callable[[bytes], bytes],
        is_undecoded: Callable[[int], bool],
    ) -> None:
        self._rules_of = rules_of
        self._hashed = hashed
        self._is_undecoded = is_undecoded
        self._plans: dict[int, _Plan] = {}
        self._streamed: dict[int, dict[int, _Plan]] = {}
        """Plans of relations that came in a streamed transaction, which holds until it commits."""
        self._xid: int | None = None
        """The transaction whose streamed block is being read."""

    def applied(self, block: Block) -> Block:
        """Return a block with the rules applied; the block itself if they concern none of it.

        Raises:
            ProtocolViolation: a row doesn't have its relation's columns.
            MillstreamError: the source couldn't be asked about a relation.
        """
        if block.resends_streamed:
            self._streamed.clear()
        kinds, messages = block.kinds, block.messages
        changed: Changes = {}
        at = 0
        for control in [*np.flatnonzero(_CONTROLS[kinds]).tolist(), len(kinds)]:
            self._rows(block, at, control, changed)
            if control < len(kinds):
                self._control(messages[control], control, changed)
            at = control + 1
        return _changed(block, changed) if changed else block

    def _rows(self, block: Block, first: int, end: int, changed: Changes) -> None:
        plans = self._plans if self._xid is None else self._plans | self._streamed.get(self._xid, {})
        if not plans or first >= end:
            return
        rows = first + np.flatnonzero(_ROWS[block.kinds[first:end]])
        body = 1 if self._xid is None else 5
        starts = block.messages.starts[rows] + body
        buffer = block.messages.buffer
        oids = np.zeros(len(rows), dtype=np.int64)
        for place in range(4):
            oids = (oids << 8) | buffer[starts + place]
        for row, oid in zip(rows.tolist(), oids.tolist(), strict=True):
            plan = plans.get(oid)
            if plan is None:
                continue
            first_again: tuple[bytes, ...] = ()
            if plan.rules is None and not self._is_undecoded(oid):
                plan.rules = self._rules_of(plan.relation) or None
                first_again = (self._described(plan.relation, plan.rules),) if plan.rules is not None else ()
            masked = () if plan.rules is None else (self._row(block.messages[row], body + 4, plan.rules),)
            changed[row] = first_again + masked

    def _control(self, message: bytes, number: int, changed: Changes) -> None:
        kind = message[0]
        if kind == STREAM_START:
            (self._xid,) = _U32.unpack_from(message, 1)
        elif kind == STREAM_STOP:
            self._xid = None
        elif kind == STREAM_COMMIT:
            self._plans |= self._streamed.pop(_U32.unpack_from(message, 1)[0], {})
        elif kind == STREAM_ABORT:
            self._streamed.pop(_U32.unpack_from(message, 1)[0], None)
        else:
            self._relation(message, number, changed)

    def _relation(self, message: bytes, number: int, changed: Changes) -> None:
        relation = parse_message(message, streamed=self._xid is not None)
        assert isinstance(relation, Relation)
        plans = self._plans if self._xid is None else self._streamed.setdefault(self._xid, {})
        rules = self._rules_of(relation)
        if rules is None:
            plans.pop(relation.oid, None)
            return
        plans[relation.oid] = _Plan(relation, rules or None)
        # Without rules that can be applied, the relation has no columns: nothing could be made of its rows.
        changed[number] = (self._described(relation, rules or (Rule.EXCLUDE,) * len(relation.columns)),)

    def _described(self, relation: Relation, rules: Rules) -> bytes:
        """Return a Relation message without its excluded columns, the hashed and redacted ones as text."""
        encoded = relation.encoded
        at = encoded.index(b"\0", encoded.index(b"\0", 5) + 1) + 2
        xid = b"" if self._xid is None else _U32.pack(self._xid)
        pieces = [encoded[:1], xid, encoded[1:at], _U16.pack(len(rules) - rules.count(Rule.EXCLUDE))]
        at += 2
        for rule in rules:
            named = encoded.index(b"\0", at + 1) + 1
            if rule is not Rule.EXCLUDE:
                pieces.append(encoded[at : named + 8] if rule is None else encoded[at:named] + _TEXT_TYPE)
            at = named + 8
        return b"".join(pieces)

    def _row(self, message: bytes, at: int, rules: Rules) -> bytes:
        """Return a row's message; its tuples begin at `at`, each behind the letter of its kind."""
        pieces = [message[:at]]
        try:
            while at < len(message):
                pieces.append(message[at : at + 1])
                at = self._tuple(message, at + 1, rules, pieces)
        except (struct.error, IndexError) as error:
            raise ProtocolViolation("a row ends before its last value") from error
        return b"".join(pieces)

    def _tuple(self, message: bytes, at: int, rules: Rules, pieces: list[bytes]) -> int:
        (count,) = _U16.unpack_from(message, at)
        at += 2
        if count != len(rules):
            raise ProtocolViolation(f"a row of {count} columns in a relation of {len(rules)}")
        pieces.append(_U16.pack(count - rules.count(Rule.EXCLUDE)))
        for rule in rules:
            kind = message[at]
            end = at + 1
            if kind in {_TEXT, _BINARY}:
                end = at + 5 + _U32.unpack_from(message, at + 1)[0]
            if end > len(message):
                raise ProtocolViolation("a row ends before its last value")
            if rule is not Rule.EXCLUDE:
                pieces.append(message[at:end] if rule is None else self._value(rule, kind, message[at:end]))
            at = end
        return at

    def _value(self, rule: Literal[Rule.HASH, Rule.REDACT], kind: int, value: bytes) -> bytes:
        """Return what stands for a value; a null, and a value that isn't sent and would be hashed, stay as they are."""
        match rule:
            case Rule.REDACT:
                return _REDACTED if kind in {_TEXT, _BINARY, _UNCHANGED} else value  # one that isn't sent is never null
            case Rule.HASH:
                if kind == _BINARY:
                    raise ProtocolViolation("a value in binary form")
                if kind != _TEXT:
                    return value
                text = self._hashed(value[5:])
                return b"t" + _U32.pack(len(text)) + text
            case _:
                assert_never(rule)


def _changed(block: Block, changed: Changes) -> Block:
    """Return a block with other messages in place of some."""
    run = block.messages
    messages: list[bytes] = []
    for number in range(len(block)):
        messages += changed[number] if number in changed else (run[number],)
    kinds = np.fromiter((message[0] for message in messages), np.uint8, len(messages))
    made = MessageRun.of(messages)
    made.buffer.flags.writeable = False  # one kind of array, one piece of machine code
    return Block(made, kinds, block.resends_streamed)
