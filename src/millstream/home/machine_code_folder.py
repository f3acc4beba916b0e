"""The folder in which numba keeps machine code: the user's, so that all homes share what was compiled once.

Compiling all of it takes three quarters of a minute of a core.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from millstream.home.paths import HomePaths
from millstream.private_files import make_folder

COMPILED_ROOMS: Final = ("capture", "codec", "routing")
"""Packages with functions that are compiled."""
_OTHERS_WRITE: Final = 0o022


def place_compiled_code(home: HomePaths) -> None:
    """Set numba's folder for machine code, before its import.

    It is in the user's cache, else in the home. Numba's own choice, the package's folder or HOME's, fails at import if both are read-only.
    """
    place_machine_code([*_user_cache(), home.data / "cache"])


def place_machine_code(caches: Iterable[Path]) -> None:
    """Set numba's folder for machine code, before its import: in the first of these that can be used.

    If none can, it is a private temporary folder. A folder that the environment names stays.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    sources = _sources()
    for cache in caches:
        folder = cache / "machine-code" / sources
        if _is_usable(folder):
            os.environ["NUMBA_CACHE_DIR"] = str(folder)
            return
    os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="millstream-machine-code-")


def _user_cache() -> Iterable[Path]:
    """Yield the user's cache, as the XDG base directories name it; nothing for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named.startswith("/"):  # others are to be ignored
        yield Path(named) / "millstream"
        return
    with suppress(RuntimeError):
        user = Path.home()
        if user.is_dir():  # an account of a service may name a folder that isn't to be made
            yield user / ".cache" / "millstream"


def _is_usable(folder: Path) -> bool:
    """Make the folder; return whether this user alone can write into it: what it holds is executed."""
    try:
        make_folder(folder)
        for one in (folder, folder.parent):
            found = one.stat()
            if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
                return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _sources() -> str:
    """Return a name of the functions' sources: numba doesn't notice a change of a function that another file's function has inlined."""
    digest = hashlib.sha256()
    for room in COMPILED_ROOMS:
        for module in sorted(Path(__file__).parents[1].joinpath(room).rglob("*.py")):
            digest.update(module.read_bytes())
    return digest.hexdigest()[:16]
