"""Folders of this machine as options of the source and the sink name them: a path, or Spark's URI of one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from millstream.errors import UsageError

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FILE: Final = re.compile(r"file:(?://(?:localhost)?)?(?=/)")


def folder_of(where: str, *, hint: str = "Use a folder on this machine's disks.") -> Path:
    """Return the folder that a path, `file:/path` or `file:///path` names; `UsageError` with a hint for another URI."""
    path = _FILE.sub("", where, count=1) if _FILE.match(where) else where
    if _SCHEME.match(path):
        raise UsageError(f"{where} can't be read", hint=hint)
    return Path(path)
