"""Building `current` the first time, from all of a table's history, in bounded memory.

A fold holds its records whole; here there may be all rows that the source ever had. So keys and numbers are read first and
folded to *which* records win; then history is read once more, in batches, and the winners go straight to the writer. Only
rows whose unchanged columns lie in other records are held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.lake.delta import OpenTable
from millstream.lake.fold import EXACT, Plan, materialize, past_rows, plan_keyed, run_of
from millstream.lake.history import read_history, scan_history
from millstream.lake.types import conform
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

if TYPE_CHECKING:
    import pyarrow.dataset as ds

Seqs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Built:
    """The rows of a table that is built: how many, whether any needs `__exact`, and they themselves, once."""

    count: int
    exact: bool
    rows: Iterator[pa.Table]
    """`columns` and `__exact`."""


def build_rows(history: OpenTable, schema: TableSchema, columns: pa.Schema, upto: Seq) -> Built:
    """The rows that a keyed table has at `upto`, from its history alone.

    Raises:
        LakeError: a record leaves a column unchanged and history holds no earlier row of it.
    """
    narrow = ["__op", "__seq", "__unchanged", EXACT.name, "__before", *schema.key]
    tail = read_history(history, after=Seq(0), upto=upto, columns=narrow, table=schema)
    run = run_of(tail, schema, pa.schema([columns.field(name) for name in schema.key]))
    del tail
    plan = plan_keyed(run, gone=False)
    past_rows(plan, lambda _keys: pa.schema([*columns, EXACT]).empty_table())
    seqs = run.tail.column("__seq").to_numpy()
    # What the walked rows need, as records, as numbers, and as places among these.
    needed = np.unique(np.array([r for s in plan.states for r in (s.base, *s.filled.values())], np.int64))
    places = {int(record): place for place, record in enumerate(needed)}
    texts = run.values.column(EXACT.name).take(pa.array(np.concatenate([plan.winners, needed])))
    walked = replace(plan, winners=plan.winners[:0], states=[state.among(places) for state in plan.states])
    names = ["__seq", *columns.names, EXACT.name]
    scan = scan_history(history, after=Seq(0), upto=upto, columns=names, table=schema)
    return Built(
        count=len(plan.winners) + len(plan.states),
        exact=texts.null_count < len(texts),
        rows=_rows(scan, np.sort(seqs[plan.winners]), seqs[needed], walked, pa.schema([*columns, EXACT])),
    )


def _rows(scan: ds.Scanner, winners: Seqs, needed: Seqs, walked: Plan, shape: pa.Schema) -> Iterator[pa.Table]:
    """The winners as they are scanned, then the walked rows; `winners` and `needed` ascend."""
    held: list[pa.Table] = []
    for batch in scan.to_batches():
        seqs = batch.column("__seq").to_numpy()
        some = pa.Table.from_batches([batch])
        if len(needed):
            held.append(some.filter(pa.array(_among(seqs, needed))))
        yield conform(some.filter(pa.array(_among(seqs, winners))), shape)
    if held:
        yield materialize(conform(pa.concat_tables(held).sort_by("__seq"), shape), walked, None)


def _among(seqs: Seqs, wanted: Seqs) -> npt.NDArray[np.bool_]:
    """Which of some numbers stand in a sorted array."""
    if not len(wanted):
        return np.zeros(len(seqs), bool)
    return np.asarray(wanted[np.minimum(np.searchsorted(wanted, seqs), len(wanted) - 1)] == seqs)
