"""A follower's folder on its way into other hands: made ready for a writer, or built anew beside and put in its place.

A writer's recovery explains what lies at the end of a log by a crash of the writer before. What a shipment left there, one shard far ahead
of another, it would take for damage: so before a follower is promoted, everything that isn't shown goes. What was acknowledged is shown.

A log that is built anew lies beside (`STREAM.rebuilding`) until it is whole. Then a note in it says so durably, the old folder is
moved aside and the new one into its place; a crash between the two is finished by the same call.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.model.replication import ByteEnd
from millstream.ports import Files
from millstream.wal.files import RealFiles
from millstream.wal.history import Cut, forget_mark
from millstream.wal.layout import list_shards
from millstream.wal.replica import ReplicaEnd, ReplicaLog
from millstream.wal.replica_marks import NOBODY
from millstream.wal.shards import lock_shards

REBUILDING: Final = ".rebuilding"
_WHOLE_NAME: Final = ".whole"


def prepare_promotion(folder: str, *, files: Files | None = None) -> ReplicaEnd:
    """Make a follower's log one that a writer may open; nobody follows into it any more when this is called.

    Returns:
        Where it ends: what a writer's recovery will find.

    Raises:
        As `ReplicaLog.open`. A crash leaves what the same call goes on from.
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
            cut = Cut.at(files, folder, shard, None)
            shown = cut.mark
            if shown is None or shown.writer == NOBODY:
                cut.apply(files)
                forget_mark(files, cut.folder)
                continue
            position = 0 if shown.byte_end == SEGMENT_HEADER_SIZE else shown.byte_end
            Cut.at(files, folder, shard, ByteEnd(shown.base_offset, position)).apply(files)
    return end


def rebuilding_folder(folder: str) -> str:
    """Where a stream's log is built anew, beside the one that is there."""
    return f"{folder}{REBUILDING}"


def finish_rebuild(folder: str, *, aside: str, files: Files | None = None) -> None:
    """Put a log that was built beside in its place: it is whole, and closed. What was there is moved aside, and stays."""
    files = RealFiles() if files is None else files
    path = f"{rebuilding_folder(folder)}/{_WHOLE_NAME}"
    if not files.exists(path):
        note = files.create(path)
        try:
            note.sync()
        finally:
            note.close()
        files.sync_dir(rebuilding_folder(folder))
    resume_rebuild(folder, aside=aside, files=files)


def resume_rebuild(folder: str, *, aside: str, files: Files | None = None) -> bool:
    """Finish what a crash broke off; whether there was something to finish. Call it before a stream's folder is opened."""
    files = RealFiles() if files is None else files
    built = rebuilding_folder(folder)
    if not files.exists(f"{built}/{_WHOLE_NAME}"):
        return False
    parent = folder.rpartition("/")[0]
    if files.exists(folder):
        files.rename(folder, aside)
        files.sync_dir(parent)
    files.rename(built, folder)
    files.sync_dir(parent)
    files.remove(f"{folder}/{_WHOLE_NAME}")
    return True
