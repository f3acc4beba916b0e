"""Random changes of definitions, with rows in between: the log ends as the source, and copies what it must.

Names are few, so that they come back: under another column, under the same one, between two looks at the catalogs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_layouts import marks
from tests.seeds import Seeds

from millstream.capture.transient_column_names import ShownColumns
from millstream.catalog import TableState
from millstream.model.column_rules import Rule, SourceRules
from millstream.model.operations import OperationKind
from millstream.model.positions import Lsn
from millstream.model.records import log_names
from millstream.model.schema import TableKind

NAMES = ("a", "b", "c d", "__seq")
MORE_NAMES = (*NAMES, *"efghijklmnopq")
MAKE = (
    'CREATE TABLE t (id int PRIMARY KEY, a text, b text, "c d" int)',
    "INSERT INTO t SELECT i, 'a' || i, 'b' || i, i FROM generate_series(1, 20) i",
)


class Source:
    """One table whose definition changes."""

    def __init__(self, connection: psycopg.Connection[Any], rng: Random, among: Sequence[str] = NAMES) -> None:
        self._connection = connection
        self._among = among
        self._rng = rng
        self._number = 20
        self.done: list[str] = []

    def play(self, count: int) -> None:
        """Change the table so many times, each change with or without rows next to it."""
        steps: list[Callable[[], None]] = [
            self.rename, self.rename, self.swap, self.there_and_back, self.swap_there_and_back, self.add, self.drop,
            self.fill, self.fill_and_rewrite, self.default, self.empty, self.again, self.retype, self.retype_renamed, self.key, self.in_one_go, self.truncate,
        ]  # fmt: skip
        for _ in range(count):
            self.write()
            self._rng.choice(steps)()
            self.write()

    def rename(self) -> None:
        name, free = self._mine(), self._free()
        if name and free:
            self._rename(name, free)

    def swap(self) -> None:
        names = self._names()
        if len(names) > 1:
            one, other = self._rng.sample(names, 2)
            with self._connection.transaction():
                self._insert()
                for old, new in ((one, "spare"), (other, one), ("spare", other)):
                    self._rename(old, new)
                self._insert()

    def there_and_back(self) -> None:
        name, free = self._mine(), self._free()
        if name and free:
            self._rename(name, free)
            self.write()
            self._rename(free, name)

    def swap_there_and_back(self) -> None:
        names = self._names()[:2]
        for one, other in (names, names) if len(names) == 2 else ():
            for old, new in ((one, "spare"), (other, one), ("spare", other)):
                self._rename(old, new)
            self.write()

    def add(self) -> None:
        if free := self._free():
            self._run("ALTER TABLE t ADD {} " + self._rng.choice(("text", "int", "text DEFAULT NULL")), free)

    def drop(self) -> None:
        if name := self._mine():
            self._run("ALTER TABLE t DROP {}", name)

    def fill(self) -> None:
        if free := self._free():
            self._run("ALTER TABLE t ADD {} text DEFAULT 'filled'", free)
            self._run(
                self._rng.choice(("ALTER TABLE t ALTER {} DROP DEFAULT", "ALTER TABLE t ALTER {} SET DEFAULT 'x'")),
                free,
            )

    def default(self) -> None:
        """Add a column with a constant, or several, with rows in between or not."""
        for kind in self._rng.sample(
            ("text DEFAULT 'a, \"b\"'", "int NOT NULL DEFAULT 7", "int[] DEFAULT ARRAY[1, NULL]"), 2
        ):
            if free := self._free():
                self._run(f"ALTER TABLE t ADD {{}} {kind}", free)
                self.write()

    def empty(self) -> None:
        """Give some rows a null, which no default replaces."""
        if name := self._mine():
            self._run("ALTER TABLE t ALTER {} DROP NOT NULL", name)
            self._run(f"UPDATE t SET {{}} = NULL WHERE id % 3 = {self._rng.randint(0, 2)}", name)

    def fill_and_rewrite(self) -> None:
        if free := self._free():
            self._run("ALTER TABLE t ADD {} text DEFAULT 'filled'", free)
            self._run("VACUUM FULL t")
            self._run("ALTER TABLE t ALTER {} DROP DEFAULT", free)

    def again(self) -> None:
        """Drop a column and add one under its name; or do that with a column that no look has seen."""
        name = self._mine() if self._rng.random() < 0.5 else None
        free = name or self._free()
        if name is None and free:
            self._run("ALTER TABLE t ADD {} text", free)
            self.write()
        if free:
            self._run("ALTER TABLE t DROP {}", free)
            if self._rng.random() < 0.5:
                self.write()
            self._run("ALTER TABLE t ADD {} text", free)

    def retype(self) -> None:
        """Add a column with a constant, and give it another type, for which no row is rewritten."""
        if free := self._free():
            self._run("ALTER TABLE t ADD {} varchar(9) DEFAULT 'short'", free)
            self.write()
            self._run("ALTER TABLE t ALTER {0} DROP DEFAULT, ALTER {0} TYPE text", free)

    def retype_renamed(self) -> None:
        name, free = self._mine(), self._free()
        if name and free:
            with self._connection.transaction():
                self._run("ALTER TABLE t ALTER {0} DROP DEFAULT", name)
                self._run("ALTER TABLE t ALTER {0} TYPE text USING left({0}::text, 2)", name)
                self._rename(name, free)
                self._insert()

    def key(self) -> None:
        """Rename the key's column, and mostly back."""
        self._rename("id", "number")
        self.write("number")
        self._rename("number", "id")

    def in_one_go(self) -> None:
        """Rename in a transaction that is large enough to be streamed before it commits."""
        name, free = self._mine(), self._free()
        if name and free:
            with self._connection.transaction():
                self._many()
                self._rename(name, free)
                self._many()

    def truncate(self) -> None:
        if self._rng.random() < 0.2:
            self._run("TRUNCATE t")

    def write(self, key: str = "id") -> None:
        for _ in range(self._rng.randint(0, 2)):
            self._insert(key)
        ids = [row[0] for row in self._connection.execute(SQL("SELECT {} FROM t").format(Identifier(key))).fetchall()]
        name = self._mine()
        if ids and name and self._rng.random() < 0.5:
            number = self._rng.randint(0, 99)
            value = f"ARRAY[{number}]" if name in self._lists() else str(number)
            self._run(f"UPDATE t SET {{}} = {value} WHERE {key} = {self._rng.choice(ids)}", name)
        if ids and self._rng.random() < 0.3:
            self._run(f"DELETE FROM t WHERE {key} = {self._rng.choice(ids)}")

    def _insert(self, key: str = "id") -> None:
        self._number += 1
        names = [key, *self._names()]
        lists = self._lists()
        values = ", ".join(f"ARRAY[{self._number}]" if name in lists else str(self._number) for name in names)
        columns = SQL(", ").join(map(Identifier, names))
        self._connection.execute(SQL("INSERT INTO t ({}) VALUES ({})").format(columns, SQL(values)))

    def _many(self) -> None:
        columns = SQL(", ").join(map(Identifier, ["id", *self._names()]))
        lists = self._lists()
        values = SQL(", ").join([SQL("i"), *(SQL("ARRAY[i]" if name in lists else "i") for name in self._names())])
        first, self._number = self._number + 1, self._number + 2000
        rows = SQL("INSERT INTO t ({}) SELECT {} FROM generate_series({}, {}) i")
        self._connection.execute(rows.format(columns, values, first, self._number))

    def _rename(self, old: str, new: str) -> None:
        self._run("ALTER TABLE t RENAME {} TO {}", old, new)

    def _run(self, statement: str, *names: str) -> None:
        composed = SQL(statement).format(*map(Identifier, names))
        self.done.append(composed.as_string(self._connection))
        self._connection.execute(composed)

    def _names(self) -> list[str]:
        return [row[0] for row in self._connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 1 AND NOT attisdropped ORDER BY attnum"
        ).fetchall()]  # fmt: skip

    def _lists(self) -> list[str]:
        return [row[0] for row in self._connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND atttypid = 'int[]'::regtype"
        ).fetchall()]  # fmt: skip

    def _mine(self) -> str | None:
        names = self._names()
        return self._rng.choice(names) if names else None

    def _free(self) -> str | None:
        free = [name for name in self._among if name not in self._names()]
        return self._rng.choice(free) if free else None


def assert_as_the_source(stage: Stage, source: Source) -> None:
    found = replayed(stage) if stage.config.follows_names else stage.log.replay().get("public.t", {})
    wanted = {}
    for key, row in stage.source_rows("t", ["id"]).items():
        wanted[key] = dict(zip(log_names(list(row)), row.values(), strict=True))
        # A column that no record has had since it was added is null in every row.
        found[key] = {name: found.get(key, {}).get(name) for name in wanted[key]}
    assert found == wanted, source.done


def replayed(stage: Stage) -> dict[Any, dict[str, str | None]]:
    """Return the rows that the log makes if columns are followed by their numbers, under the names of its end."""
    numbers: dict[str, int] = {}
    filled: dict[int | str, str] = {}
    found = []
    for piece, _, row in reversed(list(stage.log.records())):
        schema = piece.schema.defined()
        if schema.is_numbered:
            numbers = {column.name: column.number for column in schema.columns}
            filled |= {column.number: column.filled for column in schema.columns if column.filled is not None}
        found.append((piece.schema, {name: numbers.get(name, name) for name in schema.column_names}, row))
    rows: dict[Any, dict[int | str, str | None]] = {}
    for schema, columns, row in reversed(found):
        if schema.kind is TableKind.DEFINITION:
            continue
        op, before = chr(row["__op"]), dict(row["__before"] or ())
        if op == "t":
            rows.clear()
            continue
        key = tuple(row[name] for name in schema.key)
        base = rows.pop(tuple(before.get(name, row[name]) for name in schema.key), {}) if op == "u" else {}
        unchanged = row["__unchanged"] or ()
        new = {columns[name]: base.get(columns[name]) if name in unchanged else row[name] for name in columns}
        rows.pop(key, None)
        if op != "d":
            rows[key] = new
    return {
        key: {name: row.get(number, filled.get(number)) for name, number in columns.items()}
        for key, row in rows.items()
    }


def life(stage: Stage, seed: int, rounds: int, changes: int, among: Sequence[str] = NAMES) -> None:
    """Change a table in a backlog and under a running capture, in turns."""
    rng = Random(seed)
    stage.sql(*MAKE, f"ALTER DATABASE {stage.config.slot} SET logical_decoding_work_mem = '64kB'")
    stage.catch_up()
    with stage.connect() as connection:
        source = Source(connection, rng, among)
        for number in range(rounds):
            if number % 2:
                # Looks fall between any two statements, or not at all.
                stage.config = replace(stage.config, look_s=rng.choice((0.05, 0.2, 3600.0)))
                capture = stage.start()
                wait_until(stage.slot_active, "it streams")
                source.play(changes)
                capture.stop()
            else:
                source.play(changes)
            stage.catch_up()
            assert stage.state("public.t") is TableState.STREAMING
            assert_as_the_source(stage, source)


def test_definitions_change_in_a_backlog_and_live(stage: Stage, seeds: Seeds) -> None:
    life(stage, seeds.kept_or_new(1), rounds=2, changes=4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 112))
def test_definitions_change_for_long(stage: Stage, seeds: Seeds, seed: int) -> None:
    life(stage, seeds.kept_or_new(seed), rounds=6, changes=5)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 216))
def test_renamed_columns_are_followed_for_long(stage: Stage, seeds: Seeds, seed: int) -> None:
    stage.config = replace(stage.config, follows_names=True)
    life(stage, seeds.kept_or_new(seed), rounds=6, changes=5, among=(NAMES, MORE_NAMES)[seed % 2])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(300, 306))
def test_defaults_are_told_for_long_where_renamed_columns_are_copied(stage: Stage, seeds: Seeds, seed: int) -> None:
    stage.config = replace(stage.config, follows_names=True, copies_renamed=True)
    life(stage, seeds.kept_or_new(seed), rounds=5, changes=5, among=(NAMES, MORE_NAMES)[seed % 2])


CASES: dict[str, tuple[list[str], int]] = {
    "a column added": (["ALTER TABLE t ADD e text"], 0),
    "added, and a default set": (["ALTER TABLE t ADD e text; ALTER TABLE t ALTER e SET DEFAULT 'x'"], 0),
    "a column dropped": (["ALTER TABLE t DROP b"], 0),
    "dropped, and one of another type added": (["ALTER TABLE t DROP b", "ALTER TABLE t ADD e date"], 0),
    "a default set and dropped": (["ALTER TABLE t ALTER b SET DEFAULT 'x'", "ALTER TABLE t ALTER b DROP DEFAULT"], 0),
    "renamed and renamed back, without rows": (["ALTER TABLE t RENAME b TO e; ALTER TABLE t RENAME e TO b"], 0),
    "renamed and renamed back": (["ALTER TABLE t RENAME b TO e", "INSERT INTO t VALUES (21, 1, 2, 3)", "ALTER TABLE t RENAME e TO b"], 21),
    "a default, a rewrite, no default": (["ALTER TABLE t ADD e text DEFAULT 'x'", "VACUUM FULL t", "ALTER TABLE t ALTER e DROP DEFAULT"], 20),
    "renamed, dropped, added under that name": (["ALTER TABLE t RENAME b TO e", "UPDATE t SET e = 'x' WHERE id = 1", "ALTER TABLE t DROP e", "ALTER TABLE t ADD e text"], 20),
    "renamed": (["ALTER TABLE t RENAME b TO e"], 20),
    "a constant default": (["ALTER TABLE t ADD e text DEFAULT 'x'"], 20),
}  # fmt: skip


FOLLOWED: dict[str, tuple[list[str], int]] = {
    "renamed": (CASES["renamed"][0], 0),
    "renamed and renamed back": (CASES["renamed and renamed back"][0], 0),
    "renamed twice, with rows in between": (["ALTER TABLE t RENAME b TO e", "INSERT INTO t VALUES (21, 1, 2, 3)", "ALTER TABLE t RENAME e TO f"], 0),
    "renamed, and a column added": (["ALTER TABLE t RENAME b TO e", "INSERT INTO t VALUES (21, 1, 2, 3)", "ALTER TABLE t ADD f text"], 0),
    "names swapped": (["ALTER TABLE t RENAME a TO e", "ALTER TABLE t RENAME b TO a", "ALTER TABLE t RENAME e TO b"], 0),
    "swapped in one transaction, with rows around": (["INSERT INTO t VALUES (21, 1, 2, 3)", "BEGIN; ALTER TABLE t RENAME a TO e; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME e TO b; COMMIT", "INSERT INTO t VALUES (22, 1, 2, 3)"], 0),
    "swapped and swapped back, with rows in between": (["ALTER TABLE t RENAME a TO e; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME e TO b", "UPDATE t SET a = 'x' WHERE id < 5", "ALTER TABLE t RENAME a TO e; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME e TO b"], 0),
    "a dropped column's name given to another": (["ALTER TABLE t DROP a", "ALTER TABLE t RENAME b TO a"], 0),
    "renamed, dropped, added under that name": CASES["renamed, dropped, added under that name"],
    "renamed, and its old name given to another": (["ALTER TABLE t RENAME b TO e", "ALTER TABLE t ADD b text"], 0),
    "a constant default": (CASES["a constant default"][0], 0),
    "constant defaults, and nulls since": (["ALTER TABLE t ADD e int NOT NULL DEFAULT 5", "INSERT INTO t (id, e) VALUES (21, 6)", "ALTER TABLE t ADD f text DEFAULT '{\"x, y\"}'", "UPDATE t SET f = NULL WHERE id < 4"], 0),
    "a moment as the default": (["ALTER TABLE t ADD e timestamptz DEFAULT now()"], 0),
    "a default, dropped": (["ALTER TABLE t ADD e text DEFAULT 'x'", "ALTER TABLE t ALTER e DROP DEFAULT"], 0),
    "a default, and renamed with rows in between": (["ALTER TABLE t ADD e text DEFAULT 'x'", "INSERT INTO t VALUES (21, 1, 2, 3)", "ALTER TABLE t RENAME e TO f", "UPDATE t SET f = NULL WHERE id = 3"], 0),
    "a default, and another type without a rewrite": (["ALTER TABLE t ADD e varchar(3) DEFAULT 'abc'", "INSERT INTO t VALUES (21, 1, 2, 3)", "ALTER TABLE t ALTER e DROP DEFAULT, ALTER e TYPE text", "UPDATE t SET e = NULL WHERE id = 3"], 0),
    "a default, and the column dropped": (["ALTER TABLE t ADD e text DEFAULT 'x'", "INSERT INTO t VALUES (21, 1, 2, 3)", "ALTER TABLE t DROP e"], 0),
    "a default under the name of a dropped column": (["ALTER TABLE t DROP b", "ALTER TABLE t ADD b text DEFAULT 'x'"], 20),
    "a default that the log's type doesn't hold": (["ALTER TABLE t ADD e date DEFAULT 'infinity'"], 20),
    "boxes as the default": (["ALTER TABLE t ADD e box DEFAULT '((1,1),(0,0))'"], 20),
    "a default, a rewrite, no default": CASES["a default, a rewrite, no default"],
    "a default for each row": (["ALTER TABLE t ADD e float DEFAULT random()"], 20),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", FOLLOWED)
def test_how_many_rows_a_rename_copies_if_it_is_followed(stage: Stage, case: str) -> None:
    stage.config = replace(stage.config, follows_names=True)
    statements, copied = FOLLOWED[case]
    stage.sql(*MAKE)
    stage.catch_up()
    before = copies(stage)
    stage.sql(*statements, "DELETE FROM t WHERE id = 20", "INSERT INTO t (id) VALUES (20)")
    stage.catch_up()
    stage.catch_up()
    assert copies(stage) - before == copied
    with stage.connect() as connection:
        assert_as_the_source(stage, Source(connection, Random(0)))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case", ["renamed and renamed back", *(name for name in CASES if name != "renamed and renamed back")]
)
def test_how_many_rows_each_change_copies(stage: Stage, case: str) -> None:
    statements, copied = CASES[case]
    stage.sql(*MAKE)
    stage.catch_up()
    before = copies(stage)
    stage.sql(*statements, "DELETE FROM t WHERE id = 20", "INSERT INTO t (id, a) VALUES (20, 'again')")
    stage.catch_up()
    assert copies(stage) - before == copied
    stage.catch_up()
    assert copies(stage) - before == copied, "and once only"


def copies(stage: Stage) -> int:
    return sum(chr(row["__op"]) == "r" and op["kind"] == OperationKind.COPY_CHUNK for _, op, row in stage.log.records())


TABLES = {
    "with a rule": "CREATE TABLE t (id int PRIMARY KEY, a text, b text, c text)",
    "without a key": "CREATE TABLE t (id int, a text, b text, c text); ALTER TABLE t REPLICA IDENTITY FULL",
    "of partitions": "CREATE TABLE t (id int PRIMARY KEY, a text, b text, c text) PARTITION BY RANGE (id);"
    " CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (100)",
    "with a column list": "CREATE TABLE t (id int PRIMARY KEY, a text, b text, c text);"
    " CREATE PUBLICATION {publication} FOR TABLE t (id, b, c)",
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind", [k if k != "with a column list" else pytest.param(k, marks=pytest.mark.since_postgres(15)) for k in TABLES]
)
def test_a_name_that_comes_and_goes_is_noticed_in_a_table(stage: Stage, kind: str) -> None:
    if kind == "with a rule":
        rules = SourceRules({("public", "t"): {"b": Rule.HASH, "a": Rule.EXCLUDE}}, b"k" * 16)
        stage.config = replace(stage.config, rules=rules)
    stage.sql(
        TABLES[kind].format(publication=stage.config.publication),
        "INSERT INTO t SELECT i, 'a', 'b', 'c' FROM generate_series(1, 20) i",
    )
    stage.catch_up()
    stage.sql(
        "INSERT INTO t VALUES (21, 'a', 'b', 'c')",
        "ALTER TABLE t ADD d text",
        "UPDATE t SET d = 'd', c = 'n' WHERE id = 1",
    )
    stage.catch_up()
    assert marks(stage) == 0, "a table's first copy voids nothing"
    stage.sql(
        "ALTER TABLE t RENAME c TO x", "INSERT INTO t VALUES (22, 'a', 'b', 'c', 'd')", "ALTER TABLE t RENAME x TO c"
    )
    stage.catch_up()
    stage.catch_up()
    assert marks(stage) == 1
    rows = stage.log.replay()["public.t"]
    assert {row["c"] for row in (rows[None] if None in rows else rows.values())} == {"c", "n"}


def test_what_a_capture_that_dies_has_shown_is_explained_by_the_next(stage: Stage) -> None:
    """Records of a name that was there for a while are in the log, and capture ends before it looks again."""
    stage.sql(*MAKE)
    stage.catch_up()
    stage.config = replace(stage.config, look_s=3600)
    capture = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.log.gate.clear()
    stage.sql("ALTER TABLE t RENAME b TO e", "INSERT INTO t VALUES (21, 'a', 'b', 1)")
    wait_until(lambda: stage.log.held() > 0, "the record is on its way")
    stage.sql("ALTER TABLE t RENAME e TO b")
    stage.log.gate.set()
    capture.stop()
    stage.catch_up()
    assert marks(stage) == 1
    assert stage.log.replay()["public.t"] == stage.source_rows("t", ["id"])


def test_a_look_that_began_before_a_copy_ended_requests_no_other(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It judged the forms of records that the copy had voided: `--until-caught-up` ended with a table to be copied."""
    stage.sql(*MAKE)
    stage.catch_up()
    stage.sql(
        "ALTER TABLE t RENAME a TO x", "INSERT INTO t VALUES (50, 'x', 'b', 1)", "ALTER TABLE t RENAME x TO a",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD COLUMN number int GENERATED ALWAYS AS IDENTITY",
        "ALTER TABLE t ADD PRIMARY KEY (number)",
    )  # fmt: skip
    begin_look = ShownColumns.begin_look

    def slow_look(shown: ShownColumns, passed: Lsn) -> Any:
        forms = begin_look(shown, passed)
        if forms and stage.state("public.t") is TableState.COPYING:
            wait_until(lambda: stage.state("public.t") is TableState.STREAMING, "it is copied")
        return forms

    monkeypatch.setattr(ShownColumns, "begin_look", slow_look)
    copied = marks(stage)
    stage.catch_up()
    assert (stage.state("public.t"), marks(stage)) == (TableState.STREAMING, copied + 1)
