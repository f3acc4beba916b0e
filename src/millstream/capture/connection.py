"""Connections to the source, and the one place where PostgreSQL's errors become Millstream's.

Both kinds of connection, ordinary and replication, pin their session: the text of a value never depends on the
settings of a role or a database. Nothing here retries; callers do, by `MillstreamError.retry`.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from millstream.errors import MillstreamError, SourceError
from millstream.libpq import (
    ADDRESS_HINT,
    CHANGED_LOGIN_HINT,
    describe_parameters,
    one_line,
    parse_address,
    pinned_session,
    with_patience,
)

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

VERSION_MIN: Final = 140000

# The little that capture writes (publications) waits for no standby.
_SESSION: Final = pinned_session(synchronous_commit="local")
_SESSION_SINCE_17: Final = f"{_SESSION}; SET transaction_timeout = 0"
_LOOKS_FOR_CLIENT_S: Final = 2
"""Seconds between two looks of the server whether its client is still there: one call of the operating system each."""


def parse_dsn(dsn: str) -> dict[str, Any]:
    """Return the DSN's parameters; raise `source_dsn_invalid` if it can't be parsed."""
    try:
        return parse_address(dsn)
    except ValueError as error:
        raise SourceError(f"the source's DSN {error}", code="source_dsn_invalid", hint=ADDRESS_HINT) from error


def describe_dsn(dsn: str) -> str:
    """Return the server and database of a DSN, without its secrets."""
    return describe_parameters(parse_dsn(dsn))


def connect(dsn: str, *, purpose: str) -> Connection:
    """Open an ordinary connection with a pinned session, in autocommit; the caller closes it.

    Raises:
        SourceError: its kind names the cause (DSN, authentication, database, version, reachability).
    """
    return _connect(dsn, f"millstream {purpose}")


def connect_replication(dsn: str) -> Connection:
    """Open a logical replication connection with a pinned session; only simple queries go over it."""
    connection = _connect(dsn, "millstream stream", replication="database")
    end_with_client(connection)
    return connection


def end_with_client(connection: Connection) -> None:
    """Let the server end the session within seconds of the client's end, also amid a statement that sends nothing.

    Otherwise it runs the statement to its end: a slot that waits for a transaction stays until that has ended. Some
    platforms of a server can't watch the client; there it stays as it is.
    """
    with suppress(psycopg.Error):
        # The second statement starts the server's timer.
        connection.pgconn.exec_(f"SET client_connection_check_interval = '{_LOOKS_FOR_CLIENT_S}s'; SELECT 1".encode())


def pinned(dsn: str, connection: Connection) -> str:
    """Return the DSN of the one server that a connection was made to, with all secrets in it."""
    parameters = parse_dsn(dsn)
    info = connection.info
    for name in ("host", "hostaddr", "port", "target_session_attrs", "load_balance_hosts"):
        parameters.pop(name, None)
    where = {"host": info.host, "hostaddr": info.hostaddr, "port": str(info.port)}
    return make_conninfo("", **parameters, **{name: value for name, value in where.items() if value})


def take_bytes_as_they_are(connection: Connection) -> None:
    """Make a database of the encoding SQL_ASCII, which may hold any bytes, send them unchanged.

    With UTF-8 as the client encoding, the server would check every value and end the stream at the first that isn't
    UTF-8. This way one table is quarantined. Don't read names over the connection afterwards: psycopg returns them as
    bytes.
    """
    if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        with translated():
            connection.pgconn.exec_(b"SET client_encoding = 'SQL_ASCII'")


def check_version(server_version: int) -> None:
    """Raise `SourceError` (`source_version_unsupported`) for a server that can't be captured, by libpq's version number."""
    if server_version < VERSION_MIN:
        raise SourceError(
            f"the source is PostgreSQL {server_version // 10000}; {VERSION_MIN // 10000} is the oldest that can be captured",
            code="source_version_unsupported",
        )


def _connect(dsn: str, name: str, **more: str) -> Connection:
    parameters = with_patience(parse_dsn(dsn), name) | more
    try:
        connection = psycopg.connect(autocommit=True, prepare_threshold=None, **parameters)
    except psycopg.Error as error:
        raise _translate_refusal(error, dsn) from error
    try:
        check_version(connection.info.server_version)
        with translated():
            session = _SESSION_SINCE_17 if connection.info.server_version >= 170000 else _SESSION
            result = connection.pgconn.exec_(session.encode())
            if result.status != pq.ExecStatus.COMMAND_OK:
                raise translate_result(result)
    except BaseException:
        connection.close()
        raise
    return connection


def _translate_refusal(error: psycopg.Error, dsn: str) -> SourceError:
    """Return the error of a failed connection attempt. libpq has no SQLSTATE here, only the server's message."""
    text = one_line(error)
    lower = text.lower()
    where = describe_dsn(dsn)
    kinds: tuple[tuple[tuple[str, ...], str, str | None], ...] = (
        (
            (
                "password authentication failed",
                "no password supplied",
                "pg_hba.conf",
                "authentication failed",
                "is not permitted to log in",
            ),
            "source_authentication_failed",
            (
                "Put the password into ~/.pgpass, or a variable such as ${SHOP_PASSWORD} into the DSN in millstream.toml; "
                f"check the user and pg_hba.conf too. {CHANGED_LOGIN_HINT}"
            ),
        ),
        (
            ("certificate", "private key file", "does not match host name", "does not support ssl"),
            "source_tls_failed",
            None,
        ),
        (
            ("permission denied", "must be superuser or replication role", "permission to start wal sender"),
            "source_privilege_missing",
            "Run `ALTER ROLE <role> REPLICATION` (and `GRANT CONNECT ON DATABASE …`) as a superuser.",
        ),
        (("number of requested standby connections exceeds",), "no_free_slot", None),
        (
            ("definition of service", "service file", "invalid port", "invalid sslmode", "invalid connection option"),
            "source_dsn_invalid",
            "Correct the DSN in millstream.toml, or the file that it names.",
        ),
    )
    if "database" in lower and "does not exist" in lower:
        return SourceError(
            f"{where}: {text}",
            code="source_database_missing",
            hint="Create the database, or correct its name in the DSN.",
        )
    if "role" in lower and "does not exist" in lower:
        return SourceError(
            f"{where}: {text}",
            code="source_authentication_failed",
            hint="Create the role, or correct the user in the DSN.",
        )
    for parts, code, hint in kinds:
        if any(part in lower for part in parts):
            return SourceError(f"{where}: {text}", code=code, hint=hint)
    return SourceError(f"{where}: {text}", code="source_unreachable")


_BY_SQLSTATE: Final[dict[str, tuple[str, str | None]]] = {
    "28000": ("source_authentication_failed", None),
    "28P01": ("source_authentication_failed", None),
    "3D000": ("source_database_missing", None),
    "42501": ("source_privilege_missing", "Run the GRANT statements that `millstream doctor --sql` prints."),
    "53400": ("no_free_slot", None),
    "53300": ("source_unreachable", "Close other connections to the server, or raise max_connections."),
    "40P01": ("source_deadlock", "The other session goes on. Millstream asks again."),
    "55006": ("slot_active", "Stop the other connection that reads the slot, or wait for it to end."),
    "57P01": ("source_unreachable", None),
    "57P02": ("source_unreachable", None),
    "57P03": ("source_unreachable", None),
    "08000": ("source_unreachable", None),
    "08003": ("source_unreachable", None),
    "08006": ("source_unreachable", None),
}


_RELATION_GONE: Final = ("could not open relation with oid", "cache lookup failed for")
"""Beginnings of PostgreSQL's messages, which it doesn't translate, about what was dropped during a statement."""
_DATA_EXCEPTION: Final = "22"
"""Class of SQLSTATEs for values that don't fit an operation."""
_QUOTED_HINT: Final = "Look for the whole message in the server's own log: it may quote the value."


def next_result(pgconn: pq.abc.PGconn) -> pq.abc.PGresult | None:
    """Return the next result of a command; None after the last.

    libpq's own wait for a result keeps the GIL, and with it every thread of this process. The source may be waiting
    for one of these threads. This function waits without the GIL.

    Raises:
        psycopg.OperationalError: the connection broke.
    """
    while (unsent := pgconn.flush()) or pgconn.is_busy():
        wait_for(pgconn, select.POLLIN | (select.POLLOUT if unsent else 0))
        pgconn.consume_input()
    return pgconn.get_result()


def wait_for(pgconn: pq.abc.PGconn, events: int) -> None:
    """Wait for one of the events of a connection's socket, for a second at most."""
    poll = select.poll()
    poll.register(pgconn.socket, events)
    poll.poll(1000)


def translate(error: psycopg.Error) -> MillstreamError:
    """Return our error for one of psycopg's on an open connection."""
    return _of_sqlstate(error.sqlstate, " ".join(str(error).split()), lost=isinstance(error, psycopg.OperationalError))


def translate_result(result: pq.abc.PGresult) -> MillstreamError:
    """Return our error for a failed result of the `pq` layer."""
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    message = (
        result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message or b"the connection was lost"
    )
    return _of_sqlstate(
        None if state is None else state.decode(), message.decode("utf-8", "replace"), lost=state is None
    )


def translate_fields(state: str | None, message: str) -> MillstreamError:
    """Return our error for an ErrorResponse that libpq didn't read."""
    return _of_sqlstate(state, message, lost=state is None)


def _of_sqlstate(state: str | None, text: str, *, lost: bool) -> MillstreamError:
    lower = text.lower()
    if state is not None and state.startswith(_DATA_EXCEPTION):
        # An expression failed: a publication's row filter, or a generated column. In any language its message quotes
        # the value, which may be one that a rule keeps at the source.
        return SourceError(f"PostgreSQL can't compute a value ({state})", hint=_QUOTED_HINT, sqlstate=state)
    if state == "55000" and "wal_level" in lower:
        return SourceError(f"the source can't decode its WAL: {text}", code="wal_level_not_logical")
    if state == "55000" and ("no longer" in lower or "invalidated" in lower or "cannot read from" in lower):
        return SourceError(f"the slot's WAL is gone: {text}", code="slot_lost", hint=RECOPY_HINT)
    if state == "42704" and "replication slot" in lower:
        return SourceError(f"the slot is gone: {text}", code="slot_lost", hint=RECOPY_HINT)
    if state == "53400" and "temporary file" in lower:
        return SourceError(text, hint="Raise temp_file_limit at the source.", sqlstate=state)
    if state == "XX000" and lower.startswith(_RELATION_GONE):
        return SourceError(text, code="source_relation_gone", hint="Millstream asks again.", sqlstate=state)
    if state in _BY_SQLSTATE:
        code, hint = _BY_SQLSTATE[state]
        return SourceError(text, code=code, hint=hint, sqlstate=state)
    if state is None and lost:
        return SourceError(text, code="source_unreachable")
    return SourceError(text, hint="The message is PostgreSQL's own.", sqlstate=state)


RECOPY_HINT: Final = (
    "Run `millstream slot drop`: the changes since then are lost, and the next `millstream run` creates a new slot and copies "
    "every table again."
)


@contextmanager
def translated() -> Iterator[None]:
    """Translate psycopg's errors raised within the block."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error) from error


Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]


def all_rows(connection: Connection, query: str, parameters: Parameters | None = None) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    with translated():
        return connection.execute(query, parameters).fetchall()


def first_row(connection: Connection, query: str, parameters: Parameters | None = None) -> tuple[Any, ...] | None:
    """Return the first row of a query; None if it has none."""
    with translated():
        return connection.execute(query, parameters).fetchone()


def one_row(connection: Connection, query: str, parameters: Parameters | None = None) -> tuple[Any, ...]:
    """Return the first row of a query that always has one."""
    row = first_row(connection, query, parameters)
    assert row is not None
    return row
