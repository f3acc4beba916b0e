"""Servers that a test may kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.testing.kafka import EmbeddedKafka


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """A broker that a test may kill."""
    with EmbeddedKafka(tmp_path / "kafka") as server:
        yield server
