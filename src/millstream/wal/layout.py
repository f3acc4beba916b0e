"""Layout of a stream's log folder, and the meaning of file names.

    <folder>/<shard:05d>/<base_offset:020d>.wal    segments; names sort as they read
                         durable.mark              see `durable_mark`; the shard's writer holds its lock
                         *.torn                    what recovery cut off, kept for people to look at
                         *.tmp                     being made; a leftover means nothing
                         recovery.spare            space kept for recovery, so that it works on a full disk
    <folder>/sessions.state                        which writes of applications the log has; see `session_file`
    <folder>/.lock                                 several writers: held while files are made, renamed or removed

Names that begin with a dot never belong to the log: file managers and copying programs leave them
(`.DS_Store`, `._*`), and they are ignored. So is `lost+found`, which the root of a file system has.
Any other file is an error that names it: nothing is skipped silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from millstream.errors import LogError
from millstream.model.ids import ShardId
from millstream.model.positions import Offset
from millstream.ports import Files

MARK_NAME: Final = "durable.mark"
SPARE_NAME: Final = "recovery.spare"
LOCK_NAME: Final = ".lock"
LOST_AND_FOUND: Final = "lost+found"
SESSIONS_NAME: Final = "sessions.state"
_SESSIONS: Final = frozenset({SESSIONS_NAME, f"{SESSIONS_NAME}.tmp"})
_SEGMENT: Final = re.compile(r"(\d{20})\.wal\Z")
_SHARD: Final = re.compile(r"\d{5}\Z")
_OTHERS: Final = (".torn", ".tmp", ".spare")


@dataclass(frozen=True, slots=True, order=True)
class SegmentFile:
    """A segment, as its file name describes it."""

    base_offset: Offset
    path: str


def shard_folder(folder: str, shard: ShardId) -> str:
    """Return the folder of a shard's segments."""
    return f"{folder}/{shard:05d}"


def segment_path(shard_dir: str, base_offset: Offset) -> str:
    """Return a segment's path."""
    return f"{shard_dir}/{base_offset:020d}.wal"


def list_shards(files: Files, folder: str) -> list[ShardId]:
    """Return the shards in a stream's folder, in order; none if the folder doesn't exist.

    Raises:
        LogError (`unexpected_file`): the folder has something else in it.
    """
    shards, strays = shards_and_strays(files, folder)
    for stray in strays:
        raise LogError(f"{stray} isn't a shard's folder", code="unexpected_file", file=stray)
    return shards


def shards_and_strays(files: Files, folder: str) -> tuple[list[ShardId], list[str]]:
    """Return the shards, and the paths of what doesn't belong there; raises nothing."""
    names = [name for name in _names(files, folder) if name not in _SESSIONS]
    found = [name for name in names if _SHARD.match(name) is not None and files.is_folder(f"{folder}/{name}")]
    return [ShardId(int(name)) for name in found], [f"{folder}/{name}" for name in names if name not in found]


def list_segments(files: Files, shard_dir: str) -> list[SegmentFile]:
    """Return a shard's segments in order; none if the folder doesn't exist.

    Raises:
        LogError (`unexpected_file`): the folder has a file that isn't the log's.
    """
    segments, strays = segments_and_strays(files, shard_dir)
    for stray in strays:
        raise LogError(f"{stray} isn't a file of the log", code="unexpected_file", file=stray)
    return segments


def segments_and_strays(files: Files, shard_dir: str, *, looks: bool = False) -> tuple[list[SegmentFile], list[str]]:
    """Return the segments, and the paths of files that aren't the log's; raises nothing.

    Args:
        looks: whether to check for folders named like a segment, and return them as not the log's;
            otherwise reading one fails.
    """
    segments: list[SegmentFile] = []
    strays: list[str] = []
    for name in _names(files, shard_dir):
        found = _SEGMENT.match(name)
        if found is not None and not (looks and files.is_folder(f"{shard_dir}/{name}")):
            segments.append(SegmentFile(Offset(int(found[1])), f"{shard_dir}/{name}"))
        elif name != MARK_NAME and not name.endswith(_OTHERS):
            strays.append(f"{shard_dir}/{name}")
    return segments, strays


def _names(files: Files, folder: str) -> list[str]:
    """Return the names in a folder, except those that never belong to the log; none if the folder doesn't exist."""
    try:
        return [name for name in files.listdir(folder) if not name.startswith(".") and name != LOST_AND_FOUND]
    except FileNotFoundError:
        return []
