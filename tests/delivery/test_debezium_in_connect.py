"""Kafka Connect's worker with Debezium's own connectors: its source next to ours, and its JDBC sink behind both.

The PostgreSQL source connector writes the topics `theirs.*`, and a consumer with a sink the topics `ours.*`, from the
same statements. The JDBC sink connector, which was written for Debezium, reads either of them into a database of its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.app.homes import done, make_home, wait_for
from tests.delivery.golden_files import run, transactions
from tests.delivery.kafka_topics import Received, received
from tests.delivery.test_debezium_against_engine import WORKLOAD, reasons_of
from tests.servers.kafka_connect import KafkaConnect, connect_jars
from tests.serving.serving_process import served

from millstream.codec.pgoutput import HEARTBEAT_PREFIX
from millstream.testing._servers.maven import ArtifactUnavailable
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege
JARS = (Path(__file__).parent / "java" / "connect.txt").read_text(encoding="utf-8").splitlines()
BEFORE = (
    "CREATE TABLE stock (id integer PRIMARY KEY, name text, price numeric(10,2), at timestamptz, note text)",
    "INSERT INTO stock SELECT n, 'thing ' || n, n * 1.25, '2024-01-01 00:00:00+00', 'copied' FROM generate_series(1, 20) n",
    (
        "CREATE TABLE kinds (id bigint PRIMARY KEY, i2 smallint, i4 integer, b boolean, f4 real, f8 double precision, n numeric,"
        " n52 numeric(5,2), n38 numeric(38,9), cash money, o oid, d date, t time, t3 time(3), ts timestamp, ts3 timestamp(3),"
        " tstz timestamptz, v varchar(9), c character(5), u uuid, j json, jb jsonb, by bytea, ip inet, ci cidr,"
        " m macaddr, m8 macaddr8, r4 int4range, r8 int8range, rn numrange, rts tsrange, rtz tstzrange, rd daterange, tv tsvector,"
        " numbers integer[], names text[])"
    ),
    "CREATE TABLE filled (id integer PRIMARY KEY, big text, n integer)",
    "ALTER TABLE filled REPLICA IDENTITY FULL",
    "ALTER TABLE filled ALTER big SET STORAGE EXTERNAL",
)
AFTER = (
    "INSERT INTO stock VALUES (21, 'new', NULL, NULL, NULL), (22, 'gone soon', 1, NULL, 'x'), (23, 'moves', 2.50, NULL, 'é')",
    "UPDATE stock SET price = price + 1, note = NULL WHERE id <= 5",
    "UPDATE stock SET id = 123 WHERE id = 23",
    "UPDATE stock SET id = id + 1000 WHERE id BETWEEN 6 AND 8",
    "DELETE FROM stock WHERE id = 22 OR id BETWEEN 9 AND 11",
    (
        "INSERT INTO kinds VALUES (9007199254740993, -32768, 2147483647, true, 1.5, 1e-300, 12.3400, -1.50, 1234567.123456789,"
        " 12.5, 4294967295, '2024-02-29', '12:34:56.789012', '23:59:59.999', '1999-12-31 23:59:59.999999', '2024-01-01 00:00:00.5',"
        " '2024-02-29 12:34:56.789012+02', 'é\"q\"\\', 'c', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{\"a\":  1}', '[1, null]',"
        " '\\x00ff', '192.168.0.1/24', '10.0.0.0/8', '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05', '[1,5)',"
        " '(,9]', '[1.5,2.50]', '[2020-01-01,2020-01-02)', '[2020-01-01 00:00:00+00,)', '[2020-01-01,2020-02-01)', 'a:1 b:2',"
        " '{1,NULL,3}', '{a,NULL,\"b c\"}')"
    ),
    "INSERT INTO kinds (id) VALUES (1), (2)",
    "UPDATE kinds SET (i2, n, d, jb, numbers, v) = (NULL, NULL, NULL, NULL, NULL, '') WHERE id > 2",
    "UPDATE kinds SET (i2, n, d, jb, numbers, v) = (7, 0.001, '1970-01-01', '{}', '{}', 'x') WHERE id = 2",
    "DELETE FROM kinds WHERE id = 1",
    "INSERT INTO filled VALUES (1, repeat('abcdefgh', 1000), 1)",
    "UPDATE filled SET n = 2",
)
JDBC = "(whole|required|1numbers|stock|filled|kinds)"
"""The tables that the JDBC sink reads. With topics of either source, it fails on points, arrays of decimals and enums, `24:00`, `bit(1)`,
keyless tables, a space in a table's name, and the marker of an unchanged TOAST value in a `jsonb`.
"""
MIXED_KEYS = "(keyed|stamped)"
"""Tables whose keys have columns of different types: the JDBC sink fails on the headers of their changes, whoever wrote."""
TARGETS = ("theirs", "ours")


@dataclass(frozen=True, slots=True)
class Written:
    """The topics of both sources, and the databases of the JDBC sinks."""

    topics: Mapping[str, list[Received]]
    """Messages by `theirs` and `ours`, of changes behind the copies."""
    server: EmbeddedPostgres


def our_home(folder: Path, server: EmbeddedPostgres, kafka: EmbeddedKafka) -> Path:
    text = f"""
[http]
listen = "127.0.0.1:0"
[streams.shop.source]
dsn = {json.dumps(server.dsn("source"))}
tables = ["public.*"]
"""
    for name, more in (("ours", 'start = "latest"'), ("copied", 'start = "earliest"\ntables = ["*.*"]')):
        text += f"""
[streams.shop.consumers.{name}]
{more}
[streams.shop.consumers.{name}.kafka]
location = "{kafka.servers}"
topic = "{name}.{{schema}}.{{table}}"
"""
    return make_home(folder, text)


def source_connector(server: EmbeddedPostgres) -> dict[str, str]:
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1",
        "database.port": str(server.port),
        "database.user": "postgres",
        "database.password": "x",
        "database.dbname": "source",
        "topic.prefix": "theirs",
        "plugin.name": "pgoutput",
        "slot.name": "theirs",
        "publication.name": "theirs",
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "skipped.operations": "none",
        "poll.interval.ms": "50",
    }


def jdbc_connector(server: EmbeddedPostgres, database: str, topics: str, **more: str) -> dict[str, str]:
    """Return the settings of a JDBC sink, which are the same for both sources of its topics."""
    return {
        "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
        "topics.regex": topics,
        "connection.url": f"jdbc:postgresql://127.0.0.1:{server.port}/{database}?stringtype=unspecified",
        "connection.username": "postgres",
        "connection.password": "x",
        "insert.mode": "upsert",
        "delete.enabled": "true",
        "truncate.enabled": "true",
        "primary.key.mode": "record_key",
        "schema.evolution": "basic",
        "collection.name.format": "${source.table}",
        "consumer.override.auto.offset.reset": "earliest",
        "consumer.override.isolation.level": "read_committed",
        "consumer.override.metadata.max.age.ms": "500",
        **more,
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    try:
        connect_jars(JARS)
    except ArtifactUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("connect")
    before, after = transactions("workload")
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres(tcp=True, fsync=False).start())
        kafka = stack.enter_context(EmbeddedKafka(folder / "kafka"))
        for name in ("source", *TARGETS):
            server.create_database(name)
            with server.connect(name) as connection:
                # The JDBC sink makes `stock` and `filled`; it can't make tables of every type.
                made = BEFORE if name == "source" else BEFORE[2:3]
                run(connection, [*before, *([statement] for statement in made)])
        with server.connect("theirs") as connection:  # no snapshot: the copied rows
            run(connection, [[statement] for statement in BEFORE[:2]])
        home = our_home(folder / "home", server, kafka)
        done(home, "capture", "run", "--until-caught-up")
        with served(home) as running, running.client() as http, server.connect("source") as connection:

            def lag(name: str) -> int:
                found: int = http.get(f"/v1/streams/shop/consumers/{name}").json()["lag"]["records"]
                return found

            wait_for(lambda: lag("copied") == 0, what=lambda: http.get("/v1/streams/shop/consumers").text)
            connection.execute("CREATE PUBLICATION theirs FOR ALL TABLES")
            connection.execute("SELECT pg_create_logical_replication_slot('theirs', 'pgoutput')")
            # A column that was added between the same two looks at the source as a TRUNCATE has the table copied again.
            altering = next(number for number, some in enumerate(after) if "ALTER TABLE" in some[0])
            run(connection, after[:altering])
            done(home, "capture", "run", "--until-caught-up")
            run(connection, [*after[altering:], *([statement] for statement in AFTER)])
            connection.execute("SELECT pg_logical_emit_message(true, 'end', 'of it')")
            done(home, "capture", "run", "--until-caught-up")
            wait_for(
                lambda: lag("ours") == lag("copied") == 0, what=lambda: http.get("/v1/streams/shop/consumers").text
            )
        connectors = {"source": source_connector(server)}
        for database, topics in (("theirs", r"theirs\.public\."), ("ours", r"copied\.public\.")):
            connectors[f"jdbc_{database}"] = jdbc_connector(server, database, f"{topics}{JDBC}")
            strings = {"header.converter": "org.apache.kafka.connect.storage.StringConverter"}
            connectors[f"mixed_{database}"] = jdbc_connector(server, database, f"{topics}{MIXED_KEYS}", **strings)
        overridden = {"connector.client.config.override.policy": "All"}
        worker = KafkaConnect(
            folder / "connect", servers=kafka.servers, connectors=connectors, jars=JARS, worker=overridden
        )
        stack.enter_context(worker)
        wait_for(lambda: has_ended(kafka), what=worker.states)
        for name in connectors.keys() - {"source"}:
            pattern = connectors[name]["topics.regex"]
            wait_for(
                lambda name=name, pattern=pattern: failed(worker) or has_read(kafka, f"connect-{name}", pattern),
                what=worker.states,
            )
        assert not failed(worker), worker.states()
        topics = {name: received(kafka.servers, f"{name}.") for name in TARGETS}
        topics["ours"] += received(kafka.servers, "shop.message")
        yield Written(topics, server)


def has_ended(kafka: EmbeddedKafka) -> bool:
    return any(b'"end"' in (message.key or b"") for message in received(kafka.servers, "theirs.message"))


def has_read(kafka: EmbeddedKafka, group: str, topics: str) -> bool:
    """Return whether a group of consumers has read all topics of a pattern to their ends."""
    from confluent_kafka import ConsumerGroupTopicPartitions
    from confluent_kafka.admin import AdminClient, OffsetSpec

    admin = AdminClient({"bootstrap.servers": kafka.servers})
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(30)
    at = {(place.topic, place.partition): place.offset for place in asked.topic_partitions}
    ends = admin.list_offsets({place: OffsetSpec.latest() for place in asked.topic_partitions}, request_timeout=30)
    behind = {
        place.topic: future.result(30).offset - at[place.topic, place.partition] for place, future in ends.items()
    }
    wanted = {name for name in admin.list_topics(timeout=30).topics if re.fullmatch(topics, name)}
    return wanted <= behind.keys() and max(behind.values()) <= 1  # the marker that ends a transaction isn't read


def failed(worker: KafkaConnect) -> bool:
    return any(state != "RUNNING" for state in worker.states())


# --- tables of the JDBC sink


def tables(connection: psycopg.Connection) -> dict[str, list[str]]:
    """Return the columns of each table."""
    query = (
        "SELECT table_name::text, array_agg(column_name::text ORDER BY ordinal_position) FROM information_schema.columns"
        " WHERE table_schema = 'public' GROUP BY 1 ORDER BY 1"
    )
    return dict(connection.execute(query).fetchall())


def rows(connection: psycopg.Connection, table: str, columns: list[str]) -> list[Any]:
    names = ", ".join(f'"{name}"::text' for name in columns)
    return connection.execute(f'SELECT {names} FROM "{table}" ORDER BY 1').fetchall()  # type: ignore[arg-type]


def unequal(server: EmbeddedPostgres, target: str) -> dict[str, Any]:
    """Return the values of each column that are other than in the source, or the table's rows if their number is."""
    found: dict[str, Any] = {}
    with server.connect("source") as source, server.connect(target) as copy:
        copies = tables(copy)
        for table, columns in tables(source).items():
            if not re.fullmatch(f"{JDBC}|{MIXED_KEYS}", table):
                continue
            if set(columns) != set(copies.get(table, [])):
                found[table] = copies.get(table)
                continue
            theirs, ours = rows(source, table, columns), rows(copy, table, columns)
            if len(theirs) != len(ours):
                found[table] = ours
                continue
            for number, column in enumerate(columns):
                values = [(a[number], b[number]) for a, b in zip(theirs, ours, strict=True)]
                if any(a != b for a, b in values):
                    found[f"{table}.{column}"] = [pair for pair in values if pair[0] != pair[1]]
    return found


def test_the_jdbc_sink_makes_the_source_s_tables_of_our_topics(written: Written) -> None:
    theirs, ours = (unequal(written.server, target) for target in TARGETS)
    assert set(theirs) == set(ours) | {"required.d", "required.m"}  # Debezium sends a column's default for NULL
    assert ours == {}


# --- messages next to those of Debezium's source connector


def by_table(messages: list[Received]) -> dict[str, list[dict[str, Any]]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        headers = {
            name: json.loads(value)
            for name, value in message.headers.items()
            if not name.startswith(("__debezium.context.", "millstream"))
        }
        name = message.topic.split(".", 1)[1].removeprefix("public.").replace("__", "_")
        parts = [None if part is None else part.decode() for part in (message.key, message.value)]
        key, value = (None if part is None else json.loads(_of_one_name(part)) for part in parts)
        if name == "message" and key["payload"]["prefix"] == HEARTBEAT_PREFIX:
            continue  # of our own capture
        topics.setdefault(name, []).append({"key": key, "value": value, "headers": headers})
    return topics


def _of_one_name(part: str) -> str:
    """Return JSON with one name for both topics and both connectors."""
    return re.sub(r'"(ours|theirs)(?=["\.])', '"shop', part)


def test_our_topics_are_those_of_the_source_connector(written: Written) -> None:
    theirs, ours = (by_table(written.topics[name]) for name in ("theirs", "ours"))
    assert {name: len(found) for name, found in theirs.items()} == {name: len(found) for name, found in ours.items()}
    used = set()
    for name, found in theirs.items():
        for their, our in zip(found, ours[name], strict=True):
            used.update(reasons_of(name, their, our, WORKLOAD))
    assert used == set(WORKLOAD)


def test_a_transaction_has_one_id_and_one_time_in_both(written: Written) -> None:
    theirs, ours = (by_table(written.topics[name]) for name in TARGETS)
    for name, found in theirs.items():
        for their, our in zip(found, ours[name], strict=True):
            sources = [message["value"] and message["value"]["payload"]["source"] for message in (their, our)]
            if sources[0] is not None and sources[0]["txId"] is not None:
                their_facts, our_facts = ([source[fact] for fact in ("ts_us", "txId")] for source in sources)
                assert our_facts == their_facts
