"""A command that has everything that it takes in memory, and begins when it is told to: of two of them at once, at one moment.

`main` takes its words.
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
    """Such a process, of a home. `release` it, then have its end by `wait`."""

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
        """Have it begin."""
        self._begins.write(b"\n")
        self._begins.flush()

    def wait(self) -> tuple[int, str]:
        """Its exit code, and what it has said."""
        output, errors = self._process.communicate(timeout=120)
        return self._process.wait(), (output + errors).decode()

    def kill(self) -> None:
        """Where it is still there."""
        self._process.kill()
        self._process.wait(180)


def main(words: list[str]) -> None:
    """Wait for a line, then run."""
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.readline()
    run(words)
