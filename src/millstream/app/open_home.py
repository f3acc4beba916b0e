"""The API of `millstream.open`: a home to read from and to append to, in any process, next to running parts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.app.home_merged_tables import HomeMergedTables, latest_with_totals, merged_rows
from millstream.app.log_readers import check_age_of_copy, needs_run, open_reader, schemas_named, tables_named
from millstream.client.appends import HomeAppends, KnownTables
from millstream.client.call_results import CONSUMED_AT_ONCE, LATEST_ROWS_MAX, Latest
from millstream.client.consumers import Ask, Consumers, Consumption, with_records
from millstream.client.following import LOCAL_POLL_S, Following
from millstream.client.write_session import Session, session_of
from millstream.errors import AppendOutcomeUnknown, HomeClosed, UsageError
from millstream.export.follow_log import FollowedTables, follow_steps, position_of
from millstream.export.record_reading import read_records
from millstream.home.config_mapping import increments_of
from millstream.home.home import Home
from millstream.home.table_columns import column_types
from millstream.model.as_of_parsing import microseconds, moment_of
from millstream.model.positions import StreamToken
from millstream.model.writes import SessionFacts

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.client.appends import AppendRequest
    from millstream.lake.query.query_session import LakeSession
    from millstream.model.operations import Appended
    from millstream.model.schema import TableSchema
    from millstream.wal.reader import StreamReader
    from millstream.writers.home_appender import HomeAppender
    from millstream.writers.home_consumers import HomeConsumers


_Result = TypeVar("_Result")


class OpenHome(HomeAppends):
    """An open home. Read from one thread, append from any number; any number of processes may have it open."""

    def __init__(self, home: Home, *, latest_bytes_max: int | None = None) -> None:
        """Open it.

        Args:
            latest_bytes_max: see `latest_stretches`; `merged` reads no more at once, either.
        """
        self._home = home
        self._known = known_tables(home)
        self._latest_bytes_max = latest_bytes_max
        self._readers: dict[str, StreamReader] = {}
        self._followings: weakref.WeakSet[Following] = weakref.WeakSet()
        self._appending = threading.Lock()
        self._appender: HomeAppender | None = None
        self._consumers: HomeConsumers | None = None
        self._closed = False
        self._of_thread = _OfThread()

    def __repr__(self) -> str:
        return f"OpenHome({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Return the home's folder."""
        return self._home.path

    def close(self) -> None:
        """Close everything that was opened. If this process writes the home's streams, others may from here on.

        A signal handler (or a finalizer) may call it: if it interrupts an append of its own thread, the home is closed once
        that ends.
        """
        if self._of_thread.is_writing():
            self._of_thread.closes = self._closed = True
            return
        with self._appending:
            self._closed, appender, consumers = True, self._appender, self._consumers
            followings = list(self._followings)
        self._readers.clear()
        for following in followings:
            following.close()
        if consumers is not None:
            consumers.close()
        if appender is not None:
            appender.close()

    def streams(self) -> list[str]:
        """Return the names of the streams that have a log."""
        return self._home.streams_on_disk()

    def token(self, stream: str, *, vector: bool = False) -> StreamToken:
        """Return a stream's newest consistent cut; with `vector`, each writer's position, without waiting for any."""
        reader = self.reader(stream)
        return reader.vector_token() if vector else reader.token()

    def check_age(self, stream: str) -> None:
        """Check that a stream's data here is as new as `[replication] max_staleness` asks.

        Reads of the stream here check this themselves: it is for readers that open the log's files in
        other ways.

        Raises:
            UnknownStream: there is none of that name.
            ReplicationError (`replica_too_stale`): it is older, or its age is unknown; never for a stream that this node leads.
        """
        check_age_of_copy(self._home, self._home.pick_stream(stream))

    def known_schemas(self, stream: str, table: str) -> list[TableSchema]:
        """Return the newest schemas of the tables of a name, from the catalog: also of tables that the log has no records of."""
        return schemas_named(self._home, stream, table)

    def read(
        self,
        stream: str,
        *,
        table: str | None = None,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read records between two tokens, in order: `(after, upto]`.

        Args:
            stream: the stream's name.
            table: only this one, as `schema.table`; None for all, with each batch of one table and schema
                version.
            after: a token that was returned before; None for the first record that is still there.
            upto: None for everything that is durable now. For both, a token inside an operation stands
                for the last one before it. If either is a vector token, each writer's records between its
                own positions are read.

        Returns:
            Batches with the `__` columns before the table's own; a batch's schema metadata names its
            table. The same call returns the same records every time, until retention drops them.

        Raises:
            UnknownStream, UnknownTable: there is none of that name.
            PositionError (`invalid_token`): a token is malformed, or another stream's.
            OffsetExpired: retention has dropped part of the range; without `after`, all of it up to
                `upto` and more, or all records of the table.
            TokenFromFuture: `upto` lies beyond what is durable.
            MillstreamError (`table_quarantined`): the next records of `table` weren't decoded, as it was quarantined
                when they came. Read on after the token in the detail `behind` to skip them.
        """
        known = partial(tables_named, self._home, stream, table or "")
        yield from read_records(self.reader(stream), table=table, after=after, upto=upto, known=known)

    def follow(
        self,
        stream: str,
        *,
        table: str | Sequence[str] | None = None,
        after: StreamToken | str | None = None,
    ) -> Following:
        """Yield a stream's records as they come, each batch with a token to resume from: a blocking iterator.

        It yields records once readers may see them: durable, and on as many followers as the stream
        requires. It works next to a process that writes the home, and in it. The home stores nothing about it.

            with home.follow("shop", table="orders", after=saved) as changes:
                for batch, token in changes:
                    ...

        Args:
            stream: the stream's name.
            table: `schema.table`, or several; a table that isn't there yet is waited for. None for all.
                A table goes by the name that it has when a record is written.
            after: a token that was returned before, exclusive. None: from now on, not from the beginning.

        Returns:
            An iterator that waits for more, and ends once it or the home is closed, by whichever thread.
            Each batch is as `read` yields it, of one table and schema version. Its token is the end of
            the last operation before the next record: a reader that resumes from it misses nothing, and
            gets an operation again from its beginning if the batch ended inside it.

        Raises:
            UnknownStream: there is none of that name.
            PositionError (`invalid_token`): `after` is malformed, another stream's, or has a position for each writer.
            OffsetExpired: retention has dropped records behind `after`; also while iterating, if the caller
                is slower than retention.
            TokenFromFuture: `after` lies beyond what may be read.
            UsageError: a text is no table's name.
            MillstreamError (`table_quarantined`): as `read`, while iterating, if tables are named.
            ReplicationError (`replica_too_stale`): as `read`, at the call.
            HomeClosed: this home was closed.
        """
        tables = FollowedTables(table)
        reader = open_reader(self._home, stream)
        at = position_of(reader, after)
        token = StreamToken.scalar(reader.stream_id, at)
        following = Following(follow_steps(reader, tables, at), token, LOCAL_POLL_S)
        with self._appending:
            if self._closed:
                raise HomeClosed("this home was closed")
            self._followings.add(following)
        return following

    def read_latest(
        self,
        stream: str,
        table: str,
        *,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
        rows_max: int = LATEST_ROWS_MAX,
    ) -> Iterator[Latest]:
        """Read the changes of a table's rows between two tokens, one range after the other: one row per key and range.

        Args:
            stream: the stream's name.
            table: `schema.table`, one with a key.
            after: a token that was returned before; None for the first record that is still there.
            upto: None for everything that is durable now.
            rows_max: records of the stream, of all its tables, in one range: as many are in memory at
                once.

        Returns:
            For each range in which the table has records, the changes to apply to a copy of it, and the
            token to continue from after that.

        Raises:
            UnknownStream, UnknownTable, PositionError (`invalid_token`), OffsetExpired, TokenFromFuture: as `read`.
            UsageError: the table has no key, or a token is a vector token.
            LakeError (`query_memory_full`): one operation changes more rows of the table than a server reads at once.
        """
        limits = rows_max, self._latest_bytes_max
        yield from latest_with_totals(self._home, stream, table, self.reader(stream), after, upto, *limits)

    def merged(self, stream: str, table: str, *, at: datetime | str | None = None) -> pa.Table:
        """Return a table that several regions write: one row per key, merged as configured in `[streams.S.merge]`.

        Args:
            stream: the stream's name.
            table: `schema.table`, one with a key that applications write.
            at: the moment up to which signals have decayed (without a zone: UTC), also as a text: an ISO time, an age
                (`10m ago`) or `now`. None: the newest record's.

        Returns:
            The table's own columns, in the order of its key, from the logs that this home has. The
            schema's metadata lists their regions, and each one's age (`millstream.regions`, JSON).

        Raises:
            UnknownTable: no region has records of it.
            UsageError, PositionError (`invalid_time`): `at` is no moment.
            ReplicationError (`merge_unsuitable`): it can't merge as configured.
            ReplicationError (`other_region`, `other_stream`): a log doesn't match its folder, or the earlier merged state.
            OffsetExpired: retention has dropped records that weren't merged yet (`millstream reconcile`).
            InvalidValue: a counter's sum is beyond its type.
            LakeError (`query_memory_full`): it is larger than a server reads at once.
            ReplicationError (`replica_too_stale`): the data of a region is older than allowed; `stream` names it (`shop@2`).
        """
        at_ns = None if at is None else microseconds(moment_of(at, now=datetime.now(UTC))) * 1000
        name = self._home.pick_stream(stream)
        try:
            return merged_rows(self._home, name, table, at_ns=at_ns, bytes_max=self._latest_bytes_max)
        except ModuleNotFoundError as error:
            raise needs_run(error, "merging regions") from error

    def merged_schema(self, stream: str, table: str) -> pa.Schema:
        """Return the columns of `merged`, without reading its rows; raises as `merged`."""
        return HomeMergedTables(self._home, self._home.pick_stream(stream)).columns(table)

    def session(self, stream: str, name: str | None = None, *, next_number: int | None = None) -> Session:
        """Return a session: it numbers writes to a stream, so that each may be resent without being appended twice.

        Args:
            stream: its name.
            name: the session's, chosen by the application to identify its writes. None: a unique one.
            next_number: the number of the first write; None: the first that the log lacks, so that a
                restarted application continues where it was.

        Raises:
            UnknownStream: there is no such stream (behind an address: raised by the first call).
            InvalidValue: the name is empty.
            UsageError: the number is below 1.
        """
        check_stream(self._home, stream)
        return Session(self._append, self.session_facts, stream, *session_of(name, next_number), self._known)

    def session_facts(self, stream: str, name: str) -> SessionFacts:
        """Return the log's facts of a session: its mark, and the numbers above it.

        Raises:
            UnknownStream: there is no such stream.
            SessionsNeedOneWriter: several writers share it.
            WriteBufferError (`sessions_not_known`): it writes to a buffer.
            HomeBusy, WriterClosed: as `append`.
        """
        return self._written(lambda appender: appender.session(stream, name))

    def _append(self, request: AppendRequest, tables: Mapping[str, pa.Table]) -> Appended:
        def append(appender: HomeAppender) -> Appended:
            from millstream.ingest.append_requests import sole_outcome

            batch = request.batch(tables)
            return sole_outcome(appender.append_batch(request.stream, batch, deadline_s=request.deadline_s))

        return self._written(append)

    def _written(self, call: Callable[[HomeAppender], _Result]) -> _Result:
        """Call the appender. Its locks are of no use to a call that interrupts another one of the same thread."""
        own = self._of_thread
        if own.is_writing():
            own.refused = UsageError(
                "a signal handler, or a finalizer, can't append while it interrupts an append of its thread; nothing of it"
                " was appended",
                hint="Set a flag there, or raise an exception, and append once the interrupted call has returned.",
            )
            raise own.refused
        try:
            with own.writing:
                return call(self._home_appender())
        except UsageError as error:
            if error is not own.refused:
                raise
            raise AppendOutcomeUnknown(
                "a signal handler's own append failed within this one: the rows may or may not be durable"
            ) from error
        finally:
            if own.closes:
                own.closes = False
                self.close()

    def _home_appender(self) -> HomeAppender:
        with self._appending:
            if self._closed:
                raise HomeClosed("this home was closed")
            if self._appender is None:
                self._appender = home_appender(self._home)
            return self._appender

    def consumers(self, stream: str) -> Consumers:
        """Return the calls that make, show and steer the consumers of a stream.

        If another process of the home has the consumers, calls go through it. Otherwise this process has them until it
        closes the home.
        """
        return Consumers(partial(self._carry_ask, stream))

    def consume(
        self, stream: str, name: str, *, batch_size: int = CONSUMED_AT_ONCE, wait_s: float | None = None
    ) -> Consumption:
        """Receive from a consumer: `with home.consume("shop", "search") as messages`, then `for message in messages`.

        A message is acknowledged when the next one is asked for. Leaving the block acknowledges the current message, or
        returns it if an exception ends the block.

        Args:
            stream: the stream's name.
            name: the consumer's.
            batch_size: most messages to fetch at once, from 1 to 1000.
            wait_s: how long to wait for a message until the iteration ends; None: for ever.

        Raises:
            UnknownStream: there is no such stream.
            DeliveryError (`unknown_consumer`): there is no such consumer; raised by the first message.
        """
        return Consumption(partial(self._carry_ask, stream), name, batch_size, wait_s)

    def _carry_ask(self, stream: str, ask: Ask) -> Any:
        return with_records(ask, self._home_consumers().call(stream, ask.what, ask.name, ask.body).body)

    def _home_consumers(self) -> HomeConsumers:
        with self._appending:
            if self._closed:
                raise HomeClosed("this home was closed")
            if self._consumers is None:
                self._consumers = home_consumers(self._home)
            return self._consumers

    def query(
        self,
        sql: str,
        *,
        stream: str | None = None,
        as_of: StreamToken | datetime | str | None = None,
        lake_only: bool = False,
    ) -> pa.Table:
        """Return the result of SQL over a stream's tables, all at one token; see `millstream query`.

        Records that haven't landed are read from the log, unless it has too many of them (64 MiB).

        Args:
            sql: one statement; tables are named schema.table.
            stream: its name; required if the home has several.
            as_of: a token, a moment or the text of either: the tables as of then, with that time's columns.
            lake_only: read nothing of the log: only what has landed. `merged` tables are then unknown.

        Raises:
            InvalidQuery: the SQL fails; the message is DuckDB's.
            PositionError (`invalid_time`, `invalid_token`, `beyond_retention`, `time_from_future`), TokenFromFuture: `as_of` is
                invalid or unavailable.
            LakeBehind: too many records up to `as_of` haven't landed.
        """
        with self.lake(stream, as_of=as_of, lake_only=lake_only) as lake:
            return lake.query(sql)

    def lake(
        self,
        stream: str | None = None,
        *,
        as_of: StreamToken | datetime | str | None = None,
        lake_only: bool = False,
    ) -> LakeSession:
        """Return a session for several queries at one token; a context manager. See `query` for the arguments."""
        from millstream.app.lake_sessions import open_lake

        return open_lake(self._home, stream, as_of=as_of, lake_only=lake_only)

    def status(self) -> dict[str, Any]:
        """Return the output of `millstream status --json`."""
        from millstream.app.status import collect_status

        return collect_status(self._home)

    def reader(self, stream: str) -> StreamReader:
        """Return the reader of a stream's log that this home's reads use; raises as `read`."""
        name = self._home.pick_stream(stream)
        if name not in self._readers:
            self._readers[name] = open_reader(self._home, name)
        else:
            check_age_of_copy(self._home, name)
        return self._readers[name]


class _OfThread(threading.local):
    """The calls of one thread that write."""

    def __init__(self) -> None:
        self.writing = threading.Lock()
        """Held by a call. A lock, since Ctrl-C can't come between its acquisition and its block."""
        self.closes = False
        """Whether the home is to be closed once the call ends."""
        self.refused: UsageError | None = None
        """The error of the last call that interrupted another one. If that one raises it, its own outcome is unknown."""

    def is_writing(self) -> bool:
        """Return whether the thread is within a call."""
        return self.writing.locked()


def open(path: str | Path | None = None) -> OpenHome:  # noqa: A001 - as `millstream.open`
    """Open a home: the one at `path`, or that of MILLSTREAM_HOME, or the nearest folder upward.

    Raises:
        UsageError (`home_not_found`): there is none.
        UsageError (`home_too_new`): a newer Millstream wrote it.
    """
    home = Home.find(path, needs_source=False, named_by="path")
    home.check_format()
    return OpenHome(home)


def known_tables(home: Home) -> KnownTables:
    """Return the facts of a home's tables for appends; the look-ups raise `missing_extra` if they can't be made here."""

    def increments(stream: str, table: str) -> Mapping[str, str]:
        try:
            return increments_of(home, stream, table)
        except ModuleNotFoundError as error:
            raise needs_run(error) from error

    return KnownTables(increments, lambda stream: partial(column_types, home, stream))


def check_stream(home: Home, stream: str) -> None:
    """Raise `UnknownStream` if the stream isn't configured; `missing_extra` if that can't be read here."""
    try:
        home.written_stream(stream)
    except ModuleNotFoundError as error:
        raise needs_run(error) from error


def home_appender(home: Home) -> HomeAppender:
    """Return the appender of a home's streams; `missing_extra` if only the core or the client is installed."""
    try:
        from millstream.writers.home_appender import HomeAppender
    except ModuleNotFoundError as error:
        raise needs_run(error) from error
    return HomeAppender(home, open_other)


def home_consumers(home: Home) -> HomeConsumers:
    """Return the consumers of a home's streams; `missing_extra` if only the core or the client is installed."""
    try:
        from millstream.writers.home_consumers import HomeConsumers
    except ModuleNotFoundError as error:
        raise needs_run(error, "consumers") from error
    return HomeConsumers(home)


def open_other(place: str | Path, token: str | None) -> HomeAppends:
    """Open another home for a sink: behind an address, by its token, or in a folder. Raises as `open` and `connect`."""
    if isinstance(place, Path):
        return open(place)
    from millstream.client.remote_home import connect

    return connect(place, token=token)
