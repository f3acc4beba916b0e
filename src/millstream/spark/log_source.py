"""`spark.read.format("millstream")` and `spark.readStream.format("millstream")`: a stream's log as a Spark source.

A batch's partitions are the pieces that `StreamReader.spans` cuts.

Rules:

- A micro-batch is a consistent cut: it ends at the end of a commit group, or at `ending`, so no
  operation is ever seen in part. A token inside an operation means the position before the
  operation.
- An offset is `{"stream": <uuid>, "token": <token>}`. The same two offsets give the same rows for
  ever, in any process. After a restart Spark asks `partitions` for the batch that it had begun,
  without ever asking `initialOffset`. So nothing here keeps state from one call to the next, except
  the target of an AvailableNow query.
- Only the log's folder is read: segments and the mark, not the owner. The catalog is asked for one thing, by the driver:
  the columns of a table that the log has no records of. `read` runs in other processes than the rest, on other cores or
  machines.
- A home that follows is read as `home.read` reads it: a read isn't started if the data is too old
  for `[replication] max_staleness`. A batch checks this when it is planned, a stream for each new
  micro-batch, an AvailableNow query once, for the target of its "now". A read that was started is
  finished. A stream fails rather than waits: the bound is its patience, and from outside a waiting
  stream looks as if it had everything.
- With `merged`, a batch has the rows of all regions (`OpenHome.merged`), read by one task.
- Spark's `commit` lags behind by a batch and the last one never comes: nothing here depends on it.

Options: see `SourceOptions`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

import millstream
from millstream.errors import (
    EngineError,
    LogError,
    MillstreamError,
    OffsetExpired,
    PositionError,
    UnknownStream,
    UnknownTable,
    UsageError,
)
from millstream.model.column_renames import Names, names_in
from millstream.model.ids import StreamId, TableId, check_stream_name, parse_region_log_name
from millstream.model.positions import Seq, StreamToken
from millstream.model.records import PARTITION_OID, RESERVED_COLUMNS, record_schema
from millstream.model.schema import TableSchema, names_table
from millstream.model.schema_conversion import conform
from millstream.spark.envelope import envelope_schema, envelopes
from millstream.spark.executor_flight import OPTIONS as FLIGHT_OPTIONS
from millstream.spark.executor_flight import flight_of
from millstream.spark.local_folders import folder_of
from millstream.spark.merged_source import MergedReader, MergedTable
from millstream.spark.python_worker_setup import spare_the_collector
from millstream.spark.spark_columns import arrow_schema, spark_schema
from millstream.wal.flight_log import FlightLog
from millstream.wal.readable_range import from_future
from millstream.wal.reader import LogSpan, StreamReader, TableRecords
from millstream.wal.table_batches import is_raw, undecoded_error

PARTITION_BYTES: Final = 16 << 20
"""Log bytes of a partition: about a quarter of a second's work for a Python worker, several times what a task costs."""
_HOMES_FOLDER: Final = (
    "Name a home's folder on this machine: the log's own, or that of a node that follows it (`millstream follow`). "
    "Executors on other machines read by the option `flight`."
)
BATCH_ROWS: Final = 16_384
"""Small frames are joined to about this many rows: an Arrow batch costs Spark some 50 µs, whatever its size."""
_OTHER_COLUMNS: Final = (
    "Read from a token after the change, leave the column out (`columns`), or read envelopes (no `table`)."
)

_OPTIONS: Final = frozenset(
    {"path", "wal", "stream", "table", "columns", "starting", "ending", "merged", "at"}
    | {"max_rows_per_trigger", "max_bytes_per_trigger", "partition_bytes", *FLIGHT_OPTIONS}
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of a reader.

    Options, all optional except `path` and `stream`:
        path, stream: the home's folder, and the stream's name.
        wal: the folder of the stream's log, in place of both: it is read whoever owns it and however old it is.
        table: `schema.table`; its own columns after the `__` columns. Without it: every record as an envelope.
        columns: names, separated by commas; only these are decoded for Spark.
        starting: `earliest` (default), `latest`, or a token: the rows after it.
        ending: a token: the rows up to it. Default: the durable end when the batch (or each trigger) is planned.
        max_rows_per_trigger, max_bytes_per_trigger: bounds of a micro-batch; an operation is never split, and bytes win
            if both are given and the engine asks for one.
        merged: `true` for the rows of all regions instead of records; needs `path` and `table`.
        at: with `merged`, the moment up to which signals have decayed, in ISO 8601.
        partition_bytes: bytes of the log a Spark partition.
        flight: `grpc+tls://host:port` (or `grpc://`), where tasks read the log if they can't see its folder, with `token`,
            and `verify`, a file of certificates to trust.
    """

    wal: Path
    home: Path | None = None
    """The log's home, if one was named."""
    table: str | None = None
    columns: tuple[str, ...] = ()
    starting: str = "earliest"
    ending: str | None = None
    rows_max: int | None = None
    bytes_max: int | None = None
    partition_bytes: int = PARTITION_BYTES
    merged: MergedTable | None = None
    flight: FlightLog | None = None
    """Where tasks read the log; None: its folder."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Parse the options as Spark passes them, names in any case.

        Raises:
            UsageError: an option is unknown, missing or malformed; the message names it.
            UnknownStream: there is no such log.
        """
        given = {name.lower(): value for name, value in options.items()}
        unknown = sorted(set(given) - _OPTIONS)
        if unknown:
            raise UsageError(
                f"the millstream source has no option {unknown[0]!r}", hint=f"It has: {', '.join(sorted(_OPTIONS))}."
            )
        return cls(
            wal=(wal := _wal_folder(given)),
            home=(home := None if "wal" in given else folder_of(given["path"])),
            table=given.get("table"),
            columns=_names(given.get("columns", "")),
            starting=given.get("starting", "earliest"),
            ending=given.get("ending"),
            rows_max=_count(given, "max_rows_per_trigger"),
            bytes_max=_count(given, "max_bytes_per_trigger"),
            partition_bytes=_count(given, "partition_bytes") or PARTITION_BYTES,
            merged=MergedTable.parse(given, home, wal.name),
            flight=flight_of(given, given.get("stream", wal.name)),
        )


class MillstreamSource(DataSource):
    """The source as Spark sees it; Spark makes one for each `load()` and pickles it from process to process."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(…)`."""
        return "millstream"

    def schema(self) -> StructType:
        """Return the columns, from the log's latest schema of the table; they are fixed for the DataFrame's life."""
        options, whole = SourceOptions.parse(self.options), envelope_schema(())
        if options.merged is not None:
            whole = options.merged.schema()
        elif options.table is None:
            with suppress(LogError):  # nothing has been written so far
                whole = envelope_schema(StreamReader(str(options.wal)).schemas().values())
        else:
            whole = record_schema(_latest(_Scan(options, StructType()).tables()))
        _check_columns(options.columns, whole.names)
        return spark_schema(pa.schema([whole.field(name) for name in options.columns]) if options.columns else whole)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for `spark.read`."""
        options = SourceOptions.parse(self.options)
        if options.merged is not None:
            return MergedReader(options.merged, schema)
        return MillstreamReader(_Scan.of(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader for `spark.readStream`; `UsageError` with `merged`."""
        options = SourceOptions.parse(self.options)
        if options.merged is not None:
            raise UsageError("merged rows are no stream", hint="Read them again with spark.read.")
        return MillstreamStreamReader(_Scan.of(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's
        """Return the writer for `df.write`; see `millstream.spark.log_sink`."""
        from millstream.spark.log_sink import MillstreamWriter, SinkOptions

        return MillstreamWriter(SinkOptions.parse(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - Spark's
        """Return the writer for `df.writeStream`; likewise."""
        from millstream.spark.log_sink import MillstreamStreamWriter, SinkOptions

        return MillstreamStreamWriter(SinkOptions.parse(self.options), schema, overwrite=overwrite)


@dataclass
class LogPartition(InputPartition):
    """One task's part of `(after, upto]`."""

    span: LogSpan
    table_ids: frozenset[TableId] | None
    """The tables to read; None: all."""
    named: tuple[TableSchema, ...] = ()
    """Their schemas with the names of the declared columns."""


@dataclass(frozen=True)
class _Scan:
    """The common part of batch and stream. Picklable, and cheap to make: each process opens the log on first use."""

    options: SourceOptions
    declared: StructType
    _opened: list[StreamReader] = field(default_factory=list, compare=False)
    _known: list[TableSchema] = field(default_factory=list, compare=False)
    """The schemas of `tables` that only the catalog has."""

    @classmethod
    def of(cls, options: SourceOptions, declared: StructType) -> Self:
        """Return the scan; raises `UsageError` if no version of the table has a column that the user's own schema declares."""
        scan = cls(options, declared)
        own = [name for name in declared.names if name not in RESERVED_COLUMNS]
        if options.table is None:
            _check_columns(declared.names, [*envelope_schema(()).names, PARTITION_OID.name])
            return scan
        newest = scan.tables()
        known = dict.fromkeys(name for schema in newest for name in schema.column_names)
        if not known.keys() >= {*own}:  # it may have been loaded before a column was renamed or dropped
            ids = {schema.table_id for schema in newest}
            versions = scan.log.schema_versions().items()
            known |= dict.fromkeys(name for (i, _), schema in versions if i in ids for name in schema.column_names)
        _check_columns(own, [*known])
        return scan

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Scan, (self.options, self.declared))

    @property
    def log(self) -> StreamReader:
        if not self._opened:
            self._opened.append(StreamReader(str(self.options.wal)))
        return self._opened[0]

    def check_age(self) -> None:
        """Raise `ReplicationError` (`replica_too_stale`) if the home follows another one, and its data is older than it allows."""
        if self.options.home is not None:
            with millstream.open(self.options.home) as home:
                home.check_age(self.options.wal.name)

    def tables(self) -> list[TableSchema]:
        """Return the latest schemas of all tables of the name: a table that was dropped and created again counts twice.

        Raises `UnknownTable` if neither the log nor the home's catalog has one; else as `_in_log`.
        """
        table, home = self.options.table, self.options.home
        assert table is not None
        found = _in_log(self.log, table) or self._known  # which is filled below
        if not found and home is not None:
            with millstream.open(home) as opened:
                found.extend(s for s in opened.known_schemas(self.options.wal.name, table) if not is_raw(s))
        if not found:
            known = sorted({schema.full_name for schema in self.log.schemas().values() if not is_raw(schema)})
            raise UnknownTable(
                f"the log has no table {table!r}", hint=f"Use one of: {', '.join(known) or 'there is none yet'}."
            )
        return found

    def check_beginning(self) -> None:
        """Raise `OffsetExpired` if retention has deleted the log's beginning, and all records of the table with it."""
        table, first = self.options.table, self.log.first_seq()
        if table is not None and first > 1 and not _in_log(self.log, table):
            raise OffsetExpired(
                f"the log begins at number {first}, and has no records of {table} after that",
                hint="Query the table's rows in the lake, or name a token in the option `starting`.",
                first=int(first),
            )

    def start(self) -> Seq:
        """Return the position of `starting`; raises `TokenFromFuture` or `PositionError` (`invalid_token`) if there is none."""
        if self.options.starting == "earliest":
            return Seq(max(0, self.log.first_seq() - 1))
        if self.options.starting == "latest":
            return self.log.persisted_upto()
        return self._existing(self.options.starting)

    def end(self) -> Seq:
        """Return the current end, at most `ending`."""
        return self.log.persisted_upto() if self.options.ending is None else self._existing(self.options.ending)

    def bound(self) -> Seq | None:
        """Return the position at which `ending` stops a stream; it may lie ahead."""
        return None if self.options.ending is None else self.log.whole_upto(self._parse(self.options.ending))

    def partitions(self, after: Seq, upto: Seq) -> list[LogPartition]:
        if upto <= after:
            return []
        table_ids: frozenset[TableId] | None = None
        named: tuple[TableSchema, ...] = ()
        if self.options.table is not None:
            newest = self.tables()
            table_ids = frozenset(schema.table_id for schema in newest)
            named = tuple(found for schema in newest if (found := self._declared(schema)) is not None)
        spans = self.log.spans(after, upto, bytes_target=self.options.partition_bytes)
        return [LogPartition(span, table_ids, named) for span in spans]

    def _declared(self, newest: TableSchema) -> TableSchema | None:
        """Return a table's newest schema that has the declared columns; None if none with numbers has them."""
        wanted = {*self.declared.names} - RESERVED_COLUMNS
        found = [newest]
        if not wanted <= {*newest.column_names}:  # it was renamed since the table was loaded
            versions = sorted(self.log.schema_versions().items(), reverse=True)
            found = [schema for (table_id, _), schema in versions if table_id == newest.table_id]
        having = (schema for schema in found if wanted <= {*schema.column_names} and schema.is_numbered)
        return next(having, None)

    def read(self, partition: LogPartition) -> Iterator[pa.RecordBatch]:
        flight, span = self.options.flight, partition.span
        if flight is None and not os.access(self.options.wal, os.R_OK | os.X_OK):
            raise EngineError(
                f"{socket.gethostname()} can't read {self.options.wal}",
                code="log_unreachable",
                hint='Name the home\'s Flight server, .option("flight", "grpc+tls://host:8788"), or share the folder.',
            )
        log = self.log if flight is None else flight.reader([span], definitions=False)
        target = arrow_schema(self.declared)
        columns: frozenset[str] | None = None
        names = dict[TableSchema, Names]()
        if self.options.table is not None:
            by_table = {schema.table_id: schema for schema in partition.named}
            for schema in log.schemas_in(span, by_table):
                names[schema] = names_in(schema, by_table[schema.table_id])
            columns = frozenset([*target.names, *(name for some in names.values() for name in some.values() if name)])
        found = log.read_span(span, tables=partition.table_ids, columns=columns)
        pieces = found if partition.table_ids is None else self._decoded(found, span, partition.table_ids)
        yield from _together(self._rows(pieces, target, names), target)
        spare_the_collector("read")

    def _rows(
        self, pieces: Iterator[TableRecords], target: pa.Schema, names: Mapping[TableSchema, Names]
    ) -> Iterator[pa.RecordBatch]:
        for piece in pieces:
            if is_raw(piece.schema):
                continue
            rows = piece.batch if self.options.table is not None else envelopes(piece.schema, piece.batch, target.names)
            yield conform(rows, target, hint=_OTHER_COLUMNS, names=names.get(piece.schema))

    def _decoded(
        self, pieces: Iterator[TableRecords], span: LogSpan, tables: frozenset[TableId]
    ) -> Iterator[TableRecords]:
        """Yield the pieces; raises `MillstreamError` (`table_quarantined`) at the first that wasn't decoded."""
        for piece in pieces:
            if is_raw(piece.schema) and self.options.flight is not None:
                name = piece.schema.full_name  # where the others end is known by the log's folder alone
                raise MillstreamError(f"records of {name} weren't decoded", code="table_quarantined", table=name)
            if is_raw(piece.schema):
                begin, reach = (StreamToken.scalar(self.log.stream_id, at) for at in (span.after, span.upto))
                behind = self.log.read_between(Seq(piece.first_seq - 1), span.upto)
                rest = (more for more in behind if more.schema.table_id in tables)
                raise undecoded_error(self.log, piece, rest, begin, reach)
            yield piece

    def _existing(self, text: str) -> Seq:
        seq = self._parse(text)
        if seq > self.log.persisted_upto():
            raise from_future(text, self.log.persisted_upto())
        return self.log.whole_upto(seq)

    def _parse(self, text: str) -> Seq:
        return StreamToken.parse(text, stream=self.log.stream_id).linear()


class MillstreamReader(DataSourceReader):
    """One batch, of what was durable when it was planned."""

    def __init__(self, scan: _Scan) -> None:
        self._scan = scan

    def partitions(self) -> Sequence[InputPartition]:
        """Return the stretches of the log between `starting` and `ending`, sized by bytes."""
        self._scan.check_age()
        start, end = self._scan.start(), self._scan.end()
        if self._scan.options.starting == "earliest":
            self._scan.log.extent.check_end(end)
            self._scan.check_beginning()
        return self._scan.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. If there is none, Spark passes an empty partition of its own."""
        if isinstance(partition, LogPartition):
            yield from self._scan.read(partition)


class MillstreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming query's view of the log."""

    def __init__(self, scan: _Scan) -> None:
        self._scan = scan
        self._target: Seq | None = None

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the start of a query without a spark checkpoint."""
        return self._offset(self._scan.start())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the bound of a micro-batch that the options name; bytes before rows."""
        if self._scan.options.bytes_max is not None:
            return ReadMaxBytes(self._scan.options.bytes_max)
        if self._scan.options.rows_max is not None:
            return ReadMaxRows(self._scan.options.rows_max)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the greatest cut within the limit; at least one whole group if there is one beyond `start`."""
        if self._target is None:
            self._scan.check_age()
        after = self._position(start)
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if bytes_max is not None:
            rows_max = self._scan.options.rows_max
        upto = self._scan.log.cut(after, rows_max=rows_max, bytes_max=bytes_max)
        for bound in (self._target, self._scan.bound()):
            upto = upto if bound is None else min(upto, bound)
        return self._offset(max(after, upto))

    def reportLatestOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the durable end, for the query's progress."""
        return self._offset(self._scan.log.persisted_upto())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the target of "now"."""
        self._scan.check_age()
        self._target = self._scan.log.persisted_upto()

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Return the stretches of the log between two offsets: the same for ever."""
        return self._scan.partitions(self._position(start), self._position(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, LogPartition)
        yield from self._scan.read(partition)

    def _offset(self, seq: Seq) -> dict[str, str]:
        stream = self._scan.log.stream_id
        return {"stream": str(stream), "token": str(StreamToken.scalar(stream, seq))}

    def _position(self, offset: Mapping[str, str]) -> Seq:
        return position_of(offset, self._scan.log.stream_id)


def position_of(offset: Mapping[str, Any], stream: StreamId) -> Seq:
    """Return the position of a spark checkpoint's offset.

    Raises:
        EngineError (`checkpoint_foreign`): it is another stream's, or no offset of Millstream's at all.
    """
    if offset.get("stream") != str(stream):
        raise EngineError(
            f"the spark checkpoint belongs to stream {offset.get('stream', '?')}, and this is stream {stream}",
            code="checkpoint_foreign",
            hint="Name another spark checkpoint (checkpointLocation), or the stream that this one was made for.",
        )
    try:
        return StreamToken.parse(str(offset.get("token", "")), stream=stream).linear()
    except PositionError as error:
        raise EngineError(f"the spark checkpoint's offset can't be read: {error}", code="checkpoint_foreign") from error


def _together(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Join small batches to about `BATCH_ROWS` rows; large ones are passed on uncopied."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if not held and batch.num_rows >= BATCH_ROWS // 4:
            yield batch
            continue
        held.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS:
            yield from pa.Table.from_batches(held, schema).combine_chunks().to_batches()
            held, rows = [], 0
    if rows:
        yield from pa.Table.from_batches(held, schema).combine_chunks().to_batches()


def _in_log(log: StreamReader, table: str) -> list[TableSchema]:
    """Return the latest schemas of the tables of a name that the log has records of.

    A table that is quarantined has the schema of its last record that was decoded.

    Raises:
        UsageError: the text is no name.
        MillstreamError (`table_quarantined`): none of its records was decoded.
    """
    newest = log.schemas()
    if any(is_raw(schema) for schema in newest.values()):
        decoded = {table: schema for (table, _), schema in log.schema_versions().items() if not is_raw(schema)}
        newest = {table: decoded.get(table, schema) if is_raw(schema) else schema for table, schema in newest.items()}
    named = [*filter(names_table(table), newest.values())]
    found = [schema for schema in named if not is_raw(schema)]
    if named and not found:
        first, end = Seq(max(0, log.first_seq() - 1)), log.persisted_upto()
        parts = log.read_between(first, end, table=named[0].table_id)
        begin, reach = (StreamToken.scalar(log.stream_id, at) for at in (first, end))
        for part in parts:
            raise undecoded_error(log, part, parts, begin, reach)
    return found


def _check_columns(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Raise `UsageError` at the first name that isn't a column's, or comes twice."""
    for place, name in enumerate(wanted):
        if name not in known:
            raise UsageError(f"there is no column {name!r}", hint=f"There are: {', '.join(known)}.")
        if name in wanted[:place]:
            raise UsageError(f"column {name!r} is named twice", hint="Name each column once.")


def _latest(schemas: Sequence[TableSchema]) -> TableSchema:
    return max(schemas, key=lambda schema: schema.table_id)


def _wal_folder(given: Mapping[str, str]) -> Path:
    where = given.get("wal") or given.get("path")
    if not where:
        raise UsageError("the millstream source needs the option path", hint='Pass the home: .option("path", "shop").')
    folder = folder_of(where, hint=_HOMES_FOLDER)
    if "wal" not in given:
        name = given.get("stream")
        logs = folder / "data" / "wal"
        if name is None:
            streams: list[str] = []
            if logs.is_dir():
                with millstream.open(folder) as home:
                    streams = home.streams()
            if len(streams) != 1:
                raise UnknownStream(f"{folder} has {len(streams)} streams", hint='Name one: .option("stream", "shop").')
            name = streams[0]
        elif parse_region_log_name(name) is None:
            check_stream_name(name)
        folder = logs / name
    if not folder.is_dir():
        raise UnknownStream(f"there is no log in {folder}", hint="Start `millstream run` once, which creates it.")
    return folder


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _count(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    try:
        count = int(given[name])
    except ValueError as error:
        raise UsageError(f"{name} is not a number: {given[name]!r}") from error
    if count < 1:
        raise UsageError(f"{name} is {count}", hint="Use a number of 1 or more.")
    return count
