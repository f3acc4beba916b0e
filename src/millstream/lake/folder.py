"""A folder of history: its files, each with one table's records of a day."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.data_files import NewFile, TableFiles, new_name
from millstream.lake.delta import OpenTable, live_files, open_table
from millstream.lake.layout import LakeLayout
from millstream.lake.schema_history import first_of, table_of
from millstream.lake.types import conform
from millstream.model.ids import TableId
from millstream.model.positions import Seq

_HISTORY_FROM_PROPERTY: Final = "millstream.history_from_seq"
"""Followed by `.` and a table id: that table's records at or below this `seq` may be gone; their effects are in
`current`."""
HISTORY_BEGUN_PROPERTY: Final = "millstream.history_begun_seq"
"""The position at which a history began in place of a lost one."""
PARTITION: Final = "__commit_date"
BOUNDED: Final = ("__seq",)
"""The column whose bounds are recorded with each file. Every record has it, so that files can be skipped safely by its
bounds."""
_NO_DAY: Final = "__HIVE_DEFAULT_PARTITION__"
_BATCH_ROWS: Final = 1 << 16


def write_days(files: TableFiles, rows: pa.Table, table: TableId) -> list[NewFile]:
    """Write one table's records as files of history, one for each of their days; not yet committed."""
    days = rows.column(PARTITION)
    rows = rows.drop_columns([PARTITION])
    written = []
    for day in pc.unique(days).to_pylist():
        some = rows.filter(pc.is_null(days) if day is None else pc.equal(days, pa.scalar(day, pa.date32())))
        file = files.write(some, some.schema, new_name(table=table), partition=day_folder(day))
        written.append(in_day(file, day))
    return written


def day_folder(day: date | None) -> str:
    """Return the folder of a day's files."""
    return f"{PARTITION}={_NO_DAY if day is None else day.isoformat()}"


def in_day(file: NewFile, day: date | None) -> NewFile:
    """Return a file as a file of a day."""
    return replace(file, partition={PARTITION: None if day is None else day.isoformat()})


def files_by_day(opened: OpenTable) -> list[tuple[str, date | None]]:
    """Return a history's live files, each with its day."""
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
    after: Seq = Seq(0),
    upto: Seq | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield a file's records in some columns: those in `(after, upto]`."""
    whole = not after and upto is None
    with files.open(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            rows = pa.Table.from_batches([batch])
            if not whole:
                rows = rows.filter(pc.field("__seq") > int(after))
                rows = rows if upto is None else rows.filter(pc.field("__seq") <= int(upto))
            yield from conform(rows, shape).to_batches()


def reopened(layout: LakeLayout, opened: OpenTable) -> OpenTable:
    """Return the table as it is now."""
    again = open_table(layout, opened.path, opened.app)
    assert again is not None, "it was there just now"
    return again


def history_from(opened: OpenTable) -> Seq:
    """Return the position up to which records of the handle's table may be gone; 0 if all are there."""
    return Seq(int(opened.properties.get(history_from_property(table_of(opened))) or 0))


def history_begun(opened: OpenTable) -> Seq:
    """Return where the history was begun again, in place of a lost one; 0 if it wasn't."""
    return Seq(int(opened.properties.get(HISTORY_BEGUN_PROPERTY) or 0))


def history_from_property(table: TableId) -> str:
    """Return the property that holds the position up to which a table's records may be gone."""
    return f"{_HISTORY_FROM_PROPERTY}.{table}"


def lacks_beginning(opened: OpenTable) -> bool:
    """Whether the first records of the handle's table may be gone."""
    return history_from(opened) >= max(Seq(1), first_of(opened, table_of(opened)))
