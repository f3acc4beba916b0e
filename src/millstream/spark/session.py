"""The Spark session of Millstream's own processes: local by default, quiet, and gone when its driver is.

Spark starts a JVM as a child of the driver's Python. The JVM ends when the pipe to it closes, and
Python workers end when the JVM does. So a killed driver leaves nothing behind that could write,
except a task that is just at its lake commit; the lake's transactions make it harmless.

A process has one session. Nothing is downloaded: Ivy isn't used, and jars come from `spark.jars` if
a user sets them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway

from millstream.errors import EngineError
from millstream.model.addresses import is_secret_key, mask_option
from millstream.private_files import make_folder
from millstream.spark.java import find_java
from millstream.spark.unzipped_pyspark import without_zipped_modules

_TASK_FAILURES_MAX: Final = 4
"""Spark's own default, except on a local master, where it is 1."""
_STACK: Final = re.compile(r"\n*(JVM stacktrace:|Driver stacktrace:)|\n\s+at ")
_LOG4J: Final = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log}
appender.file.filePattern = {log}.%i
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 16MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd'T'HH:mm:ss.SSSXXX}} %p %c{{1}}: %m%n%ex
"""


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """The configuration of a session.

    `work_dir` holds Spark's spilled data, its log and a wrapper of Java if one is needed. It is on
    this machine's disk and stays as long as the session. `conf` is passed through and has priority
    over every setting chosen here.
    """

    work_dir: Path
    app_name: str = "millstream"
    master: str = "local[*]"
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)


def open_context(options: SparkOptions) -> SparkContext:
    """Return the process's context; start Spark if it isn't running (2 to 10 seconds).

    A pipeline needs no more: a session loads all of Spark SQL, which takes two thirds of that time again.

    Raises:
        EngineError (`java_missing`): there is no Java to run it on.
        EngineError: Spark doesn't start; the log in `work_dir` has the reason.

    Concurrency: one caller, before any other thread uses Spark.
    """
    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - there is no public way to ask
        return SparkContext.getOrCreate()
    work_dir = options.work_dir.absolute()
    make_folder(work_dir)
    # Spark's launcher and the data sources' look-up read the environment once, when the JVM starts.
    os.environ["PYSPARK_PYTHON"] = options.conf.get("spark.pyspark.python", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["JAVA_HOME"] = str(find_java(work_dir).path)
    if options.master.startswith("local"):
        # An unresolvable host name, or a change of network on a laptop, must not matter.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    facts = {"spark.app.name": options.app_name, "spark.master": _with_retries(options.master)}
    settings = _defaults(options, work_dir) | facts | dict(options.conf)
    conf = SparkConf(loadDefaults=False).setAll([*settings.items()])
    # pyspark writes each setting into the JVM's command line, which all users of the machine can
    # read. Secrets are set once it runs.
    at_launch = SparkConf(loadDefaults=False).setAll([one for one in settings.items() if not _is_secret(*one)])
    try:
        # Output of the JVM and Python workers goes to a file: this terminal is for people.
        with (work_dir / "spark.out").open("ab") as output, _started_from(options, work_dir):
            gateway = launch_gateway(at_launch, {"stdout": output, "stderr": output})
        context = SparkContext(conf=conf, gateway=gateway)
        _hush(context)
        return context
    except (PySparkException, Py4JError, OSError, RuntimeError) as error:
        raise EngineError(
            f"Spark did not start on {options.master}: {without_stack(error)}",
            hint=f"Read {work_dir / 'spark.out'} and spark.log next to it.",
            master=options.master,
        ) from error


def without_stack(error: BaseException) -> str:
    """Return an error's message without Java's stack, which is in Spark's own log."""
    return _STACK.split(str(error), maxsplit=1)[0].strip() or type(error).__name__


@contextlib.contextmanager
def _started_from(options: SparkOptions, work_dir: Path) -> Iterator[None]:
    """Let a local Spark start from folders of modules, with workers that take none from the current folder."""
    if not options.master.startswith("local"):  # a cluster's workers have a Spark of their own, and some get the zip
        yield
        return
    is_set = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        with without_zipped_modules(work_dir):
            yield
    finally:
        if not is_set:  # the JVM has it; processes that this one starts later are its own affair
            del os.environ["PYTHONSAFEPATH"]


def _hush(context: SparkContext) -> None:
    """Keep the output of py4j and pyspark about a lost JVM off the terminal: the session's user gets an exception."""
    logging.getLogger().addFilter(_not_of_py4j)
    server = context._accumulatorServer  # noqa: SLF001 - its way of reporting can't be set otherwise
    server.handle_error = lambda _request, _address: None  # type: ignore[assignment,method-assign]


def _not_of_py4j(record: logging.LogRecord) -> bool:
    # py4j logs by the root logger, whose handlers are the whole program's.
    return Path(record.pathname).parent.name != "py4j"


def _is_secret(key: str, value: str) -> bool:
    """Whether a setting contains a secret.

    Settings other than Hadoop's may be needed to start (`spark.driver.extraJavaOptions`); for them
    only the key counts.
    """
    return is_secret_key(key) or (key.startswith("spark.hadoop.") and mask_option(key, value) != value)


def _with_retries(master: str) -> str:
    """Let a local master repeat a task whose Python worker was killed, as every other master does."""
    local = re.fullmatch(r"local(?:\[([^,\]]+)\])?", master)
    return f"local[{local[1] or 1},{_TASK_FAILURES_MAX}]" if local else master


def _defaults(options: SparkOptions, work_dir: Path) -> dict[str, str]:
    defaults = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.python.worker.reuse": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.log.structuredLogging.enabled": "false",
    }
    log4j = work_dir / "log4j2.properties"
    log4j.write_text(_LOG4J.format(log=work_dir / "spark.log"))
    if not options.master.startswith("local"):
        return defaults | {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log4j.as_uri()}"}
    return defaults | {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        # The JVM only coordinates here; Arrow and Python do the work. Its optimising compiler
        # costs 13 s of CPU a start, most of the time of a start and the first batches on two
        # cores, and gains nothing measurable.
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={log4j.as_uri()} -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
        ),
        "spark.local.dir": str(work_dir / "tmp"),
        "spark.sql.warehouse.dir": str(work_dir / "warehouse"),
        # Re-planning a small batch after each of its stages costs more than it could save.
        "spark.sql.adaptive.enabled": "false",
        # Tasks here are small and few; 200 partitions would cost a second a batch.
        "spark.sql.shuffle.partitions": str(min(4, max(2, os.cpu_count() or 2))),
        "spark.default.parallelism": str(min(4, max(2, os.cpu_count() or 2))),
    }
