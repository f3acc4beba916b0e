"""Consumers for tasks: the twins of `millstream.client.consumers`, as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from millstream.client.consumers import Ask, Flow, definition_of, ids_of, milliseconds, page_of, rows_of, status_of
from millstream.errors import MillstreamError
from millstream.model.steps import run_async

AsyncCarry = Callable[[Ask], Awaitable[Any]]
"""Carries a request out, and returns the answer."""


@dataclass(slots=True)
class AsyncMessage:
    """A `Message` whose calls are coroutines."""

    id: str
    deliveries: int
    group: str | None
    record: dict[str, Any]
    ack_id: str = field(repr=False)
    is_settled: bool = False
    _carry: AsyncCarry | None = field(default=None, repr=False)
    _name: str = field(default="", repr=False)

    async def ack(self) -> str:
        """Settle as `Message.ack`."""
        status = await self._settle(Ask("ack", self._name, {"ack_ids": [self.ack_id]}))
        self.is_settled = True
        return status

    async def nack(self, delay_s: float = 0.0) -> str:
        """Return as `Message.nack`."""
        body = {"ack_ids": [self.ack_id], "delay_ms": milliseconds("delay_s", delay_s)}
        status = await self._settle(Ask("nack", self._name, body))
        self.is_settled = True
        return status

    async def extend(self, ack_wait_s: float | None = None) -> str:
        """Extend as `Message.extend`."""
        more = {} if ack_wait_s is None else {"ack_wait_ms": milliseconds("ack_wait_s", ack_wait_s)}
        return await self._settle(Ask("extend", self._name, {"ack_ids": [self.ack_id], **more}))

    async def _settle(self, ask: Ask) -> str:
        assert self._carry is not None
        return status_of(await self._carry(ask))


class AsyncConsumption:
    """A `Consumption` for one task: `async with … as messages`, `async for message in messages`."""

    def __init__(self, flow: Flow, name: str, carry: AsyncCarry) -> None:
        self._flow = flow
        self._name = name
        self._carry = carry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        # As `Consumption.__exit__`: the block's own exception isn't replaced.
        with suppress(*(() if kind is None else (MillstreamError,))):
            await run_async(self._flow.leave(has_failed=kind is not None), self._do)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncMessage:
        """Return the next message as `Consumption`."""
        found: AsyncMessage | None = await run_async(self._flow.next(self._made), self._do)
        if found is None:
            raise StopAsyncIteration
        return found

    def _made(self, message: dict[str, Any]) -> AsyncMessage:
        return AsyncMessage(**message, _carry=self._carry, _name=self._name)

    async def _do(self, ask: Ask) -> Any:
        if ask.what == "sleep":
            await asyncio.sleep(ask.body)
            return None
        return await self._carry(ask)


class AsyncConsumers:
    """A stream's consumers, as `Consumers`."""

    def __init__(self, carry: AsyncCarry) -> None:
        self._carry = carry

    async def create(self, name: str, **fields: Any) -> dict[str, Any]:
        """Create as `Consumers.create`."""
        return await self._asked(Ask("create", None, definition_of(name, fields)))

    async def list(self) -> list[dict[str, Any]]:
        """Return as `Consumers.list`."""
        found: list[dict[str, Any]] = (await self._carry(Ask("list")))["consumers"]
        return found

    async def get(self, name: str) -> dict[str, Any]:
        """Return as `Consumers.get`."""
        return await self._asked(Ask("show", name))

    async def pause(self, name: str) -> dict[str, Any]:
        """Pause as `Consumers.pause`."""
        return await self._asked(Ask("pause", name))

    async def resume(self, name: str) -> dict[str, Any]:
        """Resume as `Consumers.resume`."""
        return await self._asked(Ask("resume", name))

    async def rewind(self, name: str, to: str) -> dict[str, Any]:
        """Rewind as `Consumers.rewind`."""
        return await self._asked(Ask("rewind", name, {"to": str(to)}))

    async def backfill(self, name: str, *, tables: Iterable[str] | None = None, where: str | None = None) -> int:
        """Deliver rows as of the cursor as `Consumers.backfill`."""
        return int((await self._asked(Ask("backfill", name, rows_of(tables, where))))["backfill"])

    async def dead(self, name: str, *, after: str | None = None, limit: int | None = None) -> dict[str, Any]:
        """Return as `Consumers.dead`."""
        return await self._asked(Ask("dead", name, page_of(after, limit)))

    async def retry(self, name: str, ids: Iterable[str] | str = "all") -> dict[str, Any]:
        """Retry as `Consumers.retry`."""
        return await self._asked(Ask("retry", name, ids_of(ids)))

    async def drop(self, name: str, ids: Iterable[str] | str = "all") -> dict[str, Any]:
        """Drop as `Consumers.drop`."""
        return await self._asked(Ask("drop", name, ids_of(ids)))

    async def delete(self, name: str) -> None:
        """Delete as `Consumers.delete`."""
        await self._carry(Ask("delete", name))

    async def _asked(self, ask: Ask) -> dict[str, Any]:
        found: dict[str, Any] = await self._carry(ask)
        return found
