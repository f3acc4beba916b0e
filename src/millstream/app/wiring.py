"""From the configuration to what each room asks for."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from millstream.app.config.quantities import duration_s, size_bytes
from millstream.app.home import PIPELINE, Home
from millstream.errors import ConfigError
from millstream.model.ids import ShardId, StreamId
from millstream.model.names import parse_qualified_name
from millstream.model.operations import FIRST_SHARD

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.app.config.model import StreamConfig
    from millstream.capture import CaptureConfig
    from millstream.ingest.schemas import WriteRules
    from millstream.lake.layout import LakeLayout
    from millstream.spark.pipeline import PipelineConfig
    from millstream.spark.session import SparkOptions
    from millstream.wal.writer import LogOptions


def capture_config(home: Home, name: str, stream: StreamConfig, *, first_shard: ShardId = FIRST_SHARD) -> CaptureConfig:
    """What capture of a stream is told; `first_shard` is the writer's. `ConfigError` of a stream that has no source."""
    from millstream.capture import CaptureConfig

    source = stream.source
    if source is None:
        raise ConfigError(
            f"stream {name} captures nothing: it has what applications append",
            hint=f"Give it a source, [streams.{name}.source], or name another stream.",
        )
    return CaptureConfig(
        stream=name,
        dsn=source.dsn,
        tables=tuple(source.tables),
        publication=source.publication or f"millstream_{name}",
        slot=source.slot or f"millstream_{name}",
        spill_dir=str(home.spill_folder(name)),
        shard_of=shard_of(stream, first_shard),
        copy_workers=source.copy_workers,
        chunk_rows=source.copy_chunk_rows,
        buffer_bytes_max=size_bytes(source.memory),
        heartbeat_s=duration_s(source.heartbeat_interval),
        failover=source.failover,
    )


def shard_of(stream: StreamConfig, first_shard: ShardId) -> Callable[[str], ShardId]:
    """Tells the shard of a table, by `schema.name`; `first_shard` is the writer's."""
    return _Shards(dict(stream.shards), first_shard)


def write_rules(stream: StreamConfig) -> Callable[[str, str], WriteRules]:
    """Tells what applications may write into a table, by its schema and name."""
    from millstream.ingest.schemas import SchemaOnWrite, WriteRules

    mode = SchemaOnWrite(stream.ingest.schema_on_write)
    keyed = {parse_qualified_name(table): WriteRules(mode, tuple(key)) for table, key in stream.keys.items()}
    others = WriteRules(mode)
    return lambda namespace, name: keyed.get((namespace, name), others)


def log_options(stream: StreamConfig) -> LogOptions:
    """How a stream's log is written."""
    from millstream.codec.log_directory import Numbering
    from millstream.wal.writer import LogOptions

    log = stream.log
    return LogOptions(
        segment_bytes=size_bytes(log.segment_bytes),
        segment_age_s=duration_s(log.segment_age),
        queue_bytes_max=size_bytes(log.queue_bytes),
        group_commit_delay_s=log.group_commit_delay_ms / 1000,
        disk_used_max=log.disk_used_max,
        numbering=Numbering(log.sequence_numbers),
    )


def lake_layout(home: Home, name: str, stream: StreamConfig, stream_id: StreamId) -> LakeLayout:
    """Where a stream's lake tables lie."""
    from millstream.lake.layout import LakeLayout

    return LakeLayout(
        location=home.lake_location(stream),
        stream_name=name,
        stream_id=stream_id,
        pipeline=PIPELINE,
        storage_options=dict(stream.lake.storage_options),
        types=dict(stream.types),
    )


def spark_options(home: Home) -> SparkOptions:
    """What the Spark session is made of."""
    from millstream.spark.session import SparkOptions

    spark = home.config.spark
    return SparkOptions(work_dir=home.pipeline_folder / "work", master=spark.master, conf=dict(spark.conf))


def pipeline_config(home: Home, name: str, stream: StreamConfig, stream_id: StreamId) -> PipelineConfig:
    """What the pipeline of a stream is told."""
    from millstream.lake.upkeep import UpkeepRules
    from millstream.spark.pipeline import PipelineConfig

    spark = home.config.spark
    return PipelineConfig(
        stream=name,
        stream_id=stream_id,
        wal_folder=home.wal_folder(name),
        layout=lake_layout(home, name, stream, stream_id),
        checkpoint_dir=home.pipeline_folder / name,
        spark=spark_options(home),
        views=tuple(stream.lake.views),
        trigger_interval_ms=max(1, round(duration_s(spark.trigger_interval) * 1000)),
        batch_bytes_max=size_bytes(spark.batch_bytes),
        disk_factor=stream.lake.disk_factor,
        upkeep=UpkeepRules(
            keep_s=duration_s(stream.lake.keep_replaced),
            interval_s=duration_s(stream.lake.upkeep_interval),
            compact_files=stream.lake.compact_files,
        ),
        history_retention_s=stream.lake.history_retention_s,
    )


def place_compiled_code(home: Home) -> None:
    """Tell numba where to keep machine code: in the home, else in a private temporary folder. Before numba is imported.

    Its own choice, the package's folder or HOME's, fails at import where both are read-only.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    folder = home.data / "cache" / "numba"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            os.environ["NUMBA_CACHE_DIR"] = str(folder)
    except OSError:
        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="millstream-numba-")


class _Shards:
    """The shard of each table; picklable, unlike a closure."""

    def __init__(self, shards: dict[str, int], first: ShardId) -> None:
        self._shards = shards
        self._first = first

    def __call__(self, table: str) -> ShardId:
        return ShardId(self._first + self._shards.get(table, 0))
