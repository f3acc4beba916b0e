"""The log holds what PostgreSQL prints, byte for byte, for every type of column and every way a value may come."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from tests.capture.capture_stage import MemoryLog, Stage, make_config
from tests.capture.every_type import EXTENSIONS, FROM_CATALOGS, ODD_SETTINGS, PINNED, TYPES, ServerTypes

from millstream.catalog import Catalog, TableState
from millstream.model.operations import WriteOps
from millstream.model.schema import TableKind
from millstream.testing.oracle.pgtext import texts
from millstream.testing.postgres import VERSIONS, EmbeddedPostgres

ALWAYS = frozenset(
    {
        *(
            "bytea",
            "character varying",
            "char(9)",
            '"char"',
            "double precision",
            "integer",
            "interval",
            "name",
            "numeric",
        ),
        *(
            "regclass",
            "text",
            "timestamp with time zone",
            "timestamp(3)",
            "uuid",
            "int4range",
            "jsonb",
            "text[]",
            "inet",
        ),
        *("public.mood", "public.amount", "public.nested", "public.known_spot", "public.float_range", "public.mood[]"),
        *("public.citext", "public.ltree", "public.vector"),
    }
)
"""Keys that applications use, and types that PostgreSQL reads or compares in a special way."""
COLUMNS = 40
"""Number of a table's own columns, so that its rows fit within a page."""
NOT_COLUMNS = {"cstring[]", "pg_attribute", "pg_statistic", "pg_statistic_ext_data", "pg_stats", "pg_stats_ext_exprs"}
"""Types that no column may have, as they contain a pseudo-type; arrays of the rows likewise."""

NO_KEY = (psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded, psycopg.errors.UndefinedFunction)
"""Errors for a null, an existing key, one too long for an index, or one with parts that have no order."""

Row = dict[str, str | None]


@dataclass(frozen=True)
class Told:
    """A record with its values as text; the values that PostgreSQL left out are missing."""

    op: str
    row: Row
    before: Row


def told(log: MemoryLog) -> Iterator[tuple[str, Told]]:
    """Yield the log's records by table, their values rendered by the oracle and not by the code under test."""
    for entry in list(log.entries):
        pieces = [entry.tables] if isinstance(entry, WriteOps) else entry.chunks()
        for table in (table for tables in pieces for table in tables):
            if table.schema.kind is not TableKind.TABLE:
                continue
            names = [column.name for column in table.schema.columns]
            values = [texts(table.rows.column(name)) for name in names]
            facts = table.rows.select(["__op", "__exact", "__unchanged", "__before"]).to_pylist()
            for number, fact in enumerate(facts):
                row = {name: column[number] for name, column in zip(names, values, strict=True)}
                for name, text in fact["__exact"] or ():
                    assert row[name] is None, "a value is in its column or beside it"
                    assert not pa.types.is_string(table.schema.column(name).arrow), "text has every value"
                    row[name] = text
                for name in fact["__unchanged"] or ():
                    assert row.pop(name) is None
                yield table.schema.name, Told(chr(fact["__op"]), row, dict(fact["__before"] or ()))


def at_source(connection: psycopg.Connection[Any], table: str) -> dict[str, Row]:
    """Return a table's rows by their first column, as PostgreSQL prints them."""
    result = connection.pgconn.exec_(f"SELECT * FROM public.{table}".encode())
    names = [(result.fname(n) or b"").decode() for n in range(result.nfields)]
    rows = [
        {name: None if (v := result.get_value(r, n)) is None else v.decode() for n, name in enumerate(names)}
        for r in range(result.ntuples)
    ]
    return {str(row[names[0]]): row for row in rows}


def prepare(stage: Stage) -> None:
    """Create types of all kinds, in a database with unusual settings wherever there is a setting."""
    with stage.connect() as connection:
        there = {name for (name,) in connection.execute("SELECT name FROM pg_available_extensions").fetchall()}
        for extension in sorted(there.intersection(EXTENSIONS)):
            connection.execute(sql.SQL("CREATE EXTENSION {}").format(sql.Identifier(extension)))
        for statement in TYPES:
            connection.execute(statement)
        name = sql.Identifier(connection.info.dbname)
        for setting, value in ODD_SETTINGS.items():
            connection.execute(sql.SQL("ALTER DATABASE {} SET {} = {}").format(name, sql.SQL(setting), sql.SQL(value)))
    stage.config = replace(stage.config, tables=("public.every_*", "public.key_*"))


class Zoo:
    """Tables that together have a column of every type, and the records that the log should have of them."""

    def __init__(self, connection: psycopg.Connection[Any], rng: Random, rows: int) -> None:
        self._connection = connection
        self._rng = rng
        self._rows = rows
        self._types = ServerTypes(connection)
        self._tables: dict[str, dict[str, Callable[[Random], sql.Composable]]] = {}
        self.expected: dict[str, dict[str, list[Told]]] = {}
        self.full: set[str] = set()
        taken = self._columns()
        for start in range(0, len(taken), COLUMNS):
            self._make(f"every_{start // COLUMNS}", dict(taken[start : start + COLUMNS]))
        self.column_count = len(taken)

    def _columns(self) -> list[tuple[str, Callable[[Random], sql.Composable]]]:
        """Return the types that a column can be declared as, shuffled; the server reports those it refuses."""
        found = []
        for name, expression in self._types.columns().items():
            try:
                with self._connection.transaction():
                    self._connection.execute(sql.SQL("CREATE TABLE public.refused (c {})").format(sql.SQL(name)))
                    raise psycopg.Rollback
            except psycopg.errors.InvalidTableDefinition:
                assert name.removesuffix("[]") in NOT_COLUMNS or name in NOT_COLUMNS, f"{name} is refused as a column"
            else:
                found.append((name, expression))
        self._rng.shuffle(found)
        return found

    def _make(self, name: str, columns: dict[str, Callable[[Random], sql.Composable]]) -> None:
        declared = [sql.SQL("{} {}").format(sql.Identifier(f"c {c}"), sql.SQL(c)) for c in columns]
        self._connection.execute(
            sql.SQL("CREATE TABLE public.{} (id int PRIMARY KEY, {})").format(
                sql.Identifier(name), sql.SQL(", ").join(declared)
            )
        )
        if len(self._tables) % 2 == 0:
            self._connection.execute(f"ALTER TABLE public.{name} REPLICA IDENTITY FULL")
            self.full.add(name)
        self._tables[name] = columns
        self.expected[name] = {}

    def _draw(self, columns: dict[str, Callable[[Random], sql.Composable]]) -> list[sql.Composable]:
        return [self._types.draw(expression, self._rng) for expression in columns.values()]

    def insert(self, first: int, op: str) -> None:
        """Insert rows from an id on, which reach the log as `op`."""
        for table, columns in self._tables.items():
            for id_ in range(first, first + self._rows):
                values = sql.SQL(", ").join([sql.Literal(id_), *self._draw(columns)])
                self._connection.execute(
                    sql.SQL("INSERT INTO public.{} VALUES ({})").format(sql.Identifier(table), values)
                )
            for key, row in at_source(self._connection, table).items():
                if int(key) >= first:
                    self.expected[table].setdefault(key, []).append(Told(op, row, {}))

    def update(self) -> None:
        """Change most columns of every row; the others are written with the same values."""
        for table, columns in self._tables.items():
            before = at_source(self._connection, table)
            for id_ in before:
                changed = [c for c in columns if self._rng.random() < 0.8] or list(columns)[:1]
                drawn = self._draw({c: columns[c] for c in changed})
                sets = [
                    sql.SQL("{} = {}").format(sql.Identifier(f"c {c}"), value)
                    for c, value in zip(changed, drawn, strict=True)
                ]
                self._connection.execute(
                    sql.SQL("UPDATE public.{} SET {} WHERE id = {}").format(
                        sql.Identifier(table), sql.SQL(", ").join(sets), sql.Literal(int(id_))
                    )
                )
            after = at_source(self._connection, table)
            for id_, row in after.items():
                self.expected[table][id_].append(Told("u", row, before[id_] if table in self.full else {}))

    def delete(self) -> None:
        """Delete every other row."""
        for table in self._tables:
            before = at_source(self._connection, table)
            self._connection.execute(f"DELETE FROM public.{table} WHERE id % 2 = 0")
            for id_, row in before.items():
                if int(id_) % 2 == 0:
                    known = row if table in self.full else dict.fromkeys(row) | {"id": id_}
                    self.expected[table][id_].append(Told("d", known, {}))


def check(log: MemoryLog, expected: dict[str, dict[str, list[Told]]]) -> None:
    """Check that each row's records are, one by one, what PostgreSQL printed at their time."""
    found: dict[str, dict[str, list[Told]]] = {}
    for table, record in told(log):
        found.setdefault(table, {}).setdefault(str(record.row["id"]), []).append(record)
    assert {table: sorted(rows) for table, rows in found.items()} == {
        table: sorted(rows) for table, rows in expected.items() if rows
    }
    for table, rows in expected.items():
        for id_, wanted in rows.items():
            told_of_row = found[table][id_]
            assert [record.op for record in told_of_row] == [record.op for record in wanted], f"{table} {id_}"
            for record, right in zip(told_of_row, wanted, strict=True):
                place = f"{table} {id_} {right.op}"
                for name, text in right.row.items():
                    # A large value that an update left alone isn't sent: the earlier value is still
                    # the current one.
                    said = record.row[name] if name in record.row else record.before.get(name, text)
                    assert said == text, f"{place}: {name} is {said!r} and not {text!r}"
                assert record.before == right.before, place


def every_value(stage: Stage, seed: int, rows: int) -> int:
    """Play a life of every type; return the number of columns."""
    prepare(stage)
    with stage.connect() as connection:
        connection.execute(PINNED)
        zoo = Zoo(connection, Random(seed), rows)
        zoo.insert(1, "r")
        assert not stage.catch_up().quarantined
        zoo.insert(1001, "c")
        zoo.update()
        zoo.delete()
        assert not stage.catch_up().quarantined
    check(stage.log, zoo.expected)
    return zoo.column_count


@pytest.mark.siege
def test_every_type_comes_as_postgresql_prints_it(stage: Stage) -> None:
    assert every_value(stage, seed=20_240_229, rows=2) > 600


class Keyed:
    """Tables with one key type each: those of `ALWAYS` and some others."""

    def __init__(self, connection: psycopg.Connection[Any], rng: Random, *, some: int) -> None:
        self._connection = connection
        self._rng = rng
        self._types = ServerTypes(connection)
        possible = [t.name for t in self._types if not t.system_row and t.name not in FROM_CATALOGS] + list(
            self._types.modified()
        )
        always = [name for name in possible if name in ALWAYS]
        others = [name for name in possible if name not in ALWAYS]
        columns = self._types.columns()
        self.tables: dict[str, tuple[str, Callable[[Random], sql.Composable]]] = {}
        for name in always + rng.sample(others, min(some, len(others))):
            table = f"key_{len(self.tables)}"
            statement = "CREATE TABLE public.{} (k {} PRIMARY KEY, v int, r regclass)"
            try:
                with connection.transaction():
                    connection.execute(sql.SQL(statement).format(sql.Identifier(table), sql.SQL(name)))
                    connection.execute(
                        sql.SQL("SELECT FROM public.{} WHERE k > k ORDER BY k").format(sql.Identifier(table))
                    )
            except (
                psycopg.errors.UndefinedObject,
                psycopg.errors.UndefinedFunction,
                psycopg.errors.InvalidTableDefinition,
            ):
                continue  # it or a part has no order (or, hstore, none by usual names), or no column may have it
            self.tables[table] = name, columns[name]

    def _write(self, statement: str, table: str, *more: sql.Composable) -> None:
        """Run a statement with a newly drawn key, unless no row can have the key or be selected by its text."""
        name, expression = self.tables[table]
        key = self._types.draw(expression, self._rng)
        try:
            # A time that was rounded up beyond the last one is printed, but can't be read again. Nor
            # can an operator without its arguments.
            self._connection.execute(sql.SQL("SELECT format('%s', {})::{}").format(key, sql.SQL(name)))
        except psycopg.Error:
            return
        try:
            self._connection.execute(sql.SQL(statement).format(sql.Identifier(table), key, *more))
        except NO_KEY:
            return

    def insert(self, rows: int) -> None:
        """Insert rows, with a column whose text depends on the search path."""
        for table in self.tables:
            for number in range(rows):
                insert = "INSERT INTO public.{} VALUES ({}, {}, 'public.kept') ON CONFLICT DO NOTHING"
                self._write(insert, table, sql.Literal(number))

    def change(self) -> None:
        """Update rows and their keys, and delete some."""
        for table in self.tables:
            self._connection.execute(f"UPDATE public.{table} SET v = v + 1 WHERE v % 3 = 0")
            self._connection.execute(f"DELETE FROM public.{table} WHERE v % 3 = 2")
            for _ in range(3):
                self._write("UPDATE public.{0} SET k = {1} WHERE ctid = (SELECT min(ctid) FROM public.{0})", table)


def every_key(stage: Stage, seed: int, rows: int, some: int = 1000) -> int:
    """Copy tables keyed by each possible type in chunks, and change them; return how many tables there were."""
    prepare(stage)
    stage.config = replace(stage.config, chunk_rows=3, copy_workers=2)
    with stage.connect() as connection:
        connection.execute(PINNED)
        keyed = Keyed(connection, Random(seed), some=some)
        keyed.insert(rows)
        assert stage.catch_up().quarantined == {}
        compare(stage, connection, keyed)
        keyed.insert(rows)
        keyed.change()
        assert stage.catch_up().quarantined == {}
        compare(stage, connection, keyed)
    return len(keyed.tables)


def compare(stage: Stage, connection: psycopg.Connection[Any], keyed: Keyed) -> None:
    replayed = stage.log.replay()
    for table, (name, _) in keyed.tables.items():
        found = {key: row for (key,), row in replayed.get(f"public.{table}", {}).items()}
        assert found == at_source(connection, table), name
        assert stage.state(f"public.{table}") is TableState.STREAMING


@pytest.mark.long
def test_every_type_that_can_be_a_key_is_one(stage: Stage) -> None:
    assert every_key(stage, seed=20_240_229, rows=8, some=20) > 30


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_new_values_of_every_type(tmp_path: Path, version: int) -> None:
    """Runs as many rounds as are asked for; MILLSTREAM_SOAK_SEED repeats one."""
    wanted = os.environ.get("MILLSTREAM_SOAK_SEED")
    with EmbeddedPostgres(version, fsync=False) as server:
        for number in range(1 if wanted else int(os.environ.get("MILLSTREAM_SOAK_ROUNDS", "100"))):
            seed = int(wanted) if wanted else secrets.randbelow(2**32)
            print(f"PostgreSQL {version}, seed {seed} (round {number})", flush=True)  # noqa: T201 - seeds are told
            for play in (every_value, every_key):
                name = f"soak_{number}_{play.__name__}"
                folder = tmp_path / name
                folder.mkdir()
                dsn = server.create_database(name)
                with closing(Catalog(folder / "catalog.db")) as catalog:
                    catalog.resolve_stream("shop")
                    stage = Stage(dsn, folder, catalog, make_config(dsn, folder, name))
                    try:
                        play(stage, seed, 12)
                    finally:
                        stage.log.close()
                server.drop_database(name)
