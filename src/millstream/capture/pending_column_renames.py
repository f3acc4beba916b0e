"""Tables whose columns were renamed, and whose new names the log doesn't show: they wait for a definition.

Readers learn of names by the next record under them, and an idle table has none. So a definition enters the log once the
stream has come past the look that saw the rename. Until it is durable, the catalog says that the table waits for one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from millstream.capture.source import SourceTable
from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Lsn


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition that may enter the log."""

    table_id: TableId
    table: SourceTable
    at: Lsn
    """An LSN at or above every change that the table's facts show."""
    renamed: Mapping[str, str]
    """The new names by the old ones."""
    notes: int
    """How often the table's renames had been noted then."""


class PendingDefinitions:
    """The definitions of one stream's tables that aren't durable. Any thread."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"capture/{stream}/definitions"
        self._lock = threading.Lock()
        facts = catalog.facts(self._scope)
        self._renamed = {TableId(int(id_)): dict[str, str](renamed) for id_, renamed in facts.items()}
        """By table that waits, the new names by the old ones: also from before this process."""
        self._waiting: dict[TableId, Definition] = {}
        self._notes = dict.fromkeys(self._renamed, 0)

    @property
    def are_waiting(self) -> bool:
        """Whether a definition isn't durable in the log."""
        return bool(self._renamed)

    def is_waiting(self, table_id: TableId) -> bool:
        """Return whether a table's definition isn't durable in the log."""
        with self._lock:
            return table_id in self._renamed

    def note(self, table_id: TableId, renamed: Mapping[str, str]) -> None:
        """Store that a table waits for a definition; `look` has to follow. `renamed` has new names by old ones."""
        with self._lock:
            before = {old: renamed.get(new, new) for old, new in self._renamed.get(table_id, {}).items()}
            self._renamed[table_id] = {**renamed, **before}
            self._notes[table_id] = self._notes.get(table_id, 0) + 1
            self._catalog.put_fact(self._scope, str(table_id), self._renamed[table_id])

    def look(self, table_id: TableId, table: SourceTable, at: Lsn, *, is_streaming: bool) -> None:
        """Take the facts of a look for a table that waits.

        Args:
            table_id: the table.
            table: its facts.
            at: an LSN at or above every change that they show.
            is_streaming: whether the log has the table's rows; otherwise a copy brings the names.
        """
        with self._lock:
            if table_id in self._renamed and is_streaming:
                renamed, notes = self._renamed[table_id], self._notes[table_id]
                self._waiting[table_id] = Definition(table_id, table, at, renamed, notes)
            elif table_id in self._renamed:
                self._forget(table_id)

    def end_look(self, tables: Collection[TableId]) -> None:
        """Forget tables that a look didn't find: they are gone, or will be copied if they come back."""
        with self._lock:
            for table_id in self._renamed.keys() - tables:
                self._forget(table_id)

    def ready(self, passed: Lsn) -> list[Definition]:
        """Return the definitions that may enter behind an LSN, each once a look."""
        with self._lock:
            found = [one for one in self._waiting.values() if one.at <= passed]
            for one in found:
                del self._waiting[one.table_id]
        return found

    def durable(self, one: Definition) -> None:
        """Note that a definition is durable in the log; a rename since then waits for another."""
        with self._lock:
            if one.table_id in self._renamed and self._notes[one.table_id] == one.notes:
                self._forget(one.table_id)

    def _forget(self, table_id: TableId) -> None:
        self._waiting.pop(table_id, None)
        del self._renamed[table_id]
        self._catalog.drop_fact(self._scope, str(table_id))
