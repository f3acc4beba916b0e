"""The changes that a real PostgreSQL sends, decoded and replayed, give what its tables hold, text for text."""

from collections.abc import Iterable, Iterator

import psycopg
from tests.codec.pgoutput_checks import decode
from tests.codec.pgoutput_messages import TablesByOid
from tests.codec.reference_messages import StreamAbort, StreamStart, StreamStop, parse_message

from millstream.codec.pgoutput import (
    MessageRun,
    RelationCache,
    StreamCommit,
    decode_spilled,
)
from millstream.model.column_texts import render_column
from millstream.model.operations import TableRows
from millstream.testing.pytest_plugin import Database

SESSION = """
SET datestyle = 'ISO'; SET timezone = 'UTC'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex';
SET extra_float_digits = 3; SET logical_decoding_work_mem = '64kB'
"""
Replayed = dict[tuple[str | None, ...], list[str | None]]


def prepare(database: Database, tables: str) -> psycopg.Connection:
    connection = database.connect()
    connection.execute(SESSION)
    connection.execute(tables)
    connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
    connection.execute("SELECT pg_create_logical_replication_slot(current_database()::text, 'pgoutput')")
    return connection


def messages(connection: psycopg.Connection, *options: str) -> list[bytes]:
    """Return everything the slot has, as bytes."""
    said = ", ".join(f"'{o}'" for o in ("proto_version", "2", "publication_names", "p", "messages", "true", *options))
    query = f"SELECT data FROM pg_logical_slot_get_binary_changes(current_database()::text, NULL, NULL, {said})"
    return [bytes(row[0]) for row in connection.execute(query).fetchall()]


def texts(table: TableRows) -> list[dict[str, str | None]]:
    """Return the table's own columns as text, without unchanged values."""
    columns = {c.name: render_column(table.rows.column(c.name), c) for c in table.schema.columns}
    rows = []
    for number, row in enumerate(table.rows.select(["__exact", "__unchanged"]).to_pylist()):
        values = {name: column[number] for name, column in columns.items()}
        values.update(row["__exact"] or [])
        for name in row["__unchanged"] or []:
            del values[name]
        rows.append(values)
    return rows


def replay(tables: Iterable[TableRows]) -> dict[str, Replayed]:
    """Return every table as its records leave it, by the text of its key."""
    state: dict[str, Replayed] = {}
    for table in tables:
        rows = state.setdefault(table.schema.name, {})
        key = ("id",)  # every table's primary key here, also for the one under FULL
        plain = table.rows.select(["__op", "__before"]).to_pylist()
        for values, record in zip(texts(table), plain, strict=True):
            own = tuple(values.get(name) for name in key)
            op = chr(record["__op"])
            if op == "t":
                rows.clear()
            elif op == "d":
                del rows[own]
            elif op == "c":
                assert own not in rows
                rows[own] = dict(values)
            else:
                before = dict(record["__before"] or [])
                old = rows.pop(tuple(before.get(name, values.get(name)) for name in key))
                rows[own] = {**old, **values}
    return state


def at_source(connection: psycopg.Connection, table: str, key: str) -> Replayed:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table}")
        names = [column.name for column in cursor.description]
        # SQL's "IS NULL" holds for a composite of nulls, but it isn't null.
        cursor.execute(
            "SELECT "
            + ", ".join(f"format('%s', t.{n}), t.{n} IS NOT DISTINCT FROM NULL" for n in names)
            + f" FROM {table} t"
        )
        found = {}
        for row in cursor.fetchall():
            values = {n: None if row[2 * i + 1] else row[2 * i] for i, n in enumerate(names)}
            found[values[key],] = values
    return found


EVERY_TYPE = """
CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE TYPE pair AS (a int, b text);
CREATE TABLE t (
    id int PRIMARY KEY, s smallint, b bigint, o bool, r real, d float8, n numeric, n2 numeric(12,2), t text, c char(5),
    v varchar(9), day date, at timestamp, tz timestamptz, tm time, iv interval, y bytea, u uuid, j json, jb jsonb, m money,
    e mood, p positive, pr pair, rg int4range, ip inet, pt point, bi bit(3), ia int[], ta text[], na numeric(5,1)[], tza timestamptz[]
)
"""
VALUES = """
INSERT INTO t VALUES
(1, -32768, 9223372036854775807, true, 1.5, 1e23, 'NaN', 12.50, E'a\\tb\\\\ä', 'ab', 'v', '2024-02-29', '2024-01-01 12:00:00.5',
 '2024-01-01 12:00+02', '24:00', '1 mon 2 days 03:04:05.6', '\\x00ff', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a": 1 }', '{"b":1}',
 '12.34', 'sad', 7, '(1,"x y")', '[1,5)', '10.0.0.0/8', '(1,2)', '101', '{1,NULL,3}', '{a,"b c",NULL,"NULL",""}', '{1.5,NULL}',
 '{2024-01-01 00:00+00}'),
(2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
 NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
(3, 0, 0, false, 'NaN', '-Infinity', 123456789012345678901234567890.5, 'NaN', '', '', '', 'infinity', '-infinity', '4713-01-01 BC', '0:0',
 '-1 year', '', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '1', 'null', '-1', 'happy', 1, '(,)', 'empty', '::1', '(0,0)', '000',
 '[0:1]={1,2}', '{{a,b},{c,d}}', '{}', '{infinity}'),
(4, 1, 1, false, -0.0, 1e-300, -0.1, -0.01, 'x', 'y', 'z', '0044-03-15 BC', '12024-01-01', '0001-01-01', '12:00', '0', '\\x01', NULL, '{}',
 '[]', '0', 'sad', 2, '(,)', '[3,3]', '0.0.0.0', '(-1.5,1e20)', '111', '{}', '{}', '{NaN}', '{}')
"""


def test_every_type_and_change_replays_to_what_the_source_holds(postgres: Database):
    connection = prepare(
        postgres,
        EVERY_TYPE
        + "; CREATE TABLE f (id int PRIMARY KEY, x text, y text); ALTER TABLE f REPLICA IDENTITY FULL;"
        + "ALTER TABLE f ALTER x SET STORAGE EXTERNAL; CREATE TABLE toast (id int PRIMARY KEY, big text, n int);"
        + "ALTER TABLE toast ALTER big SET STORAGE EXTERNAL; CREATE TABLE gone (id int PRIMARY KEY)",
    )
    connection.execute(VALUES)
    connection.execute("UPDATE t SET id = id + 100 WHERE id > 2")
    connection.execute("UPDATE t SET n2 = 0.01, ia = '{7}' WHERE id = 1")
    connection.execute("DELETE FROM t WHERE id = 104")
    connection.execute("INSERT INTO f SELECT n, repeat('x', 9000), NULL FROM generate_series(1, 5) n")
    connection.execute(
        "UPDATE f SET y = 'new' WHERE id < 4; DELETE FROM f WHERE id = 2; UPDATE f SET id = 50 WHERE id = 5"
    )
    connection.execute("INSERT INTO toast SELECT n, repeat('y', 9000), n FROM generate_series(1, 3) n")
    connection.execute("UPDATE toast SET n = n + 1; UPDATE toast SET id = id + 10")
    connection.execute("INSERT INTO gone VALUES (1); TRUNCATE gone, toast; INSERT INTO toast VALUES (1, 'small', 1)")
    connection.execute(
        "SELECT pg_logical_emit_message(true, 'app', 'in'), pg_logical_emit_message(false, 'app', 'out')"
    )
    connection.execute("ALTER TABLE t ADD extra text DEFAULT 'd'; INSERT INTO t (id, extra) VALUES (9, 'e')")
    run = messages(connection)
    ops = decode(run)
    replayed = replay(table for table in ops.tables if table.schema.name != "_messages")
    for row in replayed["t"].values():
        row.setdefault("extra", "d")  # the source sends nothing for rows that were there before
    for table in ("t", "f", "toast", "gone"):
        assert replayed[table] == at_source(connection, table, "id"), table
    said = [text["content"] for table in ops.tables if table.schema.name == "_messages" for text in texts(table)]
    assert sorted(said) == ["in", "out"]
    names = {column.name: column.pg.name for column in ops.tables[0].schema.columns}
    assert (names["e"], names["p"], names["id"]) == ("public.mood", "pg_catalog.int4", "integer")  # a domain: its base
    exact = {name for table in ops.tables for row in table.rows.column("__exact").to_pylist() for name, _ in row or []}
    assert {"n2", "day", "at", "tz", "ia", "ta", "na", "tza"} <= exact


def spill(run: list[bytes]) -> Iterator[tuple[StreamCommit, list[bytes], set[int]]]:
    """Yield the streamed transactions of a stream, each with its messages and aborted subtransactions."""
    blocks: dict[int, list[bytes]] = {}
    aborted: dict[int, set[int]] = {}
    inside: int | None = None
    for data in run:
        if data[:1] in b"SEcA":
            match parse_message(data):
                case StreamStart(xid=xid):
                    inside = xid
                case StreamStop():
                    inside = None
                case StreamAbort(xid=xid, subxid=subxid):
                    aborted.setdefault(xid, set()).add(subxid)
                case StreamCommit() as commit:
                    yield commit, blocks[commit.xid], aborted.get(commit.xid, set())
        elif inside is not None:
            blocks.setdefault(inside, []).append(data)


def test_a_streamed_transaction_with_aborted_savepoints_is_what_committed(postgres: Database):
    connection = prepare(postgres, "CREATE TABLE t (id int PRIMARY KEY, pad text)")
    with connection.transaction():
        connection.execute("INSERT INTO t SELECT n, repeat('a', 200) FROM generate_series(1, 2000) n")
        with connection.transaction():
            connection.execute("INSERT INTO t SELECT n, repeat('b', 200) FROM generate_series(3001, 5000) n")
            raise psycopg.Rollback
        with connection.transaction():
            connection.execute("DELETE FROM t WHERE id % 7 = 0")
            connection.execute("UPDATE t SET pad = 'c' WHERE id % 5 = 0")
    with connection.transaction():
        connection.execute("INSERT INTO t SELECT n, repeat('d', 200) FROM generate_series(6001, 8000) n")
        raise psycopg.Rollback
    run = messages(connection, "streaming", "on")
    transactions = list(spill(run))
    assert len(transactions) == 1, "one committed, the other didn't"
    commit, block, aborted = transactions[0]

    def read() -> Iterator[MessageRun]:
        for start in range(0, len(block), 500):
            yield MessageRun.of(block[start : start + 500])

    op = decode_spilled(read, TablesByOid(), RelationCache(), commit, aborted=aborted)
    pieces = [table for tables in op.chunks() for table in tables]
    assert replay(pieces)["t"] == at_source(connection, "t", "id")
    indexes = [index for table in pieces for index in table.rows.column("__index").to_pylist()]
    assert indexes == list(range(op.row_count))
    assert op.row_count == 2000 + 2000 // 7 + len([n for n in range(1, 2001) if n % 5 == 0 and n % 7])
