"""A command that has imported everything and waits for a signal, so that two commands can run at the same moment.

`main` takes the command's words.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.commands import Command

from millstream.cli.main import main as run

READY: Final = b"ready\n"


class Gated:
    """A process of a home that waits for `release`; `wait` returns its end."""

    def __init__(self, home: Path, *words: str) -> None:
        self._process = Command(
            ["--home", str(home), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "HOME": "/nonexistent"},
            begins="tests.app.gated:main",
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._begins = self._process.stdin
        assert self._process.stdout.readline() == READY

    def release(self) -> None:
        """Let it run."""
        self._begins.write(b"\n")
        self._begins.flush()

    def wait(self) -> tuple[int, str]:
        """Return its exit code and its output."""
        output, errors = self._process.communicate(timeout=120)
        return self._process.wait(), (output + errors).decode()

    def kill(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.wait(180)


def main(words: list[str]) -> None:
    """Wait for a line, then run the command."""
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.readline()
    run(words)
