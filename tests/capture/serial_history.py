"""A workload of one change after the other, and a check of every prefix of a log against the source at each step.

Every transaction is numbered, and sends its number in a logical message. Every version of a row has the
number of the transaction that made it. So for a prefix of the log it is known up to which step the
stream is in it. For each row it is known whether the source had it like that at that very step. An
older version, a former key and a deleted row are errors.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from tests.capture.beside import until_done
from tests.capture.capture_stage import MemoryLog, Stage, as_texts

from millstream.model.operations import OperationKind, WriteOps
from millstream.model.schema import TableKind

ROWS = "CREATE TABLE rows_ (a int, b text, body text, version bigint NOT NULL, PRIMARY KEY (b, a)); ALTER TABLE rows_ ALTER body SET STORAGE EXTERNAL"
_PREFIX = "step"

Key = tuple[str, str]


@dataclass
class History:
    """The table's rows after each step; step 0 is its rows before the workload."""

    chance: random.Random
    keys: int
    wide: int = 900
    many: int = 40
    """Number of rows in a change of many rows."""
    truncates: bool = False
    states: list[dict[Key, str]] = field(default_factory=list)
    """By step: the version of every row, by key (`b`, `a`)."""

    def begin(self, connection: psycopg.Connection[Any], rows: int) -> None:
        """Create the table and its first rows."""
        connection.execute(ROWS)
        connection.execute(
            f"INSERT INTO rows_ SELECT i, 'k' || i % 7, repeat('first', {self.wide // 5}), 0 FROM generate_series(0, {rows - 1}) i"
        )
        connection.execute("ANALYZE rows_")
        self.states.append({(f"k{i % 7}", str(i)): "0" for i in range(rows)})

    def step(self, connection: psycopg.Connection[Any]) -> None:
        """Run one transaction."""
        number = len(self.states)
        state = dict(self.states[-1])
        with connection.transaction():
            connection.execute("SELECT pg_logical_emit_message(true, %s, %s)", [_PREFIX, str(number)])
            for _ in range(self.chance.randrange(1, 4)):
                self._change(connection, state, str(number))
        self.states.append(state)

    def _change(self, connection: psycopg.Connection[Any], state: dict[Key, str], version: str) -> None:
        what = self.chance.randrange(100)
        old = self.chance.choice(sorted(state)) if state else None
        new = (f"k{self.chance.randrange(7)}", str(self.chance.randrange(self.keys)))
        where = "WHERE (b, a) = (%s, %s)"
        if what < 30 or old is None:
            if new not in state:
                text = "new" * self.chance.choice([1, self.wide // 3])
                connection.execute("INSERT INTO rows_ VALUES (%s, %s, %s, %s)", [new[1], new[0], text, version])
                state[new] = version
        elif what < 50:
            connection.execute(f"UPDATE rows_ SET version = %s {where}", [version, *old])
            state[old] = version
        elif what < 60:
            connection.execute(
                f"UPDATE rows_ SET version = %s, body = repeat('u', %s) {where}", [version, self.wide, *old]
            )
            state[old] = version
        elif what < 80:
            if new not in state:
                connection.execute(f"UPDATE rows_ SET version = %s, b = %s, a = %s {where}", [version, *new, *old])
                del state[old]
                state[new] = version
        elif what < 97:
            connection.execute(f"DELETE FROM rows_ {where}", old)
            del state[old]
        elif what < 99:
            least = self.chance.randrange(self.keys)
            cursor = connection.execute(
                "UPDATE rows_ SET version = %s WHERE a >= %s AND a < %s RETURNING b, a",
                [version, least, least + self.many],
            )
            state.update({(b, str(a)): version for b, a in cursor.fetchall()})
        elif self.truncates and self.chance.randrange(4) == 0:
            connection.execute("TRUNCATE rows_")
            state.clear()

    @contextmanager
    def going_on(self, stage: Stage) -> Iterator[None]:
        """Run steps one after the other on a thread, until the block ends."""

        def work(stop: threading.Event) -> None:
            with stage.connect() as connection:
                while not stop.is_set():
                    self.step(connection)
                    stage.breathe(connection, stop)

        with until_done(work):
            yield

    def check(self, log: MemoryLog) -> dict[str, int]:
        """Check every prefix of the log, operation by operation: the source had each row that it shows.

        Returns:
            How many operations of each kind were checked.
        """
        shown: dict[Key, str] = {}
        step = 0
        looked: dict[str, int] = {"TRANSACTION": 0, "COPY_CHUNK": 0}
        for kind, records in operations(log):
            for table, row in records:
                if table == "_messages":
                    if row["prefix"] == _PREFIX:
                        step = int(row["content"])
                elif table == "rows_":
                    _apply(shown, row)
            if kind not in looked:
                continue
            looked[kind] += 1
            wrong = shown.items() - self.states[step].items()
            assert not wrong, f"behind operation {sum(looked.values())} ({kind}), at step {step}: " + "; ".join(
                f"{key} is {got}, was {self._told(key, step)}" for key, got in sorted(wrong)[:5]
            )
        assert shown == self.states[step]
        return looked

    def _told(self, key: Key, step: int) -> str:
        return f"{self.states[step].get(key, 'gone')} (versions until then: {sorted({int(s[key]) for s in self.states[: step + 1] if key in s})[-4:]})"


def _apply(shown: dict[Key, str], row: dict[str, Any]) -> None:
    op = chr(row["__op"])
    if op == "t":
        shown.clear()
        return
    key = (row["b"], row["a"])
    before = dict(row["__before"] or ())
    if op == "d":
        shown.pop(key, None)
        return
    shown.pop((before.get("b", key[0]), before.get("a", key[1])), None)
    shown[key] = row["version"]


def operations(log: MemoryLog) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Yield each operation of a log: its kind, and its records in order with their tables' names."""
    for entry in list(log.entries):
        operations = (entry.operations if isinstance(entry, WriteOps) else entry.operation).column("kind").to_pylist()
        found: list[list[tuple[int, str, dict[str, Any]]]] = [[] for _ in operations]
        for tables in [entry.tables] if isinstance(entry, WriteOps) else entry.chunks():
            for table in tables:
                rows = table.rows.to_pylist() if table.schema.kind is not TableKind.TABLE else as_texts(table)
                for row in rows:
                    found[row["__operation"]].append((row["__index"], table.schema.name, row))
        for kind, records in zip(operations, found, strict=True):
            ordered = sorted(records, key=lambda record: record[0])
            yield OperationKind(kind).name, [(name, row) for _, name, row in ordered]
