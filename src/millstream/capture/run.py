"""Capture of one stream: connects, compares slot and log, streams, copies tables, reconnects when a link breaks.

A *session* is the time of one replication connection. It starts at X, the position up to which the log has everything (or the
catalog, if only keepalives moved it), and drops every transaction that ends at or below X. A session reads the stream
or, if the backlog is large, chunks (`capture.stream.backlog_chunks`); a change between them begins another session.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Final

import structlog
from psycopg import sql

from millstream.capture.column_rules.apply_to_changes import RuleMessages
from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.column_rules.session_rules import check_rules, rule_messages
from millstream.capture.config import CaptureConfig, CaptureOutcome, CaptureProgress
from millstream.capture.connection import Connection, connect_replication, pinned, take_bytes_as_they_are
from millstream.capture.copying.copy_sink import CopiesAndRepairs
from millstream.capture.copying.row_repair import Repairs
from millstream.capture.copying.table_copies import UNFINISHED, TableCopies
from millstream.capture.noted_slots import note_slot
from millstream.capture.publication import pgoutput_options
from millstream.capture.restored_source import check_end, check_never_set_back, forget_set_back
from millstream.capture.session_retries import SessionRetries
from millstream.capture.slot import (
    SlotState,
    check_slot,
    create_slot,
    read_slot,
    sender_timeout_ms,
    waits_for_standbys,
    who_is_waited_for,
)
from millstream.capture.source_tables import (
    SourceIdentity,
    check_origin,
    check_same,
    check_standby,
    connect_same,
    identify_replication,
    insert_lsn,
)
from millstream.capture.stream.applier import Applier, Stopped
from millstream.capture.stream.backlog_chunks import ChunkWire, open_chunks
from millstream.capture.stream.barrier import StreamBarrier
from millstream.capture.stream.receiver import Receiver
from millstream.capture.stream.replication_connection import Wire, start_replication
from millstream.capture.stream.spill_files import SpillFolder
from millstream.capture.streamed_publications import StreamedPublications, publications_known
from millstream.capture.table_directory import TableDirectory
from millstream.capture.timeline import TimelineWatch, follows, read_history
from millstream.capture.watched_tables import WatchedTables
from millstream.capture.watcher import Watcher
from millstream.catalog import Catalog, TableState
from millstream.codec.pgoutput import warm
from millstream.errors import DiskFull, MillstreamError, ProtocolViolation, SourceError
from millstream.model.ids import SourceId, StreamId
from millstream.model.names import qualified_name
from millstream.model.positions import Lsn, format_lsn
from millstream.ports import LogAppender
from millstream.protocol.catch_up_mode import BacklogChunk, Mode, ModeChoice

logger = structlog.get_logger("millstream.capture")

_DRAIN_S: Final = 60.0
_CONFIRM_S: Final = 10.0
_SLOT_PATIENCE_S: Final = 5.0
"""Time after which the wait for a new slot is reported."""


def run_capture(
    config: CaptureConfig,
    catalog: Catalog,
    log: LogAppender,
    *,
    stop: threading.Event,
    until_caught_up: bool = False,
    on_progress: Callable[[CaptureProgress], None] | None = None,
    on_wait: Callable[[MillstreamError], None] | None = None,
) -> CaptureOutcome:
    """Capture until `stop` is set, or until everything that the source had committed at the call is durable.

    Args:
        catalog: the catalog of the home; the stream's row must be there.
        log: the stream's writer, the only one that appends operations of this stream's source.
        stop: ends capture: operations in flight become durable and are confirmed, and the call returns.
        until_caught_up: end when the source's present is durable, every table copied, and the slot confirmed there.
        on_progress: called about once a second, on this thread.
        on_wait: called with the error, on this thread, before each wait for another attempt.

    Returns:
        How it ended, with the tables that were quarantined, which isn't an error.

    Raises:
        MillstreamError: an error that a retry can't mend: the first connection failed, the slot is lost, the log is
            closed … After a broken connection or a full disk, capture waits and retries.
    """
    return _Capture(config, catalog, log, stop, until_caught_up, on_progress, on_wait).run()


@dataclass(slots=True)
class _CaptureSession:
    """The parts that belong to one connection."""

    applier: Applier
    receiver: Receiver
    watcher: Watcher
    tables: WatchedTables
    copies: CopiesAndRepairs
    chunks: ChunkWire | None
    rules: RuleMessages | None
    began_s: float
    """When it began to stream, on the monotonic clock."""


class _Capture:
    def __init__(
        self,
        config: CaptureConfig,
        catalog: Catalog,
        log: LogAppender,
        stop: threading.Event,
        until_caught_up: bool,  # noqa: FBT001 - private, called once
        on_progress: Callable[[CaptureProgress], None] | None,
        on_wait: Callable[[MillstreamError], None] | None,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._log = log
        self._stop = stop
        self._until_caught_up = until_caught_up
        self._on_progress, self._on_wait = on_progress, on_wait or (lambda _: None)
        self._stream: StreamId = catalog.stream(config.stream).id
        self._scope = f"capture/{self._stream}"
        self._rules = ColumnRules(catalog, self._stream, config.rules)
        self._spill = SpillFolder(config.spill_dir, config.free_bytes)
        self._target: Lsn | None = None
        self._records = 0
        self._connected = self._ever = False
        self._reads_chunks = False
        self._retries = SessionRetries(config.give_up_s if until_caught_up else None)
        self._choice = ModeChoice(
            config.catch_up,
            start_bytes=config.catch_up_bytes,
            chunk_changes=config.catch_up_changes,
            chunk_wal_bytes=config.catch_up_chunk_bytes,
        )

    # --- sessions ----------------------------------------------------------------------------------------------

    def run(self) -> CaptureOutcome:
        """Run one session after the other until one ends without a successor."""
        try:
            return self._run_sessions()
        finally:
            with contextlib.suppress(MillstreamError):
                self._spill.clear()  # files that were never taken; everything submitted has been answered

    def _run_sessions(self) -> CaptureOutcome:
        warm()
        while True:
            self._connected = self._reads_chunks = False
            try:
                self._spill.clear()
                outcome = self._run_session()
                if outcome is not None:
                    return outcome
            except Stopped:
                slot = self._config.slot if self._ever else ""
                return CaptureOutcome(Lsn(0), caught_up=False, tables=(), slot=slot)
            except MillstreamError as error:
                if self._is_refusal(error):
                    self._choice.give_up(error.message)
                    logger.warning("no more chunks: the stream is read", code=error.code, error=error.message)
                    continue
                if self._reads_chunks and self._connected and error.code == "source_unreachable":
                    self._choice.broke()
                was_connected = self._ever or self._target is not None
                wait_s = self._retries.wait_s(error, ever_connected=was_connected)
                if wait_s is None or (self._stop.is_set() and not isinstance(error, DiskFull)):
                    raise
                logger.warning(
                    "capture begins again", code=error.code, error=error.message, hint=error.hint, in_s=round(wait_s, 2)
                )
                self._on_wait(error)
                self._stop.wait(wait_s)
                if self._stop.is_set():
                    slot = self._config.slot if self._ever else ""
                    return CaptureOutcome(Lsn(0), caught_up=False, tables=(), slot=slot, error=error)

    def _is_refusal(self, error: MillstreamError) -> bool:
        """Return whether the source refuses chunks: any of its errors may mean that, even if the stream meets it too."""
        if not self._reads_chunks or self._stop.is_set():
            return False
        refused = isinstance(error, SourceError | ProtocolViolation)
        return refused and error.code not in {"slot_active", "source_unreachable"}

    def _run_session(self) -> CaptureOutcome | None:
        """Run a session; return how it ended. None: begin another at once."""
        with ExitStack() as stack:
            replication = stack.enter_context(connect_replication(self._config.dsn))
            identity = identify_replication(replication)
            # If the DSN names several servers, all of a session's connections go to one.
            config = replace(self._config, dsn=pinned(self._config.dsn, replication))
            control = stack.enter_context(connect_same(config.dsn, identity, purpose="control"))
            check_standby(identity)
            check_origin(identity, config.origin)
            slot = read_slot(control, config.slot)
            check_rules(self._rules, control, config, at_start=not self._ever)
            source = self._source_to_follow(identity, replication, control, slot)
            reached = self._reached(source)
            directory = TableDirectory(self._catalog, self._stream, source, config, self._rules)
            tables = WatchedTables(
                config,
                self._catalog,
                directory,
                self._rules,
                StreamedPublications(self._catalog, self._scope, None if slot is None else reached or slot.confirmed),
            )
            tables.look(control, Lsn(0))
            if not tables.facts and not tables.are_deferred:
                raise SourceError(
                    f"no table of the source matches {', '.join(config.tables)}",
                    code="no_tables_match",
                    hint="Correct `tables` in millstream.toml, or grant USAGE on the schema and SELECT on its tables.",
                )
            note_slot(self._catalog, self._stream, self._config)
            if slot is None:
                reached = self._begin_slot(config.dsn, replication, identity, source)
            elif reached == 0 or self._is_slot_dropped():
                reached = self._begin_at(source, slot.confirmed)
            if self._until_caught_up and self._target is None:
                self._target = insert_lsn(control)
            before_each: Callable[[], None] = lambda: None  # noqa: E731 - nothing to look at before each item
            if identity.on_standby:
                watch = stack.enter_context(closing(TimelineWatch(config.dsn, identity)))
                watch.check()
                before_each = watch.check
            mode = self._choice.begin(
                reached=reached,
                source_end=insert_lsn(control),
                now=time.monotonic(),
                possible=not identity.on_standby and not waits_for_standbys(control, slot),
            )
            chunks = (
                self._open_chunks(config.dsn, identity, reached, reached if slot is None else slot.confirmed, tables)
                if mode is Mode.CATCHING_UP
                else None
            )
            wire: Wire = chunks or self._start_streaming(replication, reached, tables)
            stack.callback(wire.close)  # in case no receiver comes to own it
            timeout_ms = sender_timeout_ms(control)
            settling = self._log.settled()
            confirmed = reached if slot is None else min(slot.confirmed, reached)
            status_s = config.status_s if timeout_ms == 0 else min(config.status_s, timeout_ms / 4000)
            receiver = Receiver(
                wire,
                self._spill,
                confirmed=confirmed,
                buffer_bytes_max=config.buffer_bytes_max,
                run_bytes_max=config.run_bytes_max,
                status_s=status_s,
            )
            shared = (config, identity, self._catalog, directory, tables, self._stream, receiver.nudge)
            hold = StreamBarrier()
            copied = TableCopies(*shared, spill=self._spill, hold=hold, reads_backlog=chunks is not None)
            copies = CopiesAndRepairs(copied, Repairs(*shared), self._catalog, directory, self._stream)
            applier = Applier(
                receiver,
                self._log,
                directory,
                self._catalog,
                reached=reached,
                settling=None if slot is None else settling,
                confirmed=confirmed,
                shipped_within_s=config.shipped_within_s,
                copies=copies,
                hold=hold,
                before_each=before_each,
                stopped=self._stop.is_set,
            )
            watcher = Watcher(
                config,
                identity,
                tables,
                directory,
                passed=lambda: applier.passed,
                on_look=copies.see,
                broken=receiver.nudge,
            )
            copies.see(directory.refresh())  # before the first change: a copy that was begun has to see every change
            self._connected = self._ever = True
            logger.info(str(self._choice.mode), slot=config.slot, source=source, after=format_lsn(reached))
            rules = rule_messages(self._rules, directory, config, identity, copies.quarantine, stack)
            session = _CaptureSession(applier, receiver, watcher, tables, copies, chunks, rules, time.monotonic())
            return self._stream_until_done(session, control)

    @publications_known()
    def _stream_until_done(self, session: _CaptureSession, control: Connection) -> CaptureOutcome | None:
        applier, receiver = session.applier, session.receiver
        begun = applier.slot.durable
        receiver.start(session.rules)
        session.watcher.start()
        session.copies.start()
        told_at = asked_at = 0.0
        failed = True
        again = ""
        try:
            while not self._stop.is_set():
                applier.step(0.2)
                session.watcher.check()
                now = time.monotonic()
                renew_at = session.tables.streamed.renew_at
                if renew_at is not None and applier.slot.durable >= renew_at:
                    again = "there is another publication to stream"
                    break
                if self._changes_mode(session, now):
                    again = self._choice.reason
                    break
                if now - told_at >= 1.0:
                    told_at = now
                    self._tell(session)
                if self._target is not None:
                    if self._caught_up(session):
                        break
                    waits = session.copies.waits_for_stream or session.tables.are_deferred or session.tables.are_leaving
                    if now - asked_at >= 0.2 and (applier.passed < self._target or waits):
                        asked_at = now
                        self._hurry(session)
                elif (session.copies.waits_for_stream or renew_at is not None) and now - asked_at >= 0.2:
                    asked_at = now
                    self._hurry(session)
            failed = False
        finally:
            self._end(session, failed=failed)
            assert applier.slot.durable >= begun
        outcome = self._outcome(session, control)
        if not again or self._stop.is_set():
            return outcome
        logger.info("capture begins again", why=again, after=format_lsn(outcome.reached))
        return None

    def _end(self, session: _CaptureSession, *, failed: bool) -> None:
        """End the session's threads once what was captured is durable; report that to the source unless it failed."""
        final, lasted_s = None, time.monotonic() - session.began_s
        try:
            session.copies.stop()
            session.watcher.stop()
            self._drain(session.applier)
            if not failed:
                session.applier.slot.store_now()
                final = session.applier.slot.confirmed
        finally:
            applier = session.applier
            self._retries.note_session(lasted_s=lasted_s, records=applier.records, durable=applier.slot.durable)
            session.receiver.stop(final=final)

    def _drain(self, applier: Applier) -> None:
        """Wait until what was captured is durable; a while longer for other machines, if the stream asks for that."""
        while not applier.drain(self._config.others_s):
            if self._log.is_written():
                # The next session finds it in the log, and confirms none of it before other machines hold it either.
                logger.warning("other machines don't have what was captured yet; the slot stays where it is")
                return
            # Another session would begin below what is being written, and the source would send it again.
            if not applier.drain(_DRAIN_S):
                logger.warning("the log's disk doesn't answer; capture waits for it")

    def _changes_mode(self, session: _CaptureSession, now: float) -> bool:
        """Return whether to end the session for one in the other mode."""
        applier, chunks = session.applier, session.chunks
        if chunks is not None:
            return chunks.ended and applier.passed >= chunks.end and applier.idle
        if session.copies.keeps_session:
            return False
        source_end = session.watcher.source_end
        return self._choice.while_streaming(passed=applier.passed, source_end=source_end, now=now)

    def _hurry(self, session: _CaptureSession) -> None:
        """Make the source report how far it has sent, and write WAL that makes it flush what it holds."""
        session.receiver.ask_position()
        session.watcher.beat_soon()

    def _caught_up(self, session: _CaptureSession) -> bool:
        applier = session.applier
        assert self._target is not None
        # Not `idle`: later changes may be on their way into the log all the time.
        if applier.slot.durable < self._target:
            return False
        # In this order: the look may request a copy.
        if session.tables.waits_for_look() or not session.copies.all_done:
            return False
        applier.slot.store_now()
        return applier.slot.stored >= self._target

    # --- before streaming --------------------------------------------------------------------------------------

    def _source_to_follow(
        self, identity: SourceIdentity, replication: Connection, control: Connection, slot: SlotState | None
    ) -> SourceId:
        """Return the source with which the log goes on without a gap, or begins again after `slot drop`.

        Nothing is noted before the source is known to be followable: the DSN may still be set back to the old server.
        """
        known = self._catalog.current_source(self._stream)
        reached = Lsn(0) if known is None else self._reached(known.id)
        theirs = read_history(replication, identity.timeline)
        # A slot at or below X is the log's own: it was another server that had none to drop, or the drop never ended.
        begins_anew = known is None or (self._is_slot_dropped() and (slot is None or slot.confirmed > reached))
        fresh = begins_anew
        if known is not None and begins_anew:
            check_same(known, replace(identity, timeline=known.timeline))
            self._request_copies()
        elif known is not None:
            fresh = follows(known, self._catalog.source_history(self._stream), identity, theirs, reached=reached)
        check_slot(
            slot,
            name=self._config.slot,
            database=identity.database,
            reached=Lsn(0) if begins_anew else reached,
            on_standby=identity.on_standby,
        )
        if known is not None and known.timeline == identity.timeline:
            check_end(control, identity, self._catalog, self._scope, reached=reached)
        if slot is not None and not begins_anew:
            check_never_set_back(self._catalog, self._scope, slot)
            if self._is_slot_dropped():
                self._catalog.drop_fact(self._scope, "slot_dropped")
        if known is not None and not begins_anew and reached < self._catalog.reached(known.id):
            logger.warning("the catalog is newer than the log; the tables are copied again", after=format_lsn(reached))
            self._request_copies("the catalog was newer than the log")
            self._catalog.set_back_reached(known.id, self._log.reached())
        if known is not None and not fresh and (theirs is None or theirs == self._catalog.source_history(self._stream)):
            return known.id
        source = self._catalog.follow_source(
            self._stream,
            identity.system_identifier,
            identity.database,
            identity.timeline,
            reached=Lsn(0) if begins_anew else reached,
            history=theirs,
            before=None if known is None or begins_anew else known.id,
            log=self._log.reached(),
        )
        if known is not None and source != known.id:
            where = {"timeline": identity.timeline, "source": source, "after": format_lsn(reached)}
            logger.warning("the source is on a new timeline", **where)
        return source

    def _reached(self, source: SourceId) -> Lsn:
        """Return X: up to here everything is in the log, whatever happens next."""
        return self._catalog.reached_in(source, self._log.reached())

    def _request_copies(self, why: str = "the slot was made again") -> None:
        """Copy all tables again: the changes between an old slot and a new one are lost to the stream."""
        for row in self._catalog.tables(self._stream):
            if row.is_captured and row.state in {TableState.STREAMING, TableState.COPYING}:
                self._catalog.set_state(row.id, TableState.COPY_REQUESTED, why)

    def _begin_slot(self, dsn: str, replication: Connection, identity: SourceIdentity, source: SourceId) -> Lsn:
        """Create the slot, and let the stream begin there."""
        self._request_copies()
        told = False

        def meanwhile(seconds: float) -> None:
            nonlocal told
            if self._stop.is_set():
                raise Stopped
            if seconds >= _SLOT_PATIENCE_S and not told:
                told = True
                logger.warning("the slot waits for transactions that run at the source", who=who_is_waited_for(dsn))

        failover = self._config.failover and identity.server_version >= 170000 and not identity.on_standby
        start = create_slot(replication, self._config.slot, failover=failover, meanwhile=meanwhile)
        return self._begin_at(source, start)

    def _is_slot_dropped(self) -> bool:
        """Return whether `slot drop` was run. If so, a slot above X comes from a start that was interrupted."""
        return bool(self._catalog.fact(self._scope, "slot_dropped", default=False))

    def _begin_at(self, source: SourceId, start: Lsn) -> Lsn:
        """Let the stream begin where a new slot does; the tables' copies are requested already."""
        reached = self._catalog.move_reached(source, start)
        if reached != start:
            raise SourceError(
                f"a new slot begins at {format_lsn(start)}, below {format_lsn(reached)}, which the log has reached",
                code="source_replaced",
                hint="Capture into another stream (in another home): the source was restored to an older state.",
            )
        forget_set_back(self._catalog, self._scope)
        self._catalog.drop_fact(self._scope, "slot_dropped")
        return reached

    def _open_chunks(
        self, dsn: str, identity: SourceIdentity, reached: Lsn, confirmed: Lsn, tables: WatchedTables
    ) -> ChunkWire | None:
        """Begin to read chunks; None if the source refuses, which then isn't asked again."""
        config, choice = self._config, self._choice

        def go_on(chunk: BacklogChunk) -> bool:
            goes_on = choice.after_chunk(chunk, time.monotonic())
            logger.debug("chunk read", end=format_lsn(chunk.end), messages=chunk.messages, goes_on=goes_on)
            return goes_on

        self._reads_chunks = True
        try:
            return open_chunks(
                dsn,
                identity,
                slot=config.slot,
                options=pgoutput_options(tables.coverage.publications, origin=config.origin),
                reached=reached,
                confirmed=confirmed,
                changes_max=config.catch_up_changes,
                wal_bytes_max=config.catch_up_chunk_bytes,
                go_on=go_on,
                advance_s=config.slot_advance_s,
                reads_socket=config.reads_socket,
            )
        except SourceError as error:
            if not self._is_refusal(error):
                raise
            choice.give_up(error.message)
            logger.warning("the backlog isn't read in chunks", code=error.code, error=error.message)
            self._reads_chunks = False
            return None

    def _start_streaming(self, replication: Connection, reached: Lsn, tables: WatchedTables) -> Wire:
        options = sql.SQL(", ").join(
            sql.SQL(f"{name} ") + sql.Literal(value)
            for name, value in pgoutput_options(tables.coverage.publications, origin=self._config.origin).items()
        )
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} ({})").format(
            sql.Identifier(self._config.slot), sql.SQL(format_lsn(reached)), options
        )
        encoded = command.as_bytes(replication)
        take_bytes_as_they_are(replication)
        return start_replication(replication, encoded, reads_socket=self._config.reads_socket)

    # --- progress ----------------------------------------------------------------------------------------------

    def _tell(self, session: _CaptureSession) -> None:
        if self._on_progress is None:
            return
        self._on_progress(
            CaptureProgress(
                received=session.receiver.received,
                durable=session.applier.slot.durable,
                source_end=max(
                    session.receiver.source_end,
                    session.receiver.received,
                    Lsn(0) if session.chunks is None else session.chunks.source_end,
                ),
                records=self._records + session.applier.records,
                copies=session.copies.progress(),
                mode=self._choice.mode,
                slot_holds_bytes=session.watcher.slot_holds_bytes,
                source_spilled_bytes=session.watcher.spilled_bytes,
            )
        )

    def _outcome(self, session: _CaptureSession, control: Connection) -> CaptureOutcome:
        held: int | None = None
        name = self._config.slot
        try:
            deadline = time.monotonic() + _CONFIRM_S
            while True:
                slot = read_slot(control, self._config.slot)
                held, name = (None, "") if slot is None else (slot.held_bytes, slot.name)
                if slot is None or slot.confirmed >= session.applier.slot.confirmed or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        except MillstreamError as error:
            logger.info("the slot couldn't be asked at the end", code=error.code, error=error.message)
        rows = [row for row in self._catalog.tables(self._stream) if row.is_captured]
        named = [(qualified_name(row.namespace, row.name), row) for row in rows]
        paused = self._catalog.paused_copies(self._stream)
        self._tell(session)
        self._records += session.applier.records
        reached = session.applier.slot.stored
        return CaptureOutcome(
            reached=reached,
            caught_up=self._target is not None and reached >= self._target and not self._stop.is_set(),
            tables=tuple(name for name, _ in named),
            paused=tuple(name for name, row in named if row.state in UNFINISHED and row.id in paused),
            copies_held={name: row.reason for name, row in named if row.is_copy_held},
            quarantined={name: row.reason for name, row in named if row.state is TableState.QUARANTINED},
            slot=name,
            slot_holds_bytes=held,
        )
