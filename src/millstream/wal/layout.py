"""Which files lie where in a stream's log folder, and what their names say.

    <folder>/<shard:05d>/<base_offset:020d>.wal    segments; names sort as they read
                         durable.mark              see `mark`; whoever writes the shard holds its lock
                         *.torn                    what recovery cut off, kept for people to look at
                         *.tmp                     being made; a leftover means nothing
                         recovery.spare            space kept for recovery, so that it works on a full disk

Any other file is an error that names it: nothing is skipped silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from millstream.errors import UnexpectedFile
from millstream.model.ids import ShardId
from millstream.model.positions import Offset
from millstream.ports import Files

MARK_NAME: Final = "durable.mark"
SPARE_NAME: Final = "recovery.spare"
_SEGMENT: Final = re.compile(r"(\d{20})\.wal\Z")
_SHARD: Final = re.compile(r"\d{5}\Z")
_OTHERS: Final = (".torn", ".tmp", ".spare")


@dataclass(frozen=True, slots=True, order=True)
class SegmentFile:
    """A segment by its name."""

    base_offset: Offset
    path: str


def shard_folder(folder: str, shard: ShardId) -> str:
    """Where a shard's segments lie."""
    return f"{folder}/{shard:05d}"


def segment_path(shard_dir: str, base_offset: Offset) -> str:
    """A segment's path."""
    return f"{shard_dir}/{base_offset:020d}.wal"


def list_shards(files: Files, folder: str) -> list[ShardId]:
    """The shards that lie in a stream's folder, in order; none where the folder isn't there.

    Raises:
        UnexpectedFile: something else lies there.
    """
    try:
        names = files.listdir(folder)
    except FileNotFoundError:
        return []
    for name in names:
        if _SHARD.match(name) is None:
            raise UnexpectedFile(f"{folder}/{name} isn't a shard's folder", file=f"{folder}/{name}")
    return [ShardId(int(name)) for name in names]


def list_segments(files: Files, shard_dir: str) -> list[SegmentFile]:
    """A shard's segments in order; none where the folder isn't there.

    Raises:
        UnexpectedFile: a file lies there that isn't the log's.
    """
    segments = []
    try:
        names = files.listdir(shard_dir)
    except FileNotFoundError:
        return []
    for name in names:
        found = _SEGMENT.match(name)
        if found is not None:
            segments.append(SegmentFile(Offset(int(found[1])), f"{shard_dir}/{name}"))
        elif name != MARK_NAME and not name.endswith(_OTHERS):
            raise UnexpectedFile(f"{shard_dir}/{name} isn't a file of the log", file=f"{shard_dir}/{name}")
    return segments
