"""Alerts of a real home to a real receiver: signed, sent again, ended, and not lost or doubled by a restart."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.app.alerts.receiving import SECRET, alerts_of, told
from tests.app.homes import make_home, wait_for
from tests.cli.in_process import command
from tests.commands import Command
from tests.delivery.receivers import Receiver, answer
from tests.serving.serving_process import served

from millstream.app.alerts.alert_sender import Watch, watched_alerts
from millstream.app.open_home import OpenHome
from millstream.app.status import collect_status
from millstream.delivery.webhook_settings import WebhookSettings
from millstream.delivery.webhook_sink import webhook_of
from millstream.home.home import Home
from millstream.model.positions import Seq
from millstream.processes.role_locks import RoleLock
from millstream.protocol.retention import CutOff, HolderKind
from millstream.testing._servers.ports import free_port

STREAM = '[streams.web]\n[streams.web.keys]\n"public.orders" = ["id"]\n'


class Clock:
    """A time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_750_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as found:
        yield found


def home_of(folder: Path, url: str, more: str = "", http: str = "") -> Home:
    alerts = f'[alerts]\nurl = "{url}"\nsecret = "{SECRET}"\nlook_every = "50ms"\n{more}\n'
    return Home(make_home(folder / "home", f"{STREAM}{alerts}{http}"))


@contextmanager
def watching(home: Home, clock: Clock) -> Iterator[Watch]:
    settings = WebhookSettings.parse(home.config.alerts.webhook(), may_allow_private=True, needs_secret=False)
    with (
        closing(webhook_of(settings)) as webhook,
        closing(Watch(home, home.config.alerts, webhook.post, now_s=clock)) as watch,
    ):
        yield watch


def look(watch: Watch, clock: Clock, times: int = 1, every_s: float = 15) -> None:
    for _ in range(times):
        clock.now_s += every_s
        assert watch.look()


def make_dead_letter(opened: OpenHome) -> None:
    opened.consumers("web").create("search", start="earliest", max_deliver=1)
    opened.append("web", "orders", {"id": 1})
    with opened.consume("web", "search", wait_s=10) as messages:
        next(messages).nack()


def test_an_alert_is_sent_signed_once_then_repeated_then_resolved(
    tmp_path: Path, receiver: Receiver, clock: Clock
) -> None:
    home = home_of(tmp_path, receiver.url)
    with OpenHome(home) as opened, watching(home, clock) as watch:
        make_dead_letter(opened)
        look(watch, clock, times=5)
        (firing,) = alerts_of(receiver)
        data = firing["data"]
        assert firing["type"] == "alert.firing"
        assert (data["condition"], data["stream"], data["subject"], data["repeats"]) == (
            "consumer_dead_letters",
            "web",
            "search",
            0,
        )
        assert "consumer search has 1 dead letter" in firing["text"]
        assert (data["home"], data["ended"]) == (str(home.path), None)
        look(watch, clock, every_s=4 * 3600)
        assert [one["data"]["repeats"] for one in alerts_of(receiver)] == [0, 1]
        opened.consumers("web").drop("search")
        look(watch, clock, times=4)
        resolved = alerts_of(receiver)[-1]
        assert (resolved["type"], resolved["data"]["id"]) == ("alert.resolved", data["id"])
        assert resolved["data"]["began"] == data["began"] < resolved["data"]["ended"] == resolved["timestamp"]
        look(watch, clock, times=3)
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == len(receiver.requests) == 3


def test_a_restart_sends_nothing_twice(tmp_path: Path, receiver: Receiver, clock: Clock) -> None:
    home = home_of(tmp_path, receiver.url)
    with OpenHome(home) as opened:
        make_dead_letter(opened)
        for _ in range(3):
            with watching(home, clock) as watch:
                look(watch, clock, times=2)
        assert told(receiver) == [("alert.firing", "consumer_dead_letters", "search")]
        opened.consumers("web").drop("search")
        with watching(home, clock) as watch:
            look(watch, clock, times=4)
    assert [one["type"] for one in alerts_of(receiver)] == ["alert.firing", "alert.resolved"]


def test_a_receiver_that_refuses_shows_everywhere_and_gets_the_alert_later(
    tmp_path: Path, receiver: Receiver, clock: Clock
) -> None:
    receiver.answerer = answer(503, "retry-after: 0\r\n")
    home = home_of(tmp_path, receiver.url)
    with OpenHome(home) as opened, watching(home, clock) as watch:
        make_dead_letter(opened)
        look(watch, clock, times=3)
        assert len(receiver.requests) == 3
        assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
        status = collect_status(home)
        assert status["alerts"]["error"] == "the receiver answered 503"
        assert [one["kind"] for one in status["conditions"]] == ["consumer_dead_letters"]
        assert "hook" not in json.dumps(status["alerts"])
        text = command("--home", str(home.path), "status")
        assert b"the receiver answered 503" in text.stderr
        assert b"consumer_dead_letters: consumer search has 1 dead letter" in text.stdout
        opened.append("web", "orders", {"id": 2})  # nothing else waits for the receiver
        receiver.answerer = answer(200)
        look(watch, clock, times=2)
        assert collect_status(home)["alerts"]["error"] is None
    assert len(receiver.requests) == 4


def test_an_address_that_nothing_answers_loses_no_alert(tmp_path: Path, clock: Clock) -> None:
    with Receiver() as gone:
        url = gone.url
    home = home_of(tmp_path, url)
    with OpenHome(home) as opened, watching(home, clock) as watch:
        make_dead_letter(opened)
        look(watch, clock, times=4)
        assert "can't be reached" in collect_status(home)["alerts"]["error"]
        assert home.alerts_file.stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_a_stalled_consumer_and_one_that_was_cut_off(tmp_path: Path, receiver: Receiver, clock: Clock) -> None:
    home = home_of(tmp_path, receiver.url)
    with OpenHome(home) as opened, watching(home, clock) as watch:
        consumers = opened.consumers("web")
        consumers.create("slow", start="earliest")
        opened.append("web", "orders", [{"id": n} for n in range(3)])
        look(watch, clock, times=40)
        assert told(receiver) == []
        look(watch, clock)
        assert told(receiver) == [("alert.firing", "consumer_stalled", "slow")]
        # `status` knows of it by the observations of the process that looks.
        with opened.consume("web", "slow", wait_s=10) as messages:
            next(messages)
            next(messages)
        look(watch, clock, times=4)
        assert told(receiver)[1:] == [("alert.resolved", "consumer_stalled", "slow")]
        with home.open_catalog() as catalog:
            stream = catalog.stream("web").id
            assert catalog.cut_off(stream, CutOff("consumer:slow", HolderKind.CONSUMER, Seq(3), Seq(4)))
        wait_for(lambda: consumers.get("slow")["state"] == "cut_off", seconds=60)
        look(watch, clock)
        assert told(receiver)[2:] == [("alert.firing", "consumer_cut_off", "slow")]
        consumers.rewind("slow", "latest")
        look(watch, clock, times=4)
    assert told(receiver)[3:] == [("alert.resolved", "consumer_cut_off", "slow")]


def test_an_alert_is_sent_about_a_follower_that_was_cut_off_and_none_about_a_slot_that_was_dropped(
    tmp_path: Path, receiver: Receiver, clock: Clock
) -> None:
    home = home_of(tmp_path, receiver.url, "[streams.web.source]\ndsn = 'host=127.0.0.1 port=1'")
    with OpenHome(home) as opened, home.open_catalog() as catalog, watching(home, clock) as watch:
        opened.append("web", "orders", {"id": 1})
        stream = catalog.stream("web").id
        catalog.put_fact(f"capture/{stream}", "slot_dropped", value=True)
        catalog.set_needed_from(stream, "follower b", Seq(1), kind=HolderKind.FOLLOWER)
        assert catalog.cut_off(stream, CutOff("follower b", HolderKind.FOLLOWER, Seq(1), Seq(2)))
        look(watch, clock, times=41)
    shown = collect_status(home)["conditions"]
    assert [(one["kind"], one["is_alert"]) for one in shown] == [("slot_dropped", False), ("follower_cut_off", True)]
    text = command("--home", str(home.path), "status").stdout
    assert b"  slot_dropped: the slot was dropped: the next run makes a new one and copies every table again\n" in text
    assert b"  follower_cut_off: the follower b was cut off: the log began at 2 then\n" in text
    assert told(receiver) == [("alert.firing", "follower_cut_off", "b")]


def test_without_a_secret_nothing_is_signed_and_without_an_address_nothing_is_sent(
    tmp_path: Path, receiver: Receiver
) -> None:
    home = Home(make_home(tmp_path / "home", STREAM))
    with OpenHome(home) as opened:
        make_dead_letter(opened)
        with watched_alerts(home):
            pass
        assert not home.alerts_file.exists()
        assert [one["kind"] for one in collect_status(home)["conditions"]] == ["consumer_dead_letters"]
        assert collect_status(home)["alerts"] is None
        headers = '[alerts.headers]\nauthorization = "Bearer x"\n'
        text = f'{STREAM}[alerts]\nurl = "{receiver.url}"\nlook_every = "50ms"\n{headers}'
        unsigned = Home(make_home(tmp_path / "home", text))
        with watched_alerts(unsigned):
            wait_for(lambda: receiver.requests, seconds=60)
    (request,) = receiver.requests
    assert "webhook-signature" not in request.headers
    assert request.headers["authorization"] == "Bearer x"


def test_one_process_of_a_home_sends_and_another_follows_it(tmp_path: Path, receiver: Receiver, clock: Clock) -> None:
    home = home_of(tmp_path, receiver.url)
    with OpenHome(home) as opened:
        make_dead_letter(opened)
        with RoleLock.take(home.run_folder, "alerts"), watching(home, clock) as watch:
            look(watch, clock, times=2)
            assert receiver.requests == []
        with watching(home, clock) as watch:
            look(watch, clock)
    assert len(receiver.requests) == 1


def test_a_damaged_file_of_alerts_is_begun_again(tmp_path: Path, receiver: Receiver, clock: Clock) -> None:
    home = home_of(tmp_path, receiver.url)
    with OpenHome(home) as opened:
        make_dead_letter(opened)
        for content in (b"", b"[]", b'{"seen": {}}', b'{"seen": {"looked": 0, "facts": {}, "slots": {"a": 1}}}'):
            home.alerts_file.write_bytes(content)
            receiver.requests.clear()
            collect_status(home)
            with watching(home, clock) as watch:
                look(watch, clock)
            assert told(receiver) == [("alert.firing", "consumer_dead_letters", "search")]


@pytest.mark.long
def test_serve_sends_alerts(tmp_path: Path, receiver: Receiver) -> None:
    home = home_of(tmp_path, receiver.url, http='[http]\nlisten = "127.0.0.1:0"\n')
    with OpenHome(home) as opened:
        make_dead_letter(opened)
    with served(home.path):
        wait_for(lambda: receiver.requests, seconds=60)
    assert told(receiver) == [("alert.firing", "consumer_dead_letters", "search")]


@pytest.mark.long
def test_follow_sends_alerts(tmp_path: Path, receiver: Receiver) -> None:
    """A node that only follows has no other process: no alert said that it couldn't reach its leader."""
    nodes = f'[replication]\nnode = "a"\n[replication.nodes]\na = "grpc://127.0.0.1:1"\nb = "grpc://127.0.0.1:{free_port()}"\n'
    home = home_of(tmp_path, receiver.url, more='stalled_after = "1s"\n', http=nodes)
    process = Command(("--home", str(home.path), "follow", "b"), env={**os.environ, "HOME": "/nonexistent"})
    try:
        wait_for(lambda: receiver.requests, seconds=60)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert told(receiver)[0][:2] == ("alert.firing", "replication_stalled")
