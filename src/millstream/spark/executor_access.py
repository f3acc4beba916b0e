"""The executors' access to a stream's log and lake, as its driver arranges it.

On one machine executors read the log's folder. On a cluster the driver asks its first executors which way they
reach. For Flight it keeps a token that may read that stream and nothing else, and replaces it before it expires.
"""

from __future__ import annotations

import re
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from py4j.protocol import Py4JError
from pyspark import SparkContext

from millstream.catalog import Catalog
from millstream.errors import AccessError, CatalogError, EngineError, MillstreamError
from millstream.lake.data_files import local_folder
from millstream.lake.layout import LakeLayout
from millstream.model.access import Right, Rights
from millstream.private_files import make_folder
from millstream.spark.jobs import run_job
from millstream.spark.probes import LakeProbe, LogProbe, read_log, write_lake
from millstream.spark.session import without_stack
from millstream.wal.flight_log import FlightLog
from millstream.wal.reader import StreamReader
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.spark.pipeline import PipelineConfig

Way = Literal["path", "flight"]

TOKEN_S: Final = 15 * 60.0
"""How long a token is valid. It is replaced at half of that, so a task has half of it to fetch its part."""
_LOST_AFTER_S: Final = 60.0
"""How long a job waits without any executor. A worker's JVM starts in some seconds, on a cluster that makes room in more."""
_LOOK_EVERY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class FlightAddress:
    """The address of the home's Flight server, for executors."""

    host: str
    """Empty: it listens on all addresses, so the driver's own name is used."""
    port: int
    is_tls: bool = False
    authority: bytes | None = None
    """The server's certificate: executors trust it and no other."""
    tokens_required: bool = False


class ExecutorLog:
    """A stream's log for executors.

    Concurrency: any thread.
    """

    def __init__(self, config: PipelineConfig, context: SparkContext, catalog: Catalog) -> None:
        self._context, self._catalog = context, catalog
        self._stream, self._stream_id, self._folder = config.stream, config.stream_id, config.wal_folder.absolute()
        self._wanted, self._address = config.log_access, config.flight
        self._tokens: list[tuple[str, float]] = []
        """Names of the tokens that were made, and when they expire, on the monotonic clock."""
        self._flight: FlightLog | None = None
        self.way: Way = "path"

    def choose(self) -> None:
        """Find the first way that all executors reach; blocks until there are executors.

        Raises:
            EngineError (`log_unreachable`): there is none; the message has each one's reason.
        """
        if is_local(self._context):
            return
        ways: tuple[Way, ...] = ("path", "flight") if self._wanted == "auto" else (self._wanted,)  # type: ignore[assignment] # the configuration's
        reasons = []
        for way in ways:
            error = self.refusal(way)
            if error is None:
                self.way = way
                return
            reasons.append(f"by {way}: {error.message}")
        raise EngineError(
            f"executors can't read the log of {self._stream} {'; '.join(reasons)}", code="log_unreachable"
        )

    def refusal(self, way: Way) -> MillstreamError | None:
        """Return the reason why some executor can't read the log in this way; None if all can."""
        if way == "flight" and self._address is None:
            return EngineError("[flight] listen isn't set", code="log_unreachable")
        reader = StreamReader(str(self._folder))
        shard, mark = next(iter(reader.extent.marks()[0].items()))
        self.way = way
        probe = LogProbe(str(self._folder), self._stream_id, shard, mark.base_offset, self.flight())
        return _first(run_job(self._context, read_log, [probe] * everywhere(self._context)))

    def flight(self) -> FlightLog | None:
        """Return the log by Flight, with a token that is valid for another half of its time; None for the folder."""
        if self.way == "path":
            return None
        assert self._address is not None, "the way was chosen"
        now = time.monotonic()
        if self._flight is None or (self._address.tokens_required and self._tokens[-1][1] - now < TOKEN_S / 2):
            address = self._address
            host = address.host or str(self._context.getConf().get("spark.driver.host"))
            place = f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}"
            token = self._new_token(now) if address.tokens_required else None
            self._flight = FlightLog(place, self._stream, address.is_tls, address.authority, token)
        return self._flight

    def close(self) -> None:
        """Revoke the tokens that were made."""
        for name, _ in self._tokens:
            with suppress(AccessError, CatalogError):
                self._catalog.revoke_access_token(name)
        self._tokens.clear()

    def _new_token(self, now: float) -> str:
        prefix = f"executors-{self._stream[:40]}-"
        for old in self._catalog.access_tokens():
            # Those of killed drivers too.
            if old.name.startswith(prefix) and old.has_expired(time.time_ns() // 1000):
                with suppress(AccessError):
                    self._catalog.revoke_access_token(old.name)
        name = prefix + secrets.token_hex(4)
        rights = Rights({self._stream: frozenset({Right.READ})})
        expires_us = time.time_ns() // 1000 + round(TOKEN_S * 1e6)
        _, token = self._catalog.create_access_token(rights, name=name, expires_us=expires_us)
        self._tokens.append((name, now + TOKEN_S))
        return token


class ExecutorWatch:
    """Notices that no executor is left.

    A standalone master that restarts without `recoveryMode` ends the executors, and starts none for the drivers that
    it doesn't know. Such a driver's job would wait for ever. So the job is cancelled, and the driver ends.
    """

    def __init__(self, context: SparkContext, *, after_s: float = _LOST_AFTER_S) -> None:
        self._context, self._after_s = context, after_s
        self._since_s: float | None = None
        self.error: EngineError | None = None
        """Set before the jobs are cancelled."""
        self._stopped = threading.Event()
        self._worker = Worker("millstream-executors", self._look, every_s=_LOOK_EVERY_S, stop=self._stopped)

    def __enter__(self) -> Self:
        if not is_local(self._context):
            self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def failure(self, error: BaseException, hint: str) -> MillstreamError:
        """Return the error of a job that failed: the loss of all executors or of the master, or as `translated`."""
        if self.error is None and not is_local(self._context) and _GIVEN_UP.search(str(error)):
            return EngineError(
                f"no master answers at {self._context.master}, so Spark has stopped",
                code="executors_missing",
                hint="Start the master, or correct `master` in [spark].",
            )
        return self.error or translated(error, hint)

    def _look(self) -> bool:
        if self._stopped.is_set():
            return False
        try:
            # Executors that dynamic allocation has released are none that are missed.
            waits = bool(self._context.statusTracker().getActiveJobsIds())
            found = self._context._jsc.sc().getExecutorIds().size()  # noqa: SLF001 - there is no public way to ask
        except (Py4JError, OSError):
            return False  # the JVM is gone, which the driver notices
        now = time.monotonic()
        self._since_s = None if found or not waits else self._since_s or now
        if self._since_s is None or now - self._since_s < self._after_s:
            return True
        self.error = EngineError(
            f"no executor has been registered at {self._context.master} for {self._after_s:g} s",
            code="executors_missing",
        )
        self._context.cancelAllJobs()
        return False


def check_lake(context: SparkContext, layout: LakeLayout) -> MillstreamError | None:
    """Return the reason why some executor can't write the lake; None if all can, or it is the driver's own machine.

    Raises:
        LakeUnavailable: the driver doesn't reach the catalog that says where the lake lies.
    """
    if is_local(context):
        return None
    folder = local_folder(layout)
    if folder is None:
        return _first(run_job(context, write_lake, [LakeProbe(layout)] * everywhere(context)))
    make_folder(folder)
    with tempfile.NamedTemporaryFile(prefix=".millstream-probe-", dir=folder) as witness:
        probe = LakeProbe(layout, Path(witness.name))
        return _first(run_job(context, write_lake, [probe] * everywhere(context)))


def is_local(context: SparkContext) -> bool:
    """Return whether executors are this machine's, and this user's."""
    return str(context.master).startswith("local")


def everywhere(context: SparkContext) -> int:
    """Return a number of tasks, of which each executor probably gets some."""
    return 2 * context.defaultParallelism


def _first(errors: Sequence[MillstreamError | None]) -> MillstreamError | None:
    return next((error for error in errors if error is not None), None)


_GIVEN_UP: Final = re.compile("stopped SparkContext|SparkContext was shut down|masters are unresponsive")


_NO_PACKAGE: Final = re.compile(r"No module named '(\w+)'")


def translated(error: BaseException, hint: str) -> MillstreamError:
    """Return an error of our tree for an error from Spark, py4j or our own code in a thread.

    Args:
        hint: where a person reads more, if the failure is none that is known here.
    """
    if isinstance(error, MillstreamError):
        return error
    said = str(error)
    if "PYTHON_VERSION_MISMATCH" in said:
        return EngineError(
            f"executors have another Python than the driver: {without_stack(error)}", code="executor_version"
        )
    if (missing := _NO_PACKAGE.search(said)) is not None:
        return EngineError(f"an executor's Python lacks the package {missing[1]}", code="executor_version")
    return EngineError(f"Spark failed: {without_stack(error)}", hint=hint)
