"""Where the stream waits: what commits from a place on enters the log only when somebody lets it.

A table without a key that is written to all the time is copied so: its rows are read as of one LSN, and nothing that
commits from there on is submitted until they are in the log (`copy_whole`). The applier asks for each item; what waits is at
most one item there and the receiver's queue, so the source holds the rest on its disk, and is told meanwhile that we live.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from millstream.capture.stream.receiver import Item, Run, Spilled
from millstream.codec.pgoutput import MessageRun
from millstream.model.positions import Lsn

_BEGIN: Final = ord("B")
_LSN: Final = slice(1, 9)
"""Where a Begin message has the LSN of its commit."""


class StreamHold:
    """The place from which on commits wait. One owner at a time; safe for use by many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: object | None = None
        self._bound = Lsn(0)
        self._news = False

    @property
    def bound(self) -> Lsn | None:
        """What commits at or above it waits; None: nothing does."""
        return None if self._owner is None else self._bound

    def begin(self, owner: object, bound: Lsn = Lsn(0)) -> bool:
        """Have everything wait that commits at or above the bound and hasn't been looked at yet; False where another owner has it so.

        Of the same owner again, it moves the bound.
        """
        with self._changed:
            if self._owner is not None and self._owner is not owner:
                return False
            self._owner, self._bound = owner, bound
            self._tell()
            return True

    def release(self, owner: object) -> None:
        """Let everything go on; nothing, where it isn't this owner that holds it."""
        with self._changed:
            if self._owner is owner:
                self._owner = None
                self._tell()

    def is_held_by(self, owner: object) -> bool:
        """Whether this one holds the stream."""
        return self._owner is owner

    def nudge(self) -> None:
        """Let a `wait` return."""
        with self._changed:
            self._tell()

    def wait(self, timeout_s: float) -> None:
        """Return when anything was told since the last call, or the time is over."""
        with self._changed:
            if not self._news:
                self._changed.wait(timeout_s)
            self._news = False

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()


def cut(item: Item, bound: Lsn) -> tuple[Item | None, Item | None, Lsn]:
    """What of an item may enter, what has to wait, and where the first of the latter commits."""
    if isinstance(item, Spilled) and item.commit.commit_lsn >= bound:
        return None, item, item.commit.commit_lsn
    if not isinstance(item, Run):
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


def _run(pieces: tuple[MessageRun, ...]) -> Run | None:
    some = tuple(piece for piece in pieces if len(piece))
    return Run(some, sum(piece.span_bytes for piece in some)) if some else None
