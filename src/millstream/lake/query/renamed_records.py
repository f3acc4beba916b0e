"""Rows under other names of their columns, as SQL; see `column_names`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from millstream.lake.column_conversion import EXACT
from millstream.lake.column_names import Renames, renames_in
from millstream.lake.filled_columns import filled_rows
from millstream.lake.history_scan import records_of
from millstream.lake.new_and_wider_columns import widest
from millstream.lake.query.duckdb_connection import Engine
from millstream.lake.schema_history import Eras
from millstream.lake.table_format import OpenTable
from millstream.model.column_renames import FilledNames, Names
from millstream.model.ids import TableId
from millstream.model.names import literal, quote
from millstream.model.positions import Seq
from millstream.model.records import MONTH_COLUMN, PARTITION_OID, RECORD_COLUMNS, Op
from millstream.model.schema import TableSchema

_MAPS = ("__exact", "__before")
_LIST = "__unchanged"
_ITEM = "__millstream_item"
"""Name of a lambda's parameter, which a column's name would hide."""


def renamed_map(column: str, names: Names) -> str:
    """Return an expression for a map from names of columns, under the names of a later or an earlier schema."""
    wanted, left_out = _wanted(names)
    entries = f"map_entries({column})"
    if left_out:
        entries = f"list_filter({entries}, lambda {_ITEM}: {_ITEM}.key NOT IN ({left_out}))"
    key = _case(f"{_ITEM}.key", wanted)
    return (
        f"CASE WHEN {column} IS NOT NULL THEN "
        f"map_from_entries(list_transform({entries}, lambda {_ITEM}: {{'key': {key}, 'value': {_ITEM}.value}})) END"
    )


def renamed_list(column: str, names: Names) -> str:
    """Return an expression for a list of names of columns, likewise."""
    wanted, left_out = _wanted(names)
    items = f"list_filter({column}, lambda {_ITEM}: {_ITEM} NOT IN ({left_out}))" if left_out else column
    return f"list_transform({items}, lambda {_ITEM}: {_case(_ITEM, wanted)})"


def rows_sql(
    engine: Engine, source: str, have: Sequence[str], columns: pa.Schema, names: FilledNames
) -> tuple[str, list[str]]:
    """Return the text behind FROM that reads a table's rows under the names of another schema, and which columns it has.

    Args:
        source: the text behind FROM for the rows as they are.
        have: the columns of them.
        columns: the wanted columns, without `__exact`.
        names: their names in the rows, and their values if they were added after the rows.
    """
    mine = {name: names.get(name, name) for name in columns.names}
    there = {name: was for name, was in mine.items() if isinstance(was, str) and was in have}
    shown = [f"{quote(was)} AS {quote(name)}" for name, was in there.items()]
    row = filled_rows(pa.table({_ITEM: [0]}), names, columns)
    added = [name for name in columns.names if name in row.column_names]
    values = engine.register(row) if added else ""
    if added:
        shown += [f"(SELECT {quote(name)} FROM {values}) AS {quote(name)}" for name in added]
    has_texts = EXACT.name in row.column_names
    if EXACT.name in have or has_texts:
        kept = {name: was if isinstance(was, str) else None for name, was in names.items()}
        texts = [renamed_map(EXACT.name, kept)] if EXACT.name in have else []
        texts += [f"(SELECT {EXACT.name} FROM {values})"] if has_texts else []
        shown.append(f"{texts[0] if len(texts) == 1 else f'map_concat({texts[0]}, {texts[1]})'} AS {EXACT.name}")
    exact = [EXACT.name] if EXACT.name in have or has_texts else []
    return f"(SELECT {', '.join(shown)} FROM {source})", [*there, *added, *exact]


def records_sql(
    engine: Engine, history: OpenTable, schema: TableSchema, upto: Seq, *, only: TableId | None
) -> list[str]:
    """Return SELECTs that together have the records of a history, a table's under the names of its schema.

    Args:
        upto: the end.
        only: if given, records of this table alone.
    """
    renames = renames_in(history, schema.table_id, schema, upto=upto, fills=False)
    if renames is None:
        # A dataset, because the partition's column isn't in the files.
        return [f"FROM {engine.register(records_of(history, table=only))}"]
    mine = engine.register(records_of(history, table=schema.table_id))
    others = set[TableId]() if only is not None else {era.table_id for _, era in Eras.of(history).told}
    rest = (engine.register(records_of(history, table=other)) for other in others - {schema.table_id})
    have = history.schema()
    own = {name.lower(): name for name in schema.column_names}
    theirs = [name for name in have.names if own.get(name.lower(), name) == name]  # SQL ignores case
    columns = [*theirs, *(name for name in schema.column_names if name not in theirs)]
    shown = [_shown(engine, renames, name, have) for name in columns]
    return [f"SELECT {', '.join(filter(None, shown))} FROM {mine}", *(f"FROM {source}" for source in rest)]


def _shown(engine: Engine, renames: Renames, name: str, have: pa.Schema) -> str:
    """Return the expression for a column of the records, over all their eras; an empty text if they don't have it.

    A column that the table no longer has is shown, too, also if another one has its name.
    """
    if name in _MAPS or name == _LIST:
        renamed = [(start, _list_or_map(name, names)) for start, names, _ in renames.spans()]
        if name == "__before" and PARTITION_OID.name in have.names:
            # A partition that leaves has its own name there, under no column's.
            is_left = f"__op = {literal(Op.PARTITION_LEFT.letter)}"
            renamed = [(start, f"CASE WHEN {is_left} THEN {name} ELSE {text} END") for start, text in renamed]
        return _cases(name, renamed)
    if name in RECORD_COLUMNS or name == MONTH_COLUMN:
        return quote(name)
    found, is_there = list[tuple[Seq, str | None]](), False
    spelled = next((column for column in have.names if column.lower() == name.lower()), name)
    kinds = list(dict.fromkeys(have.field(physical).type for physical in renames.names_of(name, have)))
    for start, names, had in renames.spans():
        physical = names.get(name, name)
        if physical in {None, name} and spelled in names.values():
            physical = None  # it has the values of a column with another name
        elif physical is None or (physical == name != spelled and spelled in had):
            physical = spelled  # of a column that is gone
            if kinds and have.get_field_index(spelled) >= 0 and _widest([*kinds, have.field(spelled).type]) is None:
                physical = None  # its values have no place among the others'
        if physical is not None and have.get_field_index(physical) < 0:
            physical = None
        found.append((start, physical))
        is_there = is_there or physical in had
    if not is_there:
        return ""
    wide = _widest(list(dict.fromkeys(have.field(physical).type for _, physical in found if physical is not None)))
    empty = engine.register(pa.schema([pa.field("kind", wide or pa.string())]).empty_table())
    type_name = engine.type_of(empty, "kind")
    texts = ((start, "NULL" if physical is None else quote(physical)) for start, physical in found)
    return _cases(name, [(start, f"{text}::{type_name}") for start, text in texts])


def _widest(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """Return the type that holds the values of all these types; None if there is none."""
    wide: pa.DataType | None = kinds[0]
    for kind in kinds[1:]:
        wide = None if wide is None else widest(wide, kind)
    return wide


def _list_or_map(column: str, names: Names) -> str:
    names = {name: physical for name, physical in names.items() if physical is not None}  # others keep their names
    if not names:
        return column
    return renamed_list(column, names) if column == _LIST else renamed_map(column, names)


def _cases(name: str, found: Sequence[tuple[Seq, str]]) -> str:
    """Return an expression for the values from some positions on, the newest first."""
    if len({text for _, text in found}) == 1:
        return f"{found[0][1]} AS {quote(name)}"
    cases = " ".join(f"WHEN __seq >= {int(start)} THEN {text}" for start, text in found[:-1])
    return f"CASE {cases} ELSE {found[-1][1]} END AS {quote(name)}"


def _wanted(names: Names) -> tuple[Mapping[str, str], str]:
    wanted = {physical: name for name, physical in names.items() if physical is not None}
    return wanted, ", ".join(literal(name) for name in names if name not in wanted)


def _case(text: str, wanted: Mapping[str, str]) -> str:
    if not wanted:
        return text
    cases = " ".join(f"WHEN {literal(old)} THEN {literal(new)}" for old, new in wanted.items())
    return f"CASE {text} {cases} ELSE {text} END"
