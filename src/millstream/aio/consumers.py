"""Consumers for tasks: the calls of `millstream.client.consumers`, as coroutines."""

from __future__ import annotations

import asyncio
from typing import Self

from millstream.client.consumers import Consumers, ConsumersSteps, ConsumptionSteps, Message, MessageFacts
from millstream.model.steps import awaiting, run_async


class AsyncMessage(MessageFacts):
    """A `Message` whose calls are coroutines."""

    __slots__ = ()

    ack = awaiting(Message.ack)
    nack = awaiting(Message.nack)
    extend = awaiting(Message.extend)


class AsyncConsumption(ConsumptionSteps):
    """A `Consumption` for one task: `async with … as messages`, `async for message in messages`."""

    _sleep = staticmethod(asyncio.sleep)
    _message = AsyncMessage

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await run_async(self._leave(has_failed=kind is not None))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncMessage:
        """Return the next message as `Consumption`."""
        message: AsyncMessage | None = await run_async(self._next())
        if message is None:
            raise StopAsyncIteration
        return message


class AsyncConsumers(ConsumersSteps):
    """A stream's consumers, as `Consumers`."""

    create = awaiting(Consumers.create)
    list = awaiting(Consumers.list)
    get = awaiting(Consumers.get)
    pause = awaiting(Consumers.pause)
    resume = awaiting(Consumers.resume)
    rewind = awaiting(Consumers.rewind)
    backfill = awaiting(Consumers.backfill)
    dead = awaiting(Consumers.dead)
    retry = awaiting(Consumers.retry)
    drop = awaiting(Consumers.drop)
    delete = awaiting(Consumers.delete)
