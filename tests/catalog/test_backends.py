"""The conformance suite over every backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.testing import CatalogConformance, CatalogRaces, EmbeddedPostgres
from millstream.testing.pytest_plugin import Database


class TestSqlite(CatalogConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "data" / "catalog.db"


class TestSqliteRaces(CatalogRaces):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "data" / "catalog.db"


@pytest.mark.siege
class TestPostgres(CatalogConformance):
    @pytest.fixture
    def place(self, postgres: Database) -> str:
        return postgres.dsn


@pytest.mark.siege
class TestPostgresRaces(CatalogRaces):
    @pytest.fixture
    def place(self, postgres: Database) -> str:
        return postgres.dsn


@pytest.fixture(scope="module")
def oldest() -> Iterator[EmbeddedPostgres]:
    """Yield a server of the oldest version that supports a catalog."""
    with EmbeddedPostgres(14, fsync=False) as server:
        yield server


class TestOldestPostgres(CatalogConformance):
    @pytest.fixture
    def place(self, oldest: EmbeddedPostgres, request: pytest.FixtureRequest) -> str:
        return oldest.create_database(request.node.name[:60])


class TestOldestPostgresRaces(CatalogRaces):
    @pytest.fixture
    def place(self, oldest: EmbeddedPostgres, request: pytest.FixtureRequest) -> str:
        return oldest.create_database(request.node.name)
