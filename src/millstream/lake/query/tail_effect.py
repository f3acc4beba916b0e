"""The effect of a run of history on the rows before it, computed without reading the rows' values.

A query may want one row or one column of a tail that has ten. So only keys and the records' own
columns are read here, and the result names the records that *are* rows now. The engine that runs
the query reads their values as needed. Only rows that take columns from their past (moved, or with
unchanged large values) are built here, because DuckDB can't.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from millstream.lake.column_conversion import EXACT, conform
from millstream.lake.folded.accumulating import accumulated_by
from millstream.lake.folded.current_rules import plan_keyed, run_of
from millstream.lake.folded.unchanged_values import Lookup, materialize, past_rows
from millstream.lake.row_identity import Keys
from millstream.model.records import PARTITION_OID
from millstream.model.schema import TableSchema

SEQ: Final = "__seq"
Read = Callable[[Sequence[str], "pa.Array | None"], pa.Table]
"""Reads the run's records with some columns, as far as they have them: all records, or those of some `__seq`."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """Rows to insert, on top of the rows that are left."""

    winners: pa.Table
    """`__seq` and key columns of the records that are rows as they stand."""
    built: pa.Table
    """Rows that no single record holds whole: columns and `__exact`."""
    gone: Keys
    """Rows with these keys are removed from the earlier rows; of length 0 if there were none."""
    truncated: bool
    exact: bool
    """Whether any of these rows needs `__exact`."""
    left: tuple[int, ...] = ()
    """OIDs of partitions that left: earlier rows in them are removed."""


def overlay(read: Read, schema: TableSchema, columns: pa.Schema, lookup: Lookup, *, stood: bool) -> Overlay:
    """Return the effect of a keyed table's records.

    Args:
        read: reads them; fastest in order of `__seq`.
        schema: the table's schema at the end of the run: its key.
        columns: the row's columns, in the lake's types.
        lookup: rows that stood before, by key; called at most once.
        stood: whether any row stood before.

    Raises:
        LakeError: a record leaves a column unchanged and the lake holds no earlier row of it.
    """
    if schema.accumulating:
        return _accumulated(read, schema, columns, lookup, stood=stood)
    own = [name for name in columns.names if name in schema.key or name == PARTITION_OID.name]
    narrow = ["__op", SEQ, "__unchanged", EXACT.name, "__before", *own]
    run = run_of(read(narrow, None), schema, pa.schema([columns.field(name) for name in own]))
    plan = plan_keyed(run, gone=stood and not run.truncated)
    past = past_rows(plan, lookup)
    seqs = run.tail.column(SEQ).to_numpy()
    shape = pa.schema([*columns, EXACT])
    built = shape.empty_table()
    if plan.states:
        needed = np.unique(np.array([r for s in plan.states for r in (s.base, *s.filled.values()) if r >= 0], np.int64))
        places = {int(record): place for place, record in enumerate(needed)}
        wanted = pa.array(seqs[needed])
        rows = conform(read([SEQ, *columns.names, EXACT.name], wanted).sort_by(SEQ), shape)
        walked = [
            replace(
                state,
                base=places[state.base],
                filled={name: at if at < 0 else places[at] for name, at in state.filled.items()},
            )
            for state in plan.states
        ]
        built = materialize(rows, replace(plan, winners=plan.winners[:0], states=walked), past)
    texts = run.values.column(EXACT.name).take(pa.array(plan.winners))
    winning = run.values.select(list(schema.key)).take(pa.array(plan.winners))
    return Overlay(
        winners=winning.append_column(SEQ, pa.array(seqs[plan.winners])),
        built=built,
        gone=plan.gone if stood and not run.truncated else plan.gone.take(np.zeros(0, np.int64)),
        truncated=run.truncated,
        exact=texts.null_count < len(texts) or built.column(EXACT.name).null_count < built.num_rows,
        left=run.left.distinct,
    )


def _accumulated(read: Read, schema: TableSchema, columns: pa.Schema, lookup: Lookup, *, stood: bool) -> Overlay:
    """Return the effect of records that add to rows: no record holds its row whole, so all rows are built."""
    names = ["__op", SEQ, "__unchanged", EXACT.name, "__before", *columns.names]
    run = accumulated_by(run_of(read(names, None), schema, columns), lookup)
    plan = plan_keyed(run, gone=stood and not run.truncated)
    built = materialize(run.values, plan, None)
    nothing = run.values.select(list(schema.key)).slice(0, 0)
    return Overlay(
        winners=nothing.append_column(SEQ, pa.array([], pa.int64())),
        built=built,
        gone=plan.gone if stood and not run.truncated else plan.gone.take(np.zeros(0, np.int64)),
        truncated=run.truncated,
        exact=built.column(EXACT.name).null_count < built.num_rows,
    )
