"""A capture that runs in a thread of the test, into a log in memory that can be slow, can fail, and can be replayed."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
from tests.capture.beside import Beside, activity, joined, stacks

from millstream.capture.config import CaptureConfig, CaptureOutcome
from millstream.capture.run import run_capture
from millstream.catalog import Catalog, TableRow, TableState
from millstream.errors import LogError, Overloaded, UnknownTable
from millstream.model.exact_values import storage_values, text_renderer
from millstream.model.ids import SourceId, TableId
from millstream.model.operations import Ack, SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn, Seq, SeqRange, format_lsn
from millstream.model.records import PARTITION_OID
from millstream.model.schema import TableKind
from millstream.wal.writing.submissions import follow

CATCH_UP_S = 180
"""Seconds: longer than capture itself continues without a connection, or with a full disk."""
BEHIND_BYTES = 64 << 10
BREATH_S = 0.2
FAST_STEPS = 1000
"""Steps that the writers of a test may make as fast as they can; then each pauses for `PAUSE_S` after each step."""
PAUSE_S = 0.05
STATEMENT_S = 120
"""Seconds that a statement of a test may take."""


class MemoryLog:
    """A `LogAppender` in memory. Operations become durable one by one on its own thread, after `delay_s`."""

    def __init__(self) -> None:
        self.entries: list[WriteOps | SpilledOp] = []
        self.delay_s = 0.0
        self.fail_with: Exception | None = None
        self.fails_once = False
        """Whether one operation alone fails."""
        self.failures = 0
        self.gate = threading.Event()
        """Operations become durable only while it is set."""
        self.gate.set()
        self.room = threading.Event()
        """The log takes operations only while it is set."""
        self.room.set()
        self.asked = 0
        """How often a caller that waits for room was asked whether it gives up."""
        self._reached: dict[SourceId, Lsn] = {}
        self._queue: list[tuple[WriteOps | SpilledOp, Future[Ack]]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = Beside(self._main)

    def submit(
        self,
        ops: WriteOps | SpilledOp,
        *,
        deadline_s: float | None = None,  # noqa: ARG002
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Future[Ack]:
        while not self.room.wait(0.05):
            self.asked += 1
            if gives_up():
                raise Overloaded("no room", queued_bytes=0)
        answer: Future[Ack] = Future()
        with self._changed:
            if self._closed:
                answer.set_exception(self._failure or AssertionError("the log is closed"))
            else:
                self._queue.append((ops, answer))
                self._changed.notify()
        return answer

    def held(self) -> int:
        """Return the number of operations without an answer; the first is being written, or waits at the gate."""
        return len(self._queue)

    def reached(self) -> dict[SourceId, Lsn]:
        return dict(self._reached)

    def settled(self) -> None:
        """Do nothing: no other machine has to confirm."""

    def is_written(self) -> bool:
        return not self._queue

    def close(self) -> None:
        """End the thread, wherever it waits, and raise what it raised."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.gate.set()
        self._thread.ended()

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                ops, answer = self._queue[0]
            self.gate.wait()
            if self.delay_s:
                time.sleep(self.delay_s)
            if self.fail_with is not None:
                self.failures += 1
                failure, self.fail_with = self.fail_with, None if self.fails_once else self.fail_with
                self._queue.pop(0)
                answer.set_exception(failure)
                continue
            try:
                written = self._write(ops)
            except BaseException as error:
                # The operation's waiter needs the error, and so do all waiters after it.
                with self._changed:
                    self._closed, self._failure = True, error
                    unanswered = [one for _, one in self._queue]
                    self._queue.clear()
                for one in unanswered:
                    one.set_exception(error)
                raise
            self._queue.pop(0)
            if written:
                answer.set_result(Ack({}, SeqRange(Seq(1), ops.row_count)))
            else:
                answer.set_exception(LogError("what it follows failed", code="out_of_order"))

    def _write(self, ops: WriteOps | SpilledOp) -> bool:
        """Take an operation in, unless the one that it follows is missing."""
        if not all(follow([ops], self._reached)):
            return False
        if isinstance(ops, SpilledOp):
            # Read it now: its spill file is removed once it is durable.
            pieces = list(ops.chunks())
            ops = replace(ops, chunks=lambda: iter(pieces))
        self.entries.append(ops)
        self._reached.update({s: max(lsn, self._reached.get(s, Lsn(0))) for s, lsn in ops.reached.items()})
        return True

    # --- replay

    def records(self) -> Iterator[tuple[TableRows, dict[str, Any], dict[str, Any]]]:
        """Yield every record in order: its table, its operation, and its values as PostgreSQL's texts."""
        for entry in list(self.entries):
            operations = (entry.operations if isinstance(entry, WriteOps) else entry.operation).to_pylist()
            pieces = [entry.tables] if isinstance(entry, WriteOps) else entry.chunks()
            for tables in pieces:
                found = [(row["__operation"], row["__index"], t, row) for t in tables for row in as_texts(t)]
                for operation, _, table, row in sorted(found, key=lambda f: f[:2]):
                    yield table, operations[operation], row

    def replay(
        self, table: TableId | None = None, *, brought: Collection[str] = ()
    ) -> dict[str, dict[Any, dict[str, str | None]]]:
        """Return the tables that the log makes, by name and key (tables without one: a list under the key None).

        With a table id, only that table's rows, under the name "" whatever the table was called.

        Args:
            brought: partitions that were attached with rows, as an `x` names them. One that left before a look found it
                was never copied: until its `x`, records may remove rows that none has put.
        """
        state: dict[str, dict[Any, Any]] = {}
        found = list(self.records())
        left = {
            (t.schema.table_id, row[LEAF]): at
            for at, (t, _, row) in enumerate(found)
            if chr(row["__op"]) == "x" and dict(row["__before"])["partition"] in brought
        }
        # As a fold does it: records before a table's last `t` may have another key, and don't count.
        emptied = {t.schema.table_id: at for at, (t, _, row) in enumerate(found) if chr(row["__op"]) == "t"}
        for at, (piece, _, row) in enumerate(found):
            schema = piece.schema
            if schema.kind is not TableKind.TABLE or at < emptied.get(schema.table_id, 0):
                continue
            if table is not None and schema.table_id != table:
                continue
            rows = state.setdefault("" if table is not None else f"{schema.namespace}.{schema.name}", {})
            names = [c.name for c in schema.columns]
            leaf = row.get(LEAF)
            new = {name: row[name] for name in names} | {LEAF: leaf}
            op = chr(row["__op"])
            before = dict(row["__before"] or ())
            if op == "t":
                rows.clear()
            elif op == "x":
                leave(rows, leaf)
            elif not schema.key:
                may_lack = at < left.get((schema.table_id, leaf), 0)
                rows.setdefault(None, Bag()).change(row, new, may_lack=may_lack)
            else:
                key = tuple(row[name] for name in schema.key)
                old = tuple(before.get(name, row[name]) for name in schema.key)
                if op == "d":
                    rows.pop(key, None)
                    continue
                base = rows.get(old, {})
                for name in row["__unchanged"] or ():
                    new[name] = base.get(name, "(never came)")
                if old != key:
                    rows.pop(old, None)
                rows[key] = new
        for rows in state.values():
            if None in rows:
                rows[None] = rows[None].all()
            for held in rows[None] if None in rows else rows.values():
                del held[LEAF]
        return state


LEAF = PARTITION_OID.name


def leave(rows: dict[Any, Any], leaf: int | None) -> None:
    """Remove the rows whose newest record names the leaf partition."""
    if None in rows:
        rows[None].leave(leaf)
    else:
        for key in [key for key, held in rows.items() if held[LEAF] == leaf]:
            del rows[key]


class Bag:
    """The rows of a table without a key, in the order in which they came; a removed row is found by its values."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}
        self._places: dict[frozenset[tuple[str, Any]], list[int]] = {}
        self._numbers = itertools.count()

    def change(self, row: dict[str, Any], new: dict[str, Any], *, may_lack: bool = False) -> None:
        """Apply a record; its row is `new`. With `may_lack`, it may remove a row that no record has put."""
        op, before = chr(row["__op"]), dict(row["__before"] or ())
        if op == "d":
            self._take(new, may_lack=may_lack)
        elif op == "u":
            self._take(before | {LEAF: new[LEAF]}, may_lack=may_lack)
            new = new | {name: before[name] for name in row["__unchanged"] or ()}
        if op != "d":
            place = next(self._numbers)
            self._rows[place] = new
            self._places.setdefault(_values(new), []).append(place)

    def leave(self, leaf: int | None) -> None:
        """Remove the rows of a leaf partition."""
        for place in [place for place, held in self._rows.items() if held[LEAF] == leaf]:
            self._remove(place)

    def all(self) -> list[dict[str, Any]]:
        """Return all rows."""
        return list(self._rows.values())

    def _take(self, row: dict[str, Any], *, may_lack: bool) -> None:
        """Remove one of the equal rows, preferably one of the same leaf partition; columns that either lacks are null."""
        places = self._places.get(_values(row)) or [
            place
            for place, held in self._rows.items()
            if all(held.get(name) == value for name, value in row.items() if name != LEAF)
        ]
        if may_lack and not places and _values(row) not in self._places:  # which has those of removed rows, too
            return
        self._remove(next((place for place in places if self._rows[place][LEAF] == row[LEAF]), places[0]))

    def _remove(self, place: int) -> None:
        self._places[_values(self._rows.pop(place))].remove(place)


def _values(row: dict[str, Any]) -> frozenset[tuple[str, Any]]:
    """Return the values that aren't null, by column."""
    return frozenset((name, value) for name, value in row.items() if name != LEAF and value is not None)


def as_texts(table: TableRows) -> list[dict[str, Any]]:
    """Return rows as dicts, their values as PostgreSQL's texts."""
    if table.schema.kind is not TableKind.TABLE:
        return table.rows.to_pylist()
    first = table.rows.num_columns - len(table.schema.columns)
    rows = table.rows.select(range(first)).to_pylist()
    for number, column in enumerate(table.schema.columns):
        for row, value in zip(rows, storage_values(table.rows.column(first + number)), strict=True):
            exact = dict(row["__exact"] or ())
            row[column.name] = exact.get(column.name) if value is None else text_renderer(column.arrow)(value)
    return rows


@dataclass
class Stage:
    """A database, a catalog, a log, and the captures that run on them."""

    dsn: str
    folder: Path
    catalog: Catalog
    config: CaptureConfig
    log: MemoryLog = field(default_factory=MemoryLog)
    running: list[Running] = field(default_factory=list)
    steps: int = 0
    """Steps that writers have made."""

    def connect(self, *, options: str = "", **more: Any) -> psycopg.Connection[Any]:
        """Return a connection whose statements end, with an error at worst."""
        options += f" -c statement_timeout={STATEMENT_S}s"
        return psycopg.connect(self.dsn, options=options, **{"autocommit": True, "connect_timeout": 30} | more)

    def sql(self, *statements: str) -> None:
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def breathe(self, connection: psycopg.Connection[Any], stop: threading.Event) -> None:
        """Pause a writer that writes all the time, for a moment while the log is far behind, and after many steps.

        On a busy machine the log would fall behind for ever. A chunk enters when the stream has reached
        the position where it was read. And a copy reads a row again that changes between its reading and
        its entry: it would never end if the writers changed every row in that time.
        """
        self.steps += 1
        if self.steps > FAST_STEPS:
            stop.wait(PAUSE_S)
        end = time.monotonic() + BREATH_S
        behind = "SELECT pg_current_wal_insert_lsn() - %s::pg_lsn > %s"
        while reached := max(self.log.reached().values(), default=None):
            row = connection.execute(behind, [format_lsn(reached), BEHIND_BYTES]).fetchone()
            if row == (False,) or time.monotonic() > end or stop.wait(0.005):
                return

    def catch_up(self, **more: Any) -> CaptureOutcome:
        """Capture until everything the source has is in the log.

        It has to end: a failure reports what it waits for.
        """
        running = Running(self, {"until_caught_up": True} | more)
        running.wait(CATCH_UP_S)
        if not running.ended:
            found = f"capture hasn't caught up after {CATCH_UP_S} s\n{stacks()}\n{activity(self.dsn)}"
            self.running.append(running)
            running.ask_to_end()
            raise AssertionError(found)
        return running.stop()

    def start(self, **more: Any) -> Running:
        made = Running(self, more)
        self.running.append(made)
        return made

    def end(self) -> None:
        """Stop every capture that was started, with the gate open."""
        self.log.gate.set()
        self.log.room.set()
        for running in self.running:
            running.ask_to_end()
        for running in self.running:
            running.end()

    def table(self, name: str) -> TableRow:
        stream = self.catalog.stream("shop").id
        return self.catalog.find_table(stream, *name.split("."))

    def state(self, name: str) -> TableState | None:
        """Return a table's state; None before the catalog has it."""
        try:
            return self.table(name).state
        except UnknownTable:
            return None

    def source_rows(self, name: str, key: Sequence[str]) -> dict[Any, dict[str, str | None]]:
        """Return the rows of a table of the source, every value as PostgreSQL prints it."""
        with self.connect(options="-c TimeZone=UTC -c extra_float_digits=3") as connection:
            result = connection.pgconn.exec_(f"SELECT * FROM {name}".encode())
            names = [result.fname(n).decode() for n in range(result.nfields)]
            rows = [
                {name: None if (v := result.get_value(r, n)) is None else v.decode() for n, name in enumerate(names)}
                for r in range(result.ntuples)
            ]
        return {tuple(row[k] for k in key): row for row in rows}

    def slot_active(self) -> bool:
        """Return whether a process streams from the slot."""
        with self.connect() as connection:
            row = connection.execute(
                "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [self.config.slot]
            ).fetchone()
        return row is not None and bool(row[0])

    def slot_confirmed(self) -> int:
        """Return the slot's confirmed position; 0 while there is no slot, or it is still being created."""
        with self.connect() as connection:
            row = connection.execute(
                "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s", [self.config.slot]
            ).fetchone()
        return 0 if row is None or row[0] is None else int(row[0])


class Running:
    """A capture in a thread."""

    def __init__(self, stage: Stage, more: dict[str, Any]) -> None:
        self._more = more
        self._stop = threading.Event()
        self.outcome: CaptureOutcome | None = None
        self._stage = stage
        self._thread = Beside(self._main)

    def _main(self) -> None:
        stage = self._stage
        self.outcome = run_capture(stage.config, stage.catalog, stage.log, stop=self._stop, **self._more)

    @property
    def error(self) -> BaseException | None:
        """The exception that it ended with."""
        return self._thread.error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, deadline_s: float) -> None:
        """Return when the capture has ended, or after the deadline."""
        self._thread.join(deadline_s)

    def ask_to_end(self) -> None:
        """Ask the capture to stop."""
        self._stop.set()

    def end(self) -> None:
        """Ask the capture to stop; return when it has."""
        self.ask_to_end()
        try:
            joined(self._thread, "a capture that was asked to stop")
        except AssertionError as error:
            error.add_note(activity(self._stage.dsn))
            raise

    def stop(self) -> CaptureOutcome:
        self.end()
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome


def make_config(dsn: str, folder: Path, slot: str, **more: Any) -> CaptureConfig:
    facts: dict[str, Any] = {
        "stream": "shop",
        "dsn": dsn,
        "tables": ("public.*",),
        "publication": "millstream_shop",
        "slot": slot,
        "spill_dir": str(folder / "spill"),
        "look_s": 0.2,
        "chunk_rows": 50,
    }
    return CaptureConfig(**facts | more)


@contextmanager
def staged(dsn: str, folder: Path, slot: str) -> Iterator[Stage]:
    """Yield a stage for one test, on its own database."""
    catalog = Catalog(folder / "catalog.db")
    catalog.resolve_stream("shop")
    made = Stage(dsn, folder, catalog, make_config(dsn, folder, slot))
    with contextlib.ExitStack() as stack:
        stack.callback(catalog.close)
        stack.callback(made.log.close)
        stack.callback(made.end)
        yield made
