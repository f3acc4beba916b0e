"""The memory of a home's processes and the room on its disk, for the status."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROCESSES: Path = Path("/proc")
_TAKEN_ON = frozenset({"delivery", "alerts"})
"""Roles that one of a home's processes takes on in addition to its own."""


def resources_of(data: Path, processes: Mapping[str, int | None]) -> dict[str, Any]:
    """Return `memory_bytes` by process, and `disk_free_bytes` and `disk_size_bytes` of the disk of a home's data.

    A process's memory has that of its own children, such as Spark's; pages that they share count repeatedly. It is known on
    Linux alone. A process with several roles has the one that it was started for.
    """
    own: dict[int, str] = {}
    for role, pid in sorted(processes.items(), key=lambda process: process[0] in _TAKEN_ON):
        if pid is not None:
            own.setdefault(pid, role)
    memory = {role: size for pid, role in own.items() if (size := _memory_bytes(pid, own)) is not None}
    free = size = None
    with suppress(OSError):
        disk = os.statvfs(data)
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    return {"memory_bytes": memory, "disk_free_bytes": free, "disk_size_bytes": size}


def _memory_bytes(pid: int, apart: Mapping[int, str]) -> int | None:
    """Return the resident memory of a process and its descendants, without those that are named themselves."""
    try:
        total = int((_PROCESSES / str(pid) / "statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return None
    for thread in _listed(_PROCESSES / str(pid) / "task"):
        with suppress(OSError):
            for child in map(int, (thread / "children").read_text().split()):
                if child not in apart:
                    total += _memory_bytes(child, apart) or 0
    return total


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
