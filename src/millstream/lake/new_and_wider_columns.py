"""History with new or wider columns, and which type holds both versions of a column.

Other changes of a schema: `column_names` has renamed columns, `table_renames` renamed tables.

Two versions' types have a union only if the wider type holds every value of the narrower; other pairs are a conflict
for that table alone.
"""

from __future__ import annotations

from shlex import quote
from typing import Final

import pyarrow as pa

from millstream import failpoints
from millstream.errors import LakeError
from millstream.lake.column_conversion import is_local_time, same_type
from millstream.lake.data_files import TableFiles, new_name, table_in
from millstream.lake.history_folder import BOUNDED, files_by_period, records_in, reopened
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import Commit, OpenTable, format_of

_INTEGER_DIGITS: Final = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}


def widest(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that holds every value of both exactly, by an Arrow cast; None if there is none.

    Text includes whole numbers, because PostgreSQL prints them as Arrow does; other types' texts differ. A
    timestamp without a time zone includes dates, each as its midnight.
    """
    if same_type(one, other):
        return one
    for narrow, wide in ((one, other), (other, one)):
        if narrow in _INTEGER_DIGITS:
            if wide in _INTEGER_DIGITS and _INTEGER_DIGITS[narrow] < _INTEGER_DIGITS[wide]:
                return wide
            if pa.types.is_decimal(wide) and wide.precision - wide.scale >= _INTEGER_DIGITS[narrow]:
                return wide
            if pa.types.is_string(wide):
                return wide
        if pa.types.is_float32(narrow) and pa.types.is_float64(wide):
            return wide
        if pa.types.is_date32(narrow) and is_local_time(wide):
            return wide
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        precision = max(one.precision - one.scale, other.precision - other.scale) + scale
        return pa.decimal128(precision, scale) if precision <= 38 else None
    if pa.types.is_list(one) and pa.types.is_list(other):
        item = widest(one.value_type, other.value_type)
        return None if item is None else pa.list_(item)
    return None


def holds(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether a column of history can have values of another type as well, if it becomes wider.

    A column that becomes a date can't keep a timestamp's type, because PostgreSQL prints the two differently.
    """
    is_narrower = pa.types.is_date32(want) and not pa.types.is_date32(have)
    return widest(have, want) is not None and not is_narrower


def union_schema(table: str, have: pa.Schema, want: pa.Schema, *, narrows: bool = False) -> pa.Schema:
    """Return the columns of both, each in the widest type; those of `have` first, in their order.

    Args:
        narrows: whether timestamps may include dates, for records from before the column became a timestamp. A
            column that becomes a date can't keep the type, because PostgreSQL prints the two differently.

    Raises:
        LakeError (`lake_schema_conflict`): a column's type changed to one that doesn't hold its old values.
    """
    fields = []
    for field in have:
        index = want.get_field_index(field.name)
        if index < 0:
            fields.append(field)
            continue
        wide = widest(field.type, want.field(index).type)
        if wide is None or not (narrows or holds(field.type, want.field(index).type)):
            raise LakeError(
                f"{table}.{field.name} was {field.type} in the lake and is now {want.field(index).type}",
                code="lake_schema_conflict",
                hint=f"Run `millstream pipeline rebuild {quote(table)} --from source` to start a new history with the new columns; "
                "the old one is kept next to it.",
                table=table,
                column=field.name,
            )
        fields.append(pa.field(field.name, wide))
    lower = {field.name.lower() for field in have}
    for field in want:
        if have.get_field_index(field.name) < 0:
            if field.name.lower() in lower:
                raise LakeError(
                    f"{table}: a column's name changed by case only ({field.name}); a Delta table can't distinguish the two",
                    code="lake_schema_conflict",
                    hint=f"Run `millstream pipeline rebuild {quote(table)} --from source` to start a new history with the new columns; "
                    "the old one is kept next to it.",
                    table=table,
                    column=field.name,
                )
            fields.append(field)
    return pa.schema(fields)


def widened(layout: LakeLayout, opened: OpenTable, name: str, columns: pa.Schema) -> OpenTable:
    """Return the history with room for some columns.

    Raises:
        LakeError (`lake_schema_conflict`): a column can't follow its change; nothing was written.
    """
    have = opened.schema()
    union = union_schema(name, have, columns, narrows=True)
    if any(not same_type(union.field(field.name).type, field.type) for field in have):
        _rewrite(layout, opened, union)
    elif len(union) > len(have):
        opened.add_columns(union)
    else:
        return opened
    return reopened(layout, opened)


def _rewrite(layout: LakeLayout, opened: OpenTable, union: pa.Schema) -> None:
    """Rewrite all files with wider columns: delta-rs doesn't support Delta's type widening.

    Rare, and bounded in memory.
    """
    opened = opened.ready_for(union)
    files, partition = TableFiles(layout, opened.path, BOUNDED), format_of(layout).partition
    shape = partition.without(union)
    written = []
    for path, period in files_by_period(layout, opened):
        # The name has the version: to rewrite all of history may take longer than maintenance waits for a commit.
        name = new_name(opened.version + 1, table=table_in(path))
        file = files.write(records_in(files, path, shape), shape, name, partition=partition.folder(period))
        written.append(partition.placed(file, period))
    failpoints.hit("lake.before_rewrite_commit")
    opened.swap(Commit(exact=True), add=written, mode="overwrite", schema=union)
