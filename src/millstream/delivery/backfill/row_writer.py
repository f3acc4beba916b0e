"""How a stream's backfills begin: what they deliver, and the worker that writes their rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from millstream.delivery.backfill.backfill_control import new_number
from millstream.delivery.backfill.rows import OpenLake, Stopped, Wanted, base_of, behind, tables_of, write_rows
from millstream.delivery.backfill.running_backfill import StoredBackfill, file_of
from millstream.delivery.definition import LITERAL_HINT, Definition, literal_fault
from millstream.delivery.request_fields import AskedRows
from millstream.delivery.running_consumer import Running
from millstream.errors import InvalidValue, MillstreamError, PositionError, UsageError
from millstream.model.ids import TableId
from millstream.model.names import TablePatterns
from millstream.model.positions import Seq
from millstream.model.predicate import Predicate
from millstream.model.schema import TableSchema
from millstream.wal.reader import StreamReader
from millstream.workers import Worker

logger = structlog.get_logger("millstream.delivery")

_LOOK_S: Final = 5.0
"""How long the worker waits until it tries again to write rows that couldn't be written."""


def stored_backfill(
    stream: str,
    definition: Definition,
    reader: StreamReader,
    open_lake: OpenLake,
    cursor: int,
    asked: AskedRows,
) -> StoredBackfill:
    """Return a new backfill.

    Args:
        stream: the stream's name.
        definition: the consumer's.
        reader: the log.
        open_lake: opens the lake.
        cursor: the consumer's cursor.
        asked: the tables, and a condition in addition to the consumer's own.

    Raises:
        InvalidValue: a pattern or the condition can't be parsed; no table matches; none has a column of the condition; or a
            literal of it is of another type than its column.
        LakeBehind: neither the lake nor the log has the tables from their beginning.
    """
    tables, where = asked
    found = _selected(definition, reader, tables)
    if tables is not None and not found:
        raise InvalidValue(
            f"the consumer receives no table that matches {', '.join(tables)[:200]}",
            hint="Name tables of the consumer that have rows, or leave tables out.",
        )
    if where is not None:
        try:
            predicate = Predicate.parse(where)
        except UsageError as error:
            raise InvalidValue(error.message, hint=error.hint) from error
        known = {column.name for schema in found.values() for column in schema.columns}
        missing = [name for name in predicate.columns if name not in known] if found else []
        if missing:
            raise InvalidValue(f"no matching table has a column {missing[0]!r}", hint="Use columns of the tables.")
        if (fault := literal_fault(predicate, found.values())) is not None:  # else every row would pass
            raise InvalidValue(fault, hint=LITERAL_HINT)
    try:
        base = base_of(Wanted(stream, definition, where, found, Seq(cursor)), reader, open_lake)
    except PositionError as error:
        hint = "Let the consumer go on, or rewind it to a later place, and repeat the call."
        raise behind(error.message, hint) from error
    if base is not None:
        base.close()
    names = sorted(schema.full_name for schema in found.values())
    return StoredBackfill(new_number(), cursor, tables, where, names)


def _selected(definition: Definition, reader: StreamReader, tables: list[str] | None) -> dict[TableId, TableSchema]:
    found = tables_of(reader, definition)
    if tables is None:
        return found
    try:
        patterns = TablePatterns.parse(tables)
    except UsageError as error:
        raise InvalidValue(error.message, hint=error.hint) from error
    return {table: schema for table, schema in found.items() if patterns.select(schema.namespace, schema.name)}


class BackfillWriter:
    """Writes the rows of backfills that began, one after the other, also after a restart.

    Args:
        stream: the stream's name.
        open_reader: opens the log.
        open_lake: opens the lake.
        running: returns the consumers.
    """

    def __init__(
        self,
        stream: str,
        open_reader: Callable[[], StreamReader],
        open_lake: OpenLake,
        running: Callable[[], Iterable[Running]],
    ) -> None:
        self._stream = stream
        self._open_reader = open_reader
        self._open_lake = open_lake
        self._running = running
        self._wanted = threading.Event()
        self._wanted.set()
        self._is_closing = threading.Event()
        self._worker = Worker("consumers-backfill", self._step).start()

    def wake(self) -> None:
        """Look at once for a backfill that began."""
        self._wanted.set()

    def close(self) -> None:
        """Stop; rows that aren't written are written after the next start."""
        self._is_closing.set()
        self._worker.stop()
        self._wanted.set()
        self._worker.join()

    def _step(self) -> bool:
        self._wanted.wait(_LOOK_S)
        self._wanted.clear()
        for running in self._running():
            if self._is_closing.is_set():
                return False
            try:
                self._write(running)
            except Stopped:
                continue
            except (MillstreamError, OSError) as error:
                logger.warning(
                    "the rows of a backfill can't be written for now",
                    stream=self._stream,
                    consumer=running.definition.name,
                    error=str(error),
                )
                running.backfills.error = str(error)
        return not self._is_closing.is_set()

    def _write(self, running: Running) -> None:
        with running.lock:
            stored, folder = running.backfills.wants_rows, running.backfills.folder
        if stored is None or folder is None or running.is_deleted:
            return
        reader, definition = self._open_reader(), running.definition
        tables = _selected(definition, reader, stored.tables)
        wanted = Wanted(self._stream, definition, stored.where, tables, Seq(stored.cursor))

        def is_void() -> bool:
            return self._is_closing.is_set() or running.is_deleted or running.backfills.wants_rows is not stored

        path = file_of(folder, stored.number)
        try:
            total = write_rows(path, wanted, reader, self._open_lake, is_void)
        except PositionError as error:
            if error.code != "beyond_retention":
                raise
            with running.lock:
                if not is_void() and not running.is_closed:
                    # The position only gets older: no later try succeeds.
                    running.backfills.end(is_rewound=True, failure=error.message)
            running.wake()
            return
        with running.lock:
            if is_void() or running.is_closed:
                path.unlink(missing_ok=True)
                return
            running.backfills.has_rows(total)
            running.save()
        running.wake()
