"""A pipeline's values: its configuration, its progress reports, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldSizes
from millstream.lake.layout import LakeLayout, View
from millstream.lake.maintenance import MaintenanceRules
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq, StreamToken
from millstream.spark.batch_targets import BatchTarget, LakeOfFiles
from millstream.spark.executor_access import FlightAddress
from millstream.spark.fold_schedule import DISK_FACTOR, FOLD_INTERVAL_S
from millstream.spark.session import SparkOptions


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """One pipeline: a stream's log into one lake."""

    stream: str
    stream_id: StreamId
    wal_folder: Path
    target: BatchTarget
    """The target of its tables, and the pipeline's name."""
    spark: SparkOptions
    views: tuple[View, ...] = ("current", "history")
    """In a lake of files, the views to keep; all but history are folded from it."""
    trigger_interval_ms: int | None = 500
    """Minimum time from the start of a batch to the start of the next, unless a full batch is waiting; None: adaptive, see
    `batch_pause`."""
    batch_bytes_max: int = 64 << 20
    """Maximum log bytes of a batch; a table's rows of it take a few times that in a worker's memory."""
    history_retention_s: float | None = None
    """Whole days of history older than this are dropped; None: nothing is."""
    fold_sizes: FoldSizes = DEFAULT_SIZES
    maintenance: MaintenanceRules = field(default_factory=MaintenanceRules)
    folds_scheduled: bool = True
    """Whether tables are folded on their schedule; if not, only on request."""
    fold_interval_s: float = FOLD_INTERVAL_S
    """The minimum time from one fold of a table to the next, while the pipeline runs."""
    disk_factor: float = DISK_FACTOR
    """Bound of `current`'s disk bytes over its live bytes."""
    log_access: str = "auto"
    """How executors read the log: by `path`, by `flight`, or the first of these that all of them reach."""
    flight: FlightAddress | None = None
    """The home's Flight server; None if it has none."""

    @property
    def pipeline(self) -> str:
        """The pipeline's name."""
        return self.target.pipeline

    @property
    def layout(self) -> LakeLayout:
        """The layout of a lake of files; only called for such a lake."""
        assert isinstance(self.target, LakeOfFiles), "a database has no folders"
        return self.target.layout

    @property
    def folds(self) -> bool:
        """Whether there are views that are folded from history."""
        return bool({"current", "scd2"} & set(self.views))

    def token(self, n: Seq) -> str:
        """Return the stream's token at `n`."""
        return str(StreamToken.scalar(self.stream_id, n))


@dataclass(frozen=True, slots=True)
class TableProgress:
    """One table in the lake."""

    table_id: TableId
    name: str
    rows: int
    """Records appended to its history by this run."""
    history_n: Seq
    """Its history has everything up to here, as of its last append."""
    current_n: Seq | None
    """`current` was last folded up to here; None if this run hasn't folded it."""
    fold_lag_s: float | None
    """How long records have waited for a fold; 0 if none wait; None if the table has no `current`."""
    fold_lag_records: int = 0
    """How many of this run's records wait for a fold."""
    rows_per_s: float = 0.0
    """Records landed in its history, over the last half minute."""
    live_bytes: int | None = None
    """Size in bytes of `current`'s files when they were last maintained, once a minute; None if they never were."""
    disk_bytes: int | None = None
    """Size in bytes of everything in `current`'s folder, including replaced files kept for their
    readers; None as above."""
    changed_us: int | None = None
    """The newest commit time among its landed records, µs since 1970; None if none is known."""


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount done out of a total."""

    done: int
    total: int

    @property
    def left(self) -> int:
        """The amount not done."""
        return self.total - self.done


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """Progress of a pipeline with its backlog: the records that its start found in the log and the lake lacked.

    Later records aren't counted.
    """

    segments: Amount
    """Segments with a record of the replay; a segment is done once its last such record has landed."""
    records: Amount
    size_bytes: Amount
    """Size in bytes of the log's frames."""
    eta_s: float | None
    """How long the rest takes at the rate so far; None before it is known, by the second batch."""
    seconds: float
    """How long it has taken so far."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able facts: `segments`, `records`, `bytes`, each with `done` and `total`; `eta_s`; `seconds`."""
        return {
            "segments": asdict(self.segments),
            "records": asdict(self.records),
            "bytes": asdict(self.size_bytes),
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    """A pipeline's progress, after a batch or a fold."""

    n: Seq
    """The last cut, which all tables that aren't quarantined have reached."""
    rows: int
    """Records landed by this run."""
    rows_per_s: float
    """Rate of the last batch, from its plan to its cut."""
    batch_s: float
    lag_s: float | None
    """From the newest landed record's commit at the source to its cut here; None before the first."""
    lag_records: int
    """Numbers between the cut and the log's durable end: at most that many records wait."""
    tables: tuple[TableProgress, ...]
    quarantined: Mapping[str, str]
    """Names of tables that failed, each with its reason."""
    trying: Mapping[str, str] = field(default_factory=dict)
    """Names of tables whose write failed just now and is retried, each with the reason."""
    replay: ReplayProgress | None = None
    """The replay in progress; None if there is none."""
    replayed: ReplayProgress | None = None
    """The replay that this run began with, once it is over."""


@dataclass(frozen=True, slots=True)
class PipelineOutcome:
    """A run's outcome: stopped as asked, or caught up."""

    n: Seq
    token: str
    rows: int
    caught_up: bool
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Names of tables that failed, each with its reason; the others are complete."""
    fold_errors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """`code` and `hint` of those that only their fold holds back, by name: their history is complete."""


OnProgress = Callable[[PipelineProgress], None]
