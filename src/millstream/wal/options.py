"""How a log is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.codec.log_directory import Numbering

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a log is written."""

    segment_bytes: int = 64 * _MIB
    """A segment is sealed once it has reached this size …"""
    segment_age_s: float = 3600.0
    """… or this age, where it holds records."""
    queue_bytes_max: int = 64 * _MIB
    """Memory of what waits; one larger submission may stretch it."""
    group_bytes_max: int = 16 * _MIB
    """Memory of the submissions that go into one commit group; a single one may stretch it."""
    group_commit_delay_s: float = 0.0
    """How long the first of a commit group waits for company. Without, a group is what waited while the last fsync ran."""
    disk_used_max: float = 0.9
    """Share of the disk above which appends get `DiskFull`."""
    frame_bytes_max: int = 16 * _MIB
    """Rows of a group beyond this go on in further frames."""
    numbering: Numbering = Numbering.BATCH
    """Which numbers frames carry. `BOTH` is for going back to a version that knows none but an operation's."""
