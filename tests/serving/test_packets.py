"""The writes to a connection that an answer takes, and the memory that its requests take."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

from millstream.serving.connection_bounds import ConnectionBounds
from millstream.serving.connections import Connection
from millstream.serving.http_server import HttpServer

BOUNDS = ConnectionBounds(connections_max=100, request_s=30.0, idle_s=30.0, unread_bytes_max=1 << 20)


class Writes(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_paused = False

    def write(self, data: Any) -> None:
        if data:
            self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_paused = True


async def written(headers: list[tuple[bytes, bytes]], *bodies: bytes) -> list[bytes]:
    """Return the writes of an answer with these headers and parts of a body; the last one ends it."""
    answered = asyncio.Event()

    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for at, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": at < len(bodies)})
        answered.set()

    transport = Writes()
    connection = Connection(HttpServer(application, BOUNDS, drain_s=1))
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.wait_for(answered.wait(), 60)
    return transport.written


def test_an_answer_of_known_length_is_one_write() -> None:
    (packet,) = asyncio.run(written([(b"content-length", b"3")], b"abc"))
    assert packet.startswith(b"HTTP/1.1 200 OK\r\n")
    assert packet.endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
def test_a_header_waits_for_no_body_that_may_come_late(headers: list[tuple[bytes, bytes]]) -> None:
    first, *_ = asyncio.run(written(headers, b""))
    assert first.endswith(b"\r\n\r\n")


def test_requests_behind_one_that_waits_take_hardly_more_memory_than_their_bytes() -> None:
    """A read of 256 KiB made ten megabytes of requests, for as long as a client left the first answers unread."""

    async def application(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def held_bytes() -> int:
        connection = Connection(HttpServer(application, BOUNDS, drain_s=1))
        connection.connection_made(Writes())
        data = b"GET /a HTTP/1.1\r\nHost:\r\n\r\n" * 9_000
        connection.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0)
        tracemalloc.start()
        try:
            connection.data_received(data)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            connection.connection_lost(None)
            await asyncio.sleep(0)

    assert asyncio.run(held_bytes()) < 1 << 20
