"""Options of a log's writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.codec.log_frame import BATCH_HEADER_VERSION
from millstream.model.replication import LOCAL, AckLevel, Reach

_MIB: Final = 1 << 20
_SPARE_EXTRA_BYTES: Final = 4 * _MIB
"""Bytes by which a tail may exceed its segment's size: its last group and its footer."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of a log's writer."""

    segment_bytes: int = 64 * _MIB
    """Size in bytes at which a segment is sealed …"""
    segment_age_s: float = 3600.0
    """… or its age in seconds, if it holds records."""
    queue_bytes_max: int = 64 * _MIB
    """Bytes of queued submissions; one larger submission may exceed it."""
    group_bytes_max: int = 16 * _MIB
    """Bytes of the submissions in one commit group; a single one may exceed it."""
    group_commit_delay_s: float = 0.0
    """Seconds that the first submission of a group waits for more. With 0, a group is what queued
    during the last fsync.
    """
    disk_used_max: float = 0.9
    """Share of the disk above which appends get `DiskFull`."""
    frame_bytes_max: int = 16 * _MIB
    """Bytes of rows in a frame; further rows of a group go into further frames."""
    frame_version: int = BATCH_HEADER_VERSION
    """Version of frames' headers. 1 keeps the log readable to programs that know no newer one; it needs
    region 0, and shard 0 alone.
    """
    acks: AckLevel = LOCAL
    """Minimum level that an append needs before it is acknowledged. With any level except `local`,
    readers see it only then, too.
    """
    reach: Reach | None = None
    """Followers and stores that may ever hold what is written. None: unknown, so appends wait even
    for a level that none reaches.
    """
    acks_patience_s: float = 5.0
    """Seconds that closing waits for appends that haven't reached their level."""

    @property
    def spare_bytes(self) -> int:
        """Bytes that a shard's recovery may need."""
        return self.segment_bytes + min(self.segment_bytes, _SPARE_EXTRA_BYTES)
