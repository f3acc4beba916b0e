"""A workload on a table without a key, one change after the other, and a check of every prefix of a log.

It works like `serial_history`, for rows that can't be told apart. For a prefix of the log it is known
up to which step the stream is in it. Before the table's copy has entered, the prefix may show fewer
rows than the source had at that step, and no other rows. From then on it shows exactly the source's
rows, each as often as there.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from tests.capture.beside import until_done
from tests.capture.capture_stage import MemoryLog, Stage
from tests.capture.serial_history import operations

from millstream.model.names import qualified_name

BAG = (
    "CREATE TABLE bag (a int, version bigint, body text); ALTER TABLE bag ALTER body SET STORAGE EXTERNAL;"
    " ALTER TABLE bag REPLICA IDENTITY FULL"
)
TABLE = "public.bag"
_PREFIX = "step"

Row = tuple[str, str]


@dataclass
class BagHistory:
    """The table's rows after each step; step 0 is its rows before the workload."""

    chance: random.Random
    rows: int
    wide: int = 900
    truncates: bool = False
    definitions: bool = False
    """Whether columns come and go."""
    pause_s: float = 0.0
    """Seconds between two steps."""
    states: list[Counter[Row]] = field(default_factory=list)
    """By step: the number of rows with each `a` and `version`."""

    def begin(self, connection: psycopg.Connection[Any]) -> None:
        """Create the table and its first rows, some of which are equal."""
        connection.execute(BAG)
        connection.execute(
            f"INSERT INTO bag SELECT i % {self.rows // 2}, 0, repeat('first', {self.wide // 5})"
            f" FROM generate_series(0, {self.rows - 1}) i"
        )
        self.states.append(Counter((str(i % (self.rows // 2)), "0") for i in range(self.rows)))

    def step(self, connection: psycopg.Connection[Any]) -> None:
        """Run one transaction."""
        number = len(self.states)
        state = Counter(self.states[-1])
        with connection.transaction():
            connection.execute("SELECT pg_logical_emit_message(true, %s, %s)", [_PREFIX, str(number)])
            for _ in range(self.chance.randrange(1, 4)):
                self._change(connection, state, str(number))
        self.states.append(+state)

    def _change(self, connection: psycopg.Connection[Any], state: Counter[Row], version: str) -> None:
        what = self.chance.randrange(100)
        old = self.chance.choice(sorted(state)) if state else None
        a = str(self.chance.randrange(self.rows))
        if what < 35 or old is None:
            copies = self.chance.randrange(1, 4)
            body = "new" * self.chance.choice([1, self.wide // 3])
            connection.execute(
                "INSERT INTO bag (a, version, body) SELECT %s, %s, %s FROM generate_series(1, %s)",
                [a, version, body, copies],
            )
            state[a, version] += copies
        elif what < 60:
            # The body doesn't change, so it isn't sent again. If rows are equal, all of them change.
            body = ", body = repeat('u', 10)" if what < 40 else ""
            connection.execute(
                f"UPDATE bag SET version = %s{body} WHERE (a, version) = (%s::int, %s::bigint)", [version, *old]
            )
            count = state.pop(old)
            state[old[0], version] += count
        elif what < 70:
            connection.execute(
                "UPDATE bag SET a = %s, version = %s WHERE (a, version) = (%s::int, %s::bigint)", [a, version, *old]
            )
            count = state.pop(old)
            state[a, version] += count
        elif what < 98:
            connection.execute(
                "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE (a, version) = (%s::int, %s::bigint) LIMIT 1)",
                old,
            )
            state[old] -= 1
            if not state[old]:
                del state[old]
        elif self.truncates and self.chance.randrange(4) == 0:
            connection.execute("TRUNCATE bag")
            state.clear()
        elif self.definitions and self.chance.randrange(2) == 0:
            # A default makes no event for existing rows.
            default = self.chance.choice(["", " DEFAULT 7"])
            connection.execute(f"ALTER TABLE bag DROP COLUMN IF EXISTS more, ADD COLUMN more int{default}")

    @contextmanager
    def going_on(self, stage: Stage) -> Iterator[None]:
        """Run steps one after the other on a thread, until the block ends."""

        def work(stop: threading.Event) -> None:
            with stage.connect() as connection:
                while not stop.wait(self.pause_s):
                    self.step(connection)

        with until_done(work):
            yield

    def check(self, log: MemoryLog) -> int:
        """Check every prefix of the log, operation by operation; return how often the table was copied."""
        shown: Counter[Row] = Counter()
        step = copies = 0
        for looked, (kind, records) in enumerate(operations(log), 1):
            copied = False
            for table, row in records:
                if table == "_messages":
                    if row["prefix"] == _PREFIX:
                        step = int(row["content"])
                elif table == "bag":
                    copied = copied or (kind == "COPY_CHUNK")
                    _apply(shown, row, exact=bool(copies))
            copies += copied
            where = f"behind operation {looked} ({kind}), at step {step}, copies {copies}"
            state = self.states[step]
            if copies:
                assert shown == state, f"{where}: {_told(shown - state)} too many, {_told(state - shown)} too few"
            else:
                assert shown <= state, f"{where}: {_told(shown - state)} too many"
        assert copies
        return copies


def settle(stage: Stage, history: BagHistory) -> int:
    """Catch up; check every prefix against the history, and the end against the source."""
    stage.catch_up()
    copies = history.check(stage.log)
    assert bag_in_log(stage) == bag_at_source(stage)
    return copies


def bag_in_log(stage: Stage, name: str = "bag") -> Counter[tuple[tuple[str, str | None], ...]]:
    rows = stage.log.replay().get(qualified_name("public", name), {}).get(None, [])
    return Counter(tuple(sorted(row.items())) for row in rows)  # type: ignore[attr-defined]


def bag_at_source(stage: Stage, name: str = "bag") -> Counter[tuple[tuple[str, str | None], ...]]:
    """Return all rows, every value as PostgreSQL prints it."""
    with stage.connect(options="-c TimeZone=UTC -c extra_float_digits=3") as connection:
        result = connection.pgconn.exec_(f"SELECT * FROM {name}".encode())
    names = [(result.fname(n) or b"").decode() for n in range(result.nfields)]
    found: Counter[tuple[tuple[str, str | None], ...]] = Counter()
    for number in range(result.ntuples):
        values = [result.get_value(number, n) for n in range(result.nfields)]
        texts = [None if value is None else value.decode() for value in values]
        found[tuple(sorted(zip(names, texts, strict=True)))] += 1
    return found


def _apply(shown: Counter[Row], row: dict[str, Any], *, exact: bool) -> None:
    op = chr(row["__op"])
    if op == "t":
        shown.clear()
        return
    new = row["a"], row["version"]
    before = dict(row["__before"] or ())
    old = new if op == "d" else (before.get("a", new[0]), before.get("version", new[1]))
    if op in "ud":
        assert shown[old] or not exact, f"{old} goes, and isn't there"
        shown[old] -= 1
        if shown[old] <= 0:
            del shown[old]
    if op != "d":
        shown[new] += 1


def _told(rows: Counter[Row]) -> str:
    return f"{rows.total()} rows ({', '.join(map(str, sorted(rows)[:4]))})"
