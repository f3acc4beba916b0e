"""Columns of an Iceberg table: types in Arrow and in Iceberg, and the ids under which files have them.

A file names its columns by ids, and is written before the commit that adds a new column to the table. So the ids of new
columns are computed from the table's metadata, by pyiceberg itself, when a file is written. A commit compares them with
those that the table has by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyiceberg.schema import Schema, assign_fresh_schema_ids, index_by_name
from pyiceberg.table.sorting import SortField
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from millstream.errors import LakeError
from millstream.lake.data_files import FIELD_ID
from millstream.model.column_renames import FilledNames

if TYPE_CHECKING:
    from pyiceberg.table import Transaction
    from pyiceberg.table.update.schema import UpdateSchema

_PLAIN: Final[dict[pa.DataType, IcebergType]] = {
    pa.bool_(): BooleanType(),
    pa.int8(): IntegerType(),
    pa.int16(): IntegerType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.date32(): DateType(),
    pa.timestamp("us", tz="UTC"): TimestamptzType(),
    pa.timestamp("us"): TimestampType(),
}
_IDENTIFYING: Final = (BooleanType, IntegerType, LongType, StringType, BinaryType, DecimalType)
_PROMOTED: Final = ((IntegerType, LongType), (FloatType, DoubleType))


def iceberg_type(kind: pa.DataType) -> IcebergType:
    """Return the type of a column; ids of what is nested in it are 0."""
    if pa.types.is_decimal(kind):
        return DecimalType(kind.precision, kind.scale)
    if pa.types.is_list(kind):
        return ListType(element_id=0, element=iceberg_type(kind.value_type), element_required=False)
    if pa.types.is_map(kind):
        key, value = iceberg_type(kind.key_type), iceberg_type(kind.item_type)
        return MapType(key_id=0, key_type=key, value_id=0, value_type=value, value_required=False)
    if pa.types.is_struct(kind):
        return StructType(*(NestedField(0, field.name, iceberg_type(field.type), required=False) for field in kind))
    return _PLAIN[kind]


def arrow_type(kind: IcebergType, *, with_ids: bool = False) -> pa.DataType:
    """Return the Arrow type of a column, with the ids of what is nested in it if asked for."""

    def nested(name: str, field_id: int, inner: IcebergType, *, nullable: bool = True) -> pa.Field:
        metadata = {FIELD_ID: str(field_id).encode()} if with_ids else None
        return pa.field(name, arrow_type(inner, with_ids=with_ids), nullable, metadata)

    match kind:
        case DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
        case ListType():
            return pa.list_(nested("element", kind.element_id, kind.element_type))
        case MapType():
            return pa.map_(
                nested("key", kind.key_id, kind.key_type, nullable=False),
                nested("value", kind.value_id, kind.value_type),
            )
        case StructType():
            return pa.struct([nested(field.name, field.field_id, field.field_type) for field in kind.fields])
        case _:
            return _ARROW_OF[type(kind)]


_ARROW_OF: Final = {type(iceberg): arrow for arrow, iceberg in _PLAIN.items() if arrow not in {pa.int8(), pa.int16()}}


def arrow_columns(schema: Schema) -> pa.Schema:
    """Return a table's columns in the lake's types."""
    return pa.schema([pa.field(field.name, arrow_type(field.field_type)) for field in schema.fields])


def stored_columns(columns: pa.Schema) -> pa.Schema:
    """Return columns as a table that has them returns them (`arrow_columns`)."""
    return pa.schema([pa.field(field.name, arrow_type(iceberg_type(field.type))) for field in columns])


def new_schema(columns: pa.Schema, key: Sequence[str]) -> Schema:
    """Return the schema of a new table, with the ids that a catalog assigns; a fit key is its identifier.

    Raises:
        LakeError (`lake_schema_conflict`): a column has the name that Iceberg gives to a part of another one.
    """
    _check_parts(columns)
    is_fit = identifies(columns, key)
    fields = [
        NestedField(place, field.name, iceberg_type(field.type), required=is_fit and field.name in key)
        for place, field in enumerate(columns, 1)
    ]
    ids = [field.field_id for field in fields if is_fit and field.name in key]
    return assign_fresh_schema_ids(Schema(*fields, identifier_field_ids=ids))


def identifies(columns: pa.Schema, key: Sequence[str]) -> bool:
    """Whether a key can be the identifier of a table: the format refuses floating numbers, lists, and other types here."""
    return bool(key) and all(isinstance(iceberg_type(columns.field(name).type), _IDENTIFYING) for name in key)


def sort_fields(schema: Schema, key: Sequence[str]) -> list[SortField]:
    """Return the sort order of a table with a key: its columns of primitive types."""
    fields = [schema.find_field(name) for name in key]
    return [SortField(field.field_id, IdentityTransform()) for field in fields if field.field_type.is_primitive]


def evolve(
    transaction: Transaction,
    columns: pa.Schema,
    *,
    replaces: bool,
    key: Sequence[str] = (),
    renamed: FilledNames | None = None,
    nulls: AbstractSet[str] = frozenset(),
) -> UpdateSchema:
    """Return the update, not yet committed, that gives a table some columns.

    A type that Iceberg can't promote becomes a new column of the same name; all files must be replaced then.

    Args:
        columns: in Arrow.
        replaces: whether the table's other columns go.
        key: if the table's files are replaced, too: the columns that identify a row.
        renamed: if they are replaced: the names that columns had before. They keep their ids, unless another column
            takes one of these names.
        nulls: columns that have nulls; a key with one of them identifies no row.

    Raises:
        LakeError (`lake_schema_conflict`): as `new_schema`.
    """
    have = transaction.table_metadata.schema()
    names = {field.name: field for field in have.fields}
    _check_parts(
        [*columns, *(() if replaces else (one for one in arrow_columns(have) if one.name not in columns.names))]
    )
    update = transaction.update_schema(allow_incompatible_changes=replaces)  # a column may become one without nulls
    required = {field.name for field in have.fields if field.required}
    before = _kept(names, columns, renamed) if replaces else {}
    if replaces:
        required = set(key) if identifies(columns, key) and nulls.isdisjoint(key) else set()
        for name in names.keys() - set(columns.names) - set(before.values()):
            update.delete_column((name,))
    for column in columns:
        old = before.get(column.name, column.name)
        kind, had, is_required = iceberg_type(column.type), names.get(old), column.name in required
        if had is None:
            update.add_column((column.name,), kind, required=is_required)
        elif _is_alike(had.field_type, kind) or _is_promoted(had.field_type, kind):
            wide = None if _is_alike(had.field_type, kind) else kind
            update.update_column((old,), wide, required=is_required if is_required != had.required else None)
            if old != column.name:
                update.rename_column((old,), column.name)
        elif replaces:
            update.delete_column((column.name,))
            update.add_column((column.name,), kind, required=is_required)
    if replaces:
        update.set_identifier_fields(
            *(name for name in key if name in required)
        )  # after the renames, which change them
    return update


def allow_nulls(transaction: Transaction, nulls: AbstractSet[str]) -> None:
    """Let columns of a key have nulls, if they can't: the table has no identifier from then on."""
    required = [field.name for field in transaction.table_metadata.schema().fields if field.required]
    if any(name in nulls for name in required):
        update = transaction.update_schema()
        update.set_identifier_fields()
        for name in required:
            update.update_column((name,), required=False)
        update.commit()


def _check_parts(columns: Iterable[pa.Field]) -> None:
    """Raise `lake_schema_conflict` if a column has the name of a part of another one, such as `tags.element`."""
    fields = {column.name: column for column in columns}
    for name, column in fields.items():
        if not pa.types.is_nested(column.type):
            continue
        parts = index_by_name(Schema(NestedField(1, name, iceberg_type(column.type), required=False)))
        for clash in sorted((parts.keys() - {name}) & fields.keys()):
            raise LakeError(
                f"the column {clash} has the name that Iceberg gives to a part of the column {name}",
                code="lake_schema_conflict",
                hint="Rename the column at the source, or leave the table out.",
                column=clash,
            )


def _kept(names: Mapping[str, NestedField], columns: pa.Schema, renamed: FilledNames | None) -> dict[str, str]:
    """Return the old names, by the new ones, of renamed columns if they can keep their ids; else none.

    pyiceberg (0.12) can't rename a column and give its name to a new one in the same update.
    """
    before = {new: old for new, old in (renamed or {}).items() if isinstance(old, str) and new in columns.names}
    for new, old in before.items():
        had = names.get(old)
        kind = iceberg_type(columns.field(new).type)
        if had is None or not (_is_alike(had.field_type, kind) or _is_promoted(had.field_type, kind)):
            return {}
        if (old in columns.names and old not in before) or (new in names and new not in before.values()):
            return {}
    return before


def with_ids(schema: Schema, columns: pa.Schema) -> pa.Schema:
    """Return a file's columns with their ids in a table's schema; any decimal may be null in a file (`allow_nulls`)."""
    fields = []
    for column in columns:
        field = schema.find_field(column.name)
        metadata = {FIELD_ID: str(field.field_id).encode()}
        may_be_null = not field.required or isinstance(field.field_type, DecimalType)
        fields.append(pa.field(column.name, arrow_type(field.field_type, with_ids=True), may_be_null, metadata))
    return pa.schema(fields)


def ids_of(schema: Schema) -> dict[str, int]:
    """Return the ids of a table's columns by name, nested ones included, as `field_ids` of its files."""
    return index_by_name(schema)


def _is_alike(one: IcebergType, other: IcebergType) -> bool:
    """Whether two types are the same, whatever the ids are of what is nested in them."""
    return bool(arrow_type(one).equals(arrow_type(other)))


def _is_promoted(one: IcebergType, other: IcebergType) -> bool:
    """Whether Iceberg can widen a type to another."""
    if isinstance(one, DecimalType) and isinstance(other, DecimalType):
        return one.scale == other.scale and one.precision <= other.precision
    return any(isinstance(one, narrow) and isinstance(other, wide) for narrow, wide in _PROMOTED)
