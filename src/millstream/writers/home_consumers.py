"""A home's consumers, in whichever process has their state: this one if no other does, else the other one by its socket.

One process has the home's `delivery` role, from its first request until it closes the home. The others forward
requests to it.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.catalog import TableState
from millstream.delivery.configured_consumers import FileConsumers, conflicts_of
from millstream.delivery.consumer_store import LOG_NAME, missing_state
from millstream.delivery.definition import Definition
from millstream.delivery.dependencies import Surroundings
from millstream.delivery.follower_consumers import SHOWN, CopiedConsumers
from millstream.delivery.running_consumer import Waiter
from millstream.delivery.service import Answer, StreamConsumers
from millstream.delivery.state_repair import stored_names
from millstream.errors import (
    ConfigError,
    DeliveryError,
    HomeBusy,
    HomeClosed,
    LakeBehind,
    LogError,
    MillstreamError,
    WriterClosed,
)
from millstream.ingest.uninterruptible import uninterruptible
from millstream.leadership.node_roles import LOOK_EVERY_S, Roles
from millstream.libpq import database_of
from millstream.model.as_of_parsing import parse_as_of
from millstream.model.ids import StreamId, TableId
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.processes.control_socket import ControlServer, have_done
from millstream.processes.role_locks import RoleLock, holder
from millstream.protocol.replication.node_promises import Promise, Role
from millstream.protocol.retention import HolderKind
from millstream.wal.reader import StreamReader
from millstream.wal.reading.frame_cache import DecodedFrames
from millstream.workers import Worker, watching

if TYPE_CHECKING:
    from millstream.catalog import Catalog, TableRow
    from millstream.home.home import Home
    from millstream.lake.query.query_session import LakeSession

logger = structlog.get_logger("millstream.delivery")

_ROLE: Final = "delivery"
_ACT: Final = "consumers"
_STARTS_WITHIN_S: Final = 10.0
"""How long a process with the role may take until it answers."""
_TAKES_EVERY_S: Final = 1.0
_TRY_EVERY_S: Final = 0.05
_ANSWERS_WITHIN_S: Final = 60.0
_FORWARDED_WAIT_MS: Final = 500
"""How long a forwarded `receive` waits at a time: its client may have gone."""
_PREFIX: Final = "consumer:"
"""Prefix of consumers' names among the catalog's holders, which has pipelines and followers, too."""
_OPEN_HERE: Final[weakref.WeakSet[HomeConsumers]] = weakref.WeakSet()


class HomeConsumers:
    """The consumers of a home's streams. The first request makes this process their owner, if no other process is.

    Concurrency: any number of threads. A forked child forwards to its parent, and may become the owner once that ends.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._copies: dict[str, CopiedConsumers] = {}
        self._roles = Roles(home)
        self._is_server = False
        self._is_closed = False
        self._logged: dict[str, str] = {}
        """By stream, the last logged reason why its consumers can't be opened."""
        self._of_parent: _Owner | None = None
        """A forked child's copy of its parent's owner. It stays, and isn't closed: its files are the parent's."""
        self._begin()
        _OPEN_HERE.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._own: _Owner | None = None
        self._taking: Worker | None = None

    def _begin_in_child(self) -> None:
        self._of_parent = self._own
        self._begin()

    def call(
        self,
        stream: str,
        what: str,
        name: str | None = None,
        body: Any = None,
        *,
        waiter: Waiter | None = None,
        key: str | None = None,
    ) -> Answer:
        """Carry out a request, once, also if the answer of the process that has the consumers is lost.

        See `StreamConsumers.call`; a `backfill` without a key gets one.

        Raises:
            UnknownStream: the home has no such stream.
            ReadOnly, Fenced: another node leads the stream. One that follows answers `SHOWN` from its leader's state.
            HomeBusy: another process has the consumers, and doesn't answer.
            DeliveryError …: as `StreamConsumers.call`.
        """
        waiter = waiter or Waiter()
        # An interrupted step would leave a consumer's machine between two states, or its lock held for ever.
        made: list[Answer] = []

        def call() -> Answer:
            made.append(self._call(stream, what, name, body, waiter, key))
            return made[0]

        try:
            return uninterruptible(call, leave=waiter.leave)
        except BaseException:
            for answer in made if what == "receive" else ():  # an interruption has lost it
                uninterruptible(partial(self.give_back, stream, str(name), answer))
            raise

    def give_back(self, stream: str, name: str, answer: Answer) -> bool:
        """Return the messages of a `receive` that no caller sees, which doesn't count as a failure.

        Otherwise they would come back only by their expiry. Return whether they are back.
        """
        ids = [message["ack_id"] for message in answer.body["messages"]]
        with suppress(MillstreamError):
            if ids:
                self._asked(stream, "nack", name, {"ack_ids": ids, "failed": False}, Waiter())
            return True
        return False

    def _call(self, stream: str, what: str, name: str | None, body: Any, waiter: Waiter, key: str | None) -> Answer:
        self._home.written_stream(stream)
        if self._home.config.replication.nodes:
            if what in SHOWN and self._roles.of(stream).role is Role.FOLLOWS:
                return self._copied(stream).call(what, name, body)
            self._roles.check_leads(stream)
        if what == "receive":
            return self._receive(stream, str(name), body, waiter)
        if what == "backfill" and key is None:
            key = uuid.uuid4().hex
        return self._asked(stream, what, name, body, waiter, key)

    def start(self) -> None:
        """Make this process the owner if no other process is, and make the consumers of `millstream.toml`.

        Raises:
            ConfigError: one of them can't be as it is there: it exists, and has another kind or other groups, or a variable
                of it isn't set.
        """
        self._is_server = True
        for stream in self._home.config.streams:
            check_set(self._home, stream)
        for stream in with_consumers(self._home):
            with _opening(stream, self._logged, ConfigError):
                check_consumers(self._home, stream)
                owner = self._owner() if self._roles.leads_surely(stream) else None
                if owner is not None:
                    owner.of(stream)
        self._taking = Worker("consumers-take", self._take, every_s=_TAKES_EVERY_S).start()

    def _take(self) -> bool:
        """Become the owner once this node leads a stream with consumers, and no other process is: a push needs no call.

        Return whether to look again: until the consumers of all these streams are open.
        """
        led = [stream for stream in with_consumers(self._home) if self._roles.leads_surely(stream)]
        try:
            opened = [stream for stream in led if self._opens(stream)]
        except WriterClosed:
            return False
        return not led or opened != led

    def _opens(self, stream: str) -> bool:
        """Open a stream's consumers unless another process has them; return whether they are open here."""
        with _opening(stream, self._logged, WriterClosed):
            owner = self._owner()
            if owner is not None:
                owner.of(stream)
                return True
        return False

    def _copied(self, stream: str) -> CopiedConsumers:
        with self._lock:
            found = self._copies.get(stream)
            if found is None:
                file, folder = self._home.consumers_document(stream), str(self._home.wal_folder(stream))
                found = self._copies[stream] = CopiedConsumers(stream, file, lambda: StreamReader(folder))
            return found

    def _receive(self, stream: str, name: str, body: Any, waiter: Waiter) -> Answer:
        """Wait here, a little at a time, if another process has the consumers."""
        owner = self._owner()
        if owner is not None:
            return self._unless_gone(stream, name, owner.of(stream).call("receive", name, body, waiter), waiter)
        end_s = None
        while True:
            forwarded = body
            if isinstance(body, Mapping) and type(body.get("wait_for_ms")) is int:
                end_s = time.monotonic() + min(30_000, body["wait_for_ms"]) / 1000 if end_s is None else end_s
                left_ms = max(0, int((end_s - time.monotonic()) * 1000))
                if body["wait_for_ms"] > _FORWARDED_WAIT_MS and body["wait_for_ms"] <= 30_000:
                    forwarded = {**body, "wait_for_ms": min(left_ms, _FORWARDED_WAIT_MS)}
            found = self._unless_gone(stream, name, self._asked(stream, "receive", name, forwarded, waiter), waiter)
            is_over = end_s is None or time.monotonic() >= end_s
            if found.body["messages"] or is_over or waiter.is_gone or found.has_ended:
                return found

    def _unless_gone(self, stream: str, name: str, answer: Answer, waiter: Waiter) -> Answer:
        """Return an answer; if its client has left while messages were taken, give them back, and return none."""
        if waiter.is_gone and answer.body["messages"] and self.give_back(stream, name, answer):
            return answer._replace(body={"messages": []})
        return answer

    def _asked(
        self, stream: str, what: str, name: str | None, body: Any, waiter: Waiter, key: str | None = None
    ) -> Answer:
        give_up_s = time.monotonic() + _STARTS_WITHIN_S
        may_be_done, is_sent = False, threading.Event()
        while True:
            owner = self._owner()
            try:
                if owner is not None:
                    return owner.of(stream).call(what, name, body, waiter, key=key)
                asked = {"stream": stream, "what": what, "name": name, "body": body, "key": key}
                # A status asks too: it doesn't wait a minute for a process that is stopped.
                deadline_s = max(_TRY_EVERY_S, give_up_s - time.monotonic()) if what in SHOWN else _ANSWERS_WITHIN_S
                answer = have_done(self._home, _ROLE, _ACT, asked, deadline_s=deadline_s, on_sent=is_sent.set)
                if answer is not None:
                    return Answer(**answer)
                may_be_done = is_sent.is_set()
            except WriterClosed:
                if self._is_closed:
                    raise
            except DeliveryError as error:
                if what == "delete" and may_be_done and error.code == "unknown_consumer":
                    return Answer(None)  # an earlier try, whose answer was lost, has deleted it
                raise
            if time.monotonic() > give_up_s:
                pid = holder(self._home.run_folder, _ROLE).get("pid")
                raise HomeBusy(
                    f"process {pid or 'unknown'} has the consumers' state, and doesn't answer",
                    hint="Repeat the call. If it goes on, end that process: the next call takes the consumers over.",
                    pid=pid,
                    role=_ROLE,
                )
            time.sleep(_TRY_EVERY_S)

    def close(self) -> None:
        """Give the consumers up, if this process has them."""
        with self._lock:
            self._is_closed, own = True, self._own
            self._own = None
        if self._taking is not None:
            self._taking.stop()
            self._taking.join()
        if own is not None:
            uninterruptible(own.close)

    def _owner(self) -> _Owner | None:
        """Return this process's owner of the consumers; None if another process has them."""
        with self._lock:
            if self._is_closed:
                raise HomeClosed("the home is closed")
            if self._own is None:
                self._home.prepare()
                with suppress(HomeBusy):
                    self._own = _Owner(
                        self._home,
                        RoleLock.take(self._home.run_folder, _ROLE, patience_s=0.0),
                        is_server=self._is_server,
                    )
            return self._own


def with_consumers(home: Home) -> Iterator[str]:
    """Yield the streams that have consumers, or are to have some."""
    for stream, config in home.config.streams.items():
        if config.consumers or home.delivery_folder(stream).exists():
            yield stream


@contextmanager
def _opening(stream: str, logged: dict[str, str], *passing: type[MillstreamError]) -> Iterator[None]:
    """Log why a stream's consumers can't be opened, which each call reports; some errors pass.

    Args:
        stream: the stream.
        logged: by stream, the last reason, which isn't logged again.
        passing: the errors that pass.
    """
    try:
        yield
        logged.pop(stream, None)
    except passing:
        raise
    except (MillstreamError, OSError) as error:
        reason = str(error)
        if logged.get(stream) != reason:
            logger.warning("the consumers of a stream can't be opened", stream=stream, error=reason)
        logged[stream] = reason


class _Owner:
    """The consumers of all streams that this node leads, in the process that has the role."""

    def __init__(self, home: Home, role: RoleLock, *, is_server: bool) -> None:
        self._home = home
        self._is_server = is_server
        self._lock = threading.Lock()
        self._streams: dict[str, tuple[Promise, StreamConsumers]] = {}
        self._is_closed = False
        self._logged: dict[str, str] = {}
        self._roles = Roles(home)
        with ExitStack() as opened:
            opened.callback(role.release)
            self._catalog = opened.enter_context(home.open_catalog())
            opened.callback(self._close_streams)
            opened.enter_context(ControlServer(home, _ROLE, {}, {_ACT: self._forwarded}))
            if home.config.replication.nodes:
                opened.enter_context(watching("consumers-lead", LOOK_EVERY_S, self._follow_roles))
            self._opened = opened.pop_all()

    def of(self, stream: str) -> StreamConsumers:
        """Return the consumers of a stream.

        Raises:
            WriterClosed: this process gives them up.
            DeliveryError (`consumer_state_missing`): the log is held for consumers whose state isn't there.
            DeliveryError …: as `StreamConsumers`.
        """
        with self._lock:
            if self._is_closed:
                raise WriterClosed("this process has given the consumers up")
            promise = self._roles.of(stream).promise
            found = self._streams.get(stream)
            if found is not None and found[0] != promise:
                self._close(stream)  # a promotion has replaced the state
                found = None
            if found is None:
                around = surroundings(self._home, self._catalog, stream, is_server=self._is_server)
                holders = [position.name for position in self._catalog.pipelines(around.stream_id)]
                missing = find_missing_state(self._home, stream, holders)
                if missing is not None:  # else those of the file would begin again at their `start`, unnoticed
                    raise missing
                found = self._streams[stream] = promise, StreamConsumers(around)
            return found[1]

    def _follow_roles(self) -> bool:
        """Close the consumers of streams that this node no longer leads; open those of streams that a server leads now."""
        with self._lock:
            for stream, (promise, _) in list(self._streams.items()):
                if not self._roles.leads_surely(stream) or self._roles.of(stream).promise != promise:
                    self._close(stream)
        for stream in with_consumers(self._home) if self._is_server else ():
            with _opening(stream, self._logged):
                if self._roles.leads_surely(stream):
                    self.of(stream)
        return True

    def _close(self, stream: str) -> None:
        try:
            self._streams.pop(stream)[1].close()
        except (MillstreamError, OSError) as error:
            logger.warning("the consumers' last changes weren't kept", stream=stream, error=str(error))

    def close(self) -> None:
        """Make everything durable, and release the role."""
        self._opened.close()

    def _close_streams(self) -> None:
        with self._lock:
            streams, self._streams, self._is_closed = self._streams, {}, True
        with ExitStack() as all_of_them:
            for _, stream in streams.values():
                all_of_them.callback(stream.close)

    def _forwarded(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        answer = self.of(asked["stream"]).call(asked["what"], asked["name"], asked["body"], key=asked.get("key"))
        return answer._asdict()


class ConsumerHolders:
    """The consumers among the catalog's holders. See `Holding`."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._stream = stream

    def hold(self, consumer: str, needed_from: Seq) -> None:
        """Hold the log for a consumer."""
        self._catalog.set_needed_from(self._stream, _PREFIX + consumer, needed_from, kind=HolderKind.CONSUMER)

    def release(self, consumer: str) -> None:
        """Hold nothing for a consumer."""
        self._catalog.release(self._stream, _PREFIX + consumer)

    def names(self) -> set[str]:
        """Return the consumers that hold the log, or were cut off."""
        return set(self._known())

    def cut_off(self) -> set[str]:
        """Return the consumers that were cut off."""
        return {name for name, is_cut_off in self._known().items() if is_cut_off}

    def replace(self, cursors: Mapping[str, int]) -> None:
        """Hold the log behind consumers' cursors, and for no other consumer. One that was cut off stays so."""
        known = self._known()
        for name in known:
            if not (known[name] and name in cursors):
                self.release(name)
        for name, cursor in cursors.items():
            if not known.get(name, False):
                self.hold(name, Seq(cursor + 1))

    def _known(self) -> dict[str, bool]:
        """Return the consumers that hold the log, and whether each was cut off."""
        return {
            position.name.removeprefix(_PREFIX): position.cut_off_at is not None
            for position in self._catalog.pipelines(self._stream)
            if position.kind is HolderKind.CONSUMER
        }


def find_missing_state(home: Home, stream: str, holders: Iterable[str]) -> DeliveryError | None:
    """Return the error if consumers of a stream that this node leads hold its log, and their state was moved or removed.

    Args:
        holders: the names of the log's holders in the catalog.
    """
    file = home.delivery_folder(stream) / LOG_NAME
    if file.exists() or not any(name.startswith(_PREFIX) for name in holders) or not Roles(home).leads_surely(stream):
        return None
    return missing_state(str(file))


def surroundings(home: Home, catalog: Catalog, stream: str, *, is_server: bool = False) -> Surroundings:
    """Return what a stream's consumers need of the home."""
    folder, decoded = str(home.wal_folder(stream)), DecodedFrames()
    try:
        stream_id = StreamReader(folder).stream_id
    except LogError:
        stream_id = catalog.resolve_stream(stream)

    def quarantined() -> Mapping[TableId, str]:
        rows = catalog.tables(stream_id)
        return {row.id: qualified_name(row.namespace, row.name) for row in rows if row.state is TableState.QUARANTINED}

    def captured() -> list[TableSchema]:
        found = catalog.latest_schemas(stream_id)
        return [
            *found.values(),
            *(
                _keyless(row)
                for row in catalog.tables(stream_id)
                if row.id not in found and row.state is TableState.HISTORY_ONLY
            ),
        ]

    def mistake(consumer: str, field: str | None, problem: str) -> MillstreamError:
        fields = () if field is None else field.split(".")
        return home.loaded_config.mistake(("streams", stream, "consumers", consumer, *fields), problem)

    return Surroundings(
        stream,
        stream_id,
        home.delivery_folder(stream),
        lambda: StreamReader(folder, decoded=decoded),
        ConsumerHolders(catalog, stream_id),
        lambda text, of: parse_as_of(text, of, now=datetime.now(UTC)),
        quarantined,
        captured,
        FileConsumers(stream, configured_consumers(home, stream), mistake, home.loaded_config.unset_consumers(stream)),
        partial(_open_lake, home, stream, stream_id),
        is_server,
        _database(home, stream),
    )


def _keyless(row: TableRow) -> TableSchema:
    """Return the schema of a table without a usable identity before its first record, which brings the columns."""
    return TableSchema(row.id, row.schema_version, row.source, row.namespace, row.name, (), kind=row.kind)


def _database(home: Home, stream: str) -> str:
    """Return the name of the database that a stream captures; empty if there is none."""
    config = home.config.streams.get(stream)
    if config is None or config.source is None:
        return ""
    with suppress(ValueError):  # capture reports it
        return database_of(config.source.dsn)
    return ""


def _open_lake(home: Home, stream: str, stream_id: StreamId, upto: Seq) -> LakeSession:
    """Open a stream's lake as of a number, or of its last cut if that is earlier. Raises `LakeError` if there is none."""
    from millstream.home.config_mapping import lake_layout
    from millstream.lake.commit_cuts import last_cut
    from millstream.lake.query.query_session import LakeSession

    config = home.config.streams.get(stream)
    layout = None if config is None else lake_layout(home, stream, config, stream_id)
    cut = None if layout is None else last_cut(layout)
    if layout is None or cut is None:
        raise LakeBehind("nothing has landed in the lake so far")
    return LakeSession(layout, as_of=Seq(min(upto, cut.n)), partitions=True)


def configured_consumers(home: Home, stream: str) -> dict[str, Definition]:
    """Return the consumers of a stream that are in `millstream.toml`."""
    config = home.config.streams.get(stream)
    consumers = {} if config is None else config.consumers
    return {name: Definition.parse(consumer.body(name), is_trusted=True) for name, consumer in consumers.items()}


def check_consumers(home: Home, stream: str) -> None:
    """Check that a stream's consumers can be as `millstream.toml` has them.

    Raises:
        ConfigError: one of them has another kind or other groups.
        DeliveryError (`consumer_state_unreadable`): their state can't be read.
    """
    for name, conflict in conflicts_of(home.delivery_folder(stream), configured_consumers(home, stream)):
        raise home.loaded_config.mistake(("streams", stream, "consumers", name, conflict.field), conflict.problem)


def check_set(home: Home, stream: str) -> None:
    """Raise `ConfigError` if a variable isn't set that a consumer of `millstream.toml` names."""
    for error in home.loaded_config.unset_consumers(stream).values():
        raise error


def check_unmade(home: Home, stream: str) -> None:
    """Check that the consumers of `millstream.toml` which don't exist so far can be made. Nothing is changed.

    Raises:
        ConfigError: one of them can't: a variable isn't set, a column is in no table, its start is no place of the log.
        DeliveryError (`consumer_state_unreadable`): the state of those that exist can't be read.
    """
    made = stored_names(home.delivery_folder(stream))
    check_set(home, stream)
    if not home.has_catalog() or not home.wal_folder(stream).exists():
        return
    with home.open_catalog() as catalog:
        around = surroundings(home, catalog, stream)
        for name, definition in around.file.definitions.items():
            if name not in made:
                try:
                    around.start_of(definition, around.open_reader())
                except MillstreamError as error:
                    raise around.file.reported(name, error) from error


def _begin_all_in_child() -> None:
    for consumers in list(_OPEN_HERE):
        consumers._begin_in_child()  # noqa: SLF001 (its own module)


os.register_at_fork(after_in_child=_begin_all_in_child)
