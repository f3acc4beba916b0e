"""The encoder's messages: what the engine's comparison doesn't show."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from millstream.delivery.kafka.debezium import DebeziumEncoder, KafkaMessage
from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.delivery.kafka.debezium_types import converter
from millstream.delivery.kafka.from_json import records_of
from millstream.delivery.kafka.topic_names import topic_name
from millstream.errors import ConfigError
from millstream.model.column_texts import render_column
from millstream.model.ids import Epoch, SchemaVersion, ShardId, SourceId, TableId
from millstream.model.record_json import record_facts
from millstream.model.records import record_schema
from millstream.model.schema import Column, PgType, ReplicaIdentity, TableKind, TableSchema

NOW_NS = 1_700_000_000_123_456_789
COMMIT_US = 1_600_000_000_000_001


def pg(oid: int, name: str, modifier: int = -1) -> PgType:
    return PgType(oid, modifier, name)


ORDERS = TableSchema(
    TableId(1),
    SchemaVersion(1),
    SourceId(1),
    "public",
    "orders",
    (
        Column("id", pa.int64(), pg(20, "bigint")),
        Column("total", pa.decimal128(12, 2), pg(1700, "numeric", (12 << 16 | 2) + 4)),
        Column("50%", pa.string(), pg(25, "text")),
    ),
    ("id",),
    ("id",),
)
EVENTS = TableSchema(
    TableId(2),
    SchemaVersion(1),
    SourceId(0),
    "app",
    "events",
    (
        Column("id", pa.int64()),
        Column("price", pa.decimal128(38, 9)),
        Column("at", pa.timestamp("us", tz="UTC")),
        Column("tags", pa.list_(pa.string())),
        Column("sizes", pa.list_(pa.decimal128(5, 2))),
    ),
    (),
    (),
)
PLAIN = DebeziumOptions(schemas_enable=False)


def records(schema: TableSchema, *rows: dict[str, Any]) -> pa.RecordBatch:
    facts = {"__op": "c", "__source": 1, "__commit_lsn": 100, "__commit_index": 0, "__xid": 7, "__commit_ts": COMMIT_US}
    made = [{**facts, "__seq": n + 1, "__offset": n, **row} for n, row in enumerate(rows)]
    return pa.RecordBatch.from_pylist(made, schema=record_schema(schema, offsets=True))


def encoded(schema: TableSchema, options: DebeziumOptions, *rows: dict[str, Any]) -> list[KafkaMessage]:
    return DebeziumEncoder("shop", "db", options).encode(schema, records(schema, *rows), now_ns=NOW_NS)


def payload(message: KafkaMessage) -> Any:
    return None if message.value is None else json.loads(message.value)


def test_the_envelope_of_a_create() -> None:
    (message,) = encoded(ORDERS, PLAIN, {"id": 1, "total": Decimal("1.50"), "50%": 'a"%s'})
    assert (message.topic, message.key, message.headers) == ("shop.public.orders", b'{"id":1}', ())
    assert payload(message) == {
        "before": None,
        "after": {"id": 1, "total": "AJY=", "50%": 'a"%s'},
        "source": {
            "version": "3.4.0.Final",
            "connector": "postgresql",
            "name": "shop",
            "ts_ms": COMMIT_US // 1000,
            "snapshot": "false",
            "db": "db",
            "sequence": '[null,"100"]',
            "ts_us": COMMIT_US,
            "ts_ns": COMMIT_US * 1000,
            "schema": "public",
            "table": "orders",
            "txId": 7,
            "lsn": 100,
            "xmin": None,
        },
        "transaction": None,
        "op": "c",
        "ts_ms": NOW_NS // 1_000_000,
        "ts_us": NOW_NS // 1000,
        "ts_ns": NOW_NS,
    }


def test_a_copied_row_is_a_read_of_an_incremental_snapshot() -> None:
    facts = {"__op": "r", "__commit_index": None, "__xid": None, "__commit_ts": None}
    (message,) = encoded(ORDERS, PLAIN, {"id": 1, **facts})
    value = payload(message)
    source = value["source"]
    assert (value["op"], source["snapshot"], source["txId"], source["lsn"]) == ("r", "incremental", None, 100)
    assert source["ts_ns"] == NOW_NS // 1000 * 1000


def test_an_application_s_table_has_a_source_of_nulls() -> None:
    facts = {"__source": 0, "__commit_lsn": None, "__xid": None}
    row = {"id": 1, "price": Decimal("1.5"), "at": 1_000_000, "tags": ["a", None, 'b"'], "sizes": [Decimal("1.25")]}
    (message,) = encoded(EVENTS, DebeziumOptions(), {**facts, **row})
    value = payload(message)
    assert message.key is None
    source = value["payload"]["source"]
    assert {name for name, fact in source.items() if fact is None} == {"sequence", "txId", "lsn", "xmin"}
    assert (source["db"], source["schema"], source["table"]) == ("", "app", "events")
    after = value["payload"]["after"]
    assert after == {
        "id": 1,
        "price": "WWgvAA==",
        "at": "1970-01-01T00:00:01.000000Z",
        "tags": ["a", None, 'b"'],
        "sizes": ["fQ=="],
    }
    fields = {field["field"]: field for field in value["schema"]["fields"][1]["fields"]}
    assert fields["price"]["parameters"] == {"scale": "9", "connect.decimal.precision": "38"}
    assert fields["sizes"]["items"]["parameters"] == {"scale": "2", "connect.decimal.precision": "5"}


def test_a_value_that_its_column_can_t_hold_comes_from_the_exact_map() -> None:
    rows = ({"id": 1, "__exact": [("total", "NaN")]}, {"id": 2, "total": Decimal("2.00")})
    first, second = encoded(ORDERS, replace(PLAIN, decimal_handling_mode="double"), *rows)
    assert payload(first)["after"]["total"] == "NaN"
    assert payload(second)["after"]["total"] == 2.0


@pytest.mark.parametrize(
    "options", [PLAIN, *(DebeziumOptions(time_precision_mode=m) for m in ("connect", "isostring"))]
)
@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Column("c", pa.int64(), pg(20, "bigint")), [0, -(2**63), 2**63 - 1]),
        (Column("c", pa.bool_(), pg(16, "boolean")), [True, False]),
        (Column("c", pa.float64(), pg(701, "double")), [0.1, -0.0, 1e300, float("nan"), float("inf"), -5e-324]),
        (
            Column("c", pa.decimal128(38, 9), pg(1700, "numeric", (38 << 16 | 9) + 4)),
            [Decimal("1.5"), Decimal(0), Decimal("-0.000000128"), Decimal("-12345678901234567890123456789.123456789")],
        ),
        (Column("c", pa.decimal128(5, 0), pg(1700, "numeric", (3 << 16 | 0x7FE) + 4)), [Decimal(12300)]),
        (Column("c", pa.date32(), pg(1082, "date")), [-719162, -1, 0, 2932896]),
        (Column("c", pa.timestamp("us"), pg(1114, "timestamp")), [-62135596800000000, -1, 0, 253402300799999999]),
        (Column("c", pa.timestamp("us"), pg(1114, "timestamp", 3)), [-1000, 0, 253402300799999000]),
        *(
            (Column("c", pa.timestamp("us", tz="UTC"), pg(1184, "timestamptz", digits)), [-62135596800000000, 0, 10**6])
            for digits in (-1, 0, 3, 6)
        ),
        (Column("c", pa.binary(), pg(17, "bytea")), [b"", b"\x00\xff"]),
        (Column("c", pa.string(), pg(25, "text")), ["", 'a"\\\n\x01é😀']),
        (Column("c", pa.string(), pg(2950, "uuid")), ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    ],
)
def test_a_whole_column_is_sent_as_each_of_its_texts(
    column: Column, values: list[Any], options: DebeziumOptions
) -> None:
    found = converter(column, options)
    assert found is not None
    array = pa.array([None, *values, None], type=column.arrow)
    texts = [None if text is None else found.text(text) for text in render_column(array, column)]
    assert found.column(array, column).to_pylist() == [text or "null" for text in texts]
    assert found.column(array[2:], column).to_pylist() == [text or "null" for text in texts[2:]]


def test_a_key_change_is_a_delete_a_tombstone_and_a_create() -> None:
    row = {"__op": "u", "id": 2, "__before": [("id", "1")], "__unchanged": ["50%"]}
    delete, tombstone, create = encoded(ORDERS, PLAIN, row)
    assert (delete.key, delete.headers) == (b'{"id":1}', (("__debezium.newkey", b'{"id":2}'),))
    assert (tombstone.key, tombstone.value, tombstone.headers) == (delete.key, None, delete.headers)
    assert (create.key, create.headers) == (b'{"id":2}', (("__debezium.oldkey", b'{"id":1}'),))
    assert (payload(delete)["op"], payload(delete)["before"]["id"], payload(create)["op"]) == ("d", 1, "c")
    assert payload(create)["after"]["50%"] == "__debezium_unavailable_value"
    assert [message.row for message in (delete, tombstone, create)] == [0, 0, 0]


def test_a_decimal_in_the_header_of_a_key_change_is_its_digits() -> None:
    column = Column("n", pa.decimal128(38, 9), pg(1700, "numeric", (38 << 16 | 9) + 4))
    found = converter(column, PLAIN)
    assert found is not None
    texts = ["0.000000001", "-1.500000000", "12345678901234567890123456789.123456789", "0.000000000"]
    headers = ["1E-9", "-1.500000000", "12345678901234567890123456789.123456789", "0E-9"]  # Java's BigDecimal.toString
    assert [found.in_header(found.text(text)) for text in texts] == headers


def test_an_unchanged_value_is_that_of_the_row_before_if_the_source_sends_it() -> None:
    change = {"__op": "u", "id": 1, "__unchanged": ["50%"], "__before": [("id", "1"), ("50%", "large")]}
    (update,) = encoded(ORDERS, PLAIN, change)
    assert (payload(update)["before"]["50%"], payload(update)["after"]["50%"]) == ("large", "large")


@pytest.mark.parametrize(
    ("skipped", "left"),
    [("none", "cdt"), ("t", "cd"), ("c,d", "t"), ("d, t", "c"), ("u", "cdt")],
)
def test_skipped_operations_are_left_out_with_their_tombstones(skipped: str, left: str) -> None:
    options = replace(PLAIN, skipped_operations=skipped)
    found = encoded(ORDERS, options, {"id": 1}, {"id": 1, "__op": "d"}, {"__op": "t"})
    assert "".join(payload(message)["op"] for message in found if message.value) == left
    assert sum(message.value is None for message in found) == ("d" in left)


def test_a_partition_that_left_is_no_event_of_debezium_and_has_no_key_as_json() -> None:
    leafy = replace(ORDERS, partitioned=True)
    row = {"id": 1, "__partition_oid": 16_500}
    left = {"__op": "x", "__partition_oid": 16_500, "__before": [("partition", "public.orders_1")]}
    for kind in ("debezium", "debezium-flat"):
        found = encoded(leafy, replace(PLAIN, format=kind), row, left, {"id": 2})
        assert [message.row for message in found] == [0, 2]
    _, message = encoded(leafy, DebeziumOptions(format="json"), row, left)
    assert (message.topic, message.key) == ("shop.public.orders", None)
    facts = payload(message)
    assert (facts["op"], facts["row"]) == ("x", {"partition": "public.orders_1", "oid": 16_500})


def test_records_of_a_partitioned_table_are_made_of_their_json() -> None:
    leafy = replace(ORDERS, partitioned=True)
    left = {"__op": "x", "__partition_oid": 16_500, "__before": [("partition", "public.orders_1")]}
    batch = records(leafy, {"id": 1, "__partition_oid": 16_500}, left)
    facts = record_facts(leafy, batch, stream="shop", shard=ShardId(0), epoch=Epoch(1))
    made = records_of(leafy, facts, None)
    for name in ("__op", "__before", "__partition_oid"):
        assert made.column(name) == batch.column(name)


def test_json_is_the_object_that_wal_cat_prints() -> None:
    options = DebeziumOptions(format="json")
    change = {"__op": "u", "id": 2, "total": Decimal("1.50"), "__before": [("id", "1")]}
    old, update, delete, tombstone = encoded(ORDERS, options, change, {"__op": "d", "id": 2})
    assert (old.key, old.value) == (b'{"id":1}', None)
    assert update.key == delete.key == tombstone.key == b'{"id":2}'
    assert payload(update) == {
        "stream": "shop",
        "shard": 0,
        "epoch": 1,
        "offset": 0,
        "seq": 1,
        "op": "u",
        "table": "public.orders",
        "source": 1,
        "commit_lsn": "0/00000064",
        "commit_index": 0,
        "commit_ts": "2020-09-13T12:26:40.000001+00:00",
        "xid": 7,
        "row": {"id": 2, "total": "1.50", "50%": None},
        "before": {"id": 1},
        "unchanged": [],
        "exact": {},
    }
    assert tombstone.value is None


def test_a_key_that_debezium_can_t_send_is_text() -> None:
    schema = replace(
        ORDERS,
        columns=(Column("id", pa.string(), pg(28, "xid")), Column("x", pa.string(), pg(28, "xid"))),
    )
    (message,) = encoded(schema, PLAIN, {"id": "7", "x": "8"})
    assert (message.key, payload(message)["after"]) == (b'{"id":"7"}', {"id": "7"})
    (message,) = encoded(schema, replace(PLAIN, include_unknown_datatypes=True), {"id": "7", "x": "8"})
    assert payload(message)["after"] == {"id": "Nw==", "x": "OA=="}


def test_changes_of_a_quarantined_table_have_no_envelope() -> None:
    raw = replace(
        ORDERS, kind=TableKind.RAW, columns=(Column("message", pa.binary()),), key=(), identity=(),
        replica_identity=ReplicaIdentity.DEFAULT,
    )  # fmt: skip
    assert encoded(raw, PLAIN, {"message": b"x"}) == []
    (message,) = encoded(raw, DebeziumOptions(format="json"), {"message": b"x"})
    assert payload(message)["op"] == "raw"


def test_characters_that_kafka_refuses_become_underscores_in_topics() -> None:
    assert topic_name("{stream}.{schema}.{table}", "shop", "public", "Order Items/é") == "shop.public.Order_Items__"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "avro"),
        ("decimal_handling_mode", "exact"),
        ("time_precision_mode", "seconds"),
        ("binary_handling_mode", "utf8"),
        ("interval_handling_mode", ""),
        ("schemas_enable", "yes"),
        ("skipped_operations", "r"),
        ("skipped_operations", "none,c"),
        ("skipped_operations", ""),
    ],
)
def test_an_option_that_debezium_doesn_t_have_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        DebeziumOptions(**{name: value})  # type: ignore[arg-type]
