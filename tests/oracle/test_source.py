from collections import Counter

import pytest
from psycopg import errors

from millstream.testing.oracle import TableRows, difference, source_rows
from millstream.testing.pytest_plugin import Database


def test_rows_are_read_as_the_text_that_copy_prints(postgres: Database):
    with postgres.connect() as connection:
        connection.execute('CREATE SCHEMA "Mixed Schema"')
        connection.execute(
            'CREATE TABLE "Mixed Schema"."T" (id int PRIMARY KEY, "a\tb" text, c char(4), f bool, d date, x bytea, '
            "g int GENERATED ALWAYS AS (id * 2) STORED, n float8, e interval)"
        )
        texts = ["", "\\N", "tab\tnewline\ncr\rbackslash\\", "\b\f\v\x01", "ü🦀", None]
        for number, text in enumerate(texts):
            connection.execute('INSERT INTO "Mixed Schema"."T" VALUES (%s, %s)', [number, text])
        connection.execute(
            """UPDATE "Mixed Schema"."T" SET c = 'x', f = true, d = '0044-03-15 BC', x = '\\x00ff', n = 0.1, e = '1 day'
            WHERE id = 0"""
        )
        connection.execute("SET datestyle = 'German'; SET bytea_output = 'escape'; SET intervalstyle = 'iso_8601'")
        rows = source_rows(connection, '"Mixed Schema"."T"')
        assert connection.execute("SHOW datestyle").fetchone() == ("German, DMY",)
        generated = connection.info.server_version >= 180000
    assert rows.columns == ("id", "a\tb", "c", "f", "d", "x", *(("g",) if generated else ()), "n", "e")
    assert rows.key == ("id",)
    values = ("0", "", "x   ", "t", "0044-03-15 BC", "\\x00ff", *(("0",) if generated else ()), "0.1", "1 day")
    assert rows.rows[("0",)] == values
    assert [rows.rows[(str(n),)][1] for n in range(len(texts))] == texts


@pytest.mark.parametrize(
    ("definition", "key"),
    [
        ("(a int, b text, PRIMARY KEY (b, a))", ("b", "a")),
        ("(a int PRIMARY KEY, b text NOT NULL UNIQUE); ALTER TABLE t REPLICA IDENTITY USING INDEX t_b_key", ("b",)),
        ("(a int PRIMARY KEY, b text); ALTER TABLE t REPLICA IDENTITY FULL", ("a",)),
        ("(a int, b text); ALTER TABLE t REPLICA IDENTITY FULL", ()),
        ("(a int PRIMARY KEY, b text); ALTER TABLE t REPLICA IDENTITY NOTHING", ()),
        ("(a int, b text)", ()),
    ],
)
def test_the_key_is_the_replica_identity(postgres: Database, definition: str, key: tuple[str, ...]):
    with postgres.connect() as connection:
        connection.execute(f"CREATE TABLE t {definition}")
        connection.execute("INSERT INTO t VALUES (1, 'x')")
        rows = source_rows(connection, "t")
    assert rows.key == key
    assert len(rows) == 1


def test_a_table_without_a_key_is_a_bag(postgres: Database):
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE t (a int, b text)")
        connection.execute("INSERT INTO t VALUES (1, 'x'), (1, 'x'), (1, NULL)")
        rows = source_rows(connection, "t")
    assert rows.bag == Counter({("1", "x"): 2, ("1", None): 1})
    assert rows.rows == {}


def test_tables_are_read_under_the_callers_snapshot(postgres: Database):
    with postgres.connect() as reader, postgres.connect() as writer:
        writer.execute("CREATE TABLE t (a int PRIMARY KEY)")
        with reader.transaction():
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            assert len(source_rows(reader, "t")) == 0
            writer.execute("INSERT INTO t VALUES (1)")
            assert len(source_rows(reader, "t")) == 0
        assert len(source_rows(reader, "t")) == 1
        with pytest.raises(errors.UndefinedTable):
            source_rows(reader, "no_such_table")


def test_differences_are_told_by_key_column_and_value():
    source = TableRows(("id", "v"), ("id",), {("1",): ("1", "a"), ("2",): ("2", "b"), ("3",): ("3", None)})
    ours = TableRows(("id", "v"), ("id",), {("1",): ("1", "a"), ("3",): ("3", ""), ("4",): ("4", "d")})
    assert difference(source, source) == []
    assert sorted(difference(ours, source)) == [
        "{'id': '2'}: missing",
        "{'id': '3'}: v is '', None in the source",
        "{'id': '4'}: not in the source: ('4', 'd')",
    ]
    assert difference(ours, source, limit=1)[1] == "and 2 more"
    assert "columns" in difference(TableRows(("id",), ("id",)), source)[0]
    one, two = TableRows(("v",), (), bag=Counter({("x",): 1})), TableRows(("v",), (), bag=Counter({("x",): 2}))
    assert difference(one, two) == ["1 times, 2 in the source: ('x',)"]
