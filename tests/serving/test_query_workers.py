"""Queries run in processes of their own: if DuckDB exceeds its limits, that process ends and the server goes on."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import httpx
import psutil
import pytest
from tests.app.homes import make_home, wait_for
from tests.app.served import serving

import millstream
from millstream.errors import InvalidQuery, LakeError
from millstream.home.home import Home
from millstream.lake.query.query_limits import QueryBounds
from millstream.serving.queries.worker_pool import AskedQuery, Asking, QueryWorkers
from millstream.testing.errors import coded

MEMORY = 64 << 20
PLANS = f"select {'.'.join('a' * 20_000)}"
"""Takes more than a minute of planning, in which DuckDB heeds no interrupt."""
_LISTED = ",".join(map(str, range(100)))
BOMB = (
    f"from (from (from (select range a, 1 b, 1 x from range(2)) pivot (sum(x) for a in ({_LISTED}) b in ({_LISTED})))"
    ' pivot (sum(columns(*)) for "0_0" in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)))'
)
"""A plan of more than a gigabyte, which DuckDB doesn't count against its memory."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    made = make_home(tmp_path_factory.mktemp("web"), "[streams.web]\n")
    with millstream.open(made) as opened:
        opened.append("web", "clicks", [{"n": 1}])
    return Home(made)


@pytest.fixture
def workers(home: Home) -> Iterator[QueryWorkers]:
    with closing(QueryWorkers(home, QueryBounds(MEMORY, 64 << 20, 60, home.queries_folder))) as made:
        yield made
    assert not children()


def children() -> list[psutil.Process]:
    """Return this process's processes for queries."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "millstream.serving.queries.worker" in child.cmdline():
                found.append(child)
    return found


def ask(workers: QueryWorkers, sql: str) -> AskedQuery:
    return workers.ask(Asking("web", sql, None, lake_only=False, in_pieces=True))


def answered(workers: QueryWorkers, sql: str = "select 42 as n") -> bytes:
    return b"".join(ask(workers, sql).parts())


def test_one_process_answers_one_query_after_the_other(workers: QueryWorkers) -> None:
    first = answered(workers)
    (child,) = children()
    assert answered(workers) == first
    with pytest.raises(InvalidQuery, match="nowhere"):
        answered(workers, "from nowhere")
    assert answered(workers) == first
    assert children() == [child]
    child.kill()
    child.wait()
    assert answered(workers) == first, "it was gone when the query came"
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lambda _: answered(workers), range(8))) == [first] * 8
    assert not list(workers.bounds.folder.iterdir())


def test_a_query_that_is_given_up_ends_though_its_process_takes_no_request(workers: QueryWorkers) -> None:
    """Its process was known only once it had taken the request: a process that hung before held the query for ever."""
    answered(workers)
    (child,) = children()
    child.suspend()
    asked = ask(workers, "select 42 as n")
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(lambda: list(asked.parts()))
        try:
            wait_for(lambda: any(workers.bounds.folder.iterdir()))
            asked.give_up()
            with pytest.raises(LakeError, match="cancelled"):
                answer.result(30)
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.mark.long
def test_plans_that_take_gigabytes_are_refused_within_the_bound(workers: QueryWorkers) -> None:
    answered(workers)
    (child,) = children()
    begun = child.memory_info().rss
    peak = begun
    with ThreadPoolExecutor() as threads:
        bomb = threads.submit(answered, workers, BOMB)
        while not bomb.done():
            try:
                peak = max(peak, child.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(0.01)
        with pytest.raises(LakeError, check=coded("query_memory_full")) as caught:
            bomb.result()
    assert caught.value.details["size_max"] == MEMORY
    if sys.platform == "linux":
        assert peak - begun < 2 * MEMORY + (640 << 20)
    assert answered(workers)


@pytest.mark.long
def test_a_value_that_takes_gigabytes_is_refused(workers: QueryWorkers) -> None:
    with pytest.raises(LakeError, check=coded("query_memory_full")):
        answered(workers, "select length(repeat('x', 4000000000)) as n")
    assert answered(workers)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "sql",
    [
        "select error(repeat('x', 8000000))",
        "select cast(repeat('x', 8000000) as int)",
        f"from read_text('lake://{'x' * 900_000}')",
    ],
)
def test_a_message_with_a_value_of_megabytes_is_shortened(workers: QueryWorkers, sql: str) -> None:
    """The server holds the whole message, and so does the caller."""
    with pytest.raises(InvalidQuery) as caught:
        answered(workers, sql)
    assert 1000 < len(caught.value.message) < 20_000


@pytest.mark.parametrize("sql", [PLANS, "select count(*) from range(1000000000000) t(r) where hash(r) = 1"])
@pytest.mark.siege
def test_a_query_ends_with_its_time_even_while_it_is_planned(home: Home, sql: str) -> None:
    # Long enough for a process to start on a busy machine, and far shorter than the plan takes.
    with closing(QueryWorkers(home, QueryBounds(MEMORY, 64 << 20, 10, home.queries_folder))) as workers:
        answered(workers)
        began_s = time.monotonic()
        with pytest.raises(LakeError, check=coded("query_timeout"), match="within 10 s"):
            answered(workers, sql)
        assert time.monotonic() - began_s < 25
        assert answered(workers)


@pytest.mark.long
def test_a_query_that_is_given_up_ends_whatever_it_does(workers: QueryWorkers) -> None:
    for sql in (PLANS, "select r from range(1000000000000) t(r)"):
        asked = ask(workers, sql)
        with ThreadPoolExecutor() as threads:
            ended = threads.submit(lambda asked=asked: sum(map(len, asked.parts())))
            wait_for(lambda: children() and any(workers.bounds.folder.iterdir()))
            asked.give_up()
            with pytest.raises(LakeError, match="cancelled"):
                ended.result(20)
    # And one whose answer is left unread.
    parts = ask(workers, "select r from range(1000000000000) t(r)").parts()
    assert next(parts)
    parts.close()
    assert not children()
    assert not list(workers.bounds.folder.iterdir())


@pytest.mark.long
def test_a_crash_is_an_error_of_the_query_alone(workers: QueryWorkers) -> None:
    parts = ask(workers, "select r from range(1000000000000) t(r)").parts()
    assert next(parts)
    (child,) = children()
    child.send_signal(signal.SIGSEGV)
    with pytest.raises(LakeError, check=coded("query_crashed")) as caught:
        list(parts)
    assert caught.value.details["status"] == -signal.SIGSEGV
    assert answered(workers)


def test_a_crash_leaves_no_core(workers: QueryWorkers) -> None:
    """A core file would hold tables and secrets, and fill the disk with each crash."""
    answered(workers)
    (child,) = children()
    if sys.platform == "linux":
        assert child.rlimit(psutil.RLIMIT_CORE) == (0, 0)


ENDS = """
import os, signal, sys
from pathlib import Path
import psutil
from millstream.home.home import Home
from millstream.serving.queries.worker_pool import Asking, QueryWorkers
from millstream.lake.query.query_limits import QueryBounds

home = Home(Path(sys.argv[1]))
workers = QueryWorkers(home, QueryBounds(64 << 20, 64 << 20, 600, home.queries_folder))
parts = workers.ask(Asking("web", "select r from range(1000000000000) t(r)", None, lake_only=False, in_pieces=True)).parts()
next(parts)
print(psutil.Process().children()[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_workers_end_with_their_server(home: Home) -> None:
    """However the server ends, and whatever the workers do."""
    server = subprocess.run([sys.executable, "-c", ENDS, str(home.path)], stdout=subprocess.PIPE, check=False)
    assert server.returncode == -signal.SIGKILL
    wait_for(lambda: not psutil.pid_exists(int(server.stdout)), seconds=30)


@pytest.mark.long
def test_who_takes_nothing_is_let_go_when_the_time_is_over(home: Home) -> None:
    (home.path / "millstream.toml").write_text('[streams.web]\n[http]\nquery_timeout = "5s"\nqueries_max = 1\n')
    body = json.dumps({"sql": "select r, md5(r::varchar) m from range(1000000000000) t(r)"}).encode()
    head = f"POST /v1/streams/web/query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with serving(home.path) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as lazy:

        def is_answered() -> bool:
            answer = httpx.post(f"{url}/v1/streams/web/query", json={"sql": "select 1"}, timeout=60)
            return answer.status_code == 200

        # On a busy machine the first query's time may be over before its process has begun.
        wait_for(is_answered, seconds=90)
        lazy.sendall(head.encode() + body)
        began_s = time.monotonic()
        wait_for(lambda: any(home.queries_folder.iterdir()))
        wait_for(is_answered, seconds=90)
        assert time.monotonic() - began_s > 1.5
