"""One bulk append: batches arrive while earlier ones are written, and each is acknowledged once durable, in order.

It uses two threads. The call's own receives; the other appends everything that has arrived as one
submission to the log. So batches of a transfer are in the log in its order, and a slow disk holds the
sender back through the limited room.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NoReturn

import pyarrow as pa

from millstream.errors import MillstreamError, WriterClosed
from millstream.ingest.arrow_stream_decoding import check_batch
from millstream.ingest.python_rows import table_of
from millstream.model.writes import AppendBatch
from millstream.serving.flight.requests import PIECE_BYTES, Cutter, Piece, PutRequest
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.writers.home_appender import HomeAppender

SUBMISSION_BYTES: Final = 2 * PIECE_BYTES
_SUBMISSION_PIECES: Final = 1000


class TransferBudget:
    """A limit of bytes over all transfers; one larger piece may exceed it while there is no other."""

    def __init__(self, size_bytes: int) -> None:
        self._free = self._all = size_bytes
        self._changed = threading.Condition()

    def take(self, size_bytes: int, given_up: Callable[[], bool]) -> None:
        """Wait until there is room for that many bytes; or until `given_up`, which is checked periodically."""
        with self._changed:
            while self._free < min(size_bytes, self._all) and not given_up():
                self._changed.wait(0.2)
            self._free -= size_bytes

    def give(self, size_bytes: int) -> None:
        """Release that many bytes."""
        with self._changed:
            self._free += size_bytes
            self._changed.notify_all()


class BulkAppend:
    """Appends the batches of one transfer.

    Args:
        room: counts pieces from their arrival until their acknowledgement.
        tell: sends a line of JSON to the client; called on another thread than `run`.
    """

    def __init__(
        self, asked: PutRequest, appender: HomeAppender, room: TransferBudget, tell: Callable[[bytes], None]
    ) -> None:
        self._asked = asked
        self._appender = appender
        self._room = room
        self._tell = tell
        self._changed = threading.Condition()
        self._waiting: deque[Piece] = deque()
        self._has_all = False
        self._open = 0
        """Number of pieces that have arrived and aren't acknowledged."""
        self._failure: Exception | None = None

    def has_work(self) -> bool:
        """Return whether something that has arrived isn't acknowledged yet."""
        return self._open > 0

    def run(
        self,
        batches: Iterable[tuple[pa.RecordBatch, bytes | None]],
        closing: threading.Event,
        admit: Callable[[], None] = lambda: None,
    ) -> None:
        """Append all batches; return once everything is durable and acknowledged.

        Args:
            batches: each with its metadata. Iterating blocks until the next has arrived.
            closing: set when the server ends: arrived batches are appended, and no more are taken.
            admit: called with each batch; raises if the sender may send no more.

        Raises:
            MillstreamError: a batch was refused, or couldn't be appended. Acknowledged batches are
                durable; for the failed one a line with `error` was sent as well.
            WriterClosed: the server ends.
        """
        cutter = Cutter(self._asked)
        worker = Worker("flight-append", self._append_all).start()
        refused: tuple[Piece, MillstreamError] | None = None
        try:
            for place, (rows, metadata) in enumerate(batches):
                try:
                    admit()
                    check_batch(rows)
                    for piece in cutter.pieces(rows, metadata):
                        self._offer(piece)
                except MillstreamError as error:
                    refused = Piece(rows, place, 0, None), error
                    break
                if closing.is_set():
                    raise WriterClosed("the server ends; batches without an acknowledgement weren't appended")
                if self._failure is not None:
                    break
        finally:
            with self._changed:
                self._has_all = True
                self._changed.notify_all()
            worker.join()
        if self._failure is not None:
            raise self._failure
        if refused is not None:
            self._tell_refused(*refused)

    def _offer(self, piece: Piece) -> None:
        self._room.take(piece.size_bytes, lambda: self._failure is not None)
        with self._changed:
            self._waiting.append(piece)
            self._open += 1
            self._changed.notify_all()

    def _append_all(self) -> None:
        while group := self._next_group():
            try:
                if self._failure is None:
                    self._append(group)
            except Exception as error:  # noqa: BLE001 - the thread that waits for this one raises it
                self._failure = error
            finally:
                self._room.give(sum(piece.size_bytes for piece in group))
                with self._changed:
                    self._open -= len(group)

    def _next_group(self) -> list[Piece]:
        """Return the pieces that have arrived, up to one submission's size; none at the end."""
        with self._changed:
            while not self._waiting and not self._has_all:
                self._changed.wait()
            group: list[Piece] = []
            size = 0
            while self._waiting and len(group) < _SUBMISSION_PIECES:
                size += self._waiting[0].size_bytes
                if group and size > SUBMISSION_BYTES:
                    break
                group.append(self._waiting.popleft())
            return group

    def _append(self, group: list[Piece]) -> None:
        try:
            rows = table_of(pa.Table.from_batches([piece.rows for piece in group]))
        except MillstreamError as error:
            if len(group) == 1:
                self._tell_refused(group[0], error)
            # The log refuses one of them; those before it are fine.
            for piece in group:
                self._append([piece])
            return
        batch = AppendBatch.of_table(
            self._asked.table,
            rows,
            [piece.rows.num_rows for piece in group],
            [piece.write_id for piece in group],
            keep_valid_rows=self._asked.keep_valid_rows,
            acks=self._asked.level,
        )
        try:
            outcomes = self._appender.append_batch(self._asked.stream, batch, deadline_s=self._asked.deadline_s)
        except MillstreamError as error:  # all of them: no such stream, no room, no writer
            self._tell_refused(group[0], error)
        refused: list[tuple[Piece, MillstreamError]] = []
        for piece, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, MillstreamError):
                refused.append((piece, outcome))
            else:
                self._tell(json.dumps(piece.told(outcome)).encode())
        if refused:
            self._tell_refused(*refused[0])

    def _tell_refused(self, piece: Piece, error: MillstreamError) -> NoReturn:
        """Send the refusal as a line: a client that waits for each acknowledgement doesn't see the call end."""
        self._tell(json.dumps({"batch": piece.batch, "row": piece.row, "error": error.as_dict()}, default=str).encode())
        error.details.setdefault("batch", piece.batch)
        error.details.setdefault("batch_row", piece.row)
        raise error
