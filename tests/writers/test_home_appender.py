"""Applications' appends: durable when acknowledged, once, in order, whichever process writes the home."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.aio.everywhere import a_home
from tests.app.homes import config, done, make_home, run, wait_for
from tests.catalog.sequencing import UnreliableAnnouncements
from tests.commands import SCRIPT, Command
from tests.refused_threads import refused_threads

import millstream
from millstream.catalog import Catalog
from millstream.catalog.writer_notifications import PostgresAnnouncements
from millstream.errors import (
    AppendOutcomeUnknown,
    CatalogError,
    ConfigError,
    IngestError,
    InvalidValue,
    MillstreamError,
    UnknownStream,
    UnknownTable,
    WriterClosed,
)
from millstream.home.home import Home
from millstream.ingest.append_client import AppendClient
from millstream.ingest.python_rows import ROWS_BYTES_MAX
from millstream.model.ids import ShardId
from millstream.model.positions import StreamToken
from millstream.model.writes import AppendBatch
from millstream.processes.role_locks import RoleLock, holder, writer_role
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database
from millstream.wal.files import RealFiles
from millstream.wal.shard_locks import lock_shards
from millstream.writers import leased_writer
from millstream.writers.home_appender import HomeAppender, append_socket
from millstream.writers.leased_writer import OneOfSeveral

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", WEB)


def rows_of(home: Path, table: str = "clicks", stream: str = "web") -> list[dict[str, Any]]:
    with millstream.open(home) as opened:
        return [row for batch in opened.read(stream, table=table) for row in batch.to_pylist()]


@contextmanager
def process(home: Path, *words: str, **environ: str) -> Iterator[Command]:
    """Run a command until the block ends; then terminate it, and kill it if it doesn't end."""
    started = Command(
        ["--home", str(home), *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "HOME": "/nonexistent", **environ},
    )  # fmt: skip
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            started.kill()
            started.communicate()


def writes(home: Path, pid: int, name: str | None = None) -> bool:
    return bool(holder(home / "data" / "run", writer_role(name)).get("pid") == pid)


def test_rows_are_read_as_they_were_appended(home: Path) -> None:
    with millstream.open(home) as opened:
        first = opened.append("web", "clicks", [{"page": "/", "ms": 1.5}, {"page": "/x", "who": {"id": 7}}])
        second = opened.append("web", '"Odd Schema"."Odd.Table"', {"a b": [1, 2]})
        third = opened.append("web", "clicks", {"page": "/", "ms": 2})
        assert first.row_count == 2
        assert first.token <= second.token <= third.token
        upto_first = [
            row for batch in opened.read("web", table="clicks", upto=first.token) for row in batch.to_pylist()
        ]
        assert [row["page"] for row in upto_first] == ["/", "/x"]
    rows = rows_of(home)
    assert [(row["page"], row["ms"], row["who"]) for row in rows] == [
        ("/", 1.5, None),
        ("/x", None, '{"id":7}'),
        ("/", 2.0, None),
    ]
    assert [row["__seq"] for row in rows] == [first.seqs.first, first.seqs.first + 1, third.seqs.first]
    assert {(row["__op"], row["__source"], row["__commit_lsn"]) for row in rows} == {("c", 0, None)}
    assert rows_of(home, '"Odd Schema"."Odd.Table"')[0]["a b"] == [1, 2]


def test_what_cannot_be_taken_is_refused_and_the_next_call_goes_on(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "users", [{"id": 1, "name": "a"}])
        for table, rows, error in (
            ("users", [{"id": None}], "invalid_value"),
            ("users", [{"name": "x"}], "invalid_value"),
            ("users", [{"id": "1"}], "invalid_value"),
            ("users", [{"id": 1, "Name": "x"}], "invalid_value"),
            ("users", [], "invalid_value"),
            ("a.b.c", [{"id": 1}], "usage"),
            ("new", [{"id": 1}, {"id": "x"}], "invalid_value"),
            ("new", [{"x": b"." * (ROWS_BYTES_MAX + 1)}], "rows_too_large"),
        ):
            with pytest.raises(MillstreamError, check=coded(error)):
                opened.append("web", table, rows)
        with pytest.raises(UnknownStream):
            opened.append("shop", "users", {"id": 2})
        opened.append("web", "users", [{"id": 2, "name": "b"}])
        assert [table["name"] for table in opened.status()["streams"][0]["tables"]] == ["public.users"]
    assert [row["id"] for row in rows_of(home, "users")] == [1, 2]


def test_the_configuration_says_what_may_grow(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "users", {"id": 1})
    for mode, grows in (("strict", False), ("add_columns", True)):
        make_home(home, WEB + f'[streams.web.ingest]\nschema_on_write = "{mode}"\n')
        with millstream.open(home) as opened:
            opened.append("web", "users", {"id": 2})
            with pytest.raises(UnknownTable):
                opened.append("web", "others", {"id": 1})
            if grows:
                opened.append("web", "users", {"id": 3, "more": 1})
            else:
                with pytest.raises(IngestError, check=coded("unknown_column")):
                    opened.append("web", "users", {"id": 3, "more": 1})
    make_home(home, WEB.replace('["id"]', '["id", "more"]'))
    with millstream.open(home) as opened, pytest.raises(IngestError, check=coded("key_changed")):
        opened.append("web", "users", {"id": 4, "more": 1})
    for wrong in ("[]", '["id", "id"]'):
        make_home(home, WEB.replace('["id"]', wrong))
        with millstream.open(home) as opened, pytest.raises(ConfigError):
            opened.append("web", "users", {"id": 4})


APPEND = """
import os, sys, millstream
home, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with millstream.open(home) as opened:
    for number in range(count):
        if os.path.exists(os.path.join(home, "enough")):
            break
        try:
            found = opened.append("web", "clicks", [{"who": name, "number": number}, {"who": name, "number": -number}])
        except millstream.errors.AppendOutcomeUnknown:
            print("unknown", number, flush=True)
        else:
            print("ack", number, found.seqs.first, flush=True)
"""


def appenders(home: Path, *names: str, count: int, **environ: str) -> list[Command]:
    return [
        Command(
            [APPEND, str(home), name, str(count)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
            begins=SCRIPT,
        )
        for name in names
    ]


def judge(home: Path, told: dict[str, list[list[str]]]) -> None:
    """Check that acknowledged operations are there once, complete, with their numbers, in each caller's order."""
    rows = rows_of(home)
    assert [row["__seq"] for row in rows] == sorted({row["__seq"] for row in rows})
    found = Counter((row["who"], row["number"]) for row in rows if row["number"] > 0)
    assert set(found.values()) <= {1}
    at = {row["__seq"]: (row["who"], row["number"]) for row in rows}
    for name, lines in told.items():
        acknowledged = [(int(words[1]), int(words[2])) for words in lines if words[0] == "ack"]
        assert acknowledged
        for number, first in acknowledged:
            assert (at[first], at[first + 1]) == ((name, number), (name, -number))
        in_order = [row["number"] for row in rows if row["who"] == name and row["number"] > 0]
        assert in_order == sorted(in_order)
        unknown = {int(words[1]) for words in lines if words[0] == "unknown"}
        assert set(in_order) <= {number for number, _ in acknowledged} | unknown


def test_many_processes_and_threads_append_through_the_one_that_writes(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"who": "here", "number": 0})
        assert writes(home, os.getpid())
        others = appenders(home, "one", "two", "three", count=150)

        def some(name: str) -> list[list[str]]:
            told = []
            for number in range(100):
                ack = opened.append(
                    "web", "clicks", [{"who": name, "number": number}, {"who": name, "number": -number}]
                )
                told.append(["ack", str(number), str(ack.seqs.first)])
            return told

        with ThreadPoolExecutor(8) as threads:
            told = dict(zip("abcdefgh", threads.map(some, "abcdefgh"), strict=True))
        for name, other in zip(("one", "two", "three"), others, strict=True):
            output, _ = other.communicate(timeout=120)
            assert other.returncode == 0
            told[name] = [line.split() for line in output.splitlines()]
            assert [words[0] for words in told[name]] == ["ack"] * 150
    judge(home, told)


def test_who_appends_steps_aside_for_run_and_goes_on_through_it(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"who": "me", "number": 0})
        assert writes(home, os.getpid())
        assert f"append (process {os.getpid()})" in done(home, "status")
        with process(home, "capture", "run") as owner:
            told = []
            for number in range(1, 100_000):
                ack = opened.append(
                    "web", "clicks", [{"who": "me", "number": number}, {"who": "me", "number": -number}]
                )
                told.append(["ack", str(number), str(ack.seqs.first)])
                if writes(home, owner.pid) and number > 20:
                    break
            assert writes(home, owner.pid)
            for after in range(number + 1, number + 20):
                ack = opened.append("web", "clicks", [{"who": "me", "number": after}, {"who": "me", "number": -after}])
                told.append(["ack", str(after), str(ack.seqs.first)])
        assert owner.returncode == 0
        ack = opened.append("web", "clicks", [{"who": "me", "number": 200_000}, {"who": "me", "number": -200_000}])
        told.append(["ack", "200000", str(ack.seqs.first)])
        assert writes(home, os.getpid())
    judge(home, {"me": told})


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_acknowledged_is_there_when_who_writes_is_killed(home: Path, number: signal.Signals) -> None:
    done(home, "append", "clicks", "--stream", "web", "/dev/null")
    others = []
    told: dict[str, list[list[str]]] = {"one": [], "two": [], "three": []}

    def listen(name: str, other: Command) -> None:
        assert other.stdout is not None
        told[name].extend(line.split() for line in other.stdout)

    for _ in range(2):
        with process(home, "capture", "run") as owner:
            wait_for(lambda owner=owner: writes(home, owner.pid), what=lambda: "it starts")
            if not others:
                others = appenders(
                    home, *told, count=1_000_000
                )  # until it's enough, however long an owner takes to start
                threads = [threading.Thread(target=listen, args=pair) for pair in zip(told, others, strict=True)]
                for thread in threads:
                    thread.start()
            so_far = {name: len(lines) for name, lines in told.items()}
            wait_for(lambda so_far=so_far: all(len(told[n]) > so_far[n] + 50 for n in told), what=lambda: told)
            owner.send_signal(number)
            owner.wait()
    (home / "enough").touch()
    for other, thread in zip(others, threads, strict=True):
        thread.join()
        assert other.wait() == 0
    unknown = sum(words[0] == "unknown" for lines in told.values() for words in lines)
    assert unknown <= 2 * len(told), "a call is under way on each connection, at most"
    judge(home, told)


def test_a_forked_child_appends_through_its_parent(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"who": "parent", "number": 1})
        child = os.fork()
        if child == 0:
            try:
                opened.append("web", "clicks", {"who": "child", "number": 2})
                opened.close()
            except BaseException:  # noqa: BLE001 - a forked test must not go on
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        opened.append("web", "clicks", {"who": "parent", "number": 3})
        assert writes(home, os.getpid())
    assert [row["who"] for row in rows_of(home)] == ["parent", "child", "parent"]


def test_a_socket_takes_what_is_no_request_without_harm(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"number": 0})
        path = str(append_socket(Home(home), None))

        def said(request: bytes, *, whole: bool = True) -> dict[str, Any] | None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(30)
                connection.connect(path)
                connection.sendall(request)
                if not whole:
                    return None
                answers: list[dict[str, Any]] = []
                for _ in ("hello", "answer"):
                    length = struct.unpack("<II", connection.recv(8, socket.MSG_WAITALL))[0]
                    answers.append(json.loads(connection.recv(length, socket.MSG_WAITALL)))
                return answers[1]

        head = json.dumps({"stream": "web", "table": "clicks", "deadline_s": 1, "counts": [1]}).encode()
        for request, code in (
            (struct.pack("<II", 3, 0) + b"{x}", "invalid_value"),
            (struct.pack("<II", 2, 0) + b"{}", "invalid_value"),
            (struct.pack("<II", len(head), 4) + head + b"\0\1\2\3", "invalid_value"),
            (struct.pack("<II", len(head), 0) + head, "invalid_value"),
            (struct.pack("<II", 2**32 - 1, 0), "rows_too_large"),
            (struct.pack("<II", 2, 2**32 - 1), "rows_too_large"),
        ):
            answer = said(request)
            assert answer is not None
            assert answer["error"]["code"] == code, request
            opened.append("web", "clicks", {"number": 1})
        said(struct.pack("<II", len(head), 10_000_000) + head + b"half", whole=False)
        said(b"GE", whole=False)
        opened.append("web", "clicks", {"number": 2})
    assert [row["number"] for row in rows_of(home)] == [0, *[1] * 6, 2]


@pytest.mark.long
def test_a_caller_that_does_not_read_or_sends_by_halves_holds_nobody_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.ingest.append_server._DRAIN_S", 1.0)
    monkeypatch.setattr("millstream.ingest.append_server._SENDING_S", 2.0)
    head = json.dumps({"stream": "web", "table": "x" * 900_000, "deadline_s": 1, "counts": [1]}).encode()
    with millstream.open(home) as opened, ExitStack() as connections:
        opened.append("web", "clicks", {"number": 0})
        path = str(append_socket(Home(home), None))
        for _ in range(6):
            half = connections.enter_context(socket.socket(socket.AF_UNIX))
            half.connect(path)
            half.sendall(struct.pack("<II", 10, 100 << 20) + b"half")
        mute = connections.enter_context(socket.socket(socket.AF_UNIX))
        mute.connect(path)
        mute.settimeout(0.5)
        with suppress(TimeoutError):
            for _ in range(1000):
                mute.sendall(struct.pack("<II", len(head), 0) + head)  # each answer is as long, and stays unread
        b = appenders(home, "b", count=20)[0]
        b.communicate(timeout=180)
        assert b.returncode == 0
        other = pa.table({"who": ["large"], "number": [1], "bytes": [b"x" * 200_000]})
        client = AppendClient(Path(path))
        request = AppendBatch.of_request({"clicks": other})
        client.append_batch("web", request, deadline_s=10)  # once the senders of halves are given up
        client.close()
    assert not writes(home, os.getpid())


def test_a_close_that_is_broken_off_is_finished_all_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = millstream.open(home)
    opened.append("web", "clicks", {"number": 0})

    def broken_off(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("millstream.writers.home_appender.uninterruptible", broken_off)
        with pytest.raises(KeyboardInterrupt):
            opened.close()
    opened.close()
    assert not writes(home, os.getpid())
    with pytest.raises(WriterClosed):
        opened.append("web", "clicks", {"number": 1})
    with millstream.open(home) as again:
        again.append("web", "clicks", {"number": 2})
    assert [row["number"] for row in rows_of(home)] == [0, 2]


MAIN_ENDS = """
import sys, threading, time, millstream
home = millstream.open(sys.argv[1])
home.append("web", "clicks", {"who": "main", "number": 0})
def go():
    number = 0
    while sys.stdin.read(1):
        number += 1
        home.append("web", "clicks", {"who": "thread", "number": number})
        print(number, flush=True)
threading.Thread(target=go).start()
print("begun", flush=True)
"""


@pytest.mark.long
def test_an_application_whose_main_thread_has_ended_goes_on_writing_for_others(home: Path) -> None:
    """A process that just ends also answers its waiting callers: no caller gets an unknown outcome."""
    writer = subprocess.Popen(
        [sys.executable, "-c", MAIN_ENDS, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline() == "begun\n"
    with millstream.open(home) as opened:
        for number in range(1, 6):
            opened.append("web", "clicks", {"who": "other", "number": number})
            opened.append("web", f"new_{number}", [{"number": n} for n in range(20_000)])
            writer.stdin.write("x")
            writer.stdin.flush()
            assert writer.stdout.readline() == f"{number}\n"
            assert writes(home, writer.pid)
        writer.stdin.close()
        deadline = time.monotonic() + 120
        for number in itertools.count(6):
            has_ended = writer.poll() is not None
            opened.append("web", "clicks", {"who": "other", "number": number})
            if has_ended and number > 50:
                break
            assert time.monotonic() < deadline
        assert writer.wait() == 0
        assert writes(home, os.getpid())
    assert [row["number"] for row in rows_of(home) if row["who"] == "other"] == list(range(1, number + 1))
    assert len(rows_of(home, "new_5")) == 20_000


@pytest.mark.parametrize("after_s", [0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
def test_an_interrupt_in_the_first_append_leaves_nothing_behind(home: Path, after_s: float) -> None:
    opened = millstream.open(home)
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    with suppress(KeyboardInterrupt):
        timer.start()
        opened.append("web", "clicks", {"number": 1})
        timer.join()
        time.sleep(0.2)  # it arrives here if the append was quicker
    opened.close()
    assert not writes(home, os.getpid())
    with millstream.open(home) as again:
        again.append("web", "clicks", {"number": 2})
    assert [row["number"] for row in rows_of(home)] in ([1, 2], [2])


def test_a_writer_whose_thread_is_refused_gives_its_role_back(home: Path) -> None:
    """Regression: its role and its servers stayed, and the process's next appends met its own role."""
    with millstream.open(home) as opened:
        with refused_threads("append-steps-aside"), pytest.raises(OSError, match="no more threads"):
            opened.append("web", "clicks", [{"page": "/"}])
        assert holder(home / "data" / "run", writer_role(None)) == {}
        assert not [thread for thread in threading.enumerate() if thread.name == "append-server"]
        opened.append("web", "clicks", [{"page": "/x"}])
    assert [row["page"] for row in rows_of(home)] == ["/x"]


def test_a_stream_that_the_writers_configuration_lacks_is_told_by_name(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"number": 0})
        make_home(home, WEB + "[streams.later]\n")
        failed = run(home, "append", "--stream", "later", "clicks", "/dev/stdin", stdin='{"a": 1}\n')
        assert "error[unknown_stream]" in failed.stderr
        opened.append("web", "clicks", {"number": 1})


@pytest.mark.siege
def test_applications_append_while_a_job_lands_what_there_is(home: Path) -> None:
    """`run --until-caught-up` holds the home for its pipeline's sake long after its capture is done."""
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"number": 0})
        with process(home, "run", "--until-caught-up") as job:
            slowest, number, started = 0.0, 0, time.monotonic()
            while job.poll() is None:
                number += 1
                began = time.monotonic()
                opened.append("web", "clicks", {"number": number})
                slowest = max(slowest, time.monotonic() - began)
            lasted = time.monotonic() - started
        assert job.returncode == 0
    assert [row["number"] for row in rows_of(home)] == list(range(number + 1))
    assert slowest < lasted / 2, "none had to wait until the job was done"


def test_names_that_differ_by_case_alone_are_one_table_too_many(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "users", {"id": 1})
        for name in ('"Users"', 'public."USERS"', '"Public".users'):
            with pytest.raises(InvalidValue):
                opened.append("web", name, {"id": 2})


def test_a_writer_with_a_name_needs_a_catalog_that_can_be_asked_and_makes_none_that_cannot_be_shared(
    home: Path,
) -> None:
    make_home(home, '[writer]\nname = "a"\n' + WEB)
    with millstream.open(home) as opened, pytest.raises(ConfigError, match="embedded"):
        opened.append("web", "clicks", {"a": 1})
    assert not (home / "data" / "catalog.db").exists()
    make_home(home, WEB)
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"a": 1})
    make_home(home, '[catalog]\nurl = "postgresql://u:${NOT_SET_ANYWHERE}@127.0.0.1:1/x"\n' + WEB)
    with millstream.open(home) as opened, pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
        opened.append("web", "clicks", {"a": 1})


def test_an_answer_that_never_comes_is_told_as_unknown(home: Path) -> None:
    with process(home, "capture", "run") as owner, millstream.open(home) as opened:
        wait_for(lambda: writes(home, owner.pid))
        opened.append("web", "clicks", {"number": 0}, deadline_s=30)  # waits for the socket
        client = AppendClient(append_socket(Home(home), None), patience_s=0.5)
        zero, request = (AppendBatch.of_request({"clicks": pa.table({"number": [n]})}) for n in (0, 1))
        client.append_batch("web", zero, deadline_s=30)
        owner.send_signal(signal.SIGSTOP)
        with pytest.raises(AppendOutcomeUnknown):
            client.append_batch("web", request, deadline_s=0.5)
        owner.send_signal(signal.SIGCONT)
        client.close()
        opened.append("web", "clicks", {"number": 2}, deadline_s=30)
    numbers = [row["number"] for row in rows_of(home)]
    assert numbers in ([0, 0, 1, 2], [0, 0, 2], [0, 0, 2, 1])


def test_rows_from_a_pipe(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.ndjson"
    file.write_text('{"id": 1, "name": "a"}\n\n{"id": 2, "tags": ["x"]}\n{"id": 3}\n')
    acks = [json.loads(line) for line in done(home, "append", "users", str(file), "--rows", "2", "--json").splitlines()]
    assert [ack["rows"] for ack in acks] == [2, 1]
    assert [row["id"] for row in rows_of(home, "users")] == [1, 2, 3]
    for text, said in (
        ('{"id": 4}\n{"id": "x"}\n', "error[invalid_value]"),
        ('{"id": 5}\n[1]\n', "line 2 is not a JSON object"),
        ('{"id": 6}\n{"id": \n', "line 2 isn't JSON"),
        ('{"id": 7}\n{"size": 1e999}\n', "line 2 isn't JSON: 1e999 is neither"),
        ('{"id": 8}\n{"size": NaN}\n', "line 2 isn't JSON: NaN is neither"),
    ):
        file.write_text(text)
        failed = run(home, "append", "users", str(file), "--rows", "1")
        assert failed.returncode in {1, 2}
        assert said in failed.stderr
        assert "appended so far, and durable: 1 row, from the first 1 line with a row" in failed.stderr
    file.write_bytes(b'{"id": 9}\n' + b" " * 100_000 + b'\n{"name": "\xe9"}\n')
    failed = run(home, "append", "users", str(file), "--rows", "1")
    assert (failed.returncode, "the text behind line 1 isn't UTF-8" in failed.stderr) == (2, True)
    assert "durable: 1 row" in failed.stderr
    assert [row["id"] for row in rows_of(home, "users")] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_rows_from_a_pipe_that_is_read_twice_or_has_wrong_rows(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.ndjson"
    file.write_text('{"id": 1}\n{"id": 2}\n{"id": 3}\n')
    for way in (("--idempotency-key", "k"), ("--session", "s", "--number", "1")):
        for said in ("3 rows are durable", "3 rows are durable, 3 of them from before"):
            assert said in run(home, "append", "users", str(file), "--rows", "2", *way).stderr
    assert [row["id"] for row in rows_of(home, "users")] == [1, 2, 3, 1, 2, 3]
    assert run(home, "append", "users", str(file), "--session", "s").returncode == 2
    file.write_text('{"id": 4}\n{"id": 5}\n{"id": "x"}\n{"id": 6}\n')
    told = run(home, "append", "users", str(file), "--rows", "2", "--keep-valid-rows")
    assert told.returncode == 0
    assert "left out: row 3: " in told.stderr
    assert "3 rows are durable" in told.stderr


@pytest.mark.long
def test_captured_tables_are_nobody_elses_and_a_written_name_sets_the_captured_one_aside(
    tmp_path: Path, postgres: Database
) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        connection.execute("INSERT INTO orders VALUES (1)")
    home = make_home(tmp_path / "shop", config(postgres.dsn, None))
    done(home, "capture", "run", "--until-caught-up")
    with process(home, "capture", "run") as owner, millstream.open(home) as opened:
        wait_for(lambda: writes(home, owner.pid))
        opened.append("shop", "clicks", {"id": 1})
        with pytest.raises(IngestError, check=coded("table_captured")):
            opened.append("shop", "orders", {"id": 2})
        with postgres.connect() as connection:
            connection.execute("CREATE TABLE clicks (id bigint PRIMARY KEY)")
            connection.execute("INSERT INTO clicks VALUES (100)")
            connection.execute("INSERT INTO orders VALUES (2)")
        wait_for(lambda: len(rows_of(home, "orders", "shop")) == 2)
        opened.append("shop", "clicks", {"id": 2})
        wait_for(lambda: any(t["state"] == "quarantined" for t in opened.status()["streams"][0]["tables"]))
    tables = {(t["name"], t["state"]) for t in json.loads(done(home, "tables", "--json"))}
    assert tables == {("public.orders", "streaming"), ("public.clicks", "streaming"), ("public.clicks", "quarantined")}
    with millstream.open(home) as fresh:
        fresh.append("shop", "clicks", {"id": 3})
    refused = run(home, "tables", "retry", "public.clicks")
    assert "Rename the table at the source" in refused.stderr
    assert run(home, "tables", "copy", "public.clicks").returncode == 2
    assert [row["id"] for row in rows_of(home, "clicks", "shop") if row["__source"] == 0] == [1, 2, 3]


@pytest.mark.parametrize("way", ["open", "aio.open"])
def test_the_deadline_bounds_the_wait_for_a_writer_that_only_starts(home: Path, way: str) -> None:
    """It took 30 s, whatever the deadline was."""
    with a_home(way, home) as opened:
        run_folder = home / "data" / "run"
        run_folder.mkdir(parents=True, exist_ok=True)
        with RoleLock.take(run_folder, writer_role(None)):
            began_s = time.monotonic()
            with pytest.raises(WriterClosed):
                opened.append("web", "clicks", {"id": 1}, deadline_s=0.2)
            assert time.monotonic() - began_s < 15.0
        opened.append("web", "clicks", {"id": 2}, deadline_s=0.2)
    assert [row["id"] for row in rows_of(home)] == [2]


def test_an_append_does_not_wait_for_another_streams_log(tmp_path: Path) -> None:
    """A log whose lock another process held was waited for by all appends of the process, for half a minute each time."""
    home = make_home(tmp_path / "home", "[streams.web]\n[streams.shop]\n")
    with millstream.open(home) as opened:
        opened.append("shop", "clicks", {"id": 1})
    locks = lock_shards(RealFiles(), str(home / "data" / "wal" / "shop"), [ShardId(0)])
    with millstream.open(home) as opened, ThreadPoolExecutor(1) as threads:
        opened.append("web", "clicks", {"id": 1})
        waiting = threads.submit(opened.append, "shop", "clicks", {"id": 2})
        try:
            with pytest.raises(TimeoutError):
                waiting.result(1)
            began_s = time.monotonic()
            opened.append("web", "clicks", {"id": 2})
            assert time.monotonic() - began_s < 10
            assert not waiting.done()
        finally:
            for lock in locks.values():
                lock.close()
        waiting.result(60)
    assert [row["id"] for row in rows_of(home, "clicks", "shop")] == [1, 2]


def test_an_event_loop_goes_on_while_another_task_becomes_the_writer(tmp_path: Path) -> None:
    """The second task waited on the loop's own thread for the catalog that the first one opened on another."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        catalog = f'[catalog]\nurl = "postgresql://u@127.0.0.1:{silent.getsockname()[1]}/c?connect_timeout=4"\n'
        home = Home(make_home(tmp_path / "home", f"{WEB}{catalog}"))
        appender = HomeAppender(home, lambda *_: None)  # type: ignore[arg-type, return-value]
        batch = AppendBatch.of_request({"clicks": pa.table({"id": [1]})})

        async def longest_stand_s() -> float:
            tasks = [asyncio.create_task(appender.append_batch_async("web", batch, deadline_s=1.0)) for _ in range(2)]
            longest_s, ended = 0.0, asyncio.gather(*tasks, return_exceptions=True)
            while not ended.done():
                began_s = time.monotonic()
                await asyncio.sleep(0.01)
                longest_s = max(longest_s, time.monotonic() - began_s)
            assert [type(error) for error in ended.result()] == [CatalogError] * 2
            return longest_s

        assert asyncio.run(longest_stand_s()) < 2
        appender.close()


def test_appends_go_on_while_the_source_is_away(tmp_path: Path) -> None:
    home = make_home(tmp_path / "shop", config("host=127.0.0.1 port=1", None))
    with process(home, "capture", "run") as owner, millstream.open(home) as opened:
        wait_for(lambda: writes(home, owner.pid))
        for number in range(20):
            opened.append("shop", "clicks", {"id": number})
        assert writes(home, owner.pid)
        assert owner.poll() is None
    assert [row["id"] for row in rows_of(home, "clicks", "shop")] == list(range(20))


@pytest.mark.long
def test_a_process_with_a_name_of_its_own_writes_beside_the_others(tmp_path: Path, postgres: Database) -> None:
    home = make_home(tmp_path / "web", f'[catalog]\nurl = {json.dumps(postgres.dsn)}\n[writer]\nname = "a"\n{WEB}')
    done(home, "append", "clicks", "/dev/null")
    with process(home, "capture", "run") as owner:
        wait_for(lambda: writes(home, owner.pid, "a"))
        b, c = appenders(home, "b", "c", count=300, MILLSTREAM_WRITER__NAME="b")
        d = appenders(home, "d", count=300)[0]
        told = {}
        for name, other in (("b", b), ("c", c), ("d", d)):
            output, _ = other.communicate(timeout=120)
            assert other.returncode == 0
            told[name] = [line.split() for line in output.splitlines()]
            assert [words[0] for words in told[name]] == ["ack"] * 300
        listed = {w["name"]: w["state"] for w in json.loads(done(home, "writers", "ls", "--json"))["writers"]}
        assert listed == {"a": "alive", "b": "stopped"}
        wait_for(lambda: len(rows_of(home)) == 3 * 600)
        judge(home, told)
        with millstream.open(home) as opened:
            assert {json.loads(line)["shard"] for line in done(home, "wal", "cat").splitlines()} == {0, 1}
            vector = opened.token("web", vector=True)
            read = [row for batch in opened.read("web", table="clicks", upto=vector) for row in batch.to_pylist()]
            assert len(read) == 3 * 600


def test_an_ack_can_be_read_at_once_beside_a_writer_that_stands_still(
    tmp_path: Path, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The periodic advance is switched off and the other writer gets no announcement: it stays where it joined.
    monkeypatch.setattr(leased_writer, "FOLLOW_EVERY_S", 3600.0)
    home = make_home(
        tmp_path / "web",
        f'[catalog]\nurl = {json.dumps(postgres.dsn)}\n[writer]\nname = "a"\nlease = "4h"\n{WEB}',
    )
    with millstream.open(home) as opened, Catalog(postgres.dsn) as catalog:
        assert not opened.append("web", "clicks", {"id": 0}).token.ahead
        place, stream = Home(home), catalog.stream("web").id
        deaf = UnreliableAnnouncements(PostgresAnnouncements(catalog.database, stream), random.Random(0), lost=1.0)
        with OneOfSeveral.open(
            catalog, stream, str(place.wal_folder("web")), name="still", location=place.identity().id,
            lease_s=14_400, announcements=deaf,
        ):  # fmt: skip
            for number in range(1, 11):
                ack = opened.append("web", "clicks", {"id": number})
                read = [row["id"] for batch in opened.read("web", upto=ack.token) for row in batch.to_pylist()]
                assert read == list(range(number + 1))
                assert list(opened.read("web", after=ack.token)) == []
                minimum = StreamToken(ack.token.stream, ack.token.minimum)
                assert sum(batch.num_rows for batch in opened.read("web", upto=minimum)) <= number
                assert opened.token("web").minimum >= minimum.minimum
            assert ack.token.ahead
