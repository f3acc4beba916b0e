"""Lines that an export writes are lines that `POST /write` takes: the same rows in the same tables."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.app.homes import run, wait_for
from tests.serving.serving_process import rows_of, served, web_home
from tests.wal.plain_operations import MemoryReservations, plain_operations

from millstream.export.records_text import LineProtocol
from millstream.ingest.fit_to_schema import fitted
from millstream.ingest.line_protocol import tables_of_lines
from millstream.ingest.log_types import log_type
from millstream.model.ids import Epoch, SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.names import qualified_name
from millstream.model.operations import TableRows, WriteOps
from millstream.model.records import RESERVED_COLUMNS, Op, append_row_schema
from millstream.model.schema import Column, TableSchema
from millstream.testing.files import MemoryFiles
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat, Line
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

RESERVED = {"time", "time_ns", "host", *RESERVED_COLUMNS}
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n"), min_size=1, max_size=6).filter(
    lambda name: not name.endswith("\\") and not name.startswith(("#", "\t", "__")) and name.lower() not in RESERVED
)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float64(): st.floats(),
    pa.float32(): st.floats(width=32),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
}
TIMES = st.integers(-9_000_000_000_000_000, 9_000_000_000_000_000).map(lambda us: EPOCH + dt.timedelta(microseconds=us))
HOSTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\\"), min_size=1, max_size=4)


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, bool, pa.Table]:
    """Return a table's name, whether it has a key, and rows."""
    is_keyed = draw(st.booleans())
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique_by=str.lower))
    count = draw(st.integers(1, 5))
    some = st.lists(TIMES, min_size=count, max_size=count)
    columns: dict[str, pa.Array] = {"time": pa.array(draw(some), pa.timestamp("us", "UTC"))}
    if is_keyed:
        columns["host"] = pa.array(draw(st.lists(HOSTS, min_size=count, max_size=count)))
    if draw(st.booleans()):
        beyond = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        whole = columns["time"].cast(pa.int64()).to_pylist()
        columns["time_ns"] = pa.array([us * 1000 + ns for us, ns in zip(whole, beyond, strict=True)], pa.int64())
    for name in names:
        kind = draw(st.sampled_from(list(VALUES)))
        values = draw(st.lists(st.none() | VALUES[kind], min_size=count, max_size=count))
        columns[name] = pa.array(values, kind)
    return draw(NAMES), is_keyed, pa.table(columns)


def plain(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return a row as line protocol can hold it: without NULL and floats that are no number; None if nothing is left."""
    nanoseconds = (
        row["time_ns"]
        if row.get("time_ns") is not None
        else (row["time"] - EPOCH) // dt.timedelta(microseconds=1) * 1000
    )
    own = {
        name: float(value) if isinstance(value, float) else value
        for name, value in row.items()
        if value is not None and not name.startswith("__") and name not in {"time", "time_ns"}
        and not (isinstance(value, float) and not math.isfinite(value))
    }  # fmt: skip
    return {**own, "at": nanoseconds} if own.keys() - {"host"} else None


def left_out(row: dict[str, Any]) -> int:
    """Return the number of a row's values that no line holds, or 1 for a row that none does."""
    return (
        1
        if plain(row) is None
        else sum(isinstance(value, float) and not math.isfinite(value) for value in row.values())
    )


def in_log(schema: TableSchema, rows: pa.Table) -> StreamReader:
    """Return a reader of a log in memory that holds the rows."""
    files, target, nothing = MemoryFiles(), append_row_schema(schema), [None] * rows.num_rows
    columns = {
        "__operation": [0] * rows.num_rows,
        "__index": range(rows.num_rows),
        "__op": [int(Op.CREATE)] * rows.num_rows,
    }
    batch = pa.record_batch(
        [
            rows.column(field.name).combine_chunks().cast(field.type)
            if field.name in rows.column_names
            else pa.array(columns.get(field.name, nothing), field.type)
            for field in target
        ],
        schema=target,
    )
    with LogWriter.open(
        "/wal", stream=StreamId(UUID(int=7)), shards=[ShardId(0)], epoch=Epoch(1), reservations=MemoryReservations(),
        files=files, options=LogOptions(segment_bytes=100_000),
    ) as log:  # fmt: skip
        log.append(WriteOps(plain_operations([1]), (TableRows(schema, batch),)))
    return StreamReader("/wal", files=files)


def schema_of(name: str, rows: pa.Table, *, namespace: str = "public", key: tuple[str, ...] = ()) -> TableSchema:
    columns = tuple(Column(field.name, log_type(field.type)) for field in rows.schema)
    return TableSchema(TableId(1), SchemaVersion(1), SourceId(0), namespace, name, columns, key, key)


def lines_of(name: str, rows: pa.Table, *, namespace: str = "public", key: tuple[str, ...] = ()) -> list[Line]:
    """Return a table's rows as an export reads them from a log."""
    reader = in_log(schema_of(name, rows, namespace=namespace, key=key), rows)
    return list(Cat("web", reader, "json", moments=True).records())


@given(drawn=tables())
def test_exported_lines_make_the_same_rows(drawn: tuple[str, bool, pa.Table]) -> None:
    name, is_keyed, rows = drawn
    key = ("host",) if is_keyed else ()
    schema = schema_of(name, rows, key=key)
    protocol = LineProtocol()
    texts = [text for line in lines_of(name, rows, key=key) if (text := protocol.line(line)) is not None]
    read = tables_of_lines("\n".join(texts).encode(), precision="ns", now_ns=0)
    assert read.rejected == []
    expected = [row for row in map(plain, rows.to_pylist()) if row is not None]
    found = []
    for table in read.tables:
        assert table.table == qualified_name("public", name)
        fit = pa.table(dict(zip(rows.column_names, fitted(schema, table.rows), strict=True)))
        found += [plain(row) for row in fit.to_pylist()]
    assert found == expected
    assert protocol.left_out.total() == sum(left_out(row) for row in rows.to_pylist()), "everything else is counted"


@pytest.mark.parametrize(
    ("table", "rows", "why"),
    [
        ("#t", {"n": [1]}, "`POST /write` refuses the name"),
        ("t", {"a\\": [1]}, "`POST /write` refuses the name"),
        ("t", {"Time": [1]}, "`POST /write` refuses the name"),
        ("t", {"time": ["noon"]}, "`POST /write` refuses the name"),
        ("t", {"host": ["a\n"], "n": [1]}, "their key is empty"),
        ("t", {"host": [""], "n": [1]}, "their key is empty"),
        ("t", {"host": ["a"], "n": [None]}, "they have no value outside of their key"),
        ("t", {"time": [dt.datetime(1500, 1, 1, tzinfo=dt.UTC)], "n": [1]}, "they have no time, or one beyond 64 bits"),
    ],
)
def test_a_record_that_no_line_holds_is_counted_with_its_reason(table: str, rows: dict[str, Any], why: str) -> None:
    protocol = LineProtocol()
    assert [
        protocol.line(line) for line in lines_of(table, pa.table(rows), key=("host",) if "host" in rows else ())
    ] == [None]
    (reason,) = protocol.left_out
    assert reason.startswith(f"records are left out: {why}")


def test_a_table_of_another_schema_than_public_has_it_in_the_measurement() -> None:
    (line,) = lines_of("t", pa.table({"n": [1]}), namespace="sales")
    assert LineProtocol().line(line) == "sales.t n=1i 1700000000000001000"


@pytest.mark.long
def test_an_export_is_sent_to_a_servers_write(tmp_path: Path) -> None:
    """Lines that came over HTTP leave as lines, and another server makes the same table of them."""
    keys = '[streams.web.keys]\nclicks = ["host", "time"]\n'
    sent = (
        'clicks,host=a\\ b,region=eu n=1i,big=18446744073709551615u,f=-0.1,ok=t,s="x \\"q\\" \\\\\n y" 1700000000000000001\n'
        "clicks,host=c n=-9223372036854775808i 1700000000000000000\n"
        "other f=1 1600000000000000000\n"
    )
    one, other = (web_home(tmp_path / name, more=keys) for name in ("one", "other"))
    with served(one) as server, server.client() as client:
        wait_for(lambda: client.post("/write?db=web", content="# nothing").status_code != 429)
        assert client.post("/write?db=web", content=sent).status_code == 204
    exported = run(one, "wal", "export", "--format", "line-protocol")
    assert (exported.returncode, exported.stderr) == (0, "")
    with served(other) as server, server.client() as client:
        wait_for(lambda: client.post("/write?db=web", content="# nothing").status_code != 429)
        answer = client.post("/write?db=web", content=exported.stdout)
        assert answer.status_code == 204, answer.text
    for table in ("clicks", "other"):
        made = [
            [{k: v for k, v in row.items() if not k.startswith("__")} for row in rows_of(home, table)]
            for home in (one, other)
        ]
        assert made[0] == made[1]
        assert made[0]
    assert rows_of(other)[0]["big"] == Decimal(2**64 - 1)
