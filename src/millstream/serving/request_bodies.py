"""Bodies of requests as they arrive: each bounded in bytes, and all of them together (`MemoryBudget`); decompressed if necessary.

A body is processed only once it is whole: a client that vanishes before that has sent nothing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, Self

from millstream.errors import HttpError, UsageError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's `receive`."""
SMALL_BYTES_MAX: Final = 2 << 20
"""Limit of a body that is read as JSON on the event loop: its values may take thirty times as much memory. The largest
list of ack ids has a third of it."""
_INFLATED_BYTES: Final = 1 << 20
"""Decompressed bytes at a time, between which other tasks run."""
_DEFLATED_BYTES: Final = 64 << 10
"""Compressed bytes handed over at a time."""
_MEMBERS_MAX: Final = 1000
"""Limit of gzip members per body: each costs as much time as some kilobytes, however short it is."""
_GZIP: Final = zlib.MAX_WBITS | 16


class ClientGoneError(Exception):
    """The client went away before its request was whole: no answer is possible."""


def alone(_own: int) -> int:
    """Return what other server processes hold of a total if there are none."""
    return 0


class MemoryBudget:
    """The bytes that requests hold, all together, and their limit.

    Args:
        share: publishes the bytes that this process's requests hold, and returns those of other processes.
    """

    def __init__(self, bytes_max: int, body_bytes_max: int, share: Callable[[int], int] = alone) -> None:
        self.bytes_max: Final = bytes_max
        self.body_bytes_max: Final = body_bytes_max
        self.held_bytes = 0
        """Bytes held by this process now."""
        self._share = share

    def take(self, size_bytes: int) -> int | None:
        """Hold that many more; return how many bytes all requests hold if there is no room for them."""
        self.held_bytes += size_bytes
        all_bytes = self.held_bytes + self._share(self.held_bytes)
        if all_bytes <= self.bytes_max:
            return None
        self.give_back(size_bytes)
        return all_bytes - size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Hold that many less."""
        self.held_bytes -= size_bytes
        self._share(self.held_bytes)


class Held:
    """The bytes that one request holds, until the block ends."""

    __slots__ = ("_budget", "size_bytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.size_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """Take that many more; `server_busy` if there is no room for them."""
        budget = self._budget
        held_bytes = budget.take(size_bytes)
        if held_bytes is not None:
            raise HttpError(
                f"requests in flight hold {held_bytes} of {budget.bytes_max} bytes, and this one would hold"
                f" {self.size_bytes + size_bytes}",
                code="server_busy",
                held_bytes=held_bytes,
                size_max=budget.bytes_max,
            )
        self.size_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Give that many back."""
        self._budget.give_back(size_bytes)
        self.size_bytes -= size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink(self.size_bytes)


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], budget: MemoryBudget, held: Held, *, bytes_max: int | None = None
) -> bytes:
    """Return a request's body, whole and decompressed.

    Args:
        held: counts the bytes.
        bytes_max: a limit of this body, next to the one that all bodies have.

    Raises:
        HttpError (`body_too_large`): its size, actual or declared, exceeds the limit.
        HttpError (`server_busy`): there is no room next to other requests.
        HttpError (`media_type_unknown`): it has another encoding than gzip.
        HttpError (`invalid_body`): it isn't gzip.
        ClientGoneError: it never arrived whole.
    """
    encoding = headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in {b"", b"identity", b"gzip"}:
        name = encoding.decode("latin-1")
        raise HttpError(
            f"bodies in the encoding {name} aren't taken",
            code="media_type_unknown",
            hint="Send it with gzip, or as it is.",
            header="Content-Encoding",
            value=name,
        )
    limit = budget.body_bytes_max if bytes_max is None else min(bytes_max, budget.body_bytes_max)
    announced = headers.get(b"content-length")
    if announced is not None:
        if not announced.isdigit():
            raise UsageError("Content-Length isn't a number")
        if int(announced) > limit:
            raise _too_large(budget, limit)
        held.grow(int(announced))  # a body without room isn't read
        held.shrink(int(announced))
    body = await _received(receive, budget, held, limit)
    return await _inflated(body, budget, held, limit) if encoding == b"gzip" else body


async def _received(receive: Receive, budget: MemoryBudget, held: Held, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(budget, limit)
        held.grow(len(piece))
        if not message.get("more_body"):
            return b"".join((*pieces, piece)) if pieces else piece
        pieces.append(piece)


async def _inflated(body: bytes, budget: MemoryBudget, held: Held, limit: int) -> bytes:
    """Return the content of a body of gzip members; holds at most a megabyte beyond the limit."""
    pieces: list[bytes] = []
    size = at = 0
    whole = memoryview(body)
    try:
        for _ in range(_MEMBERS_MAX):
            if at == len(whole):
                break
            inflate = zlib.decompressobj(_GZIP)
            while not inflate.eof:
                # The decompressor copies its unused input each time.
                taken = whole[at : at + _DEFLATED_BYTES]
                piece = inflate.decompress(taken, _INFLATED_BYTES)
                at += len(taken) - len(inflate.unconsumed_tail or inflate.unused_data)
                left = at < len(whole)
                size += len(piece)
                if size > limit:
                    raise _too_large(budget, limit)
                held.grow(len(piece))
                pieces.append(piece)
                if not (piece or left or inflate.eof):
                    raise HttpError("the body's gzip data is cut off", code="invalid_body")
                if len(piece) == _INFLATED_BYTES or left:
                    await asyncio.sleep(0)
        if at < len(whole):
            raise HttpError(f"the body has more than {_MEMBERS_MAX} gzip members", code="invalid_body")
    except zlib.error as error:
        raise HttpError(f"the body isn't gzip: {error}", code="invalid_body") from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(budget: MemoryBudget, limit: int) -> HttpError:
    return HttpError(
        f"a body has more than {limit} bytes, as it is or inflated",
        code="body_too_large",
        hint="" if limit == budget.body_bytes_max else "Split the request.",
        size_max=limit,
    )
