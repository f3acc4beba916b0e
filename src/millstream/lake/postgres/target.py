"""The database that a stream's tables land in: its address, its sessions, and its errors as ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from millstream.errors import LakeError, MillstreamError
from millstream.errors.missing_extras import missing_extra
from millstream.libpq import (
    ADDRESS_HINT,
    CHANGED_LOGIN_HINT,
    describe_parameters,
    one_line,
    parse_address,
    pinned_session,
    with_patience,
)
from millstream.model.ids import StreamId

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]

TargetView = Literal["changes", "current"]
"""The views that readers get: `changes` has an event a record, `current` the source's rows."""

VERSION_MIN: Final = 140000
_PINNED_TOO: Final = b"""
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
    UNION ALL SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'
"""
"""A reported commit has to be durable, and a batch has no time limit (17 and newer have the second setting)."""
_LOCK_PATIENCE: Final = "'30s'"
"""How long a change of a table's definition waits for its readers before it is retried."""


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """One stream's part of a database. A value: picklable, sent to executors."""

    dsn: str = field(repr=False)
    stream_name: str
    stream_id: StreamId
    pipeline: str = "lake"
    views: tuple[TargetView, ...] = ("changes",)
    schema_prefix: str = ""
    """Prefix of the names of all schemas that tables are in."""

    @property
    def place(self) -> str:
        """The place as shown to people: without secrets."""
        return describe_parameters(_parameters(self.dsn))

    @property
    def owner(self) -> tuple[str, str]:
        """The owner of positions and tables: the stream's id and the pipeline's name."""
        return str(self.stream_id), self.pipeline

    def connect(self, purpose: str) -> Connection:
        """Open a connection with a pinned session, in autocommit; the caller closes it.

        Raises:
            LakeError (`destination_unavailable`): the server doesn't answer.
            LakeError (`destination`): the address is invalid, or this user isn't let in.
        """
        try:
            import psycopg
        except ImportError as error:
            raise missing_extra("tables in PostgreSQL need psycopg", "run") from error
        parameters: Mapping[str, Any] = with_patience(_parameters(self.dsn), f"millstream {purpose}")
        try:
            connection = psycopg.connect(autocommit=True, prepare_threshold=None, **parameters)
        except psycopg.Error as error:
            raise _refused(error, self.place) from error
        try:
            if connection.info.server_version < VERSION_MIN:
                raise LakeError(
                    f"{self.place} is PostgreSQL {connection.info.server_version // 10000}; 14 is the oldest that tables can land in",
                    code="destination",
                )
            with translated(self.place):
                connection.execute(pinned_session(lock_timeout=_LOCK_PATIENCE).encode())
                connection.execute(_PINNED_TOO)
        except BaseException:
            connection.close()
            raise
        return connection


def _parameters(dsn: str) -> dict[str, Any]:
    try:
        return parse_address(dsn)
    except ValueError as error:
        raise LakeError(f"the lake's location {error}", code="destination", hint=ADDRESS_HINT) from error


def _refused(error: Exception, place: str) -> LakeError:
    """Return the error for a failed connection attempt: libpq gives no SQLSTATE, only text."""
    text = one_line(error)
    known = ("authentication failed", "no password supplied", "pg_hba.conf", "does not exist", "permission denied")
    if any(part in text for part in known):
        return LakeError(
            f"{place}: {text}",
            code="destination",
            hint=f"Correct the address in [streams.S.lake] location, or the access rules of the server. {CHANGED_LOGIN_HINT}",
        )
    return LakeError(f"{place}: {text}", code="destination_unavailable")


_PASSES: Final = ("08", "57", "58", "53", "40", "55P03", "25006")
"""Classes of SQLSTATE after which a retry may succeed: connections, shutdowns, resources (a full
disk), serialization, locks, a read-only database."""
_HINTS: Final = {
    "25006": "The destination takes no writes: it is a standby, or default_transaction_read_only is on. It is tried again.",
    "53100": "The destination's disk is full. It is tried again.",
    "42501": "Grant what the message names.",
}


def translate(error: psycopg.Error, place: str) -> MillstreamError:
    """Return our error for one of psycopg's on an open connection."""
    import psycopg

    state, text = error.sqlstate or "", one_line(error)
    hint = _HINTS.get(state)
    if state.startswith(_PASSES) or (not state and isinstance(error, psycopg.OperationalError)):
        return LakeError(f"{place}: {text}", code="destination_unavailable", hint=hint, sqlstate=state)
    return LakeError(
        f"{place}: {text}",
        code="destination_refused",
        hint=hint or "Fix the named object at the destination, then run `millstream tables retry` for the table.",
        sqlstate=state,
    )


@contextmanager
def translated(place: str) -> Iterator[None]:
    """Translate psycopg's errors within the block to ours."""
    import psycopg

    try:
        yield
    except psycopg.Error as error:
        raise translate(error, place) from error


def copy_in(connection: Connection, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Insert rows by a COPY … FROM STDIN."""
    with connection.cursor().copy(statement.encode()) as copy:
        for row in rows:
            copy.write_row(row)
