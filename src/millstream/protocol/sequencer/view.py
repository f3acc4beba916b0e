"""A process's knowledge of a stream's writers, and the cuts that it may read to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import SEQ_MAX, Seq, SeqRange, StreamToken

_ANNOUNCEMENT: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,19})\.([0-9]{1,19})", re.ASCII)

HINTS_MAX: Final = 65_536
"""Ended ranges kept beyond a gap; more are forgotten, which costs latency only."""


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The store's state at one moment."""

    newest: Seq
    """Every writer that isn't in `positions` is given numbers above it only."""
    positions: Mapping[WriterId, Seq]
    """Positions of all writers; a settled one has the newest number, because none of its numbers is undecided."""
    expired: frozenset[WriterId] = frozenset()
    """Writers that aren't settled and whose lease has run out."""

    @property
    def persisted_upto(self) -> Seq:
        """The number up to which every number is durable and readable, or never will be."""
        return min(self.positions.values(), default=self.newest)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A hint from a writer to other processes. It stays true for ever, whenever it arrives."""

    writer: WriterId
    epoch: Epoch
    position: Seq
    ended: tuple[SeqRange, ...] = ()
    """Ranges that are durable or never will be, in the order in which they ended; the text form omits them."""

    def __str__(self) -> str:
        """Text form: `<writer>.<epoch>.<position>`."""
        return f"{self.writer}.{self.epoch}.{self.position}"

    @classmethod
    def parse(cls, text: str) -> Announcement | None:
        """Return the announcement of a text form.

        None if the text isn't one, because an unreadable hint may be ignored.
        """
        found = _ANNOUNCEMENT.fullmatch(text)
        if found is None or int(found[3]) > SEQ_MAX:
            return None
        return cls(WriterId(int(found[1])), Epoch(int(found[2])), Seq(int(found[3])))


@dataclass(slots=True)
class StreamView:
    """One process's knowledge: the store's newest view that it saw, and the hints since.

    Args:
        stream: the stream's short id, for tokens.

    Concurrency: none; the caller serialises.
    """

    stream: str
    _newest: Seq = Seq(0)
    """The newest number of the newest view."""
    _listed: frozenset[WriterId] = frozenset()
    """The writers that the newest view lists."""
    _positions: dict[WriterId, Seq] = field(default_factory=dict)
    """The greatest position that was seen of each writer, in a view or a hint: a position stays true."""
    _ended: list[tuple[Seq, Seq]] = field(default_factory=list)
    """Ranges (first, last) that ended beyond a gap, a heap."""
    _persisted_upto: Seq = Seq(0)

    @property
    def persisted_upto(self) -> Seq:
        """The number up to which a linear reader may read: it only grows."""
        return self._persisted_upto

    def observe(self, view: LedgerView) -> Seq:
        """Note a view of the store; return `persisted_upto`."""
        if view.newest >= self._newest:
            self._newest = view.newest
            self._listed |= view.positions.keys()
        for writer, position in view.positions.items():
            self._know(writer, position)
        self._lift()
        return self._persisted_upto

    def hear(self, told: Announcement) -> Seq:
        """Note a hint, which may be late, repeated, or out of order; return `persisted_upto`."""
        self._know(told.writer, told.position)
        for ended in told.ended:
            if ended.last > self._persisted_upto and len(self._ended) < HINTS_MAX:
                heappush(self._ended, (ended.first, ended.last))
        self._lift()
        return self._persisted_upto

    def token(self) -> StreamToken:
        """Return the token up to which a vector reader may read: each writer's known position, without waiting."""
        return StreamToken(self.stream, self._persisted_upto, self._positions)

    def _know(self, writer: WriterId, position: Seq) -> None:
        self._positions[writer] = Seq(max(position, self._positions.get(writer, 0)))

    def _lift(self) -> None:
        slowest = min((self._positions[writer] for writer in self._listed), default=self._newest)
        # A writer that isn't listed registered later, and has numbers above the view's newest: only ranges cover these.
        upto = max(self._persisted_upto, min(slowest, self._newest))
        while self._ended and self._ended[0][0] <= upto + 1:
            upto = Seq(max(upto, heappop(self._ended)[1]))
        self._persisted_upto = upto
