"""Generated frames: schemas, directories and rows that a writer could have made."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, Final

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.codec.checksums import Bytes
from millstream.codec.log_directory import BATCH_SCHEMA
from millstream.codec.log_frame import (
    BATCH_HEADER_VERSIONS,
    FrameHeader,
    FrameKind,
    encode_records_frame,
    encode_schema_frame,
)
from millstream.codec.log_parts import BEFORE, NUMBERS, PART_FLAGS, VALUES, part_schema
from millstream.model.ids import Epoch, GroupNumber, RegionId, SchemaVersion, ShardId, SourceId, TableId, WriterId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.records import PARTITION_OID, Op, log_row_schema
from millstream.model.schema import Column, PgType, ReplicaIdentity, TableKind, TableSchema

UTC = dt.UTC
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
ARROW_TYPES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.text(st.characters(codec="utf-8"), max_size=20),
    pa.binary(): st.binary(max_size=20),
    pa.bool_(): st.booleans(),
    pa.float64(): st.floats(allow_nan=False),
    pa.decimal128(12, 2): st.decimals(Decimal("-9999999999.99"), Decimal("9999999999.99"), places=2),
    pa.date32(): st.dates(),
    pa.timestamp("us", tz="UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.list_(pa.int32()): st.lists(st.integers(-(2**31), 2**31 - 1) | st.none(), max_size=3),
}
# Built once: hypothesis checks a strategy at its first draw, which costs as much as some values.
INT31 = st.integers(0, 2**31 - 1)
INT32 = st.integers(0, 2**32 - 1)
INT63 = st.integers(0, 2**63 - 1)
MAYBE_INT63 = st.none() | INT63
MAYBE_TEXT = st.none() | st.text(max_size=8)
MAYBE_TIME = st.none() | st.datetimes(timezones=st.just(UTC))
MAYBE_TYPE = st.none() | st.builds(PgType, INT32, st.integers(-1, 2**31 - 1), NAMES)
MAYBE_PARTITION = st.none() | st.text(max_size=3)
COLUMN_NAMES = st.lists(NAMES.filter(lambda n: not n.startswith("__")), min_size=1, max_size=5, unique=True)
COLUMN_TYPES = st.sampled_from(list(ARROW_TYPES))
MAYBE_VALUE = {arrow: st.none() | values for arrow, values in ARROW_TYPES.items()}
MAYBE_NAMES = st.none() | st.lists(NAMES, max_size=2)
TEXT_MAP = st.dictionaries(NAMES, st.text(max_size=8) | st.none(), max_size=3).map(lambda d: list(d.items()))
MAYBE_MAP = st.none() | TEXT_MAP
FLAGS = st.integers(0, PART_FLAGS)


@st.composite
def schemas(draw: st.DrawFn, table_id: int = 1) -> TableSchema:
    names = draw(COLUMN_NAMES)
    columns = tuple(Column(name, draw(COLUMN_TYPES), draw(MAYBE_TYPE)) for name in names)
    key = tuple(draw(st.lists(st.sampled_from(names), unique=True)))
    return TableSchema(
        table_id=TableId(table_id),
        version=SchemaVersion(draw(st.integers(1, 2**31 - 1))),
        source=SourceId(draw(INT31)),
        namespace=draw(NAMES),
        name=draw(NAMES),
        columns=columns,
        identity=key,
        key=key,
        replica_identity=draw(st.sampled_from(ReplicaIdentity)),
        kind=draw(st.sampled_from(TableKind)),
        relation_oid=draw(INT32),
        partitioned=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Sample:
    """A records frame, and its content."""

    header: FrameHeader
    tables: tuple[TableSchema, ...]
    operations: pa.RecordBatch
    batches: pa.RecordBatch
    payload: tuple[tuple[TableSchema, pa.RecordBatch], ...]
    """Whole rows."""
    seqs: dict[int, list[int]]
    """The numbers that readers must give to each table's rows, in the rows' order."""
    flags: dict[int, int]
    """The flags of each table's part. Under batch header version 1 parts have none."""

    def flags_of(self, table: TableSchema) -> int:
        return self.flags[table.table_id] if self.header.version > 1 else 0

    def buffers(self) -> list[Bytes]:
        payload = [(table, rows.select(part_schema(table, self.flags_of(table)).names)) for table, rows in self.payload]
        return encode_records_frame(self.header, self.operations, self.batches, payload)

    def schema_frames(self) -> list[list[Bytes]]:
        return [encode_schema_frame(schema_header(self.header), table) for table in self.tables]


def schema_header(of: FrameHeader) -> FrameHeader:
    """Return the header of the schema frame that goes with a records frame."""
    return FrameHeader(
        FrameKind.SCHEMA, of.first_offset, 0, Seq(0), Seq(0), of.group_last_seq, of.group, of.epoch, of.region, of.shard,
        of.writer, of.other_shards, of.reserved_to, of.hybrid_time, of.reached, more=True, version=of.version,
    )  # fmt: skip


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Draw frames of 1 to 6 operations over 1 to 3 tables, some of them partitioned, with headers of any version."""
    version = draw(st.sampled_from(BATCH_HEADER_VERSIONS))
    tables = tuple(draw(schemas(table_id=number)) for number in range(1, draw(st.integers(1, 3)) + 1))
    n_ops = draw(st.integers(1, 6))
    operations = [draw(operation_rows()) for _ in range(n_ops)]
    seq = first_seq = draw(st.integers(1, 2**62))
    offset = draw(st.integers(0, 2**62))
    partitioned = st.tuples(st.sampled_from(tables), MAYBE_PARTITION)
    batches = st.lists(partitioned, min_size=1, max_size=4, unique_by=lambda t: (t[0].table_id, t[1]))
    entries: list[dict[str, Any]] = []
    rows: dict[int, list[dict[str, Any]]] = {t.table_id: [] for t in tables}
    seqs: dict[int, list[int]] = {t.table_id: [] for t in tables}
    flags = {t.table_id: draw(FLAGS) for t in tables}
    scattered: set[int] = set()  # tables of operations whose indexes aren't consecutive in each table
    for ordinal in range(n_ops):
        number = seq
        made: list[tuple[int, dict[str, Any]]] = []
        touched = draw(batches)
        is_scattered = draw(st.booleans())
        first_entry = len(entries)
        for table, partition in sorted(touched, key=lambda t: t[0].table_id):
            count = draw(st.integers(1, 3))
            entries.append(
                {"operation": ordinal, "table_id": table.table_id, "schema_version": table.version,
                 "partition": partition, "first_seq": seq, "count": count}
            )  # fmt: skip
            for _ in range(count):
                row = {c.name: draw(MAYBE_VALUE[c.arrow]) for c in table.columns}
                if table.partitioned:
                    row[PARTITION_OID.name] = draw(st.none() | INT32)
                has_values, has_before = (not flags[table.table_id] & flag for flag in (VALUES, BEFORE))
                row |= {
                    "__op": int(draw(st.sampled_from(Op))),
                    "__unchanged": draw(MAYBE_NAMES) if has_values else None,
                    "__exact": draw(MAYBE_MAP) if has_values else None,
                    "__before": draw(MAYBE_MAP) if has_before else None,
                }
                made.append((table.table_id, row))
                seq += 1
        own = entries[first_entry:]
        if is_scattered:
            indexes = list(draw(st.permutations(range(len(made)))))
            scattered |= {entry["table_id"] for entry in own}
        else:
            gap = draw(st.integers(0, 2))  # rows that lie on other shards
            place = gap
            for entry in draw(st.permutations(own)):
                entry["first_index"] = place
                place += entry["count"] + gap
            indexes = [entry["first_index"] + n for entry in own for n in range(entry["count"])]
        rank = {index: n for n, index in enumerate(sorted(indexes))}
        for place, (index, (table_id, row)) in enumerate(zip(indexes, made, strict=True)):
            rows[table_id].append(row | {"__index": index, "__offset": offset + rank[index]})
            seqs[table_id].append(number + place)
        offset += len(made)
    payload = tuple(
        (table, pa.RecordBatch.from_pylist(rows[table.table_id], schema=log_row_schema(table)))
        for table in tables
        if rows[table.table_id]
    )
    count = sum(len(r) for r in rows.values())
    header = FrameHeader(
        kind=FrameKind.RECORDS,
        first_offset=Offset(offset - count),
        count=count,
        first_seq=Seq(first_seq),
        last_seq=Seq(seq - 1),
        group_last_seq=Seq(draw(INT63)),
        group=GroupNumber(draw(INT63)),
        epoch=Epoch(draw(INT63)),
        region=RegionId(draw(INT32) if version > 1 else 0),
        shard=ShardId(draw(INT32) if version > 1 else 0),
        writer=WriterId(draw(INT32)),
        other_shards=tuple(ShardId(s) for s in draw(st.lists(INT32, max_size=3))),
        reserved_to=Seq(draw(INT63)),
        hybrid_time=draw(INT63),
        reached={
            SourceId(s): Lsn(p)
            for s, p in draw(st.dictionaries(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), max_size=2)).items()
        },
        more=draw(st.booleans()),
        version=version,
    )
    return Sample(
        header,
        tables,
        pa.RecordBatch.from_pylist(operations, schema=OPERATION_SCHEMA),
        pa.RecordBatch.from_pylist(entries, schema=BATCH_SCHEMA),
        payload,
        seqs,
        {table: own & ~NUMBERS if table in scattered else own for table, own in flags.items()},
    )


@st.composite
def operation_rows(draw: st.DrawFn) -> dict[str, Any]:
    """Draw one row of a directory's operations."""
    return {
        "kind": int(draw(st.sampled_from(OperationKind))),
        "source": draw(INT31),
        "commit_lsn": draw(MAYBE_INT63),
        "commit_end_lsn": draw(MAYBE_INT63),
        "xid": draw(MAYBE_INT63),
        "commit_ts": draw(MAYBE_TIME),
        "chunk_id": draw(MAYBE_TEXT),
        "session": draw(MAYBE_TEXT),
        "session_number": draw(MAYBE_INT63),
        "idempotency_key": draw(MAYBE_TEXT),
        "trace_id": draw(MAYBE_TEXT),
    }


KEPT: Final = 100


def kept_samples() -> st.SearchStrategy[Sample]:
    """Draw one of a hundred kept samples.

    To draw a new one takes ten times as long as a test does with it, so all tests use the same hundred.
    """
    return st.deferred(lambda: st.sampled_from(_kept()))


@cache
def _kept() -> tuple[Sample, ...]:
    kept: list[Sample] = []

    @settings(max_examples=KEPT, database=None)
    @given(samples())
    def keep(sample: Sample) -> None:
        kept.append(sample)

    keep()
    return tuple(kept)
