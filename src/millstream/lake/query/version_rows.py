"""A table's versions at a position, as SQL: those of the last fold, under those that later records begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millstream.lake.column_conversion import EXACT
from millstream.lake.folded.scd2_rules import IS_CURRENT, VALID_TO, VERSION_COLUMNS, Versions
from millstream.lake.folded.scd2_table import unfolded_versions
from millstream.lake.layout import LakeLayout
from millstream.lake.query.duckdb_connection import Engine, names
from millstream.lake.query.overlaid_rows import filled, gone_table, same_key
from millstream.lake.query.renamed_records import rows_sql
from millstream.lake.row_identity import Keys
from millstream.lake.table_format import OpenTable
from millstream.model.column_renames import FilledNames
from millstream.model.positions import Seq
from millstream.model.records import PARTITION_OID
from millstream.model.schema import TableSchema


def versions_sql(
    engine: Engine, layout: LakeLayout, schema: TableSchema, opened: OpenTable, history: OpenTable, upto: Seq
) -> str:
    """Return a SELECT of a table's versions, with its columns, the version columns, and `__exact` if a row needs it."""
    found, columns, renamed = unfolded_versions(layout, schema, opened, history, upto)
    base, have = _base(engine, opened, columns, renamed)
    own = {name.lower(): name for name in columns.names}  # SQL ignores case
    hidden = {EXACT.name, PARTITION_OID.name}
    shown = [name for name in have if name not in hidden and own.get(name.lower(), name) == name]
    shown += [name for name in columns.names if name not in {*hidden, *shown}]
    fresh: list[pa.Table] = [] if found is None else [found.closed, found.opened]
    if EXACT.name in have or any(rows.column(EXACT.name).null_count < rows.num_rows for rows in fresh):
        shown.append(EXACT.name)
    types = engine.register(pa.schema([*columns, EXACT]).empty_table())
    listed = filled(engine, shown, have, "c", types)
    if found is None:
        return f"SELECT {listed} FROM {base} c"
    exact = EXACT.name in have
    still = f"SELECT * FROM {base} c WHERE c.{IS_CURRENT.name}"
    left = _joined(engine, "ANTI", still, found.gone, exact=exact)
    told = [f"SELECT * FROM {base} c WHERE NOT c.{IS_CURRENT.name}"]
    if not found.ends_others:
        told.append(left)
    else:
        rest, ends = _joined(engine, "ANTI", left, found.kept, exact=exact), _ends(found, have)
        ended = f"{ends} AS {VALID_TO.name}, false AS {IS_CURRENT.name}"
        told.append(_joined(engine, "SEMI", still, found.kept, exact=exact))
        told.append(f"SELECT * REPLACE ({ended}) FROM ({rest}) WHERE {ends} IS NOT NULL")
        told.append(f"SELECT * FROM ({rest}) WHERE {ends} IS NULL")
    parts = [f"SELECT {listed} FROM ({part}) c" for part in told]
    parts += [f"SELECT {names(shown)} FROM {engine.register(rows)}" for rows in fresh if rows.num_rows]
    return " UNION ALL ".join(parts)


def _ends(found: Versions, have: Sequence[str]) -> str:
    """Return an expression for when versions end whose keys the later records don't have; NULL if they don't."""
    rest = found.rest_closed_us
    others = "NULL::TIMESTAMPTZ" if rest is None else f"make_timestamptz({rest})"
    if not found.left_us or PARTITION_OID.name not in have:
        return others
    times = ((oid, time_us if rest is None else min(rest, time_us)) for oid, time_us in found.left_us)
    cases = " ".join(f"WHEN {oid} THEN make_timestamptz({time_us})" for oid, time_us in times)
    return f"CASE {PARTITION_OID.name} {cases} ELSE {others} END"


def _base(engine: Engine, opened: OpenTable, columns: pa.Schema, renamed: FilledNames | None) -> tuple[str, list[str]]:
    """Return the text behind FROM for the versions of the last fold, under the wanted names, and the columns of it."""
    have = opened.schema()
    # A dataset, because the partition's column isn't in the files.
    source = engine.register(opened.dataset())
    if renamed is None:
        return source, have.names
    return rows_sql(engine, source, have.names, pa.schema([*columns, *VERSION_COLUMNS]), renamed)


def _joined(engine: Engine, kind: str, rows: str, keys: Keys, *, exact: bool) -> str:
    """Return the rows that have one of the keys (`SEMI`), or those that have none (`ANTI`)."""
    if not len(keys):
        return rows if kind == "ANTI" else f"SELECT * FROM ({rows}) WHERE false"
    return f"SELECT c.* FROM ({rows}) c {kind} JOIN {engine.keep(gone_table(keys))} g ON {same_key(keys, with_exact=exact)}"
