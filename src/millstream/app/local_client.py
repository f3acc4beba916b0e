"""What `millstream.open` gives: a home to read from and to append to, in any process, beside whatever runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from millstream.client.protocol import APPEND_DEADLINE_S, LATEST_ROWS_MAX, Latest, Session, check_deadline, session_of
from millstream.errors import LogError, MissingExtra, WriterClosed
from millstream.export.record_reading import latest_stretches, read_records
from millstream.home.home import Home
from millstream.home.time_parsing import microseconds, parse_as_of
from millstream.model.ids import StreamId, parse_region_log_name
from millstream.model.positions import Seq, StreamToken
from millstream.model.replication import AckLevel
from millstream.model.schema import TableKind
from millstream.model.writes import SessionFacts, WriteId

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.catalog import TableRow
    from millstream.client.protocol import HomeCalls
    from millstream.ingest.columns import Rows
    from millstream.lake.known_tables import KnownTable
    from millstream.lake.query.bounds import QueryBounds
    from millstream.lake.query.sql import LakeSession
    from millstream.model.operations import Appended
    from millstream.wal.index import OnDamage
    from millstream.wal.reader import StreamReader
    from millstream.writers.appending import HomeAppender


class OpenHome:
    """A home, open. Read from one thread, append from any number; any number of processes may have it open."""

    def __init__(self, home: Home, *, latest_bytes_max: int | None = None) -> None:
        """Open it.

        Args:
            home: which.
            latest_bytes_max: see `latest_stretches`; `merged` reads no more at once, either.
        """
        self._home = home
        self._latest_bytes_max = latest_bytes_max
        self._readers: dict[str, StreamReader] = {}
        self._appending = threading.Lock()
        self._appender: HomeAppender | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"OpenHome({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The home's folder."""
        return self._home.path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was opened. Where this process writes the home's streams, others may from here on."""
        self._readers.clear()
        with self._appending:
            self._closed, appender = True, self._appender
        if appender is not None:
            appender.close()

    def streams(self) -> list[str]:
        """Names of the streams that have a log."""
        return self._home.streams_on_disk()

    def token(self, stream: str, *, vector: bool = False) -> StreamToken:
        """The newest consistent cut of a stream's log; with `vector`, how far each writer is, which waits for none of them."""
        reader = self._reader(stream)
        return reader.vector_token() if vector else reader.token()

    def check_age(self, stream: str) -> None:
        """Return where what this node shows of a stream is as new as `[replication] max_staleness` asks.

        What reads the stream here asks this by itself: it is for who reads the log's files by other ways.

        Raises:
            UnknownStream: there is none of that name.
            ReplicaTooStale: it is older, or nobody knows; of what a node leads never.
        """
        check_age_of_copy(self._home, self._home.pick_stream(stream))

    def read(
        self,
        stream: str,
        *,
        table: str | None = None,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Records between two tokens, in order: `(after, upto]`.

        Args:
            stream: the stream's name.
            table: only this one, as `schema.table`; all of them where None, each batch of one table and schema version.
            after: a token that was given out before; None for the first record that is still there.
            upto: None for everything that is durable now. Of either, a token inside an operation stands for the last one in front of it.
                Where either is a vector token, each writer's records between its own positions are read.

        Returns:
            Batches with the `__` columns before the table's own; a batch's schema metadata names its table. The same
            call gives the same records every time, until retention drops them.

        Raises:
            UnknownStream, UnknownTable: there is none of that name.
            InvalidToken: a token is no token, or another stream's.
            OffsetExpired: retention has dropped part of it, or without `after` more than all up to `upto`.
            TokenFromFuture: `upto` lies beyond what is durable.
        """
        yield from read_records(self._reader(stream), table=table, after=after, upto=upto)

    def read_latest(
        self,
        stream: str,
        table: str,
        *,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
        rows_max: int = LATEST_ROWS_MAX,
    ) -> Iterator[Latest]:
        """What became of a table's rows between two tokens, a stretch after the other: one line a key, whatever happened to it.

        Args:
            stream: the stream's name.
            table: `schema.table`, one with a key.
            after: a token that was given out before; None for the first record that is still there.
            upto: None for everything that is durable now.
            rows_max: records of the stream, of all its tables, in one stretch: what is in memory at once.

        Returns:
            For each stretch in which the table has records, what to do to a copy of it, and the token to go on from once that is done.

        Raises:
            UnknownStream, UnknownTable, InvalidToken, OffsetExpired, TokenFromFuture: as `read`.
            UsageError: the table has no key, or a token is a vector token.
            QueryMemoryFull: one operation changes more rows of the table than are read at once behind an address.
        """
        yield from latest_stretches(
            self._reader(stream), table, after=after, upto=upto, rows_max=rows_max, bytes_max=self._latest_bytes_max
        )

    def merged(self, stream: str, table: str, *, at: datetime | None = None) -> pa.Table:
        """A table that several regions write, as all of them together say it is: one row a key, merged as `[streams.S.merge]` has it.

        Args:
            stream: the stream's name.
            table: `schema.table`, of one that applications write, with a key.
            at: as of which moment signals have decayed (without a zone: UTC); that of the newest record where None, so that two homes that
                have the same records see the same.

        Returns:
            The table's own columns, in the order of its key. Read from the logs that this home has: its own, and those of the regions that
            it follows.

        Raises:
            UnknownTable: no region has records of it.
            MergeUnsuitable: it can't merge so.
            OtherRegion, OtherStream: a log isn't what its folder, or what was merged before, says.
            OffsetExpired: retention has dropped what wasn't merged yet (`millstream reconcile`).
            InvalidValue: a counter's sum is beyond its type.
            QueryMemoryFull: it is larger than what is read at once behind an address.
            ReplicaTooStale: what this node has of one of the regions is older than it may show; `stream` says of which (`shop@2`).
        """
        try:
            from millstream.nodes.staleness import check_ages
            from millstream.regions.region_table import merged_table
        except ModuleNotFoundError as error:
            raise _needs_run(error, "merging regions") from error

        moment = at if at is None or at.tzinfo is not None else at.replace(tzinfo=UTC)
        at_ns = None if moment is None else microseconds(moment) * 1000
        name = self._home.pick_stream(stream)
        check_ages(self._home, name)
        return merged_table(self._home, name, table, at_ns=at_ns, bytes_max=self._latest_bytes_max)

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
    ) -> Appended:
        """Append rows to a table of a stream: one operation, which readers see whole or not at all. Returns once it is durable.

        Where `millstream run` (or another process that appends) writes the home, it goes through that one; else this process writes it
        until it is closed, or until `millstream run` begins. A process whose configuration has a `[writer] name` of its own writes beside
        the others.

        Args:
            stream: its name, as in millstream.toml: [streams.NAME].
            table: `schema.table`, quoted where it must be; without a schema it is of `public`. Made, with the columns of its first rows, as
                `schema_on_write` allows.
            rows: a dict or an iterable of them; a pyarrow table or batch; a frame of pandas or polars; anything that speaks Arrow's
                stream protocol. Columns that a row lacks are null. Up to 64 MiB.
            deadline_s: how long to wait for room where the writer is busy, and then for other machines, where those have to have it.
            session: of a session, its name, with this write's number in it: the same write sent again isn't appended again.
            number: see `session`; from 1.
            idempotency_key: instead of those two, text of the caller's making that no other write has.
            keep_valid_rows: whether rows that have no place in the table are left out and named (`Appended.rejected`); else they
                refuse all of them.
            acks: where the rows have to be before this returns: `local`, `durable(1)` for one follower, `durable(2)` …, or `object` for the object store.
                None: where the stream says, which is the least.

        Returns:
            Where the rows are: their numbers, and a token for who reads them.

        Raises:
            UnknownStream, UsageError: there is no such stream, the text is no table's name, or `deadline_s` no time.
            InvalidValue: a value has no place in its column; nothing was appended.
            UnknownTable, UnknownColumn, KeyChanged, TableCaptured, RowsTooLarge: likewise.
            Overloaded, DiskFull: there's no room for it now; nothing was appended.
            AppendOutcomeUnknown: the disk failed, or the process that writes went away: it may or may not be there.
            HomeBusy, WriterClosed: another process has the home, and doesn't take appends; nothing was appended.
            NotEnoughReplicas: it is durable here, and others didn't say in time that they have it, too.
            AckLevelUnavailable: nobody could say that; nothing was appended.
            MissingExtra: reading needs the core alone; this needs `millstream[run]`.
        """
        check_deadline(deadline_s)
        write_id = write_id_of(session, number, idempotency_key)
        return self._home_appender().append(
            stream,
            table,
            rows,
            deadline_s=deadline_s,
            write_id=write_id,
            keep_valid_rows=keep_valid_rows,
            acks=level_of(acks),
        )

    def session(self, stream: str, name: str | None = None, *, next_number: int | None = None) -> Session:
        """Writes to a stream that are numbered by themselves, so that each may be sent again without being appended twice.

        Args:
            stream: its name.
            name: the session's, of the application's making: it tells its writes apart from those of others. None: one that nobody else has.
            next_number: that of the first write; None: the first that the log lacks, so that an application that starts anew goes on
                where it was.

        Raises:
            UnknownStream: there is no such stream (behind an address: the first call says so).
            InvalidValue: the name is empty.
            UsageError: the number is below 1.
        """
        check_stream(self._home, stream)
        return Session(self, stream, *session_of(name, next_number))

    def session_facts(self, stream: str, name: str) -> SessionFacts:
        """What a stream's log has of a session: its mark, and which numbers above that.

        Raises:
            UnknownStream: there is no such stream.
            SessionsNeedOneWriter: several writers share it.
            SessionsNotKnown: it writes to a buffer.
            HomeBusy, WriterClosed: as `append`.
        """
        return self._home_appender().session(stream, name)

    def _home_appender(self) -> HomeAppender:
        with self._appending:
            if self._closed:
                raise WriterClosed("this home was closed", hint="Open it again: millstream.open(…).")
            if self._appender is None:
                self._appender = home_appender(self._home)
            return self._appender

    def query(
        self, sql: str, *, stream: str | None = None, as_of: StreamToken | datetime | str | None = None
    ) -> pa.Table:
        """The result of SQL over a stream's lake tables, all at one token; see `millstream query`.

        Args:
            sql: one statement; tables are named schema.table.
            stream: its name; needed where the home has several.
            as_of: a token, a moment or the text of either: the tables as they stood then, with the columns of then.

        Raises:
            InvalidQuery: the SQL fails; the message is DuckDB's.
            InvalidTime, InvalidToken, BeyondRetention, TimeFromFuture, TokenFromFuture: `as_of` can't be had.
        """
        with self.lake(stream, as_of=as_of) as lake:
            return lake.query(sql)

    def lake(self, stream: str | None = None, *, as_of: StreamToken | datetime | str | None = None) -> LakeSession:
        """A session for several queries at one token; a context manager. See `query` for the arguments."""
        return open_lake(self._home, stream, as_of=as_of)

    def status(self) -> dict[str, Any]:
        """What `millstream status --json` prints."""
        from millstream.app.status import collect_status

        return collect_status(self._home)

    def _reader(self, stream: str) -> StreamReader:
        name = self._home.pick_stream(stream)
        if name not in self._readers:
            self._readers[name] = open_reader(self._home, name)
        else:
            check_age_of_copy(self._home, name)
        return self._readers[name]


def open(path: str | Path | None = None) -> OpenHome:  # noqa: A001 - as `millstream.open`
    """Open a home: the one at `path`, else that of MILLSTREAM_HOME, else the nearest folder upward.

    Raises:
        HomeNotFound: there is none.
        HomeTooNew: a newer Millstream wrote it.
    """
    home = Home.find(path, needs_source=False, named_by="path")
    home.check_format()
    return OpenHome(home)


def level_of(acks: str | None) -> AckLevel | None:
    """An acknowledgement level by its name; `UsageError` where it is none."""
    return None if acks is None else AckLevel.parse(acks)


def check_stream(home: Home, stream: str) -> None:
    """`UnknownStream` where the configuration has none of that name; `MissingExtra` where it can't be read for want of what reads it."""
    try:
        home.written_stream(stream)
    except ModuleNotFoundError as error:
        raise _needs_run(error) from error


def write_id_of(session: str | None, number: int | None, idempotency_key: str | None) -> WriteId | None:
    """What tells an append apart, as its caller said it; whether it is one at all is looked at where it is written."""
    if session is None and number is None and idempotency_key is None:
        return None
    return WriteId(session, number, idempotency_key)


def home_appender(home: Home) -> HomeAppender:
    """What appends to a home's streams; `MissingExtra` where the core alone is installed, or the client."""
    try:
        from millstream.writers.appending import HomeAppender
    except ModuleNotFoundError as error:
        raise _needs_run(error) from error
    return HomeAppender(home, open_other)


def open_other(place: str | Path, token: str | None) -> HomeCalls:
    """Another home, which a sink's rows go to: behind an address, by its token, or in a folder. Raises as `open` and `connect`."""
    if isinstance(place, Path):
        return open(place)
    from millstream.client.client import connect

    return connect(place, token=token)


def _needs_run(error: ModuleNotFoundError, what: str = "appending") -> MissingExtra:
    return MissingExtra(
        f"{what} needs {error.name}, which isn't installed", hint="pip install 'millstream[run]'", extra="run"
    )


def open_reader(
    home: Home,
    stream: str,
    *,
    without_mark: bool = False,
    on_damage: OnDamage | None = None,
    of_any_age: bool = False,
) -> StreamReader:
    """A reader of a stream's log.

    Args:
        home: whose.
        stream: its name.
        without_mark: as `StreamReader`.
        on_damage: likewise.
        of_any_age: read what there is, also where it is older than this node may show: for who looks at the log itself.

    Raises:
        UnknownStream: the home has none of that name.
        ReplicaTooStale: as `check_age_of_copy`.
        LogError: as `StreamReader`.
    """
    from millstream.wal.reader import StreamReader

    name = home.pick_stream(stream)
    if not of_any_age:
        check_age_of_copy(home, name)
    folder = str(home.wal_folder(name))
    return StreamReader(folder, without_mark=without_mark, on_damage=on_damage)


def check_age_of_copy(home: Home, stream: str) -> None:
    """`ReplicaTooStale` where this home follows another one in a stream, and what it has is older than `[replication] max_staleness` allows."""
    # Another region's log is nobody's to lead here, whether it was followed yet or not.
    if home.role_file(stream).exists() or (parse_region_log_name(stream) and home.config_file.exists()):
        from millstream.nodes.staleness import check_age

        try:
            check_age(home, stream)
        except ModuleNotFoundError as error:
            raise _needs_run(error, "to tell whether a follower is new enough") from error


def _landed_elsewhere(home: Home, stream: str) -> str | None:
    """The node that lands a stream's tables, where this one doesn't."""
    if not home.role_file(stream).exists():
        return None
    from millstream.leadership.roles import Roles

    return Roles(home).led_elsewhere(stream)


def open_lake(
    home: Home,
    stream: str | None = None,
    *,
    as_of: StreamToken | datetime | str | None = None,
    bounds: QueryBounds | None = None,
) -> LakeSession:
    """A stream's lake tables at one token, for SQL.

    Args:
        home: the home.
        stream: its name; None where the home has only one.
        as_of: a token, a moment (UTC where it has no zone), or the text of either; None for the newest cut.
        bounds: what the session may take; None for all that there is.

    Raises:
        InvalidTime, InvalidToken: the text is neither.
        BeyondRetention, TimeFromFuture, TokenFromFuture: the lake has nothing of it, any more or as yet.
    """
    from millstream.home.config_mapping import lake_layout
    from millstream.lake.query.sql import LakeSession

    name, config = home.stream_config(stream)
    try:
        stream_id = open_reader(home, name).stream_id
    except LogError:
        # The log may be elsewhere, or gone; the catalog knows the stream too.
        with home.open_catalog() as catalog:
            stream_id = catalog.stream(name).id
    if isinstance(as_of, str):
        as_of = parse_as_of(as_of, stream_id, now=datetime.now(UTC))
    if isinstance(as_of, datetime):
        moment: Seq | datetime | None = as_of.replace(tzinfo=UTC) if as_of.tzinfo is None else as_of
    else:
        moment = None if as_of is None else StreamToken.parse(str(as_of), stream=stream_id).linear()
    return LakeSession(
        lake_layout(home, name, config, stream_id),
        as_of=moment,
        held=lambda: _set_aside(home, stream_id),
        known=lambda: _known(home, name, stream_id),
        landed_by=_landed_elsewhere(home, name),
        bounds=bounds,
    )


def _known(home: Home, stream: str, stream_id: StreamId) -> list[KnownTable]:
    """The stream's tables as capture knows them."""
    from millstream.catalog import TableState
    from millstream.lake.known_tables import KnownTable

    if not home.has_catalog():
        return []
    with home.open_catalog() as catalog:
        rows, schemas = catalog.tables(stream_id), catalog.latest_schemas(stream_id)
    try:
        logged = set(open_reader(home, stream).schemas())
    except LogError:
        logged = set(schemas)  # nobody can tell

    def waits(row: TableRow) -> str:
        if row.state not in {TableState.STREAMING, TableState.HISTORY_ONLY}:
            return f"it is {row.state.value.replace('_', ' ')}{': ' if row.reason else ''}{row.reason}"
        return "the pipeline hasn't landed it" if row.id in logged else ""

    return [
        KnownTable(row.id, row.namespace, row.name, schemas.get(row.id), waits(row))
        for row in rows
        if row.kind is TableKind.TABLE
    ]


def _set_aside(home: Home, stream: StreamId) -> dict[str, str]:
    """Names of tables that capture or the pipeline has set aside, with the reason."""
    from millstream.app.tables import list_tables
    from millstream.catalog import TableState

    if not home.has_catalog():
        return {}
    with home.open_catalog() as catalog:
        found = list_tables(catalog, stream)
    return {table["name"]: table["reason"] for table in found if table["state"] == TableState.SET_ASIDE.value}
