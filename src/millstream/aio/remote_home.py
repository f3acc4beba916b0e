"""`millstream.aio.connect`: a home behind an address, for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import httpx
import pyarrow as pa

from millstream.aio.appends import AsyncHomeAppends
from millstream.aio.consumers import AsyncConsumers, AsyncConsumption
from millstream.aio.session import AsyncSession
from millstream.client.appends import AppendRequest
from millstream.client.batch_stream import Pieces, change_of, latest_of
from millstream.client.call_results import CONSUMED_AT_ONCE, LATEST_ROWS_MAX, Latest
from millstream.client.consumers import Ask
from millstream.client.following import REMOTE_POLL_S, AsyncFollowing, Step
from millstream.client.http_requests import Call, changes_call, check_name, latest_call, records_call
from millstream.client.http_retries import Exchange, HttpAnswer, Lost, Nap, whole_table
from millstream.client.remote_home import (
    TIMEOUT_S,
    RemoteHome,
    RemoteSteps,
    answer_of,
    cut_off,
    logger,
    lost_of,
    request_of,
    tls_of,
)
from millstream.client.write_session import session_of
from millstream.model.positions import StreamToken
from millstream.model.steps import awaiting, run_async

_Result = TypeVar("_Result")


class AsyncRemoteHome(RemoteSteps, AsyncHomeAppends):
    """A `millstream.RemoteHome` for any number of tasks of one event loop, with the same promises and errors."""

    _client = httpx.AsyncClient
    streams = awaiting(RemoteHome.streams)
    token = awaiting(RemoteHome.token)
    merged = awaiting(RemoteHome.merged)
    query = awaiting(RemoteHome.query)
    status = awaiting(RemoteHome.status)
    session_facts = awaiting(RemoteHome.session_facts)

    async def close(self) -> None:
        """Close the connections."""
        for following in list(self._followings):
            await following.close()
        await self._http.aclose()

    async def read(
        self,
        stream: str,
        *,
        table: str | None = None,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Read as `OpenHome.read`."""
        async with aclosing(self._pieces(records_call(stream, table, after, upto))) as pieces:
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
        async with aclosing(self._pieces(latest_call(stream, table, after, upto, rows_max))) as pieces:
            async for piece in pieces:
                yield Latest(*latest_of(piece))

    async def _append(self, request: AppendRequest, tables: Mapping[str, pa.Table]) -> Any:
        return await run_async(self._sent(request, tables))

    def session(self, stream: str, name: str | None = None, *, next_number: int | None = None) -> AsyncSession:
        """Return as `OpenHome.session`."""
        check_name(stream)
        return AsyncSession(self._append, self.session_facts, stream, *session_of(name, next_number))

    def consumers(self, stream: str) -> AsyncConsumers:
        """Return as `OpenHome.consumers`."""
        check_name(stream)
        return AsyncConsumers(partial(self._carry_ask, stream))

    def consume(
        self, stream: str, name: str, *, batch_size: int = CONSUMED_AT_ONCE, wait_s: float | None = None
    ) -> AsyncConsumption:
        """Receive as `OpenHome.consume`: `async with`, then `async for`."""
        check_name(stream)
        return AsyncConsumption(partial(self._carry_ask, stream), name, batch_size, wait_s)

    async def _carry_ask(self, stream: str, ask: Ask) -> Any:
        return await run_async(self._of_consumers(stream, ask))

    async def _pieces(self, call: Call) -> AsyncGenerator[pa.Table, None]:
        response: httpx.Response = (await run_async(self._asked(call))).open
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

    async def _whole(self, call: Call) -> pa.Table:
        return whole_table([piece async for piece in self._pieces(call)], self._url)

    async def _run(self, steps: Exchange[_Result]) -> _Result:
        return await run_async(steps, self._do)

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
        except RuntimeError:
            self._check_open()
            raise


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
