"""Lake tables made by the lake's own functions, without a source: the records stand for captured ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.history import commit_records, write_records
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.records import INSTANT, record_schema
from millstream.model.schema import Column, TableSchema

ACCOUNTS = TableSchema(
    TableId(1),
    SchemaVersion(1),
    SourceId(1),
    "public",
    "accounts",
    (
        Column("id", pa.int64()),
        Column("customer", pa.int32()),
        Column("status", pa.string()),
        Column("total", pa.decimal128(12, 2)),
        Column("placed_at", INSTANT),
        Column("note", pa.string()),
    ),
    ("id",),
    ("id",),
)
ACCOUNTS_SHAPE = "6 columns (int8 key, int4, text, numeric(12,2), timestamptz, text of 20 B)"
APPEND_ROWS = 1_000_000
"""Rows of a large batch of a first load."""
_STATUSES = pa.array(["new", "paid", "packed", "shipped"])
_BEGIN_US = 1_767_225_600_000_000
Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class Lake:
    """One table's history and `current`, extended step by step."""

    folder: Path
    rows: int = 0
    n: Seq = Seq(0)
    layout: LakeLayout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = LakeLayout(str(self.folder), "bench", StreamId(uuid4()))

    def load(self, rows: int) -> None:
        """Append copied rows with keys 1 to `rows`, in large appends, then make the first fold and a cut."""
        for first in range(1, rows + 1, APPEND_ROWS):
            self.append("r", np.arange(first, min(first + APPEND_ROWS, rows + 1), dtype=np.int64))
        self.rows = rows
        self.fold()

    def append(
        self, op: str | Sequence[str], ids: Ids, *, cut: bool = False, at: datetime | None = None
    ) -> TableCommit:
        """Append a record a key to history, one commit; `at` is the time of the records and of the cut."""
        batch = records(op, ids, after=int(self.n))
        if at is not None:
            place = batch.schema.get_field_index("__commit_date")
            days = pa.repeat(pa.scalar(at.date(), pa.date32()), len(ids))
            batch = batch.set_column(place, batch.schema.field(place), days)
        self.n = Seq(self.n + len(ids))
        written = write_records(self.layout, ACCOUNTS, [batch], self.n)
        commit = commit_records(self.layout, [written], self.n)
        if cut:
            moment = at or datetime.now(UTC)
            commit_cut(self.layout, self.n, [commit], committed_at=moment, commit_ts_max=at)
        return commit

    def fold(self) -> float:
        """Fold to the newest record and commit a cut; return the seconds of the fold alone."""
        began_at = time.perf_counter()
        folded = fold_table(self.layout, ACCOUNTS, self.n)
        took_s = time.perf_counter() - began_at
        path = self.layout.table_path("history", ACCOUNTS)
        from deltalake import DeltaTable

        history = TableCommit(
            ACCOUNTS.table_id, folded.name, folded.folder, "history", DeltaTable(path).version(), 0, self.n
        )
        commit_cut(self.layout, self.n, [history, folded], committed_at=datetime.now(UTC))
        return took_s

    @property
    def current(self) -> str:
        """Return the folder of `current`."""
        return self.layout.table_path("current", ACCOUNTS)


def records(op: str | Sequence[str], ids: Ids, *, after: int) -> pa.RecordBatch:
    """Return a record a key, as the log's readers get them; values follow from key and number."""
    count = len(ids)
    seqs = np.arange(after + 1, after + 1 + count, dtype=np.int64)
    copied = op == "r"
    moment = pa.repeat(pa.scalar(_BEGIN_US, pa.int64()), count).cast(INSTANT)
    mixed = (ids * 2_654_435_761 + seqs) & 0x7FFF_FFFF_FFFF
    values: dict[str, Any] = {
        "__op": pa.repeat(op, count) if isinstance(op, str) else pa.array(op),
        "__seq": pa.array(seqs),
        "__source": pa.repeat(pa.scalar(1, pa.int32()), count),
        "__commit_lsn": pa.array(seqs * 100),
        "__commit_index": pa.nulls(count, pa.int64()) if copied else pa.array(np.zeros(count, np.int64)),
        "__commit_ts": pa.nulls(count, INSTANT) if copied else moment,
        "__commit_date": moment.cast(pa.date32()),
        "__xid": pa.nulls(count, pa.int64()) if copied else pa.array(seqs),
        "id": pa.array(ids),
        "customer": pa.array((mixed % 100_000).astype(np.int32)),
        "status": _STATUSES.take(pa.array(mixed % 4)),
        "total": decimals(mixed % 1_000_000),
        "placed_at": pa.array(_BEGIN_US + ids * 1_000_000).cast(INSTANT),
        "note": pc.utf8_lpad(pa.array(mixed).cast(pa.string()), 20, "0"),
    }
    schema = record_schema(ACCOUNTS)
    return pa.RecordBatch.from_arrays(
        [values[f.name] if f.name in values else pa.nulls(count, f.type) for f in schema], schema=schema
    )


def decimals(cents: Ids) -> pa.Array:
    """Return numeric(12,2) values of whole cents."""
    words = np.stack([cents, cents >> 63], axis=1)
    return pa.Array.from_buffers(pa.decimal128(12, 2), len(cents), [None, pa.py_buffer(words.tobytes())])


def uniform(rows: int, count: int, *, seed: int) -> Ids:
    """Return different keys of a table, anywhere in it, in no order."""
    return np.random.default_rng(seed).choice(rows, count, replace=False).astype(np.int64) + 1


def clustered(rows: int, count: int, *, seed: int) -> Ids:
    """Return the keys of one stretch of a table."""
    first = int(np.random.default_rng(seed).integers(1, rows - count + 2))
    return np.arange(first, first + count, dtype=np.int64)
