"""SQL writes nothing, neither to the lake nor anywhere else, however the statement is written."""

from __future__ import annotations

import gc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pytest
from tests.lake.test_query import land

from millstream.errors import InvalidQuery, LakeUnavailable, MillstreamError
from millstream.lake.layout import LakeLayout
from millstream.lake.query.query_session import LakeSession
from millstream.model.schema import TableSchema

Records = Callable[..., pa.RecordBatch]

SERIALIZED = "FROM json_execute_serialized_sql(json_serialize_sql('{}'))"
COPY = "WITH x AS (COPY (SELECT 1 AS q) TO ''{target}''{options}) FROM x"
WRITES = {
    "a serialized statement": SERIALIZED.format(COPY),
    "a serialized statement in a query of a text": f"FROM query('{SERIALIZED.format(COPY).replace(chr(39), chr(39) * 2)}')",
    "a query of a text": f"FROM query('{COPY}')",
    "parts in a serialized statement": SERIALIZED.format(
        COPY.replace("{options}", " (FORMAT parquet, PARTITION_BY q)")
    ),
    "WITH": COPY.replace("''", "'"),
    "COPY": "COPY (SELECT 1) TO '{target}'",
    "EXPLAIN ANALYZE": "EXPLAIN ANALYZE " + COPY.replace("''", "'"),
    "EXPORT DATABASE": "EXPORT DATABASE '{target}'",
    "IMPORT DATABASE": "IMPORT DATABASE '{target}'",
    "ATTACH": "ATTACH '{target}' AS a",
    "SECRET": "CREATE PERSISTENT SECRET s (TYPE http, BEARER_TOKEN 't')",
    "INSTALL": "INSTALL httpfs",
    "LOAD": "LOAD '{target}'",
    "UPDATE EXTENSIONS": "UPDATE EXTENSIONS",
    "EXPLAIN UPDATE EXTENSIONS": "EXPLAIN UPDATE EXTENSIONS",
    "temp_directory": "SET temp_directory = '{target}'",
    "profile_output": "SET profile_output = '{target}'",
    "profiling_output": "PRAGMA profiling_output = '{target}'",
    "log_query_path": "PRAGMA log_query_path = '{target}'",
    "allowed_directories": "SET allowed_directories = ['/']",
    "enable_logging by CALL": "CALL enable_logging(storage = 'file', storage_path = '{target}')",
    "enable_logging in FROM": "FROM enable_logging(storage = 'file', storage_path = '{target}')",
    "enable_profiling in FROM": "FROM enable_profiling(save_location = '{target}')",
    "several statements": "SELECT 1; COPY (SELECT 1) TO '{target}'",
}


def contents(folder: Path) -> dict[str, str]:
    """Return every file below a folder, with a digest of its content."""
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("sql", WRITES.values(), ids=WRITES.keys())
def test_no_statement_writes(
    layout: LakeLayout,
    orders: TableSchema,
    records: Records,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sql: str,
) -> None:
    """Targets in a table's log, next to it, and in the user's home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    log = f"{layout.table_path('current', orders)}/_delta_log"
    targets = [
        f"{log}/00000000000000000001.json",
        f"{log}/00000000000000000000.json",
        f"{layout.root}/new",
        f"{tmp_path}/user/new",
        f"file://{tmp_path}/user/new",
        f"{Path(layout.root).parent}/../user/new",
        # The names by which DuckDB reads a table's files.
        "lake://1",
        "lake://new",
        f"lake://{log}/00000000000000000001.json",
    ]
    before = contents(tmp_path)
    for target in targets:
        with LakeSession(layout) as session:
            # The session has its views, so their files are open to DuckDB.
            assert session.query("SELECT id FROM public.orders").num_rows == 1
            with pytest.raises(InvalidQuery):
                session.query(sql.format(target=target, options=""))
            assert session.query("SELECT id FROM public.orders").num_rows == 1
        assert contents(tmp_path) == before, target


@pytest.mark.parametrize(
    "sql",
    [
        "FROM read_text('{}')",
        "FROM read_text('lake://{}')",
        "FROM read_csv('lake://../{}')",
        "FROM glob('{}')",
        "FROM glob('lake://*')",
        SERIALIZED.format("FROM read_text(''{}'')"),
    ],
)
def test_no_statement_reads_what_it_was_not_given(
    layout: LakeLayout, orders: TableSchema, records: Records, tmp_path: Path, sql: str
) -> None:
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    (tmp_path / "secret").write_text("secret")
    log = f"{layout.table_path('current', orders)}/_delta_log/00000000000000000000.json"
    for file in (str(tmp_path / "secret"), log):
        with LakeSession(layout) as session:
            session.query("FROM public.orders")
            with pytest.raises(InvalidQuery):
                session.query(sql.format(file))


def test_a_file_of_the_lake_that_is_gone_is_named(layout: LakeLayout, orders: TableSchema, records: Records) -> None:
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    with LakeSession(layout) as session:
        session.query("FROM public.orders")
        gone = list(Path(layout.table_path("current", orders)).rglob("*.parquet"))
        for file in gone:
            file.unlink()
        with pytest.raises(LakeUnavailable, match=gone[0].name):
            session.query("FROM public.orders")


def test_a_file_of_the_lake_that_cannot_be_read_says_why(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    with LakeSession(layout) as session:
        session.query("FROM public.orders")
        (file,) = Path(layout.table_path("current", orders)).rglob("*.parquet")
        file.unlink()
        file.mkdir()  # also for root, whom no mode of a file stops
        with pytest.raises(MillstreamError, match="Is a directory") as caught:
            session.query("FROM public.orders")
        assert file.name in caught.value.message


def test_files_are_closed_again(layout: LakeLayout, orders: TableSchema, records: Records) -> None:
    """DuckDB doesn't close them: a server would have run out of descriptors."""
    for n in range(1, 5):
        land(layout, n, {orders: records(orders, ("c", n, {"id": n}))}, fold=n == 1)
    gc.collect()  # what earlier tests left open isn't closed in between
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        with LakeSession(layout) as session:
            assert session.query("FROM public.orders").num_rows == 4
            session.stream("FROM public.orders").close()
    assert len(list(Path("/dev/fd").iterdir())) == before
