"""Shipments over Arrow Flight: what all transports do, silent peers, refused peers, and expired certificates."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import wait_for
from tests.replication.flight_server import ExchangeServer
from tests.serving.servers import Authority

from millstream.codec.replication_messages import encode_message
from millstream.errors import (
    AccessError,
    LinkLost,
    MillstreamError,
    ReplicationError,
    ShipmentUnreadable,
    Unauthenticated,
    UsageError,
)
from millstream.ports import FollowerLink, LeaderLink
from millstream.replication.flight.address import LeaderAddress
from millstream.replication.flight.link_watch import LinkWatch, WatchedLink
from millstream.replication.flight.transport import FlightTransport
from millstream.replication.flight.wire import FollowRequest
from millstream.testing.errors import coded
from millstream.testing.transport import (
    NODE,
    LinkConformance,
    arrived,
    flooding,
    hello_of,
    linked,
    next_error,
    shipments_of,
    take_until,
)
from millstream.workers import Worker


class FlightStage:
    window_bytes = 4 << 20

    def __init__(self, *, silent_s: float = 10.0) -> None:
        self._silent_s = silent_s
        self._leader = FlightTransport("web", window_bytes=self.window_bytes, silent_s=silent_s)
        self.server = ExchangeServer(self._leader)
        self._followers: list[FlightTransport] = []

    def leader(self) -> FlightTransport:
        return self._leader

    def follower(self) -> FlightTransport:
        address = LeaderAddress(self.server.place)
        transport = FlightTransport("web", address, window_bytes=self.window_bytes, silent_s=self._silent_s)
        self._followers.append(transport)
        return transport

    def spoil(self, link: FollowerLink) -> None:
        link._sending.ship([b"nonsense"], 8)  # type: ignore[attr-defined]

    def close(self) -> None:
        for transport in (*self._followers, self._leader):
            transport.close()
        wait_for(lambda: self.server.calls == 0, what=lambda: "calls that don't end")
        self.server.shutdown()


@pytest.fixture
def stage() -> Iterator[FlightStage]:
    stage = FlightStage()
    yield stage
    stage.close()


class TestFlight(LinkConformance):
    @pytest.fixture
    def stage(self) -> Iterator[FlightStage]:
        stage = FlightStage()
        yield stage
        stage.close()


# --- peers that aren't there -----------------------------------------------------------------------------------------


@pytest.fixture
def impatient() -> Iterator[FlightStage]:
    stage = FlightStage(silent_s=2.0)
    yield stage
    stage.close()


@contextlib.contextmanager
def peer(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a node in its own process; yield the process and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.replication.peer_process", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_an_idle_link_stays(impatient: FlightStage):
    leader, follower = linked(impatient, hello_of())
    assert (follower.recv(3.0), leader.recv(0.1)) == (None, None)
    sent = shipments_of(segments=1)
    leader.send(sent[0])
    assert take_until(follower, lambda found: bool(found.sizes)).same_as(arrived(sent[:1]))


@pytest.mark.sampled
@pytest.mark.parametrize("is_flooded", [False, True], ids=["idle", "flooded"])
def test_a_follower_that_stands_still_is_given_up_and_its_call_ends(impatient: FlightStage, is_flooded: bool):
    with peer("follow", impatient.server.place) as (process, said):
        leader = impatient.leader().accept(60.0)
        assert leader is not None
        assert said == "connected"
        os.kill(process.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            sending = flooding(impatient, leader, pool, times=50)[1] if is_flooded else None
            error = next_error(leader.recv)
            assert isinstance(error, LinkLost)
            assert "sent nothing" in error.message
            if sending is not None:
                assert isinstance(sending.exception(60), LinkLost)
        wait_for(lambda: impatient.server.calls == 0, what=lambda: "a call that doesn't end")


def test_a_leader_that_stands_still_is_given_up():
    with peer("lead") as (process, place):
        transport = FlightTransport("web", LeaderAddress(place), silent_s=2.0)
        follower = transport.connect(hello_of(), 60.0)
        os.kill(process.pid, signal.SIGSTOP)
        error = next_error(follower.recv)
        assert isinstance(error, LinkLost)
        assert "sent nothing" in error.message
        with pytest.raises(LinkLost, match="didn't answer"):
            transport.connect(hello_of(), 0.5)
        transport.close()


def test_a_leader_that_is_gone_breaks_the_link_and_cant_be_reached():
    with peer("lead") as (process, place):
        transport = FlightTransport("web", LeaderAddress(place))
        follower = transport.connect(hello_of(), 60.0)
        process.kill()
        process.wait()
        assert isinstance(next_error(follower.recv), LinkLost)
        with pytest.raises(LinkLost) as caught:
            transport.connect(hello_of(), 5.0)
        assert caught.value.details["place"] == place
        transport.close()


# --- authorization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refusal",
    [
        Unauthenticated("no token"),
        AccessError(
            "no right to admin stream web",
            code="forbidden",
            hint="another token",
            name="reader",
            right="admin",
            stream="web",
        ),
        ReplicationError("another one", code="other_stream"),
    ],
    ids=lambda error: error.code,
)
def test_what_the_server_refuses_a_follower_with_is_what_it_gets(stage: FlightStage, refusal: MillstreamError):
    stage.server.refuses = refusal
    with pytest.raises(type(refusal)) as caught:
        stage.follower().connect(hello_of(), 60.0)
    assert caught.value.as_dict() == refusal.as_dict()


def test_a_token_that_is_revoked_ends_the_link(impatient: FlightStage):
    _, follower = linked(impatient, hello_of())
    revoked = Unauthenticated("revoked")

    def check() -> None:
        raise revoked

    impatient.server.check = check
    _, other = linked(impatient, hello_of())
    assert isinstance(next_error(other.recv), Unauthenticated)
    assert follower.recv(0.0) is None


def test_a_token_is_shown_with_the_call(stage: FlightStage):
    address = LeaderAddress(stage.server.place, token=lambda: "mst_secret")
    stage.server.refuses = UsageError("not today")
    transport = FlightTransport("web", address)
    with pytest.raises(UsageError):
        transport.connect(hello_of(), 60.0)
    assert stage.server.authorizations == ["Bearer mst_secret"]
    transport.close()


def test_an_exchange_that_asks_for_something_else_is_refused():
    request = FollowRequest("web", 1, hello_of())
    assert FollowRequest.parse(request.command()) == request
    with pytest.raises(UsageError):
        FollowRequest.parse(b"SELECT 1")
    for cut in range(len(request.command())):
        with pytest.raises((UsageError, ShipmentUnreadable)):
            FollowRequest.parse(request.command()[:cut])
    endless = FollowRequest("web", float("inf"), hello_of()).command()  # type: ignore[arg-type] # JSON has it as Infinity
    with pytest.raises(ShipmentUnreadable):
        FollowRequest.parse(endless)


def test_a_shipment_that_is_longer_than_it_says_is_unreadable(stage: FlightStage):
    leader, follower = linked(stage, hello_of())
    leader._sending.ship([b"nonsense"], 7)  # type: ignore[attr-defined]
    assert isinstance(next_error(follower.recv), ShipmentUnreadable)
    assert isinstance(next_error(leader.recv), LinkLost)


def test_a_damaged_shipment_is_unreadable_and_the_leader_hears_that_the_link_is_gone(stage: FlightStage):
    leader, follower = linked(stage, hello_of())
    whole = bytearray(b"".join(encode_message(shipments_of()[0])))
    whole[len(whole) // 2] ^= 1
    leader._sending.ship([bytes(whole)], len(whole))  # type: ignore[attr-defined]
    assert isinstance(next_error(follower.recv), ShipmentUnreadable)
    assert isinstance(next_error(leader.recv), LinkLost)


# --- certificates ----------------------------------------------------------------------------------------------------


@dataclass
class Secured:
    """A leader behind TLS."""

    authority: Authority
    server: ExchangeServer

    def connect(self, shown: tuple[Path, Path] | None = None, trusted: Path | None = None) -> LeaderLink:
        certificate, key = shown or (None, None)
        address = LeaderAddress(self.server.place, True, trusted or self.authority.file, certificate, key)
        return FlightTransport("web", address).connect(hello_of(), 60.0)


@contextlib.contextmanager
def secured(folder: Path, *, is_mutual: bool = False, **of_server: dt.datetime) -> Iterator[Secured]:
    authority = Authority(folder)
    certificate, key = authority.issue("server", **of_server)
    options: dict[str, Any] = {"tls_certificates": [(certificate.read_bytes(), key.read_bytes())]}
    if is_mutual:
        options |= {"verify_client": True, "root_certificates": authority.file.read_bytes()}
    transport = FlightTransport("web")
    server = ExchangeServer(transport, scheme="grpc+tls", **options)
    try:
        yield Secured(authority, server)
    finally:
        transport.close()
        wait_for(lambda: server.calls == 0, what=lambda: "calls that don't end")
        server.shutdown()


YESTERDAY = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)


def ships(of: Secured, follower: LeaderLink) -> None:
    leader = of.server.transport.accept(60.0)
    assert leader is not None
    (sent,) = shipments_of(segments=1, shards=1, segment_bytes=10)
    leader.send(sent)
    assert take_until(follower, lambda found: bool(found.sizes)).same_as(arrived([sent]))


def test_over_tls(tmp_path: Path):
    with secured(tmp_path) as of:
        ships(of, of.connect())
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(AccessError, check=coded("certificate_unusable"), match="certificate of localhost"):
            of.connect(trusted=Authority(other).file)
        with pytest.raises(LinkLost, match="speaks TLS") as caught:
            FlightTransport("web", LeaderAddress(of.server.place)).connect(hello_of(), 60.0)
        assert "grpc+tls://" in caught.value.hint


def test_with_certificates_of_both(tmp_path: Path):
    with secured(tmp_path, is_mutual=True) as of:
        shown = of.authority.issue("follower", ["north-2"])
        ships(of, of.connect(shown))
        with pytest.raises(AccessError, check=coded("certificate_unusable")):
            of.connect()
        # A renewed certificate is read when the next link is made.
        of.authority.issue("follower", ["north-2"], not_after=YESTERDAY)
        with pytest.raises(AccessError, check=coded("certificate_unusable"), match="expired"):
            of.connect(shown)
        of.authority.issue("follower", ["north-2"])
        ships(of, of.connect(shown))
        shown[0].unlink()
        with pytest.raises(AccessError, check=coded("certificate_unusable"), match="can't be read"):
            of.connect(shown)


def test_a_leaders_certificate_that_has_run_out_is_told_of_as_that(tmp_path: Path):
    with (
        secured(tmp_path, not_after=YESTERDAY) as of,
        pytest.raises(AccessError, check=coded("certificate_unusable"), match="expired") as caught,
    ):
        of.connect()
    assert caught.value.details["place"] == of.server.place


# --- threads that the system refuses -------------------------------------------------------------------------------


class Looked(WatchedLink):
    def __init__(self) -> None:
        super().__init__(10.0)
        self.looked = threading.Event()

    def look(self, now_s: float) -> None:
        del now_s
        self.looked.set()

    def _cut(self) -> None: ...


def test_links_are_watched_after_a_watching_thread_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread was ever started from then on: a silent link stayed."""
    watch, refused, link = LinkWatch(), Looked(), Looked()
    with refusing(monkeypatch, "replication-watch"), pytest.raises(OSError, match="no more threads"):
        watch.add(refused)
    assert watch.links() == [], "a link that could not be added can't be removed, and would be watched for ever"
    watch.add(link)
    assert link.looked.wait(10.0)
    watch.remove(link)


@pytest.mark.parametrize("thread", ["replication-link", "replication-beats", f"replication-beats-{NODE}"])
def test_a_link_that_lacks_a_thread_ends_at_both_ends(
    stage: FlightStage, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    """The leader kept one whose call had ended, and would have written to it; the follower's was watched for ever."""
    follower = stage.follower()
    with refusing(monkeypatch, thread), contextlib.suppress(LinkLost):
        assert isinstance(next_error(follower.connect(hello_of(), 10.0).recv), LinkLost)
    for transport in (follower, stage.leader()):
        wait_for(lambda its=transport: not its._watch.links(), what=lambda: "links that are watched")  # type: ignore[misc]
    kept = stage.leader().accept(0.0)
    if kept is not None:
        assert isinstance(next_error(kept.recv), LinkLost)
        with pytest.raises(LinkLost):
            kept.send(shipments_of(segments=1)[0])
    assert linked(stage, hello_of())[0].hello == hello_of()


@contextlib.contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Refuse every thread of that name."""
    start = Worker.start

    def begun(worker: Worker) -> Worker:
        if worker.name == name:
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", begun)
        yield
