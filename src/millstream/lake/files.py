"""A Delta table's files, by the statistics in its log, and reading them one by one.

For what must start quickly: `to_pyarrow_dataset` brings pandas along where that is installed, and building a dataset of many
files takes longer than reading one. Local lakes and object stores alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import PyFileSystem

from millstream.lake.delta import OpenTable, lake_errors, live_files
from millstream.lake.layout import LakeLayout


@dataclass(frozen=True, slots=True)
class DataFile:
    """One live file."""

    path: str
    """Within the table's folder."""
    rows: int
    size_bytes: int
    low: Any
    """The least value of the column that was asked about; None where the log doesn't tell."""
    high: Any


def data_files(opened: OpenTable, column: str) -> list[DataFile]:
    """The table's live files with what is known of one column."""
    actions = live_files(opened)
    names = ("path", "num_records", "size_bytes", f"min.{column}", f"max.{column}")
    columns = [
        actions.column(name).to_pylist() if name in actions.column_names else [None] * actions.num_rows
        for name in names
    ]
    return [
        DataFile(path, rows or 0, size or 0, low, high) for path, rows, size, low, high in zip(*columns, strict=True)
    ]


def read_batches(
    layout: LakeLayout,
    opened: OpenTable,
    path: str,
    columns: Sequence[str],
    *,
    rows: int = 1 << 14,
    least: tuple[str, int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """One file's rows, in its order and a batch at a time; columns that the table is partitioned by aren't in it.

    Args:
        layout: where the lake is.
        opened: the table.
        path: as `data_files` told it.
        columns: which, by name.
        rows: at most so many a batch.
        least: a column and a number: row groups that hold none so great are passed over.
    """
    import pyarrow.parquet as pq

    with lake_errors(opened.path):
        folder = PyFileSystem(DeltaStorageHandler(opened.path, dict(layout.storage_options) or None))
        with folder.open_input_file(path) as handle, pq.ParquetFile(handle) as file:
            groups = [
                g for g in range(file.num_row_groups) if least is None or _reaches(file.metadata.row_group(g), *least)
            ]
            yield from file.iter_batches(batch_size=rows, row_groups=groups, columns=list(columns))


def _reaches(group: Any, column: str, bound: int) -> bool:
    """Whether a row group's statistics allow a value of at least `bound`."""
    for place in range(group.num_columns):
        facts = group.column(place)
        if facts.path_in_schema == column:
            return not facts.is_stats_set or not facts.statistics.has_min_max or facts.statistics.max >= bound
    return True
