"""The judge and the workload against PostgreSQL's own decoding: its changes replay to its tables.

Between them is a minimal reader of pgoutput: version 1, text only, one message after the other.
"""

import os
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from millstream.testing import EmbeddedPostgres, PostgresUnavailable, ShopWorkload, StepInfo, Workload
from millstream.testing.oracle import TableRows, difference, source_rows
from millstream.testing.oracle.history import check_records, replay_records
from millstream.testing.pytest_plugin import Database

PINNED = "SET timezone = 'UTC'; SET extra_float_digits = 3; SET lc_monetary = 'C'; SET search_path = ''"


class Reader:
    """A reader of a slot's changes into records, by table."""

    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.transactions: list[tuple[int, dict[str, Counter[str]]]] = []
        self._relations: dict[int, tuple[str, list[str], list[bool]]] = {}
        self._lsn = self._index = self._seq = 0

    def read(self, data: bytes) -> None:
        kind, body = chr(data[0]), data[1:]
        if kind == "B":
            self._lsn, _, xid = struct.unpack(">qqI", body)
            self._index = 0
            self.transactions.append((xid, defaultdict(Counter)))
        elif kind == "R":
            self._relation(body)
        elif kind == "I":
            self._add("c", self._relations[_u32(body)], self._tuple(body, 5)[0])
        elif kind in "UD":
            relation = self._relations[_u32(body)]
            old, at = (None, 4) if body[4:5] == b"N" else self._tuple(body, 5)
            if kind == "D":
                assert old is not None
                self._add("d", relation, [v if key else None for v, key in zip(old, relation[2], strict=True)])
            else:
                self._add("u", relation, self._tuple(body, at + 1)[0], old)
        elif kind == "T":
            count = _u32(body)
            for oid in struct.unpack(f">{count}I", body[5:]):
                self._add("t", self._relations[oid], [None] * len(self._relations[oid][1]))
        elif kind == "M" and body[0] == 1:
            self.transactions[-1][1]["_messages"]["m"] += 1
            self._index += 1

    def table(self, name: str, rows: TableRows) -> pa.Table:
        fields = [(column, pa.string()) for column in rows.columns]
        fields += [("__op", pa.string()), ("__seq", pa.int64()), ("__source", pa.int32()), ("__commit_lsn", pa.int64())]
        fields += [("__commit_index", pa.int64()), ("__unchanged", pa.list_(pa.string()))]
        schema = pa.schema([*fields, ("__before", pa.map_(pa.string(), pa.string()))])
        return pa.Table.from_pylist(self.records[name], schema)

    def _relation(self, body: bytes) -> None:
        namespace, name, rest = body[4:].split(b"\0", 2)
        count, at = struct.unpack(">H", rest[1:3])[0], 3
        names, keys = [], []
        for _ in range(count):
            end = rest.index(b"\0", at + 1)
            keys.append(rest[at] == 1)
            names.append(rest[at + 1 : end].decode())
            at = end + 9
        self._relations[_u32(body)] = (f"{namespace.decode()}.{name.decode()}", names, keys)

    def _tuple(self, body: bytes, at: int) -> tuple[list[Any], int]:
        count = struct.unpack(">H", body[at : at + 2])[0]
        at += 2
        values: list[Any] = []
        for _ in range(count):
            kind = body[at : at + 1]
            at += 1
            if kind == b"t":
                length = _u32(body[at:])
                values.append(body[at + 4 : at + 4 + length].decode())
                at += 4 + length
            else:
                values.append(None if kind == b"n" else ...)
        return values, at

    def _add(
        self, op: str, relation: tuple[str, list[str], list[bool]], values: list[Any], old: list[Any] | None = None
    ) -> None:
        name, columns, keys = relation
        self._seq += 1
        record: dict[str, Any] = {c: None if v is ... else v for c, v in zip(columns, values, strict=True)}
        record |= {"__op": op, "__seq": self._seq, "__source": 1}
        record |= {"__commit_lsn": self._lsn, "__commit_index": self._index}
        record["__unchanged"] = [c for c, v in zip(columns, values, strict=True) if v is ...]
        if old is not None:
            record["__before"] = [(c, v) for c, v, key in zip(columns, old, keys, strict=True) if key]
        self._index += 1
        self.records[name].append(record)
        self.transactions[-1][1][name][op] += 1


def _u32(data: bytes) -> int:
    value: int = struct.unpack(">I", data[:4])[0]
    return value


def follow(connection: "psycopg.Connection[Any]", reader: Reader) -> None:
    connection.execute(PINNED)
    query = (
        "SELECT data FROM pg_logical_slot_get_binary_changes"
        "('judged', NULL, NULL, 'proto_version', '1', 'publication_names', 'everything,inserts', 'messages', 'true')"
    )
    for (data,) in connection.execute(query):
        reader.read(data)


def judge(
    connection: "psycopg.Connection[Any]",
    reader: Reader,
    tables: dict[str, str],
    steps: list[StepInfo],
    apart: Collection[str] = (),
) -> None:
    """Compare each table (its SQL name: the reader's name) with its replay, and each transaction with its step."""
    records = {}
    for name, plain in tables.items():
        source = source_rows(connection, name)
        records[name] = reader.table(plain, source)
        if name in apart:
            continue
        replay = replay_records(records[name], source)
        assert replay.violations == [], name
        assert difference(replay.rows, source) == [], name
    found = {xid: {t: dict(ops) for t, ops in events.items()} for xid, events in reader.transactions if events}
    plain_names = tables | {"_messages": "_messages"}
    expected = {
        step.xid & 0xFFFFFFFF: {plain_names[t]: dict(ops) for t, ops in step.events.items()}
        for step in steps
        if step.xid is not None and step.events
    }
    assert found == expected
    assert not any(" after " in problem for problem in check_records(records))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decoded_changes_of_the_workload_replay_to_its_tables(postgres: Database, seed: int):
    workload = Workload(seed, transaction_rows_max=1_000, rows_max=500, add_defaults=False)
    reader = Reader()
    with postgres.connect() as connection, postgres.connect() as follower:
        workload.setup(connection)
        for table in workload.tables:  # from empty tables, so that every row is in the changes
            connection.execute(f"TRUNCATE {table} CASCADE".encode())
            table.empty()
        whole = ", ".join(str(table) for table in workload.tables if table.has_current)
        others = ", ".join(str(table) for table in workload.tables if not table.has_current)
        connection.execute(f"CREATE PUBLICATION everything FOR TABLE {whole}".encode())
        connection.execute(
            f"CREATE PUBLICATION inserts FOR TABLE {others} WITH (publish = 'insert, truncate')".encode()
        )
        connection.execute("SELECT pg_create_logical_replication_slot('judged', 'pgoutput')")
        steps = []
        for _ in range(10):
            steps += [workload.step(connection) for _ in range(30)]
            follow(follower, reader)
        assert {step.kind for step in steps} >= {"mixed", "large", "add_column", "truncate_cascade", "prepared"}
        names = {str(t): f"{t.schema}.{t.name}" for t in workload.tables}
        # A table whose updates aren't sent can't be replayed.
        judge(connection, reader, names, steps, apart={"public.unidentified"})


def test_decoded_changes_of_the_shop_replay_to_its_tables(postgres: Database):
    shop = ShopWorkload(7, customers=50, products=30, orders=40, add_column_at=150)
    reader = Reader()
    with postgres.connect() as connection, postgres.connect() as follower:
        connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        connection.execute("CREATE PUBLICATION inserts")
        connection.execute("SELECT pg_create_logical_replication_slot('judged', 'pgoutput')")
        shop.setup(connection)
        follow(follower, reader)
        reader.transactions.clear()
        steps = shop.run(connection, seconds=0.1, tx_per_second=1000) + [shop.step(connection) for _ in range(600)]
        follow(follower, reader)
        assert len({step.kind for step in steps}) == 13
        names = {f"public.{table}": f"public.{table}" for table in shop.TABLES}
        judge(connection, reader, names, steps)


@pytest.mark.long
@pytest.mark.parametrize("make", [lambda: Workload(5), lambda: ShopWorkload(5, customers=10, products=10, orders=10)])
def test_a_workload_goes_on_after_its_server_was_stopped(make: Callable[[], Workload | ShopWorkload]):
    workload = make()
    with EmbeddedPostgres(fsync=False) as server:
        connection = server.connect()
        workload.setup(connection)
        for _ in range(20):
            workload.step(connection)
        server.stop("immediate")
        with pytest.raises(psycopg.OperationalError):
            workload.step(connection)
        server.start()
        with server.connect() as connection:
            assert all(workload.step(connection).number for _ in range(100))


@pytest.mark.long
def test_a_seed_decides_everything(postgres_server: EmbeddedPostgres):
    results = []
    for number in range(2):
        dsn = postgres_server.create_database(f"seeded_{number}")
        workload = Workload(11, transaction_rows_max=2_000)
        with psycopg.connect(dsn, autocommit=True) as connection:
            workload.setup(connection)
            steps = [replace(workload.step(connection), xid=None) for _ in range(150)]
            results.append((steps, {str(t): source_rows(connection, str(t)) for t in workload.tables}))
        postgres_server.drop_database(f"seeded_{number}")
    assert results[0] == results[1]


def test_only_the_tables_that_were_asked_for_are_made(postgres: Database):
    workload = Workload(1, tables=["simple", "bag"], transaction_rows_max=100)
    with postgres.connect() as connection:
        workload.setup(connection)
        steps = workload.run(connection, seconds=0.5)
        assert {name for step in steps for name in step.events} <= {"public.simple", "public.bag", "_messages"}
        count = connection.execute("SELECT count(*) FROM pg_stat_user_tables").fetchone()
    assert count == (2,)


def test_large_transactions_have_as_many_rows_as_asked_for(postgres: Database):
    workload = Workload(2, transaction_rows_max=10_000)
    with postgres.connect() as connection:
        workload.setup(connection)
        assert max(workload.step(connection).changes for _ in range(20)) >= 10_000


@pytest.mark.long
@pytest.mark.parametrize("version", [14])
def test_every_type_is_read_by_the_oldest_server_too(version: int):
    server = EmbeddedPostgres(version, fsync=False)
    try:
        server.program("postgres")
    except PostgresUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with server, server.connect() as connection:
        workload = Workload(3, transaction_rows_max=500)
        workload.setup(connection)
        assert all(workload.step(connection).number for _ in range(150))
        assert all(len(source_rows(connection, str(t))) == len(t.live) for t in workload.tables)
