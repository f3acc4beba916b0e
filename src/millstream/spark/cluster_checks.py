"""Checks of a cluster from its driver: the master, the executors' Python, their access to log and lake, their clocks."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from millstream.catalog import Catalog
from millstream.errors import EngineError, MillstreamError
from millstream.spark.batch_targets import LakeOfFiles
from millstream.spark.executor_access import ExecutorLog, ExecutorWatch, check_lake, everywhere
from millstream.spark.jobs import run_job
from millstream.spark.pipeline import PipelineConfig
from millstream.spark.probes import ExecutorFacts, executor_facts

CLOCKS_APART_S_MAX: Final = 60.0
CHECKS: Final = ("spark.master", "spark.python", "executor.log", "executor.lake", "clocks")


@dataclass(frozen=True, slots=True)
class ClusterCheck:
    """One check's outcome."""

    name: str
    detail: str
    error: MillstreamError | None = None

    @property
    def is_ok(self) -> bool:
        """Return whether it found no problem."""
        return self.error is None


def check_cluster(
    context: SparkContext, catalog: Catalog, configs: Iterable[PipelineConfig], *, after_s: float = 60.0
) -> Iterator[ClusterCheck]:
    """Yield the outcome of each of `CHECKS`, in that order.

    Args:
        configs: the pipelines whose streams have a log.
        after_s: how long to wait for an executor.
    """
    with ExecutorWatch(context, after_s=after_s) as watch:
        began_s = time.time()
        try:
            facts = _asked(context, watch)
        except MillstreamError as error:
            of_python = error.code == "executor_version"
            yield ClusterCheck("spark.master", f"{context.master} answers", None if of_python else error)
            yield ClusterCheck("spark.python", "not asked", error)
            for name in CHECKS[2:]:
                yield ClusterCheck(name, "not asked", error)
            return
        ended_s = time.time()
        hosts = sorted({found.host for found in facts})
        yield ClusterCheck("spark.master", f"{context.master} has executors on {', '.join(hosts)}")
        versions = sorted({f"Python {found.python} with Millstream {found.millstream}" for found in facts})
        yield ClusterCheck(
            "spark.python", f"executors have {', '.join(versions)}; the driver {platform.python_version()}"
        )
        configs = list(configs)
        yield _of_all("executor.log", [_log(context, catalog, config) for config in configs])
        yield _of_all("executor.lake", [_lake(context, config) for config in configs])
        yield _clocks(facts, began_s, ended_s)


def _asked(context: SparkContext, watch: ExecutorWatch) -> list[ExecutorFacts]:
    try:
        return run_job(context, executor_facts, [0] * everywhere(context))
    except (PySparkException, Py4JError, OSError) as error:
        raise watch.failure(error, "Spark's log has the whole story.") from error


def _log(context: SparkContext, catalog: Catalog, config: PipelineConfig) -> ClusterCheck:
    with contextlib.closing(ExecutorLog(config, context, catalog)) as log:
        try:
            log.choose()
        except MillstreamError as error:
            return ClusterCheck("executor.log", config.stream, error)
        return ClusterCheck("executor.log", f"{config.stream} is read by {log.way}")


def _lake(context: SparkContext, config: PipelineConfig) -> ClusterCheck:
    if not isinstance(config.target, LakeOfFiles):
        return ClusterCheck("executor.lake", f"{config.stream} lands in a database")
    error = check_lake(context, config.layout)
    return ClusterCheck("executor.lake", f"executors can write the lake of {config.stream}", error)


def _of_all(name: str, checks: list[ClusterCheck]) -> ClusterCheck:
    """Return the first problem; without one, what was found of all streams."""
    wrong = next((check for check in checks if not check.is_ok), None)
    return wrong or ClusterCheck(name, "; ".join(check.detail for check in checks) or "no stream has a log yet")


def _clocks(facts: list[ExecutorFacts], began_s: float, ended_s: float) -> ClusterCheck:
    apart_s, host = max((max(began_s - f.clock_s, f.clock_s - ended_s, 0.0), f.host) for f in facts)
    error = None
    if apart_s > CLOCKS_APART_S_MAX:
        error = EngineError(
            f"the clock of {host} differs from the driver's by {apart_s:.0f} s", code="clocks_apart", host=host
        )
    return ClusterCheck("clocks", f"executors' clocks differ from the driver's by {apart_s:.0f} s at most", error)


def as_facts(check: ClusterCheck) -> dict[str, Any]:
    """Return a check, JSON-able."""
    return {"name": check.name, "detail": check.detail, "error": None if check.error is None else check.error.as_dict()}
