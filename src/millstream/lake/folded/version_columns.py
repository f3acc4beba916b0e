"""Columns of a table of versions: those that the source has, and dropped ones, whose values ended versions keep.

A column is followed by its number in the source (`column_names`). So a renamed column has one column of versions, under
its name at their position. A dropped column keeps its last name. If another column gets that name, the number is
appended to the dropped one's: `price__4`. So it is with the values from before a type that can't hold them, and with a
column that has the name of a version column: `valid_from__4`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from shlex import quote
from typing import Final, TypeAlias

import pyarrow as pa

from millstream.errors import LakeError
from millstream.lake.column_conversion import lake_columns
from millstream.lake.column_names import numbered, schema_at, with_fills
from millstream.lake.folded.scd2_rules import VERSION_COLUMNS, version_inputs
from millstream.lake.history_scan import read_history, scan_named
from millstream.lake.layout import LakeLayout
from millstream.lake.new_and_wider_columns import widest
from millstream.lake.reused_column_names import LIVES
from millstream.lake.schema_history import Eras
from millstream.lake.store_errors import lake_errors
from millstream.lake.table_format import OpenTable, format_of
from millstream.model.column_renames import Filled, FilledNames, Names
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.records import MONTH_COLUMN, PARTITION_OID, RECORD_COLUMNS
from millstream.model.schema import Column, TableSchema

_OURS: Final = frozenset(column.name for column in VERSION_COLUMNS)
_Identity: TypeAlias = int | str
"""A column's number in the source; its name if no record shows its number."""
_Had: TypeAlias = Sequence[tuple[Seq, Mapping[_Identity, Column]]]
"""The columns of each era of a table, by the position at which it begins."""


@dataclass(frozen=True, slots=True)
class VersionColumns:
    """The columns of a table's versions at a position."""

    schema: TableSchema
    """The table's schema there."""
    columns: pa.Schema
    """The table's own columns with dropped ones, in the lake's types; those of the key first, `__partition_oid` last."""
    followed: TableSchema | None
    """The schema with dropped columns; None if names find all values: no column was renamed, or added with a default."""
    in_current: Names
    """The names in `current` of columns that have others here."""

    def records(self, history: OpenTable, *, after: Seq, upto: Seq) -> pa.Table:
        """Return the table's records in `(after, upto]` for a fold, under these names, in any order."""
        names, table = version_inputs(self.columns), self.schema.table_id
        if self.followed is None:
            return read_history(history, after=after, upto=upto, columns=names, table=table)
        with lake_errors(history.path):
            return scan_named(
                history, self.followed, after=after, upto=upto, columns=names, own=self.columns
            ).to_table()

    def names_at(self, history: OpenTable, n: Seq | None) -> FilledNames | None:
        """Return how versions at an earlier position name these columns; None if they have these names."""
        if self.followed is None or n is None:
            return None
        had = {identity: column.name for identity, column in _held(_had(history, self.schema), n).items()}
        others = set(had.values())
        names: dict[str, str | Filled | None] = {}
        for column in with_fills(Eras.of(history).of_table(self.schema.table_id), self.followed).columns:
            identity = column.number if column.number > 0 else column.name
            if identity not in had and column.filled is not None:
                names[column.name] = Filled(column.filled)
            elif had.get(identity) != column.name and (identity in had or column.name in others):
                names[column.name] = had.get(identity)
        return names or None


def version_columns(layout: LakeLayout, history: OpenTable, newest: TableSchema, n: Seq) -> VersionColumns:
    """Return the columns of a table's versions at a position.

    Raises:
        LakeError (`lake_schema_conflict`): a column has a type that doesn't hold the values that it had under another
            name; or it has the name of a version column, and no number.
    """
    at_source = schema_at(history, newest, n)
    is_numbered = newest.is_numbered and at_source.is_numbered
    schema = next_to_version_columns(at_source) if is_numbered else at_source
    names = [column for column in history.schema() if column.name not in {*RECORD_COLUMNS, MONTH_COLUMN}]
    followed, fields = schema, names
    had = _had(history, schema)
    is_followed = is_numbered and _needs_numbers(had)
    if is_followed:
        held, live = _held(had, n), {column.number for column in schema.columns}
        dropped = [
            replace(column, number=identity if isinstance(identity, int) else -1 - place)
            for place, (identity, column) in enumerate(held.items())
            if identity not in live and column.name not in schema.column_names
        ]
        followed = replace(schema, columns=(*schema.columns, *dropped))
        theirs = {name for _, columns in had for column in columns.values() for name in (column.name, column.apart)}
        others = [column for column in names if column.name not in theirs]
        fields = [*_types(layout, history, followed, had), *others]
    if is_numbered:
        fields = _with_those_of_others(history, schema.table_id, fields)
    _check_names(schema, fields)
    key = [field for name in schema.key for field in fields if field.name == name]
    rest = (field for field in fields if field.name not in schema.key)
    partition = [PARTITION_OID] if schema.partitioned else []
    columns = format_of(layout).stored_schema(pa.schema([*key, *rest, *partition]))
    in_current = {now: was for now, was in zip(schema.column_names, at_source.column_names, strict=True) if now != was}
    return VersionColumns(schema, columns, followed if is_followed else None, in_current)


def next_to_version_columns(schema: TableSchema) -> TableSchema:
    """Return a numbered schema in which no column has the name of a version column; see the module."""
    columns = _next_to_ours({column.number: column for column in schema.columns})
    names = {column.name: columns[column.number].name for column in schema.columns}
    return replace(
        schema,
        columns=tuple(columns.values()),
        key=tuple(names[name] for name in schema.key),
        identity=tuple(names.get(name, name) for name in schema.identity),
    )


def _with_those_of_others(history: OpenTable, table: TableId, fields: Sequence[pa.Field]) -> list[pa.Field]:
    """Return a table's columns, and columns like `valid_to__3` of other tables that had its name."""
    found = [one for one in fields if one.name.lower() not in _OURS]
    taken, have = {one.name.lower() for one in found}, history.schema()
    others = (era for _, era in Eras.of(history).told if era.table_id != table and era.is_numbered)
    for era in others:
        for column in next_to_version_columns(era).columns:
            is_apart = column.name not in era.column_names and column.apart in have.names
            if is_apart and column.name.lower() not in taken:
                taken.add(column.name.lower())
                found.append(have.field(column.apart).with_name(column.name))
    return found


def _next_to_ours(columns: Mapping[_Identity, Column]) -> dict[_Identity, Column]:
    """Return columns; one that has the name of a version column gets its number appended."""
    found, taken = dict[_Identity, Column](), {column.name.lower() for column in columns.values()}
    for identity, column in columns.items():
        name = column.name
        if name.lower() in _OURS and isinstance(identity, int):
            name = _with_number(name, identity, taken)
            taken.add(name.lower())
        found[identity] = column if name == column.name else replace(column, name=name, apart=column.in_history)
    return found


def _with_number(name: str, identity: _Identity, taken: AbstractSet[str]) -> str:
    """Return a name with a column's number appended that isn't taken, in whatever case."""
    name = f"{name}__{identity % LIVES if isinstance(identity, int) else identity}"
    while name.lower() in taken:
        name += "_"
    return name


def _had(history: OpenTable, schema: TableSchema) -> _Had:
    eras = Eras.of(history).of_table(schema.table_id)
    had = []
    for place, (start, era) in enumerate(eras):
        numbers = numbered(eras, place) or {}
        had.append((start, _next_to_ours({numbers.get(column.name, column.name): column for column in era.columns})))
    return had


def _needs_numbers(had: _Had) -> bool:
    """Whether a column had two names, one that isn't history's, or a name, in whatever case, two columns.

    Or whether one has values in rows from before it.
    """
    if any(column.apart or column.filled is not None for _, columns in had for column in columns.values()):
        return True
    pairs = {(identity, column.name) for _, columns in had for identity, column in columns.items()}
    return len({identity for identity, _ in pairs}) < len(pairs) or len({name.lower() for _, name in pairs}) < len(
        pairs
    )


def _held(had: _Had, n: Seq) -> dict[_Identity, Column]:
    """Return the columns that versions have at a position, by identity."""
    held: dict[_Identity, Column] = {}
    for start, columns in had:
        if start > n and held:
            break
        taken = {column.name.lower() for column in columns.values()}
        gone = dict[_Identity, Column]()
        for identity, column in held.items():
            name = column.name
            if identity in columns or (isinstance(identity, str) and name.lower() in taken):
                continue
            if name.lower() in taken:
                name = _with_number(name, identity, taken)
            taken.add(name.lower())
            gone[identity] = replace(column, name=name)
        held = {**columns, **gone}
    return held


def _types(layout: LakeLayout, history: OpenTable, followed: TableSchema, had: _Had) -> list[pa.Field]:
    """Return the columns in types that hold all values that each has had."""
    have = history.schema()
    found: dict[_Identity, pa.Field] = {}
    for column, field in zip(followed.columns, lake_columns(followed, layout.types), strict=True):
        index = have.get_field_index(column.name)
        by_name = column.number < 0 and index >= 0
        found[column.number if column.number > 0 else column.name] = have.field(index) if by_name else field
    for _, columns in had:
        era = replace(followed, columns=tuple(columns.values()))
        for identity, field in zip(columns, lake_columns(era, layout.types), strict=True):
            if (now := found.get(identity)) is None:
                continue
            wide = widest(now.type, field.type)
            if wide is None:
                table = followed.full_name
                raise LakeError(
                    f"{table}.{now.name} was {field.type} in the lake, as {field.name}, and is now {now.type}",
                    code="lake_schema_conflict",
                    hint=f"Run `millstream pipeline rebuild {quote(table)} --from source` to start a new history with the new "
                    "columns; the old one is kept next to it.",
                    table=table,
                    column=now.name,
                )
            found[identity] = pa.field(now.name, wide)
    return list(found.values())


def _check_names(schema: TableSchema, columns: Sequence[pa.Field]) -> None:
    clash = [column.name for column in columns if column.name.lower() in _OURS]
    if clash:
        name = f"{schema.namespace}.{schema.name}"
        step = "Rename the column at the source" if schema.source else "Write to a table without that column"
        raise LakeError(
            f"the column {clash[0]} of {name} has the name of a column that Millstream adds to versions",
            code="lake_schema_conflict",
            hint=f"{step}, or leave `scd2` out of the stream's views.",
            table=name,
            column=clash[0],
        )
