"""`millstream.toml` as a checked value: every key, its default, and what it does.

The descriptions here are the reference documentation. Loading (interpolation, environment, places of errors) is
`millstream.config.file`'s.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, field_validator

from millstream.config.quantities import (
    duration_s,
    size_bytes,
)
from millstream.config.replication_model import ReplicationConfig
from millstream.config.routing_model import RoutingSection
from millstream.config.section import Duration, Level, Section, Size, SizeAboveZero, SizeOrShare
from millstream.config.serving_model import FlightConfig, HttpConfig
from millstream.libpq import is_address

EMBEDDED_CATALOG: Final = "data/catalog.db"
"""The default place of the catalog, from the home."""

LEASE_MIN_S: Final = 0.1
"""Shorter leases expire under a thread that the system has suspended."""


class SourceConfig(Section):
    """The PostgreSQL database that a stream captures."""

    dsn: str = Field(
        repr=False,
        description="Its address, as libpq takes it: a URL or keywords; services and pgpass files work too. A variable "
        "where user or password stands is put in as it is: nobody has to escape it.",
    )
    tables: list[str] = Field(
        default=["public.*"],
        min_length=1,
        description='Patterns of tables; `*` stands for any characters, a `!` in front leaves out. `"public.*"` alone takes '
        "the whole schema. The schema `millstream`, where a catalog may lie, is never taken.",
    )
    publication: str | None = Field(
        default=None,
        pattern=r"^.{1,56}$",
        description="The publication; made if it is missing and the role may. `<publication>_inserts` stands beside it for tables without an "
        "identity. `millstream_<stream>` where it isn't set.",
    )
    slot: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9_]{1,63}$",
        description="The replication slot; made at the first run. `millstream_<stream>` where it isn't set.",
    )
    failover: bool = Field(
        default=True,
        description="Whether standbys that sync slots (PostgreSQL 17 and newer) keep a copy of the slot when it is made, so that capture goes on after "
        "one of them is promoted. A slot that is there already stays as it is; `doctor` says how to change it.",
    )
    origin: Literal["any", "none"] = Field(
        default="any",
        description="Whose changes are captured: `any`, or `none` but those made here, without what replication from another system wrote "
        "(rows with a replication origin; PostgreSQL 16 and newer), so that two databases that follow each other make no loop. A table "
        "copy reads rows whoever wrote them.",
    )
    copy_workers: int = Field(default=2, ge=1, le=64, description="Connections that copy existing rows side by side.")
    copy_chunk_rows: int = Field(
        default=50_000,
        ge=1,
        description="Rows of a chunk of the table copy, at most: what a restart repeats. Chunks are smaller where rows are wide, or the "
        "source takes more than a second for one.",
    )
    copy_rate: SizeAboveZero | None = Field(
        default=None,
        description="Bytes a second of rows (as text) that all copies of the stream together may read, such as `20MiB`; unset: as fast as "
        "it goes. A running capture takes another value within seconds.",
    )
    heartbeat_interval: Duration = Field(
        default="10s", description="How often an idle source gets a heartbeat message, so that its slot moves on."
    )
    catch_up: Literal["auto", "never", "always"] = Field(
        default="auto",
        description="Whether a large backlog is read in chunks instead of as a stream. `auto` does it from 64 MiB of WAL on, measures both ways and "
        "keeps to the faster; `always` does it at each start, however small the backlog; `never` streams. Chunks need a free replication slot "
        "at the source, and space for temporary files there: commonly up to 400 MiB.",
    )
    memory: Size = Field(
        default="32MiB",
        description="Undecoded bytes held in memory; larger transactions spill to disk, and the source waits.",
    )


class LakeConfig(Section):
    """Where a stream's tables land."""

    format: Literal["delta", "iceberg", "parquet", "postgres"] = Field(
        default="delta",
        description="The tables' format. This version writes `delta`, files in a folder or an object store, and `postgres`, tables of a database.",
    )
    location: str = Field(
        default="lake",
        min_length=1,
        description="A folder (from the home, where it isn't absolute) or the URL of an object store's prefix. The stream's tables lie in a "
        "folder of its name in it. For `postgres` the address of a database (14 or newer; `current` takes 15), as libpq takes it; "
        "a variable where user or password stands is put in as it is.",
    )
    views: list[Literal["current", "history", "scd2", "changes"]] | None = Field(
        default=None,
        min_length=1,
        description="What readers get. Of `delta`: `current` has one row a key, `history` every record, `scd2` every version of each row with "
        "the time at which it began and ended; history is written in any case: the others are folded from it. Of `postgres`: `changes` has "
        "an event table a table, `current` its rows. Unset: `current`, with `history` or `changes`.",
    )
    schema_prefix: str = Field(
        default="",
        pattern=r"^[a-z0-9_]*$",
        max_length=30,
        description="Of `postgres`: stands before the names of the schemas that tables lie in. `public.orders` has its rows in `<prefix>public.orders` "
        "and its events in `<prefix>public_changes.orders`: two streams in one database need different prefixes.",
    )
    engine: Literal["auto", "delta-rs", "spark"] = Field(
        default="auto", description="Who writes the files. `auto` takes `delta-rs`, the one that this version has."
    )
    history_retention: Duration | None = Field(
        default=None,
        description="How long history is kept, by whole days: older ones are dropped once `current` has what they made. Unset: for ever. "
        "`--as-of` answers for what is kept.",
    )
    fold_interval: Duration = Field(
        default="30s",
        description="The least time from one fold of a table to the next. `query` is fresh without folds: it reads the records behind the last one "
        "too. Readers that open `current` themselves see it as of the last fold.",
    )
    disk_factor: float = Field(
        default=5.0,
        ge=1.5,
        description="Bytes on disk over live bytes that folding `current` may reach: lower folds large tables less often.",
    )
    keep_replaced: Duration = Field(
        default="5m",
        description="How long files that a fold or compaction replaced stay on disk: longer than the queries of readers that open tables themselves.",
    )
    log_retention: Duration = Field(
        default="15min",
        description="How long a table's older versions can be opened: commits go from its `_delta_log` after that, at the next upkeep. A streaming reader "
        "that stops for longer has to start again from the table.",
    )
    upkeep_interval: Duration = Field(
        default="60s", description="How often small files are compacted and files that nobody needs are deleted."
    )
    compact_files: int = Field(
        default=200, ge=2, description="Small files of one day of a table's history from which on they are made one."
    )
    storage_options: dict[str, str] = Field(
        default={}, repr=False, description="Keys, region, endpoint … of the object store, as delta-rs names them."
    )

    @property
    def shown(self) -> tuple[str, ...]:
        """Return `views`, or the format's default views."""
        if self.views is not None:
            return tuple(self.views)
        return ("current", "changes") if self.format == "postgres" else ("current", "history")

    @property
    def history_retention_s(self) -> float | None:
        """Return `history_retention` in seconds."""
        return None if self.history_retention is None else duration_s(self.history_retention)


class LogConfig(Section):
    """A stream's log on disk."""

    shards: int = Field(default=1, ge=1, le=1024, description="Shards of the stream.")
    retention_age: Duration = Field(
        default="7d", description="Segments older than this go, once nobody needs them any more."
    )
    retention_bytes: SizeOrShare = Field(
        default="20%",
        description="The oldest segments that nobody needs go where the log is larger than this (a size, or a share of the disk).",
    )
    retention_bytes_max: SizeOrShare | None = Field(
        default=None,
        description="Consumers and followers hold segments back until the log is larger than this; then those that need the oldest are cut off, "
        "by name. Pipelines never are. Twice `retention_bytes` where it isn't set.",
    )
    retention_interval: Duration = Field(default="30s", description="How often it is looked which segments may go.")
    disk_used_max: float = Field(
        default=0.9, gt=0, le=1, description="Appends are refused while more of the disk than this is used."
    )
    segment_bytes: Size = Field(default="64MiB", description="A segment is sealed when it has grown to this size …")
    segment_age: Duration = Field(default="1h", description="… or has held records for this long.")
    sequence_numbers: Literal["batch", "both"] = Field(
        default="batch",
        description="Which numbers the log's frames carry: `batch` one range for every table's batch of an operation; `both` the operation's too, "
        "so that going back to a version that knows no other stays safe. What is written with either is read with either.",
    )
    queue_bytes: Size = Field(
        default="64MiB", description="Operations waiting for the disk; beyond it their senders wait."
    )
    group_commit_delay_ms: float = Field(
        default=0,
        ge=0,
        le=10_000,
        description="How long, in milliseconds, the first operation of a commit group waits for company. 0: not at all, a group is what came while "
        "the last one was written. More makes fewer and larger groups where an fsync is dear, and every answer that much later.",
    )

    @property
    def retention_age_s(self) -> float:
        """Return `retention_age` in seconds."""
        return duration_s(self.retention_age)

    @property
    def retention_interval_s(self) -> float:
        """Return `retention_interval` in seconds."""
        return duration_s(self.retention_interval)

    def retention_bytes_of(self, disk_bytes: int) -> int:
        """Return `retention_bytes` on a disk of that size."""
        return size_bytes(self.retention_bytes, whole=disk_bytes)

    def retention_bytes_max_of(self, disk_bytes: int) -> int:
        """Return `retention_bytes_max` on a disk of that size."""
        if self.retention_bytes_max is None:
            return 2 * self.retention_bytes_of(disk_bytes)
        return size_bytes(self.retention_bytes_max, whole=disk_bytes)


class IngestConfig(Section):
    """The rules of applications' writes into a stream."""

    schema_on_write: Literal["strict", "add_columns", "create"] = Field(
        default="create",
        description="What their rows may change of its tables: `strict` nothing; `add_columns` gives a table that is there the columns that it lacks; "
        "`create` makes tables too.",
    )
    session_age: Duration = Field(
        default="7d",
        description="How long after its last write a session of an application, or an idempotency key, is known. Who retries a write later than that is "
        "told that it can't be known any more whether it is there.",
    )
    sessions_max: int = Field(
        default=1_000_000,
        ge=1,
        le=10_000_000,
        description="How many sessions are known at a time; the longest unused go first. One takes some 300 bytes of memory, and up to 1 kB after many writes.",
    )
    idempotency_keys_max: int = Field(
        default=1_000_000,
        ge=1,
        le=10_000_000,
        description="How many idempotency keys are known at a time; the oldest go first.",
    )


class BufferConfig(Section):
    """A write buffer between applications and a stream's log: the stream writes to it, or reads from it; never both."""

    kind: str = Field(
        default="log",
        pattern=r"^[a-z][a-z0-9_]{0,62}$",
        description="What it lies in: `log` files of a folder, which one process writes; a topic of `kafka`; streams of `redis` or what speaks its protocol. Any "
        "other name is that of an entry point `millstream.buffers` that an installed package has.",
    )
    role: Literal["writes", "reads"] = Field(
        description="`writes`: what applications append goes into the buffer, and nothing into this stream's log. `reads`: what others have put there is "
        "taken into this stream's log, each operation once; applications can't append to it besides. A stream without a buffer does neither.",
    )
    location: str = Field(
        min_length=1,
        repr=False,
        description="Where it is. Of `log`: a folder (from the home, where it isn't absolute). Of `kafka`: the brokers, `host:9092,host:9092`. Of `redis`: "
        "`redis://host:6379/0`, or `rediss://…` with TLS.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,200}$",
        description="The topic, or what its keys in Redis begin with. `millstream_<stream>` where it isn't set. A folder has no other name.",
    )
    create: bool = Field(
        default=False, description="Whether it is made where it isn't there. Any number of homes may do so at a time."
    )
    shards: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Shards of a buffer that is made: partitions of its topic, streams in Redis. One that is there has what it has.",
    )
    topic: dict[str, str] = Field(
        default={},
        description='Options of a topic that is made: `"retention.ms"`, `"min.insync.replicas"` …; `"replication.factor"` too.',
    )
    client: dict[str, str] = Field(
        default={},
        repr=False,
        description='Options of Kafka\'s clients as librdkafka names them: `"security.protocol"`, `"sasl.password"` ….',
    )
    timeout: Duration = Field(
        default="30s",
        description="How long an operation may be on its way, retries included, before its sender is told that nobody knows what became of it.",
    )
    accept_loss: bool = Field(
        default=False,
        description="Whether a Redis is taken that doesn't promise to keep what it acknowledged (`appendonly yes`, `appendfsync always`).",
    )
    retention_age: Duration = Field(
        default="7d",
        description="Of `log`: segments older than this go, read or not. Topics have options of their own.",
    )

    @field_validator("role", mode="before")
    @classmethod
    def _check_role(cls, role: Any) -> Any:
        said = set(role) if isinstance(role, list) else set(str(role).replace(",", " ").split())
        if said == {"writes", "reads"} or said & {"both"}:
            raise ValueError(
                'must be "writes" or "reads", never both: what the stream writes it would take again, under other numbers'
            )
        return role

    @property
    def timeout_s(self) -> float:
        """Return `timeout` in seconds."""
        return duration_s(self.timeout)


class StreamConfig(Section):
    """One stream: what comes into it, its log and its lake tables."""

    source: SourceConfig | None = Field(
        default=None,
        description="The PostgreSQL database that the stream captures. Without one it has what applications append.",
    )
    ingest: IngestConfig = Field(default_factory=IngestConfig, description="What applications may write into it.")
    buffer: BufferConfig | None = Field(
        default=None, description="The write buffer that it writes to or reads from. Without one, neither."
    )
    keys: dict[str, list[str]] = Field(
        default={},
        description='Columns that tell rows of a table apart that applications write: `"public.clicks" = ["id"]`. Its `current` has one row a key, the '
        "newest. A table without a key has history alone. A key stays as it was when the table's first row came.",
    )
    lake: LakeConfig = Field(default_factory=LakeConfig, description="Where its tables land.")
    types: dict[str, str] = Field(
        default={},
        description='Lake types of numeric columns without a precision, by column: `"public.orders.total" = "decimal(38,9)"`. The log keeps the '
        "text; a value that doesn't fit is null there and whole in `__exact`.",
    )
    log: LogConfig = Field(default_factory=LogConfig, description="Its log on disk.")
    shards: dict[str, int] = Field(
        default={}, description='The shard of a table, by name: `"public.big" = 1`. Others lie on shard 0.'
    )
    acks: Level = Field(
        default="local",
        description="Where a write has to be before it is acknowledged, a captured transaction before its source is told of it, and either before it is read: `local`, durable here; "
        "`durable(1)`, `durable(2)` …, on so many followers, too; `object`, in the object store, too. An append may ask for more.",
    )
    routing: RoutingSection | None = Field(
        default=None,
        description="Which shard or sink takes the rows that applications append. Without it each table lies on its shard.",
    )
    region: int = Field(
        default=0,
        ge=0,
        lt=1 << 32,
        description="Which of several sites that each write the stream this home is: of its own among them, and for good. The others' logs lie beside its "
        "own, region N's in `data/wal/<stream>@N`.",
    )
    merge: dict[str, dict[str, str]] = Field(
        default={},
        description='How columns of tables that several regions write come together: `[streams.S.merge."public.posts"]`, `likes = "pn_counter"`. There are '
        "`lww` (the last write wins; what isn't named merges so), `pn_counter`, `g_counter`, `or_set`, `union_set`, `hide`, and `signal(7d)` with a "
        "half-life. A table needs a key.",
    )
    partitions: dict[str, str] = Field(
        default={},
        description='Partitions of tables that applications write, by templates: `"public.clicks" = "{created_at:%Y-%m-%d}"`. `{column}` is a column\'s '
        "value, `{column:%Y-%m}` a moment's, bare `%Y-%m-%d` that of the column `time`, `{__table}` the table's name. Each partition's numbers are "
        "told apart: `millstream wal stats --partitions`.",
    )


class SparkConfig(Section):
    """The engine of the pipeline."""

    master: str = Field(
        default="local[*]", min_length=1, description="Where Spark runs: `local[*]`, `spark://…`, `yarn`, `k8s://…`."
    )
    trigger_interval: Duration = Field(default="500ms", description="The least time between two batches.")
    batch_bytes: Size = Field(default="64MiB", description="Bytes of the log that one batch takes, about.")
    conf: dict[str, str] = Field(
        default={}, repr=False, description='Passed through to Spark: `"spark.driver.memory" = "2g"`.'
    )


class WriterConfig(Section):
    """Which of a stream's writers this is, where several processes write to it, each to shards of its own. The catalog lies in PostgreSQL then."""

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_-]{1,63}$",
        description="Its name, of its own among the stream's writers. Unset: the stream has one writer, which owns it. A stream that one writer owned "
        "goes on as one of several with the name `writer`.",
    )
    lease: Duration = Field(
        default="5s",
        description="How long it lives without a sign: it gives one with each commit group, and four a lease while it is idle. Then another writer of "
        "the home recovers its shards, and linear readers pass what it left.",
    )
    first_shard: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 20,
        description="The first of its shards, of which it has `log.shards`. Unset: behind those of the writers that there were before it, if they have "
        "as many each.",
    )

    @field_validator("lease")
    @classmethod
    def _check_lease(cls, lease: str) -> str:
        if duration_s(lease) < LEASE_MIN_S:
            raise ValueError(f"must be {LEASE_MIN_S:g} s or more: a writer gives four signs in it")
        return lease

    @property
    def lease_s(self) -> float:
        """Return `lease` in seconds."""
        return duration_s(self.lease)


class CatalogConfig(Section):
    """The state that processes share and that outlives them: streams, writers, positions, tables and schemas."""

    url: str = Field(
        default=EMBEDDED_CATALOG,
        description="Where it lies. As it is: embedded, in that file of the home. Else a PostgreSQL database (14 or newer), as libpq takes it: "
        "`postgresql://user@host/database` or keywords; services and pgpass files work too. It lies in the schema `millstream` there, which is "
        "made if it is missing and the role may. Several homes may share it. A variable where user or password stands is put in as it is: "
        "nobody has to escape it.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        # An unset variable stays as it is written for callers that don't need it:
        # `LoadedConfig.catalog_address`.
        if url != EMBEDDED_CATALOG and not is_address(url) and not url.startswith("${"):
            raise ValueError(
                f"must be a PostgreSQL address such as postgresql://user@host/database, or {EMBEDDED_CATALOG}"
            )
        return url


class Config(Section):
    """The whole configuration of a home."""

    streams: dict[str, StreamConfig] = Field(default={}, description="The streams, by name.")
    spark: SparkConfig = Field(default_factory=SparkConfig, description="The engine of the pipeline.")
    http: HttpConfig = Field(default_factory=HttpConfig, description="What `serve` listens on.")
    flight: FlightConfig = Field(default_factory=FlightConfig, description="Arrow Flight, for bulk.")
    writer: WriterConfig = Field(
        default_factory=WriterConfig, description="Which writer this is, where several share a stream."
    )
    catalog: CatalogConfig = Field(default_factory=CatalogConfig, description="Where the catalog lies.")
    replication: ReplicationConfig = Field(
        default_factory=ReplicationConfig, description="Other machines that have its streams."
    )
