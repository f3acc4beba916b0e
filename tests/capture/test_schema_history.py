"""A backlog is read with the definitions in force when it was written, however many came since.

A change that can't be followed waits.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
from tests.capture.capture_stage import MemoryLog, Stage, make_config
from tests.codec.reference_messages import Delete, Insert, Update, decode_raw

from millstream.app.table_requests import retry_table
from millstream.catalog import Catalog, TableState
from millstream.model.operations import OperationKind
from millstream.model.schema import TableKind
from millstream.testing.postgres import VERSIONS, EmbeddedPostgres

TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN amount AS int CHECK (VALUE < 1000)",
    "CREATE TYPE spot AS (x int, y text)",
)
DECLARED = ("int", "bigint", "text", "numeric(8,2)", "timestamptz", "mood", "amount", "spot", "mood[]", "int[]", "date")
Record = tuple[str, str, dict[str, str | None], dict[str, tuple[int, int]]]
"""A table's name, the operation, the row as text, and its columns' types."""


class Source:
    """An application that changes its tables' definitions all the time, and records each row as it was written."""

    def __init__(self, connection: psycopg.Connection[Any], rng: Random) -> None:
        self._run = connection.execute
        self._connection = connection
        self._rng = rng
        self._number = 0
        self.written: list[Record] = []
        self.tables: list[str] = []
        for statement in TYPES:
            self._run(statement)
        self.make("orders")
        self.make("others")

    def play(self, rounds: int) -> None:
        """Run every kind of step so many times, in random order, with rows written between them."""
        kinds = [self.add, self.drop, self.drop_and_add, self.rename, self.swap, self.retype, self.rename_and_make]
        kinds += [
            self.rename_table,
            self.enum_value,
            self.enum_name,
            self.field,
            self.check,
            self.drop_table,
            self.truncate,
        ]
        steps = kinds * rounds
        self._rng.shuffle(steps)
        for step in steps:
            self.write()
            step()
            self.write()

    def write(self) -> None:
        """Insert, update or delete a row of some table."""
        table = self._rng.choice(self.tables)
        for _ in range(self._rng.randint(1, 3)):
            self._insert(table)
        ids = [row[0] for row in self._run(f"SELECT id FROM {table} ORDER BY id").fetchall()]
        kind = self._rng.randrange(3)
        id_ = self._rng.choice(ids)
        if kind == 0:
            columns = [c for c in self._columns(table) if c[0] != "id"]
            if columns:
                sets = ", ".join(f"{name} = {self._value(declared)}" for name, declared in columns)
                self._run(f"UPDATE {table} SET {sets} WHERE id = {id_}")
                self._note(table, "u", id_)
        elif kind == 1:
            self._note(table, "d", id_)
            self._run(f"DELETE FROM {table} WHERE id = {id_}")

    def add(self) -> None:
        default = self._rng.choice(("", " DEFAULT NULL", f" DEFAULT {self._value('int')}"))
        declared = "int" if default.endswith("'") else self._rng.choice(DECLARED)
        self._run(f"ALTER TABLE {self._any()} ADD {self._name()} {declared}{default}")

    def drop(self) -> None:
        table, names = self._some(1)
        if names:
            self._run(f"ALTER TABLE {table} DROP {names[0]}")

    def drop_and_add(self) -> None:
        """Drop a column and add one under its name, in one transaction, with rows before and after."""
        table, names = self._some(1)
        if names:
            with self._connection.transaction():
                self._insert(table)
                self._run(f"ALTER TABLE {table} DROP {names[0]}")
                self._insert(table)
                self._run(f"ALTER TABLE {table} ADD {names[0]} {self._rng.choice(DECLARED)}")
                self._insert(table)

    def rename(self) -> None:
        table, names = self._some(1)
        if names:
            self._run(f"ALTER TABLE {table} RENAME {names[0]} TO {self._name()}")

    def swap(self) -> None:
        table, names = self._some(2)
        if len(names) == 2:
            with self._connection.transaction():
                self._insert(table)
                for old, new in ((names[0], "spare"), (names[1], names[0]), ("spare", names[1])):
                    self._run(f"ALTER TABLE {table} RENAME {old} TO {new}")
                self._insert(table)

    def retype(self) -> None:
        table, names = self._some(1)
        if names:
            new = self._rng.choice(("text", "varchar(2)"))
            self._run(f"ALTER TABLE {table} ALTER {names[0]} DROP DEFAULT")
            self._run(f"ALTER TABLE {table} ALTER {names[0]} TYPE {new} USING left({names[0]}::text, 2)")

    def rename_table(self) -> None:
        table, new = self._any(), self._name()
        self._run(f"ALTER TABLE {table} RENAME TO {new}")
        self.tables[self.tables.index(table)] = new

    def rename_and_make(self) -> None:
        """Rename a table and create another one under its name, in one transaction."""
        table, new = self._any(), self._name()
        with self._connection.transaction():
            self._insert(table)
            self._run(f"ALTER TABLE {table} RENAME TO {new}")
            self.tables[self.tables.index(table)] = new
            self.make(table)
            self._insert(table)
            self._insert(new)

    def drop_table(self) -> None:
        """Drop a table and create it again under its name."""
        table = self._any()
        self._run(f"DROP TABLE {table}")
        self.tables.remove(table)
        self.make(table)

    def truncate(self) -> None:
        self._run(f"TRUNCATE {self._any()}")

    def enum_value(self) -> None:
        self._run(f"ALTER TYPE mood ADD VALUE '{self._name()}'")

    def enum_name(self) -> None:
        self._run(f"ALTER TYPE mood RENAME VALUE '{self._rng.choice(self._labels())}' TO '{self._name()}'")

    def field(self) -> None:
        self._run(f"ALTER TYPE spot ADD ATTRIBUTE {self._name()} int")

    def check(self) -> None:
        self._run("ALTER DOMAIN amount DROP CONSTRAINT IF EXISTS amount_check")
        self._run(
            f"ALTER DOMAIN amount ADD CONSTRAINT amount_check CHECK (VALUE < {self._rng.randint(1000, 2000)}) NOT VALID"
        )

    def make(self, name: str) -> None:
        columns = ", ".join(f"{self._name()} {declared}" for declared in self._rng.sample(DECLARED, 3))
        self._run(f"CREATE TABLE {name} (id int PRIMARY KEY, {columns})")
        self.tables.append(name)

    def _any(self) -> str:
        return self._rng.choice(self.tables)

    def _some(self, count: int) -> tuple[str, list[str]]:
        """Choose a table, and so many of its columns, or all of them if there are fewer."""
        table = self._any()
        names = [name for name, _ in self._columns(table) if name != "id"]
        return table, self._rng.sample(names, min(count, len(names)))

    def _name(self) -> str:
        self._number += 1
        return f"n{self._number}"

    def _columns(self, table: str) -> list[tuple[str, str]]:
        return self._run(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
            " AND NOT attisdropped ORDER BY attnum",
            [table],
        ).fetchall()

    def _labels(self) -> list[str]:
        return [row[0] for row in self._run("SELECT unnest(enum_range(NULL::mood))::text").fetchall()]

    def _value(self, declared: str) -> str:
        n = self._rng.randint(-99, 99)
        if declared in {"mood", "mood[]"}:
            label = self._rng.choice(self._labels())
            return f"'{label}'" if declared == "mood" else f"'{{{label},NULL}}'"
        if declared == "spot":
            fields = self._run(
                "SELECT count(*) FROM pg_attribute WHERE attrelid = 'spot'::regclass AND attnum > 0"
            ).fetchall()
            return f"'({n},a b{',' * (fields[0][0] - 2)})'"
        plain = {"timestamp with time zone": f"2024-02-{n % 28 + 1}Z", "date": "infinity", "integer[]": f"{{{n},NULL}}"}
        plain |= {"numeric(8,2)": "NaN" if n % 5 == 0 else f"{n}.5", "text": f"text {n}", "character varying(2)": "ab"}
        return f"'{plain.get(declared, str(n))}'"

    def _insert(self, table: str) -> None:
        self._number += 1
        values = ", ".join(str(self._number) if n == "id" else self._value(d) for n, d in self._columns(table))
        self._run(f"INSERT INTO {table} VALUES ({values})")
        self._note(table, "c", self._number)

    def _note(self, table: str, op: str, id_: int) -> None:
        """Note what the log should hold: the row as PostgreSQL prints it now, under the current types."""
        types = {
            name: (oid, modifier)
            for name, oid, modifier in self._run(
                "SELECT attname, atttypid::int8, atttypmod FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
                " AND NOT attisdropped",
                [table],
            ).fetchall()
        }
        result = self._connection.pgconn.exec_(f"SELECT * FROM {table} WHERE id = {id_}".encode())
        row = {}
        for column in range(result.nfields):
            name, value = (result.fname(column) or b"").decode(), result.get_value(0, column)
            row[name] = value.decode() if value is not None and (op != "d" or name == "id") else None
        self.written.append((table, op, row, types))


def logged(log: MemoryLog) -> Iterator[Record]:
    """Yield the changes that arrived by the stream."""
    for table, operation, row in log.records():
        op = chr(row["__op"])
        if table.schema.kind is TableKind.TABLE and operation["kind"] != OperationKind.COPY_CHUNK and op in "cud":
            columns = table.schema.columns
            types = {c.name: (c.pg.oid, c.pg.modifier) for c in columns if c.pg is not None}
            yield table.schema.name, op, {c.name: row[c.name] for c in columns}, types


def backlog(stage: Stage, seed: int, rounds: int) -> None:
    stage.sql(
        "CREATE TABLE first (id int PRIMARY KEY)",
        f"CREATE PUBLICATION {stage.config.publication} FOR ALL TABLES",  # so that new tables send rows at once
    )
    stage.catch_up()
    with stage.connect(options="-c TimeZone=UTC") as connection:
        source = Source(connection, Random(seed))
        source.play(rounds)
    assert not stage.catch_up().quarantined
    assert list(logged(stage.log)) == source.written
    stage.catch_up()
    for table in source.tables:
        replayed = stage.log.replay(stage.table(f"public.{table}").id)
        assert replayed.get("", {}) == stage.source_rows(table, ["id"]), table
        assert stage.state(f"public.{table}") is TableState.STREAMING


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
def test_every_record_of_a_backlog_has_the_definition_of_its_moment(stage: Stage, seed: int) -> None:
    backlog(stage, seed, rounds=3)


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_backlogs_of_new_seeds(tmp_path: Path, version: int) -> None:
    """Runs as many rounds as are asked for; MILLSTREAM_SOAK_SEED repeats one."""
    wanted = os.environ.get("MILLSTREAM_SOAK_SEED")
    with EmbeddedPostgres(version, fsync=False) as server:
        for number in range(1 if wanted else int(os.environ.get("MILLSTREAM_SOAK_ROUNDS", "200"))):
            seed = int(wanted) if wanted else secrets.randbelow(2**32)
            print(f"PostgreSQL {version}, seed {seed} (round {number})", flush=True)  # noqa: T201 - seeds are told
            with staged(server, tmp_path, f"backlog_{number}") as stage:
                backlog(stage, seed, rounds=8)


@contextmanager
def staged(server: EmbeddedPostgres, folder: Path, name: str) -> Iterator[Stage]:
    """Yield a stage on its own database."""
    (folder / name).mkdir()
    dsn = server.create_database(name)
    with closing(Catalog(folder / name / "catalog.db")) as catalog:
        catalog.resolve_stream("shop")
        stage = Stage(dsn, folder / name, catalog, make_config(dsn, folder / name, name))
        try:
            yield stage
        finally:
            stage.log.close()
    server.drop_database(name)


@pytest.mark.long
def test_a_table_that_cannot_be_followed_waits_and_resumes_without_loss(ascii_stage: Stage) -> None:
    stage = ascii_stage
    stage.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT i, 'old' FROM generate_series(1, 5) i",
        "CREATE TABLE others (id int PRIMARY KEY); INSERT INTO others VALUES (1)",
    )
    stage.catch_up()
    stage.sql(
        "UPDATE t SET v = 'before' WHERE id = 1",
        "ALTER TABLE t ADD more int",
        "INSERT INTO others VALUES (2)",
        r"INSERT INTO t VALUES (6, E'\xff', 1); UPDATE t SET v = 'while' WHERE id = 2; DELETE FROM t WHERE id = 3",
        "UPDATE t SET id = 40 WHERE id = 4",
        "INSERT INTO others VALUES (3)",
    )
    reason = stage.catch_up().quarantined["public.t"]
    assert "UTF-8" in reason
    assert set(stage.log.replay()["public.others"]) == {("1",), ("2",), ("3",)}, "the others go on"
    raw = [row["message"] for table, _, row in stage.log.records() if table.schema.kind is TableKind.RAW]
    changes = [decode_raw(message) for message in raw]
    assert [type(change) for _, change in changes] == [Update, Insert, Update, Delete, Update], "nothing of it is lost"
    told = [[c.name for c in relation.columns] for relation, _ in changes]
    assert told == [["id", "v"], *[["id", "v", "more"]] * 4], "each under the definition of its moment"
    # The table returns when it is asked for, with the rows written until then and since.
    stage.sql(
        "ALTER TABLE t RENAME more TO number",
        "UPDATE t SET v = 'text' WHERE id = 6",
        "INSERT INTO t VALUES (7, 'still waiting', 2)",
    )
    assert "public.t" in stage.catch_up().quarantined
    retry_table(stage.catalog, stage.catalog.stream("shop").id, "public.t")
    stage.sql("UPDATE t SET v = 'after' WHERE id = 5")
    assert not stage.catch_up().quarantined
    assert stage.log.replay()["public.t"] == stage.source_rows("t", ["id"])
    stage.sql("DELETE FROM t WHERE id = 7")
    stage.catch_up()
    assert stage.log.replay()["public.t"] == stage.source_rows("t", ["id"])
