"""Folders for the figures, on the checkout's disk: a temporary folder may be memory, where an fsync is free."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PARENT = Path(__file__).parent.parent / "build" / "bench"


@contextmanager
def folder(name: str) -> Iterator[Path]:
    """Yield a new empty folder, removed at the end."""
    _PARENT.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_PARENT))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def as_installed() -> dict[str, str]:
    """Return the environment for commands: compiled code is kept, as after `pip install` and a first run.

    If this process may not write byte code (containers set PYTHONDONTWRITEBYTECODE), each of a command's dozen
    processes would compile a thousand modules again: seconds that users don't have.
    """
    environment = dict(os.environ)
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(_PARENT / "pyc"))
    return environment
