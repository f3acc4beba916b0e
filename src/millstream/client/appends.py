"""`append` and `append_all` of a home: their arguments become one `AppendRequest`.

A home appends the request's rows once they are columns. `millstream.aio.appends` makes coroutines of the same calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from millstream.closing import Closing
from millstream.errors import InvalidValue, UsageError
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.replication import AckLevel
from millstream.model.steps import Steps, blocking
from millstream.model.writes import AppendBatch, WriteId

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.ingest.fit_to_schema import ColumnsOf
    from millstream.ingest.python_rows import Rows
    from millstream.model.operations import Appended, AppendedTables

APPEND_DEADLINE_S: Final = 30.0
"""How long an append waits for room in the writer's queue by default."""


class KnownTables(NamedTuple):
    """The facts of a home's tables that decide how rows become columns; by default nothing is known."""

    increments: Callable[[str, str], Mapping[str, str]] = lambda _stream, _table: {}
    """Returns the words of the columns that take increments, of a stream's table."""
    columns_of: Callable[[str], ColumnsOf] = lambda _stream: lambda _tables: {}
    """Returns the look-up of a stream's tables, whose columns decide the kinds of values."""


NOTHING_KNOWN: Final = KnownTables()


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """The arguments of one append. `UsageError` if its deadline is invalid."""

    stream: str
    table: str | None
    """The table of the rows; None: `rows` is a mapping of tables to rows."""
    rows: Any
    deadline_s: float = APPEND_DEADLINE_S
    session: str | None = None
    number: int | None = None
    idempotency_key: str | None = None
    keep_valid_rows: bool = False
    acks: str | None = None

    def __post_init__(self) -> None:
        check_deadline(self.deadline_s)

    def columns(self, known: KnownTables) -> tuple[dict[str, pa.Table], Any]:
        """Return the valid rows as columns, by table, and the rejected ones as `result` takes them.

        Raises:
            UsageError: a text is no table's name.
            InvalidValue, IngestError (`rows_too_large`): as `columns_for` and `tables_for`; or the one table has no rows.
        """
        from millstream.ingest.fit_to_schema import types_of
        from millstream.ingest.keep_valid_rows import columns_for
        from millstream.ingest.multi_table_append import tables_for

        if self.table is None:
            return tables_for(
                self.rows,
                keep_valid_rows=self.keep_valid_rows,
                accumulates=partial(known.increments, self.stream),
                columns_of=known.columns_of(self.stream),
            )
        name = qualified_name(*parse_qualified_name(self.table))
        accumulates = partial(known.increments, self.stream, self.table)
        types = partial(types_of, known.columns_of(self.stream), name)
        columns, rejected = columns_for(
            self.rows, keep_valid_rows=self.keep_valid_rows, accumulates=accumulates, types=types
        )
        if not columns.num_rows:
            raise InvalidValue("an append needs at least one row", hint="Don't call it without rows.")
        return {self.table: columns}, rejected

    def naming(self, rejected: Any, tables: Mapping[str, pa.Table]) -> AbstractContextManager[None]:
        """Return as `keep_valid_rows.naming`: the block appends the tables' rows, without the rejected ones."""
        from millstream.ingest.keep_valid_rows import naming

        return naming(rejected, tables) if tables else nullcontext()

    def batch(self, tables: Mapping[str, pa.Table]) -> AppendBatch:
        """Return the request as a batch of one, with its rows by table; `UsageError` if `acks` is no level."""
        named = self.session is not None or self.number is not None or self.idempotency_key is not None
        write_id = WriteId(self.session, self.number, self.idempotency_key) if named else None
        acks = None if self.acks is None else AckLevel.parse(self.acks)
        return AppendBatch.of_request(tables, write_id, keep_valid_rows=self.keep_valid_rows, acks=acks)

    def result(self, appended: Any, rejected: Any) -> Any:
        """Return the caller's result, `Appended` or `AppendedTables`, from the result of appending the valid rows."""
        from millstream.model.operations import AppendedTables

        return appended.with_rejected(rejected) if self.table is not None else AppendedTables.of(appended, rejected)


class AppendSteps:
    """An append, for threads and for tasks: the home's own `_columns` makes columns of rows, and its `_append` appends them."""

    _known: KnownTables = NOTHING_KNOWN
    _columns: Callable[[AppendRequest], Any]
    _append: Callable[[AppendRequest, Mapping[str, pa.Table]], Any]

    def _write(self, request: AppendRequest) -> Steps[Any]:
        tables, rejected = yield self._columns(request)
        with request.naming(rejected, tables):
            return request.result((yield self._append(request, tables)), rejected)


class HomeAppends(AppendSteps, Closing):
    """The appends of a home."""

    @blocking
    def append(
        self,
        stream: str,
        table: str,
        rows: Rows,
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        session: str | None = None,
        number: int | None = None,
        idempotency_key: str | None = None,
        keep_valid_rows: bool = False,
        acks: str | None = None,
    ) -> Steps[Appended]:
        """Append rows to a table of a stream, durably: one operation, which readers see whole or not at all.

        If `millstream run` (or another process that appends) writes the home, rows go through that
        process. Otherwise this process writes the home until it closes it, or until `millstream run`
        begins. A process with a `[writer] name` of its own writes in parallel with the others.

        Args:
            stream: its name, as in millstream.toml: [streams.NAME].
            table: `schema.table`, quoted where necessary; the default schema is `public`. Created with
                the columns of its first rows, as `schema_on_write` allows.
            rows: a dict or an iterable of them; a pyarrow table or batch; a frame of pandas or polars;
                anything that supports Arrow's stream protocol. Columns that a row lacks are null. Up to
                64 MiB.
            deadline_s: how long to wait for a process that is about to write (30 s at most), for room if
                the writer is busy, and then for other machines, if the level requires them.
            session: a session's name, with this write's number in it: the same write resent isn't
                appended again.
            number: see `session`; from 1.
            idempotency_key: instead of those two, a text that the caller gives to no other write.
            keep_valid_rows: whether rows that don't fit the table are left out and named
                (`Appended.rejected`); otherwise one of them refuses all.
            acks: the level to reach before this returns: `local`, `durable(1)` for one follower,
                `durable(2)` …, or `object` for the object store. None: the stream's, which is the
                minimum.

        Returns:
            The rows' positions: their numbers, and a token for readers.

        Raises:
            UnknownStream, UsageError: there is no such stream, the text is no table's name, or
                `deadline_s` is invalid.
            InvalidValue: a value doesn't fit its column; nothing was appended.
            UnknownTable, IngestError (`unknown_column`, `key_changed`, `table_captured`, `rows_too_large`): likewise.
            Overloaded, DiskFull: there is no room for it now; nothing was appended.
            AppendOutcomeUnknown: the disk failed, or the writing process ended: the rows may or may not
                be stored.
            HomeBusy, WriterClosed: another process has the home, and doesn't take appends; nothing was
                appended.
            NotEnoughReplicas: it is durable here, but others didn't confirm in time that they have it,
                too.
            ReplicationError (`ack_level_unavailable`): the requested level can't be met here; nothing was appended.
            UsageError (`missing_extra`): reading needs only the core; this needs `millstream[run]`.
        """
        parse_qualified_name(table)  # a request without a table would be one of several
        return self._write(
            AppendRequest(stream, table, rows, deadline_s, session, number, idempotency_key, keep_valid_rows, acks)
        )

    @blocking
    def append_all(
        self,
        stream: str,
        tables: Mapping[str, Rows],
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        session: str | None = None,
        number: int | None = None,
        idempotency_key: str | None = None,
        keep_valid_rows: bool = False,
        acks: str | None = None,
    ) -> Steps[AppendedTables]:
        """Append rows to several tables of a stream as one operation: readers and the log have all of them or none.

        Args:
            stream: as `append`.
            tables: each table's rows, named and given as in `append`; together up to 64 MiB, in at most 1000
                tables. The records stand in this order. A table may have no rows, and there may be no table.
            deadline_s: as `append`.
            session: as `append`: one number is all the tables' write.
            number: as `append`.
            idempotency_key: as `append`.
            keep_valid_rows: as `append`; if no row of any table fits, the call is refused.
            acks: as `append`.

        Returns:
            A token for readers, and each table's part by its full name. Without rows it is the newest token.

        Raises:
            InvalidValue: two of the names are one table's; or as `append`. Nothing was appended.
            RoutingError (`not_one_operation`): the tables go to different places; nothing was appended.
            MillstreamError: as `append`.
        """
        return self._write(
            AppendRequest(stream, None, tables, deadline_s, session, number, idempotency_key, keep_valid_rows, acks)
        )

    def _columns(self, request: AppendRequest) -> tuple[dict[str, pa.Table], Any]:
        return request.columns(self._known)


def check_deadline(seconds: float, name: str = "deadline_s", *, default_s: float = APPEND_DEADLINE_S) -> float:
    """Return a deadline itself, in seconds from now; `UsageError` if it is invalid."""
    said: object = seconds
    is_number = isinstance(said, int | float) and not isinstance(said, bool)
    if not is_number or not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise UsageError(
            f"{name}={seconds!r} is no time to wait",
            hint=f"Pass a number of seconds, 0 or more; the default is {default_s:g}.",
        )
    return seconds
