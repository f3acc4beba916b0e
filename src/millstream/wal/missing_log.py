"""A log that is gone although its records were numbered: its folder, or a shard's, was moved or removed.

The catalog knows that there was a log; the marks of the shards that are left know how many there were.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.errors import CorruptWal
from millstream.model.positions import Seq
from millstream.ports import Files
from millstream.wal.durable_mark import missing_shards, read_mark
from millstream.wal.layout import MARK_NAME, list_segments, list_shards, shard_folder


def find_missing(files: Files, folder: str, given: Callable[[], Seq]) -> CorruptWal | None:
    """Return the error if a stream's whole log is gone; None if a part of it is there, or there never was one.

    Args:
        folder: the stream's.
        given: returns the greatest number given to a record of the log; asked only if the folder holds no log.

    Raises:
        LogError (`unexpected_file`): the folder has something else in it.
    """
    if any(is_begun(files, shard_folder(folder, shard)) for shard in list_shards(files, folder)):
        return None
    numbers = given()
    return missing_log(folder, numbers) if numbers else None


def find_missing_shards(files: Files, folder: str) -> CorruptWal | None:
    """Return the error if shards of the log are gone, and others are there; None if not. Raises as `find_missing`."""
    shards = list_shards(files, folder)
    marks = (read_mark(files, shard_folder(folder, shard)) for shard in shards)
    return missing_shards(folder, shards, filter(None, marks))


def is_begun(files: Files, shard_dir: str) -> bool:
    """Return whether the folder holds a shard of a log, which may have no records: its mark, or a segment."""
    return files.exists(f"{shard_dir}/{MARK_NAME}") or bool(list_segments(files, shard_dir))


def missing_log(folder: str, given: Seq, *, hint: str | None = None) -> CorruptWal:
    """Return the error for a log that is gone, whose records have numbers up to `given`."""
    return CorruptWal(
        f"the log in {folder} is missing, though its records have numbers up to {given}",
        code="log_missing",
        hint=hint,
        file=folder,
    )
