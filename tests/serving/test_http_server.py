"""HTTP/1.1 as clients see it, over an application of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import uvloop
from tests.app.homes import wait_for
from tests.serving.servers import Authority

from millstream.serving.connection_bounds import ConnectionBounds
from millstream.serving.http_server import HttpServer

BOUNDS = ConnectionBounds(connections_max=100, request_s=30.0, idle_s=30.0, unread_bytes_max=1 << 20)
LARGE = 64 << 20


@dataclasses.dataclass
class Served:
    """A server of an application that answers each path in its own way."""

    port: int = 0
    server: HttpServer = dataclasses.field(init=False)
    begun: list[str] = dataclasses.field(default_factory=list)
    """Paths of all requests, in order."""
    gone: list[str] = dataclasses.field(default_factory=list)
    """Paths whose clients left before an answer."""
    sent: int = 0
    """Bytes of the large answer that the server has taken."""
    unread: list[str] = dataclasses.field(default_factory=list)

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.begun.append(path)
        if path == "/fails":
            raise ValueError("a bug")
        if path == "/silent":
            return
        if path == "/waits":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.append(path)
            return
        if path in {"/steps", "/begins"}:
            await self._stream(path, receive, send)
            return
        if path in {"/short", "/long", "/splits"}:
            length = {"/short": b"9", "/long": b"1", "/splits": b"3"}[path]
            more = [(b"x-more", b"a\r\nset-cookie: b")] if path == "/splits" else []
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length), *more]})
            await send({"type": "http.response.body", "body": b"abc"})
            return
        if path == "/unread":
            self.unread.append(scope["method"])
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return
        body, more_body = b"", True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.append(path)
                return
            body, more_body = body + message["body"], message["more_body"]
        status = 204 if path == "/nothing" else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-path", path.encode())]})
        if path == "/large":
            while self.sent < LARGE:
                await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
                self.sent += 1 << 16
        if status == 204:
            await send({"type": "http.response.body"})
            return
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"."})

    async def _stream(self, path: str, receive: Any, send: Any) -> None:
        """Send steps, or nothing behind the header until the client is gone."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/steps":
            for _ in range(6):
                await asyncio.sleep(0.3)
                await send({"type": "http.response.body", "body": b"step ", "more_body": True})
            await send({"type": "http.response.body"})
            return
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.append(path)

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def answers(self, sent: bytes) -> bytes:
        """Send bytes, and return all answers until the server closes."""
        with self.connected() as connection:
            connection.sendall(sent)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    heard = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            heard += piece
    return bytes(heard)


def get(path: str, *, version: str = "1.1", method: str = "GET", more: str = "") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: h\r\n{more}\r\n".encode()


@contextlib.contextmanager
def serving(
    bounds: ConnectionBounds = BOUNDS, *, drain_s: float = 30.0, context: ssl.SSLContext | None = None
) -> Iterator[Served]:
    found = Served()
    end: Future[Callable[[], object]] = Future()

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        found.server = HttpServer(found.application, bounds, drain_s=drain_s, context=context)
        end.set_result(lambda: loop.call_soon_threadsafe(ended.set))
        await found.server.serve(listener, ended)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in `millstream serve`
            runner.run(serve())

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found.port = listener.getsockname()[1]
        thread = threading.Thread(target=run)
        thread.start()
        stop = end.result(60)  # the server exists by then
        try:
            yield found
        finally:
            stop()
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


CLOSE = "Connection: close\r\n"


def test_an_answer_without_a_length_comes_in_chunks_and_has_the_time(served: Served) -> None:
    head, _, body = served.answers(get("/a%20b", more=CLOSE)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert b" GMT\r\n" in head
    assert b"x-path: /a b\r\n" in head
    assert b"transfer-encoding: chunked\r\nconnection: close" in head
    assert body == b"1\r\n.\r\n0\r\n\r\n"


def test_an_older_client_gets_the_answer_up_to_the_end_of_its_connection(served: Served) -> None:
    body = "Content-Length: 3\r\n"
    head, _, answer = served.answers(get("/x", version="1.0", method="POST", more=body) + b"abc").partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert answer == b"abc."


def test_answers_without_a_body_have_none(served: Served) -> None:
    for sent in (get("/x", method="HEAD", more=CLOSE), get("/nothing", more=CLOSE)):
        head, _, body = served.answers(sent).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b""


def test_a_client_that_waits_for_leave_to_send_gets_it_once(served: Served) -> None:
    with served.connected() as connection:
        connection.sendall(get("/x", method="POST", more="Expect: 100-continue\r\nContent-Length: 3\r\n" + CLOSE))
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        heard = read_all(connection)
    assert heard.startswith(b"HTTP/1.1 200 OK")
    assert b"3\r\nabc\r\n1\r\n.\r\n0\r\n\r\n" in heard


@pytest.mark.parametrize("path", ["/fails", "/silent"])
def test_a_request_that_the_application_fails_is_answered(served: Served, path: str) -> None:
    head, _, body = served.answers(get(path) + get("/x")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"application/problem+json" in head
    assert b"bug" in body
    assert b"HTTP/1.1" not in body, "the connection is closed"


@pytest.mark.parametrize("path", ["/short", "/long", "/splits"])
def test_an_answer_that_would_pass_for_two_ends_the_connection(served: Served, path: str) -> None:
    heard = served.answers(get(path) + get("/x", more=CLOSE))
    assert b"x-path" not in heard
    assert b"set-cookie" not in heard


@pytest.mark.long
def test_an_application_learns_that_its_client_is_gone(served: Served) -> None:
    for sent in (get("/waits"), get("/x", method="POST", more="Content-Length: 3\r\n") + b"a"):
        served.gone.clear()
        with served.connected() as connection:
            connection.sendall(sent)
            wait_for(lambda: served.server.connections)
        wait_for(lambda: len(served.gone) == 1)


@pytest.mark.sampled
@pytest.mark.parametrize("path", ["/waits", "/begins"])
@pytest.mark.parametrize("behind", [b"", get("/x"), get("/x") + b"no request at all\r\n\r\n"])
@pytest.mark.parametrize("is_reset", [True, False])
def test_an_application_learns_that_its_client_is_gone_whatever_it_has_sent_behind(
    path: str, behind: bytes, is_reset: bool
) -> None:
    """Nothing is read while requests wait, so the end was not seen."""
    with serving(dataclasses.replace(BOUNDS, half_closed_s=30.0 if is_reset else 0.5), drain_s=1.0) as served:
        with served.connected() as connection:
            connection.sendall(get(path) + behind)
            wait_for(lambda: served.begun == [path])
            time.sleep(0.2)
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_for(lambda: served.gone == [path], seconds=20)
        wait_for(lambda: not served.server.connections, seconds=20)
        assert served.begun == [path]


@pytest.mark.long
def test_a_client_that_ended_its_side_gets_its_answers_whole() -> None:
    """The answer was cut off. A client that is sent something isn't given up, however long it takes."""
    steps = b"5\r\nstep \r\n" * 6 + b"0\r\n\r\n"
    with serving(dataclasses.replace(BOUNDS, half_closed_s=0.9)) as served:
        for sent, answers in (
            (get("/steps"), 1),
            (get("/steps") + get("/steps"), 2),
            (get("/steps") + get("/steps") + get("/x", method="POST", more="Content-Length: 9\r\n") + b"abc", 2),
            (get("/steps") + get("/x")[:-4], 1),
        ):
            with served.connected() as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                heard = read_all(connection)
            assert heard.count(steps) == heard.count(b"HTTP/1.1 200 OK") == answers
        assert served.gone == ["/x"], "its body never came"
        with served.connected() as connection:
            connection.sendall(get("/large"))
            connection.shutdown(socket.SHUT_WR)
            assert len(read_all(connection)) > LARGE


def test_a_client_that_ended_its_side_before_its_request_was_whole_is_gone() -> None:
    with serving() as served:
        for sent in (b"", get("/x")[:-4], get("/x", method="POST", more="Content-Length: 9\r\n") + b"abc"):
            with served.connected() as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                assert read_all(connection) == b""
        wait_for(lambda: served.gone == ["/x"])
        with served.connected() as connection:
            connection.sendall(get("/unread"))
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""


def test_a_client_that_does_not_read_holds_the_answer_back(served: Served) -> None:
    with served.connected() as connection:
        connection.sendall(get("/large"))
        before = -1
        while served.sent != before:  # until it stands still
            before = served.sent
            time.sleep(0.5)
        assert 0 < served.sent < LARGE
        received = 0
        while received < LARGE:
            piece = connection.recv(1 << 20)
            assert piece
            received += len(piece)
        wait_for(lambda: served.sent == LARGE, seconds=20)  # chunks' lengths count as received, too


def test_requests_that_come_ahead_of_their_answers_are_answered_in_order(served: Served) -> None:
    number = 20_000
    sent = b"".join(get(f"/{n}") for n in range(number)) + get("/last", more=CLOSE)
    with served.connected() as connection:
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        heard = read_all(connection)
        sender.join(30)
    paths = [line for line in heard.split(b"\r\n") if line.startswith(b"x-path")]
    assert paths == [b"x-path: /%d" % n for n in range(number)] + [b"x-path: /last"]


def test_requests_that_come_ahead_of_their_answers_are_not_all_read() -> None:
    with serving(drain_s=0.5) as served, served.connected() as connection:
        connection.settimeout(2)
        connection.sendall(get("/waits"))
        with pytest.raises(TimeoutError):
            connection.sendall(get("/x", more=f"X-Long: {'x' * 1000}\r\n") * 32_000)


def test_line_ends_between_requests_keep_no_connection_open() -> None:
    """They stopped the timer of an idle connection, and began no request that had one."""
    bounds = ConnectionBounds(100, request_s=1.0, idle_s=1.0, unread_bytes_max=1)
    with serving(bounds) as served, served.connected() as connection:
        connection.sendall(get("/unread"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"\r\n")
        assert read_all(connection) == b""


def test_a_body_that_is_not_wanted_is_dropped_up_to_its_bound() -> None:
    with serving(ConnectionBounds(100, request_s=30.0, idle_s=30.0, unread_bytes_max=1 << 20)) as served:
        for length, ended in ((1 << 19, False), (1 << 30, True)):
            with served.connected() as connection:
                connection.sendall(get("/unread", method="POST", more=f"Content-Length: {length}\r\n"))
                head = connection.recv(1000)
                assert head.startswith(b"HTTP/1.1 200 OK")
                assert (b"\r\nconnection: close\r\n" in head) == ended
                with contextlib.suppress(ConnectionError):
                    for _ in range(min(length, 64 << 20) >> 16):
                        connection.sendall(b"x" * (1 << 16))
                    connection.sendall(get("/unread"))
                    assert not ended
                    assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_an_end_waits_for_what_has_begun() -> None:
    heard: list[bytes] = []

    def send_the_rest() -> None:
        read_all(idle)  # it is closed first
        connection.sendall(b"bc")
        heard.append(read_all(connection))

    thread = threading.Thread(target=send_the_rest)
    with serving() as served:
        idle, connection = served.connected(), served.connected()
        connection.sendall(get("/x", method="POST", more="Content-Length: 3\r\n") + b"a")
        idle.sendall(get("/unread"))
        assert idle.recv(1000)
        wait_for(lambda: len(served.server.connections) == 2)
        thread.start()
    thread.join(30)
    assert b"connection: close\r\n" in heard[0]
    assert heard[0].endswith(b"3\r\nabc\r\n1\r\n.\r\n0\r\n\r\n")
    idle.close()
    connection.close()


def test_an_end_waits_no_longer_than_it_may() -> None:
    with serving(drain_s=0.5) as served:
        stuck = served.connected()
        stuck.sendall(get("/waits"))
        wait_for(lambda: served.server.connections)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert read_all(stuck) == b""
    stuck.close()


def test_a_client_library_keeps_its_connection(served: Served) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{served.port}", trust_env=False) as client:
        for n in range(5):
            assert client.post("/x", content=b"abc" * n).content == b"abc" * n + b"."
        assert client.post("/x", content=(b"a" * 100_000 for _ in range(30))).content == b"a" * 3_000_000 + b"."


def test_what_cannot_be_read_behind_a_request_leaves_its_answer_whole(served: Served) -> None:
    """A problem was written into the middle of the answer before it."""
    served.sent = 0
    with served.connected() as connection:
        connection.sendall(get("/large"))
        wait_for(lambda: served.sent > 0)
        connection.sendall(get("/b") + b"no request at all\r\n\r\n")
        heard = read_all(connection)
    assert heard.count(b"HTTP/1.1 ") == 1
    assert heard.endswith(b"0\r\n\r\n")


def test_a_client_that_never_reads_is_given_up() -> None:
    """It held its connection for ever."""
    bounds = ConnectionBounds(connections_max=100, request_s=30.0, idle_s=0.5, unread_bytes_max=1 << 20)
    with serving(bounds) as served, served.connected() as connection:
        connection.sendall(get("/large", more="Connection: close\r\n"))
        wait_for(lambda: served.sent > 0)
        wait_for(lambda: not served.server.connections, seconds=20)


def test_a_slow_reader_is_served_to_the_end() -> None:
    bounds = ConnectionBounds(connections_max=100, request_s=30.0, idle_s=2.0, unread_bytes_max=1 << 20)
    with serving(bounds) as served, served.connected() as connection:
        connection.sendall(get("/large", more="Connection: close\r\n"))
        heard = 0
        for _ in range(16):
            time.sleep(0.25)
            heard += len(connection.recv(4 << 20))
        heard += len(read_all(connection))
        assert heard > LARGE


def test_a_body_that_was_not_asked_for_ends_the_connection(served: Served) -> None:
    """The next request was read as the body of the one before."""
    heard = served.answers(get("/unread", method="POST", more="Expect: 100-continue\r\nContent-Length: 100\r\n"))
    assert b"connection: close" in heard


def status_of(heard: bytes) -> int:
    return int(heard.split(maxsplit=2)[1])


@pytest.mark.parametrize(
    ("line", "hosts", "status"),
    [
        ("GET /x HTTP/1.1", "", 400),
        ("GET /x HTTP/1.1", "Host: a\r\nHost: a\r\n", 400),
        ("GET /x HTTP/1.1", "Host: a\r\nhost: b\r\n", 400),
        ("GET /x HTTP/1.1", "Host: a/b\r\n", 400),
        ("GET /x HTTP/1.1", "Host: a, b c\r\n", 400),
        # No URL can be made of these.
        ("GET /x HTTP/1.1", "Host: [\r\n", 400),
        ("GET /x HTTP/1.1", "Host: a]:80\r\n", 400),
        ("GET /x HTTP/1.1", "Host: [1:2]\r\n", 400),
        ("GET /x HTTP/1.0", "Host: a\r\nHost: b\r\n", 400),
        ("GET /x", "", 400),
        ("GET /x", "Host: a\r\n", 400),
        ("GET /x#/open HTTP/1.1", "Host: a\r\n", 400),
        ("GET /x?a=b# HTTP/1.1", "Host: a\r\n", 400),
        ("GET /x HTTP/0.9", "Host: a\r\n", 400),
        ("GET /x HTTP/2.0", "Host: a\r\n", 505),
        ("GET /x HTTP/1.1", "Connection: upgrade\r\nUpgrade: h2c\r\n", 400),
        ("GET /x HTTP/1.1", "Host: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\nHost: b\r\n", 400),
    ],
)
def test_a_request_of_another_version_or_without_one_host_is_refused(
    served: Served, line: str, hosts: str, status: int
) -> None:
    heard = served.answers(f"{line}\r\n{hosts}\r\n".encode() + get("/x", more=CLOSE))
    assert status_of(heard) == status
    assert b"application/problem+json" in heard
    assert b"connection: close" in heard
    assert b"x-path" not in heard, "the application got neither request"


def test_the_fields_of_a_head_are_bounded_in_number(served: Served) -> None:
    """A head of 64 KiB of the shortest fields took more than a megabyte, of a caller without a token."""
    for count, status in ((255, b"200"), (256, b"431"), (10_000, b"431")):
        heard = served.answers(get("/fields", more="a:b\r\n" * (count - 1) + CLOSE))
        assert heard.split(b" ")[1] == status, count


def test_blanks_behind_a_value_are_no_part_of_it(served: Served) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await served.application(scope, receive, send)

    with serving() as other:
        other.server.application = application
        heard = other.answers(get("/x", method="POST", more="Content-Length: 1 \t\r\nX-A:\t a b \r\n" + CLOSE) + b"a")
    assert heard.startswith(b"HTTP/1.1 200 ")
    assert {(b"content-length", b"1"), (b"x-a", b"a b")} <= set(seen)


def test_hosts_of_every_form_are_taken(served: Served) -> None:
    for host in ("", "h", "h:80", "a_b.example.com", "[::1]:80", "127.0.0.1:1", "h\t"):
        heard = served.answers(f"GET /x HTTP/1.1\r\nHost: {host}\r\n{CLOSE}\r\n".encode())
        assert heard.startswith(b"HTTP/1.1 200 "), host
    assert served.answers(b"GET /x HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


SMUGGLED = {
    "length and chunks": "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": "Content-Length: 1\r\nContent-Length: 2\r\n\r\na",
    "a length twice": "Content-Length: 1\r\nContent-Length: 1\r\n\r\na",
    "a list of lengths": "Content-Length: 1, 1\r\n\r\na",
    "a negative length": "Content-Length: -1\r\n\r\n",
    "a signed length": "Content-Length: +1\r\n\r\na",
    "a hexadecimal length": "Content-Length: 0x1\r\n\r\na",
    "no length": "Content-Length:\r\n\r\na",
    "a huge length": f"Content-Length: {'9' * 40}\r\n\r\n",
    "chunks not last": "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "codings in two lines": "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a folded line": "X-A: a\r\n b\r\n\r\n",
    "a folded coding": "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a bare line feed": "X-A: b\nContent-Length: 1\r\n\r\na",
    "a header that ends with line feeds": "X-A: b\n\n",
    "a bare carriage return": "X-A: b\rContent-Length: 1\r\n\r\n",
    "a space before the colon": "Content-Length : 1\r\n\r\na",
    "a tab before the colon": "Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "a space before the name": " Content-Length: 1\r\n\r\na",
    "a control character": "X-A: b\0c\r\n\r\n",
    "no colon": "Content-Length 1\r\n\r\na",
    "length and chunks behind an upgrade": "Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n"
    "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("rest", SMUGGLED.values(), ids=SMUGGLED)
def test_a_header_that_two_programs_may_read_differently_is_refused(served: Served, rest: str) -> None:
    heard = served.answers(f"POST /x HTTP/1.1\r\nHost: h\r\n{rest}".encode() + get("/x", more=CLOSE))
    assert status_of(heard) == 400
    assert b"connection: close" in heard
    assert b"x-path" not in heard, "the application got neither request"


CHUNKS = {
    "line feeds": "1\na\n0\n\n",
    "a line feed in an extension": "1;a\nx\r\n0\r\n\r\n",
    "a space": "1 \r\na\r\n0\r\n\r\n",
    "a sign": "+1\r\na\r\n0\r\n\r\n",
    "a prefix": "0x1\r\na\r\n0\r\n\r\n",
    "a huge length": f"{'f' * 17}\r\n",
    "data longer than its length": "1\r\nab0\r\n\r\n",
    "a length in the trailer": "1\r\na\r\n0\r\nContent-Length: 5\r\n\r\n",
}


@pytest.mark.parametrize("body", CHUNKS.values(), ids=CHUNKS)
def test_chunks_that_two_programs_may_read_differently_are_refused(served: Served, body: str) -> None:
    chunked = get("/x", method="POST", more="Transfer-Encoding: chunked\r\n")
    heard = served.answers(chunked + body.encode() + get("/x", more=CLOSE))
    assert status_of(heard) == 400
    assert b"x-path" not in heard


@pytest.mark.parametrize(
    ("version", "coding", "status"),
    [
        ("1.0", "chunked", 400),
        ("1.1", "gzip, chunked", 501),
        ("1.1", "xchunked", 501),
        ("1.1", "Chunked", 200),
    ],
)
def test_the_only_coding_of_a_body_is_chunks_in_http_1_1(
    served: Served, version: str, coding: str, status: int
) -> None:
    """Compressed bytes were given to the application as the body."""
    sent = get("/x", method="POST", version=version, more=f"Transfer-Encoding: {coding}\r\n{CLOSE}")
    heard = served.answers(sent + b"1\r\na\r\n0\r\n\r\n")
    assert status_of(heard) == status
    assert (b"x-path" in heard) is (status == 200)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def context(authority: Authority) -> ssl.SSLContext:
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.load_cert_chain(*authority.issue("server"))
    return found


def ended(connections: list[socket.socket], seconds: float) -> int:
    """Return how many connections the other side ends while it is quiet for no longer than so many seconds."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    number = 0
    while ready := poll.poll(seconds * 1000):
        for descriptor, _ in ready:
            poll.unregister(descriptor)
        number += len(ready)
    return number


def test_handshakes_count_as_connections(authority: Authority, context: ssl.SSLContext) -> None:
    """Any number of clients that never began a handshake was let in."""
    at_most = 20
    client = authority.client()
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving(dataclasses.replace(BOUNDS, connections_max=at_most), context=context))
        opened = [client.wrap_socket(served.connected(), server_hostname="127.0.0.1") for _ in range(at_most // 2)]
        silent = [served.connected() for _ in range(300)]
        for connection in (*opened, *silent):
            stack.enter_context(connection)
        assert ended(silent, 2.0) == len(silent) - at_most // 2
        for connection in opened:
            connection.sendall(get("/x"))
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        for connection in silent:
            connection.close()
        # Their places are free again: every connection up to the limit is accepted, and none beyond it.
        wait_for(lambda: not served.server.handshakes, seconds=20)
        for _ in range(at_most // 2):
            opened.append(stack.enter_context(client.wrap_socket(served.connected(), server_hostname="127.0.0.1")))
            opened[-1].sendall(get("/x"))
            assert opened[-1].recv(1000).startswith(b"HTTP/1.1 200 ")
        with served.connected() as one_more, pytest.raises((ssl.SSLError, ConnectionError)):
            client.wrap_socket(one_more, server_hostname="127.0.0.1")
        for connection in opened:
            connection.close()


def test_a_handshake_is_bounded_in_time_and_a_broken_one_holds_nothing(
    authority: Authority, context: ssl.SSLContext
) -> None:
    bounds = ConnectionBounds(connections_max=1, request_s=0.5, idle_s=30.0, unread_bytes_max=1)
    with serving(bounds, context=context) as served:
        for sent in (b"", b"\x16\x03\x01", get("/x"), b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03"):
            with served.connected() as connection:
                connection.sendall(sent)
                began = time.monotonic()
                read_all(connection)
                assert time.monotonic() - began < 20
            wait_for(lambda: not served.server.handshakes, seconds=20)
        with (
            served.connected() as plain,
            authority.client().wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(get("/x", more=CLOSE))
            assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_an_end_waits_for_no_handshake(context: ssl.SSLContext) -> None:
    with serving(context=context) as served:
        silent = served.connected()
        wait_for(lambda: served.server.handshakes)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert read_all(silent) == b""
    silent.close()
