"""Batches of several parts, and batches that begin again with other bounds."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from tests.spark.hand_made import Home, insert
from tests.spark.lake_run import config_of, drain, rows_in

from millstream import failpoints
from millstream.errors import EngineError
from millstream.spark.session import SparkOptions

pytestmark = [pytest.mark.siege, pytest.mark.usefixtures("spark")]


class Killed(Exception):
    """The driver died at a failpoint."""


def test_a_table_renamed_inside_of_a_batch_of_several_parts_lands_whole(
    home: Home, spark_options: SparkOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("batch_parts", "batches"):
        monkeypatch.setattr(f"millstream.spark.{module}.SPAN_BYTES", 1 << 10)
    table = home.table("public.before", id=pa.int64(), note=pa.string())
    config = config_of(home.path, home.stream, spark_options)
    home.commit(insert(table, id=0, note=""))
    drain(config, home.catalog)
    for n in range(1, 5):
        home.commit(insert(table, id=n, note=str(n) * 5_000))
    later = home.catalog.put_schema(home.stream, replace(table, name="later"))
    for n in range(5, 9):
        home.commit(insert(later, id=n, note=str(n) * 5_000))
    assert drain(config, home.catalog).quarantined == {}
    for view in ("history", "current"):
        assert sorted(row["id"] for row in rows_in(home.path, view, "public.later")) == list(range(9)), view


def test_a_table_that_had_landed_before_a_kill_goes_on_after_a_longer_batch(
    home: Home, spark_options: SparkOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (home.table(f"public.{name}", id=pa.int64()) for name in ("one", "other"))
    config = config_of(home.path, home.stream, spark_options)
    home.commit(insert(one, id=1), insert(other, id=1))
    drain(config, home.catalog)
    home.commit(insert(one, id=2), insert(other, id=2))

    def hit(name: str) -> None:
        if name == "pipeline.before_lake_commit":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", hit)
        with pytest.raises(EngineError):
            drain(config, home.catalog)
    home.commit(insert(other, id=3))  # while nothing runs
    assert drain(config, home.catalog).quarantined == {}
    home.commit(insert(one, id=4))
    assert drain(config, home.catalog).quarantined == {}
    assert sorted(row["id"] for row in rows_in(home.path, "current", "public.one")) == [1, 2, 4]
