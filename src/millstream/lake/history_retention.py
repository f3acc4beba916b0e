"""Dropping of old records from history: whole files, whose records all folded views cover.

A table's files go once all their days are old. Without a view of `history`, they go at any age. Those of another
table, which had the name before, stay until its next record under its new name: they move there with it.

With them, or before them, the table records from where on its history is complete. If interrupted in between, it claims
nothing that is gone. The rows that dropped records made are in `current`; earlier moments can no
longer be shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from millstream import failpoints
from millstream.lake.data_files import table_in
from millstream.lake.history_folder import DATE, history_from_property
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import Commit, open_table
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class HistoryBound:
    """The bound of what may be dropped from a table's history."""

    upto: Seq
    """Every folded view has these records, in the version that the last cut names."""
    before: date | None = None
    """Only days before this one (UTC); None: any."""
    waiting: frozenset[TableId] = frozenset()
    """Tables whose records may lie under another's name until their next record: no folded view has them."""


def drop_history(layout: LakeLayout, schema: TableSchema, bound: HistoryBound) -> int:
    """Drop the files of history that hold only records within the bound; return how many.

    Raises:
        LakeConflict: another commit removed one of the files; call again.
        LakeTableForeign: another program wrote into the table.
    """
    path, app = layout.table_path("history", schema), layout.app_id("history", schema.table_id)
    opened = open_table(layout, path, app)
    if opened is None:
        return 0
    files = opened.files()
    if "max.__seq" not in files.column_names:
        return 0
    days = files.column(f"max.{DATE}").to_pylist() if f"max.{DATE}" in files.column_names else [None] * files.num_rows
    dropped: list[str] = []
    gone: dict[TableId, int] = {}
    for name, last, day in zip(
        files.column("path").to_pylist(),
        files.column("max.__seq").to_pylist(),
        days,
        strict=True,
    ):
        table = table_in(name)
        if bound.before is None:
            # Folds don't cover another table's records, which may yet follow it to its new name.
            goes = table == schema.table_id
        else:
            goes = day is not None and day < bound.before and table not in bound.waiting - {schema.table_id}
        if last is None or last > bound.upto or not goes:
            continue
        dropped.append(name)
        if table is not None:
            gone[table] = max(gone.get(table, 0), last)
    if not dropped:
        return 0
    properties = opened.properties
    ends = {history_from_property(table): last for table, last in gone.items()}
    told = {name: str(last) for name, last in ends.items() if last > int(properties.get(name) or 0)}
    failpoints.hit("lake.before_history_drop")
    opened.swap(Commit(), add=(), remove=dropped, properties=told)
    return len(dropped)
