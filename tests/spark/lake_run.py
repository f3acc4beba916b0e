"""Runs of a pipeline over a hand-made home, and the lake as deltalake alone reads it.

As a program (`python -m tests.spark.lake_run HOME WORK drain|follow [VIEW …]`) it lands the home's log in its lake, to the end or for
ever: what tests kill. It says on stdout how far it is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from deltalake import DeltaTable

from millstream.catalog import Catalog
from millstream.lake.layout import LakeLayout
from millstream.model.ids import StreamId
from millstream.spark.driver import run_pipeline
from millstream.spark.pipeline import PipelineConfig, PipelineOutcome, PipelineProgress
from millstream.spark.session import SparkOptions
from millstream.spark.sinks import LakeOfFiles


def config_of(home: Path, stream: StreamId, spark: SparkOptions, **changes: Any) -> PipelineConfig:
    facts: dict[str, Any] = {
        "stream": "shop",
        "stream_id": stream,
        "wal_folder": home / "data" / "wal" / "shop",
        "sink": LakeOfFiles(LakeLayout(str(home / "lake"), "shop", stream)),
        "checkpoint_dir": home / "data" / "spark" / "lake",
        "spark": spark,
        "trigger_interval_ms": 100,
    }
    return PipelineConfig(**facts | changes)


def drain(config: PipelineConfig, catalog: Catalog, seen: list[PipelineProgress] | None = None) -> PipelineOutcome:
    """Land all that is durable now."""
    asked = threading.Event()
    asked.set()
    progress: list[PipelineProgress] = [] if seen is None else seen
    return run_pipeline(config, catalog, stop=threading.Event(), drain=asked, on_progress=progress.append)


@dataclass
class RunningPipeline:
    """A pipeline in a thread of its own, until `finish`."""

    config: PipelineConfig
    catalog: Catalog
    on_progress: Callable[[PipelineProgress], None] = lambda _progress: None
    stop: threading.Event = field(default_factory=threading.Event)
    drain: threading.Event = field(default_factory=threading.Event)
    outcome: PipelineOutcome | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(600)

    def _run(self) -> None:
        try:
            self.outcome = run_pipeline(
                self.config, self.catalog, stop=self.stop, drain=self.drain, on_progress=self.on_progress
            )
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.error = error

    def finish(self, event: threading.Event) -> PipelineOutcome:
        event.set()
        self._thread.join(600)
        assert not self._thread.is_alive(), "the pipeline doesn't end"
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome


def rows_in(home: Path, view: str, table: str) -> list[dict[str, Any]]:
    """A lake table's rows as plain values."""
    rows: list[dict[str, Any]] = (
        DeltaTable(str(home / "lake" / "shop" / view / table)).to_pyarrow_dataset().to_table().to_pylist()
    )
    return rows


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = 240) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        threading.Event().wait(0.1)


def main(home: Path, work: Path, mode: str, *views: str) -> None:
    drain_asked = threading.Event()
    if mode == "drain":
        drain_asked.set()
    with Catalog(home / "data" / "catalog.db") as catalog:
        config = config_of(home, catalog.stream("shop").id, SparkOptions(work), batch_bytes_max=20_000)
        config = replace(config, views=views or config.views)
        run_pipeline(
            config,
            catalog,
            stop=threading.Event(),
            drain=drain_asked,
            on_progress=lambda progress: print(progress.n, flush=True),  # noqa: T201 - the test reads it
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
