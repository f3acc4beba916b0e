"""One Spark session for all tests of a process: a start costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.spark.hand_made import Home

from millstream.spark.session import SparkOptions, open_session, stop_session


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    yield home
    home.close()


@pytest.fixture(scope="session")
def spark_options(tmp_path_factory: pytest.TempPathFactory) -> SparkOptions:
    return SparkOptions(tmp_path_factory.mktemp("spark"))


@pytest.fixture(scope="session")
def spark(spark_options: SparkOptions) -> Iterator[SparkSession]:
    session = open_session(spark_options)
    yield session
    stop_session(session)
