"""Rows under other names of their columns, as SQL; see `column_names`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from millstream.lake.column_names import Names, Renames, own_types, renames_in
from millstream.lake.delta import OpenTable
from millstream.lake.layout import LakeLayout
from millstream.lake.query.duckdb_connection import Engine, literal, quote
from millstream.lake.scan import records_of
from millstream.lake.schema_history import Eras
from millstream.model.ids import TableId
from millstream.model.positions import Seq
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


def records_sql(
    engine: Engine,
    layout: LakeLayout,
    history: OpenTable,
    schema: TableSchema,
    upto: Seq,
    *,
    only: TableId | None,
) -> list[str]:
    """Return SELECTs that together have the records of a history, a table's under the names of its schema.

    Args:
        engine: reads them.
        layout: where the lake is.
        history: the history.
        schema: the table's schema at the end.
        upto: the end.
        only: if given, records of this table alone.
    """
    renames = renames_in(history, schema.table_id, schema, upto=upto)
    if renames is None:
        # A dataset, because the partition's column isn't in the files.
        return [f"FROM {engine.register(records_of(history, table=only))}"]
    mine = engine.register(records_of(history, table=schema.table_id))
    own = own_types(history, schema, layout.types) or pa.schema([])
    types = engine.register(own.empty_table())
    kinds = {name: engine.type_of(types, name) for name in own.names}
    others = set[TableId]() if only is not None else {era.table_id for _, era in Eras.of(history).told}
    rest = (engine.register(records_of(history, table=other)) for other in others - {schema.table_id})
    return [_renamed_records(renames, kinds, history.schema().names, mine), *(f"FROM {source}" for source in rest)]


def _renamed_records(renames: Renames, kinds: Mapping[str, str], have: Sequence[str], source: str) -> str:
    """Return a SELECT of one table's records, with the columns that it no longer has.

    Args:
        renames: how the records name the columns.
        kinds: the types of the table's columns, by name.
        have: the columns of the source.
        source: the text behind FROM.
    """
    taken = {physical for names in renames.names for physical in names.values()}
    shown = []
    for name in have:
        if name in _MAPS or name == _LIST:
            shown.append(_by_era(renames, name, _list_or_map))
        elif name not in kinds and name not in taken:
            shown.append(quote(name))

    def value(name: str, names: Names) -> str:
        physical = names.get(name, name)
        return f"{'NULL' if physical not in have else quote(physical or '')}::{kinds[name]}"

    shown += [_by_era(renames, name, value) for name in kinds]
    return f"SELECT {', '.join(shown)} FROM {source}"


def _list_or_map(column: str, names: Names) -> str:
    if not names:
        return column
    return renamed_list(column, names) if column == _LIST else renamed_map(column, names)


def _by_era(renames: Renames, name: str, value: Callable[[str, Names], str]) -> str:
    found = [(start, value(name, names)) for start, names in renames.spans()]
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
