"""A column of history that leaves its name to the values of another type, if the table's format gives columns ids.

A column of the source whose new type can't hold the earlier values is another column from there on (`ColumnPlaces`). Its
new values would lie in `price__4`. Where a format has ids (Iceberg), the earlier values move instead, to `price__<id>`: their
column keeps its id, and the new one gets the name. The files are written again, so that readers by name find the values, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from millstream import failpoints
from millstream.lake.data_files import TableFiles, new_name, table_in
from millstream.lake.exactly_once import check_unmoved
from millstream.lake.history_folder import BOUNDED, files_by_period, records_in, reopened
from millstream.lake.layout import LakeLayout
from millstream.lake.reused_column_names import LIVES
from millstream.lake.schema_history import Eras
from millstream.lake.table_format import Commit, OpenTable, format_of
from millstream.model.column_renames import under_names
from millstream.model.schema import TableSchema


def with_names_freed(layout: LakeLayout, opened: OpenTable, schema: TableSchema) -> OpenTable:
    """Return a history in which columns of earlier types have left their names to a table's present ones.

    Args:
        layout: the lake.
        opened: the history, in the folder of the table's name.
        schema: of the table's next record, with the places of its columns as `ColumnPlaces` finds them.

    Raises:
        LakeConflict: another commit came first; call again.
    """
    apart = [column for column in schema.columns if column.apart and column.number >= LIVES]
    if not apart:
        return opened
    eras, moved = Eras.of(opened), dict[str, str]()
    for column in apart:
        name = opened.name_apart(column.name)
        if name is not None and _has_only(eras, column.name, column.number % LIVES, schema):
            moved[column.name] = name
    return _moved(layout, opened, eras, moved) if moved else opened


def _has_only(eras: Eras, name: str, number: int, schema: TableSchema) -> bool:
    """Whether a column of history has values of one column of the source alone."""
    having = [
        (era.table_id, column.number % LIVES)
        for _, era in eras.told
        for column in era.columns
        if column.in_history == name
    ]
    return bool(having) and set(having) == {(schema.table_id, number)}


def _moved(layout: LakeLayout, opened: OpenTable, eras: Eras, moved: Mapping[str, str]) -> OpenTable:
    """Rewrite a history under other names of some of its columns."""
    names = {new: old for old, new in moved.items()}
    files, have = TableFiles(layout, opened.path, BOUNDED, names), opened.schema()
    columns = pa.schema([column.with_name(moved.get(column.name, column.name)) for column in have])
    written = []
    for path, period in files_by_period(layout, opened):
        tables = (pa.Table.from_batches([batch]) for batch in records_in(files, path, have))
        rows = (batch for table in tables for batch in under_names(table, names).to_batches())
        partition = format_of(layout).partition
        # The name has the version: to rewrite all of history may take longer than maintenance waits for a commit.
        name = new_name(opened.version + 1, table=table_in(path))
        file = files.write(rows, columns, name, partition=partition.folder(period))
        written.append(partition.placed(file, period))
    told = [
        (
            start,
            replace(
                era,
                columns=tuple(
                    replace(column, apart=moved[column.in_history]) if column.in_history in moved else column
                    for column in era.columns
                ),
            ),
        )
        for start, era in eras.told
    ]
    failpoints.hit("lake.before_rewrite_commit")
    opened.swap(
        Commit(exact=True),
        add=written,
        mode="overwrite",
        schema=columns,
        renamed=names,
        properties=replace(eras, told=tuple(told)).all_properties(),
    )
    ready = reopened(layout, opened)
    check_unmoved(opened, ready)
    return ready
