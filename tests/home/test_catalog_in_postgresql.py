"""A home whose catalog lies in PostgreSQL: a user changes only one line."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import config, done, make_home, run, wait_for
from tests.commands import Command

from millstream.administration.doctor import examine
from millstream.catalog import Catalog
from millstream.errors import ConfigError
from millstream.home.home import Home
from millstream.model.access import EVERYTHING
from millstream.testing import EmbeddedPostgres
from millstream.testing.pytest_plugin import Database

pytestmark = pytest.mark.siege

IDLE_S = 4
"""Longer than the interval of the heartbeat, which capture writes whatever happens."""

SECRET = "p@ss:w/ord"


def ids(home: Path, *words: str) -> list[int]:
    return [json.loads(line)["row"]["id"] for line in done(home, "wal", "cat", *words).splitlines()]


@pytest.fixture
def source(postgres: Database) -> Database:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        connection.execute("INSERT INTO orders SELECT generate_series(1, 20)")
    return postgres


@pytest.fixture
def elsewhere(postgres_server: EmbeddedPostgres, postgres: Database) -> Iterator[str]:
    """Another database, for catalogs alone."""
    name = f"{postgres.name}_catalog"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.mark.parametrize("made_by", ["millstream", "a DBA, for all tables"])
def test_a_home_runs_on_a_catalog_in_the_very_database_that_it_captures(
    tmp_path: Path, source: Database, made_by: str
) -> None:
    if made_by != "millstream":
        with source.connect() as connection:
            connection.execute("CREATE PUBLICATION millstream_shop FOR ALL TABLES")
    home = make_home(tmp_path / "shop", config(source.dsn, "${CATALOG}"))
    done(home, "capture", "run", "--until-caught-up", CATALOG=source.dsn)
    with source.connect() as connection:
        connection.execute("INSERT INTO orders SELECT generate_series(21, 40)")
    done(home, "capture", "run", "--until-caught-up", CATALOG=source.dsn)
    assert sorted(ids(home)) == list(range(1, 41))
    tables = json.loads(done(home, "tables", "--json", CATALOG=source.dsn))
    assert [(t["stream"], t["name"], t["state"]) for t in tables] == [("shop", "public.orders", "streaming")]
    status = json.loads(done(home, "status", "--json", CATALOG=source.dsn))
    assert status["problems"] == []
    assert status["streams"][0]["writer"]["epoch"] == 2
    assert not (home / "data" / "catalog.db").exists()
    with source.connect() as connection:
        captured = connection.execute("SELECT namespace, name FROM millstream.tables WHERE kind = 'table'").fetchall()
        assert captured == [("public", "orders")]
        if made_by == "millstream":
            sent = connection.execute("SELECT DISTINCT schemaname FROM pg_publication_tables").fetchall()
            assert sent == [("public",)]


def test_an_idle_home_writes_next_to_nothing_into_the_database_that_it_captures(
    tmp_path: Path, source: Database
) -> None:
    """Capture's writes to its catalog reach it again as WAL; that must not cause new writes for ever."""
    home = make_home(tmp_path / "shop", config(source.dsn, source.dsn) + 'heartbeat_interval = "2s"\n')
    with _capturing(home), source.connect() as connection:
        wait_for(lambda: _states(connection) == ["streaming"])
        time.sleep(1)
        before = _transactions(connection)
        time.sleep(IDLE_S)
        made = _transactions(connection) - before
    assert made < 5 * IDLE_S, made


def test_the_catalogs_server_crashes_while_capture_runs_and_nothing_is_lost(tmp_path: Path, source: Database) -> None:
    with EmbeddedPostgres(fsync=False) as server:
        home = make_home(tmp_path / "shop", config(source.dsn, server.dsn(), tables='["public.*"]'))
        number = 20
        with _capturing(home) as capture, source.connect() as connection:
            for crash in range(3):
                with server.connect() as looking:
                    wait_for(lambda looking=looking: _states(looking)[:1] == ["streaming"])
                for _ in range(50):
                    number += 1
                    connection.execute("INSERT INTO orders VALUES (%s)", [number])
                # A new table during the catalog's outage: only the catalog can give it a number.
                connection.execute(f"CREATE TABLE t{crash} (id bigint PRIMARY KEY)")
                server.stop("immediate")
                connection.execute(f"INSERT INTO t{crash} VALUES (%s)", [1000 + crash])
                for _ in range(50):
                    number += 1
                    connection.execute("INSERT INTO orders VALUES (%s)", [number])
                server.start()
                assert capture.poll() is None
            wait_for(lambda: len(ids(home)) == number + 3)
            assert capture.poll() is None
        done(home, "capture", "run", "--until-caught-up")
        assert sorted(set(ids(home, "--table", "public.orders"))) == list(range(1, number + 1))
        streamed = [n for n in ids(home, "--table", "public.orders") if n > 20]
        assert streamed == list(range(21, number + 1))
        states = {t["name"]: t["state"] for t in json.loads(done(home, "tables", "--json"))}
        assert states == {f"public.{name}": "streaming" for name in ("orders", "t0", "t1", "t2")}


def test_homes_share_a_database_and_no_name(tmp_path: Path, source: Database, elsewhere: str) -> None:
    north = make_home(tmp_path / "north", config(source.dsn, elsewhere))
    south = make_home(tmp_path / "south", config(source.dsn, elsewhere))
    done(north, "capture", "run", "--until-caught-up")
    ended = run(south, "capture", "run", "--until-caught-up")
    assert ended.returncode == 1
    assert str(north) in ended.stderr
    assert str(south) in ended.stderr
    assert "Rename this stream" in ended.stderr
    make_home(south, config(source.dsn, elsewhere, stream="clicks"))
    done(south, "capture", "run", "--until-caught-up")
    for home, name in ((north, "shop"), (south, "clicks")):
        status = json.loads(done(home, "status", "--json"))
        assert [(s["name"], s["state"]) for s in status["streams"]] == [(name, "stopped")]
        assert {t["stream"] for t in json.loads(done(home, "tables", "--json"))} == {name}
        assert sorted(ids(home)) == list(range(1, 21))
    # A home that was moved is the same home.
    moved = north.rename(tmp_path / "west")
    done(moved, "capture", "run", "--until-caught-up")
    assert len(ids(moved)) == 20


def test_a_home_is_moved_into_postgresql_with_the_numbers_that_its_log_has(
    tmp_path: Path, source: Database, elsewhere: str
) -> None:
    home = make_home(tmp_path / "shop", config(source.dsn, None))
    with source.connect() as connection:
        connection.execute("CREATE TABLE first_of_all (id bigint PRIMARY KEY)")
    done(home, "capture", "run", "--until-caught-up")
    before = done(home, "tables", "--json")
    assert run(home, "catalog", "move").returncode == 2

    make_home(home, config(source.dsn, elsewhere))
    assert "is still" in run(home, "status").stderr
    for words in (["tables"], ["capture", "run", "--until-caught-up"]):
        ended = run(home, *words)
        assert ended.returncode == 1
        assert "catalog move" in ended.stderr, words
    done(home, "catalog", "move")
    assert not (home / "data" / "catalog.db").exists()
    assert done(home, "tables", "--json") == before
    with source.connect() as connection:
        connection.execute("CREATE TABLE a_new_one (id bigint PRIMARY KEY)")
        connection.execute("INSERT INTO a_new_one VALUES (1)")
        connection.execute("INSERT INTO orders VALUES (21)")
    done(home, "capture", "run", "--until-caught-up")
    assert sorted(ids(home, "--table", "public.orders")) == list(range(1, 22))
    found = {t["name"]: t["id"] for t in json.loads(done(home, "tables", "--json"))}
    assert {t["name"]: t["id"] for t in json.loads(before)}.items() <= found.items()
    assert len(set(found.values())) == 3
    # The home doesn't silently fall back to a new, empty file.
    make_home(home, config(source.dsn, None))
    ended = run(home, "capture", "run", "--until-caught-up")
    assert ended.returncode == 1
    assert "Restore `url`" in ended.stderr
    make_home(home, config(source.dsn, elsewhere))

    other = make_home(tmp_path / "other", config(source.dsn, None, stream="other"))
    done(other, "capture", "run", "--until-caught-up")
    make_home(other, config(source.dsn, elsewhere, stream="other"))
    ended = run(other, "catalog", "move")
    assert ended.returncode == 1
    assert "a database of its own" in ended.stderr
    make_home(other, config(source.dsn, None, stream="other"))
    assert len(json.loads(done(other, "tables", "--json"))) == 3


def test_a_move_that_was_cut_short_is_finished_by_the_next(tmp_path: Path, elsewhere: str) -> None:
    home = Home(make_home(tmp_path / "shop", config("dbname=shop", None)))
    home.prepare()
    with home.open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        token, _ = catalog.create_access_token(EVERYTHING, name="ops")
    kept = home.catalog_file.read_bytes()
    make_home(home.path, config("dbname=shop", elsewhere))
    done(home.path, "catalog", "move")
    home.catalog_file.write_bytes(kept)
    done(home.path, "catalog", "move")
    with Home(home.path).open_catalog() as catalog:
        assert catalog.stream("shop").id == stream
        assert catalog.access_tokens() == [token]


def test_a_variable_that_is_not_set_stops_only_those_who_need_the_catalog(
    tmp_path: Path, source: Database, elsewhere: str
) -> None:
    home = make_home(tmp_path / "shop", config(source.dsn, "${CATALOG}"))
    done(home, "capture", "run", "--until-caught-up", CATALOG=elsewhere)
    assert len(ids(home)) == 20
    assert "${CATALOG}" in done(home, "config", "show")
    ended = run(home, "tables", "retry", "public.orders")
    assert ended.returncode == 2
    assert "export CATALOG=" in ended.stderr
    status = json.loads(done(home, "status", "--json"))
    assert any("CATALOG" in problem for problem in status["problems"])
    assert run(home, "capture", "run").returncode == 2


def test_the_address_is_shown_without_its_password(tmp_path: Path) -> None:
    for written in ("postgresql://app:${SECRET}@127.0.0.1:1/x", "host=127.0.0.1 port=1 user=app password=${SECRET}"):
        home = make_home(tmp_path / "shop", config("dbname=shop", written))
        shown = done(home, "config", "show", SECRET=SECRET)
        assert "***" in shown
        ended = run(home, "--debug", "tables", "retry", "x", SECRET=SECRET)
        assert "catalog_unreachable" in ended.stderr
        for text in (shown, ended.stderr, ended.stdout, run(home, "status", SECRET=SECRET).stderr):
            assert SECRET not in text
            assert "p%40ss" not in text
    home = make_home(tmp_path / "shop", config("dbname=shop", None))
    assert 'url = "data/catalog.db"' in done(home, "config", "show")
    assert "MILLSTREAM_CATALOG__URL" in done(home, "config", "show", MILLSTREAM_CATALOG__URL="service=catalog")


@pytest.mark.parametrize("url", ["mysql://host/x", "sqlite:///x.db", "other.db", ""])
def test_an_address_that_is_none_is_refused_by_name(tmp_path: Path, url: str) -> None:
    home = Home(make_home(tmp_path / "shop", config("dbname=shop", url)))
    with pytest.raises(ConfigError, match=r"catalog\.url: must be a PostgreSQL address"):
        assert home.config


def test_doctor_looks_at_the_catalog_and_changes_nothing(
    tmp_path: Path, postgres_server: EmbeddedPostgres, elsewhere: str
) -> None:
    def found(url: str) -> tuple[str, str, str]:
        home = Home(make_home(tmp_path / "shop", config("dbname=shop", url)))
        looks = examine(home, lambda _line: None)
        one = next(look for look in looks if look.check == "catalog")
        return one.code, one.message, one.fix

    assert found(elsewhere)[:2] == ("ok", found(elsewhere)[1])
    assert "the first run makes it" in found(elsewhere)[1]
    name = elsewhere.rsplit("/", 1)[1].split("?", maxsplit=1)[0]
    with postgres_server.connect(name) as connection:
        assert connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'millstream'").fetchone() == (0,)
        connection.execute("CREATE ROLE looker LOGIN")
        try:
            looker = postgres_server.dsn(name, user="looker")
            assert "CREATE SCHEMA millstream AUTHORIZATION looker" in found(looker)[2]
            with Catalog(elsewhere) as catalog:
                catalog.put_fact("a", "x", 1)
            assert "GRANT USAGE" in found(looker)[2]
            connection.execute("GRANT USAGE ON SCHEMA millstream TO looker")
            assert "not read and write access_tokens, alembic_version" in found(looker)[1]
            connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA millstream TO looker")
            connection.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA millstream TO looker")
            assert found(looker)[0] == "ok"
            connection.execute("UPDATE millstream.alembic_version SET version_num = '0000'")
            assert "schema 0000; the next run makes it" in found(looker)[1]
            connection.execute("UPDATE millstream.alembic_version SET version_num = '9999'")
            assert found(looker)[0] == "catalog_too_new"
        finally:
            connection.execute("DROP OWNED BY looker")
            connection.execute("DROP ROLE looker")
    assert found("host=127.0.0.1 port=1")[0] == "catalog_unreachable"


def test_a_home_that_was_never_run_has_nothing_to_show(tmp_path: Path, elsewhere: str) -> None:
    home = make_home(tmp_path / "shop", config("dbname=shop", elsewhere))
    status = json.loads(done(home, "status", "--json"))
    assert [(s["name"], s["state"]) for s in status["streams"]] == [("shop", "never run")]
    assert json.loads(done(home, "tables", "--json")) == []


@contextmanager
def _capturing(home: Path) -> Iterator[Command]:
    """Run `capture run` as a process, and end it by SIGTERM."""
    process = Command(["--home", str(home), "capture", "run"], stdin=subprocess.DEVNULL)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(180)
    finally:
        process.kill()
        process.wait()


def _states(connection: Any) -> list[str]:
    there = connection.execute("SELECT to_regclass('millstream.tables') IS NOT NULL").fetchone()
    if not there[0]:
        return []
    rows = connection.execute("SELECT state FROM millstream.tables WHERE kind = 'table' ORDER BY id").fetchall()
    return [row[0] for row in rows]


def _transactions(connection: Any) -> int:
    row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    return int(row[0])
