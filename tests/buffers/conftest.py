"""Servers that a test may kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.redis import EmbeddedRedis


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """A server that a test may kill; it is then started again."""
    with EmbeddedKafka(tmp_path_factory.mktemp("own") / "kafka") as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that a test may kill."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server
