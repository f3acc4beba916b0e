"""Log columns to lake columns: types, and values from PostgreSQL's text.

If a lake column's type can't hold a value, the column is null, and `__exact` holds PostgreSQL's text. Capture has
done the same for the log's columns, by `model.exact_values`. `model.pgtypes` chooses the types of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeError
from millstream.model.exact_values import INEXACT, array_of, storage_values, text_parser, text_renderer
from millstream.model.pgtypes import lake_type
from millstream.model.records import MONTH_COLUMN, TEXT_BY_COLUMN, record_prefix
from millstream.model.schema import TableSchema

EXACT: Final = pa.field("__exact", TEXT_BY_COLUMN)
"""The column for values that their lake columns can't hold: PostgreSQL's text, by column."""
_INTEGERS: Final = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def history_prefix(schema: TableSchema) -> tuple[pa.Field, ...]:
    """Return the columns of a table's history before the table's own."""
    return (*record_prefix(schema), pa.field(MONTH_COLUMN, pa.string()))


def lake_columns(schema: TableSchema, types: Mapping[str, str] = MappingProxyType({})) -> pa.Schema:
    """Return the table's own columns in the lake's types.

    Args:
        types: the configured types, by `schema.table.column`.

    Raises:
        ConfigError: a column can't have the configured type.
        LakeError (`lake_schema_conflict`): two columns' names differ only by case (Delta can't distinguish them), or a column has the
            name of a record's own column.
    """
    seen = {field.name: field.name for field in history_prefix(schema)}
    for column in schema.columns:
        other = seen.setdefault(column.name.lower(), column.name)
        if other is not column.name:
            raise LakeError(
                f"{schema.namespace}.{schema.name}: columns {other} and {column.name} have one name in a Delta table",
                code="lake_schema_conflict",
                hint="Rename the column at the source, or leave the table out.",
                table=f"{schema.namespace}.{schema.name}",
                column=column.name,
            )
    return pa.schema(
        [
            pa.field(c.name, lake_type(c, types.get(f"{schema.namespace}.{schema.name}.{c.name}")))
            for c in schema.columns
        ]
    )


def same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types hold the same values; names of list items, which engines choose differently, are ignored."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return same_type(one.value_type, other.value_type)
    if pa.types.is_map(one) and pa.types.is_map(other):
        return same_type(one.key_type, other.key_type) and same_type(one.item_type, other.item_type)
    return bool(one.equals(other))


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table's columns as `schema` has them: wider types by cast, missing columns null, others left out."""
    columns = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)], field.type))
        else:
            column = table.column(index)
            columns.append(column if column.type.equals(field.type) else column.cast(field.type))
    return pa.table(columns, schema=schema)


def to_lake(schema: TableSchema, batch: pa.RecordBatch, types: Mapping[str, str] = MappingProxyType({})) -> pa.Table:
    """Convert records in `record_schema(schema)` to history's rows: the table's columns in the lake's types.

    A value that a lake type can't hold is null there, and its text is added to `__exact`. A text in `__exact` that
    the lake's type holds becomes the value.
    """
    rows = pa.Table.from_batches([batch])
    columns = lake_columns(schema, types)
    target = pa.schema([*record_prefix(schema), *columns])
    other = [c.name for c in schema.columns if not same_type(c.arrow, columns.field(c.name).type)]
    if other:
        maps = batch.column("__exact")
        texts = {name: texts_of(maps, name) for name in columns.names}
        for name in other:
            at = rows.schema.get_field_index(name)
            whole = pc.coalesce(texts[name], to_text(batch.column(at)))
            value, texts[name] = from_text(columns.field(name).type, whole)
            rows = rows.set_column(at, name, value)
        exact = text_maps(list(texts), list(texts.values()), batch.num_rows)
        rows = rows.set_column(rows.schema.get_field_index("__exact"), "__exact", exact)
    return conform(rows, target)


def to_text(values: pa.Array) -> pa.Array:
    """Return PostgreSQL's texts of a log column's values."""
    if pa.types.is_string(values.type):
        return values
    render = text_renderer(values.type)
    return pa.array([None if v is None else render(v) for v in storage_values(values)], pa.string())


def from_text(kind: pa.DataType, texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return values of PostgreSQL's texts, and the texts of those that the type can't hold (null elsewhere)."""
    if pa.types.is_string(kind):
        return texts, pa.nulls(len(texts), pa.string())
    if kind in _INTEGERS and pc.all(pc.match_substring_regex(texts, "^-?[0-9]{1,4}$")).as_py() is not False:
        return texts.cast(kind), pa.nulls(len(texts), pa.string())
    if is_local_time(kind):
        # The key of an older record, whose column was a date.
        texts = pc.replace_substring_regex(texts, r"^(\d+-\d\d-\d\d)( BC)?$", r"\1 00:00:00\2")
    parse = _decimal_parser(kind) if pa.types.is_decimal(kind) else text_parser(kind)
    held = texts.to_pylist()
    values = [None if text is None else parse(text) for text in held]
    exact = [text if value is INEXACT else None for text, value in zip(held, values, strict=True)]
    return array_of([None if v is INEXACT else v for v in values], kind), pa.array(exact, pa.string())


def is_local_time(kind: pa.DataType) -> bool:
    """Whether a type is a timestamp without a time zone."""
    return bool(pa.types.is_timestamp(kind) and kind.tz is None)


def _decimal_parser(kind: pa.DataType) -> Callable[[str], Any]:
    """Return a parser of texts with at most the type's digits on either side of the point.

    The scale may be configured.
    """
    step, digits_max = Decimal(1).scaleb(-kind.scale), kind.precision

    def parse(text: str) -> Any:
        number = Decimal(text)
        if not number.is_finite():
            return INEXACT
        with localcontext() as context:
            context.prec = 76
            scaled = number.quantize(step) if number.adjusted() < digits_max else number
        return scaled if scaled == number and len(scaled.as_tuple().digits) <= digits_max else INEXACT

    return parse


def texts_of(maps: pa.Array | pa.ChunkedArray, name: str) -> pa.Array:
    """Return the text that each row's map (`__exact`, `__before`) holds for a column; null if it holds none."""
    found = pc.map_lookup(maps, pa.scalar(name, pa.string()), "first")
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def text_maps(names: Sequence[str], texts: Sequence[pa.Array], length: int) -> pa.Array:
    """Return `__exact` maps of the texts of some columns, null if a row has none; the reverse of `texts_of`."""
    rows: list[list[tuple[str, str]] | None] = [None] * length
    for name, column in zip(names, texts, strict=True):
        for index in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)):
            entry = (name, column[int(index)].as_py())
            held = rows[index]
            if held is None:
                rows[index] = [entry]
            else:
                held.append(entry)
    return pa.array(rows, TEXT_BY_COLUMN)
