"""The catalog in a PostgreSQL database, 14 or newer: the parts that differ in this backend.

Its tables lie in a schema of their own. Every setting that a transaction needs is sent with its BEGIN, in one round
trip, and is local to it. So the settings of a role, a database or a connection pooler don't matter, nor does an
earlier user of the connection. A writing transaction learns its own id with it, so its outcome can be queried after a
broken COMMIT.

Reads see one snapshot (REPEATABLE READ). Writes are READ COMMITTED: a call locks what it reads and relies on first,
one row at most; `tests/catalog` runs calls concurrently.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import psycopg
from psycopg import conninfo
from sqlalchemy import Connection, Engine, Table, create_engine, text
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from millstream.errors import CatalogError, DiskFull, MillstreamError
from millstream.libpq import (
    ADDRESS_HINT,
    BEGIN,
    CHANGED_LOGIN_HINT,
    describe_parameters,
    fetch_row,
    one_line,
    parse_address,
    with_patience,
)
from millstream.model.names import CATALOG_SCHEMA as SCHEMA

VERSION_MIN: Final = 140000

# Two open connections serve an owner's streams, whose calls are short and rare; more are opened while they are needed.
_POOL_CONNECTIONS: Final = 2
_POOL_CONNECTIONS_MORE: Final = 6
# Age at which a connection is replaced, so that a server at a new address is found without a failure.
_POOL_RECYCLE_S: Final = 3600
# Time after which the peer counts as gone if sent bytes stay unacknowledged.
_TCP_USER_TIMEOUT_MS: Final = 20_000
# Time for a statement in addition to the wait for locks. Ours take milliseconds.
_STATEMENT_TIMEOUT_MORE_S: Final = 30.0
# A process that is stopped within a transaction (SIGSTOP, a suspended machine) blocks others no longer than this.
_IDLE_TIMEOUT_S: Final = 60.0
_MIGRATION_TIMEOUT_S: Final = 600.0
_MIGRATION_LOCK: Final = 0x6D696C6C73747265  # "millstre": ours among the database's advisory locks


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that knows the server's life (start and last crash recovery) in which it was made."""

    life: str = ""


class PostgresBackend:
    """`catalog.database.Backend` over one PostgreSQL database.

    Raises:
        CatalogError: the address can't be parsed.
    """

    schema: Final = SCHEMA
    driver_errors: Final[tuple[type[Exception], ...]] = (psycopg.Error,)

    def __init__(self, address: str, busy_timeout_s: float) -> None:
        try:
            parameters = parse_address(address)
        except ValueError as error:
            raise CatalogError(f"the catalog's address {error}", hint=f"[catalog] url: {ADDRESS_HINT}") from error
        self.place = f"catalog at {describe_parameters(parameters)}"
        bounds = {"tcp_user_timeout": _TCP_USER_TIMEOUT_MS}
        parameters = bounds | with_patience(parameters, "millstream catalog") | {"client_encoding": "UTF8"}
        self.address: str | None = conninfo.make_conninfo(**parameters)
        self._parameters = parameters
        self._busy_timeout_s = busy_timeout_s
        timeouts = (
            f"SET LOCAL search_path = {SCHEMA}, pg_temp; SET LOCAL lock_timeout = {_ms(busy_timeout_s)};"
            f" SET LOCAL statement_timeout = {_ms(busy_timeout_s + _STATEMENT_TIMEOUT_MORE_S)};"
            f" SET LOCAL idle_in_transaction_session_timeout = {_ms(_IDLE_TIMEOUT_S)}"
        )
        self._begin_read = f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {timeouts}"
        # Durable when it returns, even if a role or a database has synchronous_commit off; stricter settings stay.
        self._begin_write = (
            f"{BEGIN}; {timeouts}; SELECT pg_current_xact_id()::text,"
            " CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END"
        )

    def engine(self) -> Engine:
        """Return an engine with a small pool. psycopg connects, so libpq reads services and password files."""
        return create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            use_native_hstore=False,
            pool_size=_POOL_CONNECTIONS,
            max_overflow=_POOL_CONNECTIONS_MORE,
            pool_timeout=self._busy_timeout_s,
            pool_recycle=_POOL_RECYCLE_S,
            pool_use_lifo=True,
        )

    def _connect(self) -> _Connection:
        # Statements prepared on one server connection are missing on the next, behind a pooler.
        connection = _Connection.connect(autocommit=True, prepare_threshold=None, **self._parameters)
        try:
            if connection.info.server_version < VERSION_MIN:
                raise CatalogError(
                    f"{self.place} is PostgreSQL {connection.info.server_version // 10000}",
                    hint="A catalog needs PostgreSQL 14 or newer: name another server in [catalog] url.",
                )
            encoding = connection.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise CatalogError(
                    f"{self.place} has the encoding {encoding}",
                    hint="Create a database that can hold any table's name, and use it: CREATE DATABASE … ENCODING 'UTF8' "
                    "TEMPLATE template0.",
                )
            connection.life = str(fetch_row(connection, _LIFE))
        except BaseException:
            connection.close()
            raise
        return connection

    def begin(self, connection: Connection, *, reading: bool) -> tuple[str, str] | None:
        """Begin, with all settings, in one round trip.

        A writing transaction is identified by its id and the server's life.
        """
        raw = connection.connection.driver_connection
        assert raw is not None
        with raw.cursor() as cursor:
            cursor.execute(self._begin_read if reading else self._begin_write)
            if reading:
                return None
            while cursor.nextset():
                pass
            return str(cursor.fetchone()[0]), str(raw.life)

    def check_files(self) -> None:
        """Do nothing: the server keeps its own files."""

    def was_committed(self, transaction: tuple[str, str] | None, error: DBAPIError) -> bool | None:
        """Query the server by the transaction's id; wait for a server that went away as long as for a lock.

        An error that the server itself sent over a connection that still stands means that the COMMIT was refused. A
        crashed server reuses ids that it lost: then "committed" may be another transaction's, while "not committed"
        is certain.
        """
        cause = error.orig
        assert transaction is not None
        refused = isinstance(cause, psycopg.Error) and (cause.sqlstate or "08")[:2] not in {"08", "57"}
        if refused and not error.connection_invalidated:
            return False
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            with contextlib.suppress(psycopg.OperationalError), self._connect() as asking:
                try:
                    row = fetch_row(asking, "SELECT pg_xact_status({}::text::xid8)", transaction[0])
                except psycopg.errors.InvalidParameterValue:
                    return False  # "in the future": the server lost it
                status = None if row is None else row[0]
                if status == "committed":
                    return True if asking.life == transaction[1] else None
                if status != "in progress":
                    return None if status is None else False
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)

    def prepare(self, engine: Engine) -> None:
        """Do nothing: the first transaction connects."""

    def check_privileges(self, connection: Connection) -> None:
        """Check the schema with its tables and sequences; if it is missing, the privilege to create it."""
        there, may_make, role, usable, missing = connection.execute(text(_PRIVILEGES), {"schema": SCHEMA}).one()
        if not there:
            if not may_make:
                raise self._may_not_make(connection)
            return
        if not usable or missing:
            what = f": not read and write {', '.join(missing)}" if usable else ""
            raise CatalogError(f"{self.place}: the role {role} may not use the schema {SCHEMA}{what}", hint=_PRIVILEGE)

    def _may_not_make(self, connection: Connection) -> CatalogError:
        role, database = connection.execute(
            text("SELECT quote_ident(current_user), quote_ident(current_database())")
        ).one()
        return CatalogError(
            f"{self.place} has no schema {SCHEMA}, and the role {role} may not make it",
            hint=f"As the owner of the database: CREATE SCHEMA {SCHEMA} AUTHORIZATION {role}; or let the role make it: "
            f"GRANT CREATE ON DATABASE {database} TO {role};",
        )

    def lock_for_migration(self, connection: Connection) -> None:
        """Wait for other processes' migrations; create the schema if it is missing.

        Raises:
            CatalogError: it is missing, and this role may not create it; the hint has the SQL.
        """
        for name in ("lock_timeout", "statement_timeout"):
            connection.execute(text(f"SET LOCAL {name} = {_ms(_MIGRATION_TIMEOUT_S)}"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        there, may_make, *_ = connection.execute(text(_PRIVILEGES), {"schema": SCHEMA}).one()
        if there:
            return
        if not may_make:
            raise self._may_not_make(connection)
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))

    def insert(self, table: Table) -> Insert:
        """Return PostgreSQL's INSERT."""
        return insert(table)

    def number_above(self, connection: Connection, table: Table, floor: int) -> None:
        """Move the table's sequence, which is never set back."""
        sequence = f"pg_get_serial_sequence('{SCHEMA}.{table.name}', 'id')"
        above = f"greatest((SELECT max(id) FROM {table.name}), nextval({sequence}), :floor)"
        connection.execute(text(f"SELECT setval({sequence}, {above})"), {"floor": floor})

    # --- errors ------------------------------------------------------------------------------------------------

    def translate(self, error: BaseException) -> MillstreamError:
        """Translate by SQLSTATE; by the server's message if connecting failed, because libpq has no code there."""
        if isinstance(error, PoolTimeout):
            return CatalogError(
                f"{self.place}: no connection of this process was free for {self._busy_timeout_s:g} s",
                code="catalog_busy",
                hint="Check the catalog server's locks and load.",
            )
        cause = error.orig if isinstance(error, DBAPIError) else error
        said = one_line(cause or error)
        state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
        if state is None:
            refusal = isinstance(cause, psycopg.OperationalError)
            return self._refusal(said) if refusal else CatalogError(f"{self.place}: {said}", hint=_OWN_WORDS)
        if state == _DISK_FULL:
            free = "Free space on the catalog's server; streams resume by themselves."
            return DiskFull(f"{self.place}: {said}", hint=free, sqlstate=state)
        code, hint = _BY_STATE.get(state) or _BY_CLASS.get(state[:2]) or (CatalogError.code, _OWN_WORDS)
        return CatalogError(f"{self.place}: {said}", code=code, hint=hint, sqlstate=state)

    def _refusal(self, said: str) -> MillstreamError:
        lower = said.lower()
        for parts, code, hint in _BY_WORDS:
            if any(all(word in lower for word in part) for part in parts):
                return CatalogError(f"{self.place}: {said}", code=code, hint=hint)
        return CatalogError(f"{self.place}: {said}", code="catalog_unreachable")


_PRIVILEGES: Final = """
SELECT n.oid IS NOT NULL, has_database_privilege(current_database(), 'CREATE'), quote_ident(current_user),
       has_schema_privilege(n.oid, 'USAGE'),
       ARRAY(SELECT quote_ident(c.relname) FROM pg_class c
              WHERE c.relnamespace = n.oid AND CASE c.relkind
                    WHEN 'r' THEN NOT (has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
                                       AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'))
                    WHEN 'S' THEN NOT has_sequence_privilege(c.oid, 'USAGE') END ORDER BY c.relname)
  FROM (SELECT :schema AS name) w LEFT JOIN pg_namespace n ON n.nspname = w.name
"""

# When the server was started, and when its statistics began: recovery from a crash resets them (StartupXLOG).
_LIFE: Final = "SELECT pg_postmaster_start_time()::text, stats_reset::text FROM pg_stat_bgwriter"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


_OWN_WORDS: Final = "The message is PostgreSQL's own."
_LOGIN: Final = (
    "Check user and password in [catalog] url (or the environment, or ~/.pgpass), and pg_hba.conf on the server. "
    + CHANGED_LOGIN_HINT
)
_DATABASE: Final = "Create the database, or correct its name in [catalog] url."
_STANDBY: Final = "It is a standby, or read-only for now: name the primary in [catalog] url, or all hosts with target_session_attrs=read-write."
_FULL: Final = "The server has no connection left: end some, or raise max_connections; it is tried again."
_WAITS: Final = (
    "Another session holds its locks for long, or the server is overloaded: see pg_stat_activity; it is tried again."
)
_PRIVILEGE: Final = (
    f"Give the role of [catalog] url the schema: GRANT USAGE, CREATE ON SCHEMA {SCHEMA}; GRANT ALL ON ALL TABLES IN SCHEMA {SCHEMA}; "
    f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {SCHEMA}; each TO the role. Best, it owns them."
)
_GONE: Final = f"The schema {SCHEMA} is damaged or not a catalog: restore the database from a backup. The log itself doesn't depend on it."

_DISK_FULL: Final = "53100"
_BY_STATE: Final[dict[str, tuple[str, str | None]]] = {
    "25006": ("catalog_unreachable", _STANDBY),
    "25P03": ("catalog_busy", "The process was paused within a transaction, which is tried again."),
    "25P04": ("catalog_busy", _WAITS),
    "3D000": (CatalogError.code, _DATABASE),
    "3F000": (CatalogError.code, _GONE),
    "40001": ("catalog_busy", _WAITS),
    "40P01": ("catalog_busy", _WAITS),
    "42501": (CatalogError.code, _PRIVILEGE),
    "42703": (CatalogError.code, _GONE),
    "42P01": (CatalogError.code, _GONE),
    "53300": ("catalog_unreachable", _FULL),
    "55P03": ("catalog_busy", _WAITS),
    "57014": ("catalog_busy", _WAITS),
    "57P04": (CatalogError.code, _DATABASE),
}
_BY_CLASS: Final[dict[str, tuple[str, str | None]]] = {
    "08": ("catalog_unreachable", None),
    "28": (CatalogError.code, _LOGIN),
    "53": ("catalog_busy", _WAITS),
    "57": ("catalog_unreachable", None),
}
_BY_WORDS: Final[tuple[tuple[tuple[tuple[str, ...], ...], str, str | None], ...]] = (
    ((("too many",), ("remaining connection slots",), ("connection limit exceeded",)), "catalog_unreachable", _FULL),
    ((("read-only",), ("hot standby mode",)), "catalog_unreachable", _STANDBY),
    (
        (
            ("password",),
            ("pg_hba.conf",),
            ("authentication failed",),
            ("role", "does not exist"),
            ("not permitted to log in",),
        ),
        CatalogError.code,
        _LOGIN,
    ),
    ((("database", "does not exist"), ("not currently accepting connections",)), CatalogError.code, _DATABASE),
    (
        (("permission denied for database",),),
        CatalogError.code,
        "As the owner of the database: GRANT CONNECT ON DATABASE … TO the role of [catalog] url.",
    ),
    (
        (
            ("definition of service",),
            ("service file",),
            ("invalid port",),
            ("invalid sslmode",),
            ("invalid connection option",),
        ),
        CatalogError.code,
        "Correct [catalog] url in millstream.toml, or the file that it names.",
    ),
)
