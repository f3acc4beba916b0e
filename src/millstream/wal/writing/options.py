"""How a log is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.codec.log_directory import Numbering
from millstream.model.replication import LOCAL, AckLevel, Reach

_MIB: Final = 1 << 20
_SPARE_EXTRA_BYTES: Final = 4 * _MIB
"""A tail may exceed its segment's size by its last group and its footer."""


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
    acks: AckLevel = LOCAL
    """Where an append has to be before it is acknowledged, at the least. With any other than `local` readers see nothing before that, either."""
    reach: Reach | None = None
    """Who may ever hold what is written; None: not known, so that a level which nobody reaches is waited for."""
    acks_patience_s: float = 5.0
    """How long closing waits for what isn't there yet."""

    @property
    def spare_bytes(self) -> int:
        """Space that a shard's recovery may need."""
        return self.segment_bytes + min(self.segment_bytes, _SPARE_EXTRA_BYTES)
