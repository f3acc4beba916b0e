"""Maps the configuration to the parameters of each room."""

from __future__ import annotations

import contextlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, cast

from millstream.config.quantities import size_bytes
from millstream.errors import ConfigError, LakeError, MillstreamError
from millstream.errors.missing_extras import missing_extra
from millstream.home.home import Home
from millstream.home.paths import PIPELINE
from millstream.home.store_profiles import with_profile
from millstream.libpq import describe_parameters, parse_address
from millstream.model.addresses import IN_CATALOG
from millstream.model.durations import duration_s
from millstream.model.ids import ShardId, StreamId, default_name
from millstream.model.names import parse_column, parse_qualified_name
from millstream.model.operations import FIRST_SHARD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from millstream.capture.config import CaptureConfig
    from millstream.config.model import LakeConfig, StreamConfig
    from millstream.config.replication_model import ReplicationConfig
    from millstream.ingest.schema_on_write import WriteRules
    from millstream.lake.commit_cuts import Cut
    from millstream.lake.layout import LakeLayout, View
    from millstream.lake.postgres.target import PostgresTarget, TargetView
    from millstream.protocol.deduplication.known_writes import SessionLimits
    from millstream.spark.batch_targets import BatchTarget
    from millstream.spark.executor_access import FlightAddress
    from millstream.spark.pipeline import PipelineConfig
    from millstream.spark.session import SparkOptions
    from millstream.wal.writing.writer import LogOptions

_SHIPPED_WITHIN_S: Final = 3.0
"""Time in which the catalog's copies, of which one is made each second, come to other nodes."""


def capture_config(home: Home, name: str, stream: StreamConfig, *, first_shard: ShardId = FIRST_SHARD) -> CaptureConfig:
    """Return capture's parameters; `first_shard` is the writer's. `ConfigError` for a stream without a source."""
    from millstream.capture.config import CaptureConfig
    from millstream.config.rule_checks import rules_of
    from millstream.model.column_rules import SourceRules
    from millstream.protocol.catch_up_mode import CatchUpMode

    source = stream.source
    if source is None:
        raise ConfigError(
            f"stream {name} captures nothing: it has what applications append",
            hint=f"Configure a source, [streams.{name}.source], or name another stream.",
        )
    replication = home.config.replication
    is_shipped = bool(replication.nodes) or replication.object_store is not None
    return CaptureConfig(
        stream=name,
        dsn=source.dsn,
        tables=tuple(source.tables),
        publication=source.publication or default_name(name),
        slot=source.slot or default_name(name),
        spill_dir=str(home.spill_folder(name)),
        shard_of=shard_of(stream, first_shard),
        copy_workers=source.copy_workers,
        chunk_rows=source.copy_chunk_rows,
        copy_rate=copy_rate(home, name, source.copy_rate),
        follows_names=True,
        copies_renamed=stream.lake.format == "postgres",
        copy_again_above=size_bytes(source.copy_again_above),
        buffer_bytes_max=size_bytes(source.memory),
        heartbeat_s=duration_s(source.heartbeat_interval),
        shipped_within_s=_SHIPPED_WITHIN_S if is_shipped else 0.0,
        catch_up=CatchUpMode(source.catch_up),
        failover=source.failover,
        origin=source.origin,
        slot_lag_bytes=size_bytes(home.config.alerts.slot_lag),
        rules=SourceRules(rules_of(stream), (source.hash_key or "").encode()),
        lake_types=_lake_types(stream),
    )


def _lake_types(stream: StreamConfig) -> dict[str, str]:
    """Return the configured types by `schema.table.column`; none for a lake in PostgreSQL, which has types of its own."""
    if stream.lake.format == "postgres":
        return {}
    return {".".join(parse_column(column)): kind for column, kind in stream.types.items()}


def copy_rate(home: Home, name: str, at_first: str | None) -> Callable[[], int | None]:
    """Return a function that reads from the current file how many bytes a second a stream's copies may read.

    A file that can't be read, or has a mistake in it, changes nothing: the next start reports it.
    """
    return _CopyRate(home, name, at_first).now


def shard_of(stream: StreamConfig, first_shard: ShardId) -> Callable[[str], ShardId]:
    """Return a function from a table (`schema.name`) to its shard; `first_shard` is the writer's."""
    return _Shards(shards_by_table(stream), first_shard)


def shards_by_table(stream: StreamConfig) -> dict[str, int]:
    """Return the shards that tables (`schema.name`) are given by name."""
    return {".".join(parse_qualified_name(table)): shard for table, shard in stream.shards.items()}


def write_rules(stream: StreamConfig) -> Callable[[str, str], WriteRules]:
    """Return a function from a table's schema and name to the rules for applications' writes."""
    from millstream.crdt.declared import TableMerge
    from millstream.ingest.schema_on_write import SchemaOnWrite, WriteRules

    mode = SchemaOnWrite(stream.ingest.schema_on_write)
    merges = {parse_qualified_name(table): TableMerge.parse(words) for table, words in stream.merge.items()}
    keyed = {}
    for table, key in stream.keys.items():
        merge = merges.get(parse_qualified_name(table), TableMerge())
        keyed[parse_qualified_name(table)] = WriteRules(mode, tuple(key), merge.signals, merge.increments)
    others = WriteRules(mode)
    return lambda namespace, name: keyed.get((namespace, name), others)


def increments_of(home: Home, stream: str, table: str) -> Mapping[str, str]:
    """Return the words of a table's columns that take increments, by their names; none of a stream that isn't there.

    `UsageError` if the text is no table's name.
    """
    config = home.configured(stream)
    return {} if config is None else write_rules(config)(*parse_qualified_name(table)).accumulates


def log_options(stream: StreamConfig, replication: ReplicationConfig) -> LogOptions:
    """Return the options for writing a stream's log."""
    from millstream.config.stream_checks import reach_of
    from millstream.model.replication import AckLevel
    from millstream.wal.writing.writer import LogOptions

    log = stream.log
    return LogOptions(
        segment_bytes=size_bytes(log.segment_bytes),
        segment_age_s=duration_s(log.segment_age),
        queue_bytes_max=size_bytes(log.queue_bytes),
        group_commit_delay_s=log.group_commit_delay_ms / 1000,
        disk_used_max=log.disk_used_max,
        frame_version=log.frame_version,
        acks=AckLevel.parse(stream.acks),
        reach=reach_of(replication),
    )


def session_limits(stream: StreamConfig) -> SessionLimits:
    """Return when applications' sessions and keys expire."""
    from millstream.protocol.deduplication.known_writes import SessionLimits

    ingest = stream.ingest
    return SessionLimits(ingest.sessions_max, ingest.idempotency_keys_max, round(duration_s(ingest.session_age) * 1e6))


def postgres_target(name: str, stream: StreamConfig, stream_id: StreamId) -> PostgresTarget:
    """Return the database of a stream's tables, if its format is `postgres`."""
    from millstream.lake.postgres.target import PostgresTarget

    return PostgresTarget(
        dsn=stream.lake.location,
        stream_name=name,
        stream_id=stream_id,
        pipeline=PIPELINE,
        views=tuple(cast("TargetView", view) for view in stream.lake.shown),
        schema_prefix=stream.lake.schema_prefix,
    )


def target_of(home: Home, name: str, stream: StreamConfig, stream_id: StreamId) -> BatchTarget:
    """Return the target in which a stream's pipeline lands."""
    from millstream.spark.batch_targets import LakeDatabase, LakeOfFiles

    if stream.lake.format == "postgres":
        return LakeDatabase(postgres_target(name, stream, stream_id))
    return LakeOfFiles(lake_layout(home, name, stream, stream_id))


def last_cut_of(home: Home, name: str, stream: StreamConfig, stream_id: StreamId) -> Cut | None:
    """Return the last cut of a stream's tables, wherever they are; None before the first batch."""
    from millstream.lake import commit_cuts
    from millstream.lake.postgres import cuts

    if stream.lake.format == "postgres":
        return cuts.last_cut(postgres_target(name, stream, stream_id))
    return commit_cuts.last_cut(lake_layout(home, name, stream, stream_id))


def lake_layout(home: Home, name: str, stream: StreamConfig, stream_id: StreamId) -> LakeLayout:
    """Return the layout of a stream's lake of files.

    Raises:
        LakeError (`lake_in_database`): its tables are in PostgreSQL.
        LakeUnavailable (`lake_credentials`): the profile of its store's options has no keys.
    """
    from millstream.lake.layout import LakeLayout

    if stream.lake.format == "postgres":
        raise LakeError(
            f"the tables of stream {name} lie in {describe_parameters(parse_address(stream.lake.location))}, not in files",
            code="lake_in_database",
        )
    location = home.lake_location(stream)
    is_stored = location.startswith("s3://") or location == IN_CATALOG
    options = with_profile(stream.lake.storage_options, os.environ) if is_stored else {}
    return LakeLayout(
        location=location,
        stream_name=name,
        stream_id=stream_id,
        pipeline=PIPELINE,
        storage_options=options,
        format=stream.lake.format,
        catalog=_catalog(home, stream.lake),
        types=_lake_types(stream),
    )


def _catalog(home: Home, lake: LakeConfig) -> dict[str, str]:
    """Return the properties of an Iceberg lake's catalog; none for another lake.

    Raises:
        UsageError (`missing_extra`): pyiceberg isn't installed.
    """
    if lake.format != "iceberg":
        return {}
    if find_spec("pyiceberg") is None:
        raise missing_extra("Iceberg tables need pyiceberg", "iceberg")
    if lake.catalog_type != "sql":
        return lake.catalog
    # A writer waits for another one's commit, which takes some milliseconds.
    return {"type": "sql", "uri": f"sqlite:///{home.data / 'iceberg.db'}?timeout=60"} | lake.catalog


def spark_options(home: Home) -> SparkOptions:
    """Return the options of the Spark session."""
    from millstream.spark.session import SparkOptions

    spark = home.config.spark
    return SparkOptions(work_dir=home.pipeline_folder / "work", master=spark.master, conf=dict(spark.conf))


def _interval_ms(text: str) -> int | None:
    return None if text == "auto" else max(1, round(duration_s(text) * 1000))


def pipeline_config(home: Home, name: str, stream: StreamConfig, stream_id: StreamId) -> PipelineConfig:
    """Return the parameters of a stream's pipeline."""
    from millstream.lake.maintenance import MaintenanceRules
    from millstream.spark.pipeline import PipelineConfig

    spark = home.config.spark
    return PipelineConfig(
        stream=name,
        stream_id=stream_id,
        wal_folder=home.wal_folder(name),
        target=target_of(home, name, stream, stream_id),
        spark=spark_options(home),
        views=() if stream.lake.format == "postgres" else tuple(cast("View", view) for view in stream.lake.shown),
        trigger_interval_ms=_interval_ms(spark.trigger_interval),
        batch_bytes_max=size_bytes(spark.batch_bytes),
        folds_scheduled=stream.lake.fold == "auto",
        fold_interval_s=duration_s(stream.lake.fold_interval),
        disk_factor=stream.lake.disk_factor,
        maintenance=MaintenanceRules(
            keep_s=duration_s(stream.lake.keep_replaced),
            interval_s=duration_s(stream.lake.maintenance_interval),
            compact_files=stream.lake.compact_files,
            log_retention_s=duration_s(stream.lake.log_retention),
        ),
        history_retention_s=stream.lake.history_retention_s,
        log_access=spark.log_access,
        flight=None if spark.is_local else flight_address(home),
    )


def flight_address(home: Home) -> FlightAddress | None:
    """Return the address of the home's Flight server, for executors; None if it has none.

    Raises:
        ConfigError: its certificate can't be read.
    """
    from millstream.spark.executor_access import FlightAddress

    http, address = home.config.http, home.config.flight.address
    if address is None:
        return None
    host = "" if address[0] in {"0.0.0.0", "::"} else address[0]  # noqa: S104 - it names no host
    if http.tls_certificate is None:
        return FlightAddress(host, address[1], tokens_required=http.tokens_required)
    file = home.path / http.tls_certificate
    try:
        return FlightAddress(
            host, address[1], is_tls=True, authority=file.read_bytes(), tokens_required=http.tokens_required
        )
    except OSError as error:
        raise ConfigError(
            f"{file}, the server's certificate that executors trust, can't be read: {error.strerror}"
        ) from error


class _CopyRate:
    def __init__(self, home: Home, name: str, at_first: str | None) -> None:
        self._home, self._name = home, name
        self._rate = None if at_first is None else size_bytes(at_first)
        self._stamp = self._look()

    def now(self) -> int | None:
        stamp = self._look()
        if stamp is not None and stamp != self._stamp:
            from millstream.config.file import load_config

            self._stamp = stamp
            with contextlib.suppress(MillstreamError, KeyError):
                source = load_config(self._home.config_file).config.streams[self._name].source
                text = None if source is None else source.copy_rate
                self._rate = None if text is None else size_bytes(text)
        return self._rate

    def _look(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = self._home.config_file.stat()
            return found.st_mtime_ns, found.st_size
        return None


class _Shards:
    """The shard of each table; picklable, unlike a closure."""

    def __init__(self, shards: dict[str, int], first: ShardId) -> None:
        self._shards = shards
        self._first = first

    def __call__(self, table: str) -> ShardId:
        return ShardId(self._first + self._shards.get(table, 0))
