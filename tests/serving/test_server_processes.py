"""Several server processes on one port: which of them answers, what they share, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from tests.app.homes import wait_for
from tests.serving.serving_process import LINES, Served, served, web_home

from millstream.errors import HttpError, MillstreamError
from millstream.home.home import Home
from millstream.processes.child_process import Lifeline
from millstream.processes.control_socket import measures_of
from millstream.processes.listening import listen
from millstream.processes.role_locks import holder, server_role
from millstream.serving.connection_bounds import ConnectionBounds
from millstream.serving.http_server import HttpServer
from millstream.serving.request_bodies import Held, MemoryBudget
from millstream.serving.requests import ENDING, NEEDS_ITS_CLIENT
from millstream.serving.row_processes import forwarding as forwarding_module
from millstream.serving.row_processes.forwarding import Forwarder, answering, listening
from millstream.serving.row_processes.shared_totals import SharedTotals, make_file
from millstream.serving.row_processes.supervision import listen_together, serve_in_processes
from millstream.serving.server import serve_home
from millstream.testing.errors import coded

BOUNDS = ConnectionBounds(connections_max=10, request_s=30.0, idle_s=30.0, unread_bytes_max=1 << 20)
LARGE = b"x" * (1 << 20)


# --- what they share -------------------------------------------------------------------------------------------------


def test_processes_share_the_room_for_requests() -> None:
    file = make_file(2)
    try:
        one, other = (MemoryBudget(100, 100, SharedTotals(file, 2).share_of("held_bytes", number)) for number in (0, 1))
        with Held(one) as held:
            held.grow(60)
            with Held(other) as more:
                more.grow(40)
                with pytest.raises(HttpError, check=coded("server_busy"), match="hold 100 of 100 bytes"):
                    more.grow(1)
                assert more.size_bytes == 40
        with Held(other) as whole:
            whole.grow(100)
    finally:
        os.close(file)


def test_the_part_of_a_process_that_died_is_forgotten() -> None:
    file = make_file(2)
    try:
        totals = SharedTotals(file, 2)
        assert totals.share_of("connections", 1)(7) == 0
        assert totals.share_of("connections", 0)(1) == 7
        totals.clear(1)
        assert totals.share_of("connections", 0)(1) == 0
    finally:
        os.close(file)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_that_came_first_opens_no_port(tmp_path: Path, processes: int) -> None:
    """After Ctrl-C during its start a server opened its port, and then drained."""
    lifeline = Lifeline()
    lifeline.stop.set()
    with listen("127.0.0.1", 0) as taken:  # to open it would fail
        port = taken.getsockname()[1]
        config = f'[streams.web]\n[http]\nlisten = "127.0.0.1:{port}"\nprocesses = {processes}\n'
        (tmp_path / "millstream.toml").write_text(config)
        home = Home(tmp_path)
        if processes == 1:
            serve_home(home, lifeline)
        else:
            serve_in_processes(home, lifeline, log_format="text")


def test_a_port_that_another_process_shares_is_taken() -> None:
    listeners = listen_together("127.0.0.1", 0, 2)
    try:
        port = listeners[0].getsockname()[1]
        assert {one.getsockname()[1] for one in listeners} == {port}
        with pytest.raises(MillstreamError, check=coded("address_in_use")):
            listen_together("127.0.0.1", port, 2)
    finally:
        for one in listeners:
            one.close()


# --- what is forwarded -----------------------------------------------------------------------------------------------


class Answering:
    """The application of the process that answers."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.waits, self.gone = threading.Event(), threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/fails":
            raise ValueError("a bug")
        if scope["path"] == "/waits":
            scope[NEEDS_ITS_CLIENT] = True
            assert (await receive())["type"] == "http.request"
            cancelled = asyncio.ensure_future(receive())
            await asyncio.sleep(0)
            cancelled.cancel()
            self.waits.set()
            if (await receive())["type"] == "http.disconnect":
                self.gone.set()
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-path", scope["path"].encode())]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def forwarding(path: Path, application: Any) -> Iterator[int]:
    """Serve a port by one process's server that forwards all to another's; yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready: list[Any] = []
    began = threading.Event()

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        ready.append(lambda: loop.call_soon_threadsafe(ended.set))
        with listening(path) as answers:
            async with answering(application, answers, asyncio.Event(), 60):
                began.set()
                await HttpServer(Forwarder(path), BOUNDS, drain_s=60).serve(listener, ended)

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert began.wait(60)
        yield listener.getsockname()[1]
    finally:
        ready[0]()
        thread.join(120)
        assert not thread.is_alive()


def test_a_forwarded_request_is_answered_as_if_it_had_come_there(tmp_path: Path) -> None:
    application = Answering()
    with (
        forwarding(tmp_path / "s", application) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
    ):
        for _ in range(2):
            found = client.post("/a%20b?c=d", content=LARGE, headers={"X-More": "1", "Cookie": "a=b"})
            assert (found.status_code, found.headers["x-path"], found.content) == (201, "/a b", b"a" + LARGE)
    scope = application.scopes[0]
    assert (scope["type"], scope["raw_path"], scope["query_string"]) == ("http", b"/a%20b", b"c=d")
    assert {(b"x-more", b"1"), (b"cookie", b"a=b")} <= set(scope["headers"])
    assert scope["client"][0] == "127.0.0.1"
    assert scope["server"] == ("127.0.0.1", port)
    assert isinstance(scope[ENDING], asyncio.Event)


def test_the_application_of_a_forwarded_request_sees_its_client_go(tmp_path: Path) -> None:
    application = Answering()
    with forwarding(tmp_path / "s", application) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /waits HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert application.waits.wait(60)
        client.shutdown(socket.SHUT_WR)  # it needs its client: an ended side is a gone client
        assert application.gone.wait(60)


def test_a_bug_is_answered_with_500_and_not_as_if_nothing_had_been_done(tmp_path: Path) -> None:
    with forwarding(tmp_path / "s", Answering()) as port:
        assert httpx.get(f"http://127.0.0.1:{port}/fails", timeout=60, trust_env=False).status_code == 500


async def status_of(path: Path) -> int:
    """Forward a request to the process of a socket; return the answer's status."""
    answers: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    facts = {"http_version": "1.1", "method": "GET", "path": "/a", "raw_path": b"/a", "query_string": b""}
    scope = {**facts, "headers": [], "scheme": "http", "client": None, "server": None}
    await Forwarder(path)(scope, receive, send)
    return int(answers[0]["status"])


def test_a_request_whose_process_dies_may_have_been_carried_out(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.close()

    async def statuses() -> tuple[int, int]:
        before = await status_of(path)
        async with await asyncio.start_unix_server(dies, path):
            return before, await status_of(path)

    # A client repeats a request after 503, and only after that.
    assert uvloop.run(statuses()) == (503, 502)


def test_as_many_requests_as_come_at_once_wait_for_the_process_that_answers(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def statuses() -> set[int]:
        with listening(path) as answers:
            answers.listen(1)
            requests = [asyncio.create_task(status_of(path)) for _ in range(150)]
            await asyncio.sleep(0)
            async with answering(Answering(), answers, asyncio.Event(), 60):
                return set(await asyncio.gather(*requests))

    assert uvloop.run(statuses()) == {201}


def test_requests_for_a_process_that_takes_none_are_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They tried to connect for as long as it hung, fifty times a second each, also those whose clients had gone."""
    monkeypatch.setattr(forwarding_module, "_CONNECTS_WITHIN_S", 0.5)

    async def all_answered(path: Path) -> list[int | None]:
        async with asyncio.timeout(20):
            return await asyncio.gather(*(status_of(path) for _ in range(3)))

    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as hanging, ExitStack() as waiting:
        hanging.bind(str(path))
        hanging.listen(0)
        with suppress(BlockingIOError):
            while True:
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        assert uvloop.run(all_answered(path)) == [503, 503, 503]


def test_requests_of_processes_that_drain_are_answered_until_these_have_ended(tmp_path: Path) -> None:
    path, draining = tmp_path / "s", [1]
    found: list[int] = []

    async def ends_later() -> None:
        await asyncio.sleep(0.1)
        found.append(await status_of(path))
        draining.clear()

    async def drain() -> None:
        with listening(path) as answers:
            async with answering(Answering(), answers, asyncio.Event(), 60, lambda: len(draining)):
                later = asyncio.create_task(ends_later())
            await later

    uvloop.run(drain())
    assert found == [201]


# --- processes -------------------------------------------------------------------------------------------------------


def post(client: httpx.Client, number: int) -> int:
    """Append a row on a connection of its own; return the status."""
    answer = client.post(
        "/v1/streams/web/tables/clicks", content=b'{"n": %d}\n' % number, headers={**LINES, "Connection": "close"}
    )
    return answer.status_code


def rows_taken(server: Served) -> dict[str, int]:
    """Return how many requests with rows each server process has answered."""
    found = {}
    for process, series in measures_of(Home(server.home)).items():
        requests = series.get("millstream_http_request_seconds", [])
        found[process] = sum(sum(one["counts"]) for one in requests if one["labels"][0] == "POST")
    return found


@pytest.mark.siege
def test_two_processes_serve_a_home_on_one_port_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    with served(web_home(tmp_path / "home", "processes = 2")) as server, server.client() as client:
        role = server_role(2)
        run_folder = Home(server.home).run_folder
        wait_for(lambda: holder(run_folder, role), seconds=180)
        sent = 0

        def both_take_rows() -> bool:
            nonlocal sent
            assert post(client, sent) == 200
            sent += 1
            taken = rows_taken(server)
            return min(taken.get("serve", 0), taken.get("serve-2", 0)) > 0

        wait_for(both_take_rows, seconds=180)
        for _ in range(8):  # whichever process has the connection
            answer = client.get("/v1/streams", headers={"Connection": "close"})
            assert (answer.status_code, answer.json()["streams"]) == (200, ["web"])
        wait_for(
            lambda: 'millstream_process_memory_bytes{process="serve-2"}' in client.get("/metrics").text, seconds=180
        )
        killed = holder(run_folder, role)["pid"]
        file = server.home / "millstream.toml"
        config = file.read_text()
        file.write_text("being edited")
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: [one for one in server.said if one.get("code") == "config"], seconds=180)
        file.write_text(config)
        wait_for(lambda: holder(run_folder, role).get("pid") not in {None, killed}, seconds=180)
        wait_for(both_take_rows, seconds=180)
    assert sorted(row["n"] for row in server.rows()) == list(range(sent))
