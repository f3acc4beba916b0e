"""Every push sink passes the common suite, with a real receiver; and each one's own behaviour."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from msgspec.structs import replace
from tests.delivery.receivers import Receiver, answer

from millstream.config.masking import mask
from millstream.delivery.command_sink import CommandSettings
from millstream.delivery.sinks import ACCEPTED, PushMessage, PushSink, Verdict, open_sink
from millstream.errors import DeliveryError
from millstream.testing.errors import coded
from millstream.testing.push_sink import PushSinkConformance, push_message
from millstream.testing.redis import EmbeddedRedis

SECRET = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
_numbers = itertools.count(1)

# Appends its input to a file, as one piece, unless a file named `broken` stands next to it.
SCRIPT = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
lines = sys.stdin.buffer.read()
if (folder / "broken").exists():
    sys.exit("the folder is broken")
with (folder / "lines").open("ab") as file:
    file.write(lines)
print("ok")
"""


class Stage:
    """Opens sinks of one kind, and closes them."""

    def __init__(self, kind: str, settings: Mapping[str, Any], stream: str = "shop") -> None:
        self.kind = kind
        self.settings = settings
        self.stream = stream
        self.opened: list[PushSink] = []

    def open(self) -> PushSink:
        self.opened.append(open_sink(self.kind, self.settings, stream=self.stream, consumer="search"))
        return self.opened[-1]

    def close(self) -> None:
        for sink in self.opened:
            sink.close()


class WebhookStage(Stage):
    def __init__(self, receiver: Receiver) -> None:
        settings = {"url": receiver.url, "secret": SECRET, "batch_size": 10, "allow_private": True}
        super().__init__("webhook", settings)
        self.receiver = receiver

    def received(self) -> Sequence[tuple[str, Any]]:
        bodies = [json.loads(request.body) for request in self.receiver.requests]
        return [(message["id"], message["record"]) for body in bodies for message in body["messages"]]

    def break_down(self) -> None:
        self.receiver.answerer = answer(503)

    def mend(self) -> None:
        self.receiver.answerer = answer(200)


class RedisStage(Stage):
    def __init__(self, server: EmbeddedRedis) -> None:
        super().__init__("redis", {"location": server.url}, stream=f"shop{next(_numbers)}")
        self.client = redis.Redis.from_url(server.url, decode_responses=True)

    def entries(self, rest: str) -> list[dict[str, str]]:
        return [fields for _, fields in self.client.xrange(f"{self.stream}.{rest}")]

    def received(self) -> Sequence[tuple[str, Any]]:
        keys = [key for key in self.client.keys(f"{self.stream}.*") if self.client.type(key) == "stream"]
        entries = [fields for key in sorted(keys) for _, fields in self.client.xrange(key)]
        return [(fields["id"], json.loads(fields["record"])) for fields in entries]

    def break_down(self) -> None:
        key = f"{self.stream}.public.orders"
        self.client.rename(key, f"kept:{key}")
        self.client.set(key, "no stream")

    def mend(self) -> None:
        key = f"{self.stream}.public.orders"
        self.client.rename(f"kept:{key}", key)

    def close(self) -> None:
        super().close()
        self.client.close()


class CommandStage(Stage):
    def __init__(self, folder: Path) -> None:
        settings = {"argv": [sys.executable, "-c", SCRIPT, str(folder)], "batch_size": 10}
        super().__init__("command", settings)
        self.folder = folder

    def received(self) -> Sequence[tuple[str, Any]]:
        lines = (self.folder / "lines").read_bytes().splitlines()
        messages = [json.loads(line) for line in lines]
        return [(message["id"], message["record"]) for message in messages]

    def break_down(self) -> None:
        (self.folder / "broken").touch()

    def mend(self) -> None:
        (self.folder / "broken").unlink()


class TestWebhook(PushSinkConformance):
    @pytest.fixture
    def stage(self) -> Iterator[WebhookStage]:
        with Receiver() as receiver:
            stage = WebhookStage(receiver)
            yield stage
            stage.close()


class TestRedis(PushSinkConformance):
    @pytest.fixture
    def stage(self, redis_server: EmbeddedRedis) -> Iterator[RedisStage]:
        stage = RedisStage(redis_server)
        yield stage
        stage.close()


class TestCommand(PushSinkConformance):
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[CommandStage]:
        stage = CommandStage(tmp_path)
        yield stage
        stage.close()


# --- Redis -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_redis(redis_server: EmbeddedRedis) -> Iterator[RedisStage]:
    stage = RedisStage(redis_server)
    yield stage
    stage.close()


def test_an_entry_goes_to_its_tables_stream_with_id_op_and_record(in_redis: RedisStage) -> None:
    batch = [push_message(0), push_message(1, table='public."T.1"', op="d"), push_message(2, table=None, op="m")]
    assert in_redis.open().deliver(batch) == ACCEPTED
    for message, name in zip(batch, ("public.orders", "public.T.1", "message"), strict=True):
        record = message.record.decode()
        assert in_redis.entries(name) == [{"id": message.id, "op": message.value["op"], "record": record}]


def test_a_stream_of_redis_keeps_its_newest_entries(in_redis: RedisStage) -> None:
    in_redis.settings = {**in_redis.settings, "stream": "{stream}.all", "maxlen": 5}
    sink = in_redis.open()
    for start in range(0, 30, 10):
        assert sink.deliver([push_message(number) for number in range(start, start + 10)]) == ACCEPTED
    assert [fields["id"] for fields in in_redis.entries("all")] == [f"shop-0-1-{number}" for number in range(25, 30)]


def test_a_redis_server_that_does_not_answer_fails_no_message(in_redis: RedisStage) -> None:
    """Each of a day's messages became a dead letter after a quarter of an hour."""
    in_redis.settings = {"location": "redis://app:hidden@127.0.0.1:1/0"}
    outcome = in_redis.open().deliver([push_message(0)])
    assert outcome.verdict is Verdict.REFUSED
    assert "hidden" not in outcome.reason


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    ],
)
def test_a_replica_and_a_full_memory_fail_no_message(
    in_redis: RedisStage, redis_server: EmbeddedRedis, state: tuple[str, ...], end: tuple[str, ...]
) -> None:
    sink = in_redis.open()
    with redis.Redis.from_url(redis_server.url) as client:
        client.execute_command(*state)
        try:
            assert sink.deliver([push_message(0)]).verdict is Verdict.REFUSED
        finally:
            client.execute_command(*end)
    assert sink.deliver([push_message(0)]) == ACCEPTED


def test_a_message_on_which_redis_hangs_up_is_a_failure(in_redis: RedisStage, redis_server: EmbeddedRedis) -> None:
    """Otherwise its batch would wait without end."""
    sink = in_redis.open()
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("client-query-buffer-limit", 1 << 20)
        try:
            large = push_message(0)
            large = replace(large, record=json.dumps({**large.value, "pad": "x" * (4 << 20)}).encode())
            assert sink.deliver([large]).verdict is Verdict.FAILED
        finally:
            client.config_set("client-query-buffer-limit", 1 << 30)
    assert sink.deliver([push_message(1)]) == ACCEPTED


def test_a_message_that_redis_refuses_is_a_failure(in_redis: RedisStage, redis_server: EmbeddedRedis) -> None:
    in_redis.settings = {**in_redis.settings, "stream": "taken"}
    with redis.Redis.from_url(redis_server.url) as client:
        client.set("taken", "a text")
        assert in_redis.open().deliver([push_message(0)]).verdict is Verdict.FAILED
        client.delete("taken")


# --- a command -------------------------------------------------------------------------------------------------------


def run(code: str, *, timeout: str = "30s", messages: Sequence[PushMessage] | None = None) -> Any:
    sink = open_sink("command", {"argv": [sys.executable, "-c", code], "timeout": timeout}, stream="shop", consumer="c")
    return sink.deliver(messages or [push_message(0), push_message(1)])


def test_what_looks_like_a_secret_in_a_command_is_not_shown() -> None:
    argv = [
        "load",
        "-v",
        "--to",
        "https://a:b@host/x",
        "--password",
        "s",
        "--token=s",
        "-H",
        "Authorization: s",
        "x.json",
    ]
    settings = CommandSettings.parse({"argv": argv})
    shown = settings.as_dict()["argv"]
    assert shown == [
        "load",
        "-v",
        "--to",
        "https://a:***@host/x",
        "--password",
        "***",
        "--token=***",
        "-H",
        "***",
        "x.json",
    ]
    assert mask(("streams", "shop", "consumers", "c", "command", "argv"), argv) == shown
    assert settings.as_dict(masked=False)["argv"] == argv


def test_a_command_may_acknowledge_line_by_line() -> None:
    """All lines count, so that one that dies in the middle hasn't acknowledged the rest."""
    assert run("import sys\nfor line in sys.stdin: print('ok', flush=True)") == ACCEPTED
    died = run("import sys\nfor line in sys.stdin:\n  print('ok', flush=True)\n  sys.exit('no more')")
    assert died.reason == "the command ended with status 1: no more"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "ended without the line ok"),
        ("print('ok'); print('well')", "answered 'well' instead of ok"),
        ("print('okay')", "answered 'okay' instead of ok"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("print('ok'); raise SystemExit(3)", "ended with status 3"),
        ("import os; os.write(1, b'\\xff' * 1000)", "answered '\ufffd"),
    ],
)
def test_anything_else_is_a_failure(code: str, reason: str) -> None:
    outcome = run(code)
    assert outcome.verdict is Verdict.FAILED
    assert reason in outcome.reason


@pytest.mark.sampled
@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "import sys, time; sys.stdin.read(); print('ok', flush=True); time.sleep(60)",
        "import subprocess; subprocess.run(['sleep', '60'])",
        "while True: print('x' * 1000)",
    ],
)
def test_a_command_that_does_not_end_is_killed_with_its_children(code: str) -> None:
    begin_s = time.monotonic()
    large = PushMessage("shop-0-1-1", None, 1, b'"%b"' % (b"x" * (8 << 20)))
    assert run(code, timeout="1s", messages=[large]).reason == "the command didn't end within 1 s"
    assert time.monotonic() - begin_s < 10


def test_the_children_of_a_command_end_with_it(tmp_path: Path) -> None:
    child = "child = subprocess.Popen(['sleep', '60'])"
    code = f"import pathlib, subprocess; {child}; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))"
    run(code + "; child.wait()", timeout="2s")
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_command_that_leaves_a_child_behind_has_ended() -> None:
    code = "import subprocess, sys; sys.stdin.read(); subprocess.Popen(['sleep', '60']); print('ok')"
    begin_s = time.monotonic()
    assert run(code) == ACCEPTED
    assert time.monotonic() - begin_s < 20


def test_a_command_that_is_not_there_is_a_failure() -> None:
    sink = open_sink("command", {"argv": ["/no/such/command"]}, stream="shop", consumer="c")
    assert "can't be started: No such file" in sink.deliver([push_message(0)]).reason


def test_closing_ends_a_running_command(tmp_path: Path) -> None:
    code = f"import pathlib, time; pathlib.Path({str(tmp_path / 'runs')!r}).touch(); time.sleep(60)"
    sink = open_sink("command", {"argv": [sys.executable, "-c", code]}, stream="shop", consumer="c")

    def close_once_it_runs() -> None:
        while not (tmp_path / "runs").exists():
            time.sleep(0.01)
        sink.close()

    closer = threading.Thread(target=close_once_it_runs)
    closer.start()
    assert sink.deliver([push_message(0)]).reason == "the command was killed by signal 9"
    closer.join()
    assert sink.deliver([push_message(0)]).reason == "the sink is closed"


# --- settings and kinds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "field"),
    [
        ("redis", {}, "redis.location"),
        ("redis", {"location": "host:6379"}, "redis.location"),
        ("redis", {"location": "redis://app:hidden@word@host/0"}, "redis.location"),
        ("redis", {"location": "redis://h", "stream": "{shard}"}, "redis.stream"),
        ("redis", {"location": "redis://h", "stream": "{stream"}, "redis.stream"),
        ("redis", {"location": "redis://h", "maxlen": -1}, "redis.maxlen"),
        ("redis", {"location": "redis://h", "batch_size": 1}, "redis.batch_size"),
        ("redis", "redis://h", "redis"),
        ("command", {}, "command.argv"),
        ("command", {"argv": "cat"}, "command.argv"),
        ("command", {"argv": []}, "command.argv"),
        ("command", {"argv": ["a\0b"]}, "command.argv"),
        ("command", {"argv": ["cat"], "batch_size": 0}, "command.batch_size"),
        ("command", {"argv": ["cat"], "timeout": "1"}, "command.timeout"),
        ("pigeon", {}, "pigeon"),
    ],
)
def test_what_is_not_valid_is_refused_by_its_field(kind: str, settings: Any, field: str) -> None:
    with pytest.raises(DeliveryError, check=coded("invalid_consumer")) as caught:
        open_sink(kind, settings, stream="shop", consumer="search")
    assert caught.value.details["field"] == field
    assert "hidden" not in str(caught.value.as_dict())


def test_a_package_may_add_a_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "pigeons-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeons\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[millstream.push_sinks]\npigeon = pigeons:open_pigeon\n")
    (tmp_path / "pigeons.py").write_text(
        "def open_pigeon(settings, *, stream, consumer):\n    return settings, stream, consumer\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made: Callable[..., Any] = open_sink
    assert made("pigeon", {"a": 1}, stream="shop", consumer="search") == ({"a": 1}, "shop", "search")
