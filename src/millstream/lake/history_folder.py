"""A folder of history: its files, each with one table's records of a period (`Partition`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.column_conversion import conform
from millstream.lake.data_files import NewFile, TableFiles, new_name
from millstream.lake.layout import LakeLayout
from millstream.lake.schema_history import first_of, table_of
from millstream.lake.table_format import OpenTable, format_of, open_table
from millstream.model.ids import TableId
from millstream.model.positions import Seq

_HISTORY_FROM_PROPERTY: Final = "millstream.history_from_seq"
"""Followed by `.` and a table id: that table's records at or below this `seq` may be gone; their effects are in
`current`."""
HISTORY_BEGUN_PROPERTY: Final = "millstream.history_begun_seq"
"""The position at which a history began in place of a lost one."""
DATE: Final = "__commit_date"
BOUNDED: Final = ("__seq", DATE)
"""The columns whose bounds are recorded with each file. Every record has a number, and a file with a null date has
null dates only, so that files can be skipped safely by these bounds."""
_BATCH_ROWS: Final = 1 << 16


def write_periods(layout: LakeLayout, path: str, rows: pa.Table, table: TableId) -> list[NewFile]:
    """Write one table's records as files of the history at `path`, one for each of their periods; not yet committed."""
    files, partition = TableFiles(layout, path, BOUNDED), format_of(layout).partition
    periods = partition.of(rows.column(DATE))
    rows = rows.select(partition.without(rows.schema).names)
    written = []
    for period in pc.unique(periods).to_pylist():
        some = rows.filter(pc.is_null(periods) if period is None else pc.equal(periods, period))
        file = files.write(some, some.schema, new_name(table=table), partition=partition.folder(period))
        written.append(partition.placed(file, period))
    return written


def files_by_period(layout: LakeLayout, opened: OpenTable) -> list[tuple[str, str | None]]:
    """Return a history's live files, each with its period."""
    files = opened.files()
    if not files.num_rows:
        return []
    periods = files.column(f"partition.{format_of(layout).partition.name}").to_pylist()
    return list(zip(files.column("path").to_pylist(), periods, strict=True))


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
