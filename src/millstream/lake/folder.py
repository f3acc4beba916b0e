"""A folder of history: its files, one table's records and one day's in each, and its columns, which only grow and widen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.data_files import NewFile, TableFiles, new_name, swap, table_in
from millstream.lake.delta import OpenTable, add_columns, live_files, open_table, with_features
from millstream.lake.layout import LakeLayout
from millstream.lake.schema_history import ALL, Span, first_of, table_of, within
from millstream.lake.types import conform, same_type, union_schema
from millstream.model.ids import TableId
from millstream.model.positions import Seq

HISTORY_FROM_PROPERTY: Final = "millstream.history_from_seq"
"""Followed by `.` and a table id: that table's records at or below this `seq` may be gone; what they made is in `current`. Alone, in a
lake of before, it speaks of all."""
HISTORY_BEGUN_PROPERTY: Final = "millstream.history_begun_seq"
"""The position that a history was begun with in the place of one that was lost."""
PARTITION: Final = "__commit_date"
BOUNDED: Final = ("__seq",)
"""Whose bounds are noted with each file. It is in every record, which is what makes the bounds safe to skip files by."""
_NO_DAY: Final = "__HIVE_DEFAULT_PARTITION__"
_BATCH_ROWS: Final = 1 << 16


def write_days(files: TableFiles, rows: pa.Table, table: TableId) -> list[NewFile]:
    """Write one table's records as files of history, one for each day of theirs: not yet committed."""
    days = rows.column(PARTITION)
    rows = rows.drop_columns([PARTITION])
    written = []
    for day in pc.unique(days).to_pylist():
        some = rows.filter(pc.is_null(days) if day is None else pc.equal(days, pa.scalar(day, pa.date32())))
        file = files.write(some, some.schema, new_name(table=table), partition=day_folder(day))
        written.append(in_day(file, day))
    return written


def day_folder(day: date | None) -> str:
    """The folder of a day's files."""
    return f"{PARTITION}={_NO_DAY if day is None else day.isoformat()}"


def in_day(file: NewFile, day: date | None) -> NewFile:
    """A file as one of a day."""
    return replace(file, partition={PARTITION: None if day is None else day.isoformat()})


def files_by_day(opened: OpenTable) -> list[tuple[str, date | None]]:
    """A history's live files, each with its day."""
    files = live_files(opened)
    if not files.num_rows:
        return []
    days = files.column(f"partition.{PARTITION}").to_pylist()
    return list(zip(files.column("path").to_pylist(), days, strict=True))


def records_in(
    files: TableFiles,
    path: str,
    shape: pa.Schema,
    *,
    spans: Sequence[Span] = ALL,
    after: Seq = Seq(0),
    upto: Seq | None = None,
) -> Iterator[pa.RecordBatch]:
    """A file's records in some columns: those in `(after, upto]` whose numbers lie in some spans."""
    whole = tuple(spans) == ALL and not after and upto is None
    with files.open(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            rows = pa.Table.from_batches([batch])
            if not whole:
                rows = rows.filter(within(batch.column("__seq"), spans))
                rows = rows.filter(pc.field("__seq") > int(after))
                rows = rows if upto is None else rows.filter(pc.field("__seq") <= int(upto))
            yield from conform(rows, shape).to_batches()


def widened(layout: LakeLayout, opened: OpenTable, name: str, columns: pa.Schema) -> OpenTable:
    """The history with room for some columns.

    Raises:
        LakeSchemaConflict: one can't follow its change; nothing was written.
    """
    have = opened.schema()
    union = union_schema(name, have, columns, narrows=True)
    if any(not same_type(union.field(field.name).type, field.type) for field in have):
        _rewrite(layout, opened, union)
    elif len(union) > len(have):
        add_columns(opened, union)
    else:
        return opened
    return reopened(layout, opened)


def reopened(layout: LakeLayout, opened: OpenTable) -> OpenTable:
    """The table as it is now."""
    again = open_table(layout, opened.path, opened.app)
    assert again is not None, "it was there just now"
    return again


def history_from(opened: OpenTable) -> Seq:
    """Records at or below this may be gone of the table whose handle it is; 0 where all are there."""
    properties = opened.properties
    told = properties.get(history_from_property(table_of(opened))) or properties.get(HISTORY_FROM_PROPERTY)
    return Seq(int(told or 0))


def history_begun(opened: OpenTable) -> Seq:
    """Where the history was begun anew, in the place of one that was lost; 0 where it wasn't."""
    return Seq(int(opened.properties.get(HISTORY_BEGUN_PROPERTY) or 0))


def history_from_property(table: TableId) -> str:
    """The property that tells up to where a table's records may be gone."""
    return f"{HISTORY_FROM_PROPERTY}.{table}"


def lacks_beginning(opened: OpenTable) -> bool:
    """Whether the first records of the table whose handle it is may be gone."""
    return history_from(opened) >= max(Seq(1), first_of(opened, table_of(opened)))


def _rewrite(layout: LakeLayout, opened: OpenTable, union: pa.Schema) -> None:
    """Rewrite all files with wider columns: Delta's type widening is beyond delta-rs. Rare, and bounded in memory."""
    opened = with_features(layout, opened, union)
    files = TableFiles(layout, opened.path, BOUNDED)
    shape = pa.schema([column for column in union if column.name != PARTITION])
    written = []
    for path, day in files_by_day(opened):
        name = new_name(table=table_in(path))
        file = files.write(records_in(files, path, shape), shape, name, partition=day_folder(day))
        written.append(in_day(file, day))
    swap(opened, opened.upkeep(exact=True), add=written, mode="overwrite", schema=union, partition_by=[PARTITION])
