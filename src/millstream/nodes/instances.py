"""Which home this is among those that may have its node's name: a copy, or what it was copied from."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.home.home import Home


def instance_of(home: Home) -> str:
    """A word that is the same for all processes of a home, through restarts of them, and another one for every copy.

    It is drawn from where the home lies, on which machine since it was started: nothing in the home could tell a copy from what it was copied from. So another
    word may still be the same home, moved; the same word is never another one. Empty where the home has no data folder yet.
    """
    try:
        folder = home.data.stat()
    except FileNotFoundError:
        return ""
    return hashlib.sha256(f"{boot_id()} {folder.st_dev} {folder.st_ino}".encode()).hexdigest()[:16]


def boot_id() -> str:
    """Which start of the machine this is; empty where the system doesn't say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
