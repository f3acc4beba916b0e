"""A command that has everything that it takes in memory, and begins when it is told to: of two of them at once, at one moment.

python -m tests.app.gated WORD…
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

READY: Final = b"ready\n"


class Gated:
    """Such a process, of a home. `release` it, then have its end by `wait`."""

    def __init__(self, home: Path, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.app.gated", "--home", str(home), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "HOME": "/nonexistent"},
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
        return self._process.returncode, (output + errors).decode()

    def kill(self) -> None:
        """Where it is still there."""
        self._process.kill()
        self._process.wait(180)


def main() -> None:
    """Wait for a line, then run."""
    from millstream.cli.main import main as run

    for module in ("promoting", "stores"):  # what a promotion imports on its way
        importlib.import_module(f"millstream.app.replicating.{module}")

    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.readline()
    run()


if __name__ == "__main__":
    main()
