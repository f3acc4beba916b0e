"""The position that the slot may confirm: durable in the log, and known after a restart.

The source keeps its WAL from the slot's confirmed position on, and sends from there after a restart. So a position is
confirmed only once nothing below it is needed again:

- *durable*: everything below is in the log, or there was nothing of ours below it.
- *stored*: a restart finds the position. An operation of the log carries its own; a position that only keepalives
  moved is stored in the catalog, at intervals.
- *confirmed*: a stored position that was given to the receiver, which reports it with its next status.
"""

from __future__ import annotations

import time
from typing import Final

from millstream.capture.stream.receiver import Receiver
from millstream.catalog import Catalog
from millstream.failpoints import hit
from millstream.model.ids import SourceId
from millstream.model.positions import Lsn

STORE_EVERY_S: Final = 5.0
"""How often a position that only keepalives moved is made durable: each time is a commit of the catalog …"""
STORE_BYTES: Final = 16 << 20
"""… or sooner, when the source keeps so much WAL for it: a segment."""


class SlotConfirmation:
    """The positions of one source's slot. One thread changes them.

    Args:
        receiver: reports the confirmed position to the source.
        catalog: stores positions that no operation carries.
        source: the source whose slot this is.
        durable: the position with which the stream begins; it is stored.
    """

    def __init__(self, receiver: Receiver, catalog: Catalog, source: SourceId, durable: Lsn) -> None:
        self._receiver = receiver
        self._catalog = catalog
        self._source = source
        self._stored_at = time.monotonic()
        self.durable = durable
        """The LSN up to which every commit is durable in the log."""
        self.stored = durable
        """The position that may be reported to the source: durable, and known after a restart."""

    def note_durable(self, end: Lsn, *, in_log: bool) -> None:
        """Note that everything up to `end` is durable; `in_log` if an operation of the log carries that position."""
        if in_log:
            self.stored = max(self.stored, end)
        self.durable = max(self.durable, end)

    def confirm(self) -> None:
        """Report the stored position to the source, with the next status."""
        hit("capture.before_confirm")
        self._receiver.confirm(self.stored)

    def store_if_due(self) -> None:
        """Store a durable position that no operation carries, if that is due; then confirm it."""
        if self.durable > self.stored and (
            time.monotonic() - self._stored_at >= STORE_EVERY_S or self.durable - self.stored >= STORE_BYTES
        ):
            self._store()

    def store_now(self) -> None:
        """Store the durable position, and report it to the source at once."""
        if self.durable > self.stored:
            self._store()
        self._receiver.confirm(self.stored, now=True)

    def _store(self) -> None:
        self._catalog.move_reached(self._source, self.durable)
        self._stored_at = time.monotonic()
        self.stored = self.durable
        self._receiver.confirm(self.stored)
