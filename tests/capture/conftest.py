"""A database, a catalog, a log in memory, and captures that run on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.capture.capture_stage import Stage, make_config

from millstream.catalog import Catalog


@pytest.fixture
def stage(postgres: Any, tmp_path: Path) -> Iterator[Stage]:
    catalog = Catalog(tmp_path / "catalog.db")
    catalog.resolve_stream("shop")
    made = Stage(postgres.dsn, tmp_path, catalog, make_config(postgres.dsn, tmp_path, postgres.name))
    yield made
    for running in made.running:
        running.end()
    made.log.close()
    catalog.close()
