"""The reader of the replication connection: one thread that takes messages as they come and says how far the log is.

It looks at each message's first byte, no more: whole transactions are handed on in runs, blocks of large streamed
transactions go to spill files. It owns the connection, so all that is sent to the source goes through it too: standby
status, with the position that `confirm` was last given and never a byte more, also while nobody takes what was read.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import pq

from millstream.capture.connection import translate, translate_result
from millstream.capture.spill import Payload, SpillFile, SpillFolder
from millstream.codec.pgoutput import Relation, StreamCommit, Type, parse_message
from millstream.errors import MillstreamError, ProtocolViolation, SourceUnreachable
from millstream.model.positions import Lsn

HEADER_BYTES: Final = 25
"""Before each message: 'w', its LSN, the server's end of WAL, the server's clock."""
RUN_BYTES_MAX: Final = 8 << 20
_POSTGRES_EPOCH_US: Final = 946_684_800_000_000
_STATUS: Final = struct.Struct(">cQQQqB")
_COMMIT: Final = struct.Struct(">BQQq")
_PAIR: Final = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class Run:
    """Whole transactions (and messages outside of any), in order."""

    payloads: list[Payload]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Position:
    """Everything that committed at or below this LSN has been handed on."""

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class StreamedRelation:
    """A Relation or Type message inside a block of the streamed transaction `xid`."""

    xid: int
    message: Relation | Type


@dataclass(frozen=True, slots=True)
class StreamedAbort:
    """The streamed transaction `xid`, or a subtransaction of it, rolled back."""

    xid: int


@dataclass(frozen=True, slots=True)
class Spilled:
    """A transaction that lies in a spill file has committed.

    `streamed`: its messages bear xids, those of `aborted` were rolled back. Else it came whole; what stood between its
    Begin and its Commit is in the file.
    """

    commit: StreamCommit
    file: SpillFile
    aborted: frozenset[int]
    streamed: bool


Item = Run | Position | StreamedRelation | StreamedAbort | Spilled


@dataclass(slots=True)
class _Streamed:
    """A streamed transaction that is still open."""

    file: SpillFile
    aborted: set[int] = field(default_factory=set)


class Receiver:
    """Reads one replication connection until it's stopped or broken.

    Args:
        connection: a replication connection on which START_REPLICATION was answered; owned from here on.
        spill: where large transactions go.
        confirmed: the position that the source may be told at once.
        buffer_bytes_max: undecoded bytes in memory beyond which the source has to wait.
        status_s: the longest time between two status messages.

    Concurrency: `take`, `confirm`, `waiting`, `ask_position` and `stop` from any thread.
    """

    def __init__(
        self,
        connection: psycopg.Connection[tuple[Any, ...]],
        spill: SpillFolder,
        *,
        confirmed: Lsn,
        buffer_bytes_max: int,
        status_s: float,
    ) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._spill = spill
        self._buffer_bytes_max = buffer_bytes_max
        self._status_s = status_s
        self._lock = threading.Condition()
        self._items: deque[Item] = deque()
        self._queued_bytes = 0
        self._hungry = False
        self._failure: MillstreamError | None = None
        self._ended = False
        self._stop = False
        self._ask = False
        self._confirmed = confirmed
        self._told = Lsn(0)
        self._told_at = 0.0
        self._received = confirmed
        self.source_end = confirmed
        self._open: list[Payload] = []
        self._open_bytes = 0
        self._whole = 0
        self._whole_bytes = 0
        self._own: SpillFile | None = None
        self._own_begin: Payload = b""
        self._block: _Streamed | None = None
        self._block_xid = 0
        self._streamed: dict[int, _Streamed] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._main, name="millstream-receiver", daemon=True)

    # --- for other threads --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self, *, final: Lsn | None = None) -> None:
        """End the thread and the connection; with `final`, tell the source that position before."""
        with self._lock:
            if final is not None:
                self._confirmed = max(self._confirmed, final)
            self._stop = True
            self._lock.notify_all()
        self._wake()
        self._thread.join()

    def take(self, timeout_s: float) -> Item | None:
        """The next item in the stream's order; None when none came in time.

        Raises:
            MillstreamError: the connection broke; what came before it was handed out first.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._items:
                if self._failure is not None:
                    raise self._failure
                left = deadline - time.monotonic()
                if left <= 0 or self._ended:
                    return None
                self._hungry = True
                self._lock.wait(left)
            self._hungry = False
            item = self._items.popleft()
            if isinstance(item, Run):
                was_full = self._queued_bytes > self._buffer_bytes_max
                self._queued_bytes -= item.size_bytes
                if was_full:
                    self._lock.notify_all()
            return item

    def nudge(self) -> None:
        """Let a `take` that waits return at once."""
        with self._lock:
            self._items.append(Position(Lsn(0)))
            self._lock.notify_all()

    def confirm(self, lsn: Lsn, *, now: bool = False) -> None:
        """Let the source know, with the next status, that everything up to `lsn` is durable."""
        self._confirmed = max(self._confirmed, lsn)
        if now:
            self._told_at = 0.0
            self._wake()

    def ask_position(self) -> None:
        """Have the source say how far it has sent; a `Position` follows."""
        self._ask = True
        self._wake()

    @property
    def confirmed(self) -> Lsn:
        """What the source is told."""
        return self._confirmed

    @property
    def received(self) -> Lsn:
        """How far the stream was read."""
        return self._received

    # --- the thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._read()
        except MillstreamError as error:
            self._fail(error)
        except psycopg.Error as error:
            self._fail(translate(error))
        except OSError as error:
            self._fail(SourceUnreachable(f"the replication connection broke: {error}"))
        finally:
            with contextlib.suppress(Exception):
                self._connection.close()
            for streamed in self._streamed.values():
                streamed.file.remove()
            with self._lock:
                self._ended = True
                self._lock.notify_all()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _fail(self, error: MillstreamError) -> None:
        with self._lock:
            self._failure = error

    def _read(self) -> None:
        get, socket = self._pg.get_copy_data, self._pg.socket
        poll = select.poll()
        poll.register(socket, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self._send_status()
        while True:
            count, data = get(1)
            if count > 0:
                if data[0] == _XLOG_DATA:
                    self._on_message(data)
                elif data[0] == _KEEPALIVE:
                    self._on_keepalive(bytes(data))
                else:
                    raise ProtocolViolation(f"an unknown replication message {chr(data[0])!r}")
                continue
            if count < 0:
                raise translate_result(self._pg.get_result() or _no_result())
            self._hand_over()
            if self._stop:
                self._send_status()
                self._say_goodbye()
                return
            due = self._told_at + (1.0 if self._confirmed > self._told else self._status_s)
            for descriptor, _ in poll.poll(max(0.0, min(due - time.monotonic(), 1.0)) * 1000):
                if descriptor == socket:
                    self._pg.consume_input()
                else:
                    os.read(self._wake_read, 4096)
            self._send_due_status()

    def _on_message(self, data: Payload) -> None:
        kind = data[HEADER_BYTES]
        if self._block is not None:
            if kind == _STREAM_STOP:
                self._block = None
                return
            if kind in _DESCRIPTIONS:
                message = parse_message(bytes(data[HEADER_BYTES:]), streamed=True)
                assert isinstance(message, Relation | Type)
                self._put(StreamedRelation(self._block_xid, message))
            self._block.file.append(data)
            return
        if self._own is not None:
            if kind == _COMMIT_KIND:
                self._end_own(data)
            else:
                self._own.append(data)
            return
        if kind in _STREAM_KINDS:
            self._on_streamed(kind, bytes(data[HEADER_BYTES:]))
            return
        self._open.append(data)
        self._open_bytes += len(data)
        if kind == _COMMIT_KIND or (kind == _MESSAGE_KIND and not data[HEADER_BYTES + 1] & 1):
            self._whole = len(self._open)
            self._whole_bytes = self._open_bytes
            if self._hungry or self._open_bytes > RUN_BYTES_MAX:
                self._hand_over()
            if time.monotonic() - self._told_at > self._status_s:
                self._send_due_status()
        elif self._open_bytes > self._buffer_bytes_max:
            self._begin_own()

    def _on_keepalive(self, data: bytes) -> None:
        (end,) = struct.unpack_from(">Q", data, 1)
        self.source_end = max(self.source_end, Lsn(end))
        self._hand_over()
        self._put(Position(Lsn(end)))
        self._received = max(self._received, Lsn(end))
        if data[17]:
            self._send_status()
        else:
            self._send_due_status()

    def _on_streamed(self, kind: int, message: bytes) -> None:
        self._hand_over()
        if kind == _STREAM_START:
            (self._block_xid,) = struct.unpack_from(">I", message, 1)
            self._block = self._streamed.get(self._block_xid)
            if self._block is None:
                self._block = self._streamed[self._block_xid] = _Streamed(self._spill.create(self._block_xid))
        elif kind == _STREAM_COMMIT:
            commit = parse_message(message)
            assert isinstance(commit, StreamCommit)
            streamed = self._streamed.pop(commit.xid, None)
            if streamed is None:
                raise ProtocolViolation(f"the streamed transaction {commit.xid} commits, but never began")
            streamed.file.flush()
            self._put(Spilled(commit, streamed.file, frozenset(streamed.aborted), streamed=True))
            self._received = max(self._received, commit.end_lsn)
        else:
            xid, subxid = _PAIR.unpack_from(message, 1)
            open_one = self._streamed.get(xid)
            if open_one is not None and xid == subxid:
                self._streamed.pop(xid).file.remove()
            elif open_one is not None:
                open_one.aborted.add(subxid)
            self._put(StreamedAbort(xid))

    def _begin_own(self) -> None:
        """Move the transaction that is being received from memory to a file."""
        self._hand_over()
        begin = self._open[0]
        (xid,) = struct.unpack_from(">I", begin, HEADER_BYTES + 17)
        self._own = self._spill.create(xid)
        self._own_begin = begin
        for data in self._open[1:]:
            self._own.append(data)
        self._open, self._open_bytes = [], 0

    def _end_own(self, data: Payload) -> None:
        assert self._own is not None
        flags, lsn, end, time_us = _COMMIT.unpack_from(data, HEADER_BYTES + 1)
        (xid,) = struct.unpack_from(">I", self._own_begin, HEADER_BYTES + 17)
        self._own.flush()
        commit = StreamCommit(xid, flags, Lsn(lsn), Lsn(end), time_us + _POSTGRES_EPOCH_US)
        self._put(Spilled(commit, self._own, frozenset(), streamed=False))
        self._received = max(self._received, Lsn(end))
        self._own = None

    def _hand_over(self) -> None:
        """Put the whole transactions received so far into the queue; wait while it is full."""
        if not self._whole:
            return
        whole = self._open[: self._whole]
        self._open = self._open[self._whole :]
        run = Run(whole, self._whole_bytes)
        last = whole[-1]
        if last[HEADER_BYTES] == _COMMIT_KIND:
            self._received = max(self._received, Lsn(_COMMIT.unpack_from(last, HEADER_BYTES + 1)[2]))
        self._open_bytes -= self._whole_bytes
        self._whole = self._whole_bytes = 0
        self._put(run)
        while True:
            with self._lock:
                if self._queued_bytes <= self._buffer_bytes_max or self._stop:
                    return
                self._lock.wait(1.0)
            # The sink stalls. The source would take silence for a dead peer, so it hears where we stand.
            self._send_due_status()

    def _put(self, item: Item) -> None:
        with self._lock:
            if isinstance(item, Run):
                self._queued_bytes += item.size_bytes
            elif isinstance(item, Position) and self._items and isinstance(self._items[-1], Position):
                self._items.pop()
            self._items.append(item)
            if self._hungry:
                self._hungry = False
                self._lock.notify_all()

    def _send_due_status(self) -> None:
        quiet_s = time.monotonic() - self._told_at
        if self._ask or quiet_s >= (1.0 if self._confirmed > self._told else self._status_s):
            self._send_status()

    def _send_status(self) -> None:
        confirmed = self._confirmed
        written = max(self._received, confirmed)
        now_us = time.time_ns() // 1000 - _POSTGRES_EPOCH_US
        ask, self._ask = self._ask, False
        self._pg.put_copy_data(_STATUS.pack(b"r", written, confirmed, confirmed, now_us, int(ask)))
        self._pg.flush()
        self._told, self._told_at = confirmed, time.monotonic()

    def _say_goodbye(self) -> None:
        """End COPY, so that the server takes in the last status before the connection goes."""
        with contextlib.suppress(psycopg.Error):
            self._pg.put_copy_end()
            self._pg.flush()
            deadline = time.monotonic() + 2.0
            poll = select.poll()
            poll.register(self._pg.socket, select.POLLIN)
            while time.monotonic() < deadline:
                count, _ = self._pg.get_copy_data(1)
                if count < 0:
                    return
                if count == 0 and poll.poll(100):
                    self._pg.consume_input()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")


def _no_result() -> pq.abc.PGresult:
    raise SourceUnreachable("the replication connection was closed by the server")


_XLOG_DATA, _KEEPALIVE = ord("w"), ord("k")
_COMMIT_KIND, _MESSAGE_KIND = ord("C"), ord("M")
_STREAM_START, _STREAM_STOP, _STREAM_COMMIT, _STREAM_ABORT = ord("S"), ord("E"), ord("c"), ord("A")
_STREAM_KINDS: Final = frozenset(b"ScA")
_DESCRIPTIONS: Final = frozenset(b"RY")
