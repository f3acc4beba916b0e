"""Constant defaults of added columns: the values of rows that were there before the columns.

PostgreSQL writes nothing into these rows; it keeps each column's first default apart (`attmissingval`) until the table is
rewritten. The schemas of the log say it for readers. The first schema that has the column must: so defaults are noted by
the look that finds the column, which the stream waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from millstream.catalog import Catalog
from millstream.model.exact_values import INEXACT, text_parser
from millstream.model.ids import StreamId, TableId
from millstream.model.schema import Column, TableSchema


@dataclass(frozen=True, slots=True)
class AddedDefault:
    """The value of a column in rows from before it, as the log has it: hashed or redacted if the column's rule says so."""

    name: str
    text: str


class AddedDefaults:
    """The defaults of one stream's tables, by the columns' numbers. Any thread."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"capture/{stream}/added_defaults"
        self._lock = threading.Lock()
        facts: Mapping[str, Mapping[str, Any]] = catalog.facts(self._scope)
        self._known = {
            TableId(int(id_)): {int(number): AddedDefault(name, text) for number, (name, text, *_) in defaults.items()}
            for id_, defaults in facts.items()
        }

    def has_any(self, table: TableId) -> bool:
        """Return whether a table has defaults."""
        with self._lock:
            return table in self._known

    def note(self, table: TableId, added: Mapping[int, AddedDefault]) -> None:
        """Store the defaults of a table's new columns."""
        with self._lock:
            known = self._known[table] = {**self._known.get(table, {}), **added}
            stored = {str(number): [one.name, one.text] for number, one in known.items()}
            self._catalog.put_fact(self._scope, str(table), stored)

    def forget(self, table: TableId) -> None:
        """Forget a table's defaults: its rows are copied again, with all values, or it is gone."""
        with self._lock:
            if self._known.pop(table, None) is not None:
                self._catalog.drop_fact(self._scope, str(table))

    def told(self, schema: TableSchema) -> TableSchema:
        """Return a schema that says which values rows have from before its columns.

        Records from before a change of a column's type have the type of then. If the rows weren't rewritten for it, the value
        is the same text; if they were, a copy follows, whose schemas don't tell the value.
        """
        with self._lock:
            known = self._known.get(schema.table_id)
        if known is None or not schema.is_numbered:
            return schema

        def with_default(column: Column) -> Column:
            default = known.get(column.number)
            is_held = default is not None and text_parser(column.arrow)(default.text) is not INEXACT
            return replace(column, filled=default.text) if default is not None and is_held else column

        return replace(schema, columns=tuple(map(with_default, schema.columns)))
