"""Tables in another PostgreSQL: rows equal the source's and events the log's, whichever process is killed when."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.e2e.harness import Home, wait_for
from tests.e2e.test_kills import Siege, kill_everything_everywhere, siege

from millstream.testing.oracle import TableRows, difference, source_rows
from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.pytest_plugin import Database

pytestmark = pytest.mark.siege

POINTS = {
    "wal.before_fsync": "before the fsync",
    "capture.copy_chunk_read": "in a chunk of the table copy",
    "lake.before_postgres_commit": "all tables written, nothing committed",
    "lake.after_postgres_commit": "committed, nobody told",
    "pipeline.after_lake_commit": "the cut committed, the catalog not told",
}
SEED = 31
TIMES = 2


@pytest.fixture
def destination(postgres_server: EmbeddedPostgres) -> Iterator[Database]:
    name = "destination"
    yield Database(postgres_server, name, postgres_server.create_database(name))
    postgres_server.drop_database(name)


def lake_in(destination: Database, more: str = "") -> str:
    return f'format = "postgres"\nlocation = "{destination.dsn}"\n{more}'


@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("spark")
def test_rows_and_events_are_whole_whatever_is_killed_when(
    tmp_path: Path, postgres_server: EmbeddedPostgres, destination: Database
) -> None:
    with siege(tmp_path, postgres_server, SEED, database="events", points=POINTS, lake=lake_in(destination)) as (
        under,
        connection,
    ):
        kill_everything_everywhere(under, connection, times=TIMES, at_random=TIMES + 1, points=POINTS)
        assert under.home.caught_up_here() == {}
        with destination.connect() as there:
            problems = [*rows_that_differ(under, connection, there), *events_that_differ(under.home, there)]
        assert not problems, "\n".join(problems)
        assert all(under.kills[point] >= TIMES for point in POINTS)


def rows_that_differ(under: Siege, source: psycopg.Connection[Any], there: psycopg.Connection[Any]) -> Iterator[str]:
    """Return the rows of every table that has a key, in the source and in the lake, as text."""
    tables = [table["name"] for table in json.loads(under.home.command("tables", "ls", "--json"))]
    compared = 0
    for name in tables:
        made = there.execute(
            "SELECT 1 FROM millstream_lake.tables WHERE view = 'current' AND to_regclass(%s)::oid = "
            "to_regclass(quote_ident(namespace) || '.' || quote_ident(name))::oid",
            [name],
        ).fetchone()
        if made is None:
            continue
        was, found = source_rows(source, name), source_rows(there, name)
        again = TableRows(was.columns, was.key)
        for row in found.rows.values() if found.key else found.bag.elements():
            values = dict(zip(found.columns, row, strict=True))
            values |= json.loads(str(values.pop("__exact", None) or "{}"))
            again.add(tuple(values[column] for column in was.columns))
        yield from (f"{name}: {line}" for line in difference(again, was))
        compared += 1
    if compared < 10:
        yield f"only {compared} tables have rows there"


def events_that_differ(home: Home, there: psycopg.Connection[Any]) -> Iterator[str]:
    """Check that each table's events, by `seq`, are the log's records of it in order: none twice, none missing."""
    log: dict[str, list[tuple[Any, ...]]] = {}
    for record in home.records():
        if record["op"] == "raw":
            continue
        log.setdefault(record["table"] or "messages", []).append(
            (
                record["op"],
                record["commit_lsn"] and int(record["commit_lsn"].replace("/", ""), 16),
                record["commit_index"],
                as_json_reads(record["row"]),
                as_json_reads(record["before"]),
                record["seq"],
            )
        )
    places = there.execute("SELECT namespace, name FROM millstream_lake.tables WHERE view = 'changes'").fetchall()
    seen: set[tuple[Any, ...]] = set()
    for namespace, name in places:
        rows = there.execute(
            sql.SQL(
                "SELECT op, commit_lsn - '0/0'::pg_lsn, commit_index, row, before, log_seq FROM {} ORDER BY seq"
            ).format(sql.Identifier(namespace, name))
        ).fetchall()
        rows = [
            (op, lsn, index, as_json_reads(row), as_json_reads(before), seq)
            for op, lsn, index, row, before, seq in rows
        ]
        (plain,) = there.execute(
            "SELECT quote_ident(%s) || '.' || quote_ident(%s)", [namespace.removesuffix("_changes"), name]
        ).fetchone() or ("",)
        told = log.pop("messages" if plain == "millstream.messages" else plain, [])
        if rows != told:
            at = next(
                (n for n, (a, b) in enumerate(zip(rows, told, strict=False)) if a != b), min(len(rows), len(told))
            )
            yield f"{plain}: {len(rows)} events, {len(told)} records; the first that differs: {rows[at : at + 1]} {told[at : at + 1]}"
        numbered = [(plain, lsn, index) for _, lsn, index, *_ in rows if index is not None]
        if len(set(numbered)) != len(numbered) or seen & set(numbered):
            yield f"{plain}: an event twice"
        seen |= set(numbered)
    if log:
        yield f"no events of {', '.join(log)}"


def as_json_reads(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert numbers as JSON readers hold them: beyond 2^53 as doubles."""

    def read(value: Any) -> Any:
        if isinstance(value, float) and value == 0 and math.copysign(1, value) < 0:
            return "-0"  # text in an event, since jsonb has no such number
        return float(value) if isinstance(value, int) and abs(value) > 2**53 else value

    return values and {name: read(value) for name, value in values.items()}


@pytest.mark.usefixtures("spark")
def test_two_updates_of_a_row_in_one_transaction_are_two_events_and_one_row(
    tmp_path: Path, postgres: Database, destination: Database
) -> None:
    source = postgres.connect()
    source.execute("CREATE TABLE orders (id bigint PRIMARY KEY, note text)")
    source.execute("INSERT INTO orders VALUES (1, 'copied'), (2, 'copied')")
    home = Home(tmp_path / "shop", postgres.dsn, slot="twice")
    home.init()
    home.set_lake(lake_in(destination))
    assert home.caught_up_here() == {}
    with source.transaction():
        source.execute("UPDATE orders SET note = 'first' WHERE id = 1")
        source.execute("UPDATE orders SET note = 'second' WHERE id = 1")
        source.execute("UPDATE orders SET note = 'last words' WHERE id = 2")
        source.execute("DELETE FROM orders WHERE id = 2")
    assert home.caught_up_here() == {}
    with destination.connect() as there:
        assert there.execute("SELECT * FROM public.orders").fetchall() == [(1, "second")]
        events = there.execute(
            "SELECT op, record_pk, row->>'note', commit_index, commit_lsn = max(commit_lsn) OVER () FROM public_changes.orders ORDER BY seq"
        ).fetchall()
    assert events == [
        ("r", "1", "copied", None, False),
        ("r", "2", "copied", None, False),
        ("u", "1", "first", 0, True),
        ("u", "1", "second", 1, True),
        ("u", "2", "last words", 2, True),
        ("d", "2", None, 3, True),
    ]
    refused = home.command("query", "SELECT 1", check=False)
    assert refused == ""
    facts = home.status()["streams"][0]
    assert facts["lag"]["lake"]["records"] == 0
    assert [(t["state"], t["reason"]) for t in facts["tables"]] == [("streaming", "")]


@pytest.mark.usefixtures("spark")
def test_a_column_with_a_constant_default_lands_without_a_copy(
    tmp_path: Path, postgres: Database, destination: Database
) -> None:
    source = postgres.connect()
    source.execute("CREATE TABLE orders (id bigint PRIMARY KEY, note text)")
    source.execute("INSERT INTO orders VALUES (1, 'copied'), (2, 'copied')")
    home = Home(tmp_path / "shop", postgres.dsn, slot="defaults")
    home.init()
    home.set_lake(lake_in(destination))
    assert home.caught_up_here() == {}
    wanted = "SELECT id, note, paid, owed FROM public.orders ORDER BY id"
    source.execute("ALTER TABLE orders ADD paid boolean NOT NULL DEFAULT false")
    assert home.caught_up_here() == {}
    source.execute("INSERT INTO orders VALUES (3, 'new', true); ALTER TABLE orders ADD owed numeric(9,2) DEFAULT 1.5")
    source.execute("UPDATE orders SET owed = NULL WHERE id = 1")
    assert home.caught_up_here() == {}
    with destination.connect() as there:
        assert there.execute(wanted).fetchall() == source.execute(wanted).fetchall()
        ops = there.execute("SELECT op FROM public_changes.orders ORDER BY seq").fetchall()
    assert "".join(op for (op,) in ops) == "rrcu"


@pytest.mark.usefixtures("spark")
def test_a_table_that_cannot_land_there_waits_for_its_retry_and_the_others_go_on(
    tmp_path: Path, postgres: Database, destination: Database
) -> None:
    source = postgres.connect()
    source.execute("CREATE TABLE blocked (id int PRIMARY KEY); CREATE TABLE free (id int PRIMARY KEY)")
    source.execute("INSERT INTO blocked VALUES (1); INSERT INTO free VALUES (1)")
    with destination.connect() as there:
        there.execute("CREATE TABLE public.blocked (anything text)")
        home = Home(tmp_path / "shop", postgres.dsn, slot="blocked")
        home.init()
        home.set_lake(lake_in(destination))
        with home.running_here():
            wait_for(lambda: to_number(there, "public.free") == 1, "the other table lands", timeout_s=240)
            source.execute("INSERT INTO blocked VALUES (2); INSERT INTO free VALUES (2)")
            wait_for(lambda: to_number(there, "public.free") == 2, "the other table goes on", timeout_s=240)
            (state,) = [t for t in home.status()["streams"][0]["tables"] if t["name"] == "public.blocked"]
            assert state["state"] == "quarantined"
            assert "public.blocked" in state["reason"]
            there.execute("DROP TABLE public.blocked")
            home.command("tables", "retry", "public.blocked")
            wait_for(lambda: to_number(there, "public.blocked") == 2, "what waited is there", timeout_s=240)
        assert there.execute("SELECT record_pk FROM public_changes.blocked ORDER BY seq").fetchall() == [("1",), ("2",)]


@pytest.mark.usefixtures("spark")
def test_a_view_that_is_added_later_waits_for_a_copy_and_other_tables_go_on(
    tmp_path: Path, postgres: Database, destination: Database
) -> None:
    """`current` had the rows that changed since, and nothing said so."""
    source = postgres.connect()
    source.execute("CREATE TABLE orders (id bigint PRIMARY KEY, note text)")
    source.execute("INSERT INTO orders VALUES (1, 'copied'), (2, 'copied')")
    home = Home(tmp_path / "shop", postgres.dsn, slot="views")
    home.init()
    home.set_lake(lake_in(destination, 'views = ["changes"]\n'))
    assert home.caught_up_here() == {}
    home.set_lake(lake_in(destination))
    source.execute("UPDATE orders SET note = 'changed' WHERE id = 1; CREATE TABLE later (id int PRIMARY KEY)")
    source.execute("INSERT INTO later VALUES (1)")
    for _ in range(2):
        ((name, reason),) = home.caught_up_here().items()
        assert (name, "`current` lacks records" in reason) == ("public.orders", True)
    (state,) = [t for t in home.status()["streams"][0]["tables"] if t["name"] == "public.orders"]
    assert state["state"] == "quarantined"
    with destination.connect() as there:
        assert (to_number(there, "public.later"), to_number(there, "public.orders")) == (1, -1)
        home.command("tables", "copy", "public.orders")
        assert home.caught_up_here() == {}
        assert there.execute("SELECT * FROM public.orders ORDER BY id").fetchall() == [(1, "changed"), (2, "copied")]
        ops = there.execute("SELECT op FROM public_changes.orders ORDER BY seq").fetchall()
        assert "".join(op for (op,) in ops) == "rrutrr"


def to_number(there: psycopg.Connection[Any], table: str) -> int:
    """Return the row count of a table with a column `id`; -1 if the table doesn't exist."""
    found = there.execute(
        "SELECT count(*) FROM information_schema.columns WHERE column_name = 'id' AND table_schema || '.' || table_name = %s",
        [table],
    ).fetchone()
    if found is None or not found[0]:
        return -1
    row = there.execute(f"SELECT count(*) FROM {table}").fetchone()
    return -1 if row is None else int(row[0])
