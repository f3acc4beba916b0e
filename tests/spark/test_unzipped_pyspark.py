"""Workers of a local Spark import the installed pyspark, whose byte code Python caches, and no copy of it."""

from __future__ import annotations

import os
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from millstream.spark.unzipped_pyspark import without_zipped_modules


@pytest.mark.long
def test_workers_import_what_the_driver_has_imported(spark: SparkSession) -> None:
    places = spark.sparkContext.parallelize([0, 1], 2).map(lambda _: str(__import__("pyspark").__file__)).collect()
    assert {Path(place) for place in places} == {Path(str(pyspark.__file__))}


def test_workers_alone_take_no_modules_from_the_current_folder(spark: SparkSession) -> None:
    safe = spark.sparkContext.parallelize([0], 1).map(lambda _: os.environ.get("PYTHONSAFEPATH")).collect()
    assert safe == ["1"]
    assert "PYTHONSAFEPATH" not in os.environ, "other processes of the driver are its own affair"


def test_a_spark_that_is_named_stays_and_what_is_named_for_ours_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    for _ in range(2):
        with without_zipped_modules(tmp_path):
            ours = Path(os.environ["SPARK_HOME"])
            assert (ours / "bin" / "spark-submit").is_file()
            assert (ours / "jars").is_dir()
            assert not (ours / "python").exists()
        assert "SPARK_HOME" not in os.environ
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with without_zipped_modules(tmp_path):
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert os.environ["SPARK_HOME"] == "/opt/spark"
