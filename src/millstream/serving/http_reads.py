"""Reads over HTTP: streams, tokens, records between tokens, the latest rows, and SQL over the lake.

An answer has any length and takes the memory of a batch: threads make it piece by piece while its caller
reads it. An error before the first byte is a problem document; a later one is in the answer itself (see
`millstream.client.batch_stream`). An answer ends early if its caller reads nothing for a while, or goes away.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import anyio
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.types import Message, Receive, Scope, Send

from millstream.app.home_merged_tables import FOLDED_TIMES
from millstream.app.open_home import OpenHome
from millstream.client.batch_stream import ARROW_TYPE, END, PIECES_TYPE, change_piece, failed, latest_piece, piece
from millstream.client.call_results import LATEST_ROWS_MAX
from millstream.config.quantities import size_bytes
from millstream.errors import HttpError, MillstreamError, Overloaded
from millstream.export.follow_log import FollowedTables, batches_between, position_of
from millstream.lake.query.query_limits import QueryBounds
from millstream.model.access import Right
from millstream.model.durations import duration_s
from millstream.model.positions import StreamToken
from millstream.model.query_reasons import REASONS_HEADER
from millstream.model.region_ages import REGIONS_HEADER, REGIONS_METADATA
from millstream.serving.access import FRESH_S, Access, allow
from millstream.serving.queries.frames import POSITION_HEADER
from millstream.serving.queries.worker_pool import Asking, QueryWorkers
from millstream.serving.request_bodies import SMALL_BYTES_MAX, ClientGoneError, Held, MemoryBudget, read_body
from millstream.serving.requests import headers_said
from millstream.serving.row_streams import as_stream, in_pieces
from millstream.serving.row_writes import JSON_TYPE, media_type
from millstream.workers import Pool

if TYPE_CHECKING:
    from millstream.home.home import Home

_AT_ONCE: Final = 8
"""Threads that make answers: each holds a batch, a range of `latest`, or a query's DuckDB memory. Queries
leave some of them free."""
_ANSWERS_MAX: Final = 32
"""Limit of answers under way, most of them waiting for their callers: each holds a batch."""
_KEPT: Final = 8
"""Number of open homes kept for the next request: a new reader reads the log's last segment from its beginning."""
_TAKES_WITHIN_S: Final = 60.0
"""How long a caller may read nothing of its answer."""
_SQL_MAX: Final = 1 << 20
_MERGED_ROWS: Final = 16_384
"""Rows of a table of several regions in a piece of the answer."""
_GONE: Final = 499
"""Status of an answer without a waiting caller: it appears only in logs."""

_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
_PIECES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Pieces: each a little-endian u32 length and an Arrow IPC stream.",
        "content": {PIECES_TYPE: _BINARY},
    }
}
_ROWS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "An Arrow IPC stream; pieces, for who accepts these.",
        "headers": {
            POSITION_HEADER: {"description": "For a query: the token of its answer.", "schema": {"type": "string"}},
            REGIONS_HEADER: {
                "description": "For merged rows: the regions, and the age of each in seconds, as JSON.",
                "schema": {"type": "string"},
            },
            REASONS_HEADER: {
                "description": "The reasons why rows may be missing or old, as JSON: objects of code, table, detail.",
                "schema": {"type": "string"},
            },
        },
        "content": {ARROW_TYPE: _BINARY, PIECES_TYPE: _BINARY},
    }
}

_Found = TypeVar("_Found")
_Text = Annotated[str | None, Query(max_length=4096)]


class Question(BaseModel, extra="forbid"):
    """A query."""

    sql: str = Field(max_length=_SQL_MAX, description="One statement that only reads; tables are named schema.table.")
    as_of: str | None = Field(
        default=None, max_length=4096, description="A token, an ISO time or an age (`10m ago`): the tables as of then."
    )
    lake_only: bool = Field(
        default=False, description="Read nothing of the log: only what has landed. `merged` tables are then unknown."
    )


_QUESTION: Final[dict[str, Any]] = {
    "required": True,
    "content": {"application/json": {"schema": Question.model_json_schema()}},
}


class Reading:
    """The reading side of a home's server: `router` has its endpoints.

    The application has an `Access` in `app.state.access`.
    """

    def __init__(self, home: Home, budget: MemoryBudget) -> None:
        self._home = home
        self._budget = budget
        self._idle: list[OpenHome] = []
        self._lock = threading.Lock()
        http = home.config.http
        again = "Ask again a little later, or read with fewer callers."
        self._answers = _ConcurrencyLimit(_ANSWERS_MAX, "answers are being read", again)
        self._queries = _ConcurrencyLimit(
            http.queries_max,
            "queries run, as many as may",
            "Ask again a little later; `[http] queries_max` says how many run at a time.",
        )
        self._bounds = QueryBounds(
            size_bytes(http.query_memory_bytes_max),
            size_bytes(http.query_spill_bytes_max),
            duration_s(http.query_timeout),
            home.queries_folder,
        )
        self._workers = QueryWorkers(home, self._bounds)
        self._threads = Pool(_AT_ONCE, thread_name_prefix="reading")
        self.router: Final = APIRouter(prefix="/v1/streams", tags=["read"])
        self._add()
        self._add_query()

    def close(self) -> None:
        """Close threads and open homes; answers under way are completed."""
        self._threads.shutdown(wait=False)
        self._workers.close()

    def _add(self) -> None:
        get = self.router.get
        may_read = [Depends(allow(Right.READ))]

        @get("", summary="Names of the streams that have a log, of those that the caller may read.")
        async def streams(request: Request) -> dict[str, Any]:
            access: Access = request.app.state.access
            caller = await access.caller_of(request.scope)
            found = await self._asked(lambda home: home.streams())
            return {"streams": [name for name in found if caller.may(Right.READ, name)]}

        @get("/{stream}/token", dependencies=may_read, summary="The newest consistent cut of a stream's log.")
        async def token(stream: str, vector: bool = False) -> dict[str, str]:  # noqa: FBT001, FBT002 - a parameter of the URL
            return {"token": str(await self._asked(lambda home: home.token(stream, vector=vector)))}

        @get(
            "/{stream}/records",
            responses=_PIECES,
            dependencies=may_read,
            summary="Records between two tokens, in order.",
            response_class=StreamingResponse,
        )
        async def records(
            request: Request, stream: str, table: _Text = None, after: _Text = None, upto: _Text = None
        ) -> Response:
            def made(home: OpenHome) -> Iterator[bytes]:
                for batch in home.read(stream, table=table, after=after, upto=upto):
                    yield from piece([batch], batch.schema)

            return await self._answer(request, stream, made, PIECES_TYPE)

        @get(
            "/{stream}/changes",
            responses=_PIECES,
            dependencies=may_read,
            summary="Records between two tokens, as `follow` gives them: each batch with a token to resume from.",
            response_class=StreamingResponse,
        )
        async def changes(
            request: Request,
            stream: str,
            after: Annotated[str, Query(max_length=4096)],
            upto: _Text = None,
            table: Annotated[list[str] | None, Query(max_length=1000)] = None,
        ) -> Response:
            def made(home: OpenHome) -> Iterator[bytes]:
                reader, tables = home.reader(stream), FollowedTables(table)
                low = position_of(reader, after)
                high = position_of(reader, upto)
                for batch, position in batches_between(reader, tables, low, max(low, high)):
                    yield from change_piece(batch, StreamToken.scalar(reader.stream_id, position))

            return await self._answer(request, stream, made, PIECES_TYPE)

        @get(
            "/{stream}/latest",
            responses=_PIECES,
            dependencies=may_read,
            summary="Net changes of a table's rows.",
            response_class=StreamingResponse,
        )
        async def latest(
            request: Request,
            stream: str,
            table: Annotated[str, Query(max_length=4096)],
            after: _Text = None,
            upto: _Text = None,
            rows_max: Annotated[int, Query(ge=1, le=LATEST_ROWS_MAX)] = LATEST_ROWS_MAX,
        ) -> Response:
            def made(home: OpenHome) -> Iterator[bytes]:
                for found in home.read_latest(stream, table, after=after, upto=upto, rows_max=rows_max):
                    yield from latest_piece(found.emptied, found.rows, found.token)

            return await self._answer(request, stream, made, PIECES_TYPE)

        @get(
            "/{stream}/merged",
            responses=_ROWS,
            dependencies=may_read,
            summary="Merged rows of a table that several regions write.",
            response_class=StreamingResponse,
        )
        async def merged(
            request: Request,
            stream: str,
            table: Annotated[str, Query(max_length=4096)],
            at: Annotated[
                str | None,
                Query(
                    max_length=4096,
                    description="The moment up to which signals have decayed: an ISO time, an age (`10m ago`) or `now`.",
                ),
            ] = None,
        ) -> Response:
            wants_pieces = PIECES_TYPE in request.headers.get("accept", "")

            headers: dict[str, str] = {}

            def made(home: OpenHome) -> Iterator[bytes]:
                rows = home.merged(stream, table, at=at)
                headers[REGIONS_HEADER] = rows.schema.metadata[REGIONS_METADATA].decode()
                reader = rows.to_reader(max_chunksize=_MERGED_ROWS)
                yield from in_pieces(reader) if wants_pieces else as_stream(reader)

            media_type = PIECES_TYPE if wants_pieces else ARROW_TYPE
            return await self._answer(request, stream, made, media_type, places=(self._queries,), headers=headers)

    def _add_query(self) -> None:
        @self.router.post(
            "/{stream}/query",
            responses=_ROWS,
            dependencies=[Depends(allow(Right.READ))],
            summary="SQL over a stream's tables.",
            response_class=StreamingResponse,
            openapi_extra={"requestBody": _QUESTION},
        )
        async def query(request: Request, stream: str) -> Response:
            try:
                question = await self._question(request)
            except ClientGoneError:
                return Response(status_code=_GONE)
            wants_pieces = PIECES_TYPE in request.headers.get("accept", "")
            return await self.ask(request, stream, question, PIECES_TYPE if wants_pieces else ARROW_TYPE)

    async def ask(
        self,
        request: Request,
        stream: str,
        question: Question,
        media_type: str,
        encoded: Callable[[Generator[bytes, None, None], Mapping[str, str]], Iterator[bytes]] = lambda parts, _: parts,
    ) -> Response:
        """Return the answer to a query. An error before its first byte is raised.

        Args:
            encoded: makes the answer's bytes from those of an Arrow IPC stream, or of pieces if that is the type, and its headers,
                which are complete from the first of those on.
        """
        in_pieces = media_type == PIECES_TYPE
        asked = self._workers.ask(Asking(stream, question.sql, question.as_of, question.lake_only, in_pieces))
        return await self._answer(
            request,
            stream,
            lambda _home: encoded(asked.parts(), asked.headers),
            media_type,
            places=(self._queries,),
            give_up=asked.give_up,
            within_s=self._bounds.time_s,
            headers=asked.headers,
        )

    async def _question(self, request: Request) -> Question:
        """Return the query in a request.

        FastAPI would read the whole body, of any size, before it checks the caller.
        """
        headers = headers_said(request.scope)
        if media_type(headers) != JSON_TYPE:
            raise HttpError(
                "a query comes as JSON",
                code="media_type_unknown",
                hint=f'Send {{"sql": "…"}}, and {JSON_TYPE} in Content-Type.',
                header="Content-Type",
                value=media_type(headers),
            )
        with Held(self._budget) as held:
            body = await read_body(request.receive, headers, self._budget, held, bytes_max=SMALL_BYTES_MAX)
            try:
                return Question.model_validate_json(body)
            except ValidationError as error:
                raise RequestValidationError(error.errors(include_url=False, include_input=False)) from error

    async def _asked(self, ask: Callable[[OpenHome], _Found]) -> _Found:
        """Return a short answer."""

        def work() -> _Found:
            with self._opened() as home:
                return ask(home)

        return await asyncio.wrap_future(self._threads.submit(work))

    async def _answer(
        self,
        request: Request,
        stream: str,
        made: Callable[[OpenHome], Iterator[bytes]],
        media_type: str,
        *,
        places: tuple[_ConcurrencyLimit, ...] = (),
        give_up: Callable[[], None] = lambda: None,
        within_s: float | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Response:
        """Return an answer that is sent while it is made. An error before its first byte is raised.

        Args:
            stream: the stream that its caller has the right to read, which is checked again while the answer goes on.
            places: another limit that it counts against, next to the limit of all answers.
            give_up: ends the work of `made`, from another thread.
            within_s: how long it may take to make, send and be read; as long as the caller goes on
                reading, if None.
            headers: the answer's own headers, complete once its first part is made.
        """
        until_s = None if within_s is None else asyncio.get_running_loop().time() + within_s

        def whole() -> Iterator[bytes]:
            with self._opened() as home:
                has_parts = False
                for part in made(home):
                    has_parts = True
                    yield part
                if not has_parts:
                    yield b""

        with ExitStack() as taken:
            for some in (self._answers, *places):
                taken.enter_context(some.one())
            making = _Making(whole(), self._threads, give_up)
            unless_sent = taken.pop_all()

        is_let_go = False

        async def let_go() -> None:
            nonlocal is_let_go
            if not is_let_go:
                is_let_go = True
                with unless_sent, anyio.CancelScope(shield=True):
                    await making.close()

        try:
            first = await _unless_gone(request, making)
        except BaseException:
            await let_go()
            raise
        if first is None:
            await let_go()
            return Response(status_code=_GONE)

        async def check() -> None:
            access: Access = request.app.state.access
            await access.allowed(request.scope, Right.READ, stream)

        return _StreamedAnswer(_sent(first, making, media_type, let_go, check), media_type, headers, let_go, until_s)

    def _open(self) -> OpenHome:
        return OpenHome(self._home, latest_bytes_max=max(1, self._bounds.memory_bytes // FOLDED_TIMES))

    @contextmanager
    def _opened(self) -> Iterator[OpenHome]:
        """Yield the home, open for one thread's use."""
        with self._lock:
            home = self._idle.pop() if self._idle else self._open()
        try:
            yield home
        except MillstreamError as error:
            if error.retry.value == "reopen":
                home.close()
                home = self._open()
            raise
        finally:
            with self._lock:
                if len(self._idle) < _KEPT:
                    self._idle.append(home)


class _ConcurrencyLimit:
    """A limit of concurrent uses; further callers are told to retry. For one event loop."""

    def __init__(self, count: int, what: str, hint: str) -> None:
        self._count = count
        self._what = what
        self._hint = hint
        self._taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take one place, until the block ends; `Overloaded` if none is free."""
        if self._taken >= self._count:
            raise Overloaded(f"{self._taken} {self._what}", hint=self._hint)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


class _Making:
    """An answer's parts, made on threads, one after the other."""

    def __init__(self, parts: Iterator[bytes], threads: Pool, give_up: Callable[[], None]) -> None:
        self._parts = parts
        self._threads = threads
        self._give_up = give_up

    async def next(self) -> bytes | None:
        """Return the next part; None after the last. Cancelling it ends the thread's work."""
        work: Future[bytes | None] = self._threads.submit(next, self._parts, None)
        waiting = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                if not work.cancel():
                    self._give_up()
                await asyncio.wait([waiting])
            if not waiting.cancelled():
                waiting.exception()  # else the event loop logs it with its stack: a caller that goes away is no error
            raise

    async def close(self) -> None:
        """Close the source of the parts."""
        close = getattr(self._parts, "close", None)
        if close is not None:
            await asyncio.wrap_future(self._threads.submit(close))


class _StreamedAnswer(StreamingResponse):
    """A response whose parts are closed however it ends, and whose caller has to read them."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        media_type: str,
        headers: Mapping[str, str],
        let_go: Callable[[], Awaitable[None]],
        until_s: float | None,
    ) -> None:
        super().__init__(parts, headers=headers, media_type=media_type)
        self._parts = parts
        self._let_go = let_go
        self._until_s = until_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        async def within_patience(message: Message) -> None:
            patience_ends_s = loop.time() + _TAKES_WITHIN_S
            async with asyncio.timeout_at(min(patience_ends_s, self._until_s or patience_ends_s)):
                await send(message)

        try:
            await super().__call__(scope, receive, within_patience)
        finally:
            # The parts can't do it themselves: if the caller goes before the first is sent, they never
            # begin, and have nothing to end.
            with anyio.CancelScope(shield=True):
                try:
                    await self._parts.aclose()
                finally:
                    await self._let_go()


async def _sent(
    first: bytes,
    making: _Making,
    media_type: str,
    let_go: Callable[[], Awaitable[None]],
    check: Callable[[], Awaitable[None]],
) -> AsyncGenerator[bytes, None]:
    end, checked_s = END, time.monotonic()
    try:
        yield first
        while (part := await making.next()) is not None:
            if time.monotonic() - checked_s >= FRESH_S:  # an answer may outlast its caller's token
                await check()
                checked_s = time.monotonic()
            yield part
    except MillstreamError as error:
        if media_type != PIECES_TYPE:
            raise  # the connection breaks off: an Arrow stream allows no other message within it
        end = failed(error)
    # Before its caller sees the end and sends the next request: that request gets its place then.
    await let_go()
    if media_type == PIECES_TYPE:
        yield end


async def _unless_gone(request: Request, making: _Making) -> bytes | None:
    """Return the first part; None if its caller has gone before it was there."""
    first: bytes | None = None
    failure: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def listen() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(listen)
        try:
            first = await making.next()
        except Exception as error:  # noqa: BLE001 - raised below: a group would wrap it
            failure.append(error)
        group.cancel_scope.cancel()
    if failure:
        raise failure[0]
    return first
