"""A workload that uses every operation and every type of PostgreSQL, the same for the same seed.

`Workload` makes its tables and then runs one transaction per step: rows inserted, changed, moved to
another key, deleted and brought back; truncates, savepoints rolled back, messages, columns added,
transactions of ten thousand rows. Each step returns its effects, so that a test can compare a log with
them.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import psycopg
from psycopg import sql

from millstream.testing.workloads._tables import ADDED, Key, Table, WorkloadColumn, tables
from millstream.testing.workloads._values import CREATE_TYPES, VALUES

__all__ = ["PacedWorkload", "StepInfo", "Workload", "WorkloadTable"]

WorkloadTable = Table
Connection = psycopg.Connection[Any]

# Relative frequency of each kind of transaction, after each has come once.
_KINDS = {
    "mixed": 60,
    "savepoints": 8,
    "rolled_back": 3,
    "same_row": 5,
    "return": 5,
    "keys": 6,
    "bulk": 6,
    "large": 1,
    "large_aborted": 1,
    "truncate": 2,
    "truncate_several": 1,
    "truncate_cascade": 1,
    "message": 4,
    "add_column": 1,
    "prepared": 2,
}
_ADDED_MAX = 2  # columns a table gets over its life
_MESSAGES = "_messages"


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The effects of one transaction.

    Attributes:
        number: the step's number, from 1.
        kind: the feature that it exercises.
        xid: its 64-bit id; None if it wrote nothing.
        committed: False if it was rolled back on purpose.
        events: by table (quoted as in SQL) and operation (`c u d t`), how many changes the source sends;
            `_messages` counts transactional messages (`m`). A table without an identity sends no `u` and
            `d`.
        ddl: the statement that changed a table, if one did.
    """

    number: int
    kind: str
    xid: int | None
    committed: bool
    events: Mapping[str, Mapping[str, int]]
    ddl: str = ""

    @property
    def changes(self) -> int:
        """Return the total number of changes."""
        return sum(sum(ops.values()) for ops in self.events.values())


class PacedWorkload(ABC):
    """Steps that run one after the other, each a transaction."""

    @abstractmethod
    def step(self, connection: Connection) -> StepInfo:
        """Run one transaction."""

    def run(
        self,
        connection: Connection,
        *,
        seconds: float,
        tx_per_second: float | None = None,
        stop: threading.Event | None = None,
    ) -> list[StepInfo]:
        """Run steps for that long, or until `stop` is set, as fast as possible or at a steady rate that they can keep."""
        stop = stop or threading.Event()
        start = time.monotonic()
        done: list[StepInfo] = []
        while not stop.is_set() and time.monotonic() - start < seconds:
            done.append(self.step(connection))
            if tx_per_second is not None:
                # Counted from the start: later steps make up for a slow one.
                stop.wait(min(start + len(done) / tx_per_second, start + seconds) - time.monotonic())
        return done


class Workload(PacedWorkload):
    """A random workload over tables of its own.

    Args:
        seed: decides everything, given a fresh database and a server of the same version.
        tables: names of the tables to use (without schemas); all by default.
        transaction_rows_max: the rows of the largest transactions.
        rows_max: a table with more rows than this tends to lose some.
        add_defaults: whether added columns may have a default: old rows then have a value that was never
            written.

    Concurrency: steps of one workload come one after the other. Several need different databases.
    """

    def __init__(
        self,
        seed: int,
        *,
        tables: Collection[str] | None = None,
        transaction_rows_max: int = 10_000,
        rows_max: int = 4_000,
        add_defaults: bool = True,
    ) -> None:
        self.tables: list[Table] = []
        self._wanted = tables
        self._rng = Random(seed)
        self._rows_max = rows_max
        self._transaction_rows_max = transaction_rows_max
        self._add_defaults = add_defaults
        self._kinds = dict(_KINDS)
        self._first: list[str] = []
        self._number = 0
        self._events: dict[str, Counter[str]] = {}
        self._ddl = ""
        self._stale = False

    def setup(self, connection: Connection, *, stream_large: bool = True) -> None:
        """Make the types, schemas and tables, and insert a few rows into each.

        Args:
            connection: in autocommit mode, to a database that has none of them, as a role that may make them.
            stream_large: let large transactions be streamed while they run: this database's decoding gets 64 kB.
        """
        for create_type in CREATE_TYPES:
            connection.execute(create_type)
        everything = tables(_types_of(connection))
        self.tables = [t for t in everything if self._wanted is None or t.name in self._wanted]
        for schema in sorted({table.schema for table in self.tables} - {"public"}):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        for table in self.tables:
            for statement in table.definition():
                connection.execute(statement)
            self._insert(connection, table, 20)
        self._events = {}
        if stream_large:
            name = sql.Identifier(connection.info.dbname)
            connection.execute(sql.SQL("ALTER DATABASE {} SET logical_decoding_work_mem = '64kB'").format(name))
        names = {table.name for table in self.tables}
        if connection.execute("SHOW max_prepared_transactions").fetchone() == ("0",):
            self._kinds.pop("prepared")
        if not {"parents", "children"} <= names:
            self._kinds.pop("truncate_cascade")
        if not self._growing():
            self._kinds.pop("add_column")
        self._first = list(self._kinds)
        self._rng.shuffle(self._first)

    def step(self, connection: Connection) -> StepInfo:
        """Run exactly one transaction, committed unless it's one that is rolled back on purpose.

        After an error (a server that was stopped) the next step first looks which rows exist.
        """
        if self._stale:
            self._look(connection)
        self._number += 1
        self._events, self._ddl = {}, ""
        kind = self._first.pop() if self._first else self._rng.choices([*self._kinds], [*self._kinds.values()])[0]
        if kind == "add_column" and not self._growing():
            kind = "mixed"
        self._stale = True
        if kind == "prepared":
            xid = self._prepared(connection)
        else:
            with connection.transaction(force_rollback=kind == "rolled_back"):
                before = self._remember()
                getattr(self, f"_do_{kind}")(connection)
                xid = _xid(connection)
            if kind == "rolled_back":
                self._events = {}
                self._recall(before)
        self._stale = False
        events = {name: dict(ops) for name, ops in self._events.items() if ops.total()}
        return StepInfo(self._number, kind, xid, kind != "rolled_back", events, self._ddl)

    # Kinds of transactions

    def _do_mixed(self, connection: Connection) -> None:
        for _ in range(self._rng.choice((1, 1, 1, 2, 3, 5, 10, 20))):
            self._change(connection, self._table())

    def _do_savepoints(self, connection: Connection) -> None:
        for _ in range(self._rng.randint(1, 3)):
            keep = self._rng.random() < 0.4
            events, rows = {name: Counter(ops) for name, ops in self._events.items()}, self._remember()
            with connection.transaction(force_rollback=not keep):
                self._do_mixed(connection)
                with connection.transaction():  # a nested one, released
                    self._change(connection, self._table())
            if not keep:
                self._events = events
                self._recall(rows)
            self._change(connection, self._table())

    def _do_rolled_back(self, connection: Connection) -> None:
        self._do_mixed(connection)
        if self._rng.random() < 0.3:
            self._insert(connection, self._table(), self._size(100))

    def _do_same_row(self, connection: Connection) -> None:
        table = self._table(changes=True)
        key = table.take(self._rng) if table.live else self._insert(connection, table, 1)[0]
        table.live = [k for k in table.live if k is not key]
        for _ in range(self._rng.randint(2, 8)):
            self._update(connection, table, [key])
        table.live.append(key)

    def _do_return(self, connection: Connection) -> None:
        """Delete a row and insert one with its key, at times more than once."""
        table = self._table(changes=True)
        if not table.live:
            self._insert(connection, table, 1)
        key = table.take(self._rng)
        for _ in range(self._rng.randint(1, 3)):
            self._execute_delete(connection, table, [key])
            self._execute_insert(connection, table, [key])
        table.live.append(key)

    def _do_keys(self, connection: Connection) -> None:
        for _ in range(self._rng.randint(1, 4)):
            self._move(connection, self._table(changes=True))

    def _do_bulk(self, connection: Connection) -> None:
        for _ in range(self._rng.randint(1, 3)):
            self._many(connection, self._table(), self._size(500))

    def _do_large(self, connection: Connection) -> None:
        size = self._transaction_rows_max
        table = self._table(changes=True, wide=False)
        self._insert(connection, table, size - size // 4)
        chosen = [table.take(self._rng) for _ in range(size // 4)]
        self._update(connection, table, chosen)
        table.live.extend(chosen)
        self._shrink(connection, table)

    def _do_large_aborted(self, connection: Connection) -> None:
        """Run a large transaction, and roll back a large part of it after that part was streamed."""
        table, size = self._table(), self._size(self._transaction_rows_max // 4)
        self._insert(connection, table, size)
        events, rows = {name: Counter(ops) for name, ops in self._events.items()}, self._remember()
        with connection.transaction(force_rollback=True):
            self._insert(connection, table, size)
            self._do_mixed(connection)
        self._events = events
        self._recall(rows)
        self._do_mixed(connection)

    def _do_truncate(self, connection: Connection) -> None:
        table = self._table(truncatable=True)
        self._truncate(connection, [table])
        if self._rng.random() < 0.5:
            self._insert(connection, table, self._rng.randint(1, 10))

    def _do_truncate_several(self, connection: Connection) -> None:
        chosen = {str(t): t for t in (self._table(truncatable=True) for _ in range(3))}
        self._change(connection, self._table())
        self._truncate(connection, list(chosen.values()))

    def _do_truncate_cascade(self, connection: Connection) -> None:
        parent = next(t for t in self.tables if t.cascades_to)
        child = next(t for t in self.tables if t.name == parent.cascades_to)
        self._truncate(connection, [parent], also=[child])
        self._insert(connection, child, 2)

    def _do_message(self, connection: Connection) -> None:
        for _ in range(self._rng.randint(1, 3)):
            transactional = self._rng.random() < 0.6
            prefix, content = self._rng.choice(("audit", "ünï", "")), VALUES["text"](self._rng)
            cast = self._rng.choice(("text", "bytea"))
            value = content.encode() if cast == "bytea" else content
            query = f"SELECT pg_logical_emit_message(%s, %s, %s::{cast})"
            connection.execute(query, [transactional, prefix, value])
            if transactional:
                self._note(_MESSAGES, "m", 1)
            if self._rng.random() < 0.5:
                self._change(connection, self._table())

    def _do_add_column(self, connection: Connection) -> None:
        table = self._rng.choice(self._growing())
        choices = [c for c in ADDED if c[1] is None or (table.grows == "default" and self._add_defaults)]
        kind, default = self._rng.choice(choices)
        table.added += 1
        column = WorkloadColumn(f"added {table.added}", kind, VALUES[kind])
        clause = sql.SQL("") if default is None else sql.SQL(f" DEFAULT {{}}::{kind}").format(sql.Literal(default))
        statement = sql.SQL("ALTER TABLE {} ADD COLUMN {} ").format(table.id, sql.Identifier(column.name))
        statement += sql.SQL(kind) + clause
        self._change(connection, table)
        connection.execute(statement)
        self._ddl = statement.as_string(connection)
        table.columns = [*table.columns, column]
        for _ in range(3):
            self._change(connection, table)

    def _prepared(self, connection: Connection) -> int | None:
        """Run a transaction in two phases: its changes arrive with the second."""
        name = sql.Literal(f"{connection.info.dbname} {self._number}")
        connection.execute("BEGIN")
        self._do_mixed(connection)
        xid = _xid(connection)
        connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(name))
        connection.execute(sql.SQL("COMMIT PREPARED {}").format(name))
        return xid

    # Changes of one table

    def _change(self, connection: Connection, table: Table) -> None:
        if not table.changes or not table.live:
            self._insert(connection, table, self._rng.randint(1, 3))
            return
        chance = self._rng.random()
        if chance < (0.15 if len(table.live) > self._rows_max else 0.4):
            self._insert(connection, table, self._rng.randint(1, 3))
        elif chance < 0.75:
            key = table.take(self._rng)
            self._update(connection, table, [key])
            table.live.append(key)
        elif chance < 0.82:
            self._move(connection, table)
        else:
            self._delete(connection, table, 1)

    def _many(self, connection: Connection, table: Table, count: int) -> None:
        choice = self._rng.choice(("insert", "update", "delete")) if table.changes else "insert"
        if choice == "insert" or not table.live:
            self._insert(connection, table, count)
            self._shrink(connection, table)
        elif choice == "update":
            chosen = [table.take(self._rng) for _ in range(min(count, len(table.live)))]
            self._update(connection, table, chosen)
            table.live.extend(chosen)
        else:
            self._delete(connection, table, min(count, len(table.live) // 2))

    def _shrink(self, connection: Connection, table: Table) -> None:
        if table.changes and len(table.live) > 2 * self._rows_max:
            self._delete(connection, table, len(table.live) - self._rows_max)

    def _insert(self, connection: Connection, table: Table, count: int) -> list[Key]:
        keys = [table.new_key(self._rng) for _ in range(count)]
        keys = self._execute_insert(connection, table, keys)
        table.live.extend(keys)
        return keys

    def _execute_insert(self, connection: Connection, table: Table, keys: list[Key]) -> list[Key]:
        columns = (*table.locator, *table.columns)
        statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
            table.id,
            sql.SQL(", ").join(sql.Identifier(c.name) for c in columns),
            sql.SQL(", ").join(sql.SQL(f"%s::{c.type}") for c in columns),
        )
        rows = [[*key, *(c.draw(self._rng) for c in table.columns)] for key in keys]
        if not table.unique and len(keys) > 1:
            rows[1:] = [rows[0] if self._rng.random() < 0.3 else row for row in rows[1:]]  # rows that are equal
            keys = [tuple(str(value) for value in row[: len(table.locator)]) for row in rows]
        self._many_rows(connection, statement, rows)
        self._note(str(table), "c", len(rows))
        return keys

    def _update(self, connection: Connection, table: Table, keys: Sequence[Key]) -> None:
        # Few columns at a time: the others, wide ones among them, stay as they are.
        columns = self._rng.sample(table.columns, min(len(table.columns), self._rng.randint(1, 3)))
        assignments = sql.SQL(", ").join(
            sql.SQL(f"{{}} = %s::{c.type}").format(sql.Identifier(c.name)) for c in columns
        )
        statement = sql.SQL("UPDATE {} SET {} WHERE {}").format(table.id, assignments, _where(table))
        rows = [[*(c.draw(self._rng) for c in columns), *key] for key in keys]
        self._many_rows(connection, statement, rows)
        if table.has_current:
            self._note(str(table), "u", len(rows))

    def _move(self, connection: Connection, table: Table) -> None:
        """Give a row another key; its other columns, wide ones too, stay or change with it."""
        if not table.changes or not table.live:
            return
        old, new = table.take(self._rng), table.new_key(self._rng)
        extra = self._rng.sample(table.columns, 1) if self._rng.random() < 0.3 else []
        columns = (*table.locator, *extra)
        assignments = sql.SQL(", ").join(
            sql.SQL(f"{{}} = %s::{c.type}").format(sql.Identifier(c.name)) for c in columns
        )
        statement = sql.SQL("UPDATE {} SET {} WHERE {}").format(table.id, assignments, _where(table))
        self._many_rows(connection, statement, [[*new, *(c.draw(self._rng) for c in extra), *old]])
        table.live.append(new)
        table.forget([old])
        if table.has_current:
            self._note(str(table), "u", 1)

    def _delete(self, connection: Connection, table: Table, count: int) -> None:
        keys = [table.take(self._rng) for _ in range(count)]
        self._execute_delete(connection, table, keys)
        table.forget(keys)

    def _execute_delete(self, connection: Connection, table: Table, keys: Sequence[Key]) -> None:
        self._many_rows(connection, sql.SQL("DELETE FROM {} WHERE {}").format(table.id, _where(table)), keys)
        if table.has_current:
            self._note(str(table), "d", len(keys))

    def _truncate(self, connection: Connection, chosen: Sequence[Table], also: Sequence[Table] = ()) -> None:
        names = sql.SQL(", ").join(table.id for table in chosen)
        connection.execute(sql.SQL("TRUNCATE {} {}").format(names, sql.SQL("CASCADE" if also else "")))
        for table in (*chosen, *also):
            table.empty()
            self._note(str(table), "t", 1)

    def _many_rows(self, connection: Connection, statement: sql.Composed, rows: Sequence[Sequence[str | None]]) -> None:
        if not rows:
            return
        with connection.cursor() as cursor:
            cursor.executemany(statement, rows)
            assert cursor.rowcount == len(rows), f"{statement.as_string(connection)}: {cursor.rowcount} of {len(rows)}"

    # Choosing rows and tables

    def _table(self, *, changes: bool = False, truncatable: bool = False, wide: bool = True) -> Table:
        chosen = [
            table
            for table in self.tables
            if (not changes or (table.changes and table.has_current))
            and not (truncatable and table.cascades_to)
            and (wide or not table.name.startswith(("wide", "every")))
        ]
        return self._rng.choice(chosen or self.tables)

    def _growing(self) -> list[Table]:
        return [t for t in self.tables if t.grows != "no" and t.added < _ADDED_MAX]

    def _size(self, most: int) -> int:
        most = min(most, self._transaction_rows_max)
        return max(1, int(math.exp(self._rng.uniform(0.4, 1) * math.log(most))))

    def _note(self, table: str, op: str, count: int) -> None:
        self._events.setdefault(table, Counter())[op] += count

    def _remember(self) -> list[tuple[list[Key], list[Key]]]:
        return [(list(table.live), list(table.gone)) for table in self.tables]

    def _recall(self, rows: Sequence[tuple[list[Key], list[Key]]]) -> None:
        for table, (live, gone) in zip(self.tables, rows, strict=True):
            table.live, table.gone = live, gone

    def _look(self, connection: Connection) -> None:
        """Ask the server which rows and columns exist: a transaction ended with unknown outcome."""
        if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            connection.rollback()
        for table in self.tables:
            wanted = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(c.name)) for c in table.locator)
            rows = connection.execute(sql.SQL("SELECT {} FROM {} ORDER BY 1").format(wanted, table.id)).fetchall()
            table.live = [tuple(row) for row in rows]
            table.gone.clear()
            query = "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
            names = {name for (name,) in connection.execute(query, [str(table)]).fetchall()}
            table.columns = [c for c in table.columns if c.name in names]
        self._stale = False


def _where(table: Table) -> sql.Composable:
    same = sql.SQL(" AND ").join(sql.SQL(f"{{}} = %s::{c.type}").format(sql.Identifier(c.name)) for c in table.locator)
    if table.unique:
        return same
    # Any of several equal rows: the server decides where rows are stored.
    one = "ctid = (SELECT ctid FROM {} AS t WHERE {} ORDER BY t::text, ctid LIMIT 1)"
    return sql.SQL(one).format(table.id, same)


def _xid(connection: Connection) -> int | None:
    row = connection.execute("SELECT pg_current_xact_id_if_assigned()::text").fetchone()
    return None if row is None or row[0] is None else int(row[0])


def _types_of(connection: Connection) -> list[str]:
    """Return the types that this server has: it may have been built without XML."""
    query = "SELECT '<a/>'::xml"
    try:
        with connection.transaction():
            connection.execute(query)
    except psycopg.errors.FeatureNotSupported:
        return [kind for kind in VALUES if kind != "xml"]
    return list(VALUES)
