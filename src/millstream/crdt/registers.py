"""Registers of which the last write wins, and flags of which the hiding wins.

A register's writes order by their times (wall, logical, node), and where two bear one time, which no sound clock gives, by the order of
all values: so the winner is the same everywhere, whatever the values are.

Bodies: of a register its time (20 bytes) and its value; of a flag the times of the last hiding and of the last showing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream.crdt.hlc import ENCODED_SIZE, NEVER, HybridTime
from millstream.crdt.lattice import Kind, decoded, seal
from millstream.crdt.scalars import Cursor, encode_value, order_of


@dataclass(frozen=True, slots=True)
class Register:
    """A value, and when it was written."""

    time: HybridTime
    value: Any = None


class LastWriteWins:
    """Registers; the value of one that was never written is null."""

    def empty(self) -> Register:
        """Never written."""
        return Register(NEVER)

    def join(self, a: Register, b: Register) -> Register:
        """The later write."""
        return a if (a.time, order_of(a.value)) >= (b.time, order_of(b.value)) else b

    def value(self, state: Register) -> Any:
        """What was written last."""
        return state.value

    def encode(self, state: Register) -> bytes:
        """Canonical bytes."""
        return seal(Kind.REGISTER, state.time.encode() + encode_value(state.value))

    def decode(self, data: bytes) -> Register:
        """The state of its bytes; `MergeStateUnreadable`."""
        return decoded(Kind.REGISTER, data, _read_register, self.encode)


@dataclass(frozen=True, slots=True)
class Hiding:
    """When something was hidden and shown last."""

    hidden: HybridTime = NEVER
    shown: HybridTime = NEVER


class HardNegatives:
    """Flags: a hiding from anywhere applies as soon as it is known; to show again takes a strictly later moment.

    Nodes don't break ties here: of two regions that hide and show at one moment, the one that hides has its way.
    """

    def empty(self) -> Hiding:
        """Never hidden."""
        return Hiding()

    def join(self, a: Hiding, b: Hiding) -> Hiding:
        """The later of each."""
        return Hiding(max(a.hidden, b.hidden), max(a.shown, b.shown))

    def value(self, state: Hiding) -> bool:
        """Whether it is hidden."""
        return state.hidden != NEVER and state.shown.moment <= state.hidden.moment

    def encode(self, state: Hiding) -> bytes:
        """Canonical bytes."""
        return seal(Kind.HIDE, state.hidden.encode() + state.shown.encode())

    def decode(self, data: bytes) -> Hiding:
        """The state of its bytes; `MergeStateUnreadable`."""
        return decoded(Kind.HIDE, data, _read_hiding, self.encode)


def _read_register(body: bytes) -> Register:
    cursor = Cursor(body)
    found = Register(HybridTime.decode(cursor.take(ENCODED_SIZE)), cursor.value())
    cursor.end()
    return found


def _read_hiding(body: bytes) -> Hiding:
    cursor = Cursor(body)
    found = Hiding(HybridTime.decode(cursor.take(ENCODED_SIZE)), HybridTime.decode(cursor.take(ENCODED_SIZE)))
    cursor.end()
    return found
