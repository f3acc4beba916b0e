"""`home.follow`: an iterator of batches that waits for the next ones, for threads and for tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from millstream.backoff import Backoff
from millstream.closing import AsyncClosing, Closing
from millstream.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.model.positions import StreamToken

Step: TypeAlias = "tuple[pa.RecordBatch | None, StreamToken]"
"""A batch with the token to resume from after it. Without a batch: all up to the token was yielded, and nothing more
can be read now."""

LOCAL_POLL_S: Final = (0.0005, 0.02)
"""Shortest and longest wait before the log is looked at again."""
REMOTE_POLL_S: Final = (0.02, 0.25)
"""The same for a server."""


class Following(Closing):
    """A blocking iterator of `(batch, token)`, made by `home.follow`.

    It waits for records that aren't there yet, and ends when it or its home is closed. It is a context manager that
    closes it. After an error it goes no further (`UsageError`).

    Concurrency: iterate it from one thread; `close` it from any.
    """

    def __init__(
        self,
        steps: Generator[Step, None, None],
        token: StreamToken,
        poll_s: tuple[float, float],
        *,
        first: Step | None = None,
    ) -> None:
        self._steps = steps
        self._token = token
        self._first = first
        """A step that was taken already."""
        self._nap = Backoff(*poll_s, factor=1.5, jitter=0)
        self._closed = threading.Event()

    @property
    def token(self) -> StreamToken:
        """Return the token to resume from: everything up to it was yielded, or isn't of these tables."""
        return self._token

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[pa.RecordBatch, StreamToken]:
        while not self._closed.is_set():
            step, self._first = self._first, None
            try:
                batch, self._token = next(self._steps) if step is None else step
            except Exception as error:
                if self._closed.is_set():
                    break  # its home was closed while it read
                if isinstance(error, StopIteration):
                    raise _broken_off() from None
                raise
            if batch is not None:
                self._nap.reset()
                return batch, self._token
            self._nap.wait(self._closed)
        self.close()
        raise StopIteration

    def close(self) -> None:
        """End the iteration. A thread that waits in it gets the end at once."""
        self._closed.set()
        with suppress(ValueError):  # another thread is in it, and closes it at its next turn
            self._steps.close()


class AsyncFollowing(AsyncClosing):
    """A `millstream.Following` for a task: `async for batch, token in home.follow(…)`, and `async with`.

    A call of `anext` may be cancelled, as by `asyncio.wait_for`: the next call goes on where it was.
    """

    def __init__(self, begin: Callable[[], AsyncGenerator[Step, None]], poll_s: tuple[float, float]) -> None:
        self._steps = begin()
        self._step: asyncio.Future[Step] | None = None
        """The step under way; a call that was cancelled leaves it to the next one."""
        self._token: StreamToken | None = None
        self._nap = Backoff(*poll_s, factor=1.5, jitter=0)
        self._closed = asyncio.Event()

    @property
    def token(self) -> StreamToken | None:
        """Return as `Following.token`; None before the first item was asked for."""
        return self._token

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[pa.RecordBatch, StreamToken]:
        while not self._closed.is_set():
            step = self._step = self._step or asyncio.ensure_future(anext(self._steps))
            try:
                batch, token = await asyncio.shield(step)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if step.cancelled() and self._closed.is_set() and not (task and task.cancelling()):
                    break  # it was closed, and not this task cancelled
                raise
            except Exception as error:
                self._step = None
                if self._closed.is_set():
                    break  # its home was closed while it read
                if isinstance(error, StopAsyncIteration):
                    raise _broken_off() from None
                raise
            self._step, self._token = None, token
            if batch is not None:
                self._nap.reset()
                return batch, token
            with suppress(TimeoutError):
                async with asyncio.timeout(self._nap.next_s()):
                    await self._closed.wait()
        await self.close()
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the iteration. A task that waits in it gets the end at once."""
        self._closed.set()
        if (step := self._step) is not None:  # a task that waits for it may take it off at the same time
            step.cancel()
            await asyncio.wait([step])
            if not step.cancelled():
                step.exception()  # retrieved, so that asyncio doesn't log it
        with suppress(RuntimeError):  # another task closes it already
            await self._steps.aclose()


def _broken_off() -> UsageError:
    """Return the error of an iteration that goes on after a failure: its end would look like the log's."""
    return UsageError(
        "an error or an interruption has ended this iteration",
        hint="Follow again behind what you have handled: `home.follow(…, after=token)`.",
    )
