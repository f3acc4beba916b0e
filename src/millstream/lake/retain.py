"""Dropping old records from history: whole files, once the views folded from them cover what they hold.

First the table says from where on its history is whole, then the files go: broken off in between, nothing is claimed that isn't
there. The rows that dropped records made are in `current`; moments before can't be shown any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from millstream import failpoints
from millstream.lake.data_files import swap
from millstream.lake.delta import live_files, open_table, set_properties
from millstream.lake.history import HISTORY_FROM_PROPERTY, PARTITION, history_from
from millstream.lake.layout import LakeLayout
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class HistoryBound:
    """What may be dropped from a table's history."""

    upto: Seq
    """Every view that is folded has these records, as the last cut names it."""
    before: date | None = None
    """Only days before this one (UTC); None: any."""


def drop_history(layout: LakeLayout, schema: TableSchema, bound: HistoryBound) -> int:
    """Drop the files of history that hold nothing but what the bound lets go; returns how many.

    Raises:
        LakeConflict: another commit took one of the files; call again.
        LakeTableForeign: somebody else wrote into the table.
    """
    path, app = layout.table_path("history", schema), layout.app_id("history", schema.table_id)
    opened = open_table(layout, path, app)
    if opened is None:
        return 0
    files = live_files(opened)
    if "max.__seq" not in files.column_names:
        return 0
    dropped = [
        (name, Seq(last))
        for name, last, day in zip(
            files.column("path").to_pylist(),
            files.column("max.__seq").to_pylist(),
            files.column(f"partition.{PARTITION}").to_pylist(),
            strict=True,
        )
        if last is not None
        and last <= bound.upto
        and (bound.before is None or (day is not None and day < bound.before))
    ]
    if not dropped:
        return 0
    whole_from = max(last for _, last in dropped)
    if whole_from > history_from(opened):
        set_properties(opened, {HISTORY_FROM_PROPERTY: str(whole_from)})
    failpoints.hit("lake.before_history_drop")
    swap(opened, opened.upkeep(), add=(), remove=[name for name, _ in dropped], partition_by=[PARTITION])
    return len(dropped)
