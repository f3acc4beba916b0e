"""The identity of a home among those that may have its node's name: a copy, or the original of a copy."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.home.paths import HomePaths


def instance_of(home: HomePaths) -> str:
    """Return a word that is the same for all processes of a home, through their restarts, and differs for every copy.

    It is derived from the home's path and the machine's boot: nothing in the home could tell a copy from
    its original. So another word may still be the same home, moved; the same word is never another home.
    Empty if the home has no data folder yet.
    """
    try:
        folder = home.data.stat()
    except FileNotFoundError:
        return ""
    return hashlib.sha256(f"{boot_id()} {folder.st_dev} {folder.st_ino}".encode()).hexdigest()[:16]


def boot_id() -> str:
    """Return the id of the machine's boot; empty if the system doesn't provide one."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
