"""One of several writers of a stream: registered in the catalog, kept alive among the others, and heir of dead ones.

Several processes of a home may each write to its streams, each to its own shards in the one folder. They
share the catalog, which is in PostgreSQL then. Each writer has a thread that publishes its position, lets
readers pass numbers given to others while it is idle, and recovers the shards of this folder's writers
whose leases have expired. Which writer a newer one fences, `protocol.sequencer.ledger` decides.

A writer announces to the others when it has made something readable, so that an idle one asks the catalog
at once and not at its next turn. Announcements may get lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import structlog

from millstream.closing import Closing
from millstream.errors import CatalogError, ConfigError, MillstreamError, SequencingError, ShardLocked, StaleEpoch
from millstream.model.ids import Epoch, ShardId, StreamId, WriterId
from millstream.model.positions import Seq
from millstream.protocol.sequencer import Announcement, WriterPhase
from millstream.workers import Worker, watching

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.catalog.shared_sequence import PostgresSequenceStore
    from millstream.catalog.writer_notifications import PostgresAnnouncements
    from millstream.ports import Announcements
    from millstream.protocol.sequencer import Registration, WriterEntry
    from millstream.wal.writing.number_sources import SharedNumbers
    from millstream.wal.writing.writer import LogOptions, LogWriter

logger = structlog.get_logger("millstream.writers")

EMBEDDED: Final = "`[writer] name` is set, and the catalog is embedded: several writers need one that they share"
EMBEDDED_HINT: Final = (
    "Name a PostgreSQL database in `[catalog] url`, and `millstream catalog move`; or take `[writer]` away."
)
FOLLOW_EVERY_S: Final = 0.5
"""How often an idle writer without announcements lets readers pass numbers given to others: half of the
promised second."""
_TELL_EVERY_S: Final = 0.05
"""How often a busy writer announces its position."""
_ASKING_SHARE: Final = 0.1
"""Share of its time that a writer with constant announcements spends on asking the catalog for positions."""
_SIGNS_A_LEASE: Final = 4
_TRIES: Final = 3
"""Number of tries: a catalog that is slow once may just have been busy."""
_SLOW_START_S: Final = 1.0
_LOOK_S: Final = 0.05
_PATIENCE_S: Final = 10.0
"""How long to wait for a process that holds a shard and wasn't fenced."""
_AGAIN_S: Final = 30.0
"""When to retry shards that couldn't be recovered."""


@dataclass(frozen=True, slots=True)
class WriterPlace:
    """The place and the options of a writer's log."""

    stream: StreamId
    folder: str
    options: LogOptions | None
    lease_s: float


class OneOfSeveral(Closing):
    """A writer among several, and the thread that keeps it so. Made by `open`.

    Attributes:
        log: what appends.
        name: this writer's.
        writer: its number.
        shards: the shards it writes.
    """

    def __init__(
        self,
        log: LogWriter,
        name: str,
        writer: WriterId,
        shards: tuple[ShardId, ...],
        keeper: WriterKeeper,
        store: PostgresSequenceStore,
    ) -> None:
        self.log: Final = log
        self.name: Final = name
        self.writer: Final = writer
        self.shards: Final = shards
        self._keeper = keeper
        self._store = store

    @classmethod
    def open(
        cls,
        catalog: Catalog,
        stream: StreamId,
        folder: str,
        *,
        name: str,
        location: str,
        lease_s: float,
        shard_count: int = 1,
        first_shard: int | None = None,
        options: LogOptions | None = None,
        announcements: Announcements | None = None,
        before: OwnIncarnations | None = None,
    ) -> Self:
        """Register, wait while the previous incarnation may still answer, recover its shards, and begin.

        Args:
            catalog: in PostgreSQL.
            name: the writer's: the same name gets the same shards again.
            location: distinguishes folders among all machines that share the catalog: the home's id,
                which moves with its folder.
            lease_s: how long the writer lives without a sign.
            first_shard: the first of them. None: after those of the earlier writers, if they have as many
                each.
            announcements: how writers notify each other; through the catalog if not given.
            before: this process's earlier incarnations of the writer; None: there are none.

        Raises:
            SequencingError (`lease_too_short`): the catalog answers too slowly for it.
            SequencingError (`writer_name_taken`): a writer of that name has its log elsewhere, or another process
                has become this writer since.
            SequencingError (`writer_alive`): another process recovers this writer's shards.
            LogError (`shard_taken`): one of the shards is another writer's.
            ShardLocked: another process holds the folder or a shard, and goes on holding it.
            SequencingError (`sequence_unusable`): the numbers in the catalog were changed from outside.
            CorruptWal, DiskFull …: as `LogWriter.open`.
        """
        began = time.monotonic()
        place = WriterPlace(stream, folder, options, lease_s)
        with ExitStack() as opened:
            store = opened.enter_context(closing(store_of(catalog, stream, lease_s)))
            before = OwnIncarnations() if before is None else before
            registration, shards, log = _begin(store, place, name, location, shard_count, first_shard, before)
            opened.enter_context(log)
            took_s = time.monotonic() - began
            if took_s > _SLOW_START_S:
                logger.info(
                    "a writer took long to start",
                    writer=name,
                    seconds=round(took_s, 2),
                    waited_s=registration.waits_us / 1e6,
                )
            if announcements is None:
                announcements = _announcements_of(catalog, stream)
            keeper = WriterKeeper(log, store, registration, name, location, place, announcements)
            opened.pop_all()
        return cls(log, name, registration.writer, shards, keeper, store)

    def close(self) -> None:
        """Write the waiting operations, publish that nothing is undecided, and deregister."""
        self._keeper.stop()
        self.log.close()
        self._store.close()


class OwnIncarnations:
    """A process's incarnations as one writer of a stream; the process keeps it from one opening to the next.

    A process that starts fences the earlier incarnation, whatever that one does. A process that was fenced registers
    again only once the incarnation that fenced it has ended. So one of two processes with one name ends, and they
    don't fence each other for ever.
    """

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        """The newest epoch that this process was given; None before the first."""
        self._other: tuple[Epoch, float] | None = None
        """Epoch of another process's incarnation that has recovered the log, and when it was first seen."""

    def check_others_gone(self, entry: WriterEntry, store: PostgresSequenceStore, lease_s: float) -> None:
        """Raise if another process has become this writer since this one registered, and lives.

        Another writer of the stream that recovers the shards settles the entry at once after that; a process that
        goes on as this writer doesn't.

        Raises:
            SequencingError (`writer_alive`): the shards are being recovered, or their recovery has just ended.
            SequencingError (`writer_name_taken`): the other process has been writing for longer than a lease.
        """
        is_others = self.epoch is not None and entry.epoch > self.epoch
        if not is_others or entry.phase is WriterPhase.SETTLED or entry.writer in store.view().expired:
            self._other = None
            return
        if entry.phase is not WriterPhase.OPEN:
            self._other = None
        elif self._other is None or self._other[0] != entry.epoch:
            self._other = entry.epoch, time.monotonic()
        elif time.monotonic() - self._other[1] > lease_s:
            raise SequencingError(
                f"another process writes the stream as its writer {entry.name}, which this process was before",
                code="writer_name_taken",
                writer=entry.name,
                location=entry.location,
            )
        raise SequencingError(
            f"another process has taken over writer {entry.name}, and its lease runs",
            code="writer_alive",
            hint="Wait: this process registers again once the other has recovered the writer's shards.",
            writer=entry.name,
            lease_s=lease_s,
        )


class _Caller:
    """A thread that announces a writer's readable position, and receives the others'.

    Its waits hold up no other thread.
    """

    def __init__(self, log: LogWriter, registration: Registration, announcements: Announcements) -> None:
        self._log = log
        self._registration = registration
        self._announcements = announcements
        self._known = log.persisted_upto()
        """The greatest position that any writer has announced."""
        self._done = threading.Event()
        self._called = threading.Event()
        Worker("writer-calls", self._run).start()

    def stop(self) -> None:
        """End the thread, when it returns from its wait."""
        self._done.set()
        self._called.set()

    def wait(self, timeout_s: float) -> None:
        """Return when a writer has announced more than this one knows, or after that many seconds."""
        self._called.wait(timeout_s)
        self._called.clear()

    def known_at_most(self, newest: Seq) -> None:
        """Cap the announced position: no writer was given more, so a greater announcement was wrong."""
        self._known = min(self._known, newest)

    def _run(self) -> None:
        tells_at_s = 0.0
        with closing(self._announcements):
            while not self._done.is_set():
                heard = self._announcements.hear(_TELL_EVERY_S)
                self._known = max(self._known, *(told.position for told in heard), Seq(0))
                position = self._log.persisted_upto()
                if position < self._known:
                    self._called.set()
                elif position > self._known and time.monotonic() >= tells_at_s:
                    self._known, tells_at_s = position, time.monotonic() + _TELL_EVERY_S
                    self._announcements.tell(
                        Announcement(self._registration.writer, self._registration.epoch, position)
                    )


class WriterKeeper:
    """The thread that keeps a writer alive, and recovers the shards of dead ones.

    Args:
        location: the folder's. Writers that have their logs elsewhere can't be recovered here.
        announcements: how writers notify each other; closed with the thread.
    """

    def __init__(
        self,
        log: LogWriter,
        store: PostgresSequenceStore,
        registration: Registration,
        name: str,
        location: str,
        place: WriterPlace,
        announcements: Announcements,
    ) -> None:
        self._log = log
        self._store = store
        self._name = name
        self._location = location
        self._place = place
        self._every_s = min(FOLLOW_EVERY_S, place.lease_s / _SIGNS_A_LEASE)
        self._asked_s = time.monotonic()
        """When the catalog last answered."""
        self._inherits_from_s = 0.0
        """Time before which no writer is taken for dead."""
        self._failed_s: dict[str, float] = {}
        """When a writer's shards couldn't be recovered, by writer."""
        self._done = threading.Event()
        self._heir: Worker | None = None
        """Recovers dead writers' shards, which may take longer than a lease."""
        self._told: dict[str, str] = {}
        """The last message about each writer, so that it is logged once."""
        self._caller = _Caller(log, registration, announcements)
        try:
            self._worker = Worker(f"writer-{name}", self._run).start()
        except BaseException:
            self._caller.stop()
            raise

    def stop(self) -> None:
        """End the thread, once its current recovery is done."""
        self._done.set()
        self._caller.stop()
        self._worker.join()
        if self._heir is not None:
            self._heir.join()

    def _run(self) -> None:
        asks_at_s = time.monotonic() + self._every_s
        while not self._done.is_set():
            self._caller.wait(max(0.0, asks_at_s - time.monotonic()))
            asked_s = time.monotonic()
            if not self._ask():
                return
            now_s = time.monotonic()
            asks_at_s = now_s + self._every_s
            # With constant announcements, it spends a tenth of the time on asking.
            self._done.wait(min(self._every_s, (now_s - asked_s) / _ASKING_SHARE))

    def _ask(self) -> bool:
        """Renew the lease, follow the others, and recover dead ones; return False if this writer has ended."""
        try:
            view = self._log.follow() or self._store.view()
        except StaleEpoch as error:
            if self._log.failure() is None:
                return True  # a group is being written: the log learns it after that
            logger.warning("this writer was taken over", writer=self._name, error=error.message)
            return False
        except CatalogError as error:
            self._say("catalog", f"the catalog can't be asked: {error.message}")
            return True
        except MillstreamError as error:
            logger.warning("this writer ended", writer=self._name, error=error.message)
            return False
        now_s = time.monotonic()
        if now_s - self._asked_s > self._place.lease_s / 2:
            # The catalog was away, or this process was suspended: other writers, too, get a lease's time
            # to give a sign.
            self._inherits_from_s = now_s + self._place.lease_s
        self._asked_s = now_s
        self._told.pop("catalog", None)
        self._caller.known_at_most(view.newest)
        if view.expired and now_s >= self._inherits_from_s and (self._heir is None or not self._heir.is_alive):
            self._heir = Worker(f"heir-{self._name}", partial(self._look_after, view.expired)).start()
        return True

    def _look_after(self, expired: frozenset[int]) -> None:
        with suppress(CatalogError):
            for entry in self._store.writers():
                if entry.writer not in expired or entry.name == self._name:
                    continue
                if time.monotonic() < self._failed_s.get(entry.name, -math.inf) + _AGAIN_S:
                    continue
                if entry.location != self._location:
                    self._say(entry.name, f"its lease has run out, and its log lies in {entry.location}")
                    continue
                try:
                    inherit(self._store, self._place, entry)
                except MillstreamError as error:
                    if error.code in {"writer_alive", StaleEpoch.code}:
                        continue  # it has come back, or another process was faster
                    self._failed_s[entry.name] = time.monotonic()
                    self._say(entry.name, f"its lease has run out, and its shards can't be recovered: {error.message}")
                else:
                    self._told.pop(entry.name, None)
                    self._failed_s.pop(entry.name, None)

    def _say(self, of: str, what: str) -> None:
        if self._told.get(of) != what:
            self._told[of] = what
            logger.warning("a writer's numbers wait", writer=of, why=what)


def _begin(
    store: PostgresSequenceStore,
    place: WriterPlace,
    name: str,
    location: str,
    shard_count: int,
    first_shard: int | None,
    own: OwnIncarnations,
) -> tuple[Registration, tuple[ShardId, ...], LogWriter]:
    from millstream.wal.files import RealFiles
    from millstream.wal.shard_locks import refuse_beside_an_owner

    before = {entry.name: entry for entry in store.writers()}
    refuse_beside_an_owner(RealFiles(), place.folder, before[name].writer if name in before else None)
    if name in before:
        own.check_others_gone(before[name], store, place.lease_s)
    above = Epoch(0)
    while True:
        registration = store.register(name, location, above=above)
        own.epoch = registration.epoch
        first = (registration.writer - 1) * shard_count if first_shard is None else first_shard
        shards = tuple(ShardId(first + number) for number in range(shard_count))
        try:
            return registration, shards, _open_log(store, place, registration, shards)
        except StaleEpoch as error:
            known = error.details.get("epoch", 0)
            if "writer" in error.details or above >= known:
                raise
            # The shards were this writer's, so no newer writer exists: the catalog is older than the log.
            above = Epoch(known)
        except MillstreamError:
            if registration.given_to == 0:
                # It has no log anywhere: no reader has to wait for it.
                with suppress(MillstreamError):
                    store.settle(registration.writer, registration.epoch)
            raise


def inherit(store: PostgresSequenceStore, place: WriterPlace, dead: WriterEntry) -> None:
    """Recover a dead writer's log in this folder: its whole groups stay, its other numbers will never exist.

    Raises:
        SequencingError (`writer_alive`): its lease hasn't expired.
        StaleEpoch: it left nothing undecided.
        CorruptWal, DiskFull …: as `LogWriter.open`.
    """
    taken = store.take_over(dead.writer)
    _open_log(store, place, taken, ()).close()
    logger.warning("recovered the shards of a writer that gave no sign", writer=dead.name, given_to=int(dead.given_to))


def _open_log(
    store: PostgresSequenceStore, place: WriterPlace, registration: Registration, shards: tuple[ShardId, ...]
) -> LogWriter:
    """Open the log under a registration; waits for as long as the previous incarnation may still answer its callers."""
    from millstream.wal.writing.number_sources import SharedNumbers
    from millstream.wal.writing.writer import LogWriter

    numbers = SharedNumbers(store, registration)
    patient_until_s = time.monotonic() + _PATIENCE_S
    while True:
        check_round_trip(numbers.keep_lease, place.lease_s)
        may_wait = numbers.waits_on() or (not registration.seizes and time.monotonic() < patient_until_s)
        try:
            with _kept_alive(numbers, place.lease_s):
                return LogWriter.open(
                    place.folder,
                    stream=place.stream,
                    shards=shards,
                    epoch=registration.epoch,
                    reservations=numbers,
                    options=place.options,
                    writer=registration.writer,
                )
        except ShardLocked:
            if not may_wait:
                raise
        time.sleep(_LOOK_S)


@contextmanager
def _kept_alive(numbers: SharedNumbers, lease_s: float) -> Iterator[None]:
    """Renew the lease during the block: recovery of a long log, or the wait for the folder, may outlast it."""

    def renew() -> bool:
        try:
            numbers.keep_lease()
        except StaleEpoch:
            return False
        except CatalogError:
            pass  # it is renewed again
        return True

    with watching("writer-opens", lease_s / _SIGNS_A_LEASE, renew):
        yield


def check_round_trip(ask: Callable[[], object], lease_s: float) -> float:
    """Return the catalog's response time in seconds; `lease_too_short` if it takes too much of the lease in every try."""
    round_trip_s = math.inf
    for _ in range(_TRIES):
        asked = time.monotonic()
        ask()
        round_trip_s = min(round_trip_s, time.monotonic() - asked)
        if round_trip_s <= lease_s / _SIGNS_A_LEASE:
            return round_trip_s
    raise SequencingError(
        f"the catalog took {round_trip_s:.3f} s or more to answer, {_TRIES} times, and the lease is {lease_s} s: it would run out under a writer that lives",
        code="lease_too_short",
        lease_s=lease_s,
        round_trip_s=round_trip_s,
    )


def _announcements_of(catalog: Catalog, stream: StreamId) -> PostgresAnnouncements:
    from millstream.catalog.writer_notifications import PostgresAnnouncements

    return PostgresAnnouncements(catalog.database, stream)


def store_of(catalog: Catalog, stream: StreamId, lease_s: float) -> PostgresSequenceStore:
    """Return the numbers that a stream's writers share; `ConfigError` if the catalog can't be shared."""
    from millstream.catalog.shared_sequence import PostgresSequenceStore

    refuse_embedded(catalog)
    return PostgresSequenceStore(catalog.database, stream, lease_s=lease_s)


def refuse_embedded(catalog: Catalog) -> None:
    """Raise `ConfigError` if writers can't share the catalog."""
    if catalog.database.address is None:
        raise ConfigError(EMBEDDED, hint=EMBEDDED_HINT)
