"""Changes to a log while it is read: retention drops its front, or it is cut back to a new leader's log.

Both are recorded before they happen. Retention first moves its mark of what is dropped up
(`DroppedMark`). A node that cuts a log back first lowers its marks (`wal.replica.set_aside`),
which nothing else does. So if a file is gone, or has other bytes than the mark promised, the reader
reads the marks again and learns which of the two it was. A log that was cut back and has grown
again has marks of another epoch, or lower ones: frames that a reader remembers may belong to
another history.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from millstream.errors import CorruptWal, LogError, LogTruncated, OffsetExpired
from millstream.model.ids import ShardId
from millstream.model.marks import DurableMark
from millstream.model.positions import Seq
from millstream.model.replication import ByteEnd
from millstream.wal.dropped_segments import is_dropped
from millstream.wal.readable_range import ReadableRange


class HistoryWatch:
    """Checks whether a log is still the one that its reader knows, by comparing its marks. For one thread."""

    def __init__(self) -> None:
        self._seen: Mapping[ShardId, DurableMark] = {}

    def is_other(self, marks: Mapping[ShardId, DurableMark]) -> bool:
        """Return whether frames known from the last call may not be those of these marks."""
        seen, self._seen = self._seen, marks
        return seen is not marks and any(
            (now := marks.get(shard)) is None or now.epoch != mark.epoch or _end(now) < _end(mark)
            for shard, mark in seen.items()
        )


class TruncationWatch:
    """Context of a read: if the log was cut back or dropped during it, it raises the error that explains that.

    Args:
        extent: the log's.
        ends: end that the read relies on, by shard; or the log's marks.
        upto: number that it reads up to; that of the marks if None.

    Raises:
        LogTruncated: the log was cut back below one of those.
        OffsetExpired: a segment is gone: retention was faster.
    """

    def __init__(
        self,
        extent: ReadableRange,
        ends: Mapping[ShardId, ByteEnd] | Mapping[ShardId, DurableMark],
        upto: Seq | None = None,
    ) -> None:
        self._extent: Final = extent
        self._ends: Final = ends
        self._upto: Final = upto

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, FileNotFoundError | CorruptWal):
            return
        if self._extent.goes_by_marks:
            with suppress(LogError, OSError):
                self._check_not_cut_back(error)
        if isinstance(error, FileNotFoundError):
            first = self._extent.first_seq()
            raise OffsetExpired(
                f"retention dropped {error.filename} during the read; the first number left is {first}",
                first=int(first),
            ) from error

    def _check_not_cut_back(self, error: FileNotFoundError | CorruptWal) -> None:
        marks, persisted = self._extent.marks()
        is_lower = is_other = False
        for shard, end in self._ends.items():
            if (now := marks.get(shard)) is not None:
                is_lower |= _end(now) < _end(end)
                is_other |= isinstance(end, DurableMark) and now.epoch != end.epoch
        marked = (end.persisted_upto for end in self._ends.values() if isinstance(end, DurableMark))
        if is_lower and persisted < (max(marked, default=0) if self._upto is None else self._upto):
            raise LogTruncated(
                f"the log was truncated to number {persisted} while it was read; later records are no longer in the "
                "stream's history",
                persisted_upto=int(persisted),
            ) from error
        if is_lower or (is_other and not self._is_dropped(error)):
            # It has grown again. A damaged log that got another writer at this very moment raises
            # its error when it is read again.
            raise LogTruncated(
                "another writer replaced the end of the log during this read: the log was truncated",
                hint="Read again, from a token older than this node's last time as leader; a damaged log is then reported.",
                persisted_upto=int(persisted),
            ) from error

    def _is_dropped(self, error: FileNotFoundError | CorruptWal) -> bool:
        return isinstance(error, FileNotFoundError) and is_dropped(self._extent.files, error)


def _end(of: DurableMark | ByteEnd) -> ByteEnd:
    return ByteEnd(of.base_offset, of.byte_end) if isinstance(of, DurableMark) else of
