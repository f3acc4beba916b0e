"""Failures of a catalog in PostgreSQL: cut connections, stopped servers, roles without permission, held locks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from tests.cutting import Link

from millstream.catalog import Catalog, TableState
from millstream.errors import CatalogError, MillstreamError, Retry
from millstream.model.ids import TableId
from millstream.model.positions import Lsn
from millstream.testing import EmbeddedPostgres
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database

pytestmark = pytest.mark.siege

SECRET = "p@ss w/ord:%'\\x"
WRONG = "not-that"
COMMIT = b"COMMIT\0"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """Yield a server that asks for passwords over TCP, and that a test may stop."""
    with EmbeddedPostgres(fsync=False, tcp=True, hba=["host all guarded samehost scram-sha-256"]) as server:
        with server.connect() as connection:
            connection.execute(
                psycopg.sql.SQL("CREATE ROLE guarded LOGIN PASSWORD {}").format(psycopg.sql.Literal(SECRET))
            )
        yield server


@pytest.fixture
def database(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the name of a fresh database on the server."""
    name = "d" + str(abs(hash(request.node.name)))[:10]
    server.create_database(name)
    yield name
    server.drop_database(name)


def guarded(server: EmbeddedPostgres, database: str, password: str = SECRET) -> str:
    return server.dsn(database, user="guarded", tcp=True, password=password)


def some_table(catalog: Catalog) -> TableId:
    stream = catalog.resolve_stream("shop")
    source = catalog.resolve_source(stream, 7, "shop", 1)
    return catalog.table_for(stream, source, 16400, "public", "orders").id


# --- opening -------------------------------------------------------------------------------------------------------


@pytest.fixture
def passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "pgpass"
    escaped = SECRET.replace("\\", "\\\\").replace(":", "\\:")
    file.write_text(f"*:*:*:guarded:{escaped}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    return file


def test_services_and_password_files_work_as_libpq_has_them(
    server: EmbeddedPostgres, database: str, passwords: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del passwords
    with server.connect(database) as connection:
        connection.execute("CREATE SCHEMA millstream AUTHORIZATION guarded")
    services = tmp_path / "services"
    services.write_text(f"[catalog]\nhost=127.0.0.1\nport={server.port}\ndbname={database}\nuser=guarded\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    for where in (
        "service=catalog",
        "postgresql://?service=catalog",
        f"host=127.0.0.1 port={server.port} dbname={database} user=guarded",
    ):
        with Catalog(where) as catalog:
            stream = catalog.resolve_stream("shop")
            assert [row.id for row in catalog.streams()] == [stream]
            address = catalog.database.address
            assert address is not None
            with psycopg.connect(address) as dedicated:
                row = dedicated.execute(
                    "SELECT current_setting('application_name'), count(*) FROM millstream.streams"
                ).fetchone()
            assert row == ("millstream catalog", 1)


def refused(open_: Callable[[], object]) -> CatalogError:
    """Return the error, after a check that no part of it shows a password."""
    with pytest.raises(CatalogError) as caught:
        open_()
    error = caught.value
    shown = [str(error), error.hint, repr(error.details), *traceback.format_exception(error)]
    for secret in (SECRET, quote(SECRET, safe=""), "ss w/ord", WRONG):
        assert not any(secret in line for line in shown), secret
    return error


def test_a_wrong_password_is_said_and_never_shown(server: EmbeddedPostgres, database: str) -> None:
    wrong = guarded(server, database, WRONG)
    error = refused(lambda: Catalog(wrong))
    assert error.retry is Retry.OPERATOR
    assert "password authentication failed" in error.message
    assert "pgpass" in error.hint
    assert "restart Millstream" in error.hint
    unescaped = f"postgresql://guarded:{SECRET}@127.0.0.1:{server.port}/{database}"
    assert "%-encode" in refused(lambda: Catalog(unescaped)).message + refused(lambda: Catalog(unescaped)).hint


def test_what_cannot_be_opened_says_what_to_do(server: EmbeddedPostgres, database: str) -> None:
    assert "Create the database" in refused(lambda: Catalog(guarded(server, "nowhere"))).hint
    nobody = server.dsn(database, user="nobody", tcp=True)
    assert "Check user" in refused(lambda: Catalog(nobody)).hint
    assert "service" in refused(lambda: Catalog("service=nowhere")).message
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        closed = f"postgresql://guarded:{quote(SECRET, safe='')}@127.0.0.1:{listening.getsockname()[1]}/x"
        error = refused(lambda: Catalog(closed))
    assert error.code == "catalog_unreachable"
    assert error.retry is Retry.BACKOFF


def test_a_role_that_may_not_make_the_schema_is_told_the_sql_that_helps(
    server: EmbeddedPostgres, database: str
) -> None:
    error = refused(lambda: Catalog(guarded(server, database)))
    assert "may not make it" in error.message
    statement = error.hint.split(": ", 1)[1].split(";")[0]
    with server.connect(database) as connection:
        connection.execute(statement)
    with Catalog(guarded(server, database)) as catalog:
        catalog.resolve_stream("shop")


def test_a_role_without_rights_on_the_schema_is_told_so(server: EmbeddedPostgres, database: str) -> None:
    Catalog(server.dsn(database)).close()
    error = refused(lambda: Catalog(guarded(server, database)))
    assert "GRANT USAGE" in error.hint
    with server.connect(database) as connection:
        connection.execute("GRANT USAGE ON SCHEMA millstream TO guarded")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA millstream TO guarded")
    with Catalog(guarded(server, database)) as catalog:
        assert catalog.streams() == []
        assert "GRANT ALL" in refused(lambda: catalog.resolve_stream("shop")).hint


def test_a_server_without_a_free_connection_is_waited_for(server: EmbeddedPostgres, database: str) -> None:
    Catalog(server.dsn(database)).close()
    with server.connect() as connection:
        connection.execute(f"ALTER DATABASE {database} CONNECTION LIMIT 1")
        connection.execute(f"GRANT ALL ON DATABASE {database} TO guarded")
        with server.connect(database) as granting:
            granting.execute("GRANT ALL ON SCHEMA millstream TO guarded")
            granting.execute("GRANT ALL ON ALL TABLES IN SCHEMA millstream TO guarded")
        with psycopg.connect(guarded(server, database)):
            error = refused(lambda: Catalog(guarded(server, database)))
            assert error.code == "catalog_unreachable"
            assert "max_connections" in error.hint
        with Catalog(guarded(server, database)) as catalog:
            assert catalog.streams() == []


def test_a_database_that_is_read_only_is_said_as_such_and_can_be_read(server: EmbeddedPostgres, database: str) -> None:
    with Catalog(server.dsn(database)) as catalog:
        stream = catalog.resolve_stream("shop")
    with server.connect() as connection:
        connection.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    with Catalog(server.dsn(database)) as catalog:
        assert catalog.stream("shop").id == stream
        error = refused(lambda: catalog.put_fact("a", "x", 1))
    assert error.code == "catalog_unreachable"
    assert "target_session_attrs" in error.hint


def test_a_database_of_another_encoding_is_refused(server: EmbeddedPostgres) -> None:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    try:
        assert "UTF8" in refused(lambda: Catalog(server.dsn("latin"))).hint
    finally:
        server.drop_database("latin")


def test_what_roles_databases_and_other_programs_have_there_does_not_matter(
    server: EmbeddedPostgres, database: str
) -> None:
    with server.connect(database) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num text)")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
        connection.execute("CREATE TABLE streams (other text)")
        for setting in (
            "search_path = public",
            "synchronous_commit = off",
            "statement_timeout = 1500",  # for a connection's first statement, on a machine that may be slow
            "timezone = 'Asia/Tokyo'",
        ):
            connection.execute(f"ALTER DATABASE {database} SET {setting}")
    with Catalog(server.dsn(database)) as catalog:
        table = some_table(catalog)
        with catalog.database.write() as raw:
            raw.execute(text("SELECT pg_sleep(2)"))
            shown = [raw.execute(text(f"SHOW {name}")).scalar() for name in ("synchronous_commit", "search_path")]
        assert shown == ["on", "millstream, pg_temp"]
        assert catalog.table(table).name == "orders"
    with server.connect(database) as connection:
        assert connection.execute("SELECT version_num FROM public.alembic_version").fetchall() == [("9999",)]
        assert connection.execute("SELECT * FROM public.streams").fetchall() == []


# --- while it runs -------------------------------------------------------------------------------------------------


def test_connections_that_were_cut_are_replaced_unseen(postgres: Database) -> None:
    with Catalog(postgres.dsn) as catalog:
        table = some_table(catalog)
        # Several connections in the pool, all of them cut.
        together = threading.Barrier(4)

        def read() -> None:
            with catalog.database.read():
                together.wait(60)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with postgres.connect() as connection:
            cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'millstream catalog'"
            row = connection.execute(cut + " AND datname = current_database()").fetchone()
            assert row is not None
            assert row[0] >= 2
        assert catalog.set_state(table, TableState.COPYING, copy_id="c1", only_from=[TableState.COPY_REQUESTED])


def test_a_transaction_that_was_cut_in_the_middle_has_changed_nothing_and_may_come_again(postgres: Database) -> None:
    with Catalog(postgres.dsn) as catalog:
        catalog.put_fact("a", "x", 1)

        def cut_in_the_middle() -> None:
            with catalog.database.write() as connection:
                pid = connection.execute(text("SELECT pg_backend_pid()")).scalar()
                connection.execute(text("UPDATE facts SET value = '2'"))
                with postgres.connect() as other:
                    other.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
                connection.execute(text("UPDATE facts SET value = '3'"))

        with pytest.raises(CatalogError, check=coded("catalog_unreachable")):
            cut_in_the_middle()
        assert catalog.fact("a", "x") == 1


@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
def test_a_server_that_restarts_is_waited_for(server: EmbeddedPostgres, database: str, mode: str) -> None:
    with Catalog(server.dsn(database)) as catalog:
        stream = catalog.resolve_stream("shop")
        source = catalog.resolve_source(stream, 7, "shop", 1)
        stop = threading.Event()
        moved: list[int] = []
        failed: list[MillstreamError] = []

        def move() -> None:
            while not stop.is_set():
                try:
                    moved.append(int(catalog.move_reached(source, Lsn(len(moved) + 1))))
                except CatalogError as error:  # cut in the middle of a call, which may be repeated
                    failed.append(error)

        thread = threading.Thread(target=move)
        thread.start()

        def go_on() -> None:
            seen = len(moved)
            reach(lambda: len(moved) > seen + 20)

        for _ in range(2):
            go_on()
            server.restart(mode)
        go_on()
        stop.set()
        thread.join()
        assert len(failed) <= 2, failed
        assert catalog.reached(source) == moved[-1] == len(moved)


def reach(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_server_that_stays_away_ends_the_wait_with_a_typed_error(server: EmbeddedPostgres, database: str) -> None:
    with Catalog(server.dsn(database), busy_timeout_s=0.3) as catalog:
        catalog.put_fact("a", "x", 1)
        server.stop("immediate")
        try:
            for call in (lambda: catalog.put_fact("a", "x", 2), lambda: catalog.fact("a", "x")):
                assert refused(call).code == "catalog_unreachable"
        finally:
            server.start()
        assert catalog.fact("a", "x") == 1


def test_locks_that_are_held_too_long_are_catalog_busy(postgres: Database) -> None:
    with Catalog(postgres.dsn, busy_timeout_s=0.2) as catalog:
        stream = catalog.resolve_stream("shop")
        with postgres.connect(autocommit=False) as other:
            other.execute("LOCK TABLE millstream.streams")
            for call in (lambda: catalog.register_writer(stream), catalog.streams):
                with pytest.raises(CatalogError, check=coded("catalog_busy")) as caught:
                    call()
                assert caught.value.retry is Retry.BACKOFF
        assert catalog.register_writer(stream) == (1, 1)
        Catalog(postgres.dsn).close()


def test_threads_that_all_wait_for_a_connection_are_told_so(postgres: Database) -> None:
    with Catalog(postgres.dsn, busy_timeout_s=0.3) as catalog:
        held = threading.Event()
        together = threading.Barrier(9)

        def hold() -> None:
            with catalog.database.read():
                together.wait(60)
                held.wait(60)

        threads = [threading.Thread(target=hold) for _ in range(8)]
        for thread in threads:
            thread.start()
        together.wait(60)
        try:
            with pytest.raises(CatalogError, check=coded("catalog_busy"), match="of this process"):
                catalog.streams()
        finally:
            held.set()
            for thread in threads:
                thread.join()
        assert catalog.streams() == []


# --- a COMMIT without an answer ------------------------------------------------------------------------------------


@pytest.fixture
def cutting(server: EmbeddedPostgres) -> Iterator[Link]:
    """A link between a client and the server that the test can cut."""
    with contextlib.closing(Link(server.port)) as link:
        yield link


def test_a_commit_that_got_there_counts_though_its_answer_was_lost(cutting: Link, database: str) -> None:
    with Catalog(f"postgresql://postgres@127.0.0.1:{cutting.port}/{database}") as catalog:
        table = some_table(catalog)
        for number in range(5):
            catalog.set_state(table, TableState.COPY_REQUESTED)
            cutting.lose(COMMIT, arrives=True)
            assert catalog.set_state(table, TableState.COPYING, str(number), only_from=[TableState.COPY_REQUESTED])
            assert catalog.table(table).reason == str(number)
            stream = catalog.stream("shop").id
            cutting.lose(COMMIT, arrives=True)
            assert catalog.register_writer(stream) == (1, number + 1)
        assert cutting.losses == 10


def test_a_commit_that_did_not_get_there_is_an_error_and_nothing_was_changed(cutting: Link, database: str) -> None:
    with Catalog(f"postgresql://postgres@127.0.0.1:{cutting.port}/{database}") as catalog:
        table = some_table(catalog)
        for _ in range(5):
            cutting.lose(COMMIT, arrives=False)
            with pytest.raises(CatalogError, check=coded("catalog_unreachable")) as caught:
                catalog.set_state(table, TableState.COPYING, "cut", only_from=[TableState.COPY_REQUESTED])
            assert "outcome" not in caught.value.details
            assert catalog.table(table).state is TableState.COPY_REQUESTED
        assert cutting.losses == 5
        assert catalog.set_state(table, TableState.COPYING, "whole", only_from=[TableState.COPY_REQUESTED])


def test_a_commit_after_which_nobody_can_be_asked_is_said_to_be_unknown(cutting: Link, database: str) -> None:
    with Catalog(f"postgresql://postgres@127.0.0.1:{cutting.port}/{database}", busy_timeout_s=0.3) as catalog:
        some_table(catalog)

        def cut_off_from_then_on() -> None:
            with catalog.database.write() as connection:
                connection.execute(text("UPDATE facts SET value = '2'"))
                cutting.lose(COMMIT, arrives=True)
                cutting.refuse()

        with pytest.raises(CatalogError, check=coded("catalog_unreachable")) as caught:
            cut_off_from_then_on()
        assert cutting.losses == 1
        assert caught.value.details["outcome"] == "unknown"


@pytest.mark.parametrize("version", [14, 18])
def test_a_commit_before_a_crash_is_not_taken_for_anothers_of_the_same_number(version: int) -> None:
    """A crash takes back the numbers of transactions that weren't durable, and gives them to others."""
    with EmbeddedPostgres(version, fsync=False) as server, Catalog(server.dsn()) as catalog:
        backend = catalog.database._backend
        some_table(catalog)
        with catalog.database.write() as connection:
            transaction = (str(connection.execute(text("SELECT pg_current_xact_id()::text")).scalar()), _life(catalog))
            connection.execute(text("UPDATE tables SET reason = 'changed'"))
        lost = DBAPIError("COMMIT", None, psycopg.OperationalError("gone"), connection_invalidated=True)
        assert backend.was_committed(transaction, lost) is True
        assert backend.was_committed((str(int(transaction[0]) + 1000), transaction[1]), lost) is False
        with server.connect() as victim:
            os.kill(victim.info.backend_pid, signal.SIGKILL)
        reach(lambda: _life(catalog) not in {transaction[1], catalog.database.place})
        assert backend.was_committed(transaction, lost) is None


def _life(catalog: Catalog) -> str:
    try:
        with catalog.database._backend._connect() as connection:  # type: ignore[attr-defined]
            return str(connection.life)
    except psycopg.OperationalError:
        return catalog.database.place
