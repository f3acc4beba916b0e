"""A database, a catalog, a log in memory, and captures that run on them.

Also the choice of tests that run on other versions of the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.capture.capture_stage import Stage, make_config, staged

from millstream.codec.pgoutput import warm
from millstream.testing.postgres import EmbeddedPostgres

HERE = Path(__file__).parent
DEFAULT_VERSION = 18
"""PostgreSQL's version on which the whole suite runs."""


@pytest.fixture(scope="session", autouse=True)
def machine_code() -> None:
    """Compile the decoders before a test's writers start: they would be far ahead of the capture that compiles."""
    warm()


@pytest.fixture
def stage(postgres: Any, tmp_path: Path) -> Iterator[Stage]:
    with staged(postgres.dsn, tmp_path, postgres.name) as made:
        yield made


@pytest.fixture
def ascii_stage(postgres_server: EmbeddedPostgres, stage: Stage) -> Iterator[Stage]:
    """Yield a stage on a database whose texts may hold any bytes."""
    name = f"ascii_{stage.config.slot}"
    with postgres_server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    stage.dsn = postgres_server.dsn(name)
    stage.config = make_config(stage.dsn, stage.folder, name)
    yield stage
    postgres_server.drop_database(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out on a version other than the default one.

    Those that start servers of fixed versions, or no server, run with the whole suite.
    """
    if config.getoption("--millstream-postgres") == DEFAULT_VERSION:
        return
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    left_out = {item for item in ours if "postgres_server" not in getattr(item, "fixturenames", ())}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
