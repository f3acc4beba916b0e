"""Spark's rows appended to a stream, each once, by `df.write` and `df.writeStream` with `format("millstream")`.

Rules:

- Tasks append nothing. They put their rows in a folder that the driver also sees, or in their
  message to the driver. The driver appends the rows when Spark reports that all tasks are done. So
  a task that failed, ran twice or was given up leaves nothing behind.
- An append's key is made of Spark's identifiers: the query's id (or `idempotency_id`) and the
  number of the micro-batch. If Spark didn't record a micro-batch as done and repeats it, the key is
  recognised, however the rows are then divided into tasks. If its rows differ (because of a clock
  or randomness), the rows in the log stay. Under an `idempotency_id` the batch is rejected, because
  it may be another query's.
- A micro-batch of up to `staged_rows.PART_BYTES` is one operation: readers see it whole or not at all. A
  larger one is several operations, each with a key of its own (see `millstream.spark.staged_rows`).

Options: see `SinkOptions`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

import millstream
from millstream import failpoints
from millstream.errors import DedupWindowExpired, EngineError, IdempotencyKeyReused, UsageError
from millstream.model.replication import AckLevel
from millstream.spark.local_folders import folder_of
from millstream.spark.staged_rows import Staged, forget_abandoned, parts_of, stage

if TYPE_CHECKING:
    from millstream.client.appends import HomeAppends

_OPTIONS: Final = frozenset(
    {
        "path",
        "url",
        "token",
        "verify",
        "cert",
        "stream",
        "table",
        "idempotency_id",
        "staging",
        "deadline_s",
        "on_clash",
        "acks",
    }
)
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a streaming query that Spark passes on with the others."""
_DEADLINE_S: Final = 60.0
_QUERY_ID: Final = "sql.streaming.queryId"
"""Spark's name for the local property that holds a task's query id."""
_EXACT: Final = (
    BooleanType, ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType, DecimalType, StringType, CharType, VarcharType,
    BinaryType, DateType, TimestampType, TimestampNTZType, NullType,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of a writer.

    Options:
        path: the home's folder, on the driver's machine; or
        url: the address of its server, with `token`, `verify` (a file of certificates to trust) and `cert` (a file
            with the caller's own).
        stream, table: the rows' target.
        idempotency_id: identifies this query's (or job's) writes. A streaming query has an id of its own, which its
            checkpoint keeps; without one, each run of a job is separate.
        staging: a folder that the driver and all executors share, for rows in transit. Default: with `path` one in the
            home; with `url` none, rows go through the driver.
        deadline_s: how long to wait for room if the writer is busy. Default: 60.
        acks: where rows have to be before a batch is done: `local`, `durable(1)` …, `object`. Default: the stream's
            level, which is the minimum.
        on_clash: `request` (default): a row that doesn't fit the table fails the batch; `rows`: it is left out.
    """

    stream: str
    table: str
    path: str | None = None
    url: str | None = None
    token: str | None = field(default=None, repr=False)
    verify: str | None = None
    cert: str | None = None
    idempotency_id: str | None = None
    staging: Path | None = None
    deadline_s: float = _DEADLINE_S
    keep_valid_rows: bool = False
    acks: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Parse the options as Spark passes them, names in any case.

        Raises:
            UsageError: an option is unknown, missing or malformed; the message names it.
        """
        given = {name.lower(): value for name, value in options.items()}
        unknown = sorted(set(given) - _OPTIONS - _SPARKS_OWN)
        if unknown:
            raise UsageError(
                f"the millstream sink has no option {unknown[0]!r}", hint=f"It has: {', '.join(sorted(_OPTIONS))}."
            )
        path, url = given.get("path"), given.get("url")
        if (path is None) == (url is None):
            raise UsageError(
                "the millstream sink needs either path or url",
                hint='Pass the home, .option("path", "shop"), or its server, .option("url", "http://…").',
            )
        missing = [name for name in ("stream", "table") if not given.get(name)]
        if missing:
            raise UsageError(f"the millstream sink needs the option {missing[0]}")
        if given.get("on_clash", "request") not in {"request", "rows"}:
            raise UsageError(f"on_clash {given['on_clash']!r} is unknown", hint="It is `request` or `rows`.")
        try:
            deadline_s = float(given.get("deadline_s", _DEADLINE_S))
        except ValueError as error:
            raise UsageError(f"deadline_s is not a number: {given['deadline_s']!r}") from error
        folder = given.get("staging")
        if path is not None:
            path = str(folder_of(path).absolute())
            folder = folder or str(Path(path) / "data" / "staged")
        return cls(
            stream=given["stream"],
            table=given["table"],
            path=path,
            url=url,
            token=given.get("token"),
            verify=given.get("verify"),
            cert=given.get("cert"),
            idempotency_id=given.get("idempotency_id"),
            staging=None if folder is None else folder_of(folder),
            deadline_s=deadline_s,
            keep_valid_rows=given.get("on_clash") == "rows",
            acks=None if "acks" not in given else str(AckLevel.parse(given["acks"])),
        )

    def check_installed(self) -> None:
        """Check that the driver can reach the home, before any row is taken.

        Raises:
            UsageError (`missing_extra`): `url` needs a package that isn't installed; the hint names the extra that has it.
        """
        if self.url is not None:
            getattr(millstream, "connect")  # noqa: B009 - it imports the client

    def opened(self) -> HomeAppends:
        """Return the home, open."""
        if self.path is not None:
            return millstream.open(self.path)
        assert self.url is not None
        return millstream.connect(self.url, token=self.token, verify=self.verify or True, cert=self.cert)


class _RowSink:
    """The common part of both writers."""

    def __init__(self, options: SinkOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise UsageError(
                "a stream's rows can't be written over", hint='Append them: .mode("append"), .outputMode("append").'
            )
        options.check_installed()
        for column in schema.fields:
            check_type(column.name, column.dataType)
        self._options = options
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._job = uuid.uuid4().hex
        if options.staging is not None:
            forget_abandoned(options.staging)

    @property
    def _folder(self) -> Path | None:
        return None if self._options.staging is None else self._options.staging / self._job

    def _staged(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        context = TaskContext.get()
        query = "" if context is None else context.getLocalProperty(_QUERY_ID) or ""
        return stage((self._in_utc(batch) for batch in batches), self._schema, self._folder, query)

    def _in_utc(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch in its declared types.

        Spark gives moments in the session's zone, and the same moment must be the same bytes.
        """
        columns = [
            column if column.type == declared.type else column.cast(declared.type)
            for column, declared in zip(batch.columns, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _append(self, messages: Sequence[WriterCommitMessage | None], key: str) -> None:
        # A user's key may also be another query's: then the rows must be equal.
        named = self._options.idempotency_id is not None
        staged = [message for message in messages if isinstance(message, Staged)]
        failpoints.hit("spark.sink.before_append")
        with self._options.opened() as home:
            for number, part in enumerate(parts_of(staged, self._schema, ordered=named)):
                try:
                    home.append(
                        self._options.stream,
                        self._options.table,
                        part,
                        deadline_s=self._options.deadline_s,
                        idempotency_key=f"{key}:{number}",
                        keep_valid_rows=self._options.keep_valid_rows,
                        acks=self._options.acks,
                    )
                except DedupWindowExpired:
                    continue  # it is in the log, appended so long ago that its position is no longer known
                except IdempotencyKeyReused as error:
                    if named:
                        raise self._another(error, number) from error
                    continue  # it is in the log already, with the rows of its first run
        failpoints.hit("spark.sink.appended")

    def _another(self, error: IdempotencyKeyReused, number: int) -> IdempotencyKeyReused:
        return IdempotencyKeyReused(
            f"idempotency_id {self._options.idempotency_id} was another write's: {error.message}",
            hint="Give each query and each job its own idempotency_id; an interrupted query with rows that differ each "
            "time (by a clock or by chance) needs a new one, which may write its last batch twice.",
            **{**error.details, "part": number},
        )

    def _drop(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        for message in messages:
            if isinstance(message, Staged):
                message.drop()
        if (folder := self._folder) is not None and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


class MillstreamWriter(_RowSink, DataSourceArrowWriter):
    """One job: its rows are appended when all of its tasks are done."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Take a task's rows."""
        return self._staged(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Append the tasks' rows."""
        name = self._options.idempotency_id or self._job
        self._append(messages, f"spark:{name}")
        self._drop(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Discard the tasks' rows."""
        self._drop(messages)


class MillstreamStreamWriter(_RowSink, DataSourceStreamArrowWriter):
    """A streaming query: each micro-batch is appended when all of its tasks are done."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Take a task's rows."""
        return self._staged(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Append the micro-batch, if it isn't in the log already."""
        queries = {message.query for message in messages if isinstance(message, Staged)}
        if not queries:
            return
        name = self._options.idempotency_id or next(iter(queries))
        if not name:
            raise EngineError(
                "Spark doesn't tell the streaming query's id, so that its batches couldn't be told apart",
                hint='Give the query a unique name: .option("idempotency_id", …).',
            )
        self._append(messages, f"spark:{name}:{batchId}")
        self._drop(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 - Spark's
        """Discard the tasks' rows."""
        self._drop(messages)


def check_type(name: str, kind: DataType) -> None:
    """Check that the log can hold each value of a column exactly.

    Args:
        name: the column's; nested columns are separated by a point.
        kind: Spark's type. An array's items and a struct's fields are checked, too.

    Raises:
        UsageError: it can't.
    """
    if isinstance(kind, ArrayType):
        check_type(f"{name}.element", kind.elementType)
    elif isinstance(kind, StructType):
        for inner in kind.fields:
            check_type(f"{name}.{inner.name}", inner.dataType)
    elif not isinstance(kind, _EXACT):
        raise UsageError(
            f"column {name} is {kind.simpleString()}, which the log has no type for",
            hint="Cast it to text (`to_json` makes that of a map or a variant), or leave it out.",
            column=name,
            type=kind.simpleString(),
        )
