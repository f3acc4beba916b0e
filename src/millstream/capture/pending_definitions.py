"""Tables with renamed or filled columns, which the log doesn't show so far: they wait for a definition.

Readers learn of names, and of a new column's default in older rows, by the next record, and an idle table has none. So a definition enters the log once the
stream has come past the look that saw the change. Until it is durable, the catalog says that the table waits for one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from millstream.capture.source_tables import SourceTable
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
    filled: Mapping[str, str]
    """The texts of new columns' values in older rows, by the columns' names."""
    notes: int
    """How often changes of the table had been noted then."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes that a definition has to say, as the catalog keeps them."""

    renamed: Mapping[str, str]
    filled: Mapping[str, str]

    @classmethod
    def loaded(cls, facts: Mapping[str, Any]) -> _Changes:
        return cls(facts["renamed"], facts["filled"])

    def stored(self) -> dict[str, Any]:
        return {"renamed": dict(self.renamed), "filled": dict(self.filled)}

    def and_then(self, renamed: Mapping[str, str], filled: Mapping[str, str]) -> _Changes:
        before = {old: renamed.get(new, new) for old, new in self.renamed.items()}
        kept = {renamed.get(name, name): text for name, text in self.filled.items()}
        return _Changes({**renamed, **before}, {**kept, **filled})


class PendingDefinitions:
    """The definitions of one stream's tables that aren't durable. Any thread."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"capture/{stream}/definitions"
        self._lock = threading.Lock()
        facts = catalog.facts(self._scope)
        self._changes = {TableId(int(id_)): _Changes.loaded(changes) for id_, changes in facts.items()}
        """By table that waits, what changed: also from before this process."""
        self._waiting: dict[TableId, Definition] = {}
        self._notes = dict.fromkeys(self._changes, 0)

    @property
    def are_waiting(self) -> bool:
        """Whether a definition isn't durable in the log."""
        return bool(self._changes)

    def is_waiting(self, table_id: TableId) -> bool:
        """Return whether a table's definition isn't durable in the log."""
        with self._lock:
            return table_id in self._changes

    def note(self, table_id: TableId, renamed: Mapping[str, str], filled: Mapping[str, str]) -> None:
        """Store that a table waits for a definition; `look` has to follow.

        `renamed` has new names by old ones, `filled` the texts of new columns' values in older rows, by name.
        """
        with self._lock:
            changes = self._changes.get(table_id, _Changes({}, {})).and_then(renamed, filled)
            self._changes[table_id] = changes
            self._notes[table_id] = self._notes.get(table_id, 0) + 1
            self._catalog.put_fact(self._scope, str(table_id), changes.stored())

    def look(self, table_id: TableId, table: SourceTable, at: Lsn, *, is_streaming: bool) -> None:
        """Take the facts of a look for a table that waits.

        Args:
            at: an LSN at or above every change that they show.
            is_streaming: whether the log has the table's rows; otherwise a copy brings the names.
        """
        with self._lock:
            if table_id in self._changes and is_streaming:
                changes, notes = self._changes[table_id], self._notes[table_id]
                self._waiting[table_id] = Definition(table_id, table, at, changes.renamed, changes.filled, notes)
            elif table_id in self._changes:
                self._forget(table_id)

    def end_look(self, tables: Collection[TableId]) -> None:
        """Forget tables that a look didn't find: they are gone, or will be copied if they come back."""
        with self._lock:
            for table_id in self._changes.keys() - tables:
                self._forget(table_id)

    def ready(self, passed: Lsn) -> list[Definition]:
        """Return the definitions that may enter behind an LSN, each once a look."""
        with self._lock:
            found = [one for one in self._waiting.values() if one.at <= passed]
            for one in found:
                del self._waiting[one.table_id]
        return found

    def durable(self, one: Definition) -> None:
        """Note that a definition is durable in the log; a change since then waits for another."""
        with self._lock:
            if one.table_id in self._changes and self._notes[one.table_id] == one.notes:
                self._forget(one.table_id)

    def _forget(self, table_id: TableId) -> None:
        self._waiting.pop(table_id, None)
        del self._changes[table_id]
        self._catalog.drop_fact(self._scope, str(table_id))
