"""A backlog in chunks: the messages of the replication stream, read by COPY from the decoding functions of SQL.

The server decodes a chunk at once and sends it in large pieces, while it sends the stream row by row. The functions
read a temporary copy of the slot, which advances as it is read and goes with its connection. The slot itself stays
until the log is durable, and is then advanced to there, no further. So the next chunk is decoded while the log writes
this one. After each chunk comes one more row, in the form of a keepalive: everything that committed below its LSN has
come.

Chunks end between transactions, but transactions that the source streams before they commit may lie across several.
If one is open when a chunk ends, its messages come again with the next chunk (`Block.resends_streamed`).
"""

from __future__ import annotations

import contextlib
import secrets
import select
import struct
import time
from collections.abc import Callable
from typing import Final

import psycopg
from psycopg import pq, sql

from millstream.capture.connection import Connection, take_bytes_as_they_are, translate, translate_result, translated
from millstream.capture.source_tables import SourceIdentity, connect_same
from millstream.capture.stream.frames import KEEPALIVE, Block, Frames, is_unencrypted, pass_over
from millstream.codec.pgoutput import MessageRun
from millstream.codec.pgoutput._framing import split_copy_rows
from millstream.errors import MillstreamError, ProtocolViolation
from millstream.failpoints import hit
from millstream.model.positions import Lsn, format_lsn
from millstream.protocol.catch_up_mode import BacklogChunk

_SMALLEST_FRAME: Final = 1 + 4 + 6 + 1
_ROW_BYTES: Final = 6
"""Size of the header before each message: the row's number of columns, the message's length."""
_COPY_HEADER: Final = 19
_ENDS: Final = struct.Struct(">cQQ")
_MESSAGES_MAX: Final = 1024

ADVANCE_BYTES: Final = 256 << 20
"""WAL after which the slot is advanced: each time the source reads its WAL from the slot's restart point on."""
_LAST_ADVANCE_S: Final = 60.0
_CANCEL_S: Final = 5.0


class SlotAdvance:
    """Advances a slot that no connection reads, on a connection of its own, without waiting for it.

    Args:
        connection: an ordinary one; owned from here on.
        every_s: least seconds between two advances. One by `ADVANCE_BYTES` or more doesn't wait.
    """

    def __init__(self, connection: Connection, slot: str, confirmed: Lsn, *, every_s: float) -> None:
        self._connection = connection
        self._connection.pgconn.nonblocking = 0
        self._slot = slot
        self._asked = confirmed
        self._every_s = every_s
        self._asked_at = time.monotonic()
        self._busy = False

    def want(self, lsn: Lsn) -> None:
        """Advance to `lsn`, up to which everything is durable, unless it was advanced a moment ago.

        Raises:
            SourceError (`slot_active`): another connection reads it.
            MillstreamError: the source refused, or the connection broke.
        """
        self._settle()
        if self._busy or lsn <= self._asked:
            return
        if lsn - self._asked >= ADVANCE_BYTES or time.monotonic() - self._asked_at >= self._every_s:
            self._begin(lsn)

    def finish(self, lsn: Lsn) -> None:
        """Advance to `lsn` and wait for it, up to a bound: a lower slot only costs time at the next start."""
        deadline = time.monotonic() + _LAST_ADVANCE_S
        self._wait(deadline)
        if not self._busy and lsn > self._asked:
            self._begin(lsn)
            self._wait(deadline)

    def close(self) -> None:
        """Close the connection; a running advance is cancelled."""
        if self._busy:
            with contextlib.suppress(psycopg.Error):
                self._connection.cancel_safe(timeout=_CANCEL_S)
        self._connection.close()

    def _begin(self, lsn: Lsn) -> None:
        hit("capture.before_advance")
        command = sql.SQL("SELECT pg_replication_slot_advance({}, {})").format(
            sql.Literal(self._slot), sql.Literal(format_lsn(lsn))
        )
        try:
            self._connection.pgconn.send_query(command.as_bytes(self._connection))
        except psycopg.Error as error:
            raise translate(error) from error
        self._asked, self._asked_at, self._busy = lsn, time.monotonic(), True

    def _settle(self) -> None:
        """Take the answer, if it has come."""
        pgconn = self._connection.pgconn
        failed: pq.abc.PGresult | None = None
        try:
            while self._busy:
                pgconn.consume_input()
                if pgconn.is_busy():
                    return
                result = pgconn.get_result()
                self._busy = result is not None
                if result is not None and result.status != pq.ExecStatus.TUPLES_OK:
                    failed = result
        except psycopg.Error as error:
            raise translate(error) from error
        if failed is not None:
            raise translate_result(failed)

    def _wait(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._connection.pgconn.socket, select.POLLIN)
        self._settle()
        while self._busy and time.monotonic() < deadline:
            poll.poll(100)
            self._settle()


class ChunkWire:
    """Chunks, one after the other, as a `Wire`. For one thread, except its properties.

    Args:
        connection: an ordinary one; owned from here on.
        command: reads one chunk, and then its end (`chunk_command`).
        begin: LSN at which the first chunk begins.
        advance: advances the slot.
    """

    def __init__(
        self,
        connection: Connection,
        command: bytes,
        *,
        begin: Lsn,
        advance: SlotAdvance,
        go_on: Callable[[BacklogChunk], bool],
        reads_socket: bool,
    ) -> None:
        self._connection = connection
        self._command = command
        self._advance = advance
        self._go_on = go_on
        self._confirmed = Lsn(0)
        self._begin = self._end = begin
        self._source_end = begin
        self._messages = 0
        self._size_bytes = 0
        self._anew = False
        self._ended = False
        rows = _SocketRows if reads_socket and is_unencrypted(connection) else _LibpqRows
        self._rows: _SocketRows | _LibpqRows = rows(connection)
        self._rows.ask(command)

    @property
    def ended(self) -> bool:
        """Whether no more chunks will be read; the last one is in the blocks returned so far."""
        return self._ended

    @property
    def end(self) -> Lsn:
        """LSN at which the last chunk ended."""
        return self._end

    @property
    def source_end(self) -> Lsn:
        """The end of the source's WAL after the last chunk was read."""
        return self._source_end

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._rows.fileno()

    def read(self, gather_s: float = 0.0) -> Block | None:
        """See `Wire`. A block doesn't reach beyond the end of a chunk."""
        block = self._rows.read(gather_s)
        if block is not None:
            self._messages += len(block)
            self._size_bytes += block.messages.span_bytes
            if block.kinds[-1] == KEEPALIVE:
                _, end, source_end = _ENDS.unpack_from(block.messages[len(block) - 1])
                self._end, self._source_end = Lsn(end), Lsn(source_end)
            if self._anew:
                self._anew = False
                return Block(block.messages, block.kinds, resends_streamed=True)
        elif self._rows.take_end():
            self._finish_chunk()
        return block

    def tell(self, received: Lsn, confirmed: Lsn, *, ask: bool) -> None:  # noqa: ARG002 - chunks say by themselves where they end
        """See `Wire`: advances the slot to what is durable, now and then."""
        self._confirmed = confirmed
        self._advance.want(confirmed)

    def say_goodbye(self) -> None:
        """Advance the slot to what is durable, and wait for it."""
        with contextlib.suppress(MillstreamError):
            self._advance.finish(self._confirmed)

    def close(self) -> None:
        """Close the connections, and make the server stop decoding."""
        if not self._ended:
            with contextlib.suppress(psycopg.Error):
                self._connection.cancel_safe(timeout=_CANCEL_S)
        self._rows.close()
        self._connection.close()
        self._advance.close()

    def _finish_chunk(self) -> None:
        hit("capture.after_chunk")
        chunk = BacklogChunk(self._begin, self._end, self._source_end, self._messages - 1, self._size_bytes)
        self._begin, self._messages, self._size_bytes, self._anew = self._end, 0, 0, True
        if self._go_on(chunk):
            self._rows.ask(self._command)
        else:
            self._ended = True


def open_chunks(
    dsn: str,
    identity: SourceIdentity,
    *,
    slot: str,
    options: dict[str, str],
    reached: Lsn,
    confirmed: Lsn,
    changes_max: int,
    wal_bytes_max: int,
    go_on: Callable[[BacklogChunk], bool],
    advance_s: float,
    reads_socket: bool,
) -> ChunkWire:
    """Copy a slot, and begin to read the WAL after `reached` in chunks.

    Args:
        changes_max: a chunk ends with the transaction, or the piece of a streamed one, that brings it to so many
            messages …
        wal_bytes_max: … or to so many bytes of WAL.

    Raises:
        MillstreamError: the source refuses it, no slot is free, or it can't be reached.
    """
    name = f"{slot[:46]}_{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        side = stack.enter_context(contextlib.closing(connect_same(dsn, identity, purpose="advance")))
        connection = stack.enter_context(contextlib.closing(connect_same(dsn, identity, purpose="catch-up")))
        with translated():
            connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s, true)", [slot, name])
            if reached > confirmed:
                connection.execute("SELECT pg_replication_slot_advance(%s, %s)", [name, format_lsn(reached)])
            row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        assert row is not None
        command = chunk_command(
            name, options, changes_max=changes_max, wal_bytes_max=wal_bytes_max, on_standby=bool(row[0])
        ).as_bytes(connection)
        take_bytes_as_they_are(connection)
        advance = SlotAdvance(side, slot, confirmed, every_s=advance_s)
        wire = ChunkWire(connection, command, begin=reached, advance=advance, go_on=go_on, reads_socket=reads_socket)
        stack.pop_all()
    return wire


def chunk_command(
    slot: str, options: dict[str, str], *, changes_max: int, wal_bytes_max: int, on_standby: bool
) -> sql.Composed:
    """Return the two COPYs of a chunk: its messages, and then its end and the end of the source's WAL."""
    end = "pg_last_wal_replay_lsn()" if on_standby else "pg_current_wal_flush_lsn()"
    pairs = sql.SQL(", ").join(sql.Literal(text) for pair in options.items() for text in pair)
    return sql.SQL(
        "COPY (SELECT data FROM pg_logical_slot_get_binary_changes({slot},"
        " (SELECT confirmed_flush_lsn + {wal_bytes} FROM pg_replication_slots WHERE slot_name = {slot}),"
        " {changes}, {options})) TO STDOUT (FORMAT binary);"
        "COPY (SELECT '\\x6b'::bytea || pg_lsn_send(confirmed_flush_lsn) || pg_lsn_send({end}) || '\\x00'::bytea"
        " FROM pg_replication_slots WHERE slot_name = {slot}) TO STDOUT (FORMAT binary)"
    ).format(
        slot=sql.Literal(slot),
        wal_bytes=sql.Literal(wal_bytes_max),
        changes=sql.Literal(changes_max),
        options=pairs,
        end=sql.SQL(end),
    )


class _SocketRows:
    """The rows of commands, read from the socket: simple queries, which use few kinds of frames."""

    def __init__(self, connection: Connection) -> None:
        self._is_ready = False
        self._frames = Frames(connection, split_copy_rows, frame_bytes_min=_SMALLEST_FRAME, on_other=self._on_other)

    def ask(self, command: bytes) -> None:
        self._frames.send(b"Q" + struct.pack(">I", len(command) + 5) + command + b"\0")

    def fileno(self) -> int:
        return self._frames.fileno()

    def read(self, gather_s: float) -> Block | None:
        return None if self._is_ready else self._frames.read(gather_s)

    def take_end(self) -> bool:
        """Whether the command has ended; once for each."""
        ready, self._is_ready = self._is_ready, False
        return ready

    def close(self) -> None:
        self._frames.close()

    def _on_other(self, kind: str, body: bytes) -> None:
        if kind == "Z":
            self._is_ready = True
        elif kind not in "HcC":
            pass_over(kind, body, what="a chunk")


class _LibpqRows:
    """The same through libpq, row by row."""

    def __init__(self, connection: Connection) -> None:
        self._pg = connection.pgconn
        self._pg.nonblocking = 0
        self._in_copy = self._is_asked = False
        self._has_ended = True

    def ask(self, command: bytes) -> None:
        try:
            self._pg.send_query(command)
        except psycopg.Error as error:
            raise translate(error) from error
        self._is_asked = True
        self._in_copy = self._has_ended = False

    def fileno(self) -> int:
        return self._pg.socket

    def read(self, gather_s: float) -> Block | None:  # noqa: ARG002 - rows come as fast as they are taken
        found: list[bytes | memoryview] = []
        try:
            self._pg.consume_input()
            while len(found) < _MESSAGES_MAX and not self._has_ended:
                if not self._in_copy:
                    if found or self._pg.is_busy() or not self._next_result():
                        break
                    continue
                count, data = self._pg.get_copy_data(1)
                if count == 0:
                    break
                if count < 0:
                    self._in_copy = False
                    continue
                at = _COPY_HEADER if bytes(data[:1]) == b"P" else 0
                if len(data) > at + _ROW_BYTES:
                    found.append(data[at + _ROW_BYTES :])
        except psycopg.Error as error:
            raise translate(error) from error
        if not found:
            return None
        run = MessageRun.of(found)  # type: ignore[arg-type]
        kinds = run.buffer[run.starts]
        if ((kinds == KEEPALIVE) & (run.ends - run.starts != _ENDS.size + 1)).any():
            raise ProtocolViolation("the row after a chunk has an unexpected length")
        return Block(run, kinds)

    def take_end(self) -> bool:
        """Whether the command has ended; once for each."""
        ended = self._has_ended and self._is_asked
        self._is_asked = self._is_asked and not ended
        return ended

    def close(self) -> None:
        """Nothing of its own."""

    def _next_result(self) -> bool:
        result = self._pg.get_result()
        if result is None:
            self._has_ended = True
            return False
        if result.status == pq.ExecStatus.COPY_OUT:
            self._in_copy = True
        elif result.status != pq.ExecStatus.COMMAND_OK:
            raise translate_result(result)
        return True
