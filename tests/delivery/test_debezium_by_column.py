"""The encoder works column by column: its messages are, byte for byte, those of an encoder that goes row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.delivery.test_debezium import COMMIT_US, NOW_NS, pg, records

from millstream.delivery.kafka.debezium import VERSION, DebeziumEncoder, KafkaMessage
from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.delivery.kafka.debezium_tables import SentColumn, sent_table
from millstream.delivery.kafka.debezium_types import converter
from millstream.delivery.kafka.debezium_values import quoted
from millstream.delivery.kafka.json_columns import quoted_column
from millstream.delivery.kafka.topic_names import TOPIC
from millstream.model.column_texts import render_column
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.schema import Column, TableSchema

COLUMNS = (
    Column("id", pa.int64(), pg(20, "bigint")),
    Column('na"me %s', pa.string(), pg(25, "text")),
    Column("ratio", pa.float64(), pg(701, "double precision")),
    Column("total", pa.decimal128(12, 2), pg(1700, "numeric", (12 << 16 | 2) + 4)),
    Column("is_open", pa.bool_(), pg(16, "boolean")),
    Column("day", pa.date32(), pg(1082, "date")),
    Column("at", pa.timestamp("us", tz="UTC"), pg(1184, "timestamptz")),
    Column("data", pa.binary(), pg(17, "bytea")),
    Column("tags", pa.list_(pa.string()), pg(1009, "text[]")),
    Column("unknown", pa.string(), pg(1033, "aclitem")),
)
_CHARACTERS = st.characters(exclude_categories=("Cs",)) | st.sampled_from('"\\\n\t\x00\x1f\x7f\u2028é😀')
_FLOATS = st.floats() | st.floats(-2e9, 2e9) | st.integers(-(10**16), 10**16).map(float) | st.sampled_from([1e-4, 1e9])
VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "id": st.integers(-(2**63), 2**63 - 1),
    'na"me %s': st.text(_CHARACTERS, max_size=8),
    "ratio": _FLOATS,
    "total": st.integers(-(10**11), 10**11).map(lambda n: Decimal(n).scaleb(-2)),
    "is_open": st.booleans(),
    "day": st.integers(-700_000, 2_900_000),
    "at": st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999),
    "data": st.binary(max_size=5),
    "tags": st.lists(st.none() | st.text(_CHARACTERS, max_size=3), max_size=3),
    "unknown": st.text("abc", max_size=2),
}
TEXTS: Mapping[str, tuple[str, ...]] = {
    "id": ("1", "-7"),
    'na"me %s': ("", 'a"\\\n', "é"),
    "ratio": ("NaN", "-Infinity", "2.5"),
    "total": ("NaN", "-1.50"),
    "day": ("infinity", "2024-02-29"),
    "at": ("infinity", "2024-02-29 12:00:00.5+00"),
    "tags": ("{a,NULL}",),
}
"""PostgreSQL's texts of values that may stand in `__exact` and `__before`."""

SPARSE = st.dictionaries(st.sampled_from(sorted(TEXTS)), st.integers(0, 2), max_size=3).map(
    lambda chosen: [(name, TEXTS[name][n % len(TEXTS[name])]) for name, n in chosen.items()] or None
)
OPTIONS = st.builds(
    DebeziumOptions,
    format=st.sampled_from(["debezium", "debezium-flat"]),
    schemas_enable=st.booleans(),
    tombstones_on_delete=st.booleans(),
    skipped_operations=st.sampled_from(["none", "c", "u,d", "t"]),
    include_unknown_datatypes=st.booleans(),
)


@st.composite
def _rows(draw: st.DrawFn, columns: tuple[Column, ...]) -> list[dict[str, Any]]:
    """Draw records that stand in runs of one operation, mostly new rows."""
    found = []
    is_mixed = draw(st.booleans())
    for _ in range(draw(st.integers(1, 12))):
        row: dict[str, Any] = {
            "__op": draw(st.sampled_from("cu" if not is_mixed else "cuudrt")),
            "__xid": draw(st.sampled_from([None, 7, 8])),
            "__commit_ts": draw(st.sampled_from([None, COMMIT_US, -1])),
            "__commit_lsn": draw(st.sampled_from([None, 100])),
        }
        for column in columns:
            row[column.name] = draw(st.none() | VALUES[column.name])
        if draw(st.booleans()):
            row["__exact"] = draw(SPARSE)
        if is_mixed and row["__op"] == "u":
            row["__before"] = draw(SPARSE)
            left_out = draw(st.lists(st.sampled_from(columns), unique=True)) if columns else []
            row["__unchanged"] = [column.name for column in left_out] or None
        found.append(row)
    return found


@st.composite
def _cases(draw: st.DrawFn) -> tuple[TableSchema, list[dict[str, Any]], Mapping[str, str] | None]:
    columns = tuple(draw(st.lists(st.sampled_from(COLUMNS), unique=True, max_size=6)))
    names = [column.name for column in columns]
    key = tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=2))) if names else ()
    schema = TableSchema(TableId(1), SchemaVersion(1), SourceId(1), "public", "or%ders", columns, key, key)
    renamed = draw(st.none() | st.sampled_from([{}, {name: f"{name}2" for name in names[:2]}]))
    return schema, draw(_rows(columns)), renamed


@given(case=_cases(), options=OPTIONS)
def test_messages_are_those_of_each_row_alone(
    case: tuple[TableSchema, list[dict[str, Any]], Mapping[str, str] | None], options: DebeziumOptions
) -> None:
    schema, rows, renamed = case
    batch = records(schema, *rows)
    found = DebeziumEncoder("shop", "db", options, columns=renamed).encode(schema, batch, now_ns=NOW_NS)
    assert found == list(_ByRow(schema, batch, options, renamed).messages())


@given(texts=st.lists(st.none() | st.text(_CHARACTERS, max_size=5)), first=st.integers(0, 3))
def test_a_column_of_texts_is_quoted_as_each_of_them(texts: list[str | None], first: int) -> None:
    assert quoted_column(pa.array(texts, pa.string())[first:]).to_pylist() == [
        None if text is None else quoted(text) for text in texts[first:]
    ]


@given(numbers=st.lists(st.floats(0.5, 2) | st.integers(0, 9).map(float)), exponent=st.integers(-6, 17))
def test_a_column_of_floats_is_written_as_each_of_them(numbers: list[float], exponent: int) -> None:
    scaled = [number * sign * 10.0**exponent for number in numbers for sign in (1, -1)]
    found = converter(COLUMNS[2], DebeziumOptions())
    assert found is not None
    assert found.column(pa.array(scaled, pa.float64()), COLUMNS[2]).to_pylist() == [*map(repr, scaled)]


class _ByRow:
    """Makes the messages of a batch value by value, of PostgreSQL's texts."""

    def __init__(
        self, schema: TableSchema, batch: pa.RecordBatch, options: DebeziumOptions, renamed: Mapping[str, str] | None
    ) -> None:
        self._schema, self._batch, self._options = schema, batch, options
        self._table = sent_table(schema, "shop", TOPIC, options, renamed)
        self._names = [sent.name for sent in self._table.columns]
        self._is_flat, self._skipped = options.format == "debezium-flat", options.skipped()

    def messages(self) -> Iterator[KafkaMessage]:
        for row, op in enumerate(self._batch.column("__op").to_pylist()):
            before = self._batch.column("__before")[row].as_py()
            old = {name: text for name, text in before or () if text is not None}
            values = self._values(row, old)
            if op == "t":
                if "t" not in self._skipped and not self._is_flat:
                    yield self._message(row, op, None, "null", "null")
            elif op == "d":
                yield from self._delete(row, self._key(values), _object(self._names, values))
            elif op == "u" and before is not None:
                yield from self._update(row, values, old)
            elif op not in self._skipped:
                yield self._message(row, op, self._key(values), "null", _object(self._names, values))

    def _values(self, row: int, old: Mapping[str, str]) -> list[str]:
        exact, unchanged = (self._batch.column(name)[row].as_py() for name in ("__exact", "__unchanged"))
        columns = self._table.columns
        return [
            _value(sent, self._schema, self._batch, row, dict(exact or ()), unchanged or (), old) for sent in columns
        ]

    def _update(self, row: int, values: list[str], old: Mapping[str, str]) -> Iterator[KafkaMessage]:
        sent = [(one.converter, old.get(one.column.name)) for one in self._table.columns]
        before = ["null" if text is None else converter.text(text) for converter, text in sent]
        old_key = [
            values[index] if sent[index][1] is None or index not in self._table.key else before[index]
            for index in range(len(values))
        ]
        key, own, new = self._key(values), _object(self._names, before), _object(self._names, values)
        if self._key(old_key) == key:
            if "u" not in self._skipped:
                yield self._message(row, "u", key, own, new)
            return
        yield from self._delete(row, self._key(old_key), own, self._header("__debezium.newkey", values))
        if "c" not in self._skipped:
            yield self._message(row, "c", key, "null", new, self._header("__debezium.oldkey", old_key))

    def _delete(self, row: int, key: bytes | None, before: str, headers: Any = ()) -> Iterator[KafkaMessage]:
        if "d" in self._skipped:
            return
        if not self._is_flat:
            yield self._message(row, "d", key, before, "null", headers)
        if self._is_flat or self._options.tombstones_on_delete:
            yield KafkaMessage(row, self._table.topic, key, None, headers)

    def _message(
        self, row: int, op: str, key: bytes | None, before: str, after: str, headers: Any = ()
    ) -> KafkaMessage:
        if self._is_flat:
            return KafkaMessage(row, self._table.topic, key, self._table.row_block(after), headers)
        source = _source(self._batch, row, is_captured=self._table.is_captured)
        value = (
            f'{{"before":{before},"after":{after},"source":{source},"transaction":null,"op":"{op}",'
            f'"ts_ms":{NOW_NS // 10**6},"ts_us":{NOW_NS // 1000},"ts_ns":{NOW_NS}}}'
        )
        return KafkaMessage(row, self._table.topic, key, self._table.envelope_block(value), headers)

    def _key(self, values: list[str]) -> bytes | None:
        table = self._table
        key = _object([self._names[index] for index in table.key], [values[index] for index in table.key])
        return table.key_block(key) if table.key else None

    def _header(self, name: str, values: list[str]) -> Any:
        table = self._table
        own = [table.columns[index].converter.in_header(values[index]) for index in table.key]
        return ((name, _object([self._names[index] for index in table.key], own).encode()),) if own else ()


def _value(
    sent: SentColumn,
    schema: TableSchema,
    batch: pa.RecordBatch,
    row: int,
    exact: Mapping[str, str],
    unchanged: list[str],
    old: Mapping[str, str],
) -> str:
    """Return one value of a row as JSON."""
    name, converter = sent.column.name, sent.converter
    if name in unchanged:
        return converter.text(old[name]) if name in old else converter.unavailable
    text = exact.get(name)
    if text is None:
        array = batch.column(batch.num_columns - len(schema.columns) + sent.number)[row : row + 1]
        (text,) = render_column(array, sent.column)
    return "null" if text is None else converter.text(text)


def _object(names: list[str], values: list[str]) -> str:
    return "{" + ",".join(f"{quoted(name)}:{value}" for name, value in zip(names, values, strict=True)) + "}"


def _source(batch: pa.RecordBatch, row: int, *, is_captured: bool) -> str:
    op, lsn, xid = (batch.column(name)[row].as_py() for name in ("__op", "__commit_lsn", "__xid"))
    time = batch.column("__commit_ts").cast(pa.int64())[row].as_py()
    micros = NOW_NS // 1000 if time is None else time
    sequence = "null" if lsn is None else f'"[null,\\"{lsn}\\"]"'
    return (
        f'{{"version":"{VERSION}","connector":"postgresql","name":"shop","ts_ms":{micros // 1000},'
        f'"snapshot":"{"incremental" if op == "r" else "false"}","db":"{"db" if is_captured else ""}","sequence":{sequence},'
        f'"ts_us":{micros},"ts_ns":{micros * 1000},"schema":"public","table":"or%ders",'
        f'"txId":{"null" if xid is None else xid},"lsn":{"null" if lsn is None else lsn},"xmin":null}}'
    )
