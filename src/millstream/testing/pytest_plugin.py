"""Fixtures for pytest, found by it wherever Millstream is installed: a real PostgreSQL, a database for each test.

Nothing is imported or started before a test asks for a fixture.

- `postgres_server`: one server for the whole session (`EmbeddedPostgres`, without fsync).
- `postgres`: a fresh database on it for one test (`Database`), dropped with its connections and slots
  afterwards.
- `kafka_server`: one Kafka broker for the whole session (`EmbeddedKafka`).
- `iceberg_catalog`: one Iceberg REST catalog for the whole session (`EmbeddedIcebergCatalog`), its tables in a folder.
- `redis_server`: one server that speaks Redis's protocol (`EmbeddedRedis`), durable.

If one of them is unavailable, its tests are skipped with the reason; with `CI` set in the environment
they fail. `--millstream-postgres VERSION` (or `MILLSTREAM_TEST_POSTGRES`) chooses the server's major
version.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import psycopg

    from millstream.testing.iceberg_rest import EmbeddedIcebergCatalog
    from millstream.testing.kafka import EmbeddedKafka
    from millstream.testing.postgres import EmbeddedPostgres
    from millstream.testing.redis import EmbeddedRedis

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Database:
    """One test's database.

    Attributes:
        server: its server, shared with other tests: don't stop it.
        name: the database's name.
        dsn: its `postgresql://` address as the superuser.
    """

    server: "EmbeddedPostgres"
    name: str
    dsn: str

    def connect(
        self, *, user: str = "postgres", tcp: bool = False, autocommit: bool = True, **parameters: str
    ) -> "psycopg.Connection":
        """Return a new psycopg connection to it; one left open is ended with the database."""
        return self.server.connect(self.name, user=user, tcp=tcp, autocommit=autocommit, **parameters)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the server's version."""
    group = parser.getgroup("millstream")
    group.addoption(
        "--millstream-postgres",
        metavar="VERSION",
        type=int,
        default=int(os.environ.get("MILLSTREAM_TEST_POSTGRES", "18")),
        help="major version of the embedded PostgreSQL that fixtures start (14 to 18; default: 18)",
    )


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> "Iterator[EmbeddedPostgres]":
    """Yield a running PostgreSQL for the whole session, set up for logical replication; fast, thus without fsync."""
    from millstream.testing.postgres import EmbeddedPostgres, PostgresUnavailable

    server = EmbeddedPostgres(request.config.getoption("--millstream-postgres"), fsync=False)
    try:
        server.program("postgres")
    except PostgresUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
def postgres(postgres_server: "EmbeddedPostgres") -> Iterator[Database]:
    """Yield a fresh database for this test on the session's server."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    dsn = postgres_server.create_database(name)
    yield Database(postgres_server, name, dsn)
    postgres_server.drop_database(name)


def _skip_without(jars: Callable[[], object]) -> None:
    """Skip the test if a server's jars can't be fetched; in CI that is a failure."""
    from millstream.testing._servers.maven import ArtifactUnavailable

    try:
        jars()
    except ArtifactUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[EmbeddedKafka]":
    """Yield a running Kafka broker for the whole session: each test uses a topic of its own."""
    from millstream.testing.kafka import EmbeddedKafka, kafka_jars

    _skip_without(kafka_jars)
    with EmbeddedKafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture(scope="session")
def iceberg_catalog(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[EmbeddedIcebergCatalog]":
    """Yield a running Iceberg REST catalog for the whole session: each test uses a stream of its own."""
    from millstream.testing.iceberg_rest import EmbeddedIcebergCatalog, iceberg_jars

    _skip_without(iceberg_jars)
    with EmbeddedIcebergCatalog(tmp_path_factory.mktemp("iceberg")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[EmbeddedRedis]":
    """Yield a server with Redis's protocol for the whole session: each test uses names of its own."""
    from millstream.testing.redis import EmbeddedRedis

    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server
