"""A Spark standalone cluster on this machine: a master, and workers that can't read the home.

As root the workers run as another user. Otherwise they run in a mount namespace that lacks the home's folder. Their
Python isn't this one, and has no package of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil
import pyspark
from tests.e2e.harness import wait_for
from tests.reachable import reachable_folder

from millstream.spark.java import find_java
from millstream.testing._servers.ports import free_port

SPARK_HOME = Path(str(pyspark.__file__)).parent
NOBODY = 65534


class StandaloneCluster:
    """A context manager that starts a master and workers, and stops what is left of them.

    Args:
        hidden: a folder that workers must not read.
        cores: of each worker.
        workers: how many.
    """

    def __init__(self, hidden: Path, *, cores: int = 2, workers: int = 1) -> None:
        self._hidden, self._cores, self._count = hidden, cores, workers
        # A folder of its own: pytest's are this user's alone.
        self._folder = tempfile.TemporaryDirectory(
            prefix="millstream-cluster-", dir=reachable_folder(), ignore_cleanup_errors=True
        )
        self.path = Path(self._folder.name)
        self.port, self._page = free_port(), free_port()
        self.master: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.path.chmod(0o755)
        self.start_master()
        for _ in range(self._count):
            self.start_worker()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_workers()
        self.kill_master()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        """Return the master's address."""
        return f"spark://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        """Start the master, and wait until it listens."""
        words = ["master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self._page)]
        self.master = self._start("master", words)
        wait_for(lambda: "I have been elected leader" in self.said("master"), "the master leads")

    def start_worker(self) -> None:
        """Start a worker, and wait until it is registered."""
        before = self.said("worker").count("Successfully registered")
        work = self.path / "work"
        work.mkdir(exist_ok=True)
        work.chmod(0o777)
        words = ["worker.Worker", "--host", "127.0.0.1", "--webui-port", str(free_port())]
        words += ["--cores", str(self._cores), "--memory", "2g", "--work-dir", str(work), self.url]
        self.workers.append(self._start("worker", words, hidden=True))
        wait_for(lambda: self.said("worker").count("Successfully registered") > before, "the worker is registered")

    def kill_master(self) -> None:
        """SIGKILL the master."""
        _kill(self.master)

    def kill_workers(self) -> None:
        """SIGKILL the workers' JVMs; end their executors, which outlive them for a moment."""
        below = self.processes("")
        while self.workers:
            _kill(self.workers.pop())
        for process in below:
            _end(process)

    def processes(self, words: str) -> list[psutil.Process]:
        """Return the processes below the workers whose command line holds `words`."""
        living = (psutil.Process(worker.pid) for worker in self.workers if psutil.pid_exists(worker.pid))
        found = []
        for process in [below for worker in living for below in worker.children(recursive=True)]:
            try:
                if words in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def said(self, part: str) -> str:
        """Return a part's log."""
        log = self.path / f"{part}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def executors_said(self) -> str:
        """Return the output of all executors."""
        return "\n".join(file.read_text(errors="replace") for file in (self.path / "work").rglob("std*"))

    def _start(self, name: str, words: list[str], *, hidden: bool = False) -> subprocess.Popen[bytes]:
        kept = {key: os.environ[key] for key in ("PATH", "LANG", "TZ") if key in os.environ}
        java = find_java(self.path / "java")
        environment = kept | {
            "JAVA_HOME": str(java.path),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_SCALA_VERSION": "2.13",
            "SPARK_LOCAL_DIRS": str(self.path / "work"),
            "HOME": str(self.path),
            "PATH": f"/usr/bin:/bin:{kept.get('PATH', '')}",
        }
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{words[0]}", *words[1:]]
        user: dict[str, object] = {}
        if hidden and os.geteuid() == 0:
            user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        elif hidden:
            hide = 'mount -t tmpfs none "$0" && exec "$@"'
            command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", hide, str(self._hidden), *command]
        with (self.path / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.path, **user)  # type: ignore[call-overload,no-any-return] # the user's arguments


def worker_python() -> str | None:
    """Return a Python for workers, of this minor version, outside of this environment; None if there is none."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    system = Path("/usr/bin") / name
    if os.geteuid() == 0:
        return str(system) if system.exists() else None
    return str(Path(sys.base_prefix) / "bin" / name)


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait(60)


def _end(process: psutil.Process) -> None:
    end = time.monotonic() + 60
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        try:
            process.kill()
            process.wait(1)
        except psutil.TimeoutExpired:
            continue
        except psutil.NoSuchProcess:
            return
