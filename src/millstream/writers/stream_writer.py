"""The writer of a home's stream: the only one, or one of several, as configured; with its appender for applications."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from millstream.errors import LogError, ShardLocked, StaleEpoch
from millstream.home.config_mapping import log_options, session_limits, shard_of, write_rules
from millstream.ingest.appender import Appender
from millstream.ingest.buffered_op_conversion import OperationTaker
from millstream.ingest.schema_on_write import TableRules
from millstream.leadership.node_roles import Roles
from millstream.leadership.promotion_check import hear_of_promotions
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId, WriterId
from millstream.model.operations import FIRST_SHARD
from millstream.process_metrics import SINK_IGNORED_ERRORS
from millstream.processes.role_locks import LOCK_PATIENCE_S
from millstream.regions.declared_merges import check_merges
from millstream.regions.region_clocks import RegionClocks, RegionsHeard, RegionTimes
from millstream.routing.dispatch import Dispatcher
from millstream.wal.files import RealFiles
from millstream.wal.replica.ship_source import durable_marks
from millstream.writers.allowed_writers import refuse_to_own
from millstream.writers.catalog_catch_up import adopt_log
from millstream.writers.leased_writer import OneOfSeveral, OwnIncarnations
from millstream.writers.stream_routing import StreamRouting, shards_to_open
from millstream.writers.stream_sinks import sinks_of
from millstream.writers.write_buffers import (
    BufferDestination,
    buffer_name,
    open_buffer,
    refuses_appends,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.catalog import Catalog
    from millstream.config.model import StreamConfig
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths
    from millstream.model.positions import Seq
    from millstream.ports import ApplicationLog
    from millstream.wal.writing.writer import LogWriter
    from millstream.writers.stream_sinks import OpenOther


@dataclass(frozen=True, slots=True)
class StreamWriter:
    """A stream's writer in this process."""

    stream: StreamId
    log: LogWriter
    first_shard: ShardId
    appender: Appender
    name: str | None
    """The writer's name, if it is one among several."""
    routing: StreamRouting


@contextmanager
def stream_writer(
    home: Home,
    catalog: Catalog,
    name: str,
    config: StreamConfig,
    open_other: OpenOther,
    *,
    check: Callable[[StreamId], None] | None = None,
    before: OwnIncarnations | None = None,
) -> Iterator[StreamWriter]:
    """Become a stream's writer, for the block: a new epoch, the shards' locks, recovery.

    Args:
        open_other: opens the homes that its sinks are.
        check: raises if this process may not write the stream after all.
        before: this process's earlier incarnations, if it is one of several writers; None: there are none.

    Raises:
        ConfigError: the stream has several writers, and this process isn't configured as one of them; or
            it is, and the catalog is embedded.
        ShardLocked: another process holds a shard, and goes on holding it.
        SequencingError (`lease_too_short`, `writer_name_taken`, `writer_alive`, `sequence_unusable`), LogError (`shard_taken`): as `OneOfSeveral.open`, for
            one among several.
        ReadOnly, Fenced: another node leads the stream.
        CorruptWal, DiskFull …: as `LogWriter.open`.
        CatalogError (`catalog_older`): the catalog has something else under a number of the log's.
        ReplicationError (`merge_unsuitable`): a table can't merge as configured.
        ReplicationError (`other_region`): the log belongs to another region than the configured one.
    """
    # Before the first write: another node may have been promoted while this one was away.
    hear_of_promotions(home, name)
    Roles(home).check_leads(name)
    stream = resolve_stream(home, catalog, name)
    if check is not None:
        check(stream)
    if config.merge:
        check_merges(config, catalog.latest_schemas(stream).values())
    with contextlib.ExitStack() as opened:
        own = home.config.writer.name
        if own is None:
            log, writer = _own(home, catalog, stream, name, config)
            opened.enter_context(log)
            first_shard = FIRST_SHARD
        else:
            shared = opened.enter_context(_join(home, catalog, stream, name, config, own, before))
            log, writer, first_shard = shared.log, shared.writer, shared.shards[0]
        adopt_log(catalog, stream, str(home.wal_folder(name)), log.reached(), from_buffer=_reads_buffer(config))
        # Check again, now with the shards' locks: a node that was promised in the interval that this one
        # writes no more waits for these locks, and for nothing else.
        Roles(home).check_leads(name)
        hear = RegionsHeard(partial(RegionClocks(home, name, config).hear, log))
        hear()
        log.hear_before_groups(RegionTimes(home, name, config, log.hear))
        routing = StreamRouting(catalog, stream, name, config, log, first_shard=first_shard, is_shared=own is not None)
        rules, buffer = _table_rules(config, routing, first_shard), config.buffer
        to: ApplicationLog = log
        written: str | None = None
        if buffer is None:
            to = _with_sinks(home, name, config, log, stream, open_other, opened)
        elif buffer.role == "writes":
            written = buffer_name(name, buffer)
            to = BufferDestination(opened.enter_context(open_buffer(home, name, buffer)), written)
        else:
            rules = replace(rules, rules_of=refuses_appends(name, buffer_name(name, buffer)))
        appender = Appender(catalog, stream, to, writer=writer, rules=rules, buffer=written, hear=hear)
        yield StreamWriter(stream, log, first_shard, appender, own, routing)


def _reads_buffer(config: StreamConfig) -> bool:
    return config.buffer is not None and config.buffer.role != "writes"


def _table_rules(config: StreamConfig, routing: StreamRouting, first_shard: ShardId) -> TableRules:
    return TableRules(
        rules_of=write_rules(config),
        place=routing.place,
        check_place=routing.check,
        home_shard=shard_of(config, first_shard),
    )


def _with_sinks(
    home: Home,
    name: str,
    config: StreamConfig,
    log: LogWriter,
    stream: StreamId,
    open_other: OpenOther,
    opened: contextlib.ExitStack,
) -> ApplicationLog:
    """Return the target of applications' operations: the log, with the sinks next to it if there are any."""
    sinks = sinks_of(home, name, config, open_other)
    if not sinks or config.routing is None:
        return log
    label = str(stream)
    for sink in config.routing.ignore_errors:
        SINK_IGNORED_ERRORS.of(label, sink)  # it begins now: `increase()` sees the first error
    dispatcher = Dispatcher(
        log,
        sinks,
        ignore_errors=frozenset(config.routing.ignore_errors),
        count_ignored=lambda sink: SINK_IGNORED_ERRORS.of(label, sink).add(1),
    )
    opened.callback(dispatcher.close)
    return dispatcher


def operation_taker(catalog: Catalog, writer: StreamWriter, config: StreamConfig) -> OperationTaker:
    """Return the taker that makes a write buffer's operations the stream's own: by its rules, on its shards."""
    return OperationTaker(catalog, writer.stream, _table_rules(config, writer.routing, writer.first_shard))


def resolve_stream(home: HomePaths, catalog: Catalog, name: str) -> StreamId:
    """Return a stream's id: the existing log's, if there is one."""
    from millstream.wal.reader import StreamReader

    folder = home.wal_folder(name)
    found = None
    if folder.is_dir():
        with contextlib.suppress(LogError):
            found = StreamReader(str(folder)).stream_id
    return catalog.resolve_stream(name, found=found)


def _join(
    home: Home,
    catalog: Catalog,
    stream: StreamId,
    name: str,
    config: StreamConfig,
    writer: str,
    before: OwnIncarnations | None,
) -> OneOfSeveral:
    own = home.config.writer
    return OneOfSeveral.open(
        catalog,
        stream,
        str(home.wal_folder(name)),
        name=writer,
        location=home.identity().id,
        lease_s=own.lease_s,
        shard_count=config.log.shards,
        first_shard=own.first_shard,
        options=log_options(config, home.config.replication),
        before=before,
    )


def _own(home: Home, catalog: Catalog, stream: StreamId, name: str, config: StreamConfig) -> tuple[LogWriter, WriterId]:
    from millstream.wal.files import RealFiles
    from millstream.wal.replica.acks import AcksReader
    from millstream.wal.writing.writer import LogWriter

    refuse_to_own(catalog, stream, name)
    above = Epoch(0)
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        writer, epoch = catalog.register_writer(stream, above=above)
        try:
            log = LogWriter.open(
                str(home.wal_folder(name)),
                stream=stream,
                shards=shards_to_open(catalog, stream, config),
                epoch=epoch,
                reservations=catalog.reservations(stream),
                options=log_options(config, home.config.replication),
                region=RegionId(config.region),
                writer=writer,
                sessions=session_limits(config),
                high_water=AcksReader(RealFiles(), str(home.acks_file(name)), stream),
            )
        except StaleEpoch as error:
            # The shards' locks were ours, so no newer writer exists: the catalog is older than the log.
            if above >= error.details.get("epoch", 0):
                raise
            above = Epoch(error.details["epoch"])
        except ShardLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return log, writer


def take_over(
    home: Home, catalog: Catalog, stream: StreamId, name: str, config: StreamConfig, *, reserved: Seq
) -> GroupNumber:
    """Recover another node's log under an epoch of this node, and write nothing; return its last commit group.

    Args:
        reserved: numbers up to it may have been given out; later writes get greater ones.

    Raises:
        ShardLocked, CorruptWal, DiskFull …: as `LogWriter.open`.
    """
    _, epoch = catalog.register_writer(stream)
    catalog.reservations(stream).reserve_to(reserved, epoch=epoch)
    log, _ = _own(home, catalog, stream, name, config)
    log.close()
    return max(mark.group for mark in durable_marks(RealFiles(), str(home.wal_folder(name))).values())
