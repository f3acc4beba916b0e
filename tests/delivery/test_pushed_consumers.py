"""Consumers with a push sink, from the log to the receiver: nothing is lost, and each message is settled or dead."""

from __future__ import annotations

import base64
import errno
import json
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.app.homes import wait_for
from tests.delivery.receivers import Answerer, Receiver, Request, answer
from tests.delivery.test_configured_consumers import SEARCH, Deployment, Run

from millstream.delivery import push_source
from millstream.delivery.consumer_store import LOG_NAME, read_consumers
from millstream.delivery.sinks import PushMessage
from millstream.delivery.webhook_sink import WebhookSink
from millstream.errors import DeliveryError
from millstream.testing.errors import coded
from millstream.wal.files import RealFile
from millstream.workers import Worker

SECRET = "whsec_" + base64.b64encode(bytes(24)).decode()
SINK = '[streams.web.consumers.search.webhook]\nsecret = "{secret}"\nallow_private = true\nretry_min = "10ms"\n'


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path / "home")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as found:
        yield found


def hook(receiver: Receiver, *more: str, limits: str = "") -> str:
    head = f'[streams.web.consumers.search]\nstart = "earliest"\n{limits}\n{SINK.format(secret=SECRET)}'
    return "\n".join((head, f'url = "{receiver.url}"', *more))


def messages(receiver: Receiver) -> list[dict[str, Any]]:
    return [message for request in list(receiver.requests) for message in json.loads(request.body)["messages"]]


def ids(receiver: Receiver) -> list[int]:
    return [message["record"]["row"]["id"] for message in messages(receiver)]


def wait_settled(run: Run, acked: int) -> None:
    wait_for(lambda: run.call("show")["acked"] == acked, seconds=120, what=lambda: run.call("show"))


def failing(for_id: int, status: int) -> Answerer:
    """Return an answerer that accepts every message except one."""

    def answers(connection: socket.socket, request: Request) -> None:
        bad = any(message["record"]["row"]["id"] == for_id for message in json.loads(request.body)["messages"])
        answer(status if bad else 200)(connection, request)

    return answers


def test_a_webhook_gets_each_message(deployment: Deployment, receiver: Receiver) -> None:
    with deployment.run(hook(receiver, "batch_size = 10")) as run:
        run.start()
        run.append("orders", *range(50))
        wait_settled(run, 50)
        assert set(ids(receiver)) == set(range(50))
        assert set(messages(receiver)[0]) == {"id", "deliveries", "group", "record"}
        assert receiver.requests[0].headers["webhook-signature"].startswith("v1,")
        shown = run.call("show")
        assert (shown["lag"]["records"], shown["in_flight"], shown["error"]) == (0, 0, None)
        assert shown["webhook"]["secret"] == "***"
        with pytest.raises(DeliveryError, check=coded("consumer_pushed")):
            run.call("receive")
        run.call("pause")
        run.append("orders", 50)
        run.call("rewind", {"to": "latest"})
        run.append("orders", 51)
        assert 51 not in ids(receiver)
        run.call("resume")
        wait_settled(run, 51)
        assert 50 not in ids(receiver)


def test_a_webhook_gets_the_rows_of_a_backfill_before_later_records(deployment: Deployment, receiver: Receiver) -> None:
    with deployment.run(hook(receiver, "batch_size = 2", limits="max_deliver = 2")) as run:
        run.start()
        run.append("orders", *range(5))
        wait_settled(run, 5)
        receiver.answerer = failing(3, 500)
        number = run.call("backfill", {})["backfill"]
        run.append("orders", 5)
        wait_settled(run, 10)
        found = [message for message in messages(receiver)[5:] if message["record"]["row"]["id"] != 3]
        assert [message["record"]["op"] for message in found].index("c") == len(found) - 1
        assert {message["id"] for message in found[:-1]} == {f"web-b{number}-{n}" for n in (0, 1, 2, 4)}
        assert [letter["id"] for letter in run.call("dead")["dead"]] == [f"web-b{number}-3"]


def test_a_poison_message_dies_alone(deployment: Deployment, receiver: Receiver) -> None:
    receiver.answerer = failing(3, 500)
    with deployment.run(hook(receiver, "batch_size = 4", limits="max_deliver = 3")) as run:
        run.start()
        run.append("orders", *range(8), 3)
        wait_settled(run, 7)
        wait_for(lambda: run.call("show")["dead"] == 2, seconds=120, what=lambda: run.call("show"))
        first, _ = run.call("dead")["dead"]
        assert (first["deliveries"], "500" in first["error"]) == (4, True)
        receiver.answerer = answer(200)
        run.call("retry", {"ids": "all"})
        wait_settled(run, 9)
        assert [message["deliveries"] for message in messages(receiver)[-1:]] == [1]


def test_messages_of_one_group_that_fail_together_are_sent_alone_once(
    deployment: Deployment, receiver: Receiver
) -> None:
    """The first one's death returned the later ones of its group, which other requests took before they were dead."""
    receiver.answerer = answer(500)
    with deployment.run(hook(receiver, "batch_size = 100", limits="max_deliver = 2")) as run:
        run.append("orders", *([1] * 25), *([2] * 25))
        run.start()
        wait_for(lambda: run.call("show")["dead"] == 50, seconds=120, what=lambda: run.call("show"))
        shown = run.call("show")
    alone = [json.loads(request.body)["messages"] for request in receiver.requests]
    sent = [found[0]["id"] for found in alone if len(found) == 1]
    assert (len(sent), len(set(sent))) == (50, 50)
    assert (shown["delivered"], shown["redelivered"]) == (50, 100)


def test_a_receiver_that_wants_no_more_pauses_its_consumer(deployment: Deployment, receiver: Receiver) -> None:
    receiver.answerer = answer(410)
    with deployment.run(hook(receiver)) as run:
        run.start()
        run.append("orders", 1)
        wait_for(lambda: run.call("show")["state"] == "paused", seconds=120)
        assert "410" in run.call("show")["error"]
    receiver.answerer = answer(200)
    with deployment.run(hook(receiver)) as run:
        run.start()
        assert (run.call("show")["state"], "410" in run.call("show")["error"]) == ("paused", True)
        run.call("resume")
        wait_settled(run, 1)
        assert (run.call("show")["error"], run.call("show")["dead"]) == (None, 0)


def test_a_delivery_that_a_bug_ended_begins_again(
    deployment: Deployment, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_source, "_RETRY_S", 0.1)
    bugs = [RuntimeError("a bug")]
    plain = push_source.ConsumerSource.ack

    def fails_once(source: push_source.ConsumerSource, messages: Sequence[PushMessage]) -> None:
        if bugs:
            raise bugs.pop()
        plain(source, messages)

    monkeypatch.setattr(push_source.ConsumerSource, "ack", fails_once)
    with deployment.run(hook(receiver, "batch_size = 10")) as run:
        run.start()
        run.append("orders", *range(50))
        wait_settled(run, 50)
        assert set(ids(receiver)) == set(range(50))
        assert run.call("show")["error"] is None


def test_a_delivery_that_lacked_a_thread_says_so_and_begins_later(
    deployment: Deployment, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began again at once, next to the threads of the first try: messages were sent twice, or became dead letters."""
    monkeypatch.setattr(push_source, "_RETRY_S", 0.1)
    start, refused = Worker.start, list[str]()
    is_short, sinks = threading.Event(), list[WebhookSink]()
    is_short.set()
    close = WebhookSink.close

    def start_some(worker: Worker) -> Worker:
        if is_short.is_set() and worker.name == "push-search-hold":
            refused.append(worker.name)
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    def closed(sink: WebhookSink) -> None:
        sinks.append(sink)
        close(sink)

    monkeypatch.setattr(Worker, "start", start_some)
    monkeypatch.setattr(WebhookSink, "close", closed)
    with deployment.run(hook(receiver)) as run:
        run.start()
        run.append("orders", *range(50))
        wait_for(lambda: run.call("show")["error"] == "no more threads can be started", seconds=60)
        wait_for(lambda: len(sinks) == len(refused) > 1, seconds=60)
        assert not receiver.requests
        is_short.clear()
        wait_settled(run, 50)
        assert run.call("show")["error"] is None
        assert run.call("show")["dead"] == 0
    assert sorted(ids(receiver)) == list(range(50))


def test_a_consumer_that_is_made_on_a_full_disk_is_made_once(
    deployment: Deployment, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full just after it was stored: it delivered, though no call knew it, on state that became unreadable."""
    full, plain = [True], RealFile.pwrite

    def write(file: RealFile, data: bytes | memoryview, position: int) -> None:
        if full and b'["change","search",[["run"' in bytes(data):
            full.clear()
            raise OSError(errno.ENOSPC, "no space")
        plain(file, data, position)

    monkeypatch.setattr(RealFile, "pwrite", write)
    with deployment.run(hook(receiver)) as run:
        run.start()
        assert not full
        run.append("orders", 1, 2, 3)
        wait_for(lambda: sorted(ids(receiver)) == [1, 2, 3], seconds=60)
        assert run.call("show")["state"] == "active"
        run.append("orders", 4)
        wait_for(lambda: run.call("show")["acked"] == 4, seconds=60, what=lambda: run.call("show"))
    assert sorted(ids(receiver)) == [1, 2, 3, 4]
    with deployment.run(hook(receiver)) as again:
        assert again.call("show")["acked"] == 4


def test_deliveries_end_though_no_thread_can_be_started(
    deployment: Deployment, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deliveries of a stream went on behind its end, and its consumers' state stayed open."""
    start = Worker.start

    def refused(worker: Worker) -> Worker:
        if worker.name == "push-end":
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    monkeypatch.setattr(Worker, "start", refused)
    with deployment.run(hook(receiver)) as run:
        run.start()
        run.append("orders", 1)
        wait_settled(run, 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("push-")]
    log = str(run.home.delivery_folder("web") / LOG_NAME)
    assert log not in [file.path for file in psutil.Process().open_files()]


def test_a_sink_that_cannot_be_closed_keeps_no_state_open(
    deployment: Deployment, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of a package's sink left the state of all the stream's consumers open, and the end of the home undone."""
    close = WebhookSink.close

    def fails(sink: WebhookSink) -> None:
        close(sink)
        raise RuntimeError("a fault")

    monkeypatch.setattr(WebhookSink, "close", fails)
    with deployment.run(hook(receiver)) as run:
        run.start()
        run.append("orders", 1)
        wait_settled(run, 1)
    log = str(run.home.delivery_folder("web") / LOG_NAME)
    assert log not in [file.path for file in psutil.Process().open_files()]


def test_messages_in_flight_come_again_after_a_restart(deployment: Deployment, receiver: Receiver) -> None:
    receiver.answerer = answer(503, headers="retry-after: 3600\r\n")
    with deployment.run(hook(receiver)) as before:
        before.start()
        before.append("orders", 1, 2)
        wait_for(lambda: len(receiver.requests) == 2, seconds=120)
        wait_for(lambda: "503" in str(before.call("show")["error"]), seconds=120)
    receiver.answerer = answer(200)
    with deployment.run(hook(receiver)) as after:
        after.start()
        wait_settled(after, 2)
        assert {message["deliveries"] for message in messages(receiver)[2:]} == {3}
    with deployment.run() as without:
        without.start()
        without.append("orders", 3)
        assert without.call("show")["state"] == "paused"
        without.call("delete")
    assert 3 not in ids(receiver)


def test_clients_get_what_a_killed_process_had_for_a_sink_that_was_removed(
    deployment: Deployment, receiver: Receiver, tmp_path: Path
) -> None:
    """The messages were in flight for four hours: the time that a pusher may have them."""
    is_over = threading.Event()

    def waits(connection: socket.socket, request: Request) -> None:
        is_over.wait(60)
        answer(200)(connection, request)

    receiver.answerer = waits
    state, killed = deployment.folder / "data" / "delivery" / "web", tmp_path / "killed"
    with deployment.run(hook(receiver)) as before:
        before.start()
        before.append("orders", 1, 2)

        def in_flight() -> int:
            path = state / LOG_NAME
            facts = read_consumers(path, path.read_bytes())[1]["search"].state.facts
            return sum(fact.deadline > 0 for fact in facts.values())

        wait_for(lambda: in_flight() == 2, seconds=120)
        shutil.copytree(state, killed)
        is_over.set()
    shutil.rmtree(state)
    killed.rename(state)
    with deployment.run(SEARCH) as after:
        found = after.receive()
        assert [(json.loads(one["record"])["row"]["id"], one["deliveries"]) for one in found] == [(1, 2), (2, 2)]


def test_a_command_gets_lines(deployment: Deployment, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = json.dumps(["sh", "-c", f"cat >> {out}; echo ok"])
    with deployment.run(f'[streams.web.consumers.search]\nstart = "earliest"\ncommand = {{ argv = {argv} }}') as run:
        run.start()
        run.append("orders", *range(20))
        wait_settled(run, 20)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert sorted(line["record"]["row"]["id"] for line in lines) == list(range(20))


def test_another_package_delivers_as_the_guide_describes(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[2] / "docs/how-to/write-a-sink.md").read_text()
    module, entry_point, _ = re.findall(r"```(?:python|ini|toml)\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "file_sink.py").write_text(module)
    target = re.search(r'file = "(.*)"', entry_point)
    package, out = tmp_path / "file_sink-1.dist-info", tmp_path / "out"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: file_sink\nVersion: 1\n")
    assert target is not None
    (package / "entry_points.txt").write_text(f"[millstream.push_sinks]\nfile = {target[1]}\n")
    head = '[streams.web.consumers.search]\nstart = "earliest"\n'
    with deployment.run(f'{head}sink = {{ kind = "file", path = "{out}" }}') as missing:
        missing.start()
        missing.append("orders", *range(20))
        wait_for(lambda: "'file'" in str(missing.call("show")["error"]), what=lambda: missing.call("show"))
    monkeypatch.syspath_prepend(tmp_path)
    with deployment.run(f'{head}sink = {{ kind = "file", path = "{out}", mode = 1 }}') as wrong:
        wrong.start()
        wait_for(lambda: "setting path" in str(wrong.call("show")["error"]), what=lambda: wrong.call("show"))
    with deployment.run(f'{head}sink = {{ kind = "file", path = "{out}" }}') as run:
        run.start()
        wait_settled(run, 20)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["record"]["row"]["id"] for line in lines] == list(range(20))
        shown = run.call("show")
        assert (shown["sink"], shown["error"]) == ({"kind": "file", "path": "***"}, None)


@pytest.mark.parametrize(
    ("sink", "field"),
    [
        ({"command": {"argv": ["true"]}}, "command"),
        ({"sink": {"kind": "file"}}, "sink"),
        ({"webhook": {"url": "http://127.0.0.1/x", "secret": SECRET}}, "webhook.url"),
        ({"webhook": {"url": "https://example.com", "secret": SECRET, "allow_private": True}}, "webhook.allow_private"),
        ({"webhook": {"url": "https://example.com"}}, "webhook.secret"),
        ({"webhook": {"url": "https://example.com", "secret": SECRET, "no": 1}}, "webhook.no"),
        ({"webhook": "https://example.com"}, "webhook"),
        ({"webhook": {"url": "https://example.com", "secret": SECRET}, "redis": {"location": "redis://h"}}, "redis"),
        ({"allow_private": True}, "allow_private"),
        ({"redis": {"location": "unix:///run/redis.sock"}}, "redis.location"),
        *(
            ({"kafka": {"location": "h:1", "client": {name: value}}}, f"kafka.client.{name}")
            for name, value in {
                "sasl.oauthbearer.assertion.file": "/etc/hostname",
                "sasl.oauthbearer.assertion.jwt.template.file": "/etc/hostname",
                "sasl.oauthbearer.metadata.authentication.type": "azure_imds",
                "sasl.oauthbearer.token.endpoint.url": "https://example.com",
                "sasl.kerberos.principal": "app; true",
                "ssl.ca.location": "/etc/ssl/certs/ca-certificates.crt",
                "ssl.key.location": "/etc/hostname",
                "ssl.providers": "/tmp/provider",
                "ssl.engine.id": "pkcs11",
            }.items()
        ),
    ],
)
def test_what_a_request_may_not_set(deployment: Deployment, sink: dict[str, Any], field: str) -> None:
    with deployment.run() as run:
        with pytest.raises(DeliveryError, check=coded("invalid_consumer")) as error:
            run.call("create", {"name": "search", **sink}, name=None)
        assert error.value.details["field"] == field


def test_secrets_count_for_equality_and_arent_shown(deployment: Deployment) -> None:
    made: Callable[[str], Any] = lambda secret: {  # noqa: E731
        "name": "search",
        "webhook": {"url": "https://example.com/hook", "secret": secret, "headers": {"x-token": "t"}},
    }
    with deployment.run() as run:
        shown = run.call("create", made(SECRET), name=None)
        assert (shown["webhook"]["secret"], shown["webhook"]["headers"]) == ("***", {"x-token": "***"})
        assert run.call("create", made(SECRET), name=None) == shown
        with pytest.raises(DeliveryError, check=coded("consumer_exists")):
            run.call("create", made("whsec_" + base64.b64encode(bytes(25)).decode()), name=None)
    with deployment.run() as again:
        assert again.call("create", made(SECRET), name=None) == shown
