"""Clients that are slow, silent, many or gone block no other client, and an incomplete request appends nothing."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import wait_for
from tests.serving.serving_process import LINES, Served, served, web_home

BOUNDS = 'request_timeout = "2s"\nidle_timeout = "2s"\nconnections_max = 1100\nbody_bytes_max = "1MiB"'
ROW = b'{"a": 1}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(web_home(tmp_path_factory.mktemp("homes") / "web", BOUNDS)) as found:
        yield found


def connected(server: Served) -> socket.socket:
    return socket.create_connection(server.address, timeout=30)


def request(table: str, body: bytes = ROW, *, length: int | None = None, more: str = "") -> bytes:
    head = f"POST /v1/streams/web/tables/{table} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n{more}"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Return the status and the document of one answer; (0, {}) if the connection ends without one."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        piece = connection.recv(65536)
        if not piece:
            return 0, {}
        heard += piece
    head, _, body = heard.partition(b"\r\n\r\n")
    said = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(said.get(b"content-length", b"0")):
        body += connection.recv(65536)
    return int(head.split()[1]), json.loads(body) if body else {}


def ends(connection: socket.socket) -> bool:
    """Return whether the other side closes, within the socket's timeout."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def sent_until_cut_off(connection: socket.socket, piece: bytes, most: int) -> int:
    """Send pieces until the other side closes; return how many bytes were sent."""
    for sent in range(0, most, len(piece)):
        try:
            connection.sendall(piece)
        except OSError:
            return sent
    return most


@pytest.mark.long
def test_who_never_says_a_word_is_let_go(server: Served) -> None:
    idle = [connected(server) for _ in range(1000)]
    try:
        assert server.post("many", [{"a": 1}]).status_code == 200
        assert all(ends(connection) for connection in idle)
    finally:
        for connection in idle:
            connection.close()
    assert server.post("many", [{"a": 2}]).status_code == 200


@pytest.mark.long
def test_a_thousand_idle_connections_hold_nobody_up_and_more_than_may_be_are_told_so(tmp_path: Path) -> None:
    """The server closes none of them during the test, however long it takes to open them."""
    with served(web_home(tmp_path / "web", 'request_timeout = "1h"\nconnections_max = 1100')) as server:
        idle = [connected(server) for _ in range(1000)]
        try:
            assert server.post("many", [{"a": 1}]).status_code == 200
            idle += [connected(server) for _ in range(100)]
            one_more = connected(server)
            status, problem = answer_of(one_more)
            assert (status, problem["status"]) == (503, 503)
            assert ends(one_more)
            one_more.close()
        finally:
            for connection in idle:
                connection.close()
        wait_for(lambda: server.post("many", [{"a": 3}]).status_code == 200)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "sent",
    [b"POST /v1/streams/web/tables/slow HTTP/1.1\r\nHost: h", request("slow", ROW, length=100), b"G"],
    ids=["in its head", "in its body", "in its first word"],
)
def test_a_request_that_does_not_come_whole_in_time_is_answered_and_appends_nothing(
    server: Served, sent: bytes
) -> None:
    began = time.monotonic()  # before the server can begin to wait for the rest
    with connected(server) as connection:
        connection.sendall(sent)
        status, problem = answer_of(connection)
        assert (status, problem["code"]) == (408, "request_timeout")
        assert time.monotonic() - began > 1.9
        assert ends(connection)
    assert server.rows("slow") == []


def test_a_client_that_trickles_its_request_is_let_go_as_well(server: Served) -> None:
    with connected(server) as connection:
        connection.sendall(request("trickle", b"", length=10_000_000 // 16))
        deadline = time.monotonic() + 60
        while not select.select([connection], [], [], 0.1)[0]:
            assert time.monotonic() < deadline
            # The server may have closed it since; its answer can still be read.
            with contextlib.suppress(ConnectionError):
                connection.sendall(b" ")
        try:
            assert answer_of(connection)[0] == 408
        except ConnectionError:
            assert ends(connection)
        assert server.post("others", [{"a": 1}]).status_code == 200
    assert server.rows("trickle") == []


def test_a_half_sent_body_appends_nothing_however_whole_its_lines_are(server: Served) -> None:
    chunked = request("half", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    for sent in (request("half", ROW * 3, length=len(ROW) * 4), chunked + b"9\r\n" + ROW + b"\r\n"):
        with connected(server) as connection:
            connection.sendall(sent)
    # Connections are read in order, so the later one's answer shows that the earlier one was read.
    assert server.post("others", [{"a": 2}]).status_code == 200
    assert server.rows("half") == []


def test_a_client_that_vanishes_before_its_answer_has_its_rows_whole_or_not_at_all(server: Served) -> None:
    for number in range(50):
        with connected(server) as connection:
            connection.sendall(request("gone", b'{"n": %d}\n{"n": %d}\n' % (number, number)))
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert server.post("gone", [{"n": -1}, {"n": -1}]).status_code == 200
    numbers = [row["n"] for row in server.rows("gone")]
    assert all(numbers.count(number) in {0, 2} for number in range(50))
    assert len(numbers) > 2


def test_a_head_is_bounded(server: Served) -> None:
    for length, status in ((50_000, 200), (2_000_000, 431)):
        with connected(server) as connection:
            sent = request("head", ROW, more=f"X-Long: {'x' * length}\r\n")
            try:
                connection.sendall(sent)
            except ConnectionError:
                assert status == 431
            try:
                assert answer_of(connection)[0] == status
            except ConnectionResetError:
                assert status == 431
    assert len(server.rows("head")) == 1


CHUNKED = (
    b"POST /v1/streams/web/tables/%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize("field", [b"x-more: " + b"a" * 100 + b"\r\n", b"a" * 110])
def test_what_stands_behind_a_body_is_bounded(server: Served, field: bytes) -> None:
    """Trailer fields were kept, whatever their number, for as long as a request may take."""
    for body in (b"9\r\n" + ROW + b"\r\n0\r\n", b"9;"):
        with connected(server) as connection:
            connection.sendall(CHUNKED % b"behind" + body)
            assert sent_until_cut_off(connection, field * 1000, 64 << 20) < 16 << 20
    assert server.rows("behind") == []


def test_what_stands_behind_a_body_says_nothing_of_its_request(server: Served) -> None:
    for _ in range(2):
        with connected(server) as connection:
            behind = b"Idempotency-Key: one\r\nAuthorization: Bearer mst_\r\n"
            connection.sendall(CHUNKED % b"trailed" + b"9\r\n" + ROW + b"\r\n0\r\n" + behind + b"\r\n")
            status, said = answer_of(connection)
            assert (status, said["duplicate"]) == (200, False)
            connection.sendall(request("trailed"))
            assert answer_of(connection)[0] == 200
    assert len(server.rows("trailed")) == 4


def test_chunks_of_a_byte_each_are_taken(server: Served) -> None:
    body = b"".join(ROW for _ in range(20_000))
    with connected(server) as connection:
        connection.sendall(CHUNKED % b"bytewise" + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert answer_of(connection)[0] == 200
    assert len(server.rows("bytewise")) == 20_000


def test_who_offers_another_protocol_is_heard_in_this_one(server: Served) -> None:
    """Java's client and `curl --http2` offer an upgrade with each first request.

    The request's body was lost, or read as the next request.
    """
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    offering = request("offers", more=offer)
    with connected(server) as connection:
        for pieces in ([offering], [offering[: -len(ROW)], ROW], [request("offers")], [offering[:50], offering[50:]]):
            for piece in pieces:
                connection.sendall(piece)
            assert answer_of(connection)[0] == 200
        connection.sendall(offering * 20)
        assert [answer_of_next(connection) for _ in range(20)] == [200] * 20
    with connected(server) as connection:
        connection.sendall(request("offers", more=offer.replace("Upgrade,", "Upgrade, close,")))
        assert answer_of(connection)[0] == 200
        assert ends(connection)
    assert len(server.rows("offers")) == 25
    with connected(server) as connection:
        connection.sendall(b"CONNECT here:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer_of(connection)[0] == 400


def answer_of_next(connection: socket.socket) -> int:
    """Read the first of several answers, and not a byte more; return its status."""
    heard = b""
    while not heard.endswith(b"\r\n\r\n"):
        heard += connection.recv(1)
    length = int(heard.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    while length:
        length -= len(connection.recv(length))
    return int(heard.split()[1])


def test_requests_that_follow_each_other_on_a_connection_are_answered_in_order(server: Served) -> None:
    with connected(server) as connection:
        connection.sendall(b"".join(request("pipeline", b'{"n": %d}' % number) for number in range(20)))
        heard = b""
        while heard.count(b"HTTP/1.1 200") < 20:
            piece = connection.recv(65536)
            assert piece
            heard += piece
    assert [row["n"] for row in server.rows("pipeline")] == list(range(20))


def test_an_idle_connection_ends_after_its_time(server: Served) -> None:
    with connected(server) as connection:
        began = time.monotonic()  # before the server can begin to wait for another request
        connection.sendall(request("idle"))
        assert answer_of(connection)[0] == 200
        assert ends(connection)
        assert time.monotonic() - began > 1.9


def test_a_body_that_is_too_large_is_answered_before_it_is_sent(server: Served) -> None:
    with connected(server) as connection:
        connection.sendall(request("large", b"", length=(1 << 20) + 1))
        status, problem = answer_of(connection)
        assert (status, problem["code"]) == (413, "body_too_large")


def test_what_is_not_http_is_refused(server: Served) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"HELO here\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with connected(server) as connection:
            connection.sendall(sent)
            assert answer_of(connection)[0] in {400, 408}
            assert ends(connection)


@pytest.mark.long
def test_bodies_in_flight_are_bounded_together(tmp_path: Path) -> None:
    with served(web_home(tmp_path / "web", 'inflight_bytes_max = "4MiB"\nbody_bytes_max = "1MiB"')) as server:
        fill_and_look(server)


def fill_and_look(server: Served) -> None:
    waiting = []
    try:
        found = []

        def is_full() -> bool:
            # Each connection keeps the bytes it has sent; four that fit leave no room for more.
            connection = connected(server)
            waiting.append(connection)
            connection.sendall(request("bounded", b'{"a":"' + b"x" * ((1 << 20) - 100), length=1 << 20))
            answer = server.post("bounded", [{"a": "x" * 300_000}])
            found.append(answer.status_code)
            return answer.status_code == 429

        wait_for(is_full, what=lambda: found)
        with server.client() as client:
            answer = client.post(
                "/v1/streams/web/tables/bounded", content=b'{"a":"%s"}' % (b"x" * 300_000), headers=LINES
            )
            assert (answer.status_code, answer.json()["code"]) == (429, "server_busy")
            assert int(answer.headers["retry-after"]) >= 1
            # A small request at the same time is answered.
            assert client.get("/readyz").status_code == 200
        had = len(server.rows("bounded"))
    finally:
        for connection in waiting:
            connection.close()
    wait_for(lambda: server.post("bounded", [{"a": "x" * 100_000}]).status_code == 200)
    assert len(server.rows("bounded")) == had + 1


@pytest.mark.siege
def test_a_server_that_is_told_to_end_answers_what_it_was_asked(tmp_path: Path) -> None:
    home = web_home(tmp_path / "web", 'drain_delay = "15s"\ndrain_timeout = "30s"')
    with served(home) as server:
        assert server.post("drained", [{"n": 0}]).status_code == 200
        slow = connected(server)
        sent = request("drained", b'{"n": 1}\n')
        slow.sendall(sent[:-3])
        silent = connected(server)
        server.process.terminate()
        with server.client() as client:
            wait_for(lambda: client.get("/readyz").status_code == 503)
            assert client.get("/readyz").json()["detail"] == "the server is about to end"
            # It goes on as before until its delay is over.
            assert server.post("drained", [{"n": 2}]).status_code == 200

        def refuses() -> bool:
            try:
                connected(server).close()
            except ConnectionResetError:  # it was still queued at the closed listener: not the answer yet
                return False
            except ConnectionRefusedError:
                return True
            return False

        wait_for(refuses)
        slow.sendall(sent[-3:])
        assert answer_of(slow)[0] == 200
        slow.close()
        silent.close()
        assert server.process.wait(120) == 0
    assert sorted(row["n"] for row in server.rows("drained")) == [0, 1, 2]


@pytest.mark.long
def test_a_drain_is_bounded(tmp_path: Path) -> None:
    with served(web_home(tmp_path / "web", 'drain_timeout = "1s"')) as server:
        with connected(server) as slow:
            slow.sendall(request("drained", b'{"n": 1}\n')[:-3])
            assert server.post("drained", [{"n": 0}]).status_code == 200
            server.process.terminate()
            assert server.process.wait(20) == 0
        assert [row["n"] for row in server.rows("drained")] == [0]
