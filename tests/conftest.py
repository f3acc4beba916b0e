"""Set up every test: its tier and seeds, hypothesis, Spark's workers, compiled decoders, and an end to tests that hang.

A test's tier follows from what it uses. `--tier quick` leaves out each test that is marked `siege` or `long`, and
each test that uses a fixture of `WHOLE_TIER`; it plays a test that is marked `sampled` with its first parameters
alone. `--tier all`, the default, leaves out none. The mark `soak` stands outside the tiers.

Without `--seed N`, simulations and sieges play the same seeds on every run, and the hypothesis profiles `quick`
and `ci` the same examples: `quick` has a quarter as many. So a red build shows a change of the code. `make test-all`
draws N, prints it, and chooses the profile `new`.

With `CI` set in the environment a failure is printed at once, not only at the end: a run that is cut off has
then reported it.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import structlog
from hypothesis import HealthCheck, settings
from tests.distribution import ByServer, compile_ahead, wait_for_machine_code
from tests.seeds import Seeds

from millstream.home.machine_code_folder import place_machine_code

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.scheduler import Scheduling

    from millstream.spark.session import SparkOptions

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,  # a loaded machine is no failure; pytest-timeout ends tests that hang
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=25)
settings.register_profile("new", parent=settings.get_profile("ci"), derandomize=False)
settings.register_profile("soak", parent=settings.get_profile("ci"), derandomize=False, max_examples=100_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "ci")

# By default Spark starts `python3` from the PATH, which isn't this interpreter and lacks Millstream.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


# All homes and all processes that tests are distributed to share machine code, and it is there in the next run.
place_machine_code([Path(__file__).parents[1] / ".cache"])


WHOLE_TIER: Final = frozenset({"browser", "oldest", "own_kafka", "own_redis"})
"""Fixtures whose tests belong to `make test-all` alone: they start servers of their own, and stop or replace them."""
TEARDOWN_S: Final = 600
"""Time that a test's leftovers may take to end; far more than any does."""
_TOLD_LINES: Final = 80
_stderr = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests and seeds."""
    group = parser.getgroup("millstream")
    group.addoption("--tier", choices=["quick", "all"], default="all", help="quick leaves out sieges (default: all)")
    group.addoption("--seed", type=int, default=0, help="added to the seeds of simulations and sieges")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr: while tests run, its descriptor is that of a file which pytest captures.

    Also choose fewer examples for the quick tier, unless the environment chooses.
    """
    if config.getoption("--tier") == "quick" and not os.environ.get("HYPOTHESIS_PROFILE"):
        settings.load_profile("quick")
    assert sys.__stderr__ is not None
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Distribute the quick tier by files and by the servers that they need.

    In the whole tier most files need one: what uses Spark would take one process hours.
    """
    if config.getoption("--tier") != "quick" or config.getoption("dist") != "loadfile":
        return None
    return ByServer(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None]:
    """Collect without looking for reference cycles, and never look through the modules and tests again.

    They stay until the process ends. Each search for cycles would go through all of them: that is most of a search.
    A process that distributes tests has others collect, and compiles what they need.
    """
    is_distributor = bool(getattr(session.config.option, "numprocesses", None))
    ahead = compile_ahead() if is_distributor else None
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if ahead is not None:
            session.config.add_cleanup(ahead)
        elif hasattr(session.config, "workerinput"):
            wait_for_machine_code()


def pytest_unconfigure() -> None:
    """Let the interpreter's end find all objects: libraries complain about those that it leaves."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of another tier, server version or user.

    They aren't skipped: a skip means that something is missing.
    """
    version = config.getoption("--millstream-postgres")
    is_quick = config.getoption("--tier") == "quick"
    sampled = set[str]()

    def is_quick_enough(item: pytest.Item) -> bool:
        if any(map(item.get_closest_marker, ("siege", "long"))) or WHOLE_TIER & set(getattr(item, "fixturenames", ())):
            return False
        if item.get_closest_marker("sampled") is None:
            return True
        function = item.nodeid.partition("[")[0]
        is_first = function not in sampled
        sampled.add(function)
        return is_first

    def has_place(item: pytest.Item) -> bool:
        if is_quick and not is_quick_enough(item):
            return False
        since = item.get_closest_marker("since_postgres")
        if since is not None and version < since.args[0]:
            return False
        return item.get_closest_marker("as_root") is None or os.geteuid() == 0

    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (kept if has_place(item) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """End the process, with the stacks of all its threads, if a teardown hangs.

    pytest-timeout takes a test's failure for the beginning of a debugger's session and stops its clock; and the
    leftovers of a failed test are what hangs. This timer needs no lock of the interpreter either.
    """
    if item.config.getoption("usepdb"):
        return (yield)
    faulthandler.dump_traceback_later(TEARDOWN_S, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure when it happens.

    Only the process that distributes tests to workers does so: it gets all reports.
    """
    if report.failed and hasattr(report, "node") and os.environ.get("CI"):
        lines = report.longreprtext.splitlines()
        print(f"\n--- {report.nodeid}, {report.when}:", *lines[-_TOLD_LINES:], sep="\n", flush=True)  # noqa: T201


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """Restore the logging configuration and the umask, which a command in this process sets for all later tests."""
    log, umask = structlog.get_config(), os.umask(0o077)
    os.umask(umask)
    yield
    structlog.configure(**log)
    os.umask(umask)


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> Seeds:
    """The seeds of this run's simulations and sieges."""
    return Seeds(request.config.getoption("--seed"), is_quick=request.config.getoption("--tier") == "quick")


@pytest.fixture(scope="session")
def spark_options(tmp_path_factory: pytest.TempPathFactory) -> SparkOptions:
    from millstream.spark.session import SparkOptions

    return SparkOptions(tmp_path_factory.mktemp("spark"))


@pytest.fixture(scope="session")
def spark(spark_options: SparkOptions) -> Iterator[SparkSession]:
    """One Spark session for all tests of a process: a start takes seconds of time, and ten of a core."""
    from pyspark.sql import SparkSession

    from millstream.spark.session import open_context

    open_context(spark_options)
    session = SparkSession.builder.getOrCreate()
    yield session
    session.stop()
