"""A pipeline whose `views` name `merged` folds it next to its own views."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.regions.two_homes import both

import millstream
from millstream.app.pipelines import run_pipelines
from millstream.errors import PositionError, UsageError
from millstream.home.home import Home
from millstream.processes.child_process import Lifeline
from millstream.spark.log_source import SourceOptions

VIEWS = '[streams.shop.lake]\nviews = ["current", "history", "merged"]\n'


def landed(home: Path, view: str) -> list[dict[str, Any]]:
    table = DeltaTable(str(home / "lake" / "shop" / view / "public.posts")).to_pyarrow_table()
    found: list[dict[str, Any]] = table.select(["id", "likes"]).sort_by("id").to_pylist()
    return found


@pytest.mark.long
def test_a_pipeline_that_has_caught_up_has_folded_the_merged_view(tmp_path: Path, spark: SparkSession) -> None:
    assert spark.sparkContext.version
    with both(tmp_path) as (one, _):
        file = one / "millstream.toml"
        file.write_text(file.read_text() + VIEWS)
        with millstream.open(one) as home:
            home.append("shop", "posts", {"id": 4, "likes": 4})
        asked = Lifeline()
        asked.drain.set()
        told: list[dict[str, Any]] = []
        outcome = run_pipelines(Home(one), asked, on_progress=told.append)
        assert outcome["shop"]["caught_up"]
        assert outcome["shop"]["quarantined"] == {}
        assert landed(one, "current") == [{"id": 1, "likes": 5}, {"id": 2, "likes": 1}, {"id": 4, "likes": 4}]
        assert [row["likes"] for row in landed(one, "merged")] == [3, 1, 7, 4]
        with millstream.open(one) as home:
            assert home.query("SELECT id, likes FROM posts ORDER BY id").to_pylist() == landed(one, "current")
            assert home.query('SELECT id, likes FROM merged."public.posts" ORDER BY id').to_pylist() == landed(
                one, "merged"
            )


@pytest.mark.long
def test_spark_reads_the_merged_rows_of_a_home(tmp_path: Path, spark: SparkSession) -> None:
    with both(tmp_path) as (one, _):
        merged = spark.read.format("millstream").options(path=str(one), stream="shop", table="posts", merged="true")
        with millstream.open(one) as home:
            expected = home.merged("shop", "posts")
            later = home.merged("shop", "posts", at=datetime(2100, 1, 1, tzinfo=UTC))
        found = merged.load()
        assert found.columns == expected.column_names
        assert found.orderBy("id").toArrow().to_pylist() == expected.to_pylist()
        at = merged.option("at", "2100-01-01T00:00:00Z").option("columns", "id,heat").load().orderBy("id")
        assert at.toArrow().to_pylist() == later.select(["id", "heat"]).to_pylist()
        own = spark.read.format("millstream").options(
            path=str(one), stream="shop", table="public.posts", merged="false"
        )
        assert own.load().count() == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"merged": "yes"}, "merged is 'yes'"),
        ({"merged": "true"}, "need the option table"),
        ({"merged": "true", "table": "posts", "starting": "latest"}, "take no option 'starting'"),
        ({"merged": "TRUE", "table": "posts", "at": "soon"}, "'soon' is not a time"),
        ({"table": "posts", "at": "2026-01-01"}, "goes with merged rows only"),
    ],
)
def test_options_that_do_not_suit_merged_rows_are_named(tmp_path: Path, options: dict[str, str], said: str) -> None:
    (tmp_path / "data" / "wal" / "shop").mkdir(parents=True)
    with pytest.raises((UsageError, PositionError), match=said):
        SourceOptions.parse({"path": str(tmp_path), "stream": "shop"} | options)
