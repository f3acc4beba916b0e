"""A driver's choice of the way to its log, the token that it makes for executors, and its end without executors."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from pyspark import SparkContext
from tests.spark.lake_run import config_of

import millstream
from millstream.catalog import Catalog
from millstream.errors import EngineError, MillstreamError
from millstream.home.home import Home
from millstream.lake.layout import LakeLayout
from millstream.model.access import Right
from millstream.model.ids import StreamId
from millstream.spark import executor_access
from millstream.spark.executor_access import TOKEN_S, ExecutorLog, ExecutorWatch, FlightAddress, check_lake
from millstream.spark.probes import LakeProbe, LogProbe
from millstream.spark.session import SparkOptions
from millstream.testing._servers.ports import free_port
from millstream.testing.errors import coded
from millstream.wal.reader import StreamReader

CONFIG = "[streams.shop]\n"
PROTECTED = FlightAddress("127.0.0.1", 1, tokens_required=True)


class Cluster:
    """A context of which executors read the log in some ways."""

    master = "spark://10.0.0.1:7077"
    defaultParallelism = 2  # noqa: N815 - Spark's name

    def __init__(self, *reads: str) -> None:
        self.reads = reads
        self.probes: list[LogProbe] = []

    def run_job(self, _context: object, _function: object, tasks: list[LogProbe]) -> list[MillstreamError | None]:
        self.probes += tasks
        way = "path" if tasks[0].flight is None else "flight"
        refused = EngineError(f"no {way} here", code="log_unreachable")
        return [None] * (len(tasks) - 1) + [None if way in self.reads else refused]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "millstream.toml").write_text(CONFIG)
    with millstream.open(tmp_path) as opened:
        opened.append("shop", "public.orders", [{"id": 1}])
    return Home(tmp_path)


@pytest.fixture
def catalog(home: Home) -> Iterator[Catalog]:
    with home.open_catalog() as catalog:
        yield catalog


def log_of(home: Home, catalog: Catalog, context: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> ExecutorLog:
    if isinstance(context, Cluster):
        monkeypatch.setattr(executor_access, "run_job", context.run_job)
    stream = StreamReader(str(home.wal_folder("shop"))).stream_id
    return ExecutorLog(config_of(home.path, stream, SparkOptions(home.path), **settings), context, catalog)


def test_on_one_machine_the_folder_is_read_and_nothing_is_asked(
    home: Home, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(
        home, catalog, SimpleNamespace(master="local[2,4]"), monkeypatch, log_access="flight", flight=PROTECTED
    )
    log.choose()
    assert (log.way, log.flight(), catalog.access_tokens()) == ("path", None, [])


@pytest.mark.parametrize(
    ("reads", "wanted", "way"),
    [
        (("path", "flight"), "auto", "path"),
        (("flight",), "auto", "flight"),
        (("path", "flight"), "flight", "flight"),
        (("path",), "path", "path"),
    ],
)
def test_the_first_way_that_all_executors_reach_is_taken(
    home: Home, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, reads: tuple[str, ...], wanted: str, way: str
) -> None:
    log = log_of(home, catalog, Cluster(*reads), monkeypatch, log_access=wanted, flight=PROTECTED)
    log.choose()
    assert log.way == way
    assert (log.flight() is None) == (way == "path")


@pytest.mark.parametrize(
    ("reads", "wanted", "flight", "told"),
    [
        ((), "auto", PROTECTED, "by path: no path here; by flight: no flight here"),
        ((), "auto", None, r"by path: no path here; by flight: \[flight\] listen isn't set"),
        (("path",), "flight", PROTECTED, "by flight: no flight here"),
    ],
)
def test_without_a_way_each_one_s_reason_is_told(
    home: Home,
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    reads: tuple[str, ...],
    wanted: str,
    flight: FlightAddress | None,
    told: str,
) -> None:
    log = log_of(home, catalog, Cluster(*reads), monkeypatch, log_access=wanted, flight=flight)
    with pytest.raises(EngineError, match=told, check=coded("log_unreachable")):
        log.choose()


def test_the_token_reads_that_stream_alone_is_replaced_at_half_of_its_time_and_ends_with_the_driver(
    home: Home, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(executor_access.time, "monotonic", lambda: now)
    log = log_of(home, catalog, Cluster("flight"), monkeypatch, log_access="flight", flight=PROTECTED)
    log.choose()
    first = log.flight()
    (made,) = catalog.access_tokens()
    assert made.rights.of == {"shop": frozenset({Right.READ})}
    assert made.expires_us is not None
    assert 0 < made.expires_us - made.created_us <= TOKEN_S * 1e6 + 1e6
    now += TOKEN_S / 2
    assert log.flight() == first
    now += 1
    second = log.flight()
    assert second is not None
    assert first is not None
    assert second.token not in {None, first.token}
    assert len(catalog.access_tokens()) == 2, "tasks that have the first one still read"
    log.close()
    assert catalog.access_tokens() == []


def test_tokens_of_killed_drivers_are_removed_once_they_have_expired(
    home: Home, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Cluster("flight")
    for _ in range(2):
        log_of(home, catalog, context, monkeypatch, log_access="flight", flight=PROTECTED).choose()
    assert len(catalog.access_tokens()) == 2
    real = executor_access.time.time_ns
    monkeypatch.setattr(executor_access.time, "time_ns", lambda: real() + round(TOKEN_S * 1e9) + 1)
    log_of(home, catalog, context, monkeypatch, log_access="flight", flight=PROTECTED).choose()
    assert len(catalog.access_tokens()) == 1


def test_a_server_without_tokens_gets_none(home: Home, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(home, catalog, Cluster("flight"), monkeypatch, flight=FlightAddress("::1", 7))
    log.choose()
    found = log.flight()
    assert found is not None
    assert (found.place, found.token, catalog.access_tokens()) == ("[::1]:7", None, [])


class Waiting:
    """A context with so many executors, and jobs that wait."""

    master = "spark://10.0.0.1:7077"

    def __init__(self, executors: int, jobs: list[int]) -> None:
        self.cancelled = 0
        ids = SimpleNamespace(size=lambda: executors)
        self._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(getExecutorIds=lambda: ids))
        self._jobs = jobs

    def statusTracker(self) -> Any:  # noqa: N802 - Spark's name
        return SimpleNamespace(getActiveJobsIds=lambda: self._jobs)

    def cancelAllJobs(self) -> None:  # noqa: N802 - Spark's name
        self.cancelled += 1


@pytest.mark.parametrize(("executors", "jobs", "ends"), [(0, [1], True), (1, [1], False), (0, [], False)])
def test_a_job_that_waits_without_executors_is_cancelled(executors: int, jobs: list[int], ends: bool) -> None:
    context: Any = Waiting(executors, jobs)
    watch = ExecutorWatch(context, after_s=0.0)
    goes_on = watch._look()
    assert goes_on is not ends
    assert context.cancelled == ends
    assert (watch.error is not None) == ends
    if watch.error is not None:
        assert watch.error.code == "executors_missing"


def test_executors_have_a_minute() -> None:
    context: Any = Waiting(0, [1])
    watch = ExecutorWatch(context)
    assert watch._look()
    assert watch.error is None


def test_a_lake_on_this_machine_is_not_asked_for() -> None:
    context: Any = SimpleNamespace(master="local[1]")
    nothing: Any = None
    assert check_lake(context, nothing) is None


def test_executors_of_a_cluster_must_see_the_drivers_folder_and_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(_context: object, function: Any, tasks: list[LakeProbe]) -> list[MillstreamError | None]:
        return [function(replace(task, witness=task.witness and elsewhere / task.witness.name)) for task in tasks]

    monkeypatch.setattr(executor_access, "run_job", run_job)
    context = cast("SparkContext", Cluster())
    elsewhere = tmp_path / "lake"
    lake = LakeLayout(str(elsewhere), "shop", StreamId(UUID(int=42)))
    assert check_lake(context, lake) is None
    assert list(elsewhere.iterdir()) == []
    gone = replace(lake, format="iceberg", catalog={"type": "rest", "uri": f"http://127.0.0.1:{free_port()}"})
    elsewhere = tmp_path / "home" / "of another machine"
    for layout, code in ((lake, "lake_unreachable"), (gone, "catalog_unreachable")):
        error = check_lake(context, layout)
        assert error is not None
        assert error.code == code
        assert error.message.startswith(socket.gethostname()), "which executor?"


@pytest.mark.parametrize(
    ("said", "code", "names"),
    [
        ("o43.x.\n: java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext", "executors_missing", "no master answers at spark://10.0.0.1:7077"),
        ("it broke\n\tat org.apache.spark.A.b(A.scala:1)\n\tat c", "engine", "Spark failed: it broke"),
    ],
    ids=["master", "other"],
)  # fmt: skip
def test_a_master_that_does_not_answer_is_named_without_javas_stack(said: str, code: str, names: str) -> None:
    error = ExecutorWatch(cast("SparkContext", Cluster())).failure(RuntimeError(said), "Read the log.")
    assert names in error.message
    assert "org.apache" not in error.message
    assert "\tat" not in error.message
    assert error.code == code
