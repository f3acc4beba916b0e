"""The reader of the source's messages: one thread that takes messages as they come and reports how far the log is.

It looks only at each message's kind, and at whole blocks at a time. It hands on whole transactions in runs;
`large_transactions` writes the others to spill files. It owns the connection, so everything sent to the source
goes through it. It sends standby status with the greatest position that `confirm` was given and never a byte more, even
while its items aren't taken.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from millstream.capture.column_rules.apply_to_changes import RuleMessages
from millstream.capture.stream._turns import ask_for_short_turns
from millstream.capture.stream.frames import KEEPALIVE, Block
from millstream.capture.stream.large_transactions import COMMIT_FIELDS, LargeItem, LargeTransactions
from millstream.capture.stream.message_kinds import COMMIT, MARKS, MAY_END, NOT_ORDINARY, Marks, next_marked
from millstream.capture.stream.replication_connection import Wire
from millstream.capture.stream.spill_files import SpillFolder
from millstream.codec.pgoutput import MessageRun
from millstream.errors import ProtocolViolation
from millstream.model.positions import Lsn
from millstream.workers import Worker

# Runs under load: each costs about two milliseconds, whatever is in it, from its decoding to its fsync.
_RUN_SMALL_BYTES: Final = 32 << 10
_RUN_LARGE_BYTES: Final = 4 << 20
_RUN_EVERY_S: Final = 0.04
"""A run of medium size waits for more to come, for this long after the run before …"""
_SILENCE_S: Final = 0.004  # with two busy cores the source's process may lack one for 3 ms
"""… unless nothing more has come for so long."""
_SMALL_RUN_EVERY_S: Final = 0.003
"""The wait of a small run: a transaction that comes alone doesn't wait, and a thousand a second don't take a whole
core."""
_GATHER_S: Final = 0.01
"""How long to read on without other work: confirmations, and waking a waiting `take`, are late by as much."""


@dataclass(frozen=True, slots=True)
class TransactionRun:
    """Whole transactions (and messages outside of any), in order."""

    pieces: tuple[MessageRun, ...]
    size_bytes: int

    @property
    def messages(self) -> MessageRun:
        """All messages in one run, a copy. The receiver has no time for that: the source waits while it works."""
        return MessageRun.joined(self.pieces)


@dataclass(frozen=True, slots=True)
class Position:
    """Everything that committed at or below this LSN has been handed on."""

    lsn: Lsn


Item = TransactionRun | Position | LargeItem


class Receiver:
    """Reads one connection until it's stopped or broken.

    Args:
        wire: the connection: a replication stream, or chunks of a backlog; owned from here on.
        confirmed: the position that may be reported to the source at once.
        buffer_bytes_max: undecoded bytes in memory beyond which the source has to wait.
        run_bytes_max: bytes of whole transactions from which on they are handed on together.

    Concurrency: `take`, `confirm`, `waiting`, `ask_position` and `stop` from any thread.
    """

    def __init__(
        self,
        wire: Wire,
        spill: SpillFolder,
        *,
        confirmed: Lsn,
        buffer_bytes_max: int,
        run_bytes_max: int,
        status_s: float,
    ) -> None:
        self._wire = wire
        self._rules: RuleMessages | None = None
        self._large = LargeTransactions(spill, self._put, memory_bytes_max=buffer_bytes_max)
        self._buffer_bytes_max = buffer_bytes_max
        self._run_bytes_max = run_bytes_max
        self._status_s = status_s
        self._news_s = min(1.0, status_s)
        """Like `status_s`, if there is something to report. To an impatient source a second is silence."""
        self._lock = threading.Condition()
        self._items: deque[Item] = deque()
        self._queued_bytes = 0
        self._hungry = self._nudged = False
        self._failure: Exception | None = None
        self._ended = False
        self._stop = False
        self._ask = False
        self._confirmed = confirmed
        self._told = Lsn(0)
        self._told_at = 0.0
        self._received = confirmed
        self._whole_end = confirmed
        self._position = confirmed
        self.source_end = confirmed
        self._whole: list[MessageRun] = []
        """Whole transactions that wait to be handed on."""
        self._whole_bytes = 0
        self._handed_at = self._came_at = 0.0
        self._open: list[MessageRun] = []
        """The received part of the transaction after them."""
        self._open_bytes = 0
        self._wake_read = self._wake_write = -1
        """A pipe that wakes the thread, open while it runs."""
        self._worker = Worker("millstream-receiver", self._main)

    # --- for other threads --------------------------------------------------------------------------------------

    def start(self, rules: RuleMessages | None = None) -> None:
        """Begin to read; apply the rules of columns, if there are any, before anything else."""
        self._rules = rules
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._worker.start()

    def stop(self, *, final: Lsn | None = None) -> None:
        """End the thread and the connection; with `final`, report that position to the source first."""
        with self._lock:
            if final is not None:
                self._confirmed = max(self._confirmed, final)
            self._stop = True
            self._lock.notify_all()
        self._wake()
        self._worker.join()

    def take(self, timeout_s: float) -> Item | None:
        """Return the next item in the stream's order; None when none came in time, or before a `nudge`.

        Raises:
            MillstreamError: the connection broke, or there is no space for a large transaction; earlier items are
                returned first.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._items:
                if self._failure is not None:
                    raise self._failure
                if not self._hungry:  # also if a nudge ends this call: a caller that is nudged each time wants items
                    self._hungry = True
                    if self._whole:
                        self._wake()  # it waits for bytes, and its whole transactions wait for this `take`
                left = deadline - time.monotonic()
                if left <= 0 or self._ended or self._nudged:
                    self._nudged = False
                    return None
                self._lock.wait(left)
            self._hungry = self._nudged = False
            item = self._items.popleft()
            if isinstance(item, TransactionRun):
                was_full = self._queued_bytes > self._buffer_bytes_max
                self._queued_bytes -= item.size_bytes
                if was_full:
                    self._lock.notify_all()
            return item

    def nudge(self) -> None:
        """Let a waiting `take` return at once, or the next one that would wait."""
        with self._lock:
            self._nudged = True
            self._lock.notify_all()

    def confirm(self, lsn: Lsn, *, now: bool = False) -> None:
        """Report to the source, with the next status, that everything up to `lsn` is durable."""
        self._confirmed = max(self._confirmed, lsn)
        if now:
            self._told_at = 0.0
            self._wake()

    def ask_position(self) -> None:
        """Ask the source how far it has sent; a `Position` follows."""
        self._ask = True
        self._wake()

    @property
    def received(self) -> Lsn:
        """The position up to which the stream was read."""
        return self._received

    # --- the thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        ask_for_short_turns()
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - also of a bug of ours: who takes has to hear of it
            self._fail(error)
        finally:
            with contextlib.suppress(Exception):
                self._wire.close()
            self._large.close()
            with self._lock:
                self._ended = True
                self._lock.notify_all()
                # A byte written to these descriptors from here on would go into another file that has reused the
                # numbers.
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_read = self._wake_write = -1

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = error

    def _read(self) -> None:
        socket = self._wire.fileno()
        poll = select.poll()
        poll.register(socket, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self._send_status()
        gather_s = 0.0
        while True:
            block = self._wire.read(gather_s)
            now = time.monotonic()
            if block is not None:
                self._came_at = now
                self._on_block(block)
            due = self._is_run_due(now)
            if due:
                self._hand_over()
            self._send_due_status()
            if self._stop:
                self._hand_over()
                self._send_status()
                self._wire.say_goodbye()
                return
            gather_s = 0.0 if block is None or due else self._gather_s(now)
            if block is not None:
                continue
            for descriptor, _ in poll.poll(self._quiet_s(now) * 1000):
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)

    def _is_run_due(self, now: float) -> bool:
        """Return whether the waiting whole transactions should be handed on, rather than wait for more."""
        if self._whole_bytes >= self._run_bytes_max:
            return True
        if not self._whole or not self._hungry:
            return False
        if self._whole_bytes >= _RUN_LARGE_BYTES:
            return True
        return now >= self._due_at()

    def _due_at(self) -> float:
        """Return when the next run begins, if nothing more comes until then."""
        if self._whole_bytes < _RUN_SMALL_BYTES:
            return self._handed_at + _SMALL_RUN_EVERY_S
        return min(self._handed_at + _RUN_EVERY_S, self._came_at + _SILENCE_S)

    def _gather_s(self, now: float) -> float:
        """Return how long to do nothing but read: never beyond the moment at which a run is due."""
        if self._whole and self._hungry:
            return min(_GATHER_S, max(0.0, self._due_at() - now))
        return _GATHER_S

    def _quiet_s(self, now: float) -> float:
        """Return the longest time to wait for bytes."""
        if self._whole and self._hungry:
            return max(0.0, self._due_at() - now)
        due = self._told_at + (self._news_s if self._confirmed > self._told else self._status_s)
        return max(0.0, min(due - now, 1.0))

    # --- messages -----------------------------------------------------------------------------------------------

    def _on_block(self, block: Block) -> None:
        if self._rules is not None:
            block = self._rules.applied(block)
        if block.resends_streamed:
            self._hand_over()
            self._large.restart_streamed()
        marks = MARKS[block.kinds]
        at = 0
        while at < len(block):
            if self._large.is_in_block or self._large.is_in_whole:
                at = self._on_large(block, marks, at)
            else:
                at = self._on_ordinary(block, marks, at)

    def _on_ordinary(self, block: Block, marks: Marks, at: int) -> int:
        """Take transactions as they commit, up to a message of another kind."""
        end = next_marked(marks, NOT_ORDINARY, at)
        ends = _last_end(block, marks, at, end)
        if ends is None:
            self._keep_open(block.between(at, end))
        else:
            self._keep_open(block.between(at, ends + 1))
            self._whole += self._open
            self._whole_bytes += self._open_bytes
            self._open, self._open_bytes = [], 0
            if block.kinds[ends] == COMMIT:
                self._whole_end = Lsn(COMMIT_FIELDS.unpack_from(block.messages[ends], 1)[2])
            if self._whole_bytes >= self._run_bytes_max:
                self._hand_over()
            self._keep_open(block.between(ends + 1, end))
        if self._large.is_too_large(self._open_bytes):
            self._hand_over()
            self._large.begin_whole(self._open)
            self._open, self._open_bytes = [], 0
        if end < len(block):
            message = block.messages[end]
            if block.kinds[end] == KEEPALIVE:
                self._on_keepalive(message)
            elif not self._large.is_in_whole:
                self._hand_over()
                self._note_received(self._large.on_streamed(message))
            else:
                raise ProtocolViolation("a streamed block came in the middle of another transaction")
            end += 1
        return end

    def _keep_open(self, messages: MessageRun) -> None:
        if len(messages):
            self._open.append(messages)
            self._open_bytes += messages.span_bytes

    def _on_large(self, block: Block, marks: Marks, at: int) -> int:
        """Take messages of a large transaction, up to the first message of another kind, and that one."""
        end = self._large.append(block, marks, at)
        if end < len(block):
            if block.kinds[end] == KEEPALIVE:
                self._on_keepalive(block.messages[end])
            else:
                self._note_received(self._large.on_other(block, end))
            end += 1
        return end

    def _on_keepalive(self, data: bytes) -> None:
        (end,) = struct.unpack_from(">Q", data, 1)
        self.source_end = max(self.source_end, Lsn(end))
        if not self._open and not self._large.is_in_whole:
            self._position = max(self._position, Lsn(end))
        # The source sends one whenever it has nothing more and our position is behind: no reason to cut a run short.
        if not self._whole:
            self._put_position()
        if data[17]:
            self._send_status()
        else:
            self._send_due_status()

    def _note_received(self, end: Lsn | None) -> None:
        """Note that a large transaction was received up to its end, if it has one."""
        if end is not None:
            self._received = max(self._received, end)

    # --- handing on ----------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Put the whole transactions received so far into the queue; wait while it is full."""
        if not self._whole:
            return
        run = TransactionRun(tuple(self._whole), self._whole_bytes)
        self._received = max(self._received, self._whole_end)
        self._whole, self._whole_bytes = [], 0
        self._handed_at = time.monotonic()
        self._put(run)
        self._put_position()
        while True:
            with self._lock:
                if self._queued_bytes <= self._buffer_bytes_max or self._stop:
                    return
                self._lock.wait(self._news_s)
            # The sink stalls. The source would take silence for a dead peer, so keep sending it the status.
            self._send_due_status()

    def _put_position(self) -> None:
        """Hand on a keepalive's position if it is news; no whole transaction that lies below it waits."""
        if self._position > self._received:
            self._received = self._position
            self._put(Position(self._position))

    def _put(self, item: Item) -> None:
        with self._lock:
            if isinstance(item, TransactionRun):
                self._queued_bytes += item.size_bytes
            elif isinstance(item, Position) and self._items and isinstance(self._items[-1], Position):
                self._items.pop()
            self._items.append(item)
            if self._hungry:
                self._hungry = False
                self._lock.notify_all()

    def _send_due_status(self) -> None:
        quiet_s = time.monotonic() - self._told_at
        if self._ask or quiet_s >= (self._news_s if self._confirmed > self._told else self._status_s):
            self._send_status()

    def _send_status(self) -> None:
        confirmed = self._confirmed
        ask, self._ask = self._ask, False
        self._wire.tell(self._received, confirmed, ask=ask)
        self._told, self._told_at = confirmed, time.monotonic()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"\0")


def _last_end(block: Block, marks: Marks, at: int, end: int) -> int | None:
    """Return the last message of `[at, end)` that leaves no transaction open: a Commit, or one outside of any."""
    for number in np.flatnonzero(marks[at:end] & MAY_END)[::-1]:
        place = at + int(number)
        if block.kinds[place] == COMMIT or not block.messages.buffer[block.messages.starts[place] + 1] & 1:
            return place
    return None
