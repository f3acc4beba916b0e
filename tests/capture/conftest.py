"""A database, a catalog, a log in memory, and captures that run on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.capture.capture_stage import Stage, staged


@pytest.fixture
def stage(postgres: Any, tmp_path: Path) -> Iterator[Stage]:
    with staged(postgres.dsn, tmp_path, postgres.name) as made:
        yield made
