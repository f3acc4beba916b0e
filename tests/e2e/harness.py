"""A home driven through the command line, as a user would: the product is a black box here.

`Home` makes a home, runs `millstream run` with or without failpoints, kills what the test names, and waits with
deadlines. It reads nothing of the product's own except exit codes, JSON and the folders that its contract
names.

A Spark takes 25 s of a core from its start to the first rows in the lake. So a test without kills lands by
`land`, in the Spark session that tests of a process share. Only tests of `run`'s additions, its parts and their
ends, start it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.commands import Command, run_command

from millstream.app.pipelines import run_pipelines
from millstream.errors import EngineError
from millstream.home.home import Home as OpenedHome
from millstream.processes.child_process import Lifeline

MILLSTREAM = str(Path(sys.executable).parent / "millstream")
STARTS_MAX = 5
"""How often `run --until-caught-up` starts a pipeline that Spark fails."""


@dataclass
class Home:
    """A home with one stream, `shop`."""

    path: Path
    dsn: str
    tables: Sequence[str] = ("public.*",)
    extra_config: str = ""
    slot: str = ""
    """Slot of its own: tests share a server."""
    runs: int = field(default=0, init=False)

    def init(self) -> None:
        """Run `millstream init`, and append the test's settings to the file."""
        arguments = [a for table in self.tables for a in ("--tables", table)]
        self.command("init", str(self.path), "--stream", "shop", "--source", self.dsn, *arguments, home=False)
        config = self.path / "millstream.toml"
        text = config.read_text()
        if self.slot:
            text = text.replace("[streams.shop.source]\n", f'[streams.shop.source]\nslot = "{self.slot}"\n', 1)
        config.write_text(text + "\n" + self.extra_config)

    def set_lake(self, settings: str) -> None:
        """Replace the configuration of the stream's lake by these lines."""
        config = self.path / "millstream.toml"
        head, _, rest = config.read_text().partition("[streams.shop.lake]\n")
        _, bracket, tail = rest.partition("\n[")
        config.write_text(f"{head}[streams.shop.lake]\n{settings}{bracket}{tail}")

    def command(self, *arguments: str, home: bool = True, check: bool = True, timeout_s: float = 600) -> str:
        """Return a command's stdout; if its exit code isn't 0, fail the test with its stderr."""
        done = run_command(self._words(arguments, home=home), timeout=timeout_s)
        if check and done.returncode != 0:
            raise AssertionError(f"millstream {' '.join(arguments)}: exit {done.returncode}\n{done.stderr[-4000:]}")
        return done.stdout

    @contextmanager
    def commanding(self, *arguments: str, timeout_s: float = 900) -> Iterator[None]:
        """Run a command while the block runs; its exit code must be 0."""
        command = Command(self._words(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            yield
            said, _ = command.communicate(timeout=timeout_s)
        finally:
            command.kill()
            command.wait()
        assert command.returncode == 0, f"millstream {' '.join(arguments)}: exit {command.returncode}\n{said[-4000:]}"

    def caught_up(self, *, timeout_s: float = 900) -> None:
        """Run `run --until-caught-up`; its exit code must be 0."""
        self.runs += 1
        log = self.path.parent / f"{self.path.name}-run-{self.runs}.log"
        with log.open("wb") as stderr:
            done = subprocess.run(
                [MILLSTREAM, *self._words(["run", "--until-caught-up"])],
                stderr=stderr,
                stdout=stderr,
                timeout=timeout_s,
                check=False,
            )
        if done.returncode != 0:
            raise AssertionError(f"run --until-caught-up: exit {done.returncode}\n{log.read_text()[-6000:]}")

    def caught_up_here(self) -> dict[str, str]:
        """Do the work of `caught_up`, the lake in this process's Spark; return quarantined tables, with reasons."""
        self.command("capture", "run", "--until-caught-up")
        return land(self.path)

    @contextmanager
    def running(self, *, failpoints: str = "", witnesses: Path | None = None) -> Iterator[Run]:
        """Run `run` in the background; at the end kill it with all its children, unless it has ended."""
        self.runs += 1
        environment = dict(os.environ)
        if failpoints:
            environment["MILLSTREAM_FAILPOINTS"] = failpoints
        if witnesses is not None:
            environment["MILLSTREAM_FAILPOINTS_DIR"] = str(witnesses)
        log = self.path.parent / f"{self.path.name}-run-{self.runs}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [MILLSTREAM, *self._words(["run"])], stderr=stderr, stdout=stderr, env=environment
            )
            run = Run(process, log)
            try:
                yield run
            finally:
                run.kill_all()

    @contextmanager
    def running_here(self) -> Iterator[None]:
        """Do the work of `running` without a supervisor: capture as a process, the lake in this process's Spark.

        Both must end without an error.
        """
        asked = threading.Event()
        lifelines: list[Lifeline] = []

        def landing() -> None:
            while not asked.is_set():
                lifelines.append(Lifeline())
                if asked.is_set():
                    return
                try:
                    run_pipelines(OpenedHome.find(str(self.path)), lifelines[-1], on_progress=lambda _facts: None)
                except EngineError as error:  # as in `land`
                    print(f"the pipeline is started again: {error}")  # noqa: T201 - if a test fails, pytest shows it

        self.runs += 1
        log = self.path.parent / f"{self.path.name}-run-{self.runs}.log"
        with log.open("wb") as output, ThreadPoolExecutor(1) as beside:
            capture = Command(self._words(["capture", "run"]), stdout=output, stderr=output)
            landed = beside.submit(landing)
            try:
                yield
            finally:
                asked.set()
                for lifeline in lifelines:
                    lifeline.stop.set()
                capture.terminate()
                try:
                    assert capture.wait(240) == 0, log.read_text()[-4000:]
                finally:
                    capture.kill()
                    landed.result(240)

    def status(self) -> dict[str, Any]:
        """Return `status --json`."""
        return dict(json.loads(self.command("status", "--json")))

    def records(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the records of `wal cat`, one a line."""
        text = self.command("wal", "cat", "--format", "ndjson", *arguments)
        return [json.loads(line) for line in text.splitlines()]

    def lake(self, view: str, table: str) -> Path:
        """Return the folder of a table."""
        return self.path / "lake" / "shop" / view / table

    def _words(self, arguments: Sequence[str], *, home: bool = True) -> list[str]:
        return [*(["--home", str(self.path)] if home else []), *arguments]


@dataclass
class Run:
    """A `millstream run` and its children."""

    process: subprocess.Popen[bytes]
    log: Path

    def children(self) -> list[int]:
        """Return the ids of all processes below, children of children included."""
        parents: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found: list[int] = []
        todo = [self.process.pid]
        while todo:
            below = parents.get(todo.pop(), [])
            found += below
            todo += below
        return found

    def child(self, words: str) -> int | None:
        """Return the direct child whose command line holds `words`, such as `capture run`."""
        for pid in self.children():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if words in line and "millstream" in line:
                return pid
        return None

    def kill_all(self) -> None:
        """SIGKILL the supervisor; its children must end soon, on their own."""
        below = self.children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(120)
        wait_for(lambda: not any(alive(pid) for pid in below), "every child of a killed run ends", timeout_s=400)

    def stop(self, *, timeout_s: float = 240) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def output(self) -> str:
        """Return its output so far."""
        return self.log.read_text(errors="replace")


def land(home: Path, stream: str = "shop") -> dict[str, str]:
    """Do the work of `pipeline run --until-caught-up` in this process; return the quarantined tables, with their reasons.

    The test asks for the fixture `spark`: a session opened here would keep its files in the home, and outlive
    it.
    """
    for _ in range(STARTS_MAX - 1):
        # On a busy machine Spark may fail: it gives its Python ten seconds to start, and no setting gives it
        # more.
        with contextlib.suppress(EngineError):
            return _landed(home, stream)
    return _landed(home, stream)


def _landed(home: Path, stream: str) -> dict[str, str]:
    lifeline = Lifeline()
    lifeline.drain.set()
    outcome = run_pipelines(OpenedHome.find(str(home)), lifeline, on_progress=lambda _facts: None)[stream]
    assert outcome["caught_up"], outcome
    return dict(outcome["quarantined"])


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Any, what: str, *, timeout_s: float = 240) -> None:
    """Return once `condition()` is true; fail the test at the deadline."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout_s} s for: {what}")
        time.sleep(0.05)  # between two checks; the condition decides
