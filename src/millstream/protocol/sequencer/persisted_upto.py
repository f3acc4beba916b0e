"""The number up to which linear readers may read, from all writers' positions, and how writers announce theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import SEQ_MAX, Seq

_ANNOUNCEMENT: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,19})\.([0-9]{1,19})", re.ASCII)


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
