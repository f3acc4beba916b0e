"""A stream that reads from a write buffer: each operation enters the stream's log exactly once, through all restarts.

The log's place in the buffer is durable with the rows themselves. Each shard of the buffer is a *source*
of the stream. Each operation records, as capture's transactions do, that the log has reached the offset
after it (`WriteOps.reached`). So no two stores have to agree.

An item that puts no row into the log (dropped by a rule, a repeated write, no operation) moves no
position there. The catalog notes that it was passed (`passed`), together with the position that the log
had reached; the note holds for a log that has reached as much. Without it, a buffer that has dropped such
items would seem to have lost unread ones.

A client without an answer sends a write again under its session and number, or its key, and the buffer
may hold both. The second one within `AGAIN_WITHIN` offsets of its shard is left out. That depends only on
the buffer's content, so a restart decides the same. Other rows under the same id are another write: the
buffer has acknowledged them.

A table that can't take rows (its key was configured differently, a column's type clashes, no rule takes
them) is held. From that operation on its rows are left out, by partition, and other tables go on.
`protocol.buffer_replay` computes which operations are read again once the table is mended: at the next
start, or on request (`ask_again`), which restarts the reader.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.catalog.sources import OF_A_BUFFER
from millstream.errors import (
    BufferedOpUndecodable,
    BufferOffsetGone,
    CatalogError,
    CodecError,
    DiskFull,
    IngestError,
    MillstreamError,
    Overloaded,
    RoutingError,
    UnknownTable,
    UnsupportedFormat,
    WriteBufferError,
)
from millstream.ingest.buffered_op_conversion import OperationTaker
from millstream.model.buffered_operations import BUFFER_START, BufferedOp, BufferOffset, ReadPause
from millstream.model.ids import ShardId, SourceId, StreamId
from millstream.model.names import parse_qualified_name
from millstream.model.operations import TableRows, WriteOps, writes_in
from millstream.model.positions import Lsn
from millstream.protocol.buffer_replay import BufferReplay, Checkpoint, PartitionRows, fold
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.model.operations import Ack
    from millstream.model.writes import WriteId
    from millstream.ports import LogAppender, ShardReader, WriteBuffer

logger = structlog.get_logger("millstream.buffer")

_WAIT_S: Final = 0.2
"""How long a reader waits for more items before it checks whether it has to stop."""
AGAIN_WITHIN: Final = 4096
"""Offsets of a shard within which a repeated write is recognized. A start reads as many: a second or two at most."""
_IN_FLIGHT_BYTES: Final = 32 << 20
"""Size in bytes of a shard's operations that were handed to the log and aren't durable yet."""
_AGAIN: Final = "again"
"""Key of a held part's fact: a retry was requested."""
_KNOWN_AS: Final = "known_as"
"""The fact of a buffer that the catalog has under an earlier name."""
_UNFIT: Final = (CodecError, IngestError, RoutingError, UnknownTable)
"""Errors about one table's rows and nothing else. InvalidValue is a `CodecError`."""
_LOST: Final = frozenset({"buffer_truncated", BufferOffsetGone.code})


class _LeavesOthers(Exception):
    """Not an error: the end came while an operation waited for room in the log. The next start takes it."""


@dataclass(slots=True)
class ShardProgress:
    """How far a shard of the buffer is in the log."""

    place: BufferOffset
    """Everything below is in the log or puts nothing there, except held parts."""
    end: BufferOffset
    """End of the buffer's shard, when it was last checked."""
    taken: int = 0
    """Number of operations taken since this process started."""
    repeated: int = 0
    """Number of repeated writes that were left out."""
    undecodable: int = 0
    """Number of items that held no operation and were left out."""


@dataclass(slots=True)
class TakingProgress:
    """Progress of a stream that reads from a buffer."""

    buffer: str
    shards: dict[ShardId, ShardProgress] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    """Why each held table is held, by name."""

    def facts(self) -> dict[str, Any]:
        """Return the facts, JSON-able."""
        return {
            "name": self.buffer,
            "role": "reads",
            "shards": {str(shard): asdict(one) for shard, one in sorted(self.shards.items())},
            "held": dict(self.held),
        }


class BufferTaking:
    """Takes a buffer's operations into a stream's log.

    Args:
        taker: makes the operations this stream's own.
        look_s: how often to check that the buffer is still the same one, and whether a held table is requested.
        note_s: shortest time between two notes of passed items: each is a catalog write per shard.
        again_within: offsets of a shard within which a repeated write is recognized; a start reads as many.
    """

    def __init__(
        self,
        buffer: WriteBuffer,
        name: str,
        catalog: Catalog,
        stream: StreamId,
        log: LogAppender,
        taker: OperationTaker,
        *,
        look_s: float = 2.0,
        note_s: float = 2.0,
        again_within: int = AGAIN_WITHIN,
    ) -> None:
        self.progress = TakingProgress(name)
        self.note_s: Final = note_s
        self.again_within: Final = again_within
        self._look_s = look_s
        self._buffer = buffer
        self._name = name
        self._catalog = catalog
        self._stream = stream
        self._log = log
        self._taker = taker
        self._known_name = known_name(catalog, stream, name)
        self._scope = facts_scope(stream, self._known_name)
        self._failed: BaseException | None = None
        self._lock = threading.Lock()
        self._ends: tuple[threading.Event, ...] = ()
        """Events that stop it when set."""

    def run(self, stop: threading.Event, *, until_caught_up: bool = False, tell: Callable[[], None]) -> None:
        """Take operations until stopped; with `until_caught_up`, until the log has what the buffer had at the call.

        Raises:
            WriteBufferError (`buffer_replaced`): the buffer isn't the one that was read before.
            CatalogError: the log was written with another catalog.
            WriteBufferError (`buffer_truncated`): the buffer ends before the position already read.
            BufferOffsetGone: the buffer has dropped items that weren't taken yet.
            BufferUnavailable, BufferMissing, BufferRefused: as the buffer raises them.
            UnsupportedFormat: a newer Millstream wrote into the buffer; nothing is passed over.
            LogError (`out_of_order`), DiskFull, AppendOutcomeUnknown …: as the log raises them. Start again at the
                position that the log has reached.
        """
        while self._run(stop, until_caught_up=until_caught_up, tell=tell):
            logger.info("a table of the buffer that was held is asked for", buffer=self._name)

    def _run(self, stop: threading.Event, *, until_caught_up: bool, tell: Callable[[], None]) -> bool:
        """Take operations, as `run`; return whether it ended in order to restart."""
        self._check_identity()
        shards = self._buffer.shards()
        replay = self._plan(shards)
        asked = False
        readers = {shard: self._reader(shard, replay) for shard in shards}
        ended = threading.Event()
        self._ends = (stop, ended)
        ends = {shard: reader.end_offset() if until_caught_up else None for shard, reader in readers.items()}
        for shard, reader in readers.items():
            self.progress.shards[shard] = ShardProgress(replay.place(shard), reader.end_offset())

        def fail(error: BaseException) -> None:
            self._fail(error)
            ended.set()

        workers = [
            Worker(
                f"buffer-{shard}",
                partial(self._run_shard, reader, replay, ends[shard], stop, ended, tell),
                on_failure=fail,
            )
            for shard, reader in readers.items()
        ]
        tell()
        for worker in workers:
            worker.start()
        checked_s = time.monotonic()
        try:
            while any(worker.is_alive for worker in workers):
                for worker in workers:
                    worker.join(_WAIT_S / len(workers))
                if time.monotonic() - checked_s > self._look_s and not ended.is_set():
                    self._check_identity()
                    if self.progress.held and self._is_asked_again():
                        asked = True
                        ended.set()
                    checked_s = time.monotonic()
        except MillstreamError as error:
            self._fail(error)
        finally:
            ended.set()
            for worker in workers:
                worker.join()
            for reader in readers.values():
                reader.close()
        if self._failed is not None:
            if isinstance(self._failed, WriteBufferError) and self._failed.code in _LOST:
                self._check_identity()  # reports further progress, if there is any
            raise self._failed
        return asked and not stop.is_set()

    # --- where to begin

    def _check_identity(self) -> None:
        known, found = self._catalog.fact(self._scope, "identity"), self._buffer.identity()
        if known is None and (earlier := self._earlier_name(found)) is not None:
            self._catalog.put_fact(self._scope, _KNOWN_AS, earlier)
            self._known_name, self._scope = earlier, facts_scope(self._stream, earlier)
            logger.info("the buffer was read before, by another name", buffer=self._name, earlier=earlier)
        elif known is None:
            strange = set(self._log.reached()) - {row.id for row in self._catalog.all_sources(self._stream)}
            if strange:
                raise CatalogError(
                    f"the log has taken operations from sources that the catalog lacks ({', '.join(map(str, sorted(strange)))})",
                    hint="Restore the catalog: a new one would read the same operations again.",
                )
            self._catalog.put_fact(self._scope, "identity", found)
        elif known != found:
            raise WriteBufferError(
                f"write buffer {self._name} isn't the one read before: it was created again",
                code="buffer_replaced",
                buffer=self._name,
                known=known,
                found=found,
            )

    def _earlier_name(self, identity: str) -> str | None:
        """Return the name by which the stream has read this very buffer before: its folder was moved, or is written otherwise."""
        names = [
            row.database for row in self._catalog.all_sources(self._stream) if row.system_identifier == OF_A_BUFFER
        ]
        scopes = {name: facts_scope(self._stream, name) for name in reversed(names)}
        return next((n for n, scope in scopes.items() if self._catalog.fact(scope, "identity") == identity), None)

    def _plan(self, shards: tuple[ShardId, ...]) -> BufferReplay:
        """Return the plan from the log's positions and the held parts."""
        facts = self._catalog.facts(self._scope)
        checkpoints = []
        for shard in shards:
            reached = self.reached(self._source(shard))
            checkpoints.append(Checkpoint.of_shard(shard, reached))
            passed = facts.get(f"passed/{shard}")
            if passed is not None and passed["behind"] <= reached:
                checkpoints.append(Checkpoint.of_shard(shard, BufferOffset(passed["place"])))
        self.progress.held.clear()
        for name, fact in facts.items():
            if isinstance(fact, dict) and "held_from" in fact:
                if fact.pop(_AGAIN, False):
                    self._catalog.put_fact(self._scope, name, fact)
                part = PartitionRows(ShardId(fact["shard"]), fact["table"], fact["partition"])
                start = max(BufferOffset(fact["held_from"]), self.reached(self._source(part.shard, part)))
                checkpoints.append(Checkpoint(part, start, start))
        return fold(checkpoints)

    def _is_asked_again(self) -> bool:
        return any(isinstance(fact, dict) and _AGAIN in fact for fact in self._catalog.facts(self._scope).values())

    def _source(self, shard: ShardId, part: PartitionRows | None = None) -> SourceId:
        """Return the number by which the log knows a shard of the buffer, or a held part of one."""
        name = self._known_name
        told = name if part is None else f"{name}/{part.table}/{part.partition or ''}"
        return self._catalog.resolve_source(self._stream, OF_A_BUFFER, told, int(shard))

    def _reader(self, shard: ShardId, replay: BufferReplay) -> ShardReader:
        """Return a reader of a shard at its start position; raises a typed error if items there are gone."""
        reader = self._buffer.reader(shard)
        start = replay.start(shard)
        if start == BUFFER_START:
            # Begin at the smallest offset that existed when the shard was first read.
            began = self._catalog.fact(self._scope, f"began/{shard}")
            if began is None:
                self._catalog.put_fact(self._scope, f"began/{shard}", int(reader.place))
            elif began < reader.place:
                reader.seek(BufferOffset(began))  # items dropped since then are reported on reading
            return reader
        try:
            # The items that it had must still exist, even if it starts with held ones.
            reader.seek(replay.end(shard))
            reader.seek_earliest()
            # Items before the start are only looked at. If the start itself is gone, that raises.
            reader.seek(min(start, max(reader.place, BufferOffset(start - self.again_within))))
        except WriteBufferError as error:
            if error.code != "buffer_seek_beyond_end":
                raise
            reader.close()
            raise WriteBufferError(
                f"shard {shard} of write buffer {self._name} ends at {error.details['end']}, and the log has what lay there up to {replay.end(shard)}",
                code="buffer_truncated",
                buffer=self._name,
                shard=int(shard),
                place=int(replay.end(shard)),
                end=error.details["end"],
            ) from error
        return reader

    # --- one shard: a thread of its own ----------------------------------------------------------------------------

    def _run_shard(
        self,
        reader: ShardReader,
        replay: BufferReplay,
        end: BufferOffset | None,
        stop: threading.Event,
        ended: threading.Event,
        tell: Callable[[], None],
    ) -> None:
        one = _ShardTaking(self, reader, replay)
        with contextlib.suppress(_LeavesOthers):
            while not stop.is_set() and not ended.is_set():
                if end is not None and reader.place >= end:
                    break
                if one.step():
                    tell()
                one.note_passed()
            one.settle()
            one.note_passed(at_once=True)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failed is None:
                self._failed = error

    # --- what `_ShardTaking` needs ---------------------------------------------------------------------------------

    def submit(self, op: WriteOps) -> Future[Ack]:
        """Hand the operation to the log; raise `_LeavesOthers` if it has no room before this ends."""
        try:
            return self._log.submit(op, gives_up=self.leaves_others)
        except Overloaded:
            raise _LeavesOthers from None

    def leaves_others(self) -> bool:
        """Return whether it was stopped and the log is written: only other machines are waited for."""
        return any(end.is_set() for end in self._ends) and self._log.is_written()

    def make_ours(self, table: TableRows) -> tuple[TableRows, ...]:
        """Transform as `OperationTaker.taken`."""
        return self._taker.taken(table)

    def source(self, shard: ShardId, part: PartitionRows | None = None) -> SourceId:
        """Return the number as `_source`."""
        return self._source(shard, part)

    def reached(self, source: SourceId) -> BufferOffset:
        """Return the position that the log has reached for that source."""
        return BufferOffset(self._log.reached().get(source, Lsn(BUFFER_START)))

    def hold(self, part: PartitionRows, offset: BufferOffset, why: MillstreamError) -> None:
        """Note durably that a part's rows are left out from an offset on."""
        fact = {"shard": int(part.shard), "table": part.table, "partition": part.partition, "held_from": int(offset)}
        self._catalog.put_fact(self._scope, _fact_name(part), {**fact, "code": why.code, "reason": why.message})
        self.progress.held[part.table] = why.message
        logger.error(
            "a table of the buffer is held; others go on",
            buffer=self._name,
            table=part.table,
            partition=part.partition,
            shard=int(part.shard),
            offset=int(offset),
            code=why.code,
            error=why.message,
            hint=f"{why.hint} Then restart, or run `millstream tables retry`: the table's missing rows are read from the buffer.".strip(),
        )

    def passed(self, shard: ShardId, place: BufferOffset, *, behind: BufferOffset) -> None:
        """Note durably that a log which has reached `behind` lacks nothing of a shard below a place."""
        self._catalog.put_fact(self._scope, f"passed/{shard}", {"behind": int(behind), "place": int(place)})

    def release(self, part: PartitionRows) -> None:
        """Note durably that a part lacks nothing."""
        self._catalog.drop_fact(self._scope, _fact_name(part))
        logger.info("a table of the buffer has what it lacked", buffer=self._name, table=part.table)


def facts_scope(stream: StreamId, buffer: str) -> str:
    """Return the catalog's scope for a stream's notes on the buffer that it reads from."""
    return f"buffer/{stream}/{buffer}"


def known_name(catalog: Catalog, stream: StreamId, buffer: str) -> str:
    """Return the name under which the catalog has its notes on a buffer, whose folder may have been moved since."""
    return str(catalog.fact(facts_scope(stream, buffer), _KNOWN_AS, default=buffer))


def ask_again(catalog: Catalog, stream: StreamId, buffer: str, table: str) -> bool:
    """Request a held table; return False if it isn't held.

    A running reader takes the missing rows within seconds; otherwise the next start does.
    """
    wanted, scope = parse_qualified_name(table), facts_scope(stream, known_name(catalog, stream, buffer))
    held = {
        name: fact
        for name, fact in catalog.facts(scope).items()
        if isinstance(fact, dict) and "held_from" in fact and parse_qualified_name(fact["table"]) == wanted
    }
    for name, fact in held.items():
        catalog.put_fact(scope, name, fact | {_AGAIN: True})
    return bool(held)


class _ShardTaking:
    """One shard's operations, in their order."""

    def __init__(self, taking: BufferTaking, reader: ShardReader, replay: BufferReplay) -> None:
        self._taking = taking
        self._reader = reader
        self._replay = replay
        self._progress = taking.progress.shards[reader.shard]
        self._source = taking.source(reader.shard)
        self._catching_up = {
            part: taking.source(part.shard, part) for part in replay.held if part.shard == reader.shard
        }
        """Parts that were held, and are taken again."""
        self._handed = {source: taking.reached(source) for source in (self._source, *self._catching_up.values())}
        """The position of each source once everything handed to the log is durable."""
        self._held: set[PartitionRows] = set()
        self._start = replay.start(reader.shard)
        self._recent: OrderedDict[tuple[WriteId, int], BufferOffset] = OrderedDict()
        """The last position of each recent identified write, oldest first."""
        self._in_flight: deque[tuple[Future[Ack], int, BufferOffset]] = deque()
        self._in_flight_bytes = 0
        self._noted = replay.place(reader.shard)
        """The position last noted as passed, or the start."""
        self._noted_s = time.monotonic()

    def step(self) -> bool:
        """Take the next operation; return whether there was one.

        Raises the error of this operation or of one before it.
        """
        try:
            found = self._reader.read(wait_s=0.0 if self._in_flight else _WAIT_S)
        except BufferedOpUndecodable as error:
            if isinstance(error.__cause__, UnsupportedFormat):
                raise error.__cause__ from error  # a newer Millstream's: must not be skipped
            if error.details["offset"] < self._start:
                return True
            self._progress.undecodable += 1
            logger.warning("passed over", buffer=error.details["buffer"], code=error.code, error=error.message)
            return True
        if found is ReadPause.PENDING:
            self.settle()
            self._progress.end = self._reader.end_offset()
            return False
        assert not isinstance(found, ReadPause), "a reader that has said what is gone is read again"
        self._take(found)
        return True

    def drain(self) -> None:
        """Wait until everything handed to the log is durable; raises the log's errors."""
        while self._in_flight:
            self._await_one()

    def settle(self) -> None:
        """Drain, and release held parts whose items below the shard's own position are all taken."""
        self.drain()
        if self._reader.place >= self._replay.place(self._reader.shard):
            self._release()

    def note_passed(self, *, at_once: bool = False) -> None:
        """Note the reader's position if the log doesn't record it: from time to time, or at once."""
        place = self._reader.place
        if place <= max(self._noted, self._handed[self._source]):
            return
        if not at_once and time.monotonic() - self._noted_s < self._taking.note_s:
            return
        self.drain()
        self._noted_s = time.monotonic()
        # An older note claims too little, never too much; the next one catches up.
        with contextlib.suppress(CatalogError, DiskFull):
            self._taking.passed(self._reader.shard, place, behind=self._handed[self._source])
            self._noted = place
        self._progress.place = max(self._progress.place, place)

    def _is_repeated(self, found: BufferedOp) -> bool:
        """Return whether the same write lies a little before; remember this one."""
        offset = found.meta.offset
        while self._recent and next(iter(self._recent.values())) < offset - self._taking.again_within:
            self._recent.popitem(last=False)
        (write,) = writes_in(found.op.operations)
        if write is None:
            return False
        # Count from the last occurrence, not the first: a reader that starts between them may not see the
        # first.
        is_repeated = write in self._recent
        self._recent[write] = offset
        self._recent.move_to_end(write)
        return is_repeated

    def _take(self, found: BufferedOp) -> None:
        offset = found.meta.offset
        is_repeated = self._is_repeated(found)
        if offset < self._start:
            return
        if is_repeated:
            self._progress.repeated += 1
            return
        if offset >= self._replay.place(self._reader.shard):
            self._release()
        tables: list[TableRows] = []
        for table in found.op.tables:
            part = PartitionRows(self._reader.shard, table.schema.full_name, table.partition)
            if part in self._held or self._is_persisted(part, offset):
                continue
            try:
                tables += self._taking.make_ours(table)
            except _UNFIT as error:
                self.drain()
                self._taking.hold(part, offset, error)
                self._held.add(part)
                self._catching_up.pop(part, None)
        self._append(found, tuple(tables))

    def _is_persisted(self, part: PartitionRows, offset: BufferOffset) -> bool:
        place = self._replay.place(part.shard)
        return offset < place and self._replay.is_persisted(part, offset)

    def _append(self, found: BufferedOp, tables: tuple[TableRows, ...]) -> None:
        sources = list(self._catching_up.values())
        if found.meta.offset >= self._replay.place(self._reader.shard):
            sources.append(self._source)
        if tables:
            self._progress.taken += 1
            after = BufferOffset(found.meta.offset + 1)
            op = WriteOps(
                found.op.operations,
                tables,
                reached={source: Lsn(after) for source in sources},
                behind={source: Lsn(self._handed[source]) for source in sources},
            )
            self._handed.update(dict.fromkeys(sources, after))
            size = op.size_bytes
            self._in_flight.append((self._taking.submit(op), size, found.meta.offset))
            self._in_flight_bytes += size
        while self._in_flight and (self._in_flight_bytes > _IN_FLIGHT_BYTES or self._in_flight[0][0].done()):
            self._await_one()

    def _await_one(self) -> None:
        future, size, offset = self._in_flight[0]
        while not wait([future], timeout=_WAIT_S).done:
            if self._taking.leaves_others():
                self._in_flight.clear()  # durable here: a restart continues after it
                return
        self._in_flight.popleft()
        self._in_flight_bytes -= size
        future.result()
        self._progress.place = max(self._progress.place, BufferOffset(offset + 1))

    def _release(self) -> None:
        """Release the held parts that have everything below the shard's own position: they continue with the others."""
        if self._catching_up:
            self.drain()
        for part in self._catching_up:
            self._taking.release(part)
        self._catching_up.clear()


def _fact_name(part: PartitionRows) -> str:
    return f"held/{part.shard}/{part.table}/{part.partition or ''}"
