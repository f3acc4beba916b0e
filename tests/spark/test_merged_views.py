"""A pipeline whose `views` name `merged` folds it next to its own views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.regions.two_homes import both

import millstream
from millstream.app.pipelines import run_pipelines
from millstream.home.home import Home
from millstream.processes.child_process import Lifeline

VIEWS = '[streams.shop.lake]\nviews = ["current", "history", "merged"]\n'


def landed(home: Path, view: str) -> list[dict[str, Any]]:
    table = DeltaTable(str(home / "lake" / "shop" / view / "public.posts")).to_pyarrow_table()
    found: list[dict[str, Any]] = table.select(["id", "likes"]).sort_by("id").to_pylist()
    return found


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
