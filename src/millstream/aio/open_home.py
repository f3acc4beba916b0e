"""`millstream.aio.open`: a home of this machine, for tasks. Appends need no thread per call; reads run on threads."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from millstream.aio.appends import AsyncHomeAppends
from millstream.aio.consumers import AsyncConsumers, AsyncConsumption
from millstream.aio.session import AsyncSession
from millstream.app.lake_sessions import open_lake
from millstream.app.log_readers import open_reader
from millstream.app.open_home import (
    OpenHome,
    check_stream,
    home_appender,
    home_consumers,
    known_tables,
)
from millstream.client.appends import AppendRequest
from millstream.client.call_results import CONSUMED_AT_ONCE, LATEST_ROWS_MAX, Latest
from millstream.client.consumers import Ask, with_records
from millstream.client.following import LOCAL_POLL_S, AsyncFollowing, Step
from millstream.client.write_session import session_of
from millstream.delivery.running_consumer import Waiter
from millstream.errors import HomeClosed
from millstream.export.follow_log import FollowedTables, follow_steps, position_of
from millstream.home.home import Home
from millstream.ingest.append_requests import sole_outcome
from millstream.workers import call_apart, call_in_thread

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.delivery.service import Answer
    from millstream.model.operations import Appended
    from millstream.model.positions import StreamToken
    from millstream.model.writes import SessionFacts
    from millstream.writers.home_appender import HomeAppender
    from millstream.writers.home_consumers import HomeConsumers

_QUERIES_AT_ONCE: Final = 4
"""One query already uses all cores in DuckDB."""

_Found = TypeVar("_Found")


class AsyncOpenHome(AsyncHomeAppends):
    """A `millstream.OpenHome` for any number of tasks of one event loop, with the same promises and errors."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._known = known_tables(home)
        self._reading = OpenHome(home)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="aio-reader")
        """A home is read from one thread."""
        self._followings: weakref.WeakSet[AsyncFollowing] = weakref.WeakSet()
        self._queries = ThreadPoolExecutor(_QUERIES_AT_ONCE, thread_name_prefix="aio-query")
        self._appender: HomeAppender | None = None
        self._consumers: HomeConsumers | None = None
        self._making = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"AsyncOpenHome({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Return the home's folder."""
        return self._home.path

    async def close(self) -> None:
        """Close everything that was opened. If this process writes the home's streams, others may from here on."""
        async with self._making:
            self._closed, appender, consumers = True, self._appender, self._consumers
        for following in list(self._followings):
            await following.close()
        if consumers is not None:
            await asyncio.to_thread(consumers.close)
        if appender is not None:
            await asyncio.to_thread(appender.close)
        self._reader.shutdown(wait=False)
        self._queries.shutdown(wait=False)

    async def streams(self) -> list[str]:
        """Return as `OpenHome.streams`."""
        return await self._read(self._reading.streams)

    async def token(self, stream: str, *, vector: bool = False) -> StreamToken:
        """Return as `OpenHome.token`."""
        return await self._read(lambda: self._reading.token(stream, vector=vector))

    async def read(
        self,
        stream: str,
        *,
        table: str | None = None,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Read as `OpenHome.read`."""
        taken = self._taken(lambda: self._reading.read(stream, table=table, after=after, upto=upto))
        async with aclosing(taken) as batches:
            async for batch in batches:
                yield batch

    def follow(
        self,
        stream: str,
        *,
        table: str | Sequence[str] | None = None,
        after: StreamToken | str | None = None,
    ) -> AsyncFollowing:
        """Follow as `OpenHome.follow`, with `async for`; errors are raised by the first item."""

        def begin() -> Iterator[Step]:
            tables = FollowedTables(table)
            reader = open_reader(self._home, stream)
            return follow_steps(reader, tables, position_of(reader, after))

        following = AsyncFollowing(lambda: self._taken(begin), LOCAL_POLL_S)
        self._followings.add(following)
        return following

    async def read_latest(
        self,
        stream: str,
        table: str,
        *,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
        rows_max: int = LATEST_ROWS_MAX,
    ) -> AsyncGenerator[Latest, None]:
        """Read as `OpenHome.read_latest`."""
        taken = self._taken(lambda: self._reading.read_latest(stream, table, after=after, upto=upto, rows_max=rows_max))
        async with aclosing(taken) as stretches:
            async for stretch in stretches:
                yield stretch

    async def merged(self, stream: str, table: str, *, at: datetime | str | None = None) -> pa.Table:
        """Return as `OpenHome.merged`."""
        return await self._read(lambda: self._reading.merged(stream, table, at=at))

    async def _append(self, request: AppendRequest, tables: Mapping[str, pa.Table]) -> Appended:
        batch = request.batch(tables)
        appender = self._appender if self._appender is not None and not self._closed else await self._made()
        return sole_outcome(await appender.append_batch_async(request.stream, batch, deadline_s=request.deadline_s))

    def session(self, stream: str, name: str | None = None, *, next_number: int | None = None) -> AsyncSession:
        """Return as `OpenHome.session`."""
        check_stream(self._home, stream)
        return AsyncSession(self._append, self.session_facts, stream, *session_of(name, next_number), self._known)

    async def session_facts(self, stream: str, name: str) -> SessionFacts:
        """Return as `OpenHome.session_facts`."""
        appender = self._appender if self._appender is not None and not self._closed else await self._made()
        return await asyncio.to_thread(appender.session, stream, name)

    def consumers(self, stream: str) -> AsyncConsumers:
        """Return as `OpenHome.consumers`."""
        return AsyncConsumers(partial(self._carry_ask, stream))

    def consume(
        self, stream: str, name: str, *, batch_size: int = CONSUMED_AT_ONCE, wait_s: float | None = None
    ) -> AsyncConsumption:
        """Receive as `OpenHome.consume`: `async with`, then `async for`. Each waiting task takes a thread."""
        return AsyncConsumption(partial(self._carry_ask, stream), name, batch_size, wait_s)

    async def _carry_ask(self, stream: str, ask: Ask) -> Any:
        async with self._making:
            if self._closed:
                raise HomeClosed("this home was closed")
            if self._consumers is None:
                self._consumers = await asyncio.to_thread(home_consumers, self._home)
            consumers = self._consumers
        waiter = Waiter()
        call = partial(consumers.call, stream, ask.what, ask.name, ask.body, waiter=waiter)
        called = call_in_thread("aio-consumers", call)
        try:
            return with_records(ask, (await asyncio.shield(asyncio.wrap_future(called))).body)
        except asyncio.CancelledError:
            waiter.leave()
            if ask.what == "receive":
                # Taken just then, and never seen.
                called.add_done_callback(partial(_give_back, consumers, stream, str(ask.name)))
            raise

    async def query(
        self,
        sql: str,
        *,
        stream: str | None = None,
        as_of: StreamToken | datetime | str | None = None,
        lake_only: bool = False,
    ) -> pa.Table:
        """Query as `OpenHome.query`. Cancelling it ends the query."""
        interrupts: list[Callable[[], None]] = []
        given_up = False

        def work() -> pa.Table:
            with open_lake(self._home, stream, as_of=as_of, lake_only=lake_only) as lake:
                interrupts.append(lake.interrupt)
                return None if given_up else lake.query(sql)

        running = self._on(self._queries, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            given_up = True
            for interrupt in interrupts:
                interrupt()
            running.add_done_callback(_heed)
            raise

    async def status(self) -> dict[str, Any]:
        """Return as `OpenHome.status`."""
        return await self._on(self._queries, self._reading.status)

    async def _made(self) -> HomeAppender:
        async with self._making:
            if self._closed:
                raise HomeClosed("this home was closed")
            if self._appender is None:
                # The modules for writing are imported first, which takes a while.
                self._appender = await asyncio.to_thread(home_appender, self._home)
            return self._appender

    async def _read(self, ask: Callable[[], _Found]) -> _Found:
        return await self._on(self._reader, ask)

    def _on(self, pool: ThreadPoolExecutor, call: Callable[[], _Found]) -> asyncio.Future[_Found]:
        try:
            return asyncio.get_running_loop().run_in_executor(pool, call)
        except RuntimeError:
            if self._closed:
                raise HomeClosed("this home was closed") from None
            raise

    async def _taken(self, begin: Callable[[], Iterator[_Found]]) -> AsyncGenerator[_Found, None]:
        """Yield an iterator's items, taken on the thread that reads."""
        found = await self._read(begin)
        try:
            while (one := await self._read(lambda: next(found, None))) is not None:
                yield one
        finally:
            # Queued on that thread: if a task was cancelled, the thread may still be in the iterator.
            with suppress(RuntimeError):  # the home is closed: the iterator ends with its last reference
                self._reader.submit(cast("Generator[_Found, None, None]", found).close)


def open(path: str | Path | None = None) -> AsyncOpenHome:  # noqa: A001 - as `millstream.aio.open`
    """Open as `millstream.open`, for tasks: `async with millstream.aio.open("shop") as home`."""
    home = Home.find(path, needs_source=False, named_by="path")
    home.check_format()
    return AsyncOpenHome(home)


def _give_back(consumers: HomeConsumers, stream: str, name: str, called: Future[Answer]) -> None:
    """Return the messages of a call that has no caller left."""
    if called.exception() is None:
        call_apart("aio-consumers", partial(consumers.give_back, stream, name, called.result()))


def _heed(running: asyncio.Future[Any]) -> None:
    """Retrieve the result of a query without a waiting caller, so that asyncio doesn't log its error."""
    if not running.cancelled():
        running.exception()
