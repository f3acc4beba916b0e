"""Async twins of what `millstream` gives: the same calls, as coroutines, with iterators that are taken by `async for`.

    async with millstream.aio.open("shop") as home:
        ack = await home.append("shop", "clicks", rows)
        async for batch in home.read("shop", table="clicks", upto=ack.token): ...

`connect` gives the same for a home behind an address. Names are looked up when they are first used, so that a client needs its own extra alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.aio.open_home import AsyncOpenHome as AsyncOpenHome
    from millstream.aio.open_home import open as open  # noqa: A004 - `millstream.aio.open` is the name of the thing
    from millstream.aio.remote_home import AsyncRemoteHome as AsyncRemoteHome
    from millstream.aio.remote_home import connect as connect
    from millstream.aio.session import AsyncSession as AsyncSession
    from millstream.client.following import AsyncFollowing as AsyncFollowing

_PUBLIC = {
    "AsyncFollowing": "millstream.client.following",
    "AsyncOpenHome": "millstream.aio.open_home",
    "AsyncRemoteHome": "millstream.aio.remote_home",
    "AsyncSession": "millstream.aio.session",
    "connect": "millstream.aio.remote_home",
    "open": "millstream.aio.open_home",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'millstream.aio' has no attribute {name!r}")
    if _PUBLIC[name] == "millstream.aio.remote_home":
        importlib.import_module("millstream.client.remote_home")  # names the package to install if httpx is missing
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
