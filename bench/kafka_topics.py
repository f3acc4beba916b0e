"""Rows of PostgreSQL into topics of Kafka: capture and a consumer's sink, next to Debezium's connector in a worker of Connect."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from tests.servers.kafka_connect import KafkaConnect

from bench.debezium import JARS, PROPERTIES, VERSION
from bench.figures import Figure, asked, measures, reported, say
from bench.homes import STREAM, make_home, wait_for
from bench.places import folder
from bench.source import DATABASE, postgres
from millstream.testing import EmbeddedKafka
from millstream.testing._servers.ports import free_port
from millstream.testing.postgres import EmbeddedPostgres

ROWS: Final = 200_000
RUNS: Final = 3
_ROWS_EACH: Final = 100
"""Rows of a transaction."""
_PENDING: Final = 10_000
_LOOK_S: Final = 0.02
_WITHIN_S: Final = 600.0
_TABLE: Final = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, bucket int, status text, total float8, is_open bool, note text)"
)
_INSERT: Final = (
    "INSERT INTO orders SELECT n, n %% 100, 'shipped', n * 1.25, n %% 3 = 0, md5(n::text)"
    " FROM generate_series(%s::bigint, %s::bigint) n"
)
_SLOT: Final = "debezium"


@measures("kafka_sink_vs_debezium")
def kafka_topics() -> Iterator[Figure]:
    """Measure the same inserts into the same broker: from when a slot is taken until the last row is acknowledged."""
    rows = asked.rows or ROWS
    say(f"kafka_sink_vs_debezium: {rows} rows")
    ours: list[float] = []
    theirs: list[float] = []
    with (
        folder("kafka_topics") as path,
        postgres(tcp=True) as server,
        EmbeddedKafka(path / "kafka") as kafka,
        ThreadPoolExecutor(1) as threads,
    ):
        with server.connect(DATABASE) as connection:
            connection.execute(_TABLE)
        home, port = make_home(server, path / "home", ["public.orders"]), free_port()
        config = home.path / "millstream.toml"
        config.write_text(f"{config.read_text()}\n{_consumer(kafka, port)}")
        home.run("capture", "run", "--until-caught-up")
        with server.connect(DATABASE) as connection:
            connection.execute("CREATE PUBLICATION debezium FOR TABLE orders")
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [_SLOT])
            slots = connection.execute(
                "SELECT slot_name FROM pg_replication_slots WHERE slot_name <> %s", [_SLOT]
            ).fetchall()
        ((own_slot,),) = slots
        with home.running("serve") as serve:
            wait_for("the consumer is there", lambda: _acked(port) == 0, process=serve)
            for run in range(asked.runs or RUNS):
                _insert(server, run * rows, rows)
                until = (run + 1) * rows
                taken = threads.submit(_taken_at, server, _SLOT)
                connect = _connect(path / f"connect{run}", server, kafka)
                with connect:
                    ended_at = _when(partial(_is_in_kafka, kafka, until))
                    theirs.append(rows / (ended_at - taken.result()))
                taken = threads.submit(_taken_at, server, own_slot)
                with home.running("capture", "run"):
                    ended_at = _when(partial(_is_acked, port, until))
                    ours.append(rows / (ended_at - taken.result()))
    yield reported(
        "kafka_sink_vs_debezium",
        ours,
        theirs,
        unit="rows/s",
        goal=">= 3",
        rows=rows,
        size_bytes=rows * 100,
        note=f"inserts of 6 columns, {_ROWS_EACH} rows a transaction, from when their slot is taken until Kafka has all of them: `millstream capture run` and"
        f" `millstream serve` with a consumer in Kafka (Debezium's envelope without schemas, transactions); the peer is Debezium {VERSION} in a standalone worker of"
        " Kafka Connect, JSON without schemas, its start not counted; both write to one broker on the same machine",
    )


def _consumer(kafka: EmbeddedKafka, port: int) -> str:
    return (
        f'[http]\nlisten = "127.0.0.1:{port}"\n'
        f'[streams.{STREAM}.consumers.topics]\nstart = "latest"\nmax_ack_pending = {_PENDING}\n'
        f'[streams.{STREAM}.consumers.topics.kafka]\nlocation = "{kafka.servers}"\nschemas_enable = false\n'
        f'topic = "ours.{{schema}}.{{table}}"\n'
    )


def _insert(server: EmbeddedPostgres, first: int, rows: int) -> None:
    with server.connect(DATABASE) as connection:
        for start in range(first, first + rows, _ROWS_EACH):
            connection.execute(_INSERT, [start, min(start + _ROWS_EACH, first + rows) - 1])
        connection.execute("CHECKPOINT")


def _connect(path: Path, server: EmbeddedPostgres, kafka: EmbeddedKafka) -> KafkaConnect:
    settings = {
        name: value for name, value in PROPERTIES.items() if not name.startswith(("name", "offset.", "converter."))
    }
    settings |= {
        "database.hostname": "127.0.0.1",
        "database.port": str(server.port),
        "database.user": "postgres",
        "database.password": "none",
        "database.dbname": DATABASE,
        "publication.name": "debezium",
        "slot.name": _SLOT,
        "topic.prefix": "theirs",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "key.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    }
    return KafkaConnect(
        path, servers=kafka.servers, connectors={"source": settings}, jars=JARS.read_text().splitlines(), memory="2g"
    )


def _taken_at(server: EmbeddedPostgres, slot: str) -> float:
    """Return the moment at which a slot is taken."""
    query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    with server.connect(DATABASE) as connection:
        return _when(lambda: connection.execute(query, [slot]).fetchone() == (True,))


def _when(is_so: Callable[[], bool]) -> float:
    """Return the moment from which on a condition holds."""
    deadline = time.perf_counter() + _WITHIN_S
    while not is_so():
        if time.perf_counter() > deadline:
            raise RuntimeError(f"the rows weren't there within {_WITHIN_S:g} s")
        time.sleep(_LOOK_S)
    return time.perf_counter()


def _is_acked(port: int, count: int) -> bool:
    return _acked(port) >= count


def _is_in_kafka(kafka: EmbeddedKafka, count: int) -> bool:
    return _size(kafka, "theirs.public.orders") >= count


def _acked(port: int) -> int:
    """Return the number of acknowledged records; -1 if the server doesn't answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", f"/v1/streams/{STREAM}/consumers/topics")
        answer = connection.getresponse()
        if answer.status == 200:
            return int(msgspec.json.decode(answer.read())["acked"])
    return -1


def _size(kafka: EmbeddedKafka, topic: str) -> int:
    """Return the number of a topic's messages; 0 if it isn't there."""
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    reader = Consumer({"bootstrap.servers": kafka.servers, "group.id": "bench"})
    with contextlib.closing(reader), contextlib.suppress(KafkaException):
        return int(reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1])
    return 0
