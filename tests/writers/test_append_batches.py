"""Batches of requests: each is an operation with an outcome of its own, and a refused one doesn't affect the others."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import make_home

import millstream
from millstream.app.open_home import home_appender
from millstream.errors import IngestError, InvalidValue, MillstreamError
from millstream.home.home import Home
from millstream.ingest.append_client import AppendClient, AsyncAppendClient
from millstream.ingest.append_requests import REQUESTS_MAX, WRITE_ID_BYTES_MAX
from millstream.ingest.python_rows import table_of
from millstream.model.operations import Appended
from millstream.model.writes import AppendBatch, WriteId
from millstream.testing.errors import coded
from millstream.writers.home_appender import HomeAppender, append_socket

WEB = '[streams.web]\nlog.shards = 2\n[streams.web.keys]\n"public.users" = ["id"]\n'

Append = Callable[[AppendBatch], list[Appended | MillstreamError]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", WEB)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Append]]:
    """Ways to append to a home that has leftovers of other tests."""
    with every_way(make_home(tmp_path_factory.mktemp("shared") / "web", WEB)) as ways:
        yield ways


@contextmanager
def every_way(home: Path) -> Iterator[dict[str, Append]]:
    """Appenders in this process, through its socket, and both by tasks."""
    appender = home_appender(Home(home))
    try:
        appender.append_batch("web", batch_of("warm", [1], [1]), deadline_s=5)
        path = append_socket(Home(home), None)
        client = AppendClient(path)

        async def by_task(batch: AppendBatch) -> list[Appended | MillstreamError]:
            other = AsyncAppendClient(path)
            try:
                return await other.append_batch("web", batch, deadline_s=5)
            finally:
                other.close()

        yield {
            "here": lambda batch: appender.append_batch("web", batch, deadline_s=5),
            "here, by a task": lambda batch: asyncio.run(appender.append_batch_async("web", batch, deadline_s=5)),
            "socket": lambda batch: client.append_batch("web", batch, deadline_s=5),
            "socket, by a task": lambda batch: asyncio.run(by_task(batch)),
        }
        client.close()
    finally:
        appender.close()


def rows_of(home: Path, table: str) -> list[dict[str, Any]]:
    with millstream.open(home) as opened:
        return [row for batch in opened.read("web", table=table) for row in batch.to_pylist()]


def batch_of(table: str, ids: list[Any], counts: list[int], **more: Any) -> AppendBatch:
    return AppendBatch.of_table(table, pa.table({"id": ids, **more}), counts, [None] * len(counts))


def test_who_was_told_of_a_request_among_others_reads_it_by_its_token(tmp_path: Path) -> None:
    with millstream.open(make_home(tmp_path / "home", "[streams.web]\n")) as home:
        rows = table_of([{"n": number} for number in range(6)])
        batch = AppendBatch.of_table("t", rows, (1, 2, 3), (None,) * 3)
        told = home._home_appender().append_batch("web", batch, deadline_s=30)
        for outcome, seen in zip(told, (1, 3, 6), strict=True):
            assert isinstance(outcome, Appended)
            found = [row["n"] for rows in home.read("web", table="t", upto=outcome.token) for row in rows.to_pylist()]
            assert found == list(range(seen))


def test_each_request_of_a_batch_is_told_its_own_place(home: Path) -> None:
    with every_way(home) as ways:
        told = {name: append(batch_of("users", [1, 2, 3, 4, 5, 6], [1, 3, 2])) for name, append in ways.items()}
    rows = {row["__seq"]: row for row in rows_of(home, "users")}
    assert len(rows) == 6 * len(told)
    for outcomes in told.values():
        found = []
        for outcome in outcomes:
            assert isinstance(outcome, Appended)
            mine = [rows[int(outcome.seqs.first) + i] for i in range(outcome.seqs.count)]
            found.append([row["id"] for row in mine])
        assert found == [[1], [2, 3, 4], [5, 6]]


def test_a_request_that_is_refused_leaves_the_others_alone(home: Path) -> None:
    with every_way(home) as ways:
        for append in ways.values():
            outcomes = append(batch_of("users", [1, 2, None, 4, 5], [2, 2, 1]))
            assert [isinstance(outcome, Appended) for outcome in outcomes] == [True, False, True]
            assert isinstance(outcomes[1], InvalidValue)
            assert outcomes[1].details["column"] == "id"
            outcomes = append(batch_of("users", [None, None], [1, 1]))
            assert [type(outcome) for outcome in outcomes] == [InvalidValue, InvalidValue]
    assert [row["id"] for row in rows_of(home, "users")] == [1, 2, 5] * 4


def test_a_column_that_may_not_be_added_refuses_those_requests_that_have_it(home: Path) -> None:
    with every_way(home) as ways:
        ways["here"](batch_of("users", [1], [1]))
    make_home(home, WEB + '[streams.web.ingest]\nschema_on_write = "strict"\n')
    with every_way_strict(home) as append:
        outcomes = append(batch_of("users", [2, 3, 4], [1, 1, 1], more=[None, "x", None]))
    assert [isinstance(outcome, Appended) for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1], MillstreamError)
    assert outcomes[1].code == "unknown_column"
    assert [row["id"] for row in rows_of(home, "users")] == [1, 2, 4]


@contextmanager
def every_way_strict(home: Path) -> Iterator[Append]:
    appender = home_appender(Home(home))
    try:
        yield lambda batch: appender.append_batch("web", batch, deadline_s=5)
    finally:
        appender.close()


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (AppendBatch.of_table("t", pa.table({"x": [1, 2]}), [1], [None]), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1, 2]}), [2, 0], [None, None]), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1, 2]}), [], []), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1, 2]}), [1, 1], [None]), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1]}), [1], [WriteId("s", 0)]), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1]}), [1], [WriteId("s")]), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1]}), [1], [WriteId("s", 1, "k")]), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1]}), [1], [WriteId(None, 1, "k")]), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1]}), [1], [WriteId(key="")]), "invalid_value"),
        (AppendBatch.of_table("t", pa.table({"x": [1]}), [1], [WriteId(key="k" * (WRITE_ID_BYTES_MAX + 1))]), "rows_too_large"),
        (
            AppendBatch.of_table("t", pa.table({"x": [1] * (REQUESTS_MAX + 1)}), [1] * (REQUESTS_MAX + 1), [None] * (REQUESTS_MAX + 1)),
            "rows_too_large",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_is_none_is_refused_whole(shared: dict[str, Append], batch: AppendBatch, error: str) -> None:
    for append in shared.values():
        with pytest.raises(MillstreamError, check=coded(error)):
            append(batch)
    assert isinstance(shared["socket"](batch_of("users", [1], [1]))[0], Appended), "the next one is taken"


def test_the_largest_batch_is_taken(home: Path) -> None:
    with every_way(home) as ways:
        largest = WriteId(key="k" * WRITE_ID_BYTES_MAX)
        assert isinstance(ways["here"](AppendBatch.of_table("t", pa.table({"x": [1]}), [1], [largest]))[0], Appended)
        many = AppendBatch.of_table("t", pa.table({"x": [1] * REQUESTS_MAX}), [1] * REQUESTS_MAX, [None] * REQUESTS_MAX)
        assert len(ways["socket"](many)) == REQUESTS_MAX


def test_many_tasks_of_one_loop_append_at_once(home: Path) -> None:
    async def append_all(appender: HomeAppender) -> list[list[Appended | MillstreamError]]:
        batches = [batch_of("users", [2 * i, 2 * i + 1], [1, 1]) for i in range(200)]
        return await asyncio.gather(*(appender.append_batch_async("web", batch, deadline_s=10) for batch in batches))

    with millstream.open(home) as opened:
        opened.append("web", "users", {"id": -1})
        pid = os.fork()
        if pid == 0:  # a process that has to go through its parent
            code = 1
            try:
                outcomes = asyncio.run(append_all(home_appender(Home(home))))
                code = 0 if all(isinstance(one, Appended) for batch in outcomes for one in batch) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(row["id"] for row in rows_of(home, "users")) == list(range(-1, 400))


def test_another_version_of_the_writer_is_told_by_name(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def greet() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                hello = json.dumps({"hello": 1}).encode()
                connection.sendall(struct.pack("<II", len(hello), 0) + hello)
                connection.recv(1)
                connection.close()

        greeting = threading.Thread(target=greet)
        greeting.start()
        with pytest.raises(IngestError, check=coded("writer_version_differs")):
            AppendClient(path).append_batch("web", batch_of("t", [1], [1]), deadline_s=1)

        async def by_task() -> None:
            await AsyncAppendClient(path).append_batch("web", batch_of("t", [1], [1]), deadline_s=1)

        with pytest.raises(IngestError, check=coded("writer_version_differs")):
            asyncio.run(by_task())
        greeting.join()
