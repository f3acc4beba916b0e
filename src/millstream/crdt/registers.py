"""Registers, in which the last write wins, and flags, in which hiding wins.

A register's writes are ordered by their times (wall, logical, node). If two have one time, which no sound clock
gives, the order of all values decides: so the winner is the same everywhere, whatever the values are.

Bodies: a register's time (20 bytes) and its value; a flag's times of the last hiding and of the last showing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.columns import Codes, Grouped, last_of_each, moments_of
from millstream.crdt.hlc import ENCODED_SIZE, HLC, NEVER
from millstream.crdt.lattice import StateKind, decoded, seal
from millstream.crdt.scalars import Cursor, encode_value, order_of


def last_written(codes: Codes, walls: Codes, seqs: Codes, regions: Codes) -> Codes:
    """Return the row of each code that was written last: by time, then by number in its log, then by region.

    The order is the same on every node: it depends on what was written alone.
    """
    return last_of_each(codes, walls, seqs, regions)


@dataclass(frozen=True, slots=True)
class LWWRegister:
    """A value, and the time at which it was written; without arguments the register that was never written."""

    value: Any = None
    """The value that was written last, of a kind that columns have; None if there is none."""
    time: HLC = NEVER

    def write(self, value: Any, time: HLC) -> Self:
        """Return the register after a write; a write at an earlier time than its own has no effect."""
        return self.join(type(self)(value, time))

    def join(self, other: Self) -> Self:
        """Return the later write."""
        return self if (self.time, order_of(self.value)) >= (other.time, order_of(other.value)) else other

    def encode(self) -> bytes:
        """Return the canonical bytes; raise `InvalidValue` if columns have no such value."""
        return seal(StateKind.REGISTER, self.time.encode() + encode_value(self.value))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the state of its bytes; raise `MergeStateUnreadable` if no state has them."""
        return decoded(StateKind.REGISTER, data, cls._read)

    @classmethod
    def _read(cls, cursor: Cursor) -> Self:
        time = HLC.decode(cursor.take(ENCODED_SIZE))
        return cls(cursor.value(), time)

    @staticmethod
    def fold_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the value of each region's newest row that names it."""
        return rows.newest_named(name)

    @staticmethod
    def merge_column(rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the value of the row that was written last in any region, of those that name it."""
        if not rows.merge.is_partial:
            return rows.newest_of(name)
        seqs, walls = (rows.column(one).to_numpy() for one in moments_of(name))
        last = last_written(rows.codes, walls, seqs, rows.column("__region").to_numpy())
        return {name: rows.column(name).take(pa.array(last))}


@dataclass(frozen=True, slots=True)
class HideFlag:
    """A flag: a hiding from any region applies as soon as it is known; showing again needs a strictly later moment.

    Nodes don't break ties here: if one region hides and another shows at one moment, the hiding wins.
    """

    hidden: HLC = NEVER
    """Time of the last hiding."""
    shown: HLC = NEVER
    """Time of the last showing."""

    def hide(self, time: HLC) -> Self:
        """Return the flag after a hiding."""
        return self.join(type(self)(hidden=time))

    def show(self, time: HLC) -> Self:
        """Return the flag after a showing."""
        return self.join(type(self)(shown=time))

    def join(self, other: Self) -> Self:
        """Return the later time of each."""
        return type(self)(max(self.hidden, other.hidden), max(self.shown, other.shown))

    @property
    def value(self) -> bool:
        """Whether it is hidden."""
        return self.hidden != NEVER and self.shown.moment <= self.hidden.moment

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        return seal(StateKind.HIDE, self.hidden.encode() + self.shown.encode())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the state of its bytes; raise `MergeStateUnreadable` if no state has them."""
        return decoded(StateKind.HIDE, data, cls._read)

    @classmethod
    def _read(cls, cursor: Cursor) -> Self:
        return cls(HLC.decode(cursor.take(ENCODED_SIZE)), HLC.decode(cursor.take(ENCODED_SIZE)))

    @staticmethod
    def columns_of(name: str) -> tuple[str, str, str, str]:
        """Return the state columns next to a column: number and time of the newest hiding, then of the newest showing.

        0: none.
        """
        return f"__hidden_seq.{name}", f"__hidden_ns.{name}", f"__shown_seq.{name}", f"__shown_ns.{name}"

    @classmethod
    def lift_column(cls, name: str, said: pa.Array, seqs: pa.Array, times_ns: pa.Array) -> dict[str, pa.Array]:
        """Return the state columns of records: each that hides or shows has its own number and time."""
        hides, shows = pc.fill_null(said, False), pc.fill_null(pc.invert(said), False)
        parts = (pc.if_else(flag, of, 0) for flag in (hides, shows) for of in (seqs, times_ns))
        return dict(zip(cls.columns_of(name), parts, strict=True))

    @classmethod
    def fold_column(cls, rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return each region's newest row, and the moments of its newest hiding and showing."""
        names = cls.columns_of(name)
        if rows.is_distinct:
            return rows.newest_of(name, *names)
        found = rows.newest_of(name)
        for seq, wall in (names[:2], names[2:]):
            last = pa.array(last_of_each(rows.codes, rows.column(seq).to_numpy()))
            found[seq], found[wall] = rows.column(seq).take(last), rows.column(wall).take(last)
        return found

    @classmethod
    def merge_column(cls, rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return whether the newest hiding is no earlier than the newest showing. Regions don't break ties."""
        hidden_seq, hidden_ns, shown_seq, shown_ns = (rows.column(part).to_numpy() for part in cls.columns_of(name))
        hiding, showing = (
            last_of_each(rows.codes, walls, seqs) for walls, seqs in ((hidden_ns, hidden_seq), (shown_ns, shown_seq))
        )
        moments = hidden_ns[hiding], hidden_seq[hiding]
        later = shown_ns[showing] > moments[0]
        later |= (shown_ns[showing] == moments[0]) & (shown_seq[showing] > moments[1])
        return {name: pa.array((moments[1] > 0) & ~later)}
