"""Registers, in which the last write wins, and flags, in which hiding wins.

A register's writes are ordered by their times (wall, logical, node). If two have one time, which no sound clock
gives, the order of all values decides: so the winner is the same everywhere, whatever the values are.

Bodies: a register's time (20 bytes) and its value; a flag's times of the last hiding and of the last showing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream.crdt.hlc import ENCODED_SIZE, NEVER, HybridTime
from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, encode_value, order_of


@dataclass(frozen=True, slots=True)
class Register:
    """A value, and its time of writing."""

    time: HybridTime
    value: Any = None


class LastWriteWins:
    """Registers; a register that was never written has the value null."""

    def empty(self) -> Register:
        """Return the register that was never written."""
        return Register(NEVER)

    def join(self, a: Register, b: Register) -> Register:
        """Return the later write."""
        return a if (a.time, order_of(a.value)) >= (b.time, order_of(b.value)) else b

    def value(self, state: Register) -> Any:
        """Return the value that was written last."""
        return state.value

    def encode(self, state: Register) -> bytes:
        """Return the canonical bytes."""
        return seal(StateKind.REGISTER, state.time.encode() + encode_value(state.value))

    def decode(self, data: bytes) -> Register:
        """Return the state of its bytes; raise `MergeStateUnreadable`."""
        return decoded(StateKind.REGISTER, data, _read_register, self.encode)


@dataclass(frozen=True, slots=True)
class Hiding:
    """Times of the last hiding and the last showing."""

    hidden: HybridTime = NEVER
    shown: HybridTime = NEVER


class HardNegatives:
    """Flags: a hiding from any region applies as soon as it is known; showing again needs a strictly later moment.

    Nodes don't break ties here: if one region hides and another shows at one moment, the hiding wins.
    """

    def empty(self) -> Hiding:
        """Return the flag that was never hidden."""
        return Hiding()

    def join(self, a: Hiding, b: Hiding) -> Hiding:
        """Return the later time of each."""
        return Hiding(max(a.hidden, b.hidden), max(a.shown, b.shown))

    def value(self, state: Hiding) -> bool:
        """Return whether it is hidden."""
        return state.hidden != NEVER and state.shown.moment <= state.hidden.moment

    def encode(self, state: Hiding) -> bytes:
        """Return the canonical bytes."""
        return seal(StateKind.HIDE, state.hidden.encode() + state.shown.encode())

    def decode(self, data: bytes) -> Hiding:
        """Return the state of its bytes; raise `MergeStateUnreadable`."""
        return decoded(StateKind.HIDE, data, _read_hiding, self.encode)


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
