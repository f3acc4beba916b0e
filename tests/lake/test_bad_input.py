"""Other programs' changes to the lake's folders are reported for that table alone; nothing is lost or doubled."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.lake.landing import append_history

from millstream.errors import LakeError, LakeFilesGone, LakeTableForeign, LakeUnavailable
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.layout import LakeLayout
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.testing.errors import coded

Records = Callable[..., pa.RecordBatch]


def land(layout: LakeLayout, schema: TableSchema, records: Records, *numbers: int) -> None:
    """Land one batch of `c` records with these ids, and a cut; don't fold."""
    batch = records(schema, *(("c", n, {"id": n, "note": "x" * 300}) for n in numbers))
    n = Seq(numbers[-1])
    commit_cut(layout, n, [append_history(layout, schema, [batch], n)], committed_at=datetime.now(UTC))


def ids(layout: LakeLayout, schema: TableSchema) -> list[int]:
    table = DeltaTable(layout.table_path("current", schema)).to_pyarrow_table(columns=["id"])
    return sorted(table.column("id").to_pylist())


def test_a_deleted_current_is_folded_again_from_history(layout: LakeLayout, orders: TableSchema, records: Records):
    land(layout, orders, records, 1, 2)
    fold_table(layout, orders, Seq(2))
    shutil.rmtree(layout.table_path("current", orders))
    land(layout, orders, records, 3)
    fold_table(layout, orders, Seq(3))
    assert ids(layout, orders) == [1, 2, 3]


def test_a_current_vacuumed_to_nothing_is_named_and_waits(layout: LakeLayout, orders: TableSchema, records: Records):
    land(layout, orders, records, 1, 2)
    fold_table(layout, orders, Seq(2))
    for path in Path(layout.table_path("current", orders)).glob("*.parquet"):
        path.unlink()
    land(layout, orders, records, 3)
    with pytest.raises(LakeFilesGone, match=r"public\.orders is gone") as caught:
        fold_table(layout, orders, Seq(3))
    assert "pipeline rebuild" in caught.value.hint
    assert DeltaTable(layout.table_path("history", orders)).to_pyarrow_table().num_rows == 3


@pytest.mark.parametrize("emptied", [False, True], ids=["deleted", "an empty table in its place"])
def test_a_deleted_history_is_not_begun_again_with_a_gap(
    layout: LakeLayout, orders: TableSchema, records: Records, *, emptied: bool
):
    land(layout, orders, records, 1, 2)
    path = Path(layout.table_path("history", orders))
    kept = path.with_name("kept")
    path.rename(kept)
    if emptied:
        kept_schema = DeltaTable(str(kept)).schema().to_arrow()
        DeltaTable.create(
            str(path), kept_schema, configuration={"millstream.stream": str(layout.stream_id)},
            raise_if_key_not_exists=False,
        )  # fmt: skip
    with pytest.raises(LakeError, check=coded("lake_history_lost", "lake_table_foreign")) as caught:
        land(layout, orders, records, 3)
    if not emptied:
        assert caught.value.details["table"] == "public.orders"
        assert not path.exists(), "where it stood, the folder can be put back"
    shutil.rmtree(path, ignore_errors=True)
    kept.rename(path)
    land(layout, orders, records, 3)
    assert DeltaTable(str(path)).to_pyarrow_table().num_rows == 3


def test_somebody_elses_rows_stop_the_table_before_anything_is_built_on_them(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    land(layout, orders, records, 1, 2)
    fold_table(layout, orders, Seq(2))
    path = layout.table_path("current", orders)
    write_deltalake(path, DeltaTable(path).to_pyarrow_table().slice(0, 1), mode="append")
    land(layout, orders, records, 3)
    with pytest.raises(LakeTableForeign) as caught:
        fold_table(layout, orders, Seq(3))
    assert caught.value.details["path"] == path
    assert ids(layout, orders) == [1, 1, 2], "what they wrote is theirs to judge"


def test_two_streams_never_share_a_table(layout: LakeLayout, orders: TableSchema, records: Records):
    from dataclasses import replace
    from uuid import UUID

    from millstream.model.ids import StreamId

    land(layout, orders, records, 1, 2)
    other = replace(layout, stream_id=StreamId(UUID(int=9)))
    with pytest.raises(LakeTableForeign, match="made"):
        append_history(other, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    assert DeltaTable(layout.table_path("history", orders)).to_pyarrow_table().num_rows == 2


FOLDER_WITH_A_FULL_DISK = """
import pickle, resource, signal, sys
from millstream.errors import LakeError
from millstream.lake.folded.current_table import fold_table
layout, schema, n = pickle.load(sys.stdin.buffer)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))  # no file grows beyond it: writes fail as on a full disk
try:
    fold_table(layout, schema, n)
except LakeError as error:
    print(type(error).__name__, error.retry.value)
"""


def test_a_fold_on_a_full_disk_fails_whole_and_goes_through_once_there_is_room(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    land(layout, orders, records, 1, 2)
    fold_table(layout, orders, Seq(2))
    land(layout, orders, records, *range(3, 3_000))
    done = subprocess.run(
        [sys.executable, "-c", FOLDER_WITH_A_FULL_DISK],
        input=pickle.dumps((layout, orders, Seq(2_999))), capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.decode().split() == [LakeUnavailable.__name__, LakeUnavailable.retry.value], done.stderr.decode()
    assert ids(layout, orders) == [1, 2]
    fold_table(layout, orders, Seq(2_999))
    assert ids(layout, orders) == list(range(1, 3_000))
