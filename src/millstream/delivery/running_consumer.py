"""One consumer at work: its machine, its place in the log, and the records of its dead letters."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from millstream.delivery.ack_ids import AckIds
from millstream.delivery.backfill.backfill_control import Backfilling, Notes
from millstream.delivery.consumer_store import Letter, Stored, died_letters, letters_of
from millstream.delivery.records.dropped_records import read_again
from millstream.delivery.records.record_messages import KnownRow, Origin, merged, record_of
from millstream.delivery.records.record_reader import ConsumerReader, Emptied, Key
from millstream.delivery.wait_clock import now_ms
from millstream.errors import CursorExpired, LogTruncated, MillstreamError, OffsetExpired
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq, StreamToken
from millstream.model.records import Op
from millstream.process_metrics import CONSUMER_DELIVERY_SECONDS, CONSUMER_REQUEST_SECONDS
from millstream.protocol.delivery import (
    Change,
    Consumer,
    DeadLetter,
    Delivery,
    DeliveryId,
    LatestConsumer,
    Limits,
    Message,
    Phase,
    Status,
)
from millstream.protocol.delivery.messages import ANSWER_BYTES, UNSETTLED_BYTES_MAX, Kind
from millstream.wal.backlog import backlog_of_tables
from millstream.wal.files import error_of_os
from millstream.wal.reader import StreamReader

_SLICE_S: Final = 0.2
"""How long the log is read before acknowledgements get their turn."""
_QUARANTINE_FRESH_S: Final = 1.0
_PUSHED_WAIT_MS: Final = 4 * 3_600_000
"""How long a pusher may have a message: more than its longest request takes. It returns what it doesn't deliver."""
_UNSETTLED_MAX: Final = 100_000
"""Number of unsettled messages in memory."""


class Waiter:
    """A `receive` that waits. `leave` ends it from any thread: its client has gone."""

    def __init__(self) -> None:
        self.wake: Final = threading.Event()
        self.is_gone = False

    def leave(self) -> None:
        """End the wait; nothing is delivered."""
        self.is_gone = True
        self.wake.set()


class _Look:
    """A look for newer messages of keys in the rest of the log."""

    def __init__(self, upto: int, keys: set[Key], records: ConsumerReader, after: int) -> None:
        self.upto: Final = upto
        self.left: Final = keys
        self.newer: set[Key] = set()
        self.truncated: set[Emptied] = set()
        self.frames: Final = records.newer(after, upto, keys)


class Running:
    """One consumer.

    Args:
        stream: the stream's name.
        stream_id: its id.
        stored: the consumer as the store has it; its state belongs to the machine from now on.
        reader: the log, for this consumer alone.
        key: the home's secret.
        note: stores changes.
        quarantined: returns the ids of the tables that are quarantined now, with their names.
        notes: where the state of backfills is kept; None: nothing of it changes here.
        unsettled_bytes_max: most bytes of unsettled messages in memory; of kind `changes` those of their records,
            which are read again above it.

    Concurrency: the caller holds `lock`, except for `wake`.
    """

    def __init__(
        self,
        stream: str,
        stream_id: StreamId,
        stored: Stored,
        reader: StreamReader,
        key: bytes,
        note: Callable[[str, list[Change], dict[str, Letter]], None],
        quarantined: Callable[[], Mapping[TableId, str]],
        notes: Notes | None = None,
        *,
        unsettled_bytes_max: int = UNSETTLED_BYTES_MAX,
    ) -> None:
        self.definition: Final = stored.definition
        self.incarnation: Final = stored.incarnation
        self.ids: Final = AckIds(key, stored.incarnation, stored.bounds)
        self.reader: Final = reader
        self.lock: Final = threading.Lock()
        self.is_deleted = False
        self.is_closed = False
        """Whether this process no longer has the consumers."""
        self.waiters: set[Waiter] = set()
        self.error: str | None = None
        self.push_error: str | None = None
        """The present error of the push sink."""
        self.is_removed = False
        """Whether the consumer isn't in `millstream.toml` any longer, and is paused therefore."""
        self.refusal: MillstreamError | None = None
        """The reason why the consumer can't be as `millstream.toml` has it."""
        self._stream = stream
        self._stream_id = stream_id
        self._note = note
        self._quarantined = quarantined
        self._held: Mapping[TableId, str] = {}
        self._held_at = 0.0
        self._letters = stored.letters
        self._look: _Look | None = None
        self._seen = 0
        """The greatest `seq` of the records that were read."""
        self._stored: Final = stored
        self._records = ConsumerReader(stream, reader, stored.definition, stored.earlier)
        limits = Limits(
            ack_wait_ms=self.definition.ack_wait_ms if self.definition.sink is None else _PUSHED_WAIT_MS,
            max_deliver=0 if self.definition.sink is not None else self.definition.max_deliver,  # the pusher counts
            max_ack_pending=self.definition.max_ack_pending,
            unsettled_max=_UNSETTLED_MAX,
            unsettled_bytes_max=unsettled_bytes_max,
            records_bytes_max=None if self.definition.kind is Kind.LATEST else unsettled_bytes_max,
        )
        now = now_ms()
        run = max(stored.state.run + 1, now)
        self.machine: Final = (
            LatestConsumer(limits, stored.state, run=run, now=now, merge=self._merged)
            if self.definition.kind is Kind.LATEST
            else Consumer(limits, stored.state, run=run, now=now)
        )
        self.backfills: Final = Backfilling(stream, stored, key, limits, self.machine, notes)
        self.follow_log()

    def wake(self) -> None:
        """Let every waiting `receive` look again."""
        for waiter in tuple(self.waiters):
            waiter.wake.set()

    def save(self) -> None:
        """Store the machine's changes, and those of a backfill."""
        if self.is_deleted:
            return
        self.backfills.bury()
        try:
            self._save_own()
        finally:  # the store takes nothing after a failure, and its next log has the machines' whole state
            self.backfills.save()

    def _save_own(self) -> None:
        died = [self.machine.dead[id_].message for id_ in self.machine.dead.keys() - self._letters.keys()]
        known = self._read_again(died).values()  # before the changes are taken: a failure leaves them where they are
        changes = self.machine.take_changes()
        if not changes:
            return
        letters = letters_of(known) | died_letters(changes)
        self._letters.update(letters)
        kept = self.machine.dead.keys() | self.machine.retried.keys()
        if len(self._letters) > len(kept):
            for id_ in self._letters.keys() - kept:
                del self._letters[id_]
        self._note(self.definition.name, changes, letters)

    def stored(self) -> Stored:
        """Return the consumer for the store; `save` was called."""
        return replace(
            self._stored,
            state=self.machine.snapshot(),
            letters=dict(self._letters),
            backfill=self.backfills.current(),
            ended=list(self.backfills.ended),
        )

    def follow_log(self) -> None:
        """Move the cursor back if it is beyond the log's end: another node's log was promoted."""
        if self.machine.cut_back(int(self.reader.persisted_upto())):
            self._forget_earlier()
            self.backfills.restart()

    # --- receiving ---------------------------------------------------------------------------------------------------

    def take(self, count: int) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that can be delivered now, and whether there is more of the log to read first.

        Raises:
            CursorExpired: the consumer was cut off.
            CorruptWal …: the log can't be read.
            MillstreamError (`disk_full`, `io_failed`): the consumer's state can't be kept; nothing is delivered.
        """
        ids = self.backfills.ids() if self.backfills.is_running else self.ids
        answer, is_more = self.deliver(count)
        return [self._shown(delivery, ids) for delivery in answer], is_more

    def deliver(self, count: int) -> tuple[list[Delivery], bool]:
        """Return as `take`, in the machine's form."""
        machine = self.machine
        self.check_kept()
        self.expire()
        if self.backfills.is_running:
            machine = self.delivering
            rows = self._kept(machine, self.backfills.receive(now_ms(), count))
            return rows, not rows and not self.backfills.is_running
        self._hold_quarantined()
        is_more = self._read(count)
        answer = self._kept(machine, machine.receive(now_ms(), count))
        self.check_kept()
        self._time(answer)
        return answer, is_more

    def _kept(self, machine: Consumer, answer: list[Delivery]) -> list[Delivery]:
        """Save what a machine delivered, and return it. If that fails, the messages return at once: nothing is delivered."""
        try:
            again = self._read_again(delivery.message for delivery in answer)
            self.save()
            if again:
                answer = [each._replace(message=again.get(each.message.position, each.message)) for each in answer]
            return answer
        except MillstreamError:
            machine.give_back([delivery.delivery_id for delivery in answer])
            with suppress(MillstreamError):  # the store writes its log again, whole
                self.save()
            raise

    def _read_again(self, messages: Iterable[Message]) -> dict[int, Message]:
        """Return those of some messages whose records the machine dropped, with them, by position."""
        dropped = {each.position: each for each in messages if each.origin is None and each.id not in self._letters}
        if not dropped:
            return {}
        return read_again(dropped, ConsumerReader(self._stream, self.reader, self.definition, self._stored.earlier))

    def begin_pushing(self) -> None:
        """Return the messages that an earlier pusher had: this process alone delivers to the sink."""
        self._restore()
        self.machine.return_all()
        self.backfills.return_all()
        self.save()

    def _read(self, count: int) -> bool:
        """Offer messages until the machine has enough; return whether it stopped before that and before the end."""
        machine, until = self.machine, time.monotonic() + _SLICE_S
        try:
            if isinstance(machine, LatestConsumer):
                machine.read_to(int(self.reader.persisted_upto()))
                if not self._look_ahead(machine, until):
                    return True
            while machine.wants(count):
                step = self._records.read(machine.read_upto)
                if step is None:
                    if machine.read_upto < self.reader.persisted_upto():
                        continue  # what was read ended where the log did when that began
                    if isinstance(machine, LatestConsumer):
                        machine.read_to(machine.read_upto)
                    break
                machine.offer(step.messages, step.upto)
                self._seen = max(self._seen, step.seen)
                if self._records.quarantined:
                    self._hold_quarantined()
                if time.monotonic() > until:
                    return True
            if isinstance(machine, LatestConsumer) and machine.looks_upto is not None:
                return True
        except OffsetExpired:
            machine.cut_off()
            self._forget_earlier()
        except LogTruncated:
            self._restart()
            self.follow_log()
            return True
        except MillstreamError as error:
            self._failed(error)
            raise
        except OSError as error:  # for example a lack of descriptors, which passes
            told = error_of_os(error)
            self._failed(told)
            raise told from error
        self.error = None
        return False

    def _failed(self, error: MillstreamError) -> None:
        self._restart()
        self.error = error.message

    def _restart(self) -> None:
        self._records.restart()
        self._look = None

    def _look_ahead(self, machine: LatestConsumer, until: float) -> bool:
        """Look for newer messages of the waiting keys, and drop the older ones; return whether it was done by then."""
        upto = machine.looks_upto
        if upto is None:
            self._look = None
            return True
        if self._look is None or self._look.upto != upto:
            self._look = _Look(upto, machine.waiting_keys, self._records, max(machine.read_upto, self._seen))
        for keys, tables in self._look.frames:
            self._look.newer |= keys
            self._look.left.difference_update(keys)
            self._look.truncated |= tables
            if not self._look.left:
                break
            if time.monotonic() > until:
                return False
        machine.drop_older(self._look.newer, self._look.truncated, upto)
        self._look = None
        return True

    def _restore(self) -> None:
        """Read the messages that were in flight before a restart, also for a paused consumer."""
        machine = self.machine
        try:
            while not machine.is_restored and machine.phase is not Phase.CUT_OFF:
                step = self._records.read(machine.read_upto)
                if step is None:
                    return
                machine.offer(step.messages, step.upto)
                self._seen = max(self._seen, step.seen)
        except MillstreamError as error:
            self._records.restart()
            self.error = error.message
            raise

    def _hold_quarantined(self) -> None:
        if not self._records.quarantined or time.monotonic() - self._held_at < _QUARANTINE_FRESH_S:
            return
        self._held_at = time.monotonic()
        now = self._quarantined()
        self._held = {table: name for table, name in now.items() if table in self._records.quarantined}
        self.machine.hold(int(table) for table in self._held)

    def check_kept(self) -> None:
        """Raise `CursorExpired` if the consumer was cut off."""
        if self.machine.phase is Phase.CUT_OFF:
            raise CursorExpired(
                f"consumer {self.definition.name} was cut off: retention has dropped records that it hadn't settled",
                hint="Rewind the consumer, for example to `earliest`; raise `retention_bytes_max` to keep more.",
                holder=self.definition.name,
                needed_from=self.machine.cursor + 1,
                first=int(self.reader.first_seq()),
            )

    @property
    def delivering(self) -> Consumer:
        """The machine that delivers now: that of a backfill while one runs."""
        return self.backfills.machine or self.machine

    def expire(self) -> None:
        """Return deliveries that have expired."""
        self.machine.expire(now_ms())
        self.backfills.expire(now_ms())

    def next_wake(self) -> int | None:
        """Return the time at which `expire` has something to do; None if there is none."""
        times = [time_ for time_ in (self.machine.next_wake(), self.backfills.next_wake()) if time_ is not None]
        return min(times, default=None)

    def _shown(self, delivery: Delivery, ids: AckIds) -> dict[str, Any]:
        group, record = self.origin(delivery.message)
        return {
            "id": delivery.message.id,
            "ack_id": ids.text(delivery.delivery_id),
            "deliveries": delivery.deliveries,
            "group": group,
            "record": record,
        }

    def _time(self, answer: Iterable[Delivery]) -> None:
        """Measure the time since the commit of the records that are delivered for the first time."""
        now_us, origins = time.time_ns() // 1000, [each.message.origin for each in answer if each.deliveries == 1]
        moments = Counter([origin.committed_us for origin in origins if isinstance(origin, Origin)])
        series = CONSUMER_DELIVERY_SECONDS.of(str(self._stream_id), self.definition.name) if moments else None
        for moment, count in moments.items():
            if moment is not None and series is not None:
                series.observe((now_us - moment) / 1e6, count=count)

    def observe_request(self, seconds: float) -> None:
        """Count a delivery by the push sink in the metrics; not if this process no longer has the consumer."""
        with self.lock:
            if not self.is_deleted and not self.is_closed:
                CONSUMER_REQUEST_SECONDS.of(str(self._stream_id), self.definition.name).observe(seconds)

    def forget_measures(self) -> None:
        """Drop the consumer's metrics in this process, which no longer has it."""
        for measure in (CONSUMER_DELIVERY_SECONDS, CONSUMER_REQUEST_SECONDS):
            measure.forget(str(self._stream_id), self.definition.name)

    def origin(self, message: Message) -> tuple[str | None, str]:
        """Return a message's group and its record as JSON; those of dead and retried ones are kept here."""
        origin = message.origin
        if isinstance(origin, Origin):
            return origin.group, record_of(origin)
        group, record = self._letters[message.id]
        return group, record

    def _merged(self, older: Message, newer: Message) -> Message:
        """Return the message that replaces an older one of its key, with what it left unchanged, as far as that is known."""
        origin, known = newer.origin, older.origin
        if not (isinstance(origin, Origin) and origin.is_partial):
            return newer
        record = (known.update if isinstance(known, Origin) else None) or self.origin(older)[1]
        row = KnownRow(record, known.schema if isinstance(known, Origin) else None)
        if msgspec.json.decode(record)["op"] == Op.DELETE.letter:
            with suppress(MillstreamError):  # reading on reports it
                row = self._records.row_between(older, newer) or row
        key = () if origin.schema is None else origin.schema.key
        return merged(row, newer, origin, self.definition.names_of(key))

    # --- settling ----------------------------------------------------------------------------------------------------

    def settle(
        self, texts: list[str], do: Callable[[Consumer, list[DeliveryId]], list[Status]], *, is_ack: bool = False
    ) -> list[dict[str, str]]:
        """Apply an ack, a nack or an extension; return the result of each text."""
        with suppress(MillstreamError):  # `error` has it; without them a nack returns only its own message
            self._restore()
        self.expire()
        deliveries = [self.ids.read(text) for text in texts]
        statuses = iter(do(self.machine, [delivery for delivery in deliveries if delivery is not None]))
        rest = [text for text, delivery in zip(texts, deliveries, strict=True) if delivery is None]
        of_rows = iter(self.backfills.settle(rest, do, is_ack=is_ack) if rest else [])
        self.save()
        self.wake()
        return [
            {"ack_id": text, "status": str(next(of_rows if delivery is None else statuses))}
            for text, delivery in zip(texts, deliveries, strict=True)
        ]

    # --- steering ----------------------------------------------------------------------------------------------------

    def rewind(self, seq: Seq) -> None:
        """Begin behind another number."""
        self.machine.rewind(int(seq))
        if self.is_removed:
            self.machine.pause()
        self._forget_earlier()
        self.save()
        self.backfills.end(is_rewound=True)
        self.wake()

    def go_back(self) -> None:
        """Return everything behind the cursor to the log, if anything of it was delivered; no such delivery counts."""
        if not self.machine.is_at_cursor:
            self.machine.rewind(self.machine.cursor)
            self._forget_earlier()
            self.save()

    def cut_off(self) -> None:
        """Note that retention has passed the cursor."""
        self.machine.cut_off()
        self._forget_earlier()
        self.save()
        self.backfills.end(is_rewound=True)
        self.wake()

    def _forget_earlier(self) -> None:
        """Go by the present definition alone: no earlier delivery counts."""
        self._stored.earlier = []
        self._look, self._seen = None, 0
        self._records.forget_earlier()

    # --- showing -----------------------------------------------------------------------------------------------------

    def token(self) -> str:
        """Return the cursor as a token."""
        cursor = Seq(self.machine.cursor)
        if len(self.reader.shards) > 1:  # an operation's part on another shard may be earlier
            cursor = self.reader.whole_upto(cursor)
        return str(StreamToken.scalar(self._stream_id, cursor))

    def shown_definition(self) -> dict[str, Any]:
        """Return the definition and the cursor."""
        return {**self.definition.as_dict(), "cursor": self.token()}

    def shown(self) -> dict[str, Any]:
        """Return the definition and the progress."""
        machine = self.machine
        with suppress(MillstreamError):  # `error` has it
            self._restore()
        self.expire()
        self._hold_quarantined()
        self.save()
        counters, of_rows = machine.counters, self.backfills.counters
        stopped = f"it reads no further until some of its {machine.unsettled:,} unsettled messages are settled"
        reasons = [self._trouble(), self.backfills.failed(), stopped if machine.is_stopped else None]
        return {
            **self.shown_definition(),
            "state": str(machine.phase),
            "in_flight": machine.in_flight + self.backfills.in_flight,
            "dead": len(machine.dead),
            "delivered": counters.delivered + of_rows.delivered,
            "redelivered": counters.redelivered + of_rows.redelivered,
            "acked": counters.acked + of_rows.acked,
            "lag": self._lag(),
            "backfill": self.backfills.shown(),
            "error": "; ".join(filter(None, reasons)) or None,
        }

    def _lag(self) -> dict[str, Any]:
        try:
            upto = self.reader.persisted_upto()
            after = max(Seq(self.machine.cursor), Seq(self.reader.first_seq() - 1))
            takes = self._records.takes_of(after, upto)
            found = backlog_of_tables(
                self.reader, after, upto, lambda table: takes(table.table_id, table.schema_version)
            )
        except MillstreamError as error:
            self.error = error.message
            return {"records": None, "bytes": None, "seconds": None}
        oldest = found.oldest_commit_us
        seconds = 0.0 if oldest is None or not found.records else max(0.0, time.time() - oldest / 1e6)
        return {"records": found.records, "bytes": found.size_bytes, "seconds": seconds}

    def _trouble(self) -> str | None:
        if self.refusal is not None:
            return self.refusal.message
        if self.error is not None:
            return self.error
        if self.backfills.error is not None:
            return f"the rows of the backfill can't be read: {self.backfills.error}"
        if self._held:
            names = ", ".join(sorted(self._held.values()))
            return f"records wait because their table is quarantined: {names}"
        if self.is_removed:
            return "it isn't in millstream.toml any longer, and stays paused until it is there again, or removed"
        if (reason := self.push_error or self.machine.phase_reason) is not None:
            return reason
        left_out = self._records.left_out()
        if left_out:
            return f"a consumer of kind latest leaves out tables without a key: {', '.join(left_out)}"
        return None

    def dead_letters(self, after: tuple[int, str] | None, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        """Return dead letters, the oldest first, and where the next ones begin; None if these are the last.

        They have at most so many bytes as an answer of `receive`, or are one.
        """
        letters = sorted(self.machine.dead.values(), key=_age)
        if after is not None:
            letters = [letter for letter in letters if _age(letter) > after]
        some: list[DeadLetter] = []
        left = ANSWER_BYTES
        for letter in letters[:limit]:
            left -= letter.message.size
            if some and left < 0:
                break
            some.append(letter)
        following = f"{some[-1].died}.{some[-1].message.id}" if len(letters) > len(some) else None
        return [self._shown_letter(letter) for letter in some], following

    def _shown_letter(self, letter: DeadLetter) -> dict[str, Any]:
        group, record = self.origin(letter.message)
        died = datetime.fromtimestamp(letter.died / 1000, UTC).isoformat(timespec="milliseconds")
        return {
            "id": letter.message.id,
            "deliveries": letter.deliveries,
            "group": group,
            "record": record,
            "error": letter.error,
            "died": died,
        }

    def settle_dead(self, ids: Iterable[str] | None, *, retry: bool) -> list[dict[str, str]]:
        """Retry or drop dead letters; return the result of each id."""
        machine = self.machine
        overtaken = machine.overtaken(ids) if retry and isinstance(machine, LatestConsumer) else set()
        done = machine.retry(ids) if retry else machine.drop(ids)
        self.save()
        self.wake()
        return [
            {
                "id": id_,
                "status": ("retried" if retry and id_ not in overtaken else "dropped") if was_dead else "unknown",
            }
            for id_, was_dead in done
        ]


def _age(letter: DeadLetter) -> tuple[int, str]:
    return letter.died, letter.message.id
