"""Folders of the figures' own, on the disk that the checkout lies on: a temporary folder may be memory, where an fsync is free."""

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
    """A new empty folder, removed at the end."""
    _PARENT.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_PARENT))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def as_installed() -> dict[str, str]:
    """The environment for commands: compiled code is kept, as after `pip install` and a first run.

    Where this process may not write byte code (containers set PYTHONDONTWRITEBYTECODE), each of a command's dozen processes would
    compile a thousand modules anew: seconds that no user has.
    """
    environment = dict(os.environ)
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(_PARENT / "pyc"))
    environment.setdefault("NUMBA_CACHE_DIR", str(_PARENT / "numba"))
    return environment
