"""A home behind an address returns what the home itself returns; errors on the way keep their type."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from tests.app.homes import make_home, wait_for
from tests.app.landed import LandedHome
from tests.app.served import serving
from tests.spark.hand_made import Change, insert
from tests.spark.hand_made import Home as HandMade

import millstream
import millstream.aio
from millstream.app.open_home import OpenHome
from millstream.client.batch_stream import END, Pieces, failed, piece
from millstream.client.remote_home import RemoteHome
from millstream.errors import (
    InvalidQuery,
    LakeError,
    MillstreamError,
    OffsetExpired,
    RemoteError,
    ReplicationError,
    UnknownStream,
    UsageError,
)
from millstream.model.ids import SchemaVersion
from millstream.model.positions import Seq, StreamToken
from millstream.model.records import Op
from millstream.model.schema import Column, TableKind
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n[streams.idle]\n'


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    made = make_home(tmp_path / "web", WEB)
    with millstream.open(made) as opened:
        for number in range(20):
            opened.append("web", "users", [{"id": number % 5, "n": number}, {"id": 100 + number, "n": number}])
            opened.append("web", "clicks", {"number": number, "page": f"/{number}", "tags": ["a", None, str(number)]})
        yield made


@pytest.fixture
def both(home: Path) -> Iterator[tuple[OpenHome, RemoteHome]]:
    with serving(home) as url, millstream.open(home) as here, millstream.connect(url) as there:
        yield here, there


def test_what_is_read_is_the_same_here_and_there(both: tuple[OpenHome, RemoteHome]) -> None:
    here, there = both
    assert there.streams() == here.streams() == ["web"]
    assert there.token("web") == here.token("web")
    assert there.token("web", vector=True) == here.token("web", vector=True)
    records = [row for batch in here.read("web", table="clicks") for row in batch.to_pylist()]
    middle = f"{here.token('web').stream}.s{records[10]['__seq']}"
    for asks in (
        {},
        {"table": "public.users"},
        {"table": "clicks", "after": middle},
        {"upto": middle},
        {"after": here.token("web")},
    ):
        mine, theirs = list(here.read("web", **asks)), list(there.read("web", **asks))
        assert [batch.schema.metadata for batch in theirs] == [batch.schema.metadata for batch in mine]
        assert theirs == mine
    stretches = [list(home.read_latest("web", "users", rows_max=7)) for home in both]
    assert stretches[0] == stretches[1]
    assert len(stretches[0]) > 3
    moment = datetime(2020, 1, 1, tzinfo=UTC)
    merged = [home.merged("web", "users", at=at) for home in both for at in (moment, "2020-01-01", "9000d ago", "now")]
    assert all(rows == merged[0] for rows in merged)
    assert [row["n"] for row in merged[0].to_pylist() if row["id"] < 5] == [15, 16, 17, 18, 19]
    assert [s.get("tokens") for s in there.status()["streams"]] == [s.get("tokens") for s in here.status()["streams"]]


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda home: home.token("shop"), "unknown_stream"),
        (lambda home: list(home.read("web", table="nothing")), "unknown_table"),
        (lambda home: list(home.read("web", table="a.b.c")), "usage"),
        (lambda home: home.follow("web", table=5), "usage"),  # type: ignore[arg-type]
        (lambda home: home.follow("web", table=["clicks", "a.b.c"]), "usage"),
        (lambda home: home.follow("web", table=[]), "usage"),
        (lambda home: list(home.read("web", after="00000000.s1")), "invalid_token"),
        (lambda home: list(home.read("web", upto=f"{home.token('web').stream}.s99999")), "token_from_future"),
        (lambda home: list(home.read_latest("web", "clicks")), "usage"),
        (lambda home: home.merged("web", "nothing"), "unknown_table"),
        (lambda home: home.merged("web", "users", at="soon"), "invalid_time"),
        (lambda home: home.merged("web", "users", at=str(home.token("web"))), "invalid_time"),
        (lambda home: home.merged("web", "users", at=1_790_000_000), "usage"),
        (lambda home: home.merged("web", "users", at=date(2026, 3, 1)), "usage"),
        (lambda home: home.query("select 1", stream="shop"), "unknown_stream"),
        (lambda home: home.query("select * from nothing", stream="web"), "invalid_query"),
        (lambda home: home.query("select 1; select 2", stream="web"), "invalid_query"),
        (lambda home: home.query("select * from read_csv('/etc/passwd')", stream="web"), "invalid_query"),
    ],
)
def test_what_is_refused_is_refused_by_the_same_error(
    both: tuple[OpenHome, RemoteHome], ask: Callable[[OpenHome | RemoteHome], object], error: str
) -> None:
    said = []
    for home in both:
        with pytest.raises(MillstreamError, check=coded(error)) as caught:
            ask(home)
        said.append((type(caught.value), caught.value.as_dict()))
    assert said[0] == said[1]


def test_records_that_were_not_decoded_end_the_read_of_a_table_there_too(tmp_path: Path) -> None:
    path = make_home(tmp_path / "shop", "[streams.shop]\n")
    with closing(HandMade(path)) as made:
        orders = made.table("public.orders", id=pa.int64())
        made.commit(insert(orders, id=1))
        columns = (Column("message", pa.binary()),)
        aside = replace(orders, version=SchemaVersion(9), columns=columns, kind=TableKind.RAW, identity=(), key=())
        made.commit(Change(aside, Op.CREATE, {"message": b"I"}))
        first = StreamToken.scalar(made.stream, Seq(1))
    with serving(path) as url, millstream.open(path) as here, millstream.connect(url) as there:
        said = []
        for home in (here, there):
            found: list[int] = []
            for after in (None, first):
                with pytest.raises(MillstreamError, check=coded("table_quarantined")) as caught:
                    found.extend(
                        n for batch in home.read("shop", table="orders", after=after) for n in batch["id"].to_pylist()
                    )
                said.append((type(caught.value), caught.value.as_dict()))
            with (
                pytest.raises(MillstreamError, check=coded("table_quarantined")) as caught,
                home.follow("shop", table="orders", after=first) as changes,
            ):
                next(changes)
            said.append((type(caught.value), caught.value.as_dict()))
            assert found == [1]
        assert said == said[:1] * 6


def test_a_table_of_all_regions_takes_what_it_may_behind_an_address(tmp_path: Path) -> None:
    home = make_home(tmp_path / "web", WEB + '[http]\nquery_memory_bytes_max = "1MiB"\n')
    with millstream.open(home) as here, serving(home) as url, millstream.connect(url) as there:
        rows = [{"id": number, "text": f"{number:04}" * 100} for number in range(1000)]
        here.append("web", "users", rows[:100])
        assert there.merged("web", "users").to_pylist() == rows[:100]
        here.append("web", "users", rows)
        assert here.merged("web", "users").to_pylist() == rows
        with pytest.raises(LakeError, check=coded("query_memory_full"), match="users"):
            there.merged("web", "users")


def test_what_can_be_no_stream_is_none(home: Path) -> None:
    with serving(home) as url, millstream.connect(url) as there:
        for name in ("../web", "", "web/token?x=", "Web"):
            with pytest.raises(UnknownStream):
                there.token(name)


def test_a_query_is_answered_from_the_lake(tmp_path: Path, postgres: Database) -> None:
    connection = postgres.connect()
    connection.execute("CREATE TABLE orders (id int PRIMARY KEY, total numeric(10, 2), note text)")
    connection.execute("INSERT INTO orders SELECT g, g * 1.25, 'order ' || g FROM generate_series(1, 200000) g")
    landed = LandedHome(tmp_path / "shop", postgres.dsn)
    landed.catch_up()
    with millstream.open(landed.home.path) as here:
        before = here.token("shop")
        connection.execute("DELETE FROM orders WHERE id > 10")
        landed.catch_up()
        with serving(landed.home.path) as url, millstream.connect(url) as there:
            for sql in (
                "select * from public.orders order by id",
                "select sum(total) as t, null as nothing from public.orders",
                "select * from public.orders where false",
                "show tables",
            ):
                assert there.query(sql) == here.query(sql, stream="shop")
            past = there.query("select * from public.orders order by id", as_of=before)
            assert past.num_rows == 200_000
            assert past == here.query("select * from public.orders order by id", as_of=before)
            assert there.query("select count(*) as n from public.orders", as_of=str(before)).to_pylist() == [
                {"n": 200_000}
            ]
            # To other clients it is a plain Arrow stream.
            answer = httpx.post(
                f"{url}/v1/streams/shop/query",
                json={"sql": "select id from public.orders", "as_of": str(before)},
                timeout=60,
            )
            assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"
            assert pa.ipc.open_stream(answer.content).read_all().num_rows == 200_000
            # The query reads the lake and nothing else, and never writes.
            for sql in (
                "copy (select 1) to '/tmp/x.csv'",
                "create table x (a int)",
                "attach 'x.db'",
                "select * from '/etc/hostname'",
            ):
                with pytest.raises(InvalidQuery):
                    there.query(sql)
            # An error in mid-stream reaches the caller with its type.
            with pytest.raises(InvalidQuery, match="Conversion"):
                there.query(
                    "select cast(case when id < 190000 then '1' else note end as int) as x from public.orders order by id",
                    as_of=before,
                )


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that sends prepared answers, one for each connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            for number, answer in enumerate(answers, 1):
                connection, _ = listener.accept()
                if number == len(answers):
                    listener.close()  # a second connection is refused; it needn't wait for an answer
                with connection:
                    heard = b""
                    while b"\r\n\r\n" not in heard:
                        heard += connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=work)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(180)
        assert not thread.is_alive()


def http(body: bytes, *, status: str = "200 OK", kind: str = "application/json", more: str = "", cut: int = 0) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body) + cut}\r\n{more}connection: close\r\n\r\n"
    return head.encode() + body


BATCH = pa.record_batch({"x": [1, 2, 3]})
PIECE = b"".join(piece([BATCH], BATCH.schema))
GONE = OffsetExpired("it has gone", first=7)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (http(PIECE, kind="application/vnd.millstream.batches"), "answer_cut_off"),
        (http(PIECE + END[:2], kind="application/vnd.millstream.batches"), "answer_cut_off"),
        (http(PIECE + PIECE[:50], kind="application/vnd.millstream.batches", cut=50), "answer_cut_off"),
        (http(PIECE + failed(GONE), kind="application/vnd.millstream.batches"), "offset_expired"),
        (http(PIECE + END + PIECE, kind="application/vnd.millstream.batches"), "answer_unreadable"),
        (http(PIECE + b"\x08\x00\x00\x00garbage!", kind="application/vnd.millstream.batches"), "answer_unreadable"),
    ],
)
def test_an_answer_that_is_not_whole_is_never_taken_for_one(answer: bytes, error: str) -> None:
    got: list[pa.RecordBatch] = []
    with answering(answer) as url, millstream.connect(url) as home, pytest.raises(MillstreamError, check=coded(error)):
        got.extend(home.read("web"))
    assert got == [BATCH] or error == "answer_unreadable"


@pytest.mark.parametrize(
    "answer",
    [
        http(b"<html>welcome</html>", kind="text/html"),
        http(b"[1]"),
        http(b"<html>no</html>", status="404 Not Found", kind="text/html"),
        http(b"{}", status="400 Bad Request", kind="application/problem+json"),
        http(b"\xff\xfe", status="400 Bad Request", kind="application/problem+json"),
    ],
)
def test_what_is_not_millstream_is_told_as_that(answer: bytes) -> None:
    with (
        answering(answer) as url,
        millstream.connect(url) as home,
        pytest.raises(RemoteError, check=coded("answer_unreadable")),
    ):
        home.status()


def test_who_is_busy_is_asked_again_and_who_is_not_there_is_not_for_ever() -> None:
    busy = json.dumps({"code": "overloaded", "detail": "full", "hint": "", "details": {}}).encode()
    refusal = http(busy, status="429 Too Many Requests", kind="application/problem+json", more="retry-after: 0\r\n")
    away = http(b"starting", status="503 Service Unavailable", kind="text/plain")
    with answering(refusal, away, http(b'{"streams": ["web"]}')) as url, millstream.connect(url) as home:
        assert home.streams() == ["web"]
    with millstream.connect(url, timeout_s=0.3) as home, pytest.raises(RemoteError, check=coded("server_unreachable")):
        home.streams()
    old = json.dumps({"code": "replica_too_stale", "detail": "1 h old", "hint": "", "details": {}}).encode()
    stale = http(old, status="503 Service Unavailable", kind="application/problem+json", more="retry-after: 1\r\n")
    with (
        answering(stale) as url,
        millstream.connect(url) as home,
        pytest.raises(ReplicationError, check=coded("replica_too_stale")),
    ):
        home.streams()  # a second request would get no answer
    for wrong in ("ftp://127.0.0.1", "127.0.0.1:8787", "http://", "http://127.0.0.1?x=1"):
        with pytest.raises(UsageError):
            millstream.connect(wrong)


def test_an_answer_in_parts_of_any_size_is_the_same() -> None:
    whole = PIECE * 3 + END
    for size in (1, 2, 3, 7, 64, 1000, len(whole)):
        pieces = Pieces()
        found = [t for at in range(0, len(whole), size) for t in pieces.feed(whole[at : at + size])]
        assert [table.to_batches()[0] for table in found] == [BATCH] * 3
        assert pieces.ended


@pytest.mark.siege
def test_readers_that_go_away_are_let_go_and_too_many_are_told(home: Path) -> None:
    with millstream.open(home) as opened:
        for _ in range(
            4
        ):  # 40 MB: more than fits between the two ends, so that a caller that stops reading stops the server's reader
            opened.append("web", "big", [{"x": "." * 1000, "n": n} for n in range(10_000)])
    with serving(home) as url, millstream.connect(url, timeout_s=30.0) as there:
        half_read: list[socket.socket] = []
        # All at once: an answer that isn't read is given up after a minute, and a busy machine begins few in that time.
        for _ in range(50):
            connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET /v1/streams/web/records?table=big HTTP/1.1\r\nhost: localhost\r\n\r\n")
            half_read.append(connection)
        statuses = [connection.recv(12) for connection in half_read]
        assert set(statuses) == {b"HTTP/1.1 200", b"HTTP/1.1 429"}
        for connection in half_read:
            connection.close()
        wait_for(lambda: sum(batch.num_rows for batch in there.read("web", table="big")) == 40_000)


CLIENT_ONLY = """
import sys
for name in ("sqlalchemy", "alembic", "pydantic", "pydantic_settings", "rich", "structlog", "fastapi", "starlette", "httptools", "uvloop", "psycopg", "numba",
             "prometheus_client", "duckdb", "deltalake", "pyspark", "pandas", "polars"):
    sys.modules[name] = None
import millstream
with millstream.connect(sys.argv[1]) as home:
    print(home.streams(), sum(batch.num_rows for batch in home.read("web")), len(list(home.read_latest("web", "users"))))
    {append}
"""


@pytest.mark.long
def test_a_client_needs_the_core_and_its_extra_alone(home: Path) -> None:
    with serving(home) as url:
        script = CLIENT_ONLY.replace("{append}", "")
        done = subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["['web']", "60", "1"]), done.stderr


def test_without_httpx_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['httpx'] = None\nimport millstream\ntry:\n    millstream.connect('http://127.0.0.1:1')\nexcept millstream.errors.UsageError as error: print(error.code, error.details['extra'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("missing_extra client\n", "")


def test_an_answer_that_fails_amid_a_piece_has_its_error() -> None:
    batch = pa.record_batch({"text": ["x" * 1000] * 1000})
    first, *rest = piece([batch], batch.schema)
    assert rest
    with pytest.raises(OffsetExpired):
        list(Pieces().feed(first + failed(GONE)))
    with pytest.raises(RemoteError, check=coded("answer_unreadable"), match="lacks its last part"):
        list(Pieces().feed(first + END))
    (table,) = Pieces().feed(first + b"".join(rest) + END)
    assert table.to_batches() == [batch]


@contextmanager
def numbering() -> Iterator[str]:
    """A server whose only stream is named by the number of the caller's connection, which it keeps."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool, ExitStack() as all_of_them:

        def answer(connection: socket.socket, number: int) -> None:
            body = json.dumps({"streams": [str(number)]}).encode()
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            with suppress(OSError):
                while connection.recv(65536):
                    connection.sendall(head.encode() + body)

        def accept() -> None:
            with suppress(OSError):
                for number in itertools.count(1):
                    connection = all_of_them.enter_context(listener.accept()[0])
                    all_of_them.callback(connection.shutdown, socket.SHUT_RDWR)
                    pool.submit(answer, connection, number)

        pool.submit(accept)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("is_async", [False, True], ids=["connect", "aio.connect"])
def test_a_forked_child_has_connections_of_its_own(*, is_async: bool) -> None:
    """Regression: parent and child sent on one connection, and each got the other's answers, to appends too."""
    with numbering() as url, asyncio.Runner() as runner:
        there = millstream.aio.connect(url) if is_async else millstream.connect(url)

        def streams(runner: asyncio.Runner) -> Any:
            return runner.run(there.streams()) if is_async else there.streams()

        assert streams(runner) == ["1"]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with asyncio.Runner() as own:
                    status = int(streams(own) != ["2"] or streams(own) != ["2"])
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert streams(runner) == ["1"]
        runner.run(there.close()) if is_async else there.close()
