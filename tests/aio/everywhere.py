"""The four kinds of home behind one test interface: local or behind an address, each blocking and asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import millstream
import millstream.aio

WAYS = ("open", "connect", "aio.open", "aio.connect")


class Blocking:
    """Blocking wrapper of an async home: its coroutines and iterators run on an event loop in a thread."""

    def __init__(self, home: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._home = home
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._home, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            async def work() -> Any:
                made = found(*args, **named)
                if inspect.isasyncgen(made):
                    return [one async for one in made]
                if inspect.isawaitable(made):
                    return await made
                return Blocking(made, self._loop)

            return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

        return call


@contextlib.contextmanager
def a_home(way: str, where: Path | str, **named: Any) -> Iterator[Any]:
    """Open a home by one of `WAYS`."""
    kind, _, call = way.rpartition(".")
    if not kind:
        with getattr(millstream, call)(where, **named) as home:
            yield home
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:

        async def opened() -> Any:
            return await getattr(millstream.aio, call)(where, **named).__aenter__()

        home = asyncio.run_coroutine_threadsafe(opened(), loop).result()
        yield Blocking(home, loop)
        asyncio.run_coroutine_threadsafe(home.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
