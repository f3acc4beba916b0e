"""Rows from before a column was added with a constant default have it, in every view of them; their records stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from tests.lake.landing import append_history

from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.folded.scd2_table import fold_into_versions, rebuild_versions
from millstream.lake.layout import LakeLayout
from millstream.lake.query.query_session import LakeSession
from millstream.lake.schema_history import ERAS_MAX, Eras
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, ReplicaIdentity, TableSchema

Records = Callable[..., pa.RecordBatch]
KEY = Column("id", pa.int64(), number=1)
GRADE = Column("grade", pa.int32(), number=2, filled="5")
UNTIL = Column("until", pa.date32(), number=3, filled="infinity")


def schema(version: int, *columns: Column, keyed: bool = True) -> TableSchema:
    return TableSchema(
        TableId(3),
        SchemaVersion(version),
        SourceId(1),
        "public",
        "t",
        columns,
        identity=("id",) if keyed else tuple(column.name for column in columns),
        key=("id",) if keyed else (),
        replica_identity=ReplicaIdentity.DEFAULT if keyed else ReplicaIdentity.FULL,
    )


def moment(n: int) -> dict[str, Any]:
    return {"__commit_lsn": n, "__commit_index": 0, "__commit_ts": datetime(2026, 1, 1, 0, 0, n, tzinfo=UTC)}


class Lake:
    def __init__(self, folder: Path, records: Records) -> None:
        self.layout = LakeLayout(str(folder / "lake"), "shop", StreamId(UUID(int=42)))
        self._records = records

    def land(self, table: TableSchema, *rows: tuple[str, int, dict[str, Any]], fold: bool) -> None:
        n = Seq(max(row[1] for row in rows))
        batch = self._records(table, *((op, at, {**moment(at), **values}) for op, at, values in rows))
        table = table.defined()
        done = [append_history(self.layout, table, [batch], n)]
        if fold:
            done.append(fold_table(self.layout, table, n))
            done += [fold_into_versions(self.layout, table, n).commit] if table.key else []
        commit_cut(self.layout, n, done, committed_at=datetime.now(UTC))

    def rows(self, of: str = 'public."t"', as_of: int | None = None, order: str = "id") -> list[dict[str, Any]]:
        with LakeSession(self.layout, as_of=None if as_of is None else Seq(as_of)) as session:
            return session.query(f"SELECT * FROM {of} ORDER BY {order}").to_pylist()


@pytest.mark.parametrize("folds", [(True, True), (True, False), (False, False)])
def test_an_idle_table_has_the_default_once_its_definition_landed(
    tmp_path: Path, records: Records, folds: tuple[bool, bool]
) -> None:
    lake = Lake(tmp_path, records)
    old, new = schema(1, KEY), schema(2, KEY, GRADE, UNTIL)
    lake.land(old, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}), ("u", 3, {"id": 2}), fold=folds[0])
    lake.land(new.as_definition(), ("s", 4, {}), fold=folds[1])
    filled = {"grade": 5, "until": None, "__exact": [("until", "infinity")]}
    assert lake.rows() == [{"id": 1, **filled}, {"id": 2, **filled}]
    assert lake.rows(as_of=3) == [{"id": 1}, {"id": 2}]
    assert {row.get("grade") for row in lake.rows('history."public.t"')} == {None}
    if folds[0]:
        assert [row["grade"] for row in lake.rows('scd2."public.t"')] == [5, 5]
    late = (
        ("u", 5, {"id": 1, "grade": None, "until": None}),
        ("c", 6, {"id": 3, "grade": 7}),
    )
    lake.land(new, *late, fold=folds[1])
    assert [(row["id"], row["grade"], row["__exact"]) for row in lake.rows()] == [
        (1, None, None),
        (2, 5, [("until", "infinity")]),
        (3, 7, None),
    ]


def test_versions_have_it_whether_they_are_folded_in_steps_or_rebuilt_also_once_its_type_is_wider(
    tmp_path: Path, records: Records
) -> None:
    lake = Lake(tmp_path, records)
    old, new = schema(1, KEY), schema(2, KEY, GRADE)
    lake.land(old, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}), ("d", 3, {"id": 2}), fold=True)
    lake.land(new, ("u", 4, {"id": 1, "grade": 6}), fold=True)
    wide = schema(3, KEY, replace(GRADE, arrow=pa.int64(), filled=None))
    copy: dict[str, Any] = {"__commit_index": None}
    copied = [("r", 6, {"id": 1, "grade": 6, **copy}), ("r", 7, {"id": 4, "grade": 5, **copy})]
    lake.land(wide, ("t", 5, copy), *copied, fold=True)

    def versions() -> list[tuple[Any, ...]]:
        return [(row["id"], row["grade"], row["is_current"]) for row in lake.rows('scd2."public.t"', order="id, __seq")]

    found = versions()
    assert found == [(1, 5, False), (1, 6, True), (2, 5, False), (4, 5, True)]
    rebuild_versions(lake.layout, wide, Seq(7))
    assert versions() == found


def test_rows_without_a_key_are_found_by_their_default(tmp_path: Path, records: Records) -> None:
    lake = Lake(tmp_path, records)
    old, new = schema(1, KEY, keyed=False), schema(2, KEY, GRADE, keyed=False)
    lake.land(old, ("c", 1, {"id": 1}), ("c", 2, {"id": 1}), fold=True)
    lake.land(new, ("d", 3, {"id": 1, "grade": 5}), fold=False)
    assert lake.rows() == [{"id": 1, "grade": 5}]
    lake.land(new, ("u", 4, {"id": 1, "grade": 8, "__before": [("id", "1"), ("grade", "5")]}), fold=True)
    assert lake.rows() == [{"id": 1, "grade": 8}]


def test_the_era_that_begins_with_the_column_is_kept_beyond_the_bound() -> None:
    told = [(Seq(1), schema(1, KEY)), (Seq(2), schema(2, KEY, GRADE))]
    told += [(Seq(n), schema(n, KEY, GRADE, Column(f"c{n}", pa.string(), number=n))) for n in range(3, ERAS_MAX + 20)]
    assert Eras("public.t", tuple(told)).bounded().told[:2] == tuple(told[:2])
