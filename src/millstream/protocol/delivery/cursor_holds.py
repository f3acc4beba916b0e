"""The messages that hold a consumer's cursor."""

from __future__ import annotations

from collections import deque
from typing import Final

from millstream.protocol.delivery.entries import Entry, EntryState

_KEPT_MIN: Final = 1024
"""Number of items below which a queue isn't searched for void ones."""


class Order:
    """Messages in the order in which they were read: the first one that isn't settled holds the cursor."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        """Some of them are settled."""
        self._gone = 0
        """Number of settled ones."""

    def __len__(self) -> int:
        """Number of messages, of which some may be settled."""
        return len(self._entries)

    def append(self, entry: Entry) -> None:
        """Add a message that is later than all others."""
        self._entries.append(entry)

    def first(self) -> Entry | None:
        """Return the first message that isn't settled."""
        entries = self._entries
        while entries and entries[0].state is EntryState.GONE:
            entries.popleft()
            self._gone -= 1
        return entries[0] if entries else None

    def note_gone(self) -> None:
        """Note that a message is settled, and drop settled ones once they are most of all."""
        self._gone += 1
        if self._gone > _KEPT_MIN and 2 * self._gone > len(self._entries):
            self._entries = deque([entry for entry in self._entries if entry.state is not EntryState.GONE])
            self._gone = 0
