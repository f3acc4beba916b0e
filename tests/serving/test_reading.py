"""Answers of reads stay within their limits, and release their resources however they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from tests.app.homes import make_home, wait_for
from tests.app.landed import LandedHome
from tests.app.served import serving
from tests.serving.servers import served

import millstream
from millstream.client.batch_stream import Pieces
from millstream.errors import LakeError, Unauthenticated
from millstream.home.home import Home
from millstream.model.access import Rights
from millstream.serving import http_reads
from millstream.serving.access import Access
from millstream.serving.application import Application
from millstream.serving.http_reads import _Making
from millstream.testing.errors import coded
from millstream.workers import Pool


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = make_home(tmp_path / "web", "[streams.web]\n")
    with millstream.open(made) as opened:
        opened.append("web", "clicks", [{"n": n} for n in range(1000)])
    return made


def test_a_caller_that_goes_away_leaves_no_stack_in_the_log() -> None:
    """The error that ends the work of an answer was logged as one that nothing had retrieved."""
    begun, given_up, logged = threading.Event(), threading.Event(), []

    def parts() -> Iterator[bytes]:
        begun.set()
        assert given_up.wait(60)
        raise LakeError("the query was cancelled")
        yield b""

    async def go_away() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context))
        making = _Making(parts(), threads, given_up.set)
        asking = asyncio.create_task(making.next())
        assert await asyncio.to_thread(begun.wait, 60)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await making.close()
        del making, asking
        gc.collect()

    with Pool(1, thread_name_prefix="reading") as threads:
        asyncio.run(go_away())
    assert logged == []


def scope_of_records(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """Return the ASGI scope of a request for the records of a table."""
    path = "/v1/streams/web/records"
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"table=clicks",
        "headers": [(b"host", b"127.0.0.1"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }


def test_callers_that_go_before_the_first_byte_is_sent_leave_no_answer_behind(home: Path) -> None:
    """The producer had started, its sender hadn't: it never ended, and after 32 such calls every call hung."""

    async def ask(*, goes: bool) -> int:
        heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        heard.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        statuses: list[int] = []

        async def send(message: dict[str, Any]) -> None:
            if goes:
                raise ConnectionResetError
            statuses.extend([message["status"]] if "status" in message else [])

        scope = scope_of_records()
        await serves(scope, heard.get, send)
        return statuses[0]

    async def play() -> int:
        for _ in range(40):
            with contextlib.suppress(ConnectionResetError):
                await ask(goes=True)
        return await ask(goes=False)

    with contextlib.closing(Application(Home(home), Access.of_home(Home(home)))) as application:
        serves = application.asgi()
        assert asyncio.run(play()) == 200


def received(application: Application, token: str, after_first: Callable[[], object]) -> int:
    """Return the number of pieces in an answer, whose caller does something once it has the first of them."""
    bodies: list[bytes] = []

    async def ask() -> None:
        heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        heard.put_nowait({"type": "http.request", "body": b"", "more_body": False})

        async def send(message: dict[str, Any]) -> None:
            if body := message.get("body", b""):
                bodies.append(body)
                if len(bodies) == 1:
                    after_first()

        scope = scope_of_records((b"authorization", f"Bearer {token}".encode()))
        await application.asgi()(scope, heard.get, send)

    asyncio.run(ask())
    return len(list(Pieces().feed(b"".join(bodies))))


def test_an_answer_ends_once_its_caller_s_token_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that read slowly got all records of the log, whatever became of its token."""
    monkeypatch.setattr(http_reads, "FRESH_S", 0.0)
    home = Home(make_home(tmp_path / "web", "[streams.web]\n[http]\ntokens_required = true\n"))
    home.prepare()
    with millstream.open(home.path) as opened:
        for number in range(3):  # a column each time: pieces of their own
            opened.append("web", "clicks", {f"c{number}": number})
    with home.open_catalog() as catalog:
        token = catalog.create_access_token(Rights.parse(["web=read"]), name="brief")[1]

    with contextlib.closing(Access.of_home(home)) as access, contextlib.closing(Application(home, access)) as app:
        assert received(app, token, lambda: None) == 3
        with home.open_catalog() as catalog:

            def revoke() -> None:
                catalog.revoke_access_token("brief")
                access._book.refresh(since_s=time.monotonic())

            with pytest.raises(Unauthenticated):
                received(app, token, revoke)


BOUNDS = """
[streams.web]
[streams.web.keys]
"public.users" = ["id"]
[http]
query_memory_bytes_max = "16MiB"
query_spill_bytes_max = "8MiB"
query_timeout = "10m"
queries_max = 2
"""
ENDLESS = "select count(*) from range(1000000000000) t(r) where hash(r) = 1"
SORTED = "select m from (select md5(r::varchar) m from range({}) t(r)) order by m"


def asks(sql: str) -> bytes:
    """Return a request's bytes."""
    body = json.dumps({"sql": sql}).encode()
    head = f"POST /v1/streams/web/query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.long
def test_a_query_takes_what_it_may_and_the_server_goes_on(tmp_path: Path) -> None:
    made = make_home(tmp_path / "web", BOUNDS)
    queries = made / "data/queries"
    left_behind = queries / "millstream-query-of-one-that-was-killed"
    left_behind.mkdir(parents=True)
    with served(made) as server, millstream.connect(f"http://{server.address}") as there:
        assert not left_behind.exists()
        there.append("web", "users", {"id": 1})
        for sql, code, size in (
            ("select array_agg(r) from range(10000000) t(r)", "query_memory_full", 16 << 20),
            (SORTED.format(1_000_000), "query_spill_full", 8 << 20),
        ):
            with pytest.raises(LakeError, check=coded(code)) as caught:
                there.query(sql, stream="web")
            assert caught.value.details["size_max"] == size
            assert "[http] query_" in caught.value.hint
        assert there.query(SORTED.format(100_000), stream="web").num_rows == 100_000
        # Two at a time; a third is refused.
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as one, socket.create_connection((host, int(port))) as two:
            one.sendall(asks(ENDLESS))
            two.sendall(asks("select r from range(1000000000000) t(r)"))
            wait_for(lambda: len(list(queries.iterdir())) == 2)
            refused = httpx.post(f"http://{server.address}/v1/streams/web/query", json={"sql": "select 1"}, timeout=60)
            assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
            assert "queries_max" in refused.json()["hint"]
            # Requests without SQL are still answered.
            assert [batch.num_rows for batch in there.read("web")] == [1]
        # A caller that leaves leaves no query running, whether its answer has begun or not.
        wait_for(lambda: not list(queries.iterdir()))
        assert there.query("select 1 as one", stream="web").to_pylist() == [{"one": 1}]


def test_who_may_only_read_writes_nothing_into_the_lake(tmp_path: Path) -> None:
    """A statement that contained another one as text replaced a commit of a table's log, and with it the table."""
    made = make_home(
        tmp_path / "shop", '[streams.shop.keys]\n"public.users" = ["id"]\n[http]\ntokens_required = true\n'
    )
    with millstream.open(made) as opened:
        opened.append("shop", "users", [{"id": n} for n in range(3)])
    landed = LandedHome(made, None)
    landed.land()
    with landed.home.open_catalog() as catalog:
        token = catalog.create_access_token(Rights.parse(["shop=read"]))[1]
    (log,) = (made / "lake").rglob("current/public.users/_delta_log")
    before = {file.name: file.read_bytes() for file in log.iterdir()}
    with serving(made) as url, httpx.Client(timeout=60, headers={"Authorization": f"Bearer {token}"}) as caller:
        for name in (*before, f"{len(before):020}.json"):
            copy = f"with x as (copy (select 1 as q) to ''{log / name}'' (format json)) from x"
            sql = f"from json_execute_serialized_sql(json_serialize_sql('{copy}'))"
            for put in (sql, "from query('{}')".format(sql.replace("'", "''"))):
                answer = caller.post(f"{url}/v1/streams/shop/query", json={"sql": put})
                assert (answer.status_code, answer.json()["code"]) == (400, "invalid_query"), answer.text
        assert {file.name: file.read_bytes() for file in log.iterdir()} == before
        answer = caller.post(f"{url}/v1/streams/shop/query", json={"sql": "select count(*) as n from public.users"})
        assert pa.ipc.open_stream(answer.content).read_all().to_pylist() == [{"n": 3}]


@pytest.mark.long
def test_a_query_has_its_time(home: Path) -> None:
    text = (home / "millstream.toml").read_text()
    (home / "millstream.toml").write_text(f'{text}[http]\nquery_timeout = "800ms"\n')
    with serving(home) as url, millstream.connect(url) as there:
        refused = httpx.post(f"{url}/v1/streams/web/query", json={"sql": ENDLESS}, timeout=60)
        assert (refused.status_code, refused.json()["code"]) == (422, "query_timeout")
        assert "[http] query_timeout" in refused.json()["hint"]
        # Also in the middle of an answer.
        with pytest.raises(LakeError, check=coded("query_timeout"), match=r"0\.8 s"):
            there.query("select r from range(1000000000000) t(r) where hash(r) % 1000 = 1", stream="web")


@pytest.mark.long
def test_who_has_heard_the_end_of_an_answer_finds_its_place_free(home: Path) -> None:
    """The place was released a moment later: a caller with one query at a time was sometimes refused."""
    text = (home / "millstream.toml").read_text()
    (home / "millstream.toml").write_text(f"{text}[http]\nqueries_max = 1\n")
    with serving(home) as url, httpx.Client(timeout=60) as caller:
        for kind in ("application/vnd.millstream.batches", "application/vnd.apache.arrow.stream") * 10:
            answer = caller.post(f"{url}/v1/streams/web/query", json={"sql": "select 1"}, headers={"accept": kind})
            assert answer.status_code == 200, answer.text


def test_what_became_of_rows_is_told_in_stretches_of_a_size(tmp_path: Path) -> None:
    """The records of one operation aren't split: an operation that is too large is refused, by the key's name."""
    made = make_home(tmp_path / "web", BOUNDS.replace("16MiB", "4MiB"))
    with millstream.open(made) as here:
        for n in range(20):
            here.append("web", "users", [{"id": n * 100 + k, "text": "." * 1000} for k in range(100)])
        with serving(made) as url, millstream.connect(url) as there:
            expected = {row["id"] for batch in here.read("web") for row in batch.to_pylist()}
            stretches = list(there.read_latest("web", "users"))
            assert {row["id"] for one in stretches for row in one.rows.to_pylist()} == expected
            assert len(stretches) > 1, "compressed they have room in one"
            here.append("web", "users", [{"id": k, "text": "." * 1000} for k in range(3000)])
            with pytest.raises(LakeError, check=coded("query_memory_full"), match="more than 1048576 bytes"):
                list(there.read_latest("web", "users"))
            assert len(list(here.read_latest("web", "users"))) == 1
