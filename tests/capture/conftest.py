"""A database, a catalog, a log in memory, and captures that run on them; which tests another version of the server has a say in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.capture.capture_stage import Stage, staged

HERE = Path(__file__).parent
DEFAULT_VERSION = 18
"""On which the whole suite runs."""
TEST_S = 420
"""What no test here takes on a slow machine. One that does fails where it waits, and the others go on."""


@pytest.fixture
def stage(postgres: Any, tmp_path: Path) -> Iterator[Stage]:
    with staged(postgres.dsn, tmp_path, postgres.name) as made:
        yield made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bound every test's time; on another version than the default one leave out those that it can't matter to.

    They start servers of versions of their own, or none, and run with the whole suite.
    """
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    for item in ours:
        if item.get_closest_marker("timeout") is None and item.get_closest_marker("soak") is None:
            item.add_marker(pytest.mark.timeout(TEST_S, method="signal"))
    if config.getoption("--millstream-postgres") == DEFAULT_VERSION:
        return
    left_out = {item for item in ours if "postgres_server" not in getattr(item, "fixturenames", ())}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
