"""What a pipeline is: its configuration, what it reports while it runs, and how it ends. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millstream.lake.folded.current import DEFAULT_SIZES, FoldSizes
from millstream.lake.layout import LakeLayout, View
from millstream.lake.maintenance import UpkeepRules
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq, StreamToken
from millstream.spark.schedule import DISK_FACTOR, FOLD_INTERVAL_S
from millstream.spark.session import SparkOptions
from millstream.spark.sinks import LakeOfFiles, Sink


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """One pipeline: a stream's log into one lake."""

    stream: str
    stream_id: StreamId
    wal_folder: Path
    sink: Sink
    """Where its tables are, and the pipeline's name."""
    checkpoint_dir: Path
    """Spark's own notes. Without them, or with those of an older run, the lake's last cut says where to go on."""
    spark: SparkOptions
    views: tuple[View, ...] = ("current", "history")
    """Of a lake of files: what is folded from history, beside it."""
    trigger_interval_ms: int = 500
    """Spark asks for new records this often; by default it would do so some 90 times a second."""
    batch_bytes_max: int = 64 << 20
    """Of the log, a batch: what a table's rows of it weigh in a worker's memory is a few times that."""
    history_retention_s: float | None = None
    """Days of history older than this are dropped; None: none is."""
    fold_sizes: FoldSizes = DEFAULT_SIZES
    upkeep: UpkeepRules = field(default_factory=UpkeepRules)
    fold_interval_s: float = FOLD_INTERVAL_S
    """The least time from one fold of a table to the next, while the pipeline runs."""
    disk_factor: float = DISK_FACTOR
    """Bound of `current`'s disk bytes over its live bytes."""

    @property
    def pipeline(self) -> str:
        """Its name."""
        return self.sink.pipeline

    @property
    def layout(self) -> LakeLayout:
        """The lake's, for a lake of files; nothing that is asked of another needs it."""
        assert isinstance(self.sink, LakeOfFiles), "a database has no folders"
        return self.sink.layout

    @property
    def folds(self) -> bool:
        """Whether there are views that are folded from history."""
        return bool({"current", "scd2"} & set(self.views))

    def token(self, n: Seq) -> str:
        """The stream's token at `n`."""
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
    """`current` was last folded up to here; None where this run hasn't folded it."""
    fold_lag_s: float | None
    """How long records have waited for a fold; 0 where none wait; None where the table has no `current`."""
    fold_lag_records: int = 0
    """How many of this run's records wait for a fold."""
    rows_per_s: float = 0.0
    """Records landed in its history, over the last half minute."""
    live_bytes: int | None = None
    """Of `current`'s files; None until its files were first tended, once a minute."""
    disk_bytes: int | None = None
    """Of everything in `current`'s folder, with what was replaced and stays for its readers; None as above."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much of a whole is done."""

    done: int
    total: int

    @property
    def left(self) -> int:
        """What isn't."""
        return self.total - self.done


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a pipeline is with what its start found in the log and the lake lacked. What came since isn't in it."""

    segments: Amount
    """Those with a record of it; done is one whose last such record has landed."""
    records: Amount
    size_bytes: Amount
    """Of the log's frames."""
    eta_s: float | None
    """How long the rest takes at the rate so far; None before that is known, by the second batch."""
    seconds: float
    """How long it has taken so far."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: `segments`, `records` and `bytes`, each with `done` and `total`; `eta_s`; `seconds`."""
        return {
            "segments": asdict(self.segments),
            "records": asdict(self.records),
            "bytes": asdict(self.size_bytes),
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    """How far a pipeline is, after a batch or a fold."""

    n: Seq
    """The last cut: all tables that aren't set aside stand there."""
    rows: int
    """Records landed by this run."""
    rows_per_s: float
    """Of the last batch, from its plan to its cut."""
    batch_s: float
    lag_s: float | None
    """From the newest landed record's commit at the source to its cut here; None before the first."""
    lag_records: int
    """Numbers between the cut and what is durable in the log: at most that many records wait."""
    tables: tuple[TableProgress, ...]
    set_aside: Mapping[str, str]
    """Names of tables that failed, each with its reason."""
    trying: Mapping[str, str] = field(default_factory=dict)
    """Names of tables whose write failed just now and is tried again, each with the reason."""
    replay: ReplayProgress | None = None
    """The replay that goes on; None where none does."""
    replayed: ReplayProgress | None = None
    """The one that this run began with, once it is over."""


@dataclass(frozen=True, slots=True)
class PipelineOutcome:
    """How a run ended: asked to stop, or caught up."""

    n: Seq
    token: str
    rows: int
    caught_up: bool
    set_aside: Mapping[str, str] = field(default_factory=dict)
    """Names of tables that failed, each with its reason; the others are whole."""


OnProgress = Callable[[PipelineProgress], None]
