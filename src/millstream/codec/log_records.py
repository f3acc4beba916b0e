"""From a frame's rows and directory to the records that readers see.

Everything here is whole columns: a frame may hold ten thousand one-row transactions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import CorruptFrame
from millstream.model.operations import OperationKind
from millstream.model.records import Op, record_schema
from millstream.model.schema import TableSchema

_LETTERS: Final = pa.array([op.letter for op in Op])
_LETTER_OF_CODE: Final = np.full(256, -1, dtype=np.int64)
_TRUNCATE: Final = list(Op).index(Op.TRUNCATE)
_LETTER_OF_CODE[[int(op) for op in Op]] = range(len(Op))


def records_of(
    table: TableSchema,
    rows: pa.RecordBatch,
    operations: pa.RecordBatch,
    batches: pa.RecordBatch,
    *,
    offsets: bool = False,
    moments: bool = False,
) -> pa.RecordBatch:
    """One part's log rows as records.

    Args:
        table: the schema under which the rows lie.
        rows: `log_row_schema(table)`, in the order of the directory's entries for this table and version.
        operations: the frame's operations.
        batches: the frame's batch entries, of all tables.
        offsets: put `__offset` first.
        moments: give what was copied the moment at which it was read as `__commit_ts`, instead of null. A copy's marker (`t`)
            has none: its time is of another clock than the source's.

    Raises:
        CorruptFrame: directory and rows disagree.
    """
    mine = (batches.column("table_id").to_numpy() == table.table_id) & (
        batches.column("schema_version").to_numpy() == table.version
    )
    counts = batches.column("count").to_numpy()[mine]
    if int(counts.sum()) != rows.num_rows:
        raise CorruptFrame(f"the directory and the rows of table {table.table_id} disagree")
    of_row = np.repeat(batches.column("operation").to_numpy()[mine].astype(np.int64), counts)
    seqs = _spread(batches.column("first_seq").to_numpy()[mine], counts)
    letters = _LETTER_OF_CODE[rows.column("__op").to_numpy()]
    if len(letters) and int(letters.min()) < 0:
        raise CorruptFrame(f"a record of table {table.table_id} has an unknown op")

    at = pa.array(of_row)
    kind = operations.column("kind").to_numpy()[of_row]
    copied = kind == OperationKind.COPY_CHUNK
    moment = pc.take(operations.column("commit_ts"), at)
    columns: dict[str, pa.Array] = {
        "__op": pc.take(_LETTERS, pa.array(letters)),
        "__seq": pa.array(seqs, type=pa.int64()),
        "__source": pc.take(operations.column("source"), at),
        "__commit_lsn": pc.take(operations.column("commit_lsn"), at),
        "__commit_index": _null_where(rows.column("__index"), copied | (kind == OperationKind.MESSAGE)),
        "__commit_ts": _null_where(moment, copied & (letters == _TRUNCATE) if moments else copied),
        "__commit_date": pc.cast(moment, pa.date32()),
        "__xid": pc.take(operations.column("xid"), at),
    }
    schema = record_schema(table, offsets=offsets)
    return pa.record_batch(
        [columns.get(name) if name in columns else rows.column(name) for name in schema.names], schema
    )


def _spread(firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`first, first + 1, …` for each entry, one behind the other."""
    total = int(counts.sum())
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(total, dtype=np.int64)


def _null_where(values: pa.Array, mask: npt.NDArray[np.bool_]) -> pa.Array:
    if not mask.any():
        return values
    return pc.if_else(pa.array(mask), pa.scalar(None, values.type), values)
