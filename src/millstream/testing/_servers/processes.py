"""Test servers as processes, each with its own folder and port: ended by id, also when the test's process dies."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from millstream.errors import MillstreamError, Retry

_STOP_WITHIN_S: Final = 20.0
_LOOK_S: Final = 0.02
_DIES_WITH_US: Final = (
    "import ctypes, os, sys\n"
    "if sys.platform.startswith('linux'):\n"
    "    ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL: it outlives exec
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


class ServerStartError(MillstreamError):
    """A server of the test kit didn't start; details: log (the end of its output)."""

    code = "server_start"
    retry = Retry.OPERATOR


class ServerProcess:
    """One server's process. Start it from a thread that lives on: on Linux the kernel ends it with that thread."""

    def __init__(self, command: Sequence[str], *, log: Path, environ: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _DIES_WITH_US, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(os.environ if environ is None else environ),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Return its id."""
        return self._process.pid

    def wait_until(self, answers: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Return once it answers; `ServerStartError` if it ends or takes longer, with the end of its log."""
        deadline = time.monotonic() + within_s
        while not answers():
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                self.kill()
                how = f"ended with {ended}" if ended is not None else f"didn't answer within {within_s} s"
                said = self._log.read_text(errors="replace")[-3000:]
                raise ServerStartError(f"{what} {how}: {said}", log=said)
            time.sleep(_LOOK_S)

    def kill(self) -> None:
        """Send SIGKILL: work in progress isn't finished."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if that takes too long."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()


class EmbeddedServer(ABC):
    """A server with a folder of its own, that can be killed, and restarted on its data.

    As a context manager it starts the server, and kills it at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: ServerProcess | None = None

    @abstractmethod
    def start(self) -> None:
        """Start it and return once it answers."""

    @property
    def pid(self) -> int:
        """Return its process's id; it must run."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def stop(self) -> None:
        """Stop it as its operator would."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
