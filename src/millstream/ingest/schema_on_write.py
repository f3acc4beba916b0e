"""Schema on write: how new rows extend a table's schema, within its rules. `fit_to_schema` then fits rows to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import pyarrow as pa

from millstream.errors import IngestError, InvalidValue, UnknownTable
from millstream.ingest.increment_columns import NAMED, type_of
from millstream.ingest.python_rows import COLUMNS_MAX, check_name, too_large
from millstream.model.ids import ShardId
from millstream.model.operations import TableRows
from millstream.model.schema import Column, TableSchema


class SchemaOnWrite(StrEnum):
    """The changes that rows may make to a stream's tables."""

    STRICT = "strict"
    """None: tables and columns must exist."""
    ADD_COLUMNS = "add_columns"
    """An existing table gets missing columns."""
    CREATE = "create"
    """As `add_columns`, and a missing table is created."""


@dataclass(frozen=True, slots=True)
class WriteRules:
    """The configured rules of a table that applications write."""

    mode: SchemaOnWrite
    key: tuple[str, ...] = ()
    """Names of the key columns of `current`'s rows; none: the table has only a history."""
    signals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The columns that are signals, each with the column of its events' times; empty: their commit's."""
    accumulates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The words of the columns to whose value rows add (`pn_counter(increments)`), by their names."""


@dataclass(frozen=True, slots=True)
class TableRules:
    """The configured rules of a stream's tables that applications write, and of the placement of their rows."""

    rules_of: Callable[[str, str], WriteRules]
    """Returns a table's rules, by its schema and name."""
    place: Callable[[TableSchema, pa.RecordBatch], tuple[TableRows, ...]]
    """Returns the placement of a table's rows: the entries of their operations, by shard and partition."""
    check_place: Callable[[TableSchema, pa.RecordBatch], tuple[TableRows, ...]]
    """Places as `place`, before a table is created or extended: rows that can't be placed create nothing."""
    home_shard: Callable[[str], ShardId]
    """Returns the shard that the catalog notes for a new table, by `schema.name`."""


def grown(known: TableSchema, columns: pa.Schema, rules: WriteRules) -> TableSchema:
    """Return the schema that holds rows of these columns: `known` itself if it already does.

    Args:
        known: the newest schema; without columns if the table doesn't exist yet.
        columns: the rows' columns, in the log's types; a column of Arrow's null type has no values.

    Raises:
        UnknownTable: it doesn't exist, and may not be created.
        IngestError (`unknown_column`): it lacks columns, and may not get them.
        IngestError (`key_changed`): it was written with another key.
        IngestError (`merge_changed`): a column of it took increments and is to take totals, or the other way round.
        InvalidValue (`increment_unsuitable`): a new column takes increments, and the rows' values can't be added.
        IngestError (`rows_too_large`): it would have more than `COLUMNS_MAX` columns, or a name is longer than
            `NAME_BYTES_MAX`.
        InvalidValue: its name or columns are invalid: a name that differs from another's only by case, a
            key that isn't among the columns.
    """
    is_new = not known.columns
    if is_new and rules.mode is not SchemaOnWrite.CREATE:
        raise UnknownTable(
            f"the stream has no table {known.full_name}, and applications may not make one",
            hint='Allow it: `schema_on_write = "create"` in [streams.S.ingest].',
            table=known.full_name,
        )
    if not is_new:
        check_rules(known, rules)
    have = {column.name: column for column in known.columns}
    lacking = [
        field
        for field in columns
        if field.name not in have and field.name != NAMED and not pa.types.is_null(field.type)
    ]
    if not lacking and not is_new:
        return known
    names = [field.name for field in lacking]
    if is_new:
        check_name(known.namespace, "schema")
        check_name(known.name, "table")
    for field in lacking:
        check_name(field.name, "column")
        if pa.types.is_list(field.type) and pa.types.is_null(field.type.value_type):
            raise InvalidValue(
                f"column {field.name} of {known.full_name} is new, and its lists are all empty: the type of their items is unknown",
                hint="Send a list with an item first, or an Arrow column of its type.",
                table=known.full_name,
                column=field.name,
            )
    if not is_new and rules.mode is SchemaOnWrite.STRICT:
        raise IngestError(
            f"{known.full_name} has no column {', '.join(names)}",
            code="unknown_column",
            table=known.full_name,
            columns=names,
        )
    cases = {name.lower(): name for name in have}
    for name in names:
        if name.lower() in cases:
            raise InvalidValue(
                f"column {name} of {known.full_name} differs from {cases[name.lower()]} by its case alone: they would be one in the lake",
                table=known.full_name,
                column=name,
            )
    if len(have) + len(lacking) > COLUMNS_MAX:
        raise too_large(f"the columns of {known.full_name}", len(have) + len(lacking), COLUMNS_MAX)
    if is_new:
        _check_key(known.full_name, {field.name: field.type for field in lacking}, rules.key)
    added = (_new_column(known.full_name, field, rules) for field in lacking)
    return replace(known, columns=(*known.columns, *added), key=rules.key, identity=rules.key)


def check_rules(known: TableSchema, rules: WriteRules) -> None:
    """Refuse rules that a table's earlier rows weren't written by.

    Raises:
        IngestError (`key_changed`): it was written with another key.
        IngestError (`merge_changed`): a column of it took increments and is to take totals, or the other way round.
    """
    if known.key != rules.key:
        change = "Restore" if known.key else "Remove"
        raise IngestError(
            f"{known.full_name} is written with {_spoken(known.key)}, and the configuration gives it {_spoken(rules.key)}",
            code="key_changed",
            hint=f"{change} the table's key in [streams.S.keys], or write to a table of another name.",
            table=known.full_name,
            key=list(known.key),
            configured=list(rules.key),
        )
    for column in known.columns:
        if column.accumulates != rules.accumulates.get(column.name, ""):
            raise _merge_changed(known, column, rules)


def _new_column(table: str, field: pa.Field, rules: WriteRules) -> Column:
    word = rules.accumulates.get(field.name)
    if word is None:
        # The weights that come later may have digits after the point.
        is_weight = field.name in rules.signals and pa.types.is_integer(field.type)
        return Column(field.name, pa.float64() if is_weight else field.type)
    return Column(field.name, type_of(table, field.name, field.type, word), accumulates=word)


def _merge_changed(known: TableSchema, column: Column, rules: WriteRules) -> IngestError:
    configured = rules.accumulates.get(column.name)
    had = f"increments ({column.accumulates})" if column.accumulates else "values"
    return IngestError(
        f"rows of {known.full_name} have {had} in column {column.name}, and the configuration says that they have "
        f"{f'increments ({configured})' if configured else 'values'}",
        code="merge_changed",
        table=known.full_name,
        column=column.name,
        merge=column.accumulates or None,
        configured=configured,
    )


def _check_key(table: str, types: dict[str, pa.DataType], key: Sequence[str]) -> None:
    missing = [name for name in key if name not in types]
    if not types or missing:
        what = f"no {', '.join(missing)}, which is part of its key" if missing else "nulls alone"
        raise InvalidValue(
            f"{table} can't be made of rows that have {what}",
            hint="Send a value that is not null in the column's first rows.",
            table=table,
        )
    for name in key:
        if pa.types.is_nested(types[name]):
            raise InvalidValue(f"column {name} of {table} is a list, which can't be a key", table=table, column=name)


def _spoken(key: tuple[str, ...]) -> str:
    return f"the key ({', '.join(key)})" if key else "no key"
