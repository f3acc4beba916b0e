"""`POST /v1/streams/{stream}/tables/{table}`, and `…/tables` for several: rows over HTTP, durable when they are answered.

It is served outside FastAPI, which would take longer for a small request than everything else does; the
OpenAPI document has it all the same (`millstream.serving.openapi`).
"""

from __future__ import annotations

import asyncio
from asyncio import wrap_future
from base64 import b64decode
from collections.abc import Awaitable, Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import pyarrow as pa
import structlog

from millstream.errors import HttpError, IngestError, InvalidValue, MillstreamError, UnknownStream
from millstream.home.config_mapping import increments_of
from millstream.home.table_columns import column_types
from millstream.ingest.arrow_stream_decoding import rows_of_arrow, work_bytes
from millstream.ingest.fit_to_schema import types_of
from millstream.ingest.increment_columns import as_increments, rejected_as_increments, with_nulls_unnamed
from millstream.ingest.json_rows import (
    CELL_BYTES,
    CELLS_MAX,
    Row,
    cell_count,
    columns_of,
    held_bytes,
    rows_of_json,
    rows_of_lines,
    tables_of_json,
    valid_columns_of,
)
from millstream.ingest.keep_valid_rows import naming
from millstream.ingest.multi_table_append import tables_for
from millstream.ingest.python_rows import too_large
from millstream.model.access import Right
from millstream.model.durations import duration_s
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.operations import AppendedTables
from millstream.serving.problem_documents import encoded, headers_of, plain_problem
from millstream.serving.request_batching import BatchTarget, RequestBatches
from millstream.serving.request_bodies import ClientGoneError, Held, MemoryBudget, Receive, read_body
from millstream.serving.requests import (
    Scope,
    Send,
    answer,
    answer_problem,
    choice_said,
    deadline_said,
    headers_said,
    level_said,
    parameters_said,
    text_of_path,
    write_id_said,
)
from millstream.serving.unknown_paths import ROWS_PARAMETERS, check_parameters, unknown_path
from millstream.wal.files import error_of_os
from millstream.workers import call_in_thread

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.ingest.fit_to_schema import ColumnsOf, TableColumns
    from millstream.ingest.line_protocol import TableLines
    from millstream.model.operations import Appended, RejectedRow
    from millstream.model.writes import WriteId
    from millstream.serving.access import Access

logger = structlog.get_logger("millstream.serve")

ON_CLASH: Final = {"request": False, "rows": True}
"""The part that is refused if a row doesn't fit its table: the request (False), or that row (True)."""
LINES_TYPES: Final = frozenset(
    {"application/x-ndjson", "application/ndjson", "application/jsonl", "application/jsonlines"}
)
JSON_TYPE: Final = "application/json"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
ROWS_PATH: Final = "/v1/streams/{stream}/tables/{table}"
TABLES_PATH: Final = "/v1/streams/{stream}/tables"
_LARGE_BYTES: Final = 256 << 10
"""Size in bytes from which bodies are parsed on a thread of their own, so that other requests are answered
at the same time."""
_LARGE_AT_ONCE: Final = 2
_JSON_FACTOR: Final = 24
"""Upper bound of a small JSON body's memory as Python's objects, as a multiple of its size; for a larger one
it is counted."""
_ARROW_FACTOR: Final = 3
_JSON_ANSWER: Final = [(b"content-type", b"application/json")]
_Made = TypeVar("_Made")


class _ColumnsNeededError(Exception):
    """The columns of the tables decide which rows are kept."""


def _not_looked_up(_tables: Collection[str]) -> TableColumns:
    raise _ColumnsNeededError


class Writes:
    """Takes rows from requests."""

    def __init__(self, home: Home, batches: RequestBatches, budget: MemoryBudget, access: Access) -> None:
        self._access = access
        self._home = home
        self._streams = frozenset(home.config.streams)
        self._rows_max = home.config.http.rows_max
        self.deadline_s: Final = duration_s(home.config.http.append_timeout)
        self.batches: Final = batches
        self.budget: Final = budget
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as an ASGI application."""
        append = self._append if is_rows_path(scope["raw_path"]) else self._append_all
        if not takes_rows(scope["raw_path"]):  # `%2F` separates no path
            await answer_problem(send, unknown_path(scope["path"], [ROWS_PATH, TABLES_PATH]))
            return
        try:
            appended = await append(scope, receive)
        except MillstreamError as error:
            await answer_problem(send, error)
        except ClientGoneError:
            return
        except OSError as error:
            await answer_problem(send, error_of_os(error))
        except Exception:  # our bug: the request must not look unanswered
            logger.exception("a request failed", path=scope["path"])
            await answer(send, 500, encoded(plain_problem(500, "this is a bug of the server's")), headers_of(500))
        else:
            await answer(send, 200, msgspec.json.encode(appended.as_dict()), _JSON_ANSWER)

    async def _append(self, scope: Scope, receive: Receive) -> Appended:
        parts = scope["raw_path"].split(b"/")
        stream, table = text_of_path(parts[3]), text_of_path(parts[5])
        await self.admit(scope, stream)
        parse_qualified_name(table)
        headers, target, write_id = self._said(scope, stream, (table,))
        kind = media_type(headers)
        if kind not in LINES_TYPES and kind not in {JSON_TYPE, ARROW_TYPE}:
            raise HttpError(
                f"rows don't come as {kind or 'a body without a Content-Type'}",
                code="media_type_unknown",
                hint=f"Send application/x-ndjson, {JSON_TYPE} or {ARROW_TYPE}, named in Content-Type.",
                header="Content-Type",
                value=kind,
            )
        with Held(self.budget) as held:
            body = await read_body(receive, headers, self.budget, held)
            try:
                rows, rejected = await self._rows(kind, body, held, target)
                size_bytes = len(body)
                if isinstance(rows, pa.Table):
                    self.weigh(held, size_bytes + rows.get_total_buffer_size())
                del body
                if rejected:
                    rejected = rejected_as_increments(rejected, increments_of(self._home, stream, table))
                with naming(rejected, target.tables):
                    appended = await self.batches.append(target, (rows,), size_bytes=size_bytes, write_id=write_id)
            except InvalidValue as error:
                raise as_increments(error, increments_of(self._home, stream, table)) from error
        return appended.with_rejected(rejected)

    def _said(
        self, scope: Scope, stream: str, tables: tuple[str, ...]
    ) -> tuple[dict[bytes, bytes], BatchTarget, WriteId | None]:
        """Return a request's headers, its target and its identity."""
        headers = headers_said(scope)
        parameters = parameters_said(scope)
        check_parameters(parameters, ROWS_PARAMETERS)
        target = BatchTarget(
            stream,
            tables,
            deadline_said(parameters, self.deadline_s),
            choice_said(parameters, "on_clash", ON_CLASH, "request"),
            level_said(headers),
        )
        return headers, target, write_id_said(headers)

    async def _append_all(self, scope: Scope, receive: Receive) -> AppendedTables:
        """Append rows of several tables as one operation."""
        stream = text_of_path(scope["raw_path"].split(b"/")[3])
        await self.admit(scope, stream)
        headers, target, write_id = self._said(scope, stream, ())
        kind = media_type(headers)
        if kind not in {JSON_TYPE, ""}:
            raise _other_type(kind)
        with Held(self.budget) as held:
            body = await read_body(receive, headers, self.budget, held)
            if body and not kind:
                raise _other_type(kind)
            size_bytes = len(body)
            keep = target.keep_valid_rows
            if size_bytes < _LARGE_BYTES:
                self.weigh(held, size_bytes * _JSON_FACTOR)
                tables = tables_of_json(body, rows_max=self._rows_max)
                cells = sum(cell_count(rows) for rows in tables.values() if not isinstance(rows, str))
                has_arrow = any(isinstance(rows, str) for rows in tables.values())
                kept, rejected = await self.decided(
                    stream,
                    lambda look_up: self._tables(stream, tables, look_up, keep_valid_rows=keep),
                    lambda make: self._convert(held, cells, make, has_arrow=has_arrow),
                )
            else:
                self.weigh(held, held_bytes(body))
                kept, rejected = await self.decided(
                    stream,
                    lambda look_up: self._tables(
                        stream, tables_of_json(body, rows_max=self._rows_max), look_up, keep_valid_rows=keep
                    ),
                    self._on_thread,
                )
            self.weigh(held, size_bytes + sum(rows.get_total_buffer_size() for rows in kept.values()))
            target = target._replace(tables=tuple(kept))
            with naming(rejected, kept) if kept else nullcontext():
                appended = await self.batches.append(
                    target, list(kept.values()), size_bytes=size_bytes, write_id=write_id
                )
            return AppendedTables.of(appended, rejected)

    def _tables(
        self, stream: str, tables: dict[str, list[Row] | str], look_up: ColumnsOf, *, keep_valid_rows: bool
    ) -> tuple[dict[str, pa.Table], dict[str, tuple[RejectedRow, ...]]]:
        count = sum(len(rows) for rows in tables.values() if not isinstance(rows, str))

        def make(rows: list[Row] | str, table: str) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
            nonlocal count
            if isinstance(rows, str):
                columns = rows_of_arrow(_from_base64(rows), rows_max=self._rows_max)
                count += columns.num_rows
                if count > self._rows_max:
                    raise too_large("its rows", count, self._rows_max)
                return columns, ()
            if keep_valid_rows:
                return valid_columns_of(rows, may_be_empty=True, types=partial(types_of, look_up, table))
            return columns_of(rows), ()

        return tables_for(
            tables,
            keep_valid_rows=keep_valid_rows,
            make=make,
            accumulates=lambda table: increments_of(self._home, stream, table),
        )

    async def _rows(
        self, kind: str, body: bytes, held: Held, target: BatchTarget
    ) -> tuple[list[Row] | pa.Table, tuple[RejectedRow, ...]]:
        """Return a body's rows, and those left out: small JSON bodies unconverted, for the group that they go with."""
        if kind == ARROW_TYPE:
            self.weigh(held, len(body) * _ARROW_FACTOR)
            size_bytes = max(len(body), work_bytes(body, rows_max=self._rows_max))
            return await self.read(size_bytes, lambda: rows_of_arrow(body, is_checked=True)), ()
        decode = rows_of_json if kind == JSON_TYPE else rows_of_lines

        def convert(rows: list[Row], look_up: ColumnsOf) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
            if not target.keep_valid_rows:
                return columns_of(rows), ()
            name = qualified_name(*parse_qualified_name(target.tables[0]))
            return valid_columns_of(rows, types=partial(types_of, look_up, name))

        if len(body) >= _LARGE_BYTES:
            self.weigh(held, held_bytes(body))
            return await self.decided(
                target.stream,
                lambda look_up: convert(decode(body, rows_max=self._rows_max), look_up),
                self._on_thread,
            )
        self.weigh(held, len(body) * _JSON_FACTOR)
        rows = decode(body, rows_max=self._rows_max)
        cells = cell_count(rows)
        if cells <= CELLS_MAX and not target.keep_valid_rows:
            return rows, ()
        return await self.decided(
            target.stream,
            lambda look_up: convert(rows, look_up),
            lambda make: self._convert(held, cells, make),
        )

    def lines_as_rows(self, stream: str, lines: TableLines) -> pa.Table:
        """Return a measurement's rows, with the columns that each line names if its table takes increments."""
        takes_increments = increments_of(self._home, stream, lines.table)
        return with_nulls_unnamed(lines.rows) if takes_increments else lines.rows

    async def admit(self, scope: Scope, stream: str, *, in_query: bool = False) -> None:
        """Admit a request that may write to the stream.

        Raises:
            Unauthenticated, AccessError (`forbidden`): as `Access.allowed`; checked before the existence of the stream is
                revealed.
            UnknownStream: there is none of that name.
        """
        if self._access.is_asked:
            await self._access.allowed(scope, Right.WRITE, stream, in_query=in_query)
        if stream not in self._streams:
            raise UnknownStream(
                f"there is no stream {stream!r} here",
                hint="Call `GET /v1/streams` for the streams with a log.",
                stream=stream,
            )

    def weigh(self, held: Held, size_bytes: int) -> None:
        """Count the memory that a body will need; `IngestError` (`rows_too_large`) if that could never be within limits."""
        if size_bytes > self.budget.bytes_max:
            raise IngestError(
                f"the body's rows may take {size_bytes} bytes of memory, of {self.budget.bytes_max} for all requests",
                code="rows_too_large",
                hint="Send it in several requests.",
                what="memory",
                size=size_bytes,
                size_max=self.budget.bytes_max,
            )
        held.grow(max(0, size_bytes - held.size_bytes))

    async def read(self, size_bytes: int, make: Callable[[], _Made]) -> _Made:
        """Return the parsed body of that size: parsed here, or on another thread if that takes long."""
        return make() if size_bytes < _LARGE_BYTES else await self._on_thread(make)

    async def _convert(self, held: Held, cells: int, make: Callable[[], _Made], *, has_arrow: bool = False) -> _Made:
        """Return the columns of a small body's rows, which may have far more values than the body: see `cell_count`."""
        if cells > CELLS_MAX:
            self.weigh(held, held.size_bytes + cells * CELL_BYTES)
        elif not has_arrow:
            return make()
        return await self._on_thread(make)

    async def decided(
        self,
        stream: str,
        make: Callable[[ColumnsOf], _Made],
        run: Callable[[Callable[[], _Made]], Awaitable[_Made]],
    ) -> _Made:
        """Return the rows that `run` makes; if the tables' columns decide which are kept, make them on another thread.

        Only rows with values of several kinds need the catalog, and reading it isn't for the event loop.
        """
        try:
            return await run(partial(make, _not_looked_up))
        except _ColumnsNeededError:
            return await self._on_thread(partial(make, partial(column_types, self._home, stream)))

    async def _on_thread(self, make: Callable[[], _Made]) -> _Made:
        async with self._large:
            return await wrap_future(call_in_thread("http-prepares", make))


def _other_type(kind: str) -> HttpError:
    return HttpError(
        f"rows of several tables don't come as {kind or 'a body without a Content-Type'}",
        code="media_type_unknown",
        hint=f"Send {JSON_TYPE}, named in Content-Type.",
        header="Content-Type",
        value=kind,
    )


def _from_base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise HttpError(
            f"a table's rows are text that isn't base64: {error}",
            code="invalid_body",
            hint="Send an array of objects, or an Arrow IPC stream as base64.",
        ) from error


def media_type(headers: dict[bytes, bytes]) -> str:
    """Return a body's media type, without its parameters."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def takes_rows(raw_path: bytes) -> bool:
    """Return whether a path, as it was sent, is that of one table's rows, or of several tables'."""
    parts = raw_path.split(b"/")
    return is_rows_path(raw_path) or (
        len(parts) == 5 and parts[1] == b"v1" and parts[2] == b"streams" and parts[4] == b"tables"
    )


def is_rows_path(raw_path: bytes) -> bool:
    """Return whether a path, as it was sent, is that of a table's rows."""
    parts = raw_path.split(b"/")
    return len(parts) == 6 and parts[1] == b"v1" and parts[2] == b"streams" and parts[4] == b"tables"
