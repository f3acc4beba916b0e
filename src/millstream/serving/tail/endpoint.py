"""`GET /v1/streams/S/tail`: a stream's records as they come, as server-sent events.

A tail is a position, a filter and a buffer. One task for each stream that has tails looks at the log for all of them,
and has a thread make the events of those for which there is something: an idle tail costs no thread, no reader and no
look of its own. A client that reads slower than the log grows gets its events later; one that reads nothing while its
buffer is full is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.types import Receive, Scope, Send

from millstream.app.log_readers import check_age_of_copy, open_reader
from millstream.backoff import Backoff
from millstream.errors import LogTruncated, MillstreamError
from millstream.export.follow_log import next_stretch, position_of
from millstream.model.access import Right
from millstream.model.positions import Seq
from millstream.serving.access import Access, allow
from millstream.serving.problem_documents import encoded, plain_problem, problem_of
from millstream.serving.requests import ENDING, ClientStalledError
from millstream.serving.tail.events import TailFilter, tail_events
from millstream.workers import Pool

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.model.schema import TableSchema
    from millstream.wal.reader import StreamReader

logger = structlog.get_logger("millstream.serve")

EVENTS_TYPE: Final = "text/event-stream"
BUFFER_BYTES_MAX: Final = 1 << 20
"""Bytes of events that wait for a client."""
ALL_BYTES_MAX: Final = 256 << 20
"""Bytes of events that wait for all clients, in addition to a part of `_PART_BYTES` for each: with many clients each gets fewer."""
STALLED_S: Final = 2.0
"""How long a client with a full buffer may read nothing."""
COMMENT_EVERY_S: Final = 15.0
_COMMENT: Final = b": millstream\n\n"
_PART_BYTES: Final = 64 << 10
"""Bytes that are made, or sent, at once for one tail."""
_POLL_S: Final = (0.002, 0.02)
_THREADS: Final = 2
_ALL: Final = 1 << 62

_EVENTS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "An event a record: `data` is the object that `wal cat` prints, `id` the token to resume from.",
        "content": {EVENTS_TYPE: {"schema": {"type": "string"}}},
    }
}
_Text = Annotated[str | None, Query(max_length=4096)]


class Tail:
    """One client's tail. The loop has its buffer, and the thread that makes its events everything else."""

    def __init__(self, wanted: TailFilter, position: Seq) -> None:
        self.wanted: Final = wanted
        self.position = position
        """Events were made of everything up to it; while `events` is set, those up to `goal` are being made."""
        self.events: Iterator[bytes] | None = None
        """Makes the events up to `goal`."""
        self.goal = position
        self.buffer: deque[bytes] = deque()
        self.buffered_bytes = 0
        self.changed: Final = asyncio.Event()
        self.is_ended = False
        self.problem: bytes | None = None
        """The error that ended it, as a document."""

    def add(self, events: Sequence[bytes]) -> None:
        """Add events to the buffer."""
        self.buffer.extend(events)
        self.buffered_bytes += sum(map(len, events))
        self.changed.set()

    def take(self) -> bytes:
        """Take some events out of the buffer."""
        taken = [self.buffer.popleft()]
        size = len(taken[0])
        while self.buffer and size + len(self.buffer[0]) <= _PART_BYTES:
            taken.append(self.buffer.popleft())
            size += len(taken[-1])
        self.buffered_bytes -= size
        return b"".join(taken)

    def end(self, problem: bytes | None = None) -> None:
        """End it, once its buffer is sent."""
        self.is_ended, self.problem = True, problem
        self.changed.set()

    def make(self, reader: StreamReader, stream: str, end: Seq) -> list[bytes]:
        """Return the next events, up to a number of bytes. Blocks."""
        if self.events is None:
            if self.position == end:
                return []
            if self.position > end:
                raise LogTruncated(
                    f"the log was truncated to number {end}, and {self.position} was reached", persisted_upto=int(end)
                )
            self.goal = end
            self.events = tail_events(reader, stream, self.wanted, self.position, end)
        made: list[bytes] = []
        size = 0
        for event in self.events:
            if not event:
                break  # others have their turn
            made.append(event)
            size += len(event)
            if size >= _PART_BYTES:
                break
        else:
            self.position, self.events = self.goal, None
        return made


class _StreamTails:
    """The tails of one stream."""

    def __init__(self, home: Home, stream: str, threads: Pool, room_bytes: Callable[[], int]) -> None:
        self._home = home
        self._room_bytes = room_bytes
        self.stream: Final = stream
        self._threads = threads
        self._lock = threading.Lock()
        """Held while a thread uses the reader."""
        self._reader: StreamReader | None = None
        self._seen: Seq | None = None
        """Readable end of the log at the last look."""
        self.tails: set[Tail] = set()

    def open(self, wanted: TailFilter, after: str | None) -> Tail:
        """Return a new tail; of a stream without a log, it waits for one. Blocks."""
        with self._lock:
            if after is None and not self._has_log():
                return Tail(wanted, Seq(0))
            check_age_of_copy(self._home, self.stream)
            reader = self._opened()
            wanted.check(lambda: reader.schemas().values())
            return Tail(wanted, position_of(reader, after))

    async def run(self) -> None:
        """Make events for the tails, until there are none."""
        nap = Backoff(*_POLL_S, factor=1.5, jitter=0)
        loop = asyncio.get_running_loop()
        while self.tails:
            tails, room_bytes = list(self.tails), self._room_bytes()
            hungry = [tail for tail in tails if not tail.is_ended and tail.buffered_bytes < room_bytes]
            try:
                has_more = await loop.run_in_executor(self._threads, self._look, loop, tails, hungry)
            except MillstreamError as error:
                self._end_all(encoded(problem_of(error)))
            except Exception:
                logger.exception("tails can't be read", stream=self.stream)
                self._end_all(_BUG)
            else:
                if has_more:
                    nap.reset()
                    continue
            await asyncio.sleep(nap.next_s())
        self._seen = None  # what is written until the next tail comes needs no look

    def _end_all(self, problem: bytes) -> None:
        self._reader = self._seen = None
        for tail in self.tails:
            tail.end(problem)

    def _look(self, loop: asyncio.AbstractEventLoop, tails: Sequence[Tail], hungry: Sequence[Tail]) -> bool:
        """Make the next events of the tails that have room; return whether any were made. Blocks."""
        with self._lock:
            if not self._has_log():
                return False
            reader = self._opened()
            end = reader.persisted_upto()
            self._pass_over(reader, tails, end)
            has_more = False
            for tail in hungry:
                try:
                    made = tail.make(reader, self.stream, end)
                except MillstreamError as error:
                    loop.call_soon_threadsafe(tail.end, encoded(problem_of(error)))
                except Exception:
                    logger.exception("a tail can't be read", stream=self.stream)
                    loop.call_soon_threadsafe(tail.end, _BUG)
                else:
                    has_more = has_more or bool(made) or tail.events is not None
                    if made:
                        loop.call_soon_threadsafe(tail.add, made)
            return has_more

    def _pass_over(self, reader: StreamReader, tails: Sequence[Tail], end: Seq) -> None:
        """Move the tails that wait for other tables than those with new records."""
        seen, self._seen = self._seen, end
        if seen is None or seen >= end:
            return
        try:
            schemas: list[TableSchema] = list(
                next_stretch(reader, seen, end, rows_max=_ALL, bytes_max=_ALL).schemas.values()
            )
        except MillstreamError:
            return  # each tail reports it
        for tail in tails:
            if tail.events is None and tail.position == seen and not any(map(tail.wanted.tables.has, schemas)):
                tail.position = end

    def _has_log(self) -> bool:
        return self._reader is not None or self.stream in self._home.streams_on_disk()

    def _opened(self) -> StreamReader:
        if self._reader is None:
            self._reader = open_reader(self._home, self.stream, of_any_age=True)
        return self._reader


_BUG: Final = encoded(plain_problem(500, "this is a bug of the server's"))


class Tails:
    """The tails of a home's server: `router` has their endpoint. For one event loop."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._threads = Pool(_THREADS, thread_name_prefix="tails")
        self._streams: dict[str, _StreamTails] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self.router: Final = APIRouter(prefix="/v1/streams", tags=["read"])
        self._add()

    def close(self) -> None:
        """Close the threads."""
        self._threads.shutdown(wait=False)

    def _add(self) -> None:
        @self.router.get(
            "/{stream}/tail",
            responses=_EVENTS,
            dependencies=[Depends(allow(Right.READ))],
            summary="Records as they come, as server-sent events.",
            response_class=Response,
        )
        async def tail(
            request: Request,
            stream: str,
            table: Annotated[list[str] | None, Query(max_length=1000)] = None,
            where: str | None = None,
            after: _Text = None,
            last_event_id: Annotated[str | None, Header(max_length=4096)] = None,
        ) -> Response:
            loop = asyncio.get_running_loop()
            start = last_event_id or after
            of_stream, made = await loop.run_in_executor(self._threads, self._open, stream, table, where, start)
            access: Access = request.app.state.access

            async def check() -> None:
                await access.allowed(request.scope, Right.READ, stream)

            return _Answer(self, of_stream, made, check)

    def _open(
        self, stream: str, table: list[str] | None, where: str | None, after: str | None
    ) -> tuple[_StreamTails, Tail]:
        name = stream if stream in self._home.config.streams else self._home.pick_stream(stream)
        wanted = TailFilter(table, where)
        of_stream = self._streams.setdefault(name, _StreamTails(self._home, name, self._threads, self.room_bytes))
        return of_stream, of_stream.open(wanted, after)

    def room_bytes(self) -> int:
        """Return the bytes of events that may wait for each client."""
        count = sum(len(of_stream.tails) for of_stream in list(self._streams.values()))
        return min(BUFFER_BYTES_MAX, ALL_BYTES_MAX // max(1, count))

    @contextlib.contextmanager
    def attached(self, of_stream: _StreamTails, tail: Tail) -> Iterator[None]:
        """Make the tail's events until the block ends."""
        of_stream.tails.add(tail)
        name = of_stream.stream
        running = self._running.get(name)
        if running is None or running.done():
            self._running[name] = asyncio.create_task(of_stream.run())
        try:
            yield
        finally:
            of_stream.tails.discard(tail)


class _Answer(Response):
    """Sends a tail's events until its client goes, the server ends, or the tail does."""

    def __init__(self, tails: Tails, of_stream: _StreamTails, tail: Tail, check: Callable[[], Awaitable[None]]) -> None:
        super().__init__(media_type=EVENTS_TYPE, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._tails = tails
        self._of_stream = of_stream
        self._tail = tail
        self._check = check
        """Raises if the caller may no longer read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._tail.end()

        async def end_with_server() -> None:
            if (ending := scope.get(ENDING)) is not None:
                await ending.wait()
                self._tail.end()

        headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        aside = [asyncio.create_task(listen()), asyncio.create_task(end_with_server())]
        try:
            with self._tails.attached(self._of_stream, self._tail):
                await self._send_all(send)
        finally:
            for task in aside:
                task.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _send_all(self, send: Send) -> None:
        tail = self._tail
        loop = asyncio.get_running_loop()
        comment_at_s = loop.time()
        while True:
            if loop.time() >= comment_at_s:
                try:
                    await self._check()
                except MillstreamError as error:
                    tail.end(encoded(problem_of(error)))
                    break
                await self._send(send, _COMMENT)
                comment_at_s = loop.time() + COMMENT_EVERY_S
            elif tail.buffer:
                await self._send(send, tail.take())
            elif tail.is_ended:
                break
            else:
                tail.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(comment_at_s):
                        await tail.changed.wait()
        if tail.problem is not None:
            await self._send(send, b"event: problem\ndata: " + tail.problem + b"\n\n")

    async def _send(self, send: Send, data: bytes) -> None:
        """Send some bytes; `ClientStalledError` if the client reads nothing while its buffer is full."""
        sending = asyncio.ensure_future(send({"type": "http.response.body", "body": data, "more_body": True}))
        try:
            while not (await asyncio.wait({sending}, timeout=STALLED_S))[0]:
                if self._tail.buffered_bytes >= self._tails.room_bytes():
                    raise ClientStalledError
        finally:
            sending.cancel()
        await sending
