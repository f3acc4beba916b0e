"""`POST /write` and `POST /api/v2/write`: InfluxDB's line protocol, as its clients of versions 1, 2 and 3 send it.

A stream is the database (`db`) or bucket (`bucket`), a measurement a table. Lines that are invalid, or
don't fit their table, are left out and listed by number; the others are durable when the answer comes.
Errors have the form that those clients expect.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import wrap_future
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Literal, TypeAlias

import structlog

from millstream.errors import HttpError, MillstreamError, UsageError
from millstream.ingest.line_protocol import Lines, tables_of_lines
from millstream.model.operations import TableAppended
from millstream.model.positions import StreamToken
from millstream.serving.problem_documents import encoded, headers_of, status_of
from millstream.serving.queries.frames import POSITION_HEADER
from millstream.serving.request_batching import BatchTarget
from millstream.serving.request_bodies import ClientGoneError, Held, Receive, read_body
from millstream.serving.requests import (
    Scope,
    Send,
    answer,
    deadline_said,
    headers_said,
    level_said,
    parameters_said,
    write_id_said,
)
from millstream.serving.row_writes import Writes
from millstream.wal.files import error_of_os

logger = structlog.get_logger("millstream.serve")

Header: TypeAlias = tuple[bytes, bytes]
_POSITION_HEADER: Final = POSITION_HEADER.lower().encode()
Dialect = Literal["v1", "v2"]
"""The dialects of `/write` (`v1`) and of `/api/v2/write` (`v2`)."""
_TOLD_MAX: Final = 20
"""Limit of lines that a message lists."""
_LINES_FACTOR: Final = 12
"""Upper bound of a body's memory while it is parsed, as a multiple of its size."""
_PARSER_PATIENCE_S: Final = 5.0
"""Wait for the parser: InfluxDB's clients give up after ten seconds."""
_CODES: Final[Mapping[int, str]] = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not found",
    409: "conflict",
    413: "request too large",
    422: "unprocessable entity",
    429: "too many requests",
    503: "unavailable",
}
"""Version 2's error codes by status; others are `internal error`."""


class _RefusedLine:
    """A line that wasn't written, and why."""

    __slots__ = ("line", "reason")

    def __init__(self, line: int, reason: str) -> None:
        self.line = line
        self.reason = reason


class LineWrites:
    """Takes lines from requests."""

    def __init__(self, writes: Writes, dialect: Dialect, parser: Future[None]) -> None:
        self._writes = writes
        self._parser = parser
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as an ASGI application."""
        try:
            refused, count, token = await self._append(scope, receive)
        except MillstreamError as error:
            await self._fail(send, status_of(error), _spoken(error))
        except ClientGoneError:
            return
        except OSError as error:
            refusal = error_of_os(error)
            await self._fail(send, status_of(refusal), _spoken(refusal))
        except Exception:  # our bug: the request must not look unanswered
            logger.exception("a request failed", path=scope["path"])
            await self._fail(send, HTTPStatus.INTERNAL_SERVER_ERROR, "this is a bug of the server's")
        else:
            position = [] if token is None else [(_POSITION_HEADER, str(token).encode())]
            if not count:
                await answer(send, HTTPStatus.NO_CONTENT, b"", [(b"x-influxdb-version", VERSION), *position])
            else:
                await self._fail(send, HTTPStatus.BAD_REQUEST, _told(refused, count), refused[0].line, position)

    async def _fail(
        self, send: Send, status: int, message: str, line: int | None = None, position: Sequence[Header] = ()
    ) -> None:
        said: dict[str, Any]
        if self._dialect == "v1":
            said = {"error": message}
        else:
            said = {"code": _CODES.get(status, "internal error"), "message": message}
            if line is not None:
                said["line"] = line
        beside = [header for header in headers_of(status) if header[0] != b"content-type"]
        headers = [(b"content-type", b"application/json"), (b"x-influxdb-version", VERSION), *beside, *position]
        await answer(send, status, encoded(said), headers)

    async def _append(self, scope: Scope, receive: Receive) -> tuple[list[_RefusedLine], int, StreamToken | None]:
        """Append a request's lines; return the first ones that weren't written, their total number, and the position.

        There is no position if no line was valid.
        """
        parameters, headers = parameters_said(scope), headers_said(scope)
        name = "db" if self._dialect == "v1" else "bucket"
        stream = parameters.get(name, "")
        if not stream:
            raise UsageError(f"the address names no {name}", hint=f"Add ?{name}=STREAM.")
        await self._writes.admit(scope, stream, in_query=True)
        deadline_s, acks = deadline_said(parameters, self._writes.deadline_s), level_said(headers)
        write_id = write_id_said(headers)
        now_ns = time.time_ns()
        await self._warmed()
        with Held(self._writes.budget) as held:
            body = await read_body(receive, headers, self._writes.budget, held)
            self._writes.weigh(held, len(body) * _LINES_FACTOR)
            read = partial(tables_of_lines, body, precision=parameters.get("precision", ""), now_ns=now_ns)
            lines = await self._writes.decided(
                stream,
                lambda columns_of: read(columns_of=columns_of),
                lambda make: self._writes.read(len(body), make),
            )
            if not lines.tables and not lines.rejected_count:
                raise UsageError("the body has no lines")
            if not lines.tables:
                return *_refused(lines, {}), None
            tables = tuple(table.table for table in lines.tables)
            target = BatchTarget(stream, tables, deadline_s, keep_valid_rows=True, acks=acks, keep_valid_tables=True)
            rows = [self._writes.lines_as_rows(stream, table) for table in lines.tables]
            self._writes.weigh(held, len(body) + sum(one.get_total_buffer_size() for one in rows))
            appended = await self._writes.batches.append(target, rows, size_bytes=len(body), write_id=write_id)
        return *_refused(lines, appended.tables), appended.token

    async def _warmed(self) -> None:
        """Wait for the parser's machine code.

        `server_busy` if a client wouldn't wait that long: it would resend accepted lines.
        """
        if not self._parser.done():
            try:
                async with asyncio.timeout(_PARSER_PATIENCE_S):
                    await wrap_future(self._parser)
            except TimeoutError:
                raise HttpError(
                    "the parser of lines is being compiled; no line was appended",
                    code="server_busy",
                    hint="Send them again in a moment.",
                ) from None


def _refused(lines: Lines, tables: Mapping[str, TableAppended]) -> tuple[list[_RefusedLine], int]:
    """Return the first lines that weren't written, in order, and how many there are.

    Raises:
        MillstreamError: a table's lines failed for another reason than the lines themselves, so the client sends all lines again.
    """
    refused = [_RefusedLine(line.line, f"{line.reason}: {line.text!r}") for line in lines.rejected]
    count = lines.rejected_count
    for table in lines.tables:
        part = tables[table.table]
        if part.refused is not None:
            refused += [_RefusedLine(int(line), part.refused.message) for line in table.lines[:_TOLD_MAX]]
            count += len(table.lines)
        else:
            refused += [_RefusedLine(int(table.lines[row.row]), row.reason) for row in part.rejected]
            count += len(part.rejected)
    return sorted(refused, key=lambda one: one.line), count


def _told(refused: Sequence[_RefusedLine], count: int) -> str:
    told = "; ".join(f"line {one.line}: {one.reason}" for one in refused[:_TOLD_MAX])
    more = f"; and {count - _TOLD_MAX} more" if count > _TOLD_MAX else ""
    return f"partial write: {told}{more} dropped={count}"


def _spoken(error: MillstreamError) -> str:
    return f"{error.message}. {error.hint}" if error.hint else error.message


VERSION: Final = b"v1.8.10-millstream"
"""Version that clients of version 1 check, also in `/ping`. They take `v2` for a server that has no `/write`."""
