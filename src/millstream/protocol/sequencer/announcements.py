"""How a writer announces its position to other processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import SEQ_MAX, Seq

_ANNOUNCEMENT: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,19})\.([0-9]{1,19})", re.ASCII)


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
