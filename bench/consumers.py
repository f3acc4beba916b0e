"""Consumers over HTTP and by webhook: the rate of one, the time from a commit to its receiver, and the cost of a hundred."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import psutil
import pyarrow as pa

import millstream
from bench.figures import RUNS, Figure, asked, measures, repeated, reported, say
from bench.figures import interleaved as in_turns
from bench.homes import STREAM, Home, make_home, wait_for
from bench.latency import RATE, insert_until_seen, paced
from bench.load import CLIENTS, Load, percentiles_of_windows
from bench.places import folder
from bench.source import DATABASE, postgres
from millstream.buffers.kafka_server import make_topic
from millstream.testing import EmbeddedKafka
from millstream.testing._servers.ports import free_port

RECORDS: Final = 200_000
BATCH: Final = 1000
CONSUMERS: Final = 100
RECEIVED_S: Final = 50
"""Five windows of 10 s."""
_SIDE_BY_SIDE: Final = 4
"""Clients of the hundred consumers that ask at a time."""
_WAIT_MS: Final = 10_000
_HOOK_WITHIN_S: Final = 300.0
_REQUEST: Final = 100
"""Messages of a request to a webhook."""
_PENDING: Final = 10_000
_LOOK_S: Final = 0.5
_HTTP: Final = '[http]\nlisten = "127.0.0.1:{port}"\n'
_SHAPE: Final = "rows of 6 columns (int8 key, int4, text, float8, bool, text of 32 B), appended 1000 at a time"


class _Row(msgspec.Struct):
    client: int = -1
    n: int = -1


class _Record(msgspec.Struct):
    row: _Row


class _Message(msgspec.Struct):
    ack_id: str


class _Received(msgspec.Struct):
    messages: list[_Message]


class _Tick(msgspec.Struct):
    ack_id: str
    record: _Record


class _Ticks(msgspec.Struct):
    messages: list[_Tick]


class Client:
    """One connection that calls the stream's consumers."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the answer's body; raise if it isn't a success."""
        data = None if body is None else msgspec.json.encode(body)
        self._connection.request(
            method, f"/v1/streams/{STREAM}/consumers{path}", data, {"content-type": "application/json"}
        )
        answer = self._connection.getresponse()
        found = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {found[:1000]!r}")
        return found

    def drain(self, name: str, count: int) -> None:
        """Receive and acknowledge that many records."""
        while count > 0:
            body = self.call("POST", f"/{name}/receive", {"batch_size": BATCH, "wait_for_ms": _WAIT_MS})
            messages = msgspec.json.decode(body, type=_Received).messages
            if not messages:
                raise RuntimeError(f"{name} receives nothing, but {count} records are left")
            self.call("POST", f"/{name}/ack", {"ack_ids": [message.ack_id for message in messages]})
            count -= len(messages)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextmanager
def _clients(port: int, count: int) -> Iterator[list[Client]]:
    some = [Client(port) for _ in range(count)]
    try:
        yield some
    finally:
        for client in some:
            client.close()


@contextmanager
def _served(path: Path, tables: Mapping[str, int], more: str = "") -> Iterator[tuple[int, psutil.Process]]:
    """Append records to application tables, in turns, then serve the home.

    Args:
        path: a folder for the home.
        tables: number of records by table.
        more: more of its `millstream.toml`.

    Yields:
        The port, and the server's process.
    """
    port = free_port()
    path.mkdir()
    keys = "".join(f'"public.{table}" = ["id"]\n' for table in tables)
    (path / "millstream.toml").write_text(f"[streams.{STREAM}.keys]\n{keys}{_HTTP.format(port=port)}{more}")
    with millstream.open(str(path)) as opened:
        for first in range(0, max(tables.values()), BATCH):
            for table, records in tables.items():
                if first < records:
                    opened.append(STREAM, table, _rows(first, min(BATCH, records - first)), deadline_s=60)
    with Home(path).running("serve") as process:
        wait_for("the server answers", partial(_answers, port), process=process)
        yield port, psutil.Process(process.pid)


def _rows(first: int, count: int) -> pa.Table:
    ids = np.arange(first, first + count)
    return pa.table(
        {
            "id": ids,
            "bucket": pa.array(ids % CONSUMERS, pa.int32()),
            "status": [("new", "paid", "packed", "shipped")[n % 4] for n in range(count)],
            "total": ids * 1.25,
            "is_open": ids % 3 == 0,
            "note": [f"{n:032x}" for n in range(first, first + count)],
        }
    )


def _answers(port: int) -> bool:
    with _clients(port, 1) as (client,):
        try:
            client.call("GET", "")
        except (OSError, RuntimeError, http.client.HTTPException):
            return False
        return True


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@measures("consumer_pull_records_per_s")
def consumer_pull() -> Iterator[Figure]:
    """Measure one consumer that receives and acknowledges a backlog."""
    records = asked.rows or RECORDS
    say(f"consumer_pull_records_per_s: {records} records")
    with folder("pull") as place, _served(place / "home", {"orders": records}) as (port, _), _clients(port, 1) as some:
        client = some[0]

        def run() -> float:
            client.call("POST", "", {"name": "pull", "start": "earliest"})
            began = time.perf_counter()
            client.drain("pull", records)
            took_s = time.perf_counter() - began
            client.call("DELETE", "/pull")
            return records / took_s

        rates = repeated(run)
    yield reported(
        "consumer_pull_records_per_s",
        rates,
        unit="records/s",
        goal=">= 30,000",
        rows=records,
        size_bytes=records * 100,
        note=f"a new consumer of kind changes, groups by key, on a backlog of {_SHAPE}; over HTTP by one client in Python on one connection:"
        f" receive {BATCH}, read the answer, acknowledge all; the server is `millstream serve` alone",
    )


class _Hook:
    """A receiver of webhooks in this process: it reads each request, counts its messages, and answers 204."""

    def __init__(self) -> None:
        self.count = 0
        self.wanted = 0
        self.is_complete = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self._threads = ThreadPoolExecutor()
        self._threads.submit(self._accept)

    def expect(self, count: int) -> None:
        """Begin to count up to a number."""
        with self._lock:
            self.count, self.wanted = 0, count
            self.is_complete.clear()

    def close(self) -> None:
        """Close it, once the other side has closed its connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads.shutdown()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._threads.submit(self._serve, self._listener.accept()[0])

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as data, contextlib.suppress(OSError):
            while data.readline():
                size = 0
                while (line := data.readline()).strip():
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        size = int(value)
                messages = data.read(size).count(b'"deliveries":')
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
                with self._lock:
                    self.count += messages
                    if self.count >= self.wanted:
                        self.is_complete.set()


@measures("webhook_records_per_s")
def webhook() -> Iterator[Figure]:
    """Measure one consumer that delivers a backlog to a webhook."""
    records = asked.rows or RECORDS
    say(f"webhook_records_per_s: {records} records")
    hook = _Hook()
    more = (
        f'[streams.{STREAM}.consumers.hook]\nstart = "latest"\n[streams.{STREAM}.consumers.hook.webhook]\nurl = "{hook.url}"\n'
        f'secret = "whsec_{"A" * 32}"\nbatch_size = {_REQUEST}\nallow_private = true\n'
    )
    with (
        contextlib.closing(hook),
        folder("hook") as place,
        _served(place / "home", {"orders": records}, more) as (port, _),
    ):
        expected = 0

        def run() -> float:
            nonlocal expected
            hook.expect(records)
            began = time.perf_counter()
            with _clients(port, 1) as (client,):  # a connection for each call: the server closes idle ones
                client.call("POST", "/hook/rewind", {"to": "earliest"})
            if not hook.is_complete.wait(_HOOK_WITHIN_S):
                raise RuntimeError(f"the receiver got {hook.count} of {records} records")
            took_s = time.perf_counter() - began
            expected += records
            wait_for("all is acknowledged", lambda: _acked(port) >= expected)
            return records / took_s

        rates = repeated(run)
    yield reported(
        "webhook_records_per_s",
        rates,
        unit="records/s",
        goal=">= 20,000",
        rows=records,
        size_bytes=records * 100,
        note=f"a consumer of kind changes, groups by key, rewound to the beginning of {_SHAPE}, until a receiver on loopback has read the last of them;"
        f" {_REQUEST} messages a request, signed, 4 requests at a time; the receiver is a Python thread a connection and answers 204; the server is"
        " `millstream serve` alone",
    )


def _acked(port: int) -> int:
    with _clients(port, 1) as (client,):
        return int(msgspec.json.decode(client.call("GET", "/hook"))["acked"])


@measures("commit_to_received_ms")
def commit_to_received() -> Iterator[Figure]:
    """Measure paced one-row inserts, captured and received; capture and the server are processes of their own."""
    seconds = asked.seconds or RECEIVED_S
    say(f"commit_to_received_ms: {RATE} transactions a second for {seconds} s")
    with postgres(load_unsynced=False) as server, folder("received") as path:
        with server.connect(DATABASE) as connection:
            connection.execute("CREATE TABLE ticks (client int, n bigint, note text, PRIMARY KEY (client, n))")
        home, port = make_home(server, path / "home", ["public.ticks"]), free_port()
        config = home.path / "millstream.toml"
        config.write_text(f"{config.read_text()}\n{_HTTP.format(port=port)}")
        home.run("capture", "run", "--until-caught-up")
        with home.running("capture", "run") as capture, home.running("serve") as serve:
            insert_until_seen(server, home, capture)
            wait_for("the server answers", partial(_answers, port), process=serve)
            with _receiving(port) as received:
                statement = "INSERT INTO ticks VALUES (:client_id, :n, 'a row of a tick, with a text of 40 bytes.')"
                load = paced(server, path, statement, seconds=seconds)
                wait_for("all is received", lambda: _missing(load, received) == 0, process=serve)
        keys = zip(load.client.tolist(), load.number.tolist(), strict=True)
        at = np.array([received[key] for key in keys], dtype=np.int64)
        p50, p99 = percentiles_of_windows(load, (at - load.committed_ns) / 1e6, RUNS)
    yield reported(
        "commit_to_received_ms",
        p50,
        unit="ms",
        goal="p50 <= 20, p99 <= 100",
        rows=len(load),
        size_bytes=len(load) * 60,
        note=f"p50; {RATE} one-row inserts a second by {CLIENTS} clients of pgbench, PostgreSQL's fsync and synchronous_commit on, captured by"
        " `millstream capture run`; from the client's answer to its COMMIT until a client of `millstream serve` has read the answer of its"
        f" waiting receive; it acknowledges each; medians over {RUNS} windows of {seconds / RUNS:g} s",
        p99=p99,
    )


def _missing(load: Load, received: Mapping[tuple[int, int], int]) -> int:
    return sum(key not in received for key in zip(load.client.tolist(), load.number.tolist(), strict=True))


@contextmanager
def _receiving(port: int) -> Iterator[dict[tuple[int, int], int]]:
    """Receive in the background; yield the wall-clock time in ns of each row's arrival, by its client and number."""
    arrived: dict[tuple[int, int], int] = {}
    stop = threading.Event()

    def receive(client: Client) -> None:
        while not stop.is_set():
            body = client.call("POST", "/ticks/receive", {"batch_size": BATCH, "wait_for_ms": 500})
            at = time.time_ns()
            messages = msgspec.json.decode(body, type=_Ticks).messages
            for message in messages:
                arrived.setdefault((message.record.row.client, message.record.row.n), at)
            if messages:
                client.call("POST", "/ticks/ack", {"ack_ids": [message.ack_id for message in messages]})

    with _clients(port, 1) as (client,), ThreadPoolExecutor(1) as threads:
        client.call("POST", "", {"name": "ticks", "tables": ["public.ticks"]})
        receiving = threads.submit(receive, client)
        try:
            yield arrived
        finally:
            stop.set()
            receiving.result()


@measures("hundred_consumers_cpu", "hundred_consumers_tables_cpu")
def hundred_consumers() -> Iterator[Figure]:
    """Measure the server's CPU time for a hundred consumers of a hundredth each; the peer is one with everything."""
    records = max(asked.rows or RECORDS, BATCH * CONSUMERS)
    where = [{"where": f"bucket = {number}"} for number in range(CONSUMERS)]
    tables = [f"t{number}" for number in range(CONSUMERS)]
    yield _cost("hundred_consumers_cpu", {"orders": records}, where, "of one table, chosen by `where`")
    by_table = dict.fromkeys(tables, records // CONSUMERS)
    own = [{"tables": [f"public.{table}"]} for table in tables]
    yield _cost("hundred_consumers_tables_cpu", by_table, own, "a table of its own each")


def _cost(name: str, tables: Mapping[str, int], hundred: Sequence[Mapping[str, Any]], what: str) -> Figure:
    records = sum(tables.values())
    say(f"{name}: {records} records")
    with (
        folder("hundred") as place,
        _served(place / "home", tables) as (port, process),
        _clients(port, _SIDE_BY_SIDE) as some,
        ThreadPoolExecutor(_SIDE_BY_SIDE) as threads,
    ):

        def cpu_us(definitions: Sequence[Mapping[str, Any]]) -> float:
            names = [f"c{number}" for number in range(len(definitions))]
            before = _cpu_s(process)
            for one, definition in zip(names, definitions, strict=True):
                some[0].call("POST", "", {"name": one, "start": "earliest", **definition})

            def drain(number: int) -> None:
                for one in names[number::_SIDE_BY_SIDE]:
                    some[number].drain(one, records // len(names))

            list(threads.map(drain, range(_SIDE_BY_SIDE)))
            used_s = _cpu_s(process) - before
            for one in names:
                some[0].call("DELETE", f"/{one}")
            return used_s / records * 1e6

        ours, peer = in_turns(partial(cpu_us, hundred), partial(cpu_us, [{}]), runs=3)
    return reported(
        name,
        ours,
        peer,
        unit="us/record",
        goal="<= 3",
        rows=records,
        size_bytes=records * 100,
        note=f"CPU time of `millstream serve` a delivered record; {CONSUMERS} consumers with a hundredth of the records each, {what}, {_SIDE_BY_SIDE} at"
        f" a time over HTTP, made, received and acknowledged to the end; the peer is one consumer with all records; {_SHAPE}",
    )


@measures("kafka_sink_vs_producer")
def kafka_sink() -> Iterator[Figure]:
    """Measure a consumer with a sink in Kafka, from its creation until all is acknowledged; the peer is a bare producer."""
    records = asked.rows or RECORDS
    say(f"kafka_sink_vs_producer: {records} records")
    topics = (f"bench{number}" for number in itertools.count())
    with (
        folder("kafka") as place,
        EmbeddedKafka(place / "kafka") as kafka,
        _served(place / "home", {"orders": records}) as (port, _),
        _clients(port, 1) as (client,),
    ):

        def wait_acked(count: int) -> None:
            while msgspec.json.decode(client.call("GET", "/topics"))["acked"] < count:
                time.sleep(_LOOK_S)

        def push() -> float:
            acked = msgspec.json.decode(client.call("GET", "/topics"))["acked"]
            began = time.perf_counter()
            client.call("POST", "/topics/rewind", {"to": "earliest"})
            wait_acked(acked + records)
            return records / (time.perf_counter() - began)

        sink = {"location": kafka.servers, "topic": next(topics), "schemas_enable": False}
        client.call("POST", "", {"name": "topics", "start": "earliest", "max_ack_pending": _PENDING, "kafka": sink})
        wait_acked(records)
        ready = _messages_of(kafka, "bench0", records)

        def produce() -> float:
            return records / _produced_s(kafka, next(topics), ready)

        ours, peer = in_turns(push, produce, runs=3)
    size_bytes = sum(len(key) + len(value) for key, value in ready)
    yield reported(
        "kafka_sink_vs_producer",
        ours,
        peer,
        unit="records/s",
        goal=">= 0.4",
        rows=records,
        size_bytes=size_bytes,
        note=f"a consumer with a kafka sink that is rewound to the beginning of a backlog of {_SHAPE}; Debezium's envelope without schemas, with transactions, and"
        f" {_PENDING} messages in flight at most, until all is acknowledged; the server is `millstream serve` alone; the peer sends the"
        " same keys and values, made before, by an idempotent producer in Python into a topic that is there; one broker on the same machine",
    )


def _messages_of(kafka: EmbeddedKafka, topic: str, count: int) -> list[tuple[bytes, bytes]]:
    """Return the keys and values of a topic's messages."""
    from confluent_kafka import Consumer, TopicPartition

    reader = Consumer({"bootstrap.servers": kafka.servers, "group.id": "bench"})
    reader.assign([TopicPartition(topic, 0, 0)])
    found: list[tuple[bytes, bytes]] = []
    while len(found) < count:
        some = reader.consume(10_000, timeout=0.5)
        found += [(message.key() or b"", message.value() or b"") for message in some]
    reader.close()
    return found


def _produced_s(kafka: EmbeddedKafka, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> float:
    """Send messages by a bare producer; return the seconds until all are acknowledged."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient

    make_topic(AdminClient({"bootstrap.servers": kafka.servers}), topic, timeout_s=30)
    settings = {"bootstrap.servers": kafka.servers, "enable.idempotence": True, "acks": "all", "linger.ms": 5}
    producer = Producer(settings)
    began = time.perf_counter()
    for key, value in messages:
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.01)
    producer.flush()
    return time.perf_counter() - began
