"""A broker that is fenced for a moment names no brokers to clients: a sink delivers soon after."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from tests.app.homes import wait_for

from millstream.delivery.kafka.ledger import TOPIC
from millstream.delivery.sinks import ACCEPTED, Place, PushMessage, PushSink, Verdict, open_sink
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.push_sink import push_message

_METADATA = 3
"""The number of the requests for metadata."""


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number in Kafka's variable length, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at


def _without_brokers(answer: bytes) -> bytes:
    """Return an answer with metadata, of version 9 or later, as a fenced broker gives it."""
    first = 4 + 1 + 4  # behind the request's number, no tags, and the time of throttling
    count, at = _read_number(answer, first)
    for _ in range(count - 1):
        size, at = _read_number(answer, at + 4)  # behind the broker's id: its host
        size, at = _read_number(answer, at + size - 1 + 4)  # behind its port: its rack
        at += max(0, size - 1) + 1
    size, end = _read_number(answer, at)  # the cluster's id
    end += max(0, size - 1)
    return answer[:first] + b"\x01" + answer[at:end] + struct.pack(">i", -1) + answer[end + 4 :]


class Front:
    """An address before a broker, for clients' first contact."""

    def __init__(self, servers: str) -> None:
        host, port = servers.split(":")
        self._broker = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.servers = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.is_fenced = False
        self.told: set[int] = set()
        """Connections that were told of no brokers."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in range(1 << 30):
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client, number), daemon=True).start()

    def _serve(self, client: socket.socket, number: int) -> None:
        kinds: dict[bytes, int] = {}
        with client, contextlib.suppress(OSError, struct.error), socket.create_connection(self._broker) as broker:
            threading.Thread(target=self._ask, args=(client, broker, kinds), daemon=True).start()
            while True:
                answer = _read_frame(broker)
                if kinds.pop(answer[:4], None) == _METADATA and self.is_fenced:
                    answer = _without_brokers(answer)
                    self.told.add(number)
                client.sendall(struct.pack(">i", len(answer)) + answer)

    def _ask(self, client: socket.socket, broker: socket.socket, kinds: dict[bytes, int]) -> None:
        with contextlib.suppress(OSError, struct.error):
            while True:
                request = _read_frame(client)
                kinds[request[4:8]] = struct.unpack(">h", request[:2])[0]
                broker.sendall(struct.pack(">i", len(request)) + request)


def _read_frame(source: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", source.recv(4, socket.MSG_WAITALL))
    return source.recv(size, socket.MSG_WAITALL)


@pytest.fixture
def front(own_kafka: EmbeddedKafka) -> Iterator[Front]:
    front = Front(own_kafka.servers)
    yield front
    front.close()


def ledger_end(kafka: EmbeddedKafka, isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED) -> int:
    partition = TopicPartition(TOPIC, 0)
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    asked = admin.list_offsets({partition: OffsetSpec.latest()}, isolation_level=isolation)  # type: ignore[no-untyped-call]
    return asked[partition].result(10).offset


def deliver_soon(sink: PushSink, message: PushMessage) -> None:
    deadline_s = time.monotonic() + 90
    while (outcome := sink.deliver([message])) != ACCEPTED:
        assert time.monotonic() < deadline_s, outcome


@pytest.mark.parametrize("meets_no_producer", [True, False], ids=["new producer", "new topic"])
def test_a_sink_delivers_soon_after_a_broker_named_no_brokers(
    own_kafka: EmbeddedKafka, front: Front, meets_no_producer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client for topics waited for the brokers' names until it asked for them again: up to five minutes."""
    monkeypatch.setattr("millstream.delivery.kafka.settings.ANSWERS_WITHIN_S", 5.0)
    monkeypatch.setattr("millstream.delivery.kafka.sink.ANSWERS_WITHIN_S", 5.0)
    settings = {"location": front.servers, "format": "json"}
    sink = open_sink("kafka", settings, stream="shop", consumer="search", place=Place("c1"))
    deliver_soon(sink, push_message(0))
    # Killed between a commit and its markers, Kafka may never end the transaction.
    wait_for(lambda: ledger_end(own_kafka, IsolationLevel.READ_COMMITTED) == ledger_end(own_kafka))
    front.is_fenced = True
    own_kafka.kill()
    own_kafka.start()
    wait_for(lambda: len(front.told) >= 2)  # the producer, and the client for topics
    if meets_no_producer:
        assert sink.deliver([push_message(1)]).verdict is Verdict.REFUSED
    front.is_fenced = False
    deliver_soon(sink, push_message(1, table="public.orders" if meets_no_producer else "public.more"))
    sink.close()
