"""Keys that are hard to assign to leaves, and commits in between: each case once lost, doubled or missed a row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from tests.lake.landing import append_history

from millstream.errors import LakeConflict
from millstream.lake.commit_cuts import commit_cut, first_cut
from millstream.lake.delta.commits import DeltaHandle
from millstream.lake.file_statistics import bound_of
from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldSizes, fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.records import record_schema
from millstream.model.schema import Column, TableSchema

BUILT = FoldSizes(build_rows_min=0, build_bytes=5_000)
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
Record = tuple[str, dict[str, Any]]


def keyed(kind: pa.DataType, *, name: str = "k") -> TableSchema:
    columns = (Column(name, kind), Column("v", pa.int64()), Column("big", pa.string()))
    return TableSchema(TableId(4), SchemaVersion(1), SourceId(1), "public", "t", columns, (name,), (name,))


@pytest.fixture
def lake(tmp_path: Path) -> LakeLayout:
    return LakeLayout(str(tmp_path), "s", StreamId(UUID(int=5)))


def append(lake: LakeLayout, schema: TableSchema, first: int, records: Sequence[Record]) -> Seq:
    shape = record_schema(schema)
    rows = [
        {
            **dict.fromkeys(shape.names), "__op": op, "__seq": first + i, "__source": 1, "__commit_lsn": first,
            "__commit_index": i, "__commit_ts": MOMENT, "__commit_date": date(2026, 1, 1), **row,
        }
        for i, (op, row) in enumerate(records)
    ]  # fmt: skip
    n = Seq(first + len(rows) - 1)
    append_history(lake, schema, [pa.RecordBatch.from_pylist(rows, schema=shape)], n)
    return n


def step(
    lake: LakeLayout, schema: TableSchema, first: int, *records: Record, sizes: FoldSizes = DEFAULT_SIZES
) -> list[dict[str, Any]]:
    """Append and fold; return the rows of `current`."""
    fold_table(lake, schema, append(lake, schema, first, records), sizes=sizes)
    return sorted(DeltaTable(lake.table_path("current", schema)).to_pyarrow_table().to_pylist(), key=lambda r: r["v"])


@pytest.mark.parametrize("key", ["𠮷野家", "\U0010fffe", "ü" * 300, "x" * 256 + "\U0010ffff" + "z", "\U0010ffff" * 300])
def test_texts_of_every_plane_and_length_are_found_again(lake: LakeLayout, key: str):
    schema = keyed(pa.string())
    step(lake, schema, 1, ("c", {"k": "a", "v": 0}), ("c", {"k": key, "v": 1, "big": "kept"}))
    rows = step(lake, schema, 10, ("u", {"k": key, "v": 2, "__unchanged": ["big"]}))
    assert [(row["k"], row["v"], row["big"]) for row in rows] == [("a", 0, None), (key, 2, "kept")]
    files = DeltaTable(lake.table_path("current", schema)).to_pyarrow_dataset()
    assert files.count_rows(filter=pc.field("k") == key) == 1
    assert [row["k"] for row in step(lake, schema, 20, ("d", {"k": key}))] == ["a"]
    assert key.encode() <= str(bound_of(key, greatest=True)).encode()


@pytest.mark.parametrize("sizes", [DEFAULT_SIZES, BUILT], ids=["in one read", "in parts"])
def test_a_float_key_keeps_its_nan_and_its_zero(lake: LakeLayout, sizes: FoldSizes):
    schema = keyed(pa.float64())
    many: list[Record] = [("c", {"k": float(i), "v": i}) for i in range(1, 400)]
    odd: list[Record] = [
        ("c", {"k": float("nan"), "v": -1}), ("c", {"k": 0.0, "v": -3}), ("u", {"k": 1e9, "v": -4, "__before": [("k", "-0")]}),
        ("c", {"k": 0.0, "v": -2}),
    ]  # fmt: skip
    rows = step(lake, schema, 1, *many, *odd, sizes=sizes)
    assert [row["v"] for row in rows] == [-4, -2, -1, *range(1, 400)]


def test_a_key_that_goes_from_zero_to_minus_zero_is_one_row_of_one_open_version(lake: LakeLayout):
    schema = keyed(pa.float64())
    step(lake, schema, 1, ("c", {"k": 0.0, "v": 1, "big": "b"}))
    fold_into_versions(lake, schema, Seq(1))
    (row,) = step(lake, schema, 2, ("u", {"k": -0.0, "v": 2, "__unchanged": ["big"]}))
    assert (row["v"], row["big"]) == (2, "b")
    fold_into_versions(lake, schema, Seq(2))
    versions = DeltaTable(lake.table_path("scd2", schema)).to_pyarrow_table().to_pylist()
    assert [v["v"] for v in versions if v["is_current"]] == [2]
    assert [v["v"] for v in versions if not v["is_current"]] == [1]


def test_a_key_whose_whole_numbers_became_text_is_found_again(lake: LakeLayout):
    schema = keyed(pa.int64())
    step(lake, schema, 1, *(("c", {"k": i, "v": i, "big": "x"}) for i in range(5, 31)))
    text = replace(schema, version=SchemaVersion(2), columns=(Column("k", pa.string()), *schema.columns[1:]))
    rows = step(lake, text, 100, ("u", {"k": "10", "v": -1, "__unchanged": ["big"]}), ("d", {"k": "9"}))
    assert [row["k"] for row in rows] == ["10", *(str(i) for i in range(5, 31) if i not in {9, 10})]
    assert rows[0]["big"] == "x"


@pytest.mark.parametrize("sizes", [DEFAULT_SIZES, BUILT], ids=["in one read", "in parts"])
def test_a_key_of_lists_has_rows_and_versions(lake: LakeLayout, sizes: FoldSizes):
    schema = keyed(pa.list_(pa.int64()))
    step(lake, schema, 1, *(("c", {"k": [i, None], "v": i, "big": "kept"}) for i in range(400)), sizes=sizes)
    fold_into_versions(lake, schema, Seq(400), sizes=sizes)
    changes: list[Record] = [("u", {"k": [7, None], "v": 700, "__unchanged": ["big"]}), ("d", {"k": [8, None]})]
    rows = step(lake, schema, 1000, *changes, sizes=sizes)
    assert [(row["k"], row["big"]) for row in rows if row["v"] in {8, 700}] == [([7, None], "kept")]
    fold_into_versions(lake, schema, Seq(1001), sizes=sizes)
    versions = DeltaTable(lake.table_path("scd2", schema)).to_pyarrow_table().to_pylist()
    assert sorted(version["v"] for version in versions if not version["is_current"]) == [7, 8]
    assert sorted(version["v"] for version in versions if version["is_current"]) == [row["v"] for row in rows]


def test_a_comma_in_a_keys_name_harms_nothing(lake: LakeLayout):
    schema = keyed(pa.int64(), name="a,b")
    step(lake, schema, 1, ("c", {"a,b": 1, "v": 1}), ("c", {"a,b": 2, "v": 2}))
    fold_into_versions(lake, schema, Seq(2))
    assert [row["v"] for row in step(lake, schema, 10, ("u", {"a,b": 1, "v": 5}))] == [2, 5]


def test_a_compaction_that_comes_between_a_columns_widening_doubles_nothing(
    lake: LakeLayout, monkeypatch: pytest.MonkeyPatch
):
    schema = keyed(pa.int64())
    narrow = replace(schema, columns=(Column("k", pa.int32()), *schema.columns[1:]))
    for first in range(1, 60, 10):
        append(lake, narrow, first, [("c", {"k": first + i, "v": 0}) for i in range(10)])
    wide = replace(schema, version=SchemaVersion(2))
    later: list[Record] = [("c", {"k": 61, "v": 0})]
    real = DeltaHandle.swap

    def meanwhile(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(DeltaHandle, "swap", real)
        maintain_table(lake, "history", narrow, now_ms=time.time_ns() // 10**6, rules=MaintenanceRules(compact_files=2))
        real(*arguments, **named)

    monkeypatch.setattr(DeltaHandle, "swap", meanwhile)
    with pytest.raises(LakeConflict):
        append(lake, wide, 61, later)
    append(lake, wide, 61, later)
    found = DeltaTable(lake.table_path("history", schema)).to_pyarrow_table(columns=["__seq"]).column(0).to_pylist()
    assert sorted(found) == list(range(1, 62))


def test_the_first_of_several_cuts_at_one_position_is_the_first(lake: LakeLayout, orders: TableSchema):
    from millstream.lake.layout import TableCommit

    for view, n in (("history", 5), ("current", 5), ("history", 9)):
        commit = TableCommit(orders.table_id, "public.orders", "public.orders", view, n, 0, Seq(n))  # type: ignore[arg-type]
        commit_cut(lake, Seq(n), [commit], committed_at=MOMENT)
    cut = first_cut(lake)
    assert cut is not None
    assert cut.number == 1
