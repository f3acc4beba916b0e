"""A slow statement is logged with its time, and a quick one isn't."""

from __future__ import annotations

from contextlib import closing

from sqlalchemy import text
from structlog.testing import capture_logs

from millstream.catalog import Catalog
from millstream.testing.pytest_plugin import Database


def test_a_slow_statement_is_logged_without_its_values(postgres: Database) -> None:
    with closing(Catalog(postgres.dsn)) as catalog, capture_logs() as lines:
        catalog.resolve_stream("shop")
        with catalog.database.write() as connection:
            connection.execute(
                text("SELECT pg_sleep(:seconds),\n CAST(:value AS text)"), {"seconds": 1.1, "value": "hidden"}
            )
    (line,) = [line for line in lines if line["event"] == "slow catalog statement"]
    assert line["seconds"] >= 1.1
    assert line["statement"].startswith("SELECT pg_sleep(")
    assert "hidden" not in str(line)
