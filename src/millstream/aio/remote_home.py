"""`millstream.aio.connect`: a home behind an address, for tasks."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pyarrow as pa

from millstream.aio.appends import AsyncHomeAppends
from millstream.aio.consumers import AsyncConsumers, AsyncConsumption
from millstream.aio.session import AsyncSession
from millstream.client.appends import AppendRequest
from millstream.client.batch_stream import Pieces, change_of, latest_of
from millstream.client.consumers import Ask, Flow, answer_of_call, call_of
from millstream.client.following import REMOTE_POLL_S, AsyncFollowing, Step
from millstream.client.home_calls import CONSUMED_AT_ONCE, LATEST_ROWS_MAX, Latest
from millstream.client.http_requests import (
    Call,
    append_call,
    between,
    changes_call,
    check_name,
    check_url,
    merged_call,
    of_stream,
    only_stream,
    query_call,
    session_call,
)
from millstream.client.http_retries import HttpAnswer, Lost, Nap, appended, asked, json_of, whole_table
from millstream.client.remote_home import (
    TIMEOUT_S,
    answer_of,
    client_settings,
    cut_off,
    logger,
    lost_of,
    request_of,
    tls_of,
)
from millstream.client.write_session import session_of
from millstream.model.operations import Appended, AppendedTables
from millstream.model.positions import StreamToken
from millstream.model.steps import run_async
from millstream.model.writes import SessionFacts

if TYPE_CHECKING:
    import ssl


class AsyncRemoteHome(AsyncHomeAppends):
    """A `millstream.RemoteHome` for any number of tasks of one event loop, with the same promises and errors."""

    def __init__(self, url: str, *, token: str | None, tls: ssl.SSLContext | bool, timeout_s: float) -> None:
        self._url = check_url(url)
        self._timeout_s = timeout_s
        self._followings: weakref.WeakSet[AsyncFollowing] = weakref.WeakSet()
        self._http = httpx.AsyncClient(**client_settings(self._url, token, tls, timeout_s))

    def __repr__(self) -> str:
        return f"AsyncRemoteHome({self._url!r})"

    @property
    def url(self) -> str:
        """Return its address."""
        return self._url

    async def close(self) -> None:
        """Close the connections."""
        for following in list(self._followings):
            await following.close()
        await self._http.aclose()

    async def streams(self) -> list[str]:
        """Return as `OpenHome.streams`."""
        return [str(name) for name in (await self._json(Call("GET", "/v1/streams")))["streams"]]

    async def token(self, stream: str, *, vector: bool = False) -> StreamToken:
        """Return as `OpenHome.token`."""
        params = {"vector": "true"} if vector else {}
        return StreamToken.parse((await self._json(Call("GET", of_stream(stream, "token"), params)))["token"])

    async def read(
        self,
        stream: str,
        *,
        table: str | None = None,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Read as `OpenHome.read`."""
        params = between(after, upto) | ({} if table is None else {"table": table})
        async with aclosing(self._pieces(Call("GET", of_stream(stream, "records"), params, in_pieces=True))) as pieces:
            async for piece in pieces:
                for batch in piece.to_batches():
                    yield batch

    def follow(
        self,
        stream: str,
        *,
        table: str | Sequence[str] | None = None,
        after: StreamToken | str | None = None,
    ) -> AsyncFollowing:
        """Follow as `OpenHome.follow`, with `async for`; errors are raised by the first item."""
        following = AsyncFollowing(lambda: self._changes(stream, table, after), REMOTE_POLL_S)
        self._followings.add(following)
        return following

    async def _changes(
        self, stream: str, table: str | Sequence[str] | None, after: StreamToken | str | None
    ) -> AsyncGenerator[Step, None]:
        end = await self.token(stream)
        at = end if after is None else StreamToken.parse(str(after))
        is_first = True
        while True:
            if is_first or not end <= at:
                async with aclosing(self._pieces(changes_call(stream, table, at, end))) as pieces:
                    async for piece in pieces:
                        batches, token = change_of(piece)
                        for batch in batches:
                            yield batch, token
                at, is_first = end, False
            yield None, at
            end = await self.token(stream)

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
        params = between(after, upto) | {"table": table, "rows_max": str(rows_max)}
        async with aclosing(self._pieces(Call("GET", of_stream(stream, "latest"), params, in_pieces=True))) as pieces:
            async for piece in pieces:
                yield Latest(*latest_of(piece))

    async def merged(self, stream: str, table: str, *, at: datetime | str | None = None) -> pa.Table:
        """Return as `OpenHome.merged`."""
        return whole_table([piece async for piece in self._pieces(merged_call(stream, table, at))], self._url)

    async def _append(self, request: AppendRequest, tables: Mapping[str, pa.Table]) -> Appended | AppendedTables:
        steps = appended(append_call(request, tables), request, url=self._url, now=time.monotonic)
        return await run_async(steps, self._do)

    def session(self, stream: str, name: str | None = None, *, next_number: int | None = None) -> AsyncSession:
        """Return as `OpenHome.session`."""
        check_name(stream)
        return AsyncSession(self._append, self.session_facts, stream, *session_of(name, next_number))

    async def session_facts(self, stream: str, name: str) -> SessionFacts:
        """Return as `OpenHome.session_facts`."""
        return SessionFacts.from_dict(await self._json(session_call(stream, name)))

    def consumers(self, stream: str) -> AsyncConsumers:
        """Return as `OpenHome.consumers`."""
        check_name(stream)
        return AsyncConsumers(partial(self._carry_ask, stream))

    def consume(
        self, stream: str, name: str, *, batch_size: int = CONSUMED_AT_ONCE, wait_s: float | None = None
    ) -> AsyncConsumption:
        """Receive as `OpenHome.consume`: `async with`, then `async for`."""
        check_name(stream)
        return AsyncConsumption(Flow(name, batch_size, wait_s), name, partial(self._carry_ask, stream))

    async def _carry_ask(self, stream: str, ask: Ask) -> Any:
        return answer_of_call(await self._asked(call_of(stream, ask)), self._url)

    async def query(
        self,
        sql: str,
        *,
        stream: str | None = None,
        as_of: StreamToken | datetime | str | None = None,
        lake_only: bool = False,
    ) -> pa.Table:
        """Query as `OpenHome.query`. Cancelling it ends the query."""
        named = only_stream(await self.streams()) if stream is None else stream
        return whole_table(
            [piece async for piece in self._pieces(query_call(sql, named, as_of, lake_only=lake_only))], self._url
        )

    async def status(self) -> dict[str, Any]:
        """Return as `OpenHome.status`."""
        return await self._json(Call("GET", "/status"))

    async def _json(self, call: Call) -> dict[str, Any]:
        return json_of(await self._asked(call), self._url)

    async def _asked(self, call: Call) -> HttpAnswer:
        return await run_async(asked(call, url=self._url, patience_s=self._timeout_s, now=time.monotonic), self._do)

    async def _pieces(self, call: Call) -> AsyncGenerator[pa.Table, None]:
        response: httpx.Response = (await self._asked(call)).open
        pieces = Pieces()
        try:
            async for data in response.aiter_bytes():
                for piece in pieces.feed(data):
                    yield piece
        except httpx.RequestError as error:
            raise cut_off(self._url, str(error)) from error
        finally:
            await response.aclose()
        if not pieces.ended:
            raise cut_off(self._url, "the connection was closed")

    async def _do(self, step: Call | Nap) -> HttpAnswer | Lost | None:
        if isinstance(step, Nap):
            if step.warning:
                logger.warning(step.warning)
            await asyncio.sleep(step.seconds)
            return None
        return await self._exchanged(step)

    async def _exchanged(self, call: Call) -> HttpAnswer | Lost:
        request = request_of(self._http, call, self._timeout_s)
        try:
            response = await self._http.send(request, stream=True)
            if call.in_pieces and response.status_code == 200:
                return answer_of(response, b"", response)
            try:
                return answer_of(response, await response.aread(), None)
            finally:
                await response.aclose()
        except httpx.RequestError as error:
            return await asyncio.to_thread(lost_of, error, self._url)


def connect(
    url: str,
    *,
    token: str | None = None,
    verify: bool | str = True,
    cert: str | tuple[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> AsyncRemoteHome:
    """Connect as `millstream.connect`, for tasks: `async with millstream.aio.connect("http://…") as home`."""
    return AsyncRemoteHome(url, token=token, tls=tls_of(verify, cert), timeout_s=timeout_s)
