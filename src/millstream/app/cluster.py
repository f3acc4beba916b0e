"""`doctor` on a cluster: the checks of its executors, by the running pipeline or in a Spark of their own."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from millstream.errors import MillstreamError
from millstream.home.config_mapping import pipeline_config, spark_options
from millstream.home.home import Home
from millstream.processes.control_socket import have_done
from millstream.processes.role_locks import holder

if TYPE_CHECKING:
    from pyspark import SparkContext

    from millstream.catalog import Catalog
    from millstream.spark.pipeline import PipelineConfig

ACT: Final = "executors"
"""The pipelines' process checks its executors by it."""
UNTESTED: Final = "no test runs on such a master; Spark's standalone master is tested"
_ANSWERS_WITHIN_S: Final = 300.0
_ENCRYPTED: Final = ("spark.authenticate", "spark.network.crypto.enabled")


def cluster_facts(home: Home, serving: Callable[[], AbstractContextManager[object]]) -> list[dict[str, Any]]:
    """Return the outcome of each check of the home's cluster: `name`, `detail`, and `error` or None.

    The running pipeline does it, because its application may have all of the cluster's cores. If none runs, Spark
    is started here.

    Args:
        serving: runs the home's Flight server, for executors that read the log from it.

    Raises:
        MillstreamError: Spark doesn't start here.
    """
    if holder(home.run_folder, "pipeline"):
        answer = have_done(home, "pipeline", ACT, {}, deadline_s=_ANSWERS_WITHIN_S)
        if answer is not None:
            return list(answer["checks"])
    from millstream.spark.session import open_context

    needs_server = home.config.flight.listen is not None and not holder(home.run_folder, "serve")
    with (
        TemporaryDirectory(prefix="millstream-doctor-") as work,
        home.open_catalog() as catalog,
        serving() if needs_server else nullcontext(),
    ):
        context = open_context(replace(spark_options(home), work_dir=Path(work), app_name="millstream doctor"))
        try:
            return checks_in(context, home, catalog)
        finally:
            context.stop()


def checks_in(context: SparkContext, home: Home, catalog: Catalog) -> list[dict[str, Any]]:
    """Return the checks' outcomes, asked in a running Spark."""
    from millstream.spark.cluster_checks import as_facts, check_cluster

    return [as_facts(check) for check in check_cluster(context, catalog, _configs(home))]


def _configs(home: Home) -> Iterator[PipelineConfig]:
    """Yield the pipelines of streams that have a log."""
    from millstream.wal.reader import StreamReader

    for name, stream in home.config.streams.items():
        try:
            found = StreamReader(str(home.wal_folder(name))).stream_id
        except MillstreamError:
            continue  # nothing has been written yet
        yield pipeline_config(home, name, stream, found)


def lacks_encryption(master: str, conf: Mapping[str, str]) -> list[str]:
    """Return the settings that are missing for encrypted traffic between a driver and its executors on other machines."""
    host = urlsplit(master).hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return [] if is_here else [key for key in _ENCRYPTED if conf.get(key, "").lower() != "true"]
