"""`/tail`: what a client gets, where it resumes, and what becomes of one that doesn't read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.app.homes import make_home, run
from tests.app.served import serving
from tests.serving.serving_process import served, web_home
from tests.serving.tail_client import Event, refusal, tailing

import millstream
from millstream.home.home import Home
from millstream.model.access import Rights
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.serving.access import Access
from millstream.serving.application import Application
from millstream.serving.tail import endpoint
from millstream.serving.tail.endpoint import STALLED_S, Tails
from millstream.wal.segment_deletion import drop_segments

WEB = "[streams.web]\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = make_home(tmp_path / "web", WEB)
    for number in (-1, 0):  # each process that writes begins a segment
        with millstream.open(folder) as here:
            here.append("web", "clicks", [{"n": number, "who": "nobody"}])
    return folder


@pytest.fixture
def url(home: Path) -> Iterator[str]:
    with serving(home) as address:
        yield address


def append(url: str, table: str, rows: list[dict[str, Any]]) -> str:
    answer = httpx.post(f"{url}/v1/streams/web/tables/{table}", json=rows, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["token"])


def numbers(events: list[Event]) -> list[int]:
    return [event.data["row"]["n"] for event in events]


def test_records_come_as_wal_cat_prints_them_from_now_on(url: str, home: Path) -> None:
    with tailing(url) as events:
        assert events.response.headers["content-type"].startswith("text/event-stream")
        token = append(url, "clicks", [{"n": 1}, {"n": 2}])
        found = events.take(2)
        assert events.comments == 1
    printed = run(home, "wal", "cat", "--format", "ndjson").stdout.splitlines()
    assert [event.data for event in found] == [json.loads(line) for line in printed[-2:]]
    assert found[1].id == token
    with tailing(url, after=found[0].id) as again:
        assert numbers(again.take(2)) == [1, 2]


def test_last_event_id_wins_and_resuming_repeats_only_a_begun_operation(url: str) -> None:
    start = append(url, "clicks", [{"n": 1}])
    append(url, "clicks", [{"n": 2}, {"n": 3}, {"n": 4}])
    append(url, "clicks", [{"n": 5}])
    with tailing(url, after=start) as events:
        found = events.take(4)
    assert numbers(found) == [2, 3, 4, 5]
    assert [event.id == start for event in found] == [True, True, False, False]
    for event, expected in zip(found, ([2, 3, 4, 5], [2, 3, 4, 5], [5], []), strict=True):
        last = append(url, "marks", [{"n": -7}])
        with tailing(url, last=event.id, after="not read", table="clicks") as again:
            append(url, "clicks", [{"n": 99}])
            assert numbers(again.take(len(expected) + 1))[: len(expected)] == expected
        with tailing(url, last=last, table="clicks") as again:
            assert numbers(again.take(1)) == [99]


def test_tables_may_be_repeated_and_come_later(url: str) -> None:
    with tailing(url, table=["late", "public.later"]) as events:
        append(url, "clicks", [{"n": 1}])
        append(url, "late", [{"n": 2}])
        append(url, "clicks", [{"n": 3}])
        append(url, "later", [{"n": 4}])
        assert numbers(events.take(2)) == [2, 4]


def test_a_stream_without_a_log_is_waited_for(tmp_path: Path) -> None:
    with serving(make_home(tmp_path / "new", WEB)) as url, tailing(url, where="n > 1") as events:
        append(url, "clicks", [{"n": 1}, {"n": 2}])
        token = append(url, "clicks", [{"n": 3}])
        found = events.take(2)
        assert (numbers(found), found[1].id) == ([2, 3], token)


def test_where_leaves_records_out(url: str) -> None:
    with tailing(url, where="who = 'x' or n > 8") as events:
        append(url, "clicks", [{"n": 1, "who": "x"}, {"n": 2, "who": "y"}, {"n": 3, "who": None}])
        token = append(url, "clicks", [{"n": 4, "who": "y"}, {"n": 9, "who": None}, {"n": 5, "who": "y"}])
        append(url, "bare", [{"other": 1}])  # lacks both columns: null
        append(url, "clicks", [{"n": 6, "who": "x"}])
        found = events.take(3)
    assert numbers(found) == [1, 9, 6]
    # The last record that is delivered of an operation bears the operation's own token.
    assert found[1].id == token


def test_refusals(url: str, home: Path) -> None:
    token = append(url, "clicks", [{"n": 1}])
    stream = token.partition(".")[0]
    assert refusal(url, after=f"{stream}.s99999999999") == (409, "token_from_future")
    assert refusal(url, after="nothing") == (400, "invalid_token")
    assert refusal(url, where="n >") == (422, "invalid_value")
    assert refusal(url, where="") == (422, "invalid_value")
    assert refusal(url, where="n > " * 2000) == (422, "invalid_value")
    assert refusal(url, where="n = 'text'") == (422, "invalid_value")
    assert refusal(url, where="n = 'text'", table="clicks") == (422, "invalid_value")
    append(url, "marks", [{"m": 1}])
    assert refusal(url, where="m = 1", table="clicks") == (422, "invalid_value")
    assert refusal(url, where="m = 1 or n = 1 or no = 1", table=["clicks", "marks", "later"]) == (422, "invalid_value")
    for where, table in (("m = 1 or n = 1", ["clicks", "marks"]), ("no = 1", "later"), ("no = 1", [])):
        with tailing(url, where=where, table=table) as events:
            assert events.response.status_code == 200
    assert refusal(url, "nosuch", where="n >") == (404, "unknown_stream")
    with tailing(url, where="n = 'text'", table="later") as events:
        assert events.response.status_code == 200
    folder = str(Home(home).wal_folder("web"))
    assert drop_segments(folder, Retention(), RetentionBounds(age_s=1e9, size_bytes=0, bytes_max=1 << 40)).dropped
    assert refusal(url, after=f"{stream}.s0") == (410, "offset_expired")
    assert refusal(url, last=f"{stream}.s0", after=token) == (410, "offset_expired")


@pytest.mark.long
def test_a_client_that_does_not_read_is_dropped_and_others_go_on(url: str) -> None:
    place = urlsplit(url)
    with contextlib.closing(socket.socket()) as idle, tailing(url, table="clicks") as events:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect((place.hostname, place.port))
        idle.sendall(b"GET /v1/streams/web/tail?table=clicks HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert idle.recv(1) == b"H"
        for number in range(16):
            append(url, "clicks", [{"n": number, "who": "x" * (1 << 20)}])
            assert numbers(events.take(1)) == [number]
        time.sleep(STALLED_S + 2)
        idle.settimeout(60)
        received = received_until_end(idle)
        assert len(received) < 12 << 20
        assert not received.endswith(b"0\r\n\r\n")  # cut off, not ended in order
        append(url, "clicks", [{"n": 77}])
        assert numbers(events.take(1)) == [77]


def test_many_clients_that_read_nothing_share_the_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a mebibyte, however many there were: a token to read took all memory."""
    monkeypatch.setattr(endpoint, "ALL_BYTES_MAX", 1 << 20)
    with millstream.open(home) as here:
        for _ in range(20):
            here.append("web", "clicks", [{"n": n, "who": "x" * 3000} for n in range(100)])
        start = f"{str(here.token('web')).partition('.')[0]}.s0"

    async def fill() -> list[int]:
        tails = Tails(Home(home))
        (of_stream, *_), made = zip(*(tails._open("web", None, None, start) for _ in range(8)), strict=True)
        loop, enough, look, looks = asyncio.get_running_loop(), asyncio.Event(), of_stream._look, itertools.count()

        def counted(*args: Any) -> bool:
            if next(looks) == 20:
                loop.call_soon_threadsafe(enough.set)
            return look(*args)

        monkeypatch.setattr(of_stream, "_look", counted)
        with contextlib.ExitStack() as attached, contextlib.closing(tails):
            for tail in made:
                attached.enter_context(tails.attached(of_stream, tail))
            async with asyncio.timeout(60):
                await enough.wait()
            return [tail.buffered_bytes for tail in made]

    filled = asyncio.run(fill())
    assert min(filled) >= 128 << 10
    assert max(filled) < 256 << 10


def received_until_end(connection: socket.socket) -> bytes:
    taken = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            taken += part
    return bytes(taken)


@pytest.mark.long
def test_a_client_far_behind_gets_everything(url: str) -> None:
    start = append(url, "clicks", [{"n": -1}])
    for number in range(20):
        append(url, "clicks", [{"n": number * 100 + i, "who": "x" * 3000} for i in range(100)])
    with tailing(url, after=start) as events:
        found = []
        while len(found) < 2000:
            found += events.take(200)
            time.sleep(0.05)
    assert numbers(found) == list(range(2000))


def test_tails_end_with_the_server(home: Path) -> None:
    with serving(home) as url:
        tail = tailing(url)
        events = tail.__enter__()
        append(url, "clicks", [{"n": 1}])
        assert numbers(events.take(1)) == [1]
        began_s = time.monotonic()
    assert events.rest() == []
    assert time.monotonic() - began_s < 20
    tail.__exit__(None, None, None)


def test_a_comment_comes_every_while_and_a_revoked_token_ends_the_tail(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.serving.tail.endpoint.COMMENT_EVERY_S", 0.5)
    make_home(home, WEB + "[http]\ntokens_required = true\n")
    made = Home(home)
    with made.open_catalog() as catalog:
        reads = catalog.create_access_token(Rights.parse(["web=read"]), name="reads")[1]
        writes = catalog.create_access_token(Rights.parse(["web=write"]), name="writes")[1]
    with serving(home, Application(made, Access.of_home(made))) as url:

        def status(token: str | None) -> int:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            with httpx.stream("GET", f"{url}/v1/streams/web/tail", headers=headers, trust_env=False) as answer:
                return answer.status_code

        assert [status(token) for token in (None, writes, reads)] == [401, 403, 200]
        with httpx.stream(
            "GET",
            f"{url}/v1/streams/web/tail",
            headers={"Authorization": f"Bearer {reads}"},
            timeout=30,
            trust_env=False,
        ) as answer:
            lines = answer.iter_lines()
            comments = 0
            while comments < 3:
                comments += next(lines).startswith(":")
            with made.open_catalog() as catalog:
                catalog.revoke_access_token("reads")
            ended = list(lines)
    assert "event: problem" in ended


@pytest.mark.long
def test_a_killed_server_is_resumed_from_the_last_event(tmp_path: Path) -> None:
    home = web_home(tmp_path / "web")
    seen: list[Event] = []
    sent = 0
    for turn in range(3):
        with served(home) as running:
            if not seen:
                running.post("clicks", [{"n": -1}])
                with millstream.connect(running.url) as remote:
                    start = str(remote.token("web"))
            with tailing(running.url, last=seen[-1].id if seen else start) as events:
                for _ in range(5):
                    running.post("clicks", [{"n": sent + i} for i in range(3)])
                    sent += 3
                wanted = sent - turn  # leaves one operation begun
                while not seen or seen[-1].data["row"]["n"] < wanted - 2:
                    seen += events.take(1)
                running.process.send_signal(signal.SIGKILL)
                running.process.wait(60)
    with served(home) as running, tailing(running.url, last=seen[-1].id) as events:
        running.post("clicks", [{"n": 1000}])
        while seen[-1].data["row"]["n"] != 1000:
            seen += events.take(1)
    places = [(event.data["epoch"], event.data["offset"]) for event in seen]
    assert [n for i, n in enumerate(numbers(seen)) if places[i] not in places[:i]] == [*range(sent), 1000]
