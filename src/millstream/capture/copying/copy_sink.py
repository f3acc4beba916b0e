"""The capture session's side entries as one: table copies, repairs, definitions and departures.

Each decides on its own what may enter the log, and when; the applier asks all of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from millstream.capture.copying.row_repair import Entry, Repairs
from millstream.capture.copying.table_copies import TableCopies
from millstream.capture.definition_entries import DefinitionEntries
from millstream.capture.leaves.departure_entries import DepartureEntries
from millstream.capture.table_directory import TableDirectory
from millstream.catalog import Catalog, TableRow
from millstream.model.ids import StreamId
from millstream.model.operations import SpilledOp, WriteOps
from millstream.model.positions import Lsn


class CopiesAndRepairs:
    """Table copies, repairs, definitions and departures as one `applier.CopySink`, and the session's other calls."""

    def __init__(
        self, copies: TableCopies, repairs: Repairs, catalog: Catalog, directory: TableDirectory, stream: StreamId
    ) -> None:
        self._copies = copies
        self._repairs = repairs
        self._definitions = DefinitionEntries(catalog, directory, stream)
        self._departures = DepartureEntries(catalog, directory, stream)

    def start(self) -> None:
        """Start the workers."""
        self._copies.start()
        self._repairs.start()

    def stop(self) -> None:
        """End the workers."""
        self._copies.stop()
        self._repairs.stop()

    @property
    def all_done(self) -> bool:
        """Whether nothing is left to copy or repair, and no definition or departure waits."""
        waits = self._definitions.are_waiting or self._departures.are_waiting
        return self._copies.all_done and self._repairs.all_done and not waits

    @property
    def waits_for_stream(self) -> bool:
        """Whether a chunk, a definition or a departure waits for the stream."""
        waits = self._copies.waits_for_stream or self._repairs.waits_for_stream
        return waits or self._definitions.are_waiting or self._departures.wait_for_stream

    @property
    def keeps_session(self) -> bool:
        """Whether another session would have to begin a copy again."""
        return self._copies.keeps_session

    def progress(self) -> dict[str, dict[str, Any]]:
        """Return the progress of each table being copied."""
        return self._copies.progress()

    def see(self, rows: list[TableRow]) -> None:
        """Begin the copies and repairs that the catalog asks for."""
        self._copies.see(rows)
        self._repairs.see(rows)

    def note(self, ops: WriteOps | SpilledOp) -> None:
        """Note operations that are about to be submitted."""
        self._copies.note(ops)
        self._repairs.note(ops)
        self._departures.note(ops)

    def passed(self, lsn: Lsn) -> None:
        """Note that everything that committed at or below `lsn` has been submitted."""
        self._copies.passed(lsn)
        self._repairs.passed(lsn)
        self._definitions.passed(lsn)
        self._departures.passed(lsn)

    def ready(self) -> Iterable[Entry]:
        """Return the operations that may enter now."""
        departures = self._departures.ready(self._copies.busy | self._repairs.busy)
        return [*self._definitions.ready(), *departures, *self._copies.ready(), *self._repairs.ready()]

    def discard(self, relation_oid: int) -> None:
        """End copy and repair of a table that was quarantined."""
        self._copies.discard(relation_oid)
        self._repairs.discard(relation_oid)

    def quarantine(self, relation_oid: int, note: Callable[[], None]) -> None:
        """Quarantine a table by calling `note`; no copy of it that has begun before goes on. Any thread."""
        self._copies.discard(relation_oid, note)
        self._repairs.discard(relation_oid)
