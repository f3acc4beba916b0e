"""A landing in one call: what a pipeline's task and its driver do to a table's history."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millstream.lake.history import commit_records, write_records
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.lake.table_renames import Places
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema


def append_history(
    layout: LakeLayout, schema: TableSchema, batches: Sequence[pa.RecordBatch], n: Seq, *, places: Places | None = None
) -> TableCommit:
    """Append one table's records up to `n` to its history, in one commit. Arguments and errors as of the two steps."""
    return commit_records(layout, [write_records(layout, schema, batches, n, places=places)], n, places=places)
