"""A place for temporary files that other users can reach."""

from __future__ import annotations

import tempfile
from pathlib import Path


def reachable_folder() -> str:
    """Return the folder for temporary files; `/tmp` if that one lies in a folder of this user's alone."""
    own = Path(tempfile.gettempdir())
    return str(own) if all(folder.stat().st_mode & 0o001 for folder in (own, *own.parents)) else "/tmp"
