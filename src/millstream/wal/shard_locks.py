"""The shards of a folder that a writer opens, and the locks that make it the only one.

A shard's lock is on its mark file. A writer that hangs (SIGSTOP, a frozen host) holds it for as
long as it hangs. Once its lease has run out it can't answer callers, and its mark is replaced: it
keeps locking, and writing, a file that no path names. By path it could still begin a segment or a
spare. So writers that share a folder do that, and recovery and retention, under the folder's own
lock, and first check that their marks are still in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Final

from millstream.errors import LogError, ShardLocked
from millstream.model.ids import ShardId, WriterId
from millstream.model.positions import Seq
from millstream.ports import Clock, Files, WritableFile
from millstream.wal.durable_mark import MarkFile, missing_shards, read_mark
from millstream.wal.layout import LOCK_NAME, MARK_NAME, list_shards, shard_folder
from millstream.wal.missing_log import is_begun, missing_log
from millstream.wal.writing.number_sources import GroupNumbers

_PATIENCE_NS: Final = 10_000_000_000
_LOOK_S: Final = 0.005
_FOLLOWER_LOCK_NAME: Final = ".follower"
"""Lock file in a stream's folder, held while a follower writes there. The marks' locks keep writers away."""


def own_shards(
    files: Files, folder: str, writer: WriterId, named: Sequence[ShardId], numbers: GroupNumbers
) -> list[ShardId]:
    """Return the named shards and this writer's shards in the folder; all in the folder if it is the only writer.

    Raises:
        CorruptWal: the folder lacks shards that the log has.
        LogError (`shard_taken`): one of them is another writer's, or all belong to several writers.
    """
    there = {shard: read_mark(files, shard_folder(folder, shard)) for shard in list_shards(files, folder)}
    missing = missing_shards(folder, list(there), filter(None, there.values()))
    if missing is not None:
        raise missing
    if not numbers.shared:
        if any(mark.elsewhere is not None for mark in there.values() if mark is not None):
            raise LogError(
                f"several writers share the log in {folder}, and this writer isn't configured as one of several",
                code="shard_taken",
                hint='Name this writer: `[writer] name = "…"` in millstream.toml, with the shared catalog.',
            )
        return sorted({*named, *there})
    refuse_beside_an_owner(files, folder, writer)
    own = {shard for shard, mark in there.items() if mark is not None and mark.writer == writer}
    for shard in named:
        mark = there.get(shard)
        if mark is not None and mark.writer != writer:
            raise LogError(
                f"shard {shard} of {folder} is writer {mark.writer}'s, not writer {writer}'s",
                code="shard_taken",
                shard=int(shard),
                writer=int(mark.writer),
            )
    return sorted({*named, *own})


def refuse_beside_an_owner(files: Files, folder: str, writer: WriterId | None) -> None:
    """Raise `shard_taken` if the folder is the log of another writer that owns it alone; None: of any such writer."""
    for shard in list_shards(files, folder):
        mark = read_mark(files, shard_folder(folder, shard))
        if mark is not None and mark.elsewhere is None and mark.writer != writer:
            raise LogError(
                f"the log in {folder} belongs to a single writer, so others can't join it",
                code="shard_taken",
                hint='Start that writer first as one of several: `[writer] name = "writer"` in millstream.toml.',
                shard=int(shard),
                writer=int(mark.writer),
            )


def greatest_known(files: Files, folder: str) -> Seq:
    """Return the greatest number that any mark in the folder records as given."""
    marks = filter(None, (read_mark(files, shard_folder(folder, shard)) for shard in list_shards(files, folder)))
    return Seq(max((max(mark.reserved_to, mark.persisted_upto) for mark in marks), default=0))


def check_not_gone(files: Files, folder: str, shards: Sequence[ShardId], numbers: GroupNumbers) -> None:
    """Refuse to begin an empty log if numbers were given out: a mark existed before the first of them."""
    given = numbers.given_before()
    if given == 0:
        return
    if not any(is_begun(files, shard_folder(folder, shard)) for shard in shards):
        forgotten = "Restore it from a copy; without one take another `[writer] name`: this one was forgotten, and no reader waits for it."
        raise missing_log(folder, given, hint=None if numbers.cut_at is None else forgotten)


@contextmanager
def folder_lock(files: Files, folder: str, clock: Clock, *, make: bool = False) -> Iterator[None]:
    """Hold the folder's lock. Without `make`, a missing lock file is fine: a folder that one writer owns needs none.

    Raises:
        ShardLocked: another process holds it, and keeps holding it.
    """
    path = f"{folder}/{LOCK_NAME}"
    if make and not files.exists(path):
        files.makedirs(folder)
        with suppress(FileExistsError):
            files.create(path).close()
    if not files.exists(path):
        yield
        return
    file = files.open_write(path)
    try:
        deadline = clock.monotonic_ns() + _PATIENCE_NS
        while not file.lock():
            if clock.monotonic_ns() > deadline:
                raise ShardLocked(
                    f"another process holds the lock {path} and doesn't release it",
                    hint="Wait until it has recovered shards or dropped segments; end it if it hangs.",
                )
            clock.sleep(_LOOK_S)
        yield
    finally:
        file.close()


def lock_follower(files: Files, folder: str) -> WritableFile:
    """Take the lock that keeps other followers out of a folder; closing the file releases it. Raises `ShardLocked`."""
    path = f"{folder}/{_FOLLOWER_LOCK_NAME}"
    if not files.exists(path):
        with suppress(FileExistsError):
            files.create(path).close()
    with ExitStack() as opened:
        file = opened.enter_context(closing(files.open_write(path)))
        if not file.lock():
            raise ShardLocked(
                f"another process replicates into {folder}",
                hint="Stop it first; `millstream replicas` shows that process.",
            )
        opened.pop_all()
        return file


def lock_shards(
    files: Files, folder: str, shards: Sequence[ShardId], *, seize: bool = False
) -> dict[ShardId, MarkFile]:
    """Take the locks of shards, and make their folders.

    Args:
        folder: the stream's; with `seize` its lock is held.
        seize: the previous writer can't answer callers any longer: take its shards even if it still
            holds their locks.

    Raises:
        ShardLocked: another process has one.
    """
    marks: dict[ShardId, MarkFile] = {}
    try:
        for shard in shards:
            shard_dir = shard_folder(folder, shard)
            files.makedirs(shard_dir)
            files.sync_dir(folder)
            mark = _lock(files, shard_dir)
            if mark is None and seize:
                mark = MarkFile.replace(files, shard_dir)
            if mark is None:
                raise ShardLocked(
                    f"another process writes {shard_dir}",
                    hint="Stop it first; `millstream status` shows that process.",
                    shard=int(shard),
                )
            marks[shard] = mark
    except BaseException:
        for mark in marks.values():
            mark.close()
        raise
    return marks


def holds_mark(shard_dir: str, mark: MarkFile) -> bool:
    """Return whether the mark is still the shard's, and wasn't replaced."""
    return mark.file.is_at(f"{shard_dir}/{MARK_NAME}")


def _lock(files: Files, shard_dir: str) -> MarkFile | None:
    """Return the shard's locked mark; None if another process has the lock. A lock on a replaced mark doesn't count."""
    while True:
        with ExitStack() as opened:
            mark = opened.enter_context(closing(MarkFile.open(files, shard_dir)))
            if not mark.file.lock():
                return None
            if holds_mark(shard_dir, mark):
                # The writer before may have moved it until it let the lock go.
                mark.take_counters(files.read(f"{shard_dir}/{MARK_NAME}"))
                opened.pop_all()
                return mark
