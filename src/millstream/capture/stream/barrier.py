"""A barrier in the stream: transactions that commit at or above an LSN are held back until released.

A table without a key that is written to all the time is copied this way: its rows are read as of one LSN, and no
later commit is submitted until they are in the log (`copying.whole_table_reads`). The applier asks for each item. At most one item
waits there, in addition to the receiver's queue; so the source keeps the rest on its disk, and status messages keep
the connection alive.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from millstream.capture.stream.large_transactions import Spilled
from millstream.capture.stream.receiver import Item, TransactionRun
from millstream.codec.pgoutput import MessageRun
from millstream.model.positions import Lsn

_BEGIN: Final = ord("B")
_LSN: Final = slice(1, 9)
"""Position of the commit's LSN in a Begin message."""


class StreamBarrier:
    """The LSN from which on commits wait. One owner at a time; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: object | None = None
        self._bound = Lsn(0)
        self._news = False

    @property
    def bound(self) -> Lsn | None:
        """The LSN at or above which commits wait; None: none does."""
        return None if self._owner is None else self._bound

    def begin(self, owner: object, bound: Lsn = Lsn(0)) -> bool:
        """Hold back commits at or above the bound that aren't taken so far; False if another owner holds the stream.

        The same owner may call it again to move the bound.
        """
        with self._changed:
            if self._owner is not None and self._owner is not owner:
                return False
            self._owner, self._bound = owner, bound
            self._tell()
            return True

    def release(self, owner: object) -> None:
        """Release the stream, if this owner holds it."""
        with self._changed:
            if self._owner is owner:
                self._owner = None
                self._tell()

    def is_held_by(self, owner: object) -> bool:
        """Return whether this owner holds the stream."""
        return self._owner is owner

    def nudge(self) -> None:
        """Let a `wait` return."""
        with self._changed:
            self._tell()

    def wait(self, timeout_s: float) -> None:
        """Return after any change since the last call, or when the time is over."""
        with self._changed:
            if not self._news:
                self._changed.wait(timeout_s)
            self._news = False

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()


def cut(item: Item, bound: Lsn) -> tuple[Item | None, Item | None, Lsn]:
    """Return the part of an item that may enter, the part that has to wait, and where the latter first commits."""
    if isinstance(item, Spilled) and item.commit.commit_lsn >= bound:
        return None, item, item.commit.commit_lsn
    if not isinstance(item, TransactionRun):
        return item, None, Lsn(0)
    for number, piece in enumerate(item.pieces):
        for at in np.flatnonzero(piece.buffer[piece.starts] == _BEGIN).tolist():
            lsn = Lsn(int.from_bytes(piece[at][_LSN], "big"))
            if lsn >= bound:
                front = _run((*item.pieces[:number], _part(piece, 0, at)))
                return front, _run((_part(piece, at, len(piece)), *item.pieces[number + 1 :])), lsn
    return item, None, Lsn(0)


def _part(run: MessageRun, first: int, end: int) -> MessageRun:
    return MessageRun(run.buffer, run.starts[first:end], run.ends[first:end])


def _run(pieces: tuple[MessageRun, ...]) -> TransactionRun | None:
    some = tuple(piece for piece in pieces if len(piece))
    return TransactionRun(some, sum(piece.span_bytes for piece in some)) if some else None
