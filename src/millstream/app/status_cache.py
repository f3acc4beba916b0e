"""State that a process keeps if it takes a home's status repeatedly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.catalog.snapshot import NamesByFingerprint
    from millstream.wal.backlog import Backlogs
    from millstream.wal.reader import StreamReader


@dataclass(frozen=True, slots=True)
class StatusCache:
    """Parts of a status that take long to read and seldom change. For one thread at a time."""

    backlogs: dict[str, Backlogs] = field(default_factory=dict)
    """Counts of the logs by their folders: the open segment isn't read from its beginning each time."""
    readers: dict[str, StreamReader] = field(default_factory=dict)
    """Readers of the logs of streams that the catalog lacks."""
    table_names: NamesByFingerprint = field(default_factory=dict)
    """Names in the catalog's schemas, which take long to decode."""
