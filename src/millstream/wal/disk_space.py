"""Space on the log's disk: the error when there is none, the share that may be used, and the spare files.

A recovery on a full disk takes the spare files. `wal.writing.group_commit` cuts back a group that found no space.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

from millstream.errors import DiskFull
from millstream.ports import Files
from millstream.wal.layout import SPARE_NAME

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk, or of one that is full for this user."""
_SPARE_LEAST_BYTES: Final = 64 << 10


def check_space(error: BaseException, message: str) -> None:
    """Raise `DiskFull` if the error means that there is no space on the disk."""
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        raise DiskFull(f"{message}: {error}") from error


def check_disk(files: Files, folder: str, disk_used_max: float) -> None:
    """Refuse to write where more than that share of the disk is used: raises `DiskFull`."""
    used, total = files.disk_usage(folder)
    if used > total * disk_used_max:
        raise DiskFull(
            f"{used} of {total} bytes of the disk are used, more than disk_used_max = {disk_used_max}",
            used_bytes=used,
            total_bytes=total,
        )


def keep_spare(files: Files, shard_dirs: Sequence[str], size_bytes: int) -> bool:
    """Durably reserve the space that the next recovery needs: one spare a shard.

    On a nearly full disk, reserve as much as there is. A recovery on a full disk takes the spare,
    and frees a little less than that: the segment that it begins takes some of it.

    Returns:
        Whether every shard has everything that it may need. If not, call it again once there may be
        more space.
    """
    whole = True
    for shard_dir in shard_dirs:
        path = f"{shard_dir}/{SPARE_NAME}"
        is_there = files.exists(path)
        there = files.size(path) if is_there else 0
        size = size_bytes
        while size > there and not _allocate_spare(files, path, size, anew=not is_there):
            whole = False
            size = size // 4 if size // 4 >= _SPARE_LEAST_BYTES else 0
        if size > there and not is_there:
            files.sync_dir(shard_dir)
    return whole


def _allocate_spare(files: Files, path: str, size: int, *, anew: bool) -> bool:
    """Make a spare, or enlarge it; return False, with the file unchanged, if there is no space."""
    spare = files.create(path) if anew else files.open_write(path)
    before = 0 if anew else spare.size()
    try:
        spare.allocate(size)
        spare.sync()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        if anew:
            files.remove(path)
        else:
            spare.truncate(before)
        return False
    finally:
        spare.close()
    return True
