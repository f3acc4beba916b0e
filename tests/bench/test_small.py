"""Each bench runs at a small size: it measures what it names, and no change of the code has broken it unseen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

import bench.__main__  # noqa: F401 - it registers all benches
import pytest
from bench.figures import Measure, asked, names, selected
from bench.spark_sessions import session

from millstream.spark.session import SparkOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS: Final = 20_000
APPENDS: Final = {"ack_durable1_ms": 50}
"""Rows of those that append a row at a time, each durable before the next."""
SECONDS: Final = {"bench.cluster": 5, "bench.freshness": 10, "bench.landing": 5, "bench.small_tables": 12}
"""Those that look at a lake every few seconds need more than a second."""


@pytest.mark.long
@pytest.mark.siege
@pytest.mark.parametrize("measure", [pytest.param(measure, id=names(measure)[0]) for measure in selected("")])
def test_a_bench_measures_its_figures_at_a_small_size(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "rows", APPENDS.get(names(measure)[0], ROWS))
    monkeypatch.setattr(asked, "seconds", SECONDS.get(measure.__module__, 1))
    monkeypatch.setattr(asked, "runs", 1)

    measured = list(measure())

    assert sorted({figure.figure for figure in measured}) == sorted(names(measure))
    for figure in measured:
        assert math.isfinite(figure.ours.median), figure
        assert figure.note, figure


def test_a_bench_leaves_a_session_open_that_was_there_before_it(spark: SparkSession, tmp_path: Path) -> None:
    with session(SparkOptions(tmp_path)) as used:
        assert used.range(2).count() == 2
    assert spark.range(3).count() == 3
