"""When a chunk of existing rows may enter the log among running changes, and which of its rows may not.

The rules
---------
A chunk's rows were read under a snapshot S; L is the end of the WAL, read right after S was taken. So every transaction
that S sees had committed (in the WAL) at or below L. The chunk enters once the log has everything up to L. Then
everything that S sees is in the log, so nothing that comes later is older than the chunk's rows. A transaction that
is in the log but not seen by S is newer than the chunk's rows, however early it came. Commit order isn't visibility
order: a commit that waits for a synchronous standby is in the WAL, and in the log, long before any snapshot sees it.
Keys touched by such a transaction are dropped from the chunk.

- If a transaction that S doesn't see touches the table as a whole (TRUNCATE, or too large to keep its keys), the
  chunk is read again.
- An update that leaves a TOAST value unsent needs the row's older version for it. If that version was in a chunk's
  dropped row, the row is read again by its key, as a chunk of its own. A key asked for by name is judged the same
  way, whether its row exists or not.
- Touches are remembered until every snapshot that is open, being taken or in the future sees their transaction. xmin of
  snapshots taken one after the other never falls, which gives the bound.
- Transactions logged before the tracker began aren't remembered. So the caller takes no snapshot before all
  transactions that were running at that moment have ended.

Keys are tuples of PostgreSQL's texts; equal texts are equal keys. Transaction ids in the stream have 32 bits, snapshots
have 64: an id means the one nearest to the snapshot's xmax (PostgreSQL keeps them within 2^31 of each other).

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from millstream.errors import InvalidValue

Key = tuple[str, ...]
"""A row's key, as PostgreSQL's texts."""

_SNAPSHOT: Final = re.compile(r"(\d+):(\d+):(\d+(?:,\d+)*)?\Z")
_XID_SPAN: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`pg_current_snapshot()`: the transactions that had ended when it was taken. Ids have 64 bits."""

    xmin: int
    """Every transaction below has ended."""
    xmax: int
    """No transaction at or above is seen."""
    running: frozenset[int] = frozenset()
    """Transactions between that aren't seen."""

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Return the snapshot of its text, `xmin:xmax:xip,xip`; raise `InvalidValue` for any other text."""
        found = _SNAPSHOT.match(text)
        if found is None:
            raise InvalidValue(f"{text!r} is not a snapshot")
        running = frozenset(int(xid) for xid in found[3].split(",")) if found[3] else frozenset[int]()
        return cls(int(found[1]), int(found[2]), running)

    def sees(self, xid: int) -> bool:
        """Return whether the snapshot sees a transaction (an id of 32 bits), given that it committed."""
        whole = extend_xid(xid, self.xmax)
        return whole < self.xmin or (whole < self.xmax and whole not in self.running)


def extend_xid(xid: int, near: int) -> int:
    """Return the 64-bit id nearest to `near` whose lower 32 bits are `xid`'s."""
    distance = (xid - near) % _XID_SPAN
    return near + (distance if distance < _XID_SPAN // 2 else distance - _XID_SPAN)


@dataclass(frozen=True, slots=True)
class Touch:
    """The effect of one logged transaction on the table."""

    xid: int
    keys: frozenset[Key]
    """Every key that a row had before or after."""
    incomplete: frozenset[Key] = frozenset()
    """Keys whose row lacks a TOAST value that wasn't sent."""
    everything: bool = False
    """Whether it touched the table as a whole."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a chunk whose LSN the log has passed."""

    again: bool = False
    """Read the chunk again; none of it enters."""
    drop: frozenset[Key] = frozenset()
    """Keys whose rows don't enter."""
    reread: frozenset[Key] = frozenset()
    """Keys to be read once more, by name."""

    @property
    def touches(self) -> bool:
        """Whether a transaction that the chunk doesn't see touched it."""
        return self.again or bool(self.drop)


@dataclass(slots=True)
class _OpenChunk:
    floor: int
    """The chunk's snapshot sees every transaction below."""
    snapshot: Snapshot | None = None


class CopyTracker:
    """The touches of one table while it is copied, and the chunks that are open.

    For a chunk, call `begin` before its snapshot is taken, `take` with the snapshot, `judge` once the log has passed
    its LSN, and `end` when it has entered or was given up.
    """

    def __init__(self) -> None:
        self._touches: list[Touch] = []
        self._open: dict[int, _OpenChunk] = {}
        self._next = 1
        self._xmin = 0
        """xmin of the latest snapshot taken: future snapshots see everything below."""

    def settle(self, bound: int) -> None:
        """Note that every transaction with an id below has ended: any snapshot from here on sees it."""
        self._xmin = max(self._xmin, bound)
        self._prune()

    def touch(self, touch: Touch) -> None:
        """Note a transaction that touched the table and is about to be logged.

        It isn't kept if all snapshots see it, open and future ones.
        """
        bound = self._bound()
        if not bound or extend_xid(touch.xid, bound) >= bound:
            self._touches.append(touch)

    def begin(self) -> int:
        """Open a chunk that is about to take its snapshot; return its ticket."""
        ticket = self._next
        self._next += 1
        self._open[ticket] = _OpenChunk(self._xmin)
        return ticket

    def take(self, ticket: int, snapshot: Snapshot) -> None:
        """Note that the chunk's snapshot is taken."""
        self._open[ticket] = _OpenChunk(snapshot.xmin, snapshot)
        self._xmin = max(self._xmin, snapshot.xmin)

    def judge(self, ticket: int, asked: Collection[Key] = ()) -> Verdict:
        """Return which rows of the chunk may enter now, after the log has passed its LSN.

        Args:
            ticket: the chunk's.
            asked: all the keys, if the chunk is of rows asked for by key.
        """
        snapshot = self._open[ticket].snapshot
        assert snapshot is not None, "a chunk is judged after its snapshot"
        drop: set[Key] = set()
        incomplete: set[Key] = set()
        for touch in self._touches:
            if snapshot.sees(touch.xid):
                continue
            if touch.everything:
                return Verdict(again=True)
            drop |= touch.keys
            incomplete |= touch.incomplete
        again = frozenset(incomplete.intersection(asked)) if asked else frozenset(incomplete)
        return Verdict(drop=frozenset(drop), reread=again)

    def end(self, ticket: int) -> None:
        """Close a chunk that has entered, or was given up."""
        del self._open[ticket]
        self._prune()

    def _bound(self) -> int:
        return min((reading.floor for reading in self._open.values()), default=self._xmin)

    def _prune(self) -> None:
        bound = self._bound()
        if bound:
            self._touches = [t for t in self._touches if extend_xid(t.xid, bound) >= bound]


def kept(keys: Iterable[Key], verdict: Verdict) -> tuple[list[bool], frozenset[Key]]:
    """Return whether each row of a key range's chunk enters, and the keys of dropped rows to read again."""
    mask: list[bool] = []
    found: set[Key] = set()
    for key in keys:
        dropped = key in verdict.drop
        mask.append(not dropped)
        if dropped and key in verdict.reread:
            found.add(key)
    return mask, frozenset(found)
