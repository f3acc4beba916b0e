"""Preparing a follower's folder for a writer.

A writer's recovery expects the end of a log to be what a crash of the previous writer leaves. The
end of a follower's log is different: a shipment may put one shard far ahead of another, which
recovery would take for damage. So before a promotion, everything that isn't shown is removed.
Acknowledged records are shown.
"""

from __future__ import annotations

from contextlib import ExitStack

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.model.replication import ByteEnd
from millstream.ports import Files
from millstream.wal.durable_mark import read_mark
from millstream.wal.files import RealFiles
from millstream.wal.layout import MARK_NAME, list_shards, shard_folder
from millstream.wal.replica.follower_marks import NOBODY
from millstream.wal.replica.replica_log import ReplicaEnd, ReplicaLog
from millstream.wal.replica.set_aside import ShardCut
from millstream.wal.shard_locks import lock_shards


def prepare_promotion(folder: str, *, files: Files | None = None) -> ReplicaEnd:
    """Prepare a follower's log for a writer; no process may follow into it any longer.

    Returns:
        Its end, which a writer's recovery will find.

    Raises:
        As `ReplicaLog.open`. After a crash, the same call continues.
    """
    files = RealFiles() if files is None else files
    log = ReplicaLog.open(folder, files=files, side_by_side=False)
    try:
        end = log.end()
    finally:
        log.close()
    with ExitStack() as held:
        marks = lock_shards(files, folder, list_shards(files, folder))
        for mark in marks.values():
            held.callback(mark.close)
        for shard in marks:
            shard_dir = shard_folder(folder, shard)
            shown = read_mark(files, shard_dir)
            if shown is None or shown.writer == NOBODY:
                ShardCut.at(files, folder, shard, None).apply(files)
                files.remove(f"{shard_dir}/{MARK_NAME}")
                files.sync_dir(shard_dir)
                continue
            position = 0 if shown.byte_end == SEGMENT_HEADER_SIZE else shown.byte_end
            ShardCut.at(files, folder, shard, ByteEnd(shown.base_offset, position)).apply(files)
    return end
