"""Changes of a table's columns that change rows without a word in the stream, and so have the table copied again.

`ADD COLUMN … DEFAULT` gives every row a value, `RENAME COLUMN` every row another column's, and a change of type may write
every row anew: PostgreSQL sends none of it. Nor that a column added under the name of one that was dropped has nothing of its values,
which the log's records still hold under that name. The columns by their numbers, as last seen, are kept in the catalog; what has
happened since is told by them, also where no capture ran meanwhile.

A column that is added counts as filled where it has, or had when it was added, a default, an identity or NOT NULL. That
may copy a table for nothing (a default set later, before the next look), and misses nothing.
"""

from __future__ import annotations

from typing import Any

from millstream.capture.source import AttributeFacts, SourceTable
from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId


class KnownLayouts:
    """The columns of each table as the existing rows in the log, or the copy that runs, have them."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"capture/{stream}/layout"
        self._known: dict[str, Any] = catalog.facts(self._scope)

    def news(self, table: SourceTable, id_: TableId) -> str | None:
        """What happened to the table's columns that its rows in the log don't show; None: nothing."""
        known = self._known.get(str(id_))
        if known is None:
            return None
        before = {number: (name, type_oid, modifier) for number, name, type_oid, modifier in known["columns"]}
        rewritten = table.partitioned or table.relfilenode != known["relfilenode"]
        gone = _gone(known, table)
        told = [_news_of(c, before.get(c.number), rewritten=rewritten, again=c.name in gone) for c in table.layout]
        return "; ".join(filter(None, told)) or None

    def remember(self, table: SourceTable, id_: TableId) -> None:
        """From now on the log's rows, or those that are about to be copied, are as the table is now."""
        columns = [[c.number, c.name, c.type_oid, c.type_modifier] for c in table.layout]
        known = self._known.get(str(id_))
        # A copy brings what rows have now; without one, a name that is gone may come back.
        gone = [] if known is None or self.news(table, id_) is not None else sorted(_gone(known, table))
        value = {"relfilenode": table.relfilenode, "columns": columns, "gone": gone}
        if self._known.get(str(id_)) != value:
            self._catalog.put_fact(self._scope, str(id_), value)
            self._known[str(id_)] = value


def _gone(known: dict[str, Any], table: SourceTable) -> set[str]:
    """Names of columns that were dropped since the table's rows were last copied, by what was known before this look."""
    live = {column.number for column in table.layout}
    return {*known.get("gone", ()), *(name for number, name, _, _ in known["columns"] if number not in live)}


def _news_of(
    column: AttributeFacts, before: tuple[str, int, int] | None, *, rewritten: bool, again: bool
) -> str | None:
    if before is None and again:
        return f"column {column.name} was dropped and added again"
    if before is None:
        return f"column {column.name} was added with a value for existing rows" if column.filled else None
    name, type_oid, modifier = before
    if name != column.name:
        return f"column {name} was renamed to {column.name}"
    if type_oid != column.type_oid or (rewritten and modifier != column.type_modifier):
        return f"column {name} got another type"
    return None
