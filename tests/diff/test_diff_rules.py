"""`diff` of tables whose columns have rules: equal if the rest is, differences by hash, and repairs under the rules."""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from tests.app.homes import run
from tests.app.landed import LandedHome
from tests.capture.test_column_rules import KEY, digest, holds
from tests.diff.test_diff import behind_captures_back, reasons, states, told

from millstream.administration.initialize import make_home
from millstream.diff.asked_repairs import ask_repairs
from millstream.diff.compare import diff_stream
from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.pytest_plugin import Database

RULES = """
[streams.shop.tables."public.users"]
exclude = ["ssn"]
hash = ["email"]
redact = ["name"]
[streams.shop.tables."public.people"]
hash = ["email"]
[streams.shop.tables."public.pairs"]
hash = ["email"]
redact = ["name"]
[streams.shop.tables."public.bag"]
exclude = ["ssn"]
hash = ["email"]
redact = ["name"]
[streams.shop.tables."public.hidden"]
exclude = ["ssn"]
[streams.shop.tables."public.days"]
hash = ["email"]
[streams.shop.tables."public.moods"]
hash = ["mood"]
"""
TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, email text, ssn text, name text, age int)",
    "CREATE TABLE people (email text PRIMARY KEY, note text)",
    "CREATE TABLE pairs (n numeric, email text, name text, day date, PRIMARY KEY (email, n))",
    "CREATE TABLE bag (email text, ssn text, name text, n int); ALTER TABLE bag REPLICA IDENTITY FULL",
    "CREATE TABLE hidden (id int PRIMARY KEY, ssn text, note text); ALTER TABLE hidden REPLICA IDENTITY FULL",
    "CREATE TABLE days (d date, email text, PRIMARY KEY (d, email)) PARTITION BY RANGE (d)",
    "CREATE TABLE days_1 PARTITION OF days FOR VALUES FROM ('2020-01-01') TO ('2021-01-01')",
    "CREATE TABLE moods (mood float8 PRIMARY KEY); ALTER TABLE moods REPLICA IDENTITY FULL",
    "INSERT INTO users SELECT i, 'raw-mail-' || i, 'raw-ssn-' || i, 'raw-name-' || i, i FROM generate_series(1, 300) i",
    r"""INSERT INTO users VALUES (301, E'raw-mail\t\\x\n",(é', NULL, NULL, NULL), (302, NULL, 'raw-ssn', '', 1)""",
    "INSERT INTO users VALUES (303, '', '', 'a', 1)",
    "INSERT INTO people SELECT 'raw-mail-' || i, 'note, ' || i FROM generate_series(1, 300) i",
    "INSERT INTO pairs SELECT i % 3 + 0.50, 'raw-mail-' || i, 'raw-name', DATE '2020-01-01' + i FROM generate_series(1, 300) i",
    "INSERT INTO bag SELECT 'raw-mail-' || i % 3, 'raw-ssn-' || i, 'raw-name', i % 2 FROM generate_series(1, 60) i",
    "INSERT INTO hidden SELECT i, 'raw-ssn-' || i, 'note' FROM generate_series(1, 30) i",
    "INSERT INTO days SELECT DATE '2020-01-01' + i % 7, 'raw-mail-' || i FROM generate_series(1, 20) i",
    "INSERT INTO moods VALUES (1.5), (1e20), ('-0'), ('NaN')",
)
CHANGES = (
    "INSERT INTO users SELECT id + 1000, email, ssn, name, age FROM users",
    "UPDATE users SET email = 'raw-mail-new' WHERE id < 10; DELETE FROM users WHERE id = 11",
    "UPDATE people SET email = 'raw-mail-new' WHERE email = 'raw-mail-1'",
    "DELETE FROM pairs WHERE email = 'raw-mail-2'; DELETE FROM bag WHERE ssn = 'raw-ssn-3'",
)
RAW = ("raw-mail", "raw-ssn", "raw-name")


def ruled_home(postgres: Database, path: Path, lake: str, *statements: str) -> LandedHome:
    """Return a home of a source with these tables and `RULES`; nothing is captured yet."""
    with postgres.connect() as source:
        for statement in statements:
            source.execute(statement)
    made = make_home(path, stream="shop", source=postgres.dsn, tables=("public.*",), lake_format=lake)
    text = made.file.read_text().replace(
        "[streams.shop.source]\n", f'[streams.shop.source]\nhash_key = "{KEY.decode()}"\n'
    )
    assert KEY.decode() in text
    made.file.write_text(text + RULES)
    return LandedHome(path, None)


@pytest.mark.parametrize("lake", ["delta", pytest.param("iceberg", marks=pytest.mark.long)])
def test_tables_with_rules_are_compared_and_repaired_under_them(postgres: Database, tmp_path: Path, lake: str) -> None:
    home = ruled_home(postgres, tmp_path / "shop", lake, *TABLES)
    home.catch_up()
    with postgres.connect() as source:
        for statement in CHANGES:
            source.execute(statement)
        home.catch_up()
        same = diff_stream(home.home)
        assert set(states(same).values()) == {"equal"}, same.as_dict()
        assert told(same, "public.users")["rows"] == {"source": 605, "lake": 605}
        behind_captures_back(
            source,
            "UPDATE users SET email = 'raw-mail-other' WHERE id = 20",
            "UPDATE users SET email = NULL, name = 'raw-name-other', ssn = 'raw-ssn-other' WHERE id = 21",
            "UPDATE users SET name = 'raw-name-other', ssn = 'raw-ssn-other' WHERE id = 22",
            "UPDATE users SET name = NULL WHERE id = 23",
            "UPDATE people SET note = 'unseen' WHERE email = 'raw-mail-30'",
            "UPDATE people SET email = 'raw-mail-unseen' WHERE email = 'raw-mail-31'",
            "UPDATE pairs SET day = 'infinity' WHERE email = 'raw-mail-30'",
            "DELETE FROM pairs WHERE email = 'raw-mail-31'",
            "DELETE FROM bag WHERE ssn = 'raw-ssn-6'",
            "UPDATE hidden SET ssn = 'raw-ssn-unseen'",
            "DELETE FROM days WHERE email = 'raw-mail-5'",
            "UPDATE moods SET mood = 2 WHERE mood = 1.5",
        )
    home.catch_up()
    answer = run(home.home.path, "diff", "--json")
    assert answer.returncode == 3, answer.stderr
    assert not any(raw in answer.stdout + answer.stderr for raw in RAW)
    shown = {table["table"]: table for table in json.loads(answer.stdout)["tables"]}
    assert {name: table["state"] for name, table in shown.items() if table["state"] != "different"} == {
        "public.hidden": "equal"
    }
    assert shown["public.users"]["differences"] == [
        values({"id": "20"}, email=(digest("raw-mail-20"), digest("raw-mail-other"))),
        values({"id": "21"}, email=(digest("raw-mail-21"), None)),
        values({"id": "23"}, name=("[redacted]", None)),
    ]
    assert by_key(shown["public.people"]) == by_key({"differences": [
        values({"email": digest("raw-mail-30")}, note=("note, 30", "unseen")),
        {"key": {"email": digest("raw-mail-31")}, "what": "missing_in_source"},
        {"key": {"email": digest("raw-mail-unseen")}, "what": "missing_in_lake"},
    ]})  # fmt: skip
    assert by_key(shown["public.pairs"]) == by_key({"differences": [
        values({"n": "0.50", "email": digest("raw-mail-30")}, day=("2020-01-31", "infinity")),
        {"key": {"n": "1.50", "email": digest("raw-mail-31")}, "what": "missing_in_source"},
    ]})  # fmt: skip
    assert by_key(shown["public.moods"]) == by_key({"differences": [
        {"key": {"mood": digest("1.5")}, "what": "missing_in_source"},
        {"key": {"mood": digest("2")}, "what": "missing_in_lake"},
    ]})  # fmt: skip
    assert shown["public.days"]["differences"] == [
        {"key": {"d": "2020-01-06", "email": digest("raw-mail-5")}, "what": "missing_in_source"}
    ]
    assert shown["public.bag"]["differences"] == [
        {
            "key": {"email": digest("raw-mail-0"), "name": "[redacted]", "n": "0"},
            "what": "count",
            "rows": {"lake": 10, "source": 9},
        }
    ]
    answer = run(home.home.path, "diff", "--repair")
    assert answer.returncode == 3, answer.stderr
    assert "public.people: 3 keys are read again" in answer.stderr
    assert not any(raw in answer.stdout + answer.stderr for raw in RAW)
    home.catch_up()
    mended = diff_stream(home.home)
    assert set(states(mended).values()) == {"equal"}, mended.as_dict()
    assert not holds(home.home.path, *RAW)


def values(key: dict[str, str], **columns: tuple[str | None, str | None]) -> dict[str, Any]:
    """Return the difference of a key that both sides have."""
    return {"key": key, "what": "values", "columns": {n: {"lake": a, "source": b} for n, (a, b) in columns.items()}}


def by_key(table: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(table["differences"], key=lambda difference: str(difference["key"]))


@pytest.mark.long
def test_many_ranges_of_a_hashed_key_are_read_in_order(
    postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.diff.compare.RANGE_ROWS", 10)
    home = ruled_home(postgres, tmp_path / "shop", "delta", *TABLES)
    home.catch_up()
    with postgres.connect() as source:
        behind_captures_back(
            source, "UPDATE people SET note = 'unseen'", "DELETE FROM bag", "UPDATE users SET email = 'raw-mail'"
        )
    home.catch_up()
    found = diff_stream(home.home)
    assert told(found, "public.people")["different"] == 300
    assert told(found, "public.bag")["different"] == 6
    assert told(found, "public.users")["different"] == 303
    ask_repairs(home.home, found)
    home.catch_up()
    mended = diff_stream(home.home)
    assert set(states(mended).values()) == {"equal"}, mended.as_dict()


@pytest.mark.long
@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (lambda text: text.replace('"public.users"]\nexclude = ["ssn"]', '"public.users"]\nexclude = ["ssn", "age"]'), "age"),
        (lambda text: text.replace('hash = ["email"]\nredact = ["name"]', 'hash = ["email"]', 1), "name"),
        (lambda text: text.replace(KEY.decode(), KEY.decode()[::-1]), "email"),
    ],
)  # fmt: skip
def test_rules_that_capture_has_not_applied_yet_are_not_compared(
    postgres: Database, tmp_path: Path, then: Callable[[str], str], reason: str
) -> None:
    home = ruled_home(postgres, tmp_path / "shop", "delta", TABLES[0], *[t for t in TABLES if "INTO users" in t])
    file = home.home.path / "millstream.toml"
    text = file.read_text()
    head, _, tail = text.partition('[streams.shop.tables."public.people"]')
    assert tail
    file.write_text(head)
    home = LandedHome(home.home.path, None)
    home.catch_up()
    assert states(diff_stream(home.home)) == {"public.users": "equal"}
    file.write_text(then(head))
    home = LandedHome(home.home.path, None)
    found = diff_stream(home.home)
    assert reasons(found) == {"public.users": f"the rule of column {reason} is another one: capture copies it again"}
    assert found.exit_code == 1
    home.catch_up()
    again = diff_stream(home.home)
    assert states(again) == {"public.users": "equal"}, again.as_dict()


def test_names_that_changed_hands_since_the_snapshot_show_no_value(postgres: Database, tmp_path: Path) -> None:
    home = ruled_home(postgres, tmp_path / "shop", "delta", *TABLES)
    home.catch_up()
    swapped = False

    def swap(progress: Any) -> None:
        nonlocal swapped
        if progress.doing == "waiting for the lake" and not swapped:
            swapped = True
            with contextlib.closing(psycopg.connect(postgres.dsn, autocommit=True)) as other:
                other.execute("ALTER TABLE users RENAME email TO spare")
                other.execute("ALTER TABLE users RENAME age TO email")
                other.execute("ALTER TABLE users RENAME spare TO age")

    found = diff_stream(home.home, tables=["public.users"], on_progress=swap)
    assert swapped
    assert states(found) == {"public.users": "not_compared"}, found.as_dict()
    assert not any(raw in str(found.as_dict()) for raw in RAW)


@pytest.mark.long
def test_bytes_of_a_database_without_an_encoding_are_hashed_as_they_are(
    postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    name = f"bytes_{uuid4().hex[:8]}"
    with postgres_server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    dsn = postgres_server.dsn(name)
    path = tmp_path / "shop"
    made = make_home(path, stream="shop", source=dsn, tables=("public.people",))
    text = made.file.read_text().replace(
        "[streams.shop.source]\n", f'[streams.shop.source]\nhash_key = "{KEY.decode()}"\n'
    )
    made.file.write_text(text + '[streams.shop.tables."public.people"]\nhash = ["email"]\n')
    home = LandedHome(path, None)
    with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as source:
        source.execute("CREATE TABLE people (email text PRIMARY KEY, note text)")
        source.execute("SET client_encoding = 'SQL_ASCII'")
        source.execute(rb"INSERT INTO people VALUES (E'raw-mail-\351', E'plain \303\251'), ('raw-mail-2', NULL)")
        home.catch_up()
        source.execute(rb"UPDATE people SET note = 'streamed'; INSERT INTO people VALUES (E'raw-mail-\377', '')")
        home.catch_up()
        same = diff_stream(home.home)
        assert states(same) == {"public.people": "equal"}, same.as_dict()
        behind_captures_back(source, rb"UPDATE people SET note = 'unseen' WHERE email = E'raw-mail-\351'".decode())
    home.catch_up()
    found = diff_stream(home.home)
    key = hmac.new(KEY, b"raw-mail-\xe9", "sha256").hexdigest()
    assert told(found, "public.people")["differences"] == [values({"email": key}, note=("streamed", "unseen"))]
    ask_repairs(home.home, found)
    home.catch_up()
    mended = diff_stream(home.home)
    assert states(mended) == {"public.people": "equal"}, mended.as_dict()
    postgres_server.drop_database(name)
