"""`millstream.toml` as a checked value: every key, its default, and what it does.

The descriptions here are the reference documentation. Loading (interpolation, environment, places of errors) is
`millstream.config.file`'s.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, field_validator

from millstream.config import formed_texts as text
from millstream.config.alerts_model import AlertsConfig
from millstream.config.consumer_model import ConsumerConfig
from millstream.config.formed_texts import LakeFormat
from millstream.config.quantities import size_bytes
from millstream.config.replication_model import ReplicationConfig
from millstream.config.routing_model import RoutingSection
from millstream.config.section import Days, Duration, DurationOrAuto, Level, Section, Size, SizeAboveZero, SizeOrShare
from millstream.config.serving_model import FlightConfig, HttpConfig
from millstream.libpq import is_address
from millstream.model.durations import duration_s

EMBEDDED_CATALOG: Final = "data/catalog.db"
"""The default place of the catalog, from the home."""

LEASE_MIN_S: Final = 0.1
"""Shorter leases expire under a thread that the system has suspended."""


class SourceConfig(Section):
    """The PostgreSQL database that a stream captures."""

    dsn: str = Field(
        repr=False,
        description="The database's address, as libpq takes it: a URL or keywords. Services and pgpass files work too. A "
        "variable in the place of the user or the password is escaped as the address requires.",
    )
    tables: list[str] = Field(
        default=["public.*"],
        min_length=1,
        description="Patterns of tables. `*` matches any characters; a leading `!` excludes, also the partitions that only "
        'whole schemas match. `"public.*"` takes the whole schema, but no schema `millstream`, which may hold a catalog.',
    )
    publication: text.PublicationName | None = Field(
        default=None,
        description="The publication. It is created if it is missing and the role may create one. Tables without a replica "
        "identity are in a second one, `<publication>_inserts`. Unset: `millstream_<stream>`.",
    )
    slot: text.SlotName | None = Field(
        default=None,
        description="The replication slot, created at the first run. Unset: `millstream_<stream>`.",
    )
    failover: bool = Field(
        default=True,
        description="Create the slot as a failover slot: standbys that sync slots (PostgreSQL 17 and newer) keep a copy, so "
        "that capture continues after one of them is promoted. An existing slot isn't changed; `millstream "
        "doctor` prints the command that changes it.",
    )
    origin: Literal["any", "none"] = Field(
        default="any",
        description="Origin of the changes that are captured. `any` captures all of them. `none` leaves out rows that "
        "replication from another system wrote (rows with a replication origin; PostgreSQL 16 and newer), so "
        "that two databases that replicate to each other make no loop. A table copy reads all rows, whatever "
        "their origin.",
    )
    copy_workers: int = Field(
        default=2, ge=1, le=64, description="Number of connections that copy existing rows in parallel."
    )
    copy_chunk_rows: int = Field(
        default=50_000,
        ge=1,
        description="Rows in a chunk of the table copy, at most. A restart repeats one chunk. Chunks are smaller if rows are "
        "wide, or if the source needs more than a second for one.",
    )
    copy_rate: SizeAboveZero | None = Field(
        default=None,
        description="Bytes of rows (as text) that all copies of the stream together read in a second, at most, such as "
        "`20MiB`. Unset: no limit. A running capture applies a new value within seconds.",
    )
    copy_again_above: SizeAboveZero = Field(
        default="10GiB",
        description="Size of a table at the source, without TOAST, above which another copy of it, which a change of its "
        "definition requires, waits until you run `millstream tables copy T`. The first copy of a table, and that of an attached partition, never waits.",
    )
    heartbeat_interval: text.Interval = Field(
        default="10s",
        description="Interval between the heartbeat messages that are written to an idle source, so that its slot advances.",
    )
    catch_up: Literal["auto", "never", "always"] = Field(
        default="auto",
        description="Read a large backlog in chunks instead of as a stream. `auto` reads chunks from 64 MiB of WAL on, "
        "measures both ways and keeps to the faster. `always` reads chunks at each start, even if the backlog is "
        "small. `never` streams. Chunks need a free replication slot at the source, and space for temporary "
        "files there, commonly up to 400 MiB.",
    )
    memory: Size = Field(
        default="32MiB",
        description="Bytes of undecoded changes held in memory. Larger transactions spill to disk, and the source waits.",
    )
    hash_key: str | None = Field(
        default=None,
        repr=False,
        description="Key of the hashes in columns with the rule `hash`, at least 16 bytes; best a variable, "
        '`"${HASH_KEY}"`. Another key gives other hashes: every table with such a column is copied again.',
    )


class TableConfig(Section):
    """Rules for columns of a captured table whose values never leave the source.

    Capture and table copies apply them before anything is stored.
    """

    exclude: list[str] = Field(default=[], description="Columns that are left out.")
    hash: list[str] = Field(
        default=[],
        description="Columns whose values become HMAC-SHA-256 of their text, as 64 hexadecimal digits, under the source's "
        "`hash_key`. Equal values have equal hashes. NULL stays NULL.",
    )
    redact: list[str] = Field(
        default=[], description="Columns whose values become the text `[redacted]`. NULL stays NULL."
    )


class LakeConfig(Section):
    """The destination of a stream's tables."""

    format: LakeFormat = Field(
        default="delta",
        description="Format of the tables: `delta` (files in a folder or an object store), `iceberg` (files in a folder or an object "
        "store, and a catalog; `pip install 'millstream[iceberg]'`), or `postgres` (tables of a database).",
    )
    location: str = Field(
        default="lake",
        min_length=1,
        description="A folder (not in the home's `data`), or the URL of an object store's prefix. A relative path starts at the home. The stream's "
        "tables are in a subfolder with the stream's name. For `postgres`: the address of a database, as libpq "
        "takes it (PostgreSQL 14 or newer; `current` needs 15). A variable in the place of the user or the "
        "password is escaped as the address requires. For `iceberg` with a catalog of type `rest` it may be left out: "
        "tables lie where the catalog says.",
    )
    catalog: dict[str, str] = Field(
        default={},
        repr=False,
        description="For `iceberg`: the catalog. `type` is `sql`, an SQL database: an SQLite file in the home (`data/iceberg.db`), "
        "unless `uri` names another; or `rest`, a server at `uri`, with its own word for `warehouse`. Further properties "
        "are pyiceberg's.",
    )
    views: list[Literal["current", "history", "scd2", "merged", "changes"]] | None = Field(
        default=None,
        min_length=1,
        description="Views that readers get. With `delta`: `current` has one row per key, `history` every record, `scd2` "
        "every version of each row with the times at which it began and ended, `merged` the rows of all regions. "
        "History is always written; `current` and `scd2` are folded from it, `merged` from the regions' logs. With `iceberg`: the same. With `postgres`: `changes` has an event table per table, `current` its "
        "rows. Unset: `current`, with `history` or `changes`.",
    )
    schema_prefix: text.SchemaPrefix = Field(
        default="",
        max_length=30,
        description="For `postgres`: prefix of the names of the schemas that hold tables. `public.orders` has its rows in "
        "`<prefix>public.orders` and its events in `<prefix>public_changes.orders`. Two streams in one database "
        "need different prefixes.",
    )
    history_retention: Days | None = Field(
        default=None,
        description="Retention of history, in whole days. A file is dropped once all its records are older and `current` "
        "includes them: a large table by days, a small one by months. Unset: unlimited. `--as-of` works within this time.",
    )
    fold: Literal["auto", "manual"] = Field(
        default="auto",
        description="`auto`: folds run while the pipeline runs. `manual`: they run only on `millstream pipeline fold`, which "
        "also builds `current` and `scd2` of a new table. `query` doesn't depend on folds.",
    )
    fold_interval: Duration = Field(
        default="30s",
        description="Minimum time between two folds of a table. `query` doesn't depend on folds: it also reads the records "
        "after the last one. Readers that open `current` themselves see the table as of the last fold.",
    )
    disk_factor: float = Field(
        default=5.0,
        ge=1.5,
        description="Maximum ratio of bytes on disk to live bytes of `current`. A lower value folds large tables less often.",
    )
    keep_replaced: Duration = Field(
        default="5m",
        description="Time that files replaced by a fold or a compaction stay on disk. It must exceed the duration of the "
        "longest query of a reader that opens tables itself.",
    )
    log_retention: Duration = Field(
        default="15min",
        description="Time for which a table's older versions can be opened. Older commits are then deleted from its "
        "`_delta_log`, at the next maintenance. A streaming reader that stops for longer must start again from "
        "the table.",
    )
    maintenance_interval: text.Interval = Field(
        default="60s",
        description="Interval of maintenance: small files are compacted, and files no longer referenced are deleted.",
    )
    compact_files: int = Field(
        default=200,
        ge=2,
        description="Number of small files in one day of a table's history that triggers their compaction. Days and months "
        "that are over need fewer.",
    )
    storage_options: dict[str, str] = Field(
        default={},
        repr=False,
        description="Options of the object store: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, "
        "`AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`, `AWS_VIRTUAL_HOSTED_STYLE_REQUEST` and `AWS_PROFILE`. Other "
        "names are refused. Without keys here they come from the environment or the machine's role.",
    )

    @property
    def shown(self) -> tuple[str, ...]:
        """Return `views`, or the format's default views."""
        if self.views is not None:
            return tuple(self.views)
        return ("current", "changes") if self.format == "postgres" else ("current", "history")

    @property
    def catalog_type(self) -> str | None:
        """Return the type of the catalog; None if the format has none."""
        return self.catalog.get("type", "sql") if self.format == "iceberg" else None

    @property
    def lies_in_catalog(self) -> bool:
        """Whether the catalog says where the tables lie."""
        return self.catalog_type == "rest" and "location" not in self.model_fields_set

    @property
    def history_retention_s(self) -> float | None:
        """Return `history_retention` in seconds."""
        return None if self.history_retention is None else duration_s(self.history_retention)


class LogConfig(Section):
    """A stream's log on disk."""

    shards: int = Field(default=1, ge=1, le=1024, description="Number of shards of the stream.")
    retention_age: Duration = Field(
        default="7d", description="Segments older than this are deleted, once no reader needs them."
    )
    retention_bytes: SizeOrShare = Field(
        default="20%",
        description="Size of the log (bytes, or a share of the disk) above which the oldest segments that no reader needs "
        "are deleted.",
    )
    retention_bytes_max: SizeOrShare | None = Field(
        default=None,
        description="Size of the log up to which segments are kept for followers and consumers. Above it, those that "
        "need the oldest segments are cut off, and reported by name. Pipelines are never cut off. "
        "Unset: twice `retention_bytes`.",
    )
    retention_interval: text.Interval = Field(
        default="30s", description="Interval between two checks for segments to delete."
    )
    disk_used_max: float = Field(
        default=0.9, gt=0, le=1, description="Share of the disk above which appends are rejected."
    )
    segment_bytes: Size = Field(default="64MiB", description="Size at which a segment is sealed.")
    segment_age: Duration = Field(default="1h", description="Age of the first record at which a segment is sealed.")
    frame_version: int = Field(
        default=2,
        ge=1,
        le=2,
        description="Version of the headers of the log's frames. Both versions are always readable. Version 1 is for going back "
        "to a program that reads nothing newer. It requires `region` 0, one shard and one writer.",
    )
    queue_bytes: Size = Field(
        default="64MiB",
        description="Bytes of operations that wait for the disk, at most. Above it, their senders wait.",
    )
    group_commit_delay_ms: float = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Time in milliseconds that the first operation of a commit group waits for others. With 0 it doesn't "
        "wait: a group holds the operations that arrived while the previous group was written. A higher value "
        "makes fewer and larger groups if an fsync is slow, and delays every acknowledgement by that time.",
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
        description="Schema changes that appended rows may cause. `strict`: none. `add_columns`: new columns are added to an "
        "existing table. `create`: missing tables are created too.",
    )
    session_age: Duration = Field(
        default="7d",
        description="Time after the last write for which a session or an idempotency key is remembered. A later retry is "
        "rejected, because the log can no longer determine whether the write was done.",
    )
    sessions_max: int = Field(
        default=1_000_000,
        ge=1,
        le=10_000_000,
        description="Number of sessions that are remembered, at most. The least recently used are forgotten first. A session "
        "takes some 300 bytes of memory, and up to 1 kB after many writes.",
    )
    idempotency_keys_max: int = Field(
        default=1_000_000,
        ge=1,
        le=10_000_000,
        description="Number of idempotency keys that are remembered, at most. The oldest are forgotten first.",
    )


class BufferConfig(Section):
    """A write buffer between applications and a stream's log. A stream writes to it or reads from it, never both."""

    kind: text.KindName = Field(
        default="log",
        description="Storage of the buffer: `log` (files in a folder, written by one process), `kafka` (a topic) or `redis` "
        "(streams in Redis or a compatible server). Any other name is an entry point of the group "
        "`millstream.buffers` in an installed package.",
    )
    role: Literal["writes", "reads"] = Field(
        description="`writes`: rows that applications append go into the buffer, and none into this stream's log. `reads`: "
        "operations from the buffer are written to this stream's log, each once; applications can't append to "
        "the stream. Without a buffer a stream does neither.",
    )
    location: str = Field(
        min_length=1,
        repr=False,
        description="Address of the buffer. `log`: a folder (a relative path starts at the home). `kafka`: the brokers, "
        "`host:9092,host:9092`. `redis`: `redis://host:6379/0`, or `rediss://…` with TLS.",
    )
    name: text.TopicName | None = Field(
        default=None,
        description="Name of the topic, or prefix of the keys in Redis. Unset: `millstream_<stream>`. A folder has no such "
        "name.",
    )
    create: bool = Field(
        default=False,
        description="Create the buffer if it doesn't exist. Any number of homes may do so at the same time.",
    )
    shards: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of shards of a new buffer: partitions of its topic, or streams in Redis. An existing buffer "
        "keeps its number.",
    )
    topic: dict[str, str] = Field(
        default={},
        description='Options of a new topic: `"retention.ms"`, `"min.insync.replicas"` …, also `"replication.factor"`.',
    )
    client: dict[str, str] = Field(
        default={},
        repr=False,
        description='Options of the Kafka clients, with the names that librdkafka uses: `"security.protocol"`, '
        '`"sasl.password"` ….',
    )
    timeout: Duration = Field(
        default="30s",
        description="Time that an operation may take, retries included. After that the sender receives an error: the outcome "
        "is unknown.",
    )
    accept_loss: bool = Field(
        default=False,
        description="Accept a Redis that may lose acknowledged writes, because it isn't set to `appendonly yes` and "
        "`appendfsync always`.",
    )
    retention_age: Duration = Field(
        default="7d",
        description="For `log`: segments older than this are deleted, read or not. Topics have their own options.",
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
    """One stream: its source, its log and its lake tables."""

    source: SourceConfig | None = Field(
        default=None,
        description="The PostgreSQL database that the stream captures. Without one, the stream holds only appended rows.",
    )
    tables: dict[str, TableConfig] = Field(
        default={},
        description='Rules for columns of captured tables, by exact name: `[streams.S.tables."public.users"]`. A changed '
        "rule has the table copied again.",
    )
    ingest: IngestConfig = Field(default_factory=IngestConfig, description="Rules for rows that applications append.")
    buffer: BufferConfig | None = Field(
        default=None,
        description="The write buffer that the stream writes to or reads from. Without one it does neither.",
    )
    keys: dict[str, list[str]] = Field(
        default={},
        description='Key columns of tables that applications write: `"public.clicks" = ["id"]`. The table\'s `current` has '
        "one row per key, the newest. A table without a key has history only. A key can't change after the "
        "table's first row.",
    )
    lake: LakeConfig = Field(default_factory=LakeConfig, description="Destination of the stream's tables.")
    types: dict[str, str] = Field(
        default={},
        description='Lake types of numeric columns without a precision, by column: `"public.orders.total" = '
        '"decimal(38,9)"`. The log keeps the text. A value that doesn\'t fit is null in the column, and complete '
        "in `__exact`.",
    )
    log: LogConfig = Field(default_factory=LogConfig, description="The stream's log on disk.")
    shards: dict[str, int] = Field(
        default={}, description='The shard of a table, by name: `"public.big" = 1`. Other tables are on shard 0.'
    )
    acks: Level = Field(
        default="local",
        description="Acknowledgement level: the copies that must exist before an append is acknowledged, before a captured "
        "transaction is confirmed to the source, and before readers see either. `local`: durable on this node. "
        "`durable(1)`, `durable(2)` …: also on that many followers. `object`: also in the object store. An "
        "append may request a higher level.",
    )
    routing: RoutingSection | None = Field(
        default=None,
        description="Routes of appended rows to shards and sinks. Without it, each table is on its own shard.",
    )
    consumers: dict[str, ConsumerConfig] = Field(
        default={},
        description="Consumers that belong to the deployment, by name: `[streams.S.consumers.search]`. Others are made by "
        "`millstream consumer create`.",
    )
    region: int = Field(
        default=0,
        ge=0,
        lt=1 << 32,
        description="Number of this home's region, if several regions write the stream. It must be unique among them and "
        "can't change. Logs of other regions are next to the home's own, region N's in `data/wal/<stream>@N`.",
    )
    merge: dict[str, dict[str, str]] = Field(
        default={},
        description='Merge rules for columns of tables that several regions write: `[streams.S.merge."public.posts"]`, '
        '`likes = "pn_counter"`. The rules are `lww` (the last write wins; the default), `pn_counter`, '
        "`g_counter`, `or_set`, `union_set`, `hide`, and `signal(7d)` with a half-life or `signal(7d, "
        "at=happened)` with a column of the events' times. Rows of `pn_counter(increments)` and "
        "`g_counter(increments)` have what they add to the total. A table needs a key.",
    )
    partitions: dict[str, str] = Field(
        default={},
        description='Partition templates of tables that applications write: `"public.clicks" = "{created_at:%Y-%m-%d}"`. '
        "`{column}` is a column's value, `{column:%Y-%m}` a timestamp's, bare `%Y-%m-%d` that of the column "
        "`time`, `{__table}` the table's name. `millstream wal stats --partitions` shows each partition's "
        "numbers.",
    )


class SparkConfig(Section):
    """The pipeline's engine."""

    master: text.SparkMaster = Field(
        default="local[*]", description="The Spark master: `local[*]`, `spark://…`, `yarn`, `k8s://…`."
    )
    log_access: Literal["auto", "path", "object", "flight"] = Field(
        default="auto",
        description="How executors of a cluster read the log: `path` (they see the home's `data/wal`), `flight` (from `[flight] "
        "listen`, while `millstream run` or `serve` runs), or `auto`, the first of these that all of them reach. `object` "
        "isn't implemented and is refused. With a local master it has no effect.",
    )
    trigger_interval: DurationOrAuto = Field(
        default="500ms",
        description="Minimum time from the start of a batch to the next, unless a full one is waiting. `auto`: the next batch "
        "starts as long after the end of the last one as that took, half a second after its start at the soonest and 5 seconds "
        "after its end at the latest. So a lake of many tables that change a little gets half of the files and commits, and "
        "its records land up to 5 seconds later.",
    )
    batch_bytes: Size = Field(default="64MiB", description="Approximate bytes of the log that one batch reads.")
    conf: dict[str, str] = Field(
        default={}, repr=False, description='Options that are passed to Spark: `"spark.driver.memory" = "2g"`.'
    )

    @field_validator("log_access")
    @classmethod
    def _check_log_access(cls, log_access: str) -> str:
        if log_access == "object":
            raise ValueError("`object` isn't implemented: use `flight`, or `path` on a shared file system")
        return log_access

    @property
    def is_local(self) -> bool:
        """Return whether Spark runs on this machine, started by the driver."""
        return self.master.startswith("local")

    @property
    def is_untested(self) -> bool:
        """Return whether no test runs against this kind of master."""
        return not self.is_local and not self.master.startswith("spark://")


class WriterConfig(Section):
    """This writer among a stream's writers, if several processes write it, each to its own shards.

    The catalog must be in PostgreSQL then.
    """

    name: text.WriterName | None = Field(
        default=None,
        description="Name of this writer, unique among the stream's writers. Unset: the stream has one writer, which owns "
        "it. If a stream with one writer gets several, the first one's name is `writer`.",
    )
    lease: Duration = Field(
        default="5s",
        description="Time after which a writer without a sign of life is dead. A writer renews its lease with each commit "
        "group, and four times per lease while it is idle. Another writer of the home then recovers its shards, "
        "and linear readers skip its undecided records.",
    )
    first_shard: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 20,
        description="First of the writer's shards; it has `log.shards` of them. Unset: after the shards of the writers "
        "registered before it, if they have as many each.",
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
        description="Address of the catalog. The default is embedded: a file in the home. Otherwise a PostgreSQL database "
        "(14 or newer), as libpq takes it: `postgresql://user@host/database` or keywords. Services and pgpass "
        "files work too. The catalog is in the schema `millstream`, which is created if it is missing and the "
        "role may create it. Several homes may share it. A variable in the place of the user or the password is "
        "escaped as the address requires.",
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
    spark: SparkConfig = Field(default_factory=SparkConfig, description="The pipeline's engine.")
    http: HttpConfig = Field(default_factory=HttpConfig, description="Address, callers and limits of the HTTP server.")
    flight: FlightConfig = Field(default_factory=FlightConfig, description="Arrow Flight, for bulk.")
    writer: WriterConfig = Field(default_factory=WriterConfig, description="This writer, if several share a stream.")
    catalog: CatalogConfig = Field(default_factory=CatalogConfig, description="Address of the catalog.")
    alerts: AlertsConfig = Field(default_factory=AlertsConfig, description="Alerts by webhook, and their bounds.")
    replication: ReplicationConfig = Field(
        default_factory=ReplicationConfig, description="Other nodes that have the home's streams."
    )
