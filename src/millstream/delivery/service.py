"""The consumers of one stream: made, received from, acknowledged and steered, in the one process that owns their state.

`call` takes a request as JSON values, so that other processes can forward theirs.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

from millstream.delivery.backfill.backfill_control import Notes
from millstream.delivery.backfill.row_writer import BackfillWriter, stored_backfill
from millstream.delivery.backfill.running_backfill import Ended, StoredBackfill, remove_leftovers
from millstream.delivery.consumer_lookup import Locked, exists_already, invalid_place, unknown_consumer
from millstream.delivery.consumer_store import Letter, Store, Stored
from millstream.delivery.definition import Definition
from millstream.delivery.dependencies import Surroundings
from millstream.delivery.push_source import Pushing
from millstream.delivery.repeated_warnings import RepeatedWarnings
from millstream.delivery.request_fields import (
    ALL_ROWS,
    AskedRows,
    check_empty,
    dead_letter_ids,
    page,
    settling,
    waiting,
    wanted_place,
    wanted_rows,
)
from millstream.delivery.running_consumer import Running, Waiter
from millstream.delivery.start_position import check_kept
from millstream.delivery.wait_clock import now_ms
from millstream.errors import CursorExpired, DeliveryError, MillstreamError
from millstream.model.positions import Seq
from millstream.protocol.delivery import Change, Consumer, DeliveryId, Phase, State, Status
from millstream.wal.reader import StreamReader
from millstream.workers import Worker, call_apart

_SYNC_EVERY_S: Final = 0.25
"""How often what was noted is made durable: acknowledgements are within one second."""
_HOLD_EVERY_S: Final = 2.0
_LOOK_S: Final = 0.2
_WAITS_AT_MOST_S: Final = 1.0
"""How long a `receive` waits until it looks again; records and expiries wake it sooner."""
_PUSHES_AFTER_S: Final = 2.0
"""How long a process that isn't a server has the consumers until it delivers to sinks: a command ends sooner."""
_READS_AT_LEAST_S: Final = 5.0
"""How long a `receive` that doesn't wait may read records that `where` leaves out."""


class Answer(NamedTuple):
    """The answer of a call."""

    body: Any
    is_new: bool = False
    """Whether the call made what it returns."""
    has_ended: bool = False
    """Whether a `receive` without messages has nothing to wait for: the consumer is paused."""


class StreamConsumers:
    """The consumers of one stream.

    Concurrency: any number of threads. This process has the home's `delivery` role.
    """

    def __init__(self, around: Surroundings) -> None:
        """Open them.

        Raises:
            DeliveryError (`consumer_state_unreadable`): their state can't be read.
            LogError …: the log can't be read.
        """
        self._around = around
        self._warnings: Final = RepeatedWarnings(stream=around.stream)
        self._lock = threading.Lock()
        """Guards the set of consumers; taken before a consumer's lock."""
        self._storing = threading.Lock()
        """Guards the store; taken after a consumer's lock."""
        self._reader = around.open_reader()
        self._store, stored = Store.open(around.folder)
        self._held: dict[str, int] = {}
        self._hold_at = 0.0
        """The errors that keep the state from being kept, as last logged."""
        self._wanted = threading.Event()
        """Set while a `receive` waits for the log to grow."""
        self._file = around.file
        self._notes = Notes(around.folder, self._set_backfill, self._change_rows)
        self._running: dict[str, Running] = {}
        self._pushing: dict[str, Pushing] = {}
        """The consumers with a push sink, by name."""
        self._push_at_s = time.monotonic() + (0.0 if around.is_server else _PUSHES_AFTER_S)
        with ExitStack() as begun:  # if a step fails, none goes on: the next attempt has a store of its own
            begun.callback(_quietly, self._store.close)
            self._begin_stored(stored)
            remove_leftovers(around.folder, [running.backfills.stored for running in self._running.values()])
            for name in around.holding.names() - self._running.keys():  # a kill left its making or removal half done
                around.holding.release(name)
            self._writer = BackfillWriter(around.stream, around.open_reader, around.open_lake, self._all_running)
            begun.callback(_quietly, self._writer.close)
            for name in self._file.definitions:
                with suppress(MillstreamError):  # each call reports it
                    self._make_configured(name)
            self._seen = Seq(0)
            self._workers = [
                Worker("consumers-sync", self._keep, every_s=_SYNC_EVERY_S),
                Worker("consumers-watch", self._watch),
            ]
            for worker in self._workers:
                begun.callback(worker.join)
                begun.callback(worker.stop)
                worker.start()
            begun.pop_all()
        self._calls: Final[Mapping[str, Callable[[str, Any, Waiter], Answer]]] = {
            "show": self._show,
            "delete": self._delete,
            "pause": partial(self._steer, "pause"),
            "resume": partial(self._steer, "resume"),
            "rewind": self._rewind,
            "receive": self._receive,
            "ack": partial(self._settle, "ack"),
            "nack": partial(self._settle, "nack"),
            "extend": partial(self._settle, "extend"),
            "dead": self._dead,
            "retry": partial(self._settle_dead, "retry"),
            "drop": partial(self._settle_dead, "drop"),
        }

    def call(
        self, what: str, name: str | None, body: Any, waiter: Waiter | None = None, *, key: str | None = None
    ) -> Answer:
        """Carry out a request.

        Args:
            what: `create`, `list`, or an action on the consumer of that name.
            name: the consumer's; None for `create` and `list`.
            body: the request's JSON value.
            waiter: ends a `receive` that waits.
            key: of a `backfill`: the same one again returns the number of the backfill that it began.

        Raises:
            DeliveryError (`unknown_consumer`, `invalid_consumer`, `consumer_exists`, `consumer_configured`): as they say.
            InvalidValue: a value of the body is out of range, or a field isn't known.
            ConfigError: the consumer can't be as `millstream.toml` has it.
            CursorExpired: retention has passed a token, or the consumer was cut off.
            TokenFromFuture: a rewind goes beyond the stream's end.
        """
        if what == "create":
            return self._create(body)
        if what == "list":
            return Answer({"consumers": self.all()})
        if name is not None and name in self._file.names and what != "delete":
            self._make_configured(name, is_shown=what in {"show", "dead"})
        self._known(str(name))  # an unknown consumer wins over errors of the body
        if what == "backfill":
            return self._backfill(str(name), body, key)
        return self._calls[what](str(name), body, waiter or Waiter())

    def all(self) -> list[dict[str, Any]]:
        """Return every consumer with its progress, by name; also those of the file that can't begin."""
        with self._lock:
            some = list(self._running.values())
            found = self._file.unmade(self._running.keys())
        for running in some:
            with running.lock:
                if not running.is_deleted:
                    found.append(running.shown())
        return sorted(found, key=itemgetter("name"))

    def close(self) -> None:
        """End every wait, make everything durable, and close the store."""
        self._writer.close()
        for worker in self._workers:
            worker.stop()
        self._wanted.set()
        for worker in self._workers:
            worker.join()
        for ended in [call_apart("push-end", pushing.stop) for pushing in self._pushing.values()]:
            ended.result()
        with self._lock:
            for running in self._running.values():
                with running.lock:
                    running.is_closed = True
                    running.forget_measures()
                    with suppress(MillstreamError):  # closing the store raises it
                        running.save()
                    running.backfills.close()
                running.wake()
            with self._storing:
                self._store.close()

    # --- calls -------------------------------------------------------------------------------------------------------

    def _create(self, body: Any) -> Answer:
        name = body.get("name") if isinstance(body, Mapping) else None
        if isinstance(name, str) and name in self._file.names:
            raise self._file.only_there(name, "made")
        definition = Definition.parse(body)
        with self._lock:
            known = self._running.get(definition.name)
            if known is not None:
                if known.definition != definition:
                    raise exists_already(self._around.stream, known.definition, definition)
                with known.lock:
                    return Answer(known.shown_definition())
            return Answer(self._make(definition, is_configured=False).shown_definition(), is_new=True)

    def _show(self, name: str, body: Any, waiter: Waiter) -> Answer:
        del body, waiter
        with self._locked(name) as running:
            return Answer(running.shown())

    def _delete(self, name: str, body: Any, waiter: Waiter) -> Answer:
        del body, waiter
        if name in self._file.names:
            raise self._file.only_there(name, "removed")
        with self._lock, self._locked_here(name) as running:
            with self._storing:
                self._store.remove(name)
            running.is_deleted = True
            running.backfills.forget()
            running.forget_measures()
            del self._running[name]
            self._held.pop(name, None)
            self._around.holding.release(name)
            pushing = self._pushing.pop(name, None)
        running.wake()
        if pushing is not None:
            call_apart("push-end", pushing.stop)
        return Answer(None)

    def _steer(self, how: str, name: str, body: Any, waiter: Waiter) -> Answer:
        del waiter
        check_empty(body)
        with self._locked(name) as running:
            if running.is_removed and how == "resume":
                raise self._file.stays_paused(name)
            if how == "pause":
                running.machine.pause()
            else:
                running.machine.resume()
            running.save()
            self._sync()
            running.wake()
            return Answer(running.shown())

    def _rewind(self, name: str, body: Any, waiter: Waiter) -> Answer:
        del waiter
        text = wanted_place(body)
        with self._locked(name) as running:
            seq = self._around.resolve(text, running.reader, partial(invalid_place, "invalid_value", "to"))
            holding, before = self._around.holding, Seq(running.machine.cursor + 1)
            was_cut_off = running.machine.phase is Phase.CUT_OFF
            holding.release(name)
            try:
                holding.hold(name, Seq(seq + 1))
                check_kept(seq, running.reader, self._around.stream_id)
            except MillstreamError:
                holding.release(name)
                if not was_cut_off:
                    holding.hold(name, before)
                raise
            running.rewind(seq)
            self._held[name] = int(seq)
            self._sync()
            return Answer(running.shown())

    def _backfill(self, name: str, body: Any, key: str | None) -> Answer:
        rows = wanted_rows(body)
        with self._locked(name) as running:
            if key is not None and (begun := running.backfills.number_of(key)) is not None:
                return Answer({"backfill": begun})
            running.check_kept()
            running.backfills.check_none()
            stored = self._backfill_of(running.definition, running.reader, running.machine.cursor, rows)
            stored.key = key
            running.go_back()
            running.backfills.begin(stored)
        self._writer.wake()
        return Answer({"backfill": stored.number})

    def _backfill_of(
        self, definition: Definition, reader: StreamReader, cursor: int, rows: AskedRows = ALL_ROWS
    ) -> StoredBackfill:
        return stored_backfill(self._around.stream, definition, reader, self._around.open_lake, cursor, rows)

    def _receive(self, name: str, body: Any, waiter: Waiter) -> Answer:
        count, wait_s = waiting(body)
        begun_s = time.monotonic()
        end_s = begun_s + wait_s
        running = self._known(name)
        if running.definition.sink is not None:
            kind = running.definition.sink.kind
            raise DeliveryError(
                f"consumer {name} delivers its messages by {kind}",
                code="consumer_pushed",
                stream=self._around.stream,
                consumer=name,
            )
        running.waiters.add(waiter)
        try:
            while True:
                waiter.wake.clear()
                with self._locked_running(running):
                    if waiter.is_gone or running.is_closed or running.machine.phase is Phase.PAUSED:
                        return Answer({"messages": []}, has_ended=True)
                    found, is_more = running.take(count)
                    wake_ms = running.next_wake()
                now_s = time.monotonic()
                if found or now_s >= (max(end_s, begun_s + _READS_AT_LEAST_S) if is_more else end_s):
                    return Answer({"messages": found})
                if not is_more:
                    self._wanted.set()
                    due_s = _WAITS_AT_MOST_S if wake_ms is None else max(0.0, (wake_ms - now_ms()) / 1000)
                    waiter.wake.wait(min(end_s - now_s, due_s, _WAITS_AT_MOST_S))
        finally:
            running.waiters.discard(waiter)

    def _settle(self, how: str, name: str, body: Any, waiter: Waiter) -> Answer:
        del waiter
        asked = settling(how, body)
        with self._storing:
            self._store.check()  # before the machine: sent again, the request would find everything settled, and be answered

        def settle(machine: Consumer, deliveries: list[DeliveryId]) -> list[Status]:
            if how == "ack":
                return machine.ack(deliveries)
            if how == "extend":
                return machine.extend(deliveries, now_ms(), asked.ms)
            if not asked.has_failed:
                return machine.give_back(deliveries)
            return machine.nack(deliveries, now_ms(), delay_ms=asked.ms or 0)

        with self._locked(name) as running:
            results = running.settle(asked.ids, settle, is_ack=how == "ack")
        return Answer({"results": results})

    def _dead(self, name: str, body: Any, waiter: Waiter) -> Answer:
        del waiter
        after, limit = page(body)
        with self._locked(name) as running:
            running.expire()
            running.save()
            found, following = running.dead_letters(after, limit)
        return Answer({"dead": found, "next": following})

    def _settle_dead(self, how: str, name: str, body: Any, waiter: Waiter) -> Answer:
        del waiter
        ids = dead_letter_ids(body)
        with self._locked(name) as running:
            results = running.settle_dead(ids, retry=how == "retry")
            self._sync()
        if how == "drop":
            self._compact()  # a dropped record may be a person's data: the log has it until then
        return Answer({"results": results})

    # --- consumers of the file ---------------------------------------------------------------------------------------

    def _make_configured(self, name: str, *, is_shown: bool = False) -> None:
        """Make a consumer of the file if it isn't there. Raises the reason why it can't be as the file has it.

        Args:
            name: its name.
            is_shown: whether the caller only reads it: one that exists needs no variable of the file then.
        """
        if name not in self._running and name in self._file.definitions:
            with self._lock:
                if name not in self._running:
                    try:
                        self._make(self._file.definitions[name], is_configured=True)
                    except MillstreamError as error:
                        self._file.refuse(name, error)
                    else:
                        self._file.accept(name)
        if not (is_shown and name in self._running and name not in self._file.definitions):
            self._file.check(name)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _begin_stored(self, stored: Mapping[str, Stored]) -> None:
        for name, known in stored.items():
            found = self._file.adapted(known, self._around.open_reader, self._around.tables)
            if found != known:
                self._store.create(found)
            self._running[name] = self._begin(found)
            self._running[name].save()
        self._store.sync()

    def _make(self, definition: Definition, *, is_configured: bool) -> Running:
        """Make a consumer; the caller has the lock."""
        reader = self._around.open_reader()
        start = self._around.start_of(definition, reader)
        self._around.holding.release(definition.name)
        self._around.holding.hold(definition.name, Seq(start + 1))
        try:
            check_kept(start, reader, self._around.stream_id)
            state = State.begin(int(start))
            stored = Stored(definition, secrets.token_hex(8), state, is_configured=is_configured)
            if definition.backfill:
                stored.backfill = self._backfill_of(definition, reader, int(start))
            with self._storing:
                self._store.create(stored)
        except BaseException:
            self._around.holding.release(definition.name)
            raise
        running = self._begin(stored, reader)
        with running.lock:
            self._held[definition.name] = int(start)
            self._running[definition.name] = running
            # It is stored. If the disk takes nothing more just now, the worker keeps what follows.
            with suppress(MillstreamError):
                running.save()
                self._sync()
        if definition.backfill:
            self._writer.wake()
        return running

    def _begin(self, stored: Stored, reader: StreamReader | None = None) -> Running:
        around = self._around
        reader = around.open_reader() if reader is None else reader
        running = Running(
            around.stream,
            around.stream_id,
            stored,
            reader,
            self._store.key,
            self._note,
            around.quarantined,
            self._notes,
            unsettled_bytes_max=around.unsettled_bytes_max,
        )
        name = stored.definition.name
        running.is_removed = stored.is_configured and name not in self._file.names
        running.refusal = self._file.refused.get(name)
        if stored.definition.sink is not None:
            self._pushing[name] = Pushing(around.stream, running, self._wanted.set, self._sync, around.place)
        return running

    def _note(self, name: str, changes: list[Change], letters: dict[str, Letter]) -> None:
        with self._storing:
            self._store.change(name, changes, letters)

    def _set_backfill(
        self, name: str, backfill: StoredBackfill | None, ended: Sequence[Ended], added: Sequence[int]
    ) -> None:
        with self._storing:
            self._store.set_backfill(name, backfill, ended, added)

    def _change_rows(self, name: str, changes: list[Change]) -> None:
        with self._storing:
            self._store.change_rows(name, changes)

    def _all_running(self) -> list[Running]:
        with self._lock:
            return list(self._running.values())

    def _sync(self) -> None:
        with self._storing:
            self._store.sync()

    def _known(self, name: str) -> Running:
        with self._lock:
            running = self._running.get(name)
        if running is None:
            raise self._unknown(name)
        return running

    def _unknown(self, name: str) -> DeliveryError:
        return unknown_consumer(self._around.stream, name)

    def _locked(self, name: str) -> Locked:
        return self._locked_running(self._known(name))

    @contextmanager
    def _locked_here(self, name: str) -> Iterator[Running]:
        """As `_locked`, for a caller that has the lock of the set."""
        running = self._running.get(name)
        if running is None:
            raise self._unknown(name)
        with running.lock:
            yield running

    def _locked_running(self, running: Running) -> Locked:
        return Locked(running, self._unknown)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _keep(self) -> bool:
        """Make everything durable that was noted, and move what the consumers hold of the log."""
        # One after the other: the state may be kept though there is no room for a copy of it.
        for step in (self._keep_changes, self._keep_short):
            try:
                step()
            except (MillstreamError, OSError) as error:
                self._warnings.warn("the consumers' state can't be kept for now", error)
        return True

    def _keep_changes(self) -> None:
        is_due = time.monotonic() - self._hold_at >= _HOLD_EVERY_S
        cursors = self._cursors() if is_due else None
        self._sync()  # retention goes by cursors that are durable
        if time.monotonic() >= self._push_at_s:
            for pushing in list(self._pushing.values()):
                pushing.look()
        if cursors is not None:
            self._hold_at = time.monotonic()
            self._move_holders(cursors)

    def _keep_short(self) -> None:
        if self._store.wants_compaction:
            self._compact()

    def _cursors(self) -> dict[str, int]:
        """Return the cursors of the consumers whose changes could be noted: one whose records can't be read holds no other."""
        with self._lock:
            some = list(self._running.items())
        found = {}
        for name, running in some:
            with running.lock:
                running.expire()
                try:
                    running.save()
                except (MillstreamError, OSError) as error:
                    self._warnings.warn("a consumer's state can't be kept for now", error, consumer=name)
                    continue
                if not running.is_deleted and running.machine.phase is not Phase.CUT_OFF:
                    found[name] = running.machine.cursor
        return found

    def _move_holders(self, cursors: Mapping[str, int]) -> None:
        gone = self._around.holding.cut_off()
        for name, cursor in cursors.items():
            with self._lock:
                running = self._running.get(name)
                if running is None:
                    continue
                with running.lock:
                    if name in gone and running.machine.phase is not Phase.CUT_OFF:
                        running.cut_off()
                    elif self._held.get(name, -1) < cursor <= running.machine.cursor:
                        try:
                            self._around.holding.hold(name, Seq(cursor + 1))
                            self._held[name] = cursor
                        except CursorExpired:
                            running.cut_off()

    def _compact(self) -> None:
        with self._lock:
            some = [running for _, running in sorted(self._running.items())]
            for running in some:
                running.lock.acquire()
            try:
                for running in some:
                    with suppress(MillstreamError):  # the new log has what this one doesn't take
                        running.save()
                with self._storing:
                    self._store.compact([running.stored() for running in some])
            finally:
                for running in some:
                    running.lock.release()

    def _watch(self) -> bool:
        """Wake the waiting calls when the log grows."""
        if not self._wanted.wait(_LOOK_S):
            return True
        try:
            if self._reader.wait_beyond(self._seen, _LOOK_S):
                self._seen = self._reader.persisted_upto()
                for running in list(self._running.values()):
                    running.wake()
        except (MillstreamError, OSError) as error:
            self._warnings.warn("the log can't be read for now", error)
            time.sleep(_LOOK_S)
        self._wanted.clear()  # before the look: a call may begin to wait at any time
        if any(running.waiters for running in list(self._running.values())):
            self._wanted.set()
        return True


def _quietly(close: Callable[[], None]) -> None:
    with suppress(MillstreamError):
        close()
