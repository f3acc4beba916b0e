"""Appends over a network that loses answers, to busy and restarting servers: each row is stored once, or an error."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme
from tests.aio.everywhere import a_home
from tests.app.homes import done, make_home
from tests.app.served import serving
from tests.client.test_remote_reading import answering, http

import millstream
import millstream.aio
from millstream.errors import (
    AccessError,
    AppendOutcomeUnknown,
    Fenced,
    MillstreamError,
    NotEnoughReplicas,
    Overloaded,
    ReadOnly,
    RemoteError,
    Unauthenticated,
    UsageError,
)
from millstream.testing._servers.ports import free_port
from millstream.testing.errors import coded

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n'
REMOTE = ("connect", "aio.connect")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", WEB)


def numbers(home: Path, table: str = "clicks") -> list[int]:
    with millstream.open(home) as opened:
        return [n for batch in opened.read("web", table=table) for n in batch.column("n").to_pylist()]


@contextlib.contextmanager
def losing(url: str, every: int) -> Iterator[str]:
    """A connection to a server that loses every n-th answer: the request arrives, and the connection breaks."""
    port = int(url.rpartition(":")[2])
    counted = 0
    lock = threading.Lock()
    threads: list[threading.Thread] = []

    def carry(near: socket.socket) -> None:
        nonlocal counted
        with near, socket.create_connection(("127.0.0.1", port)) as far:

            def forth() -> None:
                with contextlib.suppress(OSError):
                    while data := near.recv(1 << 16):
                        far.sendall(data)
                    far.shutdown(socket.SHUT_WR)

            there = threading.Thread(target=forth)
            there.start()
            with contextlib.suppress(OSError):
                while data := far.recv(1 << 16):
                    with lock:
                        counted += 1
                        lost = counted % every == 0
                    if lost:
                        near.shutdown(socket.SHUT_RDWR)
                        break
                    near.sendall(data)
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
            there.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    thread = threading.Thread(target=carry, args=(near,))
                    threads.append(thread)
                    thread.start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(180)
            for thread in threads:
                thread.join(180)
            assert not accepting.is_alive()


@pytest.mark.parametrize("way", REMOTE)
@pytest.mark.siege
def test_answers_that_are_lost_double_nothing(home: Path, way: str) -> None:
    with serving(home) as url, losing(url, 3) as lossy, a_home(way, lossy) as there:

        def some(name: int) -> int:
            return sum(there.append("web", "clicks", {"n": name * 100 + n}).duplicate for n in range(20))

        with ThreadPoolExecutor(4) as pool:
            again = sum(pool.map(some, range(4)))
        assert again >= 5, "what was lost was sent again, and known"
    assert sorted(numbers(home)) == sorted(name * 100 + n for name in range(4) for n in range(20))


@pytest.mark.parametrize("way", REMOTE)
def test_a_server_that_goes_and_comes_back_is_waited_for(home: Path, way: str) -> None:
    port = free_port()  # no other process takes the port while the server is away
    with serving(home, port=port) as url, a_home(way, url) as there:
        there.append("web", "clicks", {"n": 1})
    with a_home(way, url) as there:
        with pytest.raises(RemoteError, check=coded("server_unreachable")):
            there.append("web", "clicks", {"n": 2}, deadline_s=0.3)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(there.append, "web", "clicks", {"n": 3}, deadline_s=60)
            with serving(home, port=port):
                assert waits.result().row_count == 1
    assert numbers(home) == [1, 3]


@pytest.mark.parametrize("way", REMOTE)
def test_a_deadline_may_be_longer_than_a_server_lets_a_request_wait(home: Path, way: str) -> None:
    with serving(home) as url, a_home(way, url) as there:
        assert there.append("web", "clicks", {"n": 1}, deadline_s=3600).row_count == 1


@pytest.mark.parametrize("way", REMOTE)
def test_what_is_meant_for_this_machine_goes_to_no_proxy(home: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(home) as url, a_home(way, url) as there:
        assert there.append("web", "clicks", {"n": 1}, deadline_s=1).row_count == 1


def test_an_address_with_a_secret_in_it_is_refused_without_telling_it() -> None:
    for connect in (millstream.connect, millstream.aio.connect):
        with pytest.raises(UsageError) as caught:
            connect("http://me:s3cret@127.0.0.1:8787")
        assert "s3cret" not in str(caught.value)


BUSY = json.dumps({"code": "overloaded", "detail": "full", "hint": "", "details": {}}).encode()
FULL = http(BUSY, status="429 Too Many Requests", kind="application/problem+json", more="retry-after: 0\r\n")


def refusing(code: str, status: str) -> bytes:
    """Return an answer that refuses an append."""
    said = json.dumps({"code": code, "detail": "no", "hint": "", "details": {}}).encode()
    return http(said, status=status, kind="application/problem+json")


CUT = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"


@pytest.mark.parametrize("way", REMOTE)
@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([FULL], Overloaded),
        ([CUT], AppendOutcomeUnknown),
        ([b""], AppendOutcomeUnknown),
        # The first attempt may be stored, whatever the second attempt's answer says.
        ([CUT, FULL], AppendOutcomeUnknown),
        ([CUT, refusing("unauthenticated", "401 Unauthorized")], AppendOutcomeUnknown),
        # Without its key the row would be stored twice.
        ([CUT, refusing("sessions_need_one_writer", "409 Conflict")], AppendOutcomeUnknown),
        # These errors are permanent, so the client doesn't retry. The append isn't stored, unless an earlier
        # attempt was.
        ([refusing("read_only", "503 Service Unavailable")], ReadOnly),
        ([refusing("fenced", "503 Service Unavailable")], Fenced),
        ([CUT, refusing("read_only", "503 Service Unavailable")], AppendOutcomeUnknown),
        ([refusing("not_enough_replicas", "503 Service Unavailable")], NotEnoughReplicas),
        # The write is durable on that node, whatever happened to the node later.
        (
            [refusing("not_enough_replicas", "503 Busy"), refusing("fenced", "503 Service Unavailable")],
            NotEnoughReplicas,
        ),
        ([http(b"oops", more="content-encoding: gzip\r\n")], AppendOutcomeUnknown),
        ([http(b"oops", status="502 Bad Gateway", kind="text/plain")], AppendOutcomeUnknown),
    ],
)
def test_at_the_deadline_it_is_told_what_is_known(way: str, answers: list[bytes], error: type[MillstreamError]) -> None:
    deadline_s = (60.0 if error in {ReadOnly, Fenced} else 0.0) if len(answers) == 1 else 1.0
    with answering(*answers) as url, a_home(way, url) as there, pytest.raises(error) as caught:
        there.append("web", "clicks", {"n": 1}, deadline_s=deadline_s)
    assert error in {Overloaded, ReadOnly, Fenced} or caught.value.details["idempotency_key"]


def test_who_may_not_write_is_refused_by_the_same_errors(home: Path) -> None:
    make_home(home, WEB + "[streams.other]\n[http]\ntokens_required = true\n")
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"n": 0})
        opened.append("other", "clicks", {"n": 0})

    def token(*words: str) -> str:
        return str(json.loads(done(home, "token", "create", "--json", *words))["token"])

    reader, writer = token("--name", "r", "--stream", "web=read"), token("--name", "w", "--stream", "web=write")
    with serving(home) as url:
        for wrong in (None, "mst_wrong", reader[:-1] + "x"):
            with millstream.connect(url, token=wrong) as there, pytest.raises(Unauthenticated):
                there.token("web")
        with millstream.connect(url, token=reader) as there:
            assert there.streams() == ["web"]
            assert there.token("web").minimum == 1
            assert sum(batch.num_rows for batch in there.read("web")) == 1
            for refused in (
                lambda: there.append("web", "clicks", {"n": 1}),
                lambda: there.token("other"),
                lambda: list(there.read("other")),
                lambda: list(there.read_latest("other", "clicks")),
                lambda: there.query("select 1", stream="other"),
            ):
                with pytest.raises(AccessError, check=coded("forbidden")):
                    refused()
        with millstream.connect(url, token=writer) as there:
            there.append("web", "clicks", {"n": 2})
            for refused in (lambda: there.token("web"), lambda: list(there.read("web"))):
                with pytest.raises(AccessError, check=coded("forbidden")):
                    refused()
    assert numbers(home) == [0, 2]


def test_a_server_proves_who_it_is_and_its_caller_too(home: Path, tmp_path: Path) -> None:
    import ssl

    authority, other = trustme.CA(), trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("till@shop.example")
    files: dict[str, str] = {}
    for name, pem in {
        "authority": authority.cert_pem.bytes(),
        "other": other.cert_pem.bytes(),
        "server": server.private_key_and_cert_chain_pem.bytes(),
        "client": client.private_key_and_cert_chain_pem.bytes(),
    }.items():
        (tmp_path / name).write_bytes(pem)
        files[name] = str(tmp_path / name)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files["authority"])
    context.load_cert_chain(files["server"])
    context.verify_mode = ssl.CERT_REQUIRED
    with serving(home, context=context) as url:
        with millstream.connect(url, verify=files["authority"], cert=files["client"]) as there:
            assert there.append("web", "clicks", {"n": 1}).row_count == 1
        for asks, is_trusted in (
            ({"verify": files["authority"]}, True),
            ({"verify": files["other"], "cert": files["client"]}, False),
            ({"cert": files["client"]}, False),
        ):
            with (
                millstream.connect(url, timeout_s=0.3, **asks) as there,
                pytest.raises(RemoteError, check=coded("server_unreachable")) as caught,
            ):
                there.token("web")
            assert ("verify=" in caught.value.hint) is not is_trusted
    for wrong in ({"verify": False}, {"verify": "/nonexistent"}, {"cert": files["authority"]}):
        with pytest.raises(UsageError):
            millstream.connect("https://127.0.0.1", **wrong)


def test_a_session_goes_on_over_lost_answers(home: Path) -> None:
    with serving(home) as url, losing(url, 4) as lossy, millstream.connect(lossy) as there:
        session = there.session("web", "till")
        for n in range(30):
            session.append("clicks", {"n": n})
    assert numbers(home) == list(range(30))
