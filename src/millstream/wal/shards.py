"""Which shards of a folder a writer opens, and the locks that make it the only one."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.errors import CorruptWal, ShardLocked, ShardTaken
from millstream.model.ids import ShardId, WriterId
from millstream.ports import Files
from millstream.wal.layout import MARK_NAME, list_segments, list_shards, shard_folder
from millstream.wal.mark import MarkFile, missing_shards, read_mark
from millstream.wal.numbers import GroupNumbers


def own_shards(
    files: Files, folder: str, writer: WriterId, named: Sequence[ShardId], numbers: GroupNumbers
) -> list[ShardId]:
    """The shards named, and those of this writer's that lie in the folder: all that do, where it is the only writer.

    Raises:
        CorruptWal: the folder lacks shards that the log has.
        ShardTaken: one of them is another writer's.
    """
    there = {shard: read_mark(files, shard_folder(folder, shard)) for shard in list_shards(files, folder)}
    missing = missing_shards(folder, list(there), filter(None, there.values()))
    if missing is not None:
        raise missing
    if not numbers.shared:
        return sorted({*named, *there})
    own = {shard for shard, mark in there.items() if mark is not None and mark.writer == writer}
    for shard in named:
        mark = there.get(shard)
        if mark is not None and mark.writer != writer:
            raise ShardTaken(
                f"shard {shard} of {folder} is writer {mark.writer}'s, not writer {writer}'s",
                shard=int(shard),
                writer=int(mark.writer),
            )
    return sorted({*named, *own})


def check_not_gone(files: Files, folder: str, shards: Sequence[ShardId], numbers: GroupNumbers) -> None:
    """Refuse to begin an empty log where numbers were given out: a mark was there before the first of them."""
    given = numbers.given_before()
    if given == 0:
        return
    folders = [shard_folder(folder, shard) for shard in shards]
    if not any(files.exists(f"{shard_dir}/{MARK_NAME}") or list_segments(files, shard_dir) for shard_dir in folders):
        raise CorruptWal(
            f"the log in {folder} is gone, though numbers up to {given} were given for its records",
            hint="Restore the folder from a copy. To begin anew: `millstream slot drop`, then a new home and an empty lake.",
            file=folder,
        )


def lock_shards(files: Files, folder: str, shards: Sequence[ShardId]) -> dict[ShardId, MarkFile]:
    """Take the locks of shards, whose folders are made; `ShardLocked` where another process has one."""
    marks: dict[ShardId, MarkFile] = {}
    try:
        for shard in shards:
            shard_dir = shard_folder(folder, shard)
            files.makedirs(shard_dir)
            files.sync_dir(folder)
            marks[shard] = MarkFile.open(files, shard_dir)
            if not marks[shard].file.lock():
                raise ShardLocked(
                    f"another process writes {shard_dir}",
                    hint="Stop it first; `millstream status` shows who it is.",
                    shard=int(shard),
                )
    except BaseException:
        for mark in marks.values():
            mark.close()
        raise
    return marks
