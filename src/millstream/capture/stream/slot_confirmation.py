"""The position that the slot may confirm: durable in the log, and known after a restart.

The source keeps its WAL from the slot's confirmed position on, and sends from there after a restart. So a position is
confirmed only once nothing below it is needed again:

- *durable*: everything below is in the log, or there was nothing of ours below it.
- *stored*: a restart finds the position. An operation of the log carries its own; a position that only keepalives
  moved is stored in the catalog, at intervals, together with the last one that an operation carries: it doesn't count
  for a log that lacks that operation.
- *confirmed*: a stored position that may be given to the receiver, which reports it with its next status. Where other
  nodes receive the log, a position that the catalog alone has waits for the seconds in which a copy comes to those that
  are connected: a node that was promoted with an older copy would find the slot above everything that it knows. A node
  that was cut off for longer may still find that.
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
        catalog: stores positions that no operation carries.
        durable: the position with which the stream begins; it is stored.
        logged: the position that the log's operations carry; 0 if there are none.
        shipped_within_s: time in which copies of the catalog come to other nodes; 0 if there are none.
    """

    def __init__(
        self,
        receiver: Receiver,
        catalog: Catalog,
        source: SourceId,
        *,
        durable: Lsn,
        logged: Lsn,
        confirmed: Lsn,
        shipped_within_s: float,
    ) -> None:
        self._receiver = receiver
        self._catalog = catalog
        self._source = source
        self._shipped_within_s = shipped_within_s
        self._stored_at = time.monotonic()
        self._logged = logged
        self._known = Lsn(0)
        """The position of an operation that the catalog knows the log to have."""
        self.durable = durable
        """The LSN up to which every commit is durable in the log."""
        self.stored = durable
        """The position that a restart finds."""
        self.confirmed = confirmed
        """The position that may be reported to the source."""

    def note_durable(self, end: Lsn, *, in_log: bool) -> None:
        """Note that everything up to `end` is durable; `in_log` if an operation of the log carries that position."""
        if in_log:
            self.stored = max(self.stored, end)
            self.confirmed = max(self.confirmed, end)
        self.durable = max(self.durable, end)

    def note_logged(self, end: Lsn) -> None:
        """Note that a durable operation of the log carries that position."""
        self._logged = max(self._logged, end)

    def confirm(self) -> None:
        """Report the confirmed position to the source, with the next status."""
        hit("capture.before_confirm")
        self._receiver.confirm(self.confirmed)

    def store_if_due(self) -> None:
        """Store a durable position that no operation carries, if that is due; confirm it once its copies have had their time."""
        if self.confirmed == self.stored < self.durable and (
            self._stored_for_s() >= STORE_EVERY_S or self.durable - self.stored >= STORE_BYTES
        ):
            self._store()
        if self.confirmed < self.stored and self._stored_for_s() >= self._shipped_within_s:
            self.confirmed = self.stored
            self._receiver.confirm(self.confirmed)

    def store_now(self) -> None:
        """Store the durable position, and report to the source at once what is confirmed."""
        if self.stored < self.durable:
            self._store()
        if not self._shipped_within_s:
            self.confirmed = self.stored
        self._receiver.confirm(self.confirmed, now=True)

    def store_logged(self) -> None:
        """Store the position of the log's last operation, unless the catalog has it.

        Call it before the catalog gets what depends on that operation, as the progress of a table copy.
        """
        if self._logged > self._known:
            self._catalog.move_reached(self._source, self._logged, log_had=self._logged)
            self._known = self._logged

    def _store(self) -> None:
        self._catalog.move_reached(self._source, self.durable, log_had=self._logged or None)
        self._stored_at = time.monotonic()
        self._known = self._logged
        self.stored = self.durable

    def _stored_for_s(self) -> float:
        return time.monotonic() - self._stored_at
