"""Runs of a pipeline over a hand-made home, and the lake as deltalake alone reads it.

As a program (`python -m tests.spark.lake_run HOME WORK drain|follow [VIEW …]`) it lands the home's log in its
lake, to the end or for ever. Tests kill it. It prints its progress on stdout.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psutil
from deltalake import DeltaTable

from millstream.catalog import Catalog
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules
from millstream.model.ids import StreamId
from millstream.spark.batch_targets import LakeOfFiles
from millstream.spark.driver import run_pipeline
from millstream.spark.pipeline import PipelineConfig, PipelineOutcome, PipelineProgress
from millstream.spark.session import SparkOptions


def config_of(home: Path, stream: StreamId, spark: SparkOptions, **changes: Any) -> PipelineConfig:
    facts: dict[str, Any] = {
        "stream": "shop",
        "stream_id": stream,
        "wal_folder": home / "data" / "wal" / "shop",
        "target": LakeOfFiles(LakeLayout(str(home / "lake"), "shop", stream)),
        "spark": spark,
        "trigger_interval_ms": 100,
        "fold_interval_s": 0.0,
    }
    return PipelineConfig(**facts | changes)


def drain(config: PipelineConfig, catalog: Catalog, seen: list[PipelineProgress] | None = None) -> PipelineOutcome:
    """Land everything that is durable now."""
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


class DriverProcess:
    """Run a pipeline as a process of its own, whose lake is at `home`; kill what still runs at the end of the block.

    Args:
        mode: `drain` or `follow`, as of `main`.
        environ: added to this process's variables.
    """

    def __init__(self, home: Path, work: Path, mode: str, *views: str, **environ: str) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._work = work
        self._said, self._failed = work / "said", work / "failed"
        command = [sys.executable, "-m", "tests.spark.lake_run", str(home), str(work), mode, *views]
        with self._said.open("wb") as said, self._failed.open("wb") as failed:
            self.process = subprocess.Popen(command, stdout=said, stderr=failed, env=os.environ | environ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)

    @property
    def errors(self) -> str:
        """Return its stderr."""
        return self._failed.read_text()

    def until(self, is_so: Callable[[int], bool], what: str, more: Callable[[], object] = lambda: None) -> None:
        """Wait while it runs.

        Args:
            is_so: the condition; it gets the last cut that the process printed, 0 before the first.
            what: the condition, for people.
            more: called when the process prints progress, at most a second after the last call: writes the next records.
        """
        heard = 0

        def look() -> bool:
            nonlocal heard
            assert self.process.poll() is None, (
                f"it ended ({self.process.returncode}) before {what}: {self.errors[-4000:]}"
            )
            lines = self._said.read_text().split("\n")[:-1]
            if len(lines) > heard:
                heard = len(lines)
                more()
            return is_so(int(lines[-1]) if lines else 0)

        eventually(look, what, 800)

    def is_killed(self) -> None:
        """Wait until it has been killed, and its JVM has ended because of that."""
        code = self.process.wait(800)
        assert code == -signal.SIGKILL, f"it ended by itself ({code}): {self.errors[-4000:]}"
        eventually(lambda: not self.javas(), "the JVM of a driver that was killed ends")

    def javas(self) -> list[psutil.Process]:
        """Return its JVM, if it runs."""
        javas = [p for p in psutil.process_iter(["name", "cmdline"]) if p.info["name"] == "java"]
        return [p for p in javas if any(str(self._work) in part for part in p.info["cmdline"] or ())]


def follow_until_killed(
    home: Path, folder: Path, *views: str, workers: Sequence[str], at: str, more: Callable[[], object]
) -> None:
    """Run a process that survives the death of a worker at each of some points, and is then killed at its own.

    One process for all of them: most of a kill's cost is Spark's start.

    Args:
        home: the home whose log is landed.
        folder: takes the witnesses of kills, and Spark's own files.
        views: of the lake.
        workers: the points in workers, each with its count.
        at: the driver's point.
        more: writes to the log, so that records are always on the way to a point.
    """
    witness = folder / "witness"
    witness.mkdir()
    (witness / at).touch()  # it is spared until all workers' points have been reached
    points = ",".join([*workers, at])
    missed = [witness / point.partition(":")[0] for point in workers]
    with DriverProcess(
        home, folder / "work", "follow", *views, MILLSTREAM_FAILPOINTS_DIR=str(witness), MILLSTREAM_FAILPOINTS=points
    ) as driver:

        def all_reached(_cut: int) -> bool:
            missed[:] = [point for point in missed if not point.exists()]
            return not missed

        driver.until(all_reached, f"workers died at all of {points}", more)
        (witness / at).unlink()
        more()
        driver.is_killed()


def rows_in(home: Path, view: str, table: str) -> list[dict[str, Any]]:
    """Return a lake table's rows as plain values."""
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
        # Files are maintained all the time, so that kills meet that too.
        config = replace(
            config, views=views or config.views, maintenance=MaintenanceRules(interval_s=0.5, compact_files=3)
        )
        run_pipeline(
            config,
            catalog,
            stop=threading.Event(),
            drain=drain_asked,
            on_progress=lambda progress: print(progress.n, flush=True),  # noqa: T201 - the test reads it
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
