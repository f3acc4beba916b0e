"""The net changes of rows between two positions: one line a key, for consumers of the latest state (`read_latest`).

Several changes of a row are one: the last record wins. A delete wins over records before it and loses to records
after it. No lake table is read or written: the rules are those of the fold of `current` (`lake.folded.current_table`), and
values that a run of records doesn't have are named as unchanged. A partition that left is named by its OID, since the
keys of its earlier rows aren't known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UsageError
from millstream.lake.column_conversion import EXACT, conform, lake_columns, same_type, to_lake, to_text
from millstream.lake.filled_columns import filled_rows
from millstream.lake.folded.accumulating import accumulated
from millstream.lake.folded.current_rules import plan_keyed, run_of
from millstream.lake.folded.unchanged_values import RowSources, materialize
from millstream.lake.history import under_the_newest
from millstream.lake.new_and_wider_columns import union_schema, widest
from millstream.lake.row_identity import Keys, key_codes
from millstream.model.column_renames import filled_in, names_in, under_names
from millstream.model.records import PARTITION_OID, RECORD_PREFIX, TEXT_BY_COLUMN, Op
from millstream.model.schema import TableSchema

LATEST_PREFIX: Final = (
    pa.field("__op", pa.string(), nullable=False),
    pa.field("__unchanged", pa.list_(pa.string())),
    EXACT,
    pa.field("__before", TEXT_BY_COLUMN),
)
"""`__op` is `u` (the row exists, with these values) or `d` (it doesn't). Columns named in `__unchanged` are as in the
earlier row of this key, or of the key in `__before` if the row has moved."""


@dataclass(frozen=True, slots=True)
class LatestRows:
    """The changes of a table's rows in a stretch of the log."""

    schema: TableSchema
    """The table's newest schema in the stretch."""
    emptied: bool
    """Whether all earlier rows are gone, so that they must be forgotten first."""
    rows: pa.Table
    """`LATEST_PREFIX`, in a partitioned table `__partition_oid`, then the table's columns: first deleted rows, then
    existing ones; each key once."""
    left: tuple[int, ...] = ()
    """OIDs of partitions that left, whose earlier rows must be forgotten first."""


def latest_rows(schema: TableSchema, batches: Sequence[pa.RecordBatch], before: pa.Table | None = None) -> LatestRows:
    """Fold the records of one table, in `record_schema`, of any of its versions.

    Args:
        schema: of the last of them.
        batches: in order.
        before: if a column accumulates, the rows before the first record, as `LatestRows.rows` has them; at least
            those with one of the records' keys. None: there are none.

    Raises:
        UsageError: the table has no key that identifies rows.
        InvalidValue: a counter's total is beyond its type.
    """
    if schema.source == 0:
        schema, batches = under_the_newest(schema, batches, None)
    if not schema.key:
        raise UsageError(
            f"the rows of {schema.full_name} have no key",
            hint="Read the table's records instead; the documentation describes their effect on equal rows.",
        )
    versions = [TableSchema.from_arrow(batch.schema) for batch in batches]
    mixed = [at for at, v in enumerate(versions) if not v.has_key_of(schema) or _has_other_types(v, schema)]
    if mixed:
        # Records with another key, or with a column's values in another type, are copied again behind it.
        batches, versions = batches[mixed[-1] + 1 :], versions[mixed[-1] + 1 :]
    columns = pa.schema([*([PARTITION_OID] if schema.partitioned else []), *lake_columns(schema)])
    tables = [
        filled_rows(under_names(to_lake(version, batch), names), names, columns)
        for version, batch in zip(versions, batches, strict=True)
        for names in (filled_in(version, schema),)
    ]
    union = pa.schema([*RECORD_PREFIX, *columns])
    for table in tables:
        union = union_schema(schema.full_name, union, table.schema, narrows=True)
    union = union_schema(schema.full_name, union, columns)
    run = run_of(pa.concat_tables([conform(table, union) for table in tables]), schema, columns)
    run = accumulated(run, run.values.slice(0, 0) if before is None else before)
    plan = plan_keyed(run)
    past = None if plan.asked is None else _unknown(plan.asked, run.values.schema)
    there = materialize(run.values, plan, past)
    put, gone = key_codes([Keys.of(there, schema.key), plan.gone])
    went = plan.gone.take(np.flatnonzero(~np.isin(gone, put)))
    rows = pa.concat_tables([_went(went, columns), _there(there, plan, columns)])
    return LatestRows(schema, run.truncated or bool(mixed), rows, run.left.distinct)


def _has_other_types(version: TableSchema, schema: TableSchema) -> bool:
    """Return whether a version's values don't fit the types that columns have in a later one.

    Either a column got another type, or records without the columns' numbers have another column under its name.
    """
    names = names_in(version, schema)
    had = {column.name: column for column in version.columns}
    for now in schema.columns:
        then = had.get(names.get(now.name, now.name) or "")
        if then is None or then.pg is None or now.pg is None or then.pg.oid == now.pg.oid:
            continue
        wide = widest(then.arrow, now.arrow)
        if wide is None or not same_type(wide, now.arrow):
            return True
    return False


def as_latest(rows: pa.Table) -> pa.Table:
    """Return rows of a table as `LatestRows.rows` has rows that exist."""
    count = rows.num_rows
    nothing = (pa.nulls(count, field.type) for field in LATEST_PREFIX[1:])
    return pa.table([_ops(Op.UPDATE, count), *nothing, *rows.columns], schema=pa.schema([*LATEST_PREFIX, *rows.schema]))


def with_latest(before: pa.Table | None, latest: LatestRows) -> pa.Table:
    """Return the rows of a table behind a stretch, from those before it; both as `LatestRows.rows` has them."""
    if before is None:
        return latest.rows
    before = conform(before, latest.rows.schema)
    key = latest.schema.key
    have, changed = key_codes([Keys.of(before, key), Keys.of(latest.rows, key)])
    return pa.concat_tables([before.filter(pa.array(~np.isin(have, changed))), latest.rows])


def _unknown(asked: Keys, schema: pa.Schema) -> pa.Table:
    """Return rows of only their keys, in place of those that a `current` would have."""
    keys = asked.with_texts()
    columns = [
        keys.column(field.name) if field.name in keys.column_names else pa.nulls(len(asked), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _went(keys: Keys, columns: pa.Schema) -> pa.Table:
    told = keys.with_texts()
    own = [
        told.column(field.name) if field.name in keys.names else pa.nulls(len(keys), field.type) for field in columns
    ]
    nothing = pa.nulls(len(keys), pa.list_(pa.string()))
    prefix = [_ops(Op.DELETE, len(keys)), nothing, told.column(EXACT.name), pa.nulls(len(keys), TEXT_BY_COLUMN)]
    return pa.table([*prefix, *own], schema=pa.schema([*LATEST_PREFIX, *columns]))


def _there(rows: pa.Table, plan: RowSources, columns: pa.Schema) -> pa.Table:
    """Return the rows that exist, naming the values that no record has."""
    unchanged: list[list[str] | None] = [None] * len(plan.winners)
    before: list[dict[str, Any] | None] = [None] * len(plan.winners)
    asked = [] if plan.asked is None else _key_texts(plan.asked)
    own = [] if plan.asked is None else _key_texts(Keys.of(rows, plan.asked.names))
    for place, state in enumerate(plan.states, len(plan.winners)):
        lacking = {name: -1 - at for name, at in state.filled.items() if at < 0}
        origin = asked[next(iter(lacking.values()))] if lacking else None
        unchanged.append(sorted(lacking) or None)
        before.append(None if origin is None or origin == own[place] else origin)
    prefix = [
        _ops(Op.UPDATE, rows.num_rows),
        pa.array(unchanged, pa.list_(pa.string())),
        rows.column(EXACT.name),
        pa.array([None if key is None else list(key.items()) for key in before], TEXT_BY_COLUMN),
    ]
    return pa.table(
        [*prefix, *(rows.column(name) for name in columns.names)], schema=pa.schema([*LATEST_PREFIX, *columns])
    )


def _key_texts(keys: Keys) -> list[dict[str, str | None]]:
    """Return each key as PostgreSQL's texts by column."""
    texts = [to_text(column) for column in keys.columns]
    told = [text if exact is None else pc.coalesce(exact, text) for text, exact in zip(texts, keys.exact, strict=True)]
    return [
        dict(zip(keys.names, key, strict=True)) for key in zip(*(column.to_pylist() for column in told), strict=True)
    ]


def _ops(op: Op, count: int) -> pa.Array:
    return pa.array([op.letter] * count, pa.string())
