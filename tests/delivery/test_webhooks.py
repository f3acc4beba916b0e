"""Webhooks: signed requests, and receivers that answer slowly, badly or never."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any

import pytest
import trustme
from tests.app.homes import wait_for
from tests.delivery.receivers import Answerer, Receiver, Request, answer

from millstream.delivery.sinks import ACCEPTED, Outcome, PushMessage, Verdict, failed
from millstream.delivery.webhook_exchange import ANSWER_BYTES, HttpSender, Resolve
from millstream.delivery.webhook_settings import WebhookSettings
from millstream.delivery.webhook_signature import signatures
from millstream.delivery.webhook_sink import WebhookSink, retry_after_s, webhook_id_of
from millstream.errors import DeliveryError
from millstream.testing.errors import coded
from millstream.workers import call_in_thread

OLD = "whsec_" + base64.b64encode(b"the old secret, 24 bytes").decode()
NEW = "whsec_" + base64.b64encode(b"the new secret, 24 bytes").decode()
NOW_S = 1_790_000_000.0
URL = "https://example.com/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def message(number: int = 0, *, deliveries: int = 1, group: str | None = "a") -> PushMessage:
    record = json.dumps({"op": "c", "table": "public.orders", "after": {"id": number, "name": "é"}}).encode()
    return PushMessage(f"shop-0-1-{number}", group, deliveries, record)


def sink_of(url: str, *, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None, **more: Any) -> WebhookSink:
    written = {"url": url, "secret": OLD, "allow_private": True, "timeout": "10s"} | more
    settings = WebhookSettings.parse(written, may_allow_private=True)
    options: dict[str, Any] = {} if resolve is None else {"resolve": resolve}
    sender = HttpSender(
        settings.receiver,
        connections=settings.pacing.concurrency,
        allow_private=settings.allow_private,
        tls=tls,
        **options,
    )
    return WebhookSink(settings, sender, now_s=lambda: NOW_S)


def delivered(url: str, **more: Any) -> Outcome:
    sink = sink_of(url, **more)
    try:
        return sink.deliver([message()])
    finally:
        sink.close()


# --- the request -----------------------------------------------------------------------------------------------------


def test_a_request_has_the_messages_and_a_signature_for_each_secret(receiver: Receiver) -> None:
    sink = sink_of(receiver.url, secret=[NEW, OLD], headers={"Authorization": "Bearer abc"})
    assert sink.deliver([message(1), message(2, deliveries=3, group=None)]) == ACCEPTED
    sink.close()
    (request,) = receiver.requests
    assert request.target == "/hook?a=b"
    assert json.loads(request.body) == {
        "messages": [
            {"id": "shop-0-1-1", "deliveries": 1, "group": "a", "record": message(1).value},
            {"id": "shop-0-1-2", "deliveries": 3, "group": None, "record": message(2).value},
        ]
    }
    headers = request.headers
    assert headers["host"] == f"127.0.0.1:{receiver.port}"
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer abc"
    assert headers["webhook-timestamp"] == str(int(NOW_S))
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + request.body
    expected = [
        "v1," + base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()
        for secret in (b"the new secret, 24 bytes", b"the old secret, 24 bytes")
    ]
    assert headers["webhook-signature"].split(" ") == expected


def test_a_signature_is_that_of_the_published_example() -> None:
    settings = WebhookSettings.parse({"url": URL, "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"})
    signature = signatures(settings.keys, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_id_of_a_request_is_that_of_its_messages_whatever_their_deliveries() -> None:
    first, again = [message(1), message(2)], [message(1, deliveries=2), message(2, deliveries=2)]
    assert webhook_id_of(first) == webhook_id_of(again)
    assert len({webhook_id_of(first), webhook_id_of(first[:1]), webhook_id_of(first[::-1])}) == 3
    assert webhook_id_of(first[:1]) == "shop-0-1-1"
    assert webhook_id_of([PushMessage("strom\r\nx: ü", None, 1, b"{}")]).isascii()


def test_connections_are_kept_and_a_closed_one_is_replaced_at_once(receiver: Receiver) -> None:
    sink = sink_of(receiver.url)
    assert [sink.deliver([message(number)]) for number in range(5)] == [ACCEPTED] * 5
    assert {request.connection for request in receiver.requests} == {1}

    def goodbye(connection: socket.socket, request: Request) -> None:
        answer(200)(connection, request)
        connection.shutdown(socket.SHUT_RDWR)

    receiver.answerer = goodbye
    assert [sink.deliver([message(number)]) for number in range(3)] == [ACCEPTED] * 3
    sink.close()


def test_a_connection_that_closes_as_it_is_used_again_is_replaced_at_once(receiver: Receiver) -> None:
    """Its receiver may have closed it while the request was on its way: that is no failure."""

    def once(connection: socket.socket, request: Request) -> None:
        if [other.connection for other in receiver.requests].count(request.connection) == 1:
            answer(200)(connection, request)
        else:
            connection.shutdown(socket.SHUT_RDWR)

    receiver.answerer = once
    sink = sink_of(receiver.url)
    assert [sink.deliver([message(number)]) for number in range(3)] == [ACCEPTED] * 3
    sink.close()
    assert [request.connection for request in receiver.requests] == [1, 1, 2, 2, 3]


def test_proxies_of_the_environment_are_not_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert delivered(receiver.url) == ACCEPTED


def test_many_records_go_out_in_a_second(receiver: Receiver) -> None:
    """A bound that a slow machine keeps too; the benchmark has the true figure."""
    sink = sink_of(receiver.url, batch_size=100)
    batches = [[message(100 * batch + number) for number in range(100)] for batch in range(100)]
    begin_s = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(sink.deliver, batches)) == [ACCEPTED] * 100
    took_s = time.monotonic() - begin_s
    sink.close()
    assert sum(len(json.loads(request.body)["messages"]) for request in receiver.requests) == 10_000
    assert took_s < 10


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_acknowledges(receiver: Receiver, status: int) -> None:
    receiver.answerer = answer(status, body=b"" if status == 204 else b"thanks")
    assert delivered(receiver.url) == ACCEPTED


@pytest.mark.parametrize("status", [300, 400, 401, 404, 413, 429, 500, 503])
def test_any_other_status_is_a_failure(receiver: Receiver, status: int) -> None:
    receiver.answerer = answer(status)
    assert delivered(receiver.url) == failed(f"the receiver answered {status}")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(receiver: Receiver, status: int) -> None:
    with Receiver() as other:
        receiver.answerer = answer(status, f"location: {other.url}\r\n")
        assert delivered(receiver.url).verdict is Verdict.FAILED
        assert not other.requests
    assert len(receiver.requests) == 1


def test_gone_asks_to_pause(receiver: Receiver) -> None:
    receiver.answerer = answer(410)
    assert delivered(receiver.url).verdict is Verdict.GONE


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("3600", 3600.0),
        ("86400", 3600.0),
        ("9" * 5000, 3600.0),
        (formatdate(NOW_S + 90, usegmt=True), 90.0),
        (formatdate(NOW_S + 9000, usegmt=True), 3600.0),
        (formatdate(NOW_S - 90, usegmt=True), 0.0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("Fri, 99 Foo 2026 99:99:99 GMT", None),
        ("Fri, 01 Jan 99999999999 00:00:00 GMT", None),
    ],
)
def test_a_receiver_may_say_when_to_come_again(receiver: Receiver, value: str, seconds: float | None) -> None:
    assert retry_after_s(value, now_s=NOW_S) == seconds
    if len(value) < 1000:
        receiver.answerer = answer(503, f"retry-after: {value}\r\n")
        assert delivered(receiver.url).retry_after_s == seconds


def test_a_receiver_that_is_not_there_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcome = delivered(f"http://127.0.0.1:{port}/")
    assert outcome.verdict is Verdict.FAILED
    assert "can't be reached" in outcome.reason


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff garbage\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 200_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
)
def test_garbage_is_a_failure(receiver: Receiver, data: bytes) -> None:
    def garbage(connection: socket.socket, _: Request) -> None:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    receiver.answerer = garbage
    assert delivered(receiver.url).verdict is Verdict.FAILED
    receiver.answerer = answer(200)
    assert delivered(receiver.url) == ACCEPTED


@pytest.mark.parametrize("status", [200, 500])
def test_of_a_huge_answer_the_beginning_is_read(receiver: Receiver, status: int) -> None:
    sent: list[int] = []

    def huge(connection: socket.socket, _: Request) -> None:
        connection.sendall(f"HTTP/1.1 {status} OK\r\ncontent-length: 1000000000\r\n\r\n".encode())
        sent.extend(connection.send(b"x" * 100_000) for _ in range(10_000))

    receiver.answerer = huge
    sink = sink_of(receiver.url)
    outcome = sink.deliver([message()])
    assert outcome == (ACCEPTED if status == 200 else failed("the receiver answered 500"))
    receiver.answerer = answer(200)
    assert sink.deliver([message()]) == ACCEPTED
    sink.close()
    assert sum(sent) < 100 * ANSWER_BYTES  # the rest filled buffers of the system
    assert receiver.requests[0].connection != receiver.requests[1].connection


def never(_: socket.socket, __: Request) -> None:
    time.sleep(5)


def drip(data: bytes) -> Answerer:
    def answerer(connection: socket.socket, _: Request) -> None:
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    return answerer


@pytest.mark.parametrize(
    "answerer",
    [
        never,
        drip(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
        drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 5),
        lambda connection, request: [
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n"),
            drip(b"x" * 50)(connection, request),
        ],
    ],
    ids=["never", "head", "interim", "body"],
)
def test_the_timeout_bounds_the_whole_exchange(receiver: Receiver, answerer: Answerer) -> None:
    receiver.answerer = answerer
    begin_s = time.monotonic()
    assert delivered(receiver.url, timeout="500ms") == failed("the receiver didn't answer within 0.5 s")
    assert time.monotonic() - begin_s < 2


def test_the_timeout_bounds_a_receiver_that_does_not_read_and_one_that_does_not_begin_tls() -> None:
    large = PushMessage("shop-0-1-1", None, 1, b'"%b"' % (b"x" * (64 << 20)))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for scheme in ("http", "https"):
            sink = sink_of(f"{scheme}://127.0.0.1:{mute.getsockname()[1]}/", timeout="500ms")
            begin_s = time.monotonic()
            assert "within 0.5 s" in sink.deliver([large]).reason
            assert time.monotonic() - begin_s < 2
            sink.close()


@pytest.mark.parametrize("is_kept", [False, True])
def test_closing_ends_a_request_that_has_no_answer(receiver: Receiver, is_kept: bool) -> None:
    """It went on until its timeout, and so did the end of its server."""
    sink = sink_of(receiver.url, timeout="60s")
    if is_kept:
        assert sink.deliver([message()]).verdict is Verdict.ACCEPTED

    def waits(_: socket.socket, __: Request) -> None:
        receiver.stopping.wait(60)

    before, receiver.answerer = len(receiver.requests), waits
    began_s = time.monotonic()
    outcome = call_in_thread("deliver", lambda: sink.deliver([message(1)]))
    wait_for(lambda: len(receiver.requests) > before)
    sink.close()
    assert outcome.result(30).verdict is Verdict.FAILED
    assert time.monotonic() - began_s < 30
    assert receiver.connections == 1


def test_the_timeout_bounds_the_look_up_of_a_name() -> None:
    over = threading.Event()

    def slow(_: str, __: int) -> Sequence[str]:
        over.wait(30)
        return ["127.0.0.1"]

    begin_s = time.monotonic()
    assert "within 0.3 s" in delivered("http://slow.example/", resolve=slow, timeout="300ms").reason
    assert time.monotonic() - begin_s < 2
    over.set()


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "017700000001", "127.0.0.1.", "\uff11\uff12\uff17.0.0.1",
        "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "0.1.2.3", "100.64.0.1",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1",
        "[::]", "[::1]", "[fe80::1]", "[fe80::1%25eth0]", "[fc00::1]", "[fd12::1]", "[ff02::1]", "[fec0::1]",
        "[::ffff:127.0.0.1]", "[::ffff:8.8.8.8]", "[::ffff:0:8.8.8.8]", "[::8.8.8.8]",
        "[64:ff9b::7f00:1]", "[64:ff9b::808:808]", "[64:ff9b:1::1]", "[2002:7f00:1::]", "[2001:0:1::1]",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused_at_creation_and_allowed_by_the_file(host: str) -> None:
    settings = {"url": f"http://{host}/hook", "secret": OLD}
    with pytest.raises(DeliveryError, match="isn't public", check=coded("invalid_consumer")) as caught:
        WebhookSettings.parse(settings)
    assert caught.value.details["field"] == "webhook.url"
    WebhookSettings.parse(settings | {"allow_private": True}, may_allow_private=True)
    with pytest.raises(DeliveryError, match="can be true only in", check=coded("invalid_consumer")):
        WebhookSettings.parse(settings | {"allow_private": True})


@pytest.mark.parametrize("host", ["8.8.8.8", "[2606:4700::1111]", "example.com", "bücher.example", "a_b.example"])
def test_public_addresses_and_names_are_taken(host: str) -> None:
    assert WebhookSettings.parse({"url": f"https://{host}:8443/", "secret": OLD}).receiver.port == 8443


def test_a_name_is_looked_up_at_each_connection_and_one_inner_address_refuses_it(receiver: Receiver) -> None:
    answers = [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:8.8.8.8"]]
    asked: list[tuple[str, int]] = []

    def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return answers[len(asked) - 1]

    sink = sink_of(f"http://rebinding.example:{receiver.port}/", resolve=rebinding, allow_private=False)
    outcomes = [sink.deliver([message()]) for _ in answers]
    sink.close()
    assert [outcome.verdict for outcome in outcomes] == [Verdict.REFUSED] * 3
    assert outcomes[1].reason == "rebinding.example has the address 10.0.0.1, which isn't public"
    assert asked == [("rebinding.example", receiver.port)] * 3
    assert not receiver.connections


def test_the_connection_goes_to_the_address_that_was_checked(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is looked up once: a second look-up could have another answer."""
    asked: list[str] = []
    connected: list[Any] = []
    connect = socket.create_connection

    def rebinding(host: str, _: int) -> Sequence[str]:
        asked.append(host)
        return ["93.184.216.34"] if len(asked) == 1 else ["127.0.0.1"]

    def record(address: tuple[str, int], *more: Any) -> socket.socket:
        connected.append(address)
        return connect(("127.0.0.1", address[1]), *more)

    monkeypatch.setattr(socket, "create_connection", record)
    sink = sink_of(f"http://rebinding.example:{receiver.port}/", resolve=rebinding, allow_private=False)
    assert sink.deliver([message()]) == ACCEPTED
    sink.close()
    assert asked == ["rebinding.example"]
    assert connected == [("93.184.216.34", receiver.port)]
    assert receiver.requests[0].headers["host"] == f"rebinding.example:{receiver.port}"


def test_the_next_address_is_tried_if_the_first_refuses(receiver: Receiver) -> None:
    url = f"http://two.example:{receiver.port}/"
    assert delivered(url, resolve=lambda *_: ["127.0.0.2", "127.0.0.1"]) == ACCEPTED


def test_a_name_without_an_address_is_a_failure() -> None:
    def nothing(_: str, __: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    outcome = delivered("http://nowhere.invalid/", resolve=nothing)
    assert outcome == failed("nowhere.invalid can't be looked up: Name or service not known")


def test_tls_is_verified_by_the_name_of_the_url_whichever_address_it_has() -> None:
    authority = trustme.CA()
    client = ssl.create_default_context()
    authority.configure_trust(client)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("hooks.example").configure_cert(server)
    with Receiver(tls=server) as receiver:
        here = {"resolve": lambda *_: ["127.0.0.1"]}
        assert delivered(f"https://hooks.example:{receiver.port}/", tls=client, **here) == ACCEPTED
        assert receiver.server_names == ["hooks.example"]
        other = delivered(f"https://other.example:{receiver.port}/", tls=client, **here)
        assert other.verdict is Verdict.FAILED
        assert "TLS with other.example failed" in other.reason
        unknown = delivered(f"https://hooks.example:{receiver.port}/", **here)
        assert "TLS with hooks.example failed" in unknown.reason
        assert len(receiver.requests) == 1


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_have_defaults_and_are_read_again() -> None:
    settings = WebhookSettings.parse({"url": URL, "secret": OLD})
    assert settings.as_dict() == {
        "url": URL,
        "secret": "***",
        "headers": {},
        "batch_size": 1,
        "timeout": "30s",
        "concurrency": 4,
        "retry_min": "1s",
        "retry_max": "5m",
        "allow_private": False,
    }
    full = WebhookSettings.parse(
        {"url": URL, "secret": [OLD, NEW], "headers": {"X-A": "b"}, "timeout": "1500ms", "retry_max": "2h"}
    )
    assert WebhookSettings.parse(full.as_dict(masked=False)) == full
    assert full.as_dict()["headers"] == {"X-A": "***"}
    asking = WebhookSettings.parse({"url": f"{URL}?token=a&b=c", "secret": OLD})
    assert asking.as_dict()["url"] == f"{URL}?***"
    assert asking.as_dict(masked=False)["url"] == f"{URL}?token=a&b=c"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"url": None}, "url"),
        ({"url": ""}, "url"),
        ({"url": 7}, "url"),
        ({"url": "ftp://example.com/"}, "url"),
        ({"url": "example.com/hook"}, "url"),
        ({"url": "https:///hook"}, "url"),
        ({"url": "https://user:pw@example.com/"}, "url"),
        ({"url": "https://example.com:99999/"}, "url"),
        ({"url": "https://exa mple.com/"}, "url"),
        ({"url": "https://example.com/\r\nx: y"}, "url"),
        ({"url": "https://example.com\\@other.example/"}, "url"),
        ({"url": "https://a..example/"}, "url"),
        ({"secret": None}, "secret"),
        ({"secret": []}, "secret"),
        ({"secret": "c2VjcmV0"}, "secret"),
        ({"secret": "whsec_"}, "secret"),
        ({"secret": "whsec_not base64!"}, "secret"),
        ({"secret": [OLD, 7]}, "secret"),
        ({"headers": {"Webhook-Id": "x"}}, "headers"),
        ({"headers": {"HOST": "x"}}, "headers"),
        ({"headers": {"content-length": "1"}}, "headers"),
        ({"headers": {"content-type": "text/plain"}}, "headers"),
        ({"headers": {"transfer-encoding": "chunked"}}, "headers"),
        ({"headers": {"a b": "x"}}, "headers"),
        ({"headers": {"a": "x\r\nhost: y"}}, "headers"),
        ({"headers": {"a": "x", "A": "y"}}, "headers"),
        ({"headers": {"a": 7}}, "headers"),
        ({"headers": "a: b"}, "headers"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": "0s"}, "timeout"),
        ({"timeout": 30}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"retry_min": "1m", "retry_max": "1s"}, "retry_max"),
        ({"allow_private": "yes"}, "allow_private"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_is_not_valid_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(DeliveryError, check=coded("invalid_consumer")) as caught:
        WebhookSettings.parse({"url": URL, "secret": OLD} | change)
    assert caught.value.details["field"] == f"webhook.{field}"


def test_secrets_are_shown_nowhere(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = OLD.removeprefix("whsec_")
    private = {"headers": {"authorization": "Bearer hidden-header"}, "secret": OLD}
    settings = WebhookSettings.parse(private | {"url": "https://example.com/?token=hidden-query"})
    receiver.answerer = answer(500)
    outcome = delivered(receiver.url + "&token=hidden-query", **private)
    refusals = []
    for change in ({"timeout": "x"}, {"secret": [OLD, "whsec_hidden-half"]}, {"headers": {"x": "hidden-header\n"}}):
        with pytest.raises(DeliveryError) as caught:
            WebhookSettings.parse({"url": URL} | private | change)
        refusals.append(str(caught.value.as_dict()))
    shown = " ".join([repr(settings), repr(settings.receiver), repr(outcome), caplog.text, *refusals])
    for hidden in (secret, "hidden-header", "hidden-half", "hidden-query"):
        assert hidden not in shown
