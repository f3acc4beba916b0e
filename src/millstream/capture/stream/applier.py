"""From the receiver's items to the log: decodes, submits in order, and notes what is durable (`slot_confirmation`).

One thread does all of it, so the order of submits is the order of the stream. Few submits are in flight at a time:
while the log makes one group durable the next run gathers in the receiver, and when nothing waits, a single
transaction is submitted at once. No timer is involved.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from millstream import process_metrics
from millstream.capture.stream.barrier import StreamBarrier, cut
from millstream.capture.stream.large_transactions import Spilled, StreamedRelation
from millstream.capture.stream.receiver import Item, Position, Receiver, TransactionRun
from millstream.capture.stream.slot_confirmation import SlotConfirmation
from millstream.capture.table_directory import TableDirectory
from millstream.catalog import Catalog
from millstream.codec.pgoutput import (
    RelationCache,
    decode_spilled,
    decode_transactions,
)
from millstream.errors import Overloaded, ProtocolViolation, TableUndecodable
from millstream.model.ids import SourceId
from millstream.model.operations import Ack, SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn, format_lsn
from millstream.ports import LogAppender

IN_FLIGHT_MAX: Final = 3  # one group in its fsync, one that gathers in the log, one being decoded
_SENSELESS_HINT: Final = (
    "Start capture again: nothing of the message is in the log. If the error repeats, a proxy alters the stream, "
    "or the server's output plugin isn't PostgreSQL's own."
)


class Stopped(Exception):
    """Not an error: capture was stopped while it waited, for its slot or for room in the log."""


class CopySink(Protocol):
    """The applier's calls to the table copy, in the order of the log."""

    def note(self, ops: WriteOps | SpilledOp) -> None:
        """Note operations that are about to be submitted."""

    def passed(self, lsn: Lsn) -> None:
        """Note that everything that committed at or below `lsn` has been submitted."""

    def ready(self) -> Iterable[tuple[WriteOps | SpilledOp, Callable[[], None]]]:
        """Return operations of the copy that may enter now, each with a callback for when it is durable."""

    def discard(self, relation_oid: int) -> None:
        """End the copy of a table that was quarantined."""


@dataclass(slots=True)
class _InFlight:
    future: Future[Ack] | None
    """None: only a position."""
    end: Lsn
    records: int
    done: Callable[[], None] | None
    began_s: float = 0.0
    """When it was submitted, on the monotonic clock."""


class Applier:
    """Moves items of one receiver into the log.

    Args:
        receiver: source of the items; it gets the position to confirm.
        catalog: stores positions that only keepalives moved, before they are confirmed.
        reached: X; transactions that end at or below it are dropped whole.
        settling: done once the log up to there is held as its stream asks; nothing more is confirmed before. None: it
            is.
        confirmed: position that the source has, at or below X.
        shipped_within_s: time in which copies of the catalog come to other nodes; 0 if there are none.
        hold: the barrier, if the stream has one.
        before_each: called before an item is looked at; if it raises, the item is left out, and the session ends.
        stopped: asked while the log has no room.

    Not thread-safe.
    """

    def __init__(
        self,
        receiver: Receiver,
        log: LogAppender,
        directory: TableDirectory,
        catalog: Catalog,
        *,
        reached: Lsn,
        settling: Future[Ack] | None = None,
        confirmed: Lsn,
        shipped_within_s: float,
        copies: CopySink,
        hold: StreamBarrier,
        before_each: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._receiver = receiver
        label = str(directory.stream)
        self._captured = process_metrics.CAPTURED_RECORDS.of(label)
        self._commits = process_metrics.CAPTURE_COMMIT_SECONDS.of(label)
        self._log = log
        self._directory = directory
        self._copies = copies
        self._hold = hold
        self._kept: Item | None = None
        """An item, or a part of one, that was taken and has to wait."""
        self._kept_from = Lsn(0)
        """LSN of its first commit."""
        self._before_each = before_each
        self._stopped = stopped
        self._relations = RelationCache()
        self._in_flight: deque[_InFlight] = deque()
        self._after = reached
        self._submitted = Lsn(0)
        """The end of the last operation of the stream that was submitted: later operations enter the log only after
        it."""
        # Everything up to here is in the log: the log reported so, or there was nothing of ours.
        durable = reached if settling is None else confirmed
        self.slot: Final = SlotConfirmation(
            receiver,
            catalog,
            directory.source,
            durable=durable,
            logged=log.reached().get(directory.source, Lsn(0)),
            confirmed=confirmed,
            shipped_within_s=shipped_within_s,
        )
        """How far the log is durable, and which position the source may be told."""
        self.passed = reached
        self.records = 0
        copies.passed(reached)
        if settling is not None:
            self._in_flight.append(_InFlight(settling, reached, 0, None))
            settling.add_done_callback(self._on_done)

    @property
    def source(self) -> SourceId:
        """The source whose stream this is."""
        return self._directory.source

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._in_flight

    def step(self, timeout_s: float) -> None:
        """Do the work at hand; if there is none, wait for at most `timeout_s`.

        Raises:
            MillstreamError: an error of the connection, the log, or decoding. Submitted operations may still become
                durable:
                call `drain` before another applier begins.
            Stopped: while the log had no room.
        """
        self._settle()
        if self._in_flight_count() >= IN_FLIGHT_MAX:
            oldest = next(entry.future for entry in self._in_flight if entry.future is not None)
            wait([oldest], timeout=timeout_s)
            return
        self._submit_copies()
        try:
            item = self._take(timeout_s)
            if item is not None and not (isinstance(item, Position) and item.lsn <= self.passed):
                self._before_each()
                self._apply(item)
        except ProtocolViolation as error:
            place = format_lsn(self.passed)
            raise ProtocolViolation(
                f"after {place} the source sent an invalid message: {error.message}",
                hint=_SENSELESS_HINT,
                **error.details | {"lsn": place},
            ) from error

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight, successes and failures alike; False if time ran out before."""
        futures = [entry.future for entry in self._in_flight if entry.future is not None]
        if wait(futures, timeout=timeout_s).not_done:
            return False
        if any(future.exception() is not None for future in futures):
            self._in_flight.clear()
        self._settle()
        return True

    def _take(self, timeout_s: float) -> Item | None:
        """Return the next item, or the part of it that needn't wait."""
        bound = self._hold.bound
        if self._kept is not None and bound is not None and self._kept_from >= bound:
            if self._kept_from > self.passed:
                self._pass(self._kept_from)  # every commit below is submitted: a copy may wait for that
            else:
                self._hold.wait(timeout_s)
            return None
        item, self._kept = self._kept or self._receiver.take(timeout_s), None
        if item is not None and (bound := self._hold.bound) is not None:
            item, self._kept, self._kept_from = cut(item, bound)
        return item

    # --- items -------------------------------------------------------------------------------------------------

    def _apply(self, item: Item) -> None:
        if isinstance(item, TransactionRun):
            self._apply_run(item)
        elif isinstance(item, Position):
            self._pass(item.lsn)
            self._wait_for_position(item.lsn)
        elif isinstance(item, StreamedRelation):
            self._relations.note_streamed(item.xid, item.message)
        elif isinstance(item, Spilled):
            self._apply_spilled(item)
        else:
            self._relations.abort_streamed(item.xid)

    def _apply_run(self, run: TransactionRun) -> None:
        messages = run.messages
        ops: WriteOps | None = None
        while ops is None:
            try:
                ops = decode_transactions(messages, self._directory, self._relations, after=self._after)
            except TableUndecodable as error:
                self._quarantined(error)
        end = ops.reached.get(self.source, Lsn(0))
        if ops.operations.num_rows and ops.tables:
            ops = replace(ops, tables=self._on_shards(ops.tables))
            self._let_copies_in(Lsn(ops.operations.column("commit_lsn")[0].as_py()))
            ops = self._directory.raw_past.applied_to_run(ops)
            self._copies.note(ops)
            self._submit(ops, end, None)
        else:
            self._wait_for_position(end)
        self._pass(end)

    def _apply_spilled(self, item: Spilled) -> None:
        commit = item.commit
        op = self._decode_spilled(item)
        if item.streamed:
            self._relations.commit_streamed(commit.xid)
        if op is None or commit.end_lsn <= self._after:
            item.file.remove()
            self._wait_for_position(commit.end_lsn)
        else:
            op = self._spilled_on_shards(op)
            self._let_copies_in(commit.commit_lsn)
            op = self._directory.raw_past.applied_to_spilled(op)
            self._copies.note(op)
            self._submit(op, commit.end_lsn, item.file.remove)
        self._pass(commit.end_lsn)

    def _decode_spilled(self, item: Spilled) -> SpilledOp | None:
        read, aborted, streamed = item.file.runs, item.aborted, item.streamed
        while True:
            try:
                return decode_spilled(
                    read, self._directory, self._relations, item.commit, aborted=aborted, streamed=streamed
                )
            except TableUndecodable as error:
                self._quarantined(error)

    def _quarantined(self, error: TableUndecodable) -> None:
        oid = int(error.details["relation_oid"])
        row = self._directory.quarantine(oid, str(error.details.get("reason", error.message)))
        if row is None:
            raise error
        self._copies.discard(row.relation_oid)

    def _on_shards(self, tables: tuple[TableRows, ...]) -> tuple[TableRows, ...]:
        return tuple(replace(t, shard=self._directory.shard_of(t.schema.table_id)) for t in tables)

    def _spilled_on_shards(self, op: SpilledOp) -> SpilledOp:
        counts = {(self._directory.shard_of(table), table): count for (_, table), count in op.counts.items()}
        chunks = op.chunks
        return replace(op, counts=counts, chunks=lambda: (self._on_shards(tables) for tables in chunks()))

    # --- what is in flight -------------------------------------------------------------------------------------

    def _submit(self, ops: WriteOps | SpilledOp, end: Lsn, done: Callable[[], None] | None) -> None:
        if self._submitted:
            ops = replace(ops, behind={self.source: self._submitted})
        future = self._enter(ops)
        self._submitted = max(self._submitted, end)
        self._in_flight.append(_InFlight(future, end, ops.row_count, done, time.monotonic()))
        future.add_done_callback(self._on_done)

    def _enter(self, ops: WriteOps | SpilledOp) -> Future[Ack]:
        try:
            return self._log.submit(ops, gives_up=self._stopped)
        except Overloaded:
            raise Stopped from None

    def _on_done(self, _: Future[Ack]) -> None:
        self._receiver.nudge()
        if self._hold.bound is not None:
            self._hold.nudge()

    def _let_copies_in(self, commit_lsn: Lsn) -> None:
        """Let chunks enter before a commit at that LSN if they don't see it and everything that they see is in the log.

        After the commit they would have to be read again if it touches their table as a whole: for ever, if such
        commits follow one another.
        """
        self._pass(commit_lsn)
        self._submit_copies()

    def _submit_copies(self) -> None:
        for ops, done in self._copies.ready():
            # A chunk enters with everything that its snapshot sees: the log never goes on with a history that lacks
            # some of that.
            self._submit(replace(ops, reached={self.source: self.passed}), self.passed, partial(self._copied, done))

    def _copied(self, done: Callable[[], None]) -> None:
        # Before the catalog: a log without the chunk must not pass for one that has the copy.
        self.slot.store_logged()
        done()

    def _pass(self, lsn: Lsn) -> None:
        if lsn > self.passed:
            self.passed = lsn
            self._copies.passed(lsn)

    def _wait_for_position(self, lsn: Lsn) -> None:
        """Count `lsn` as durable once everything before it is."""
        if not self._in_flight:
            self.slot.note_durable(lsn, in_log=False)
            self.slot.store_if_due()
        elif self._in_flight[-1].future is None:
            self._in_flight[-1].end = max(self._in_flight[-1].end, lsn)
        else:
            self._in_flight.append(_InFlight(None, lsn, 0, None))

    def _in_flight_count(self) -> int:
        return sum(1 for entry in self._in_flight if entry.future is not None)

    def _settle(self) -> None:
        """Remove operations that have become durable from the list, and report to the source."""
        settled = False
        while self._in_flight:
            entry = self._in_flight[0]
            if entry.future is not None:
                if not entry.future.done():
                    break
                entry.future.result()
            self._in_flight.popleft()
            self.slot.note_durable(entry.end, in_log=entry.future is not None)
            if entry.records:
                self.slot.note_logged(entry.end)
                self.records += entry.records
                self._captured.add(entry.records)
                self._commits.observe(time.monotonic() - entry.began_s)
            settled = True
            if entry.done is not None:
                entry.done()
        if settled:
            self.slot.confirm()
        self.slot.store_if_due()
