"""The log's records behind the lake, for queries of a home: read from its own log, or its copy of its leader's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeBehind
from millstream.lake.query.time_travel import TailPart
from millstream.model.positions import Seq, StreamToken
from millstream.wal.table_batches import is_raw, table_batches

if TYPE_CHECKING:
    from millstream.model.ids import TableId
    from millstream.wal.reader import LogSpan, StreamReader

TAIL_BYTES_MAX: Final = 64 << 20
"""Bytes of the log that a query merges at most: a second or two of work, and far more than a pipeline leaves that keeps
up."""


class HomeLogTail:
    """The `LogTail` of a home's stream.

    Args:
        bytes_max: bytes of the log above which a tail isn't merged.
    """

    def __init__(self, reader: StreamReader, *, bytes_max: int = TAIL_BYTES_MAX) -> None:
        self._reader = reader
        self._bytes_max = bytes_max

    def end(self) -> Seq:
        """Return the readable end."""
        return self._reader.persisted_upto()

    def whole_upto(self, n: Seq) -> Seq:
        """Return the greatest position at or below `n` that splits no operation."""
        return self._reader.whole_upto(n)

    def upto_moment(self, after: Seq, moment: datetime) -> Seq:
        """Return the end of the last operation before the first one above `after` that committed after a moment."""
        end = self.end()
        if end <= after:
            return after
        first: int | None = None
        for span in self._spans(after, end):
            for found in self._reader.read_span(span, columns=frozenset({"__commit_ts"}), moments=True):
                if is_raw(found.schema):
                    continue
                times = found.batch.column("__commit_ts")
                later = found.batch.column("__seq").filter(pc.greater(times, pa.scalar(moment, times.type)))
                if len(later):
                    least = pc.min(later).as_py()
                    first = least if first is None else min(first, least)
        return end if first is None else max(after, self.whole_upto(Seq(first - 1)))

    def parts(self, after: Seq, upto: Seq) -> Sequence[TailPart]:
        """Return the contents of a stretch; raises as `LogTail.parts`."""
        return [
            TailPart(part.schema.defined(), max(part.first_seq, Seq(after + 1)), min(part.last_seq, upto))
            for span in self._spans(after, upto)
            for part in self._reader.parts_of(span)
            if not is_raw(part.schema) and part.first_seq <= upto and part.last_seq > after
        ]

    def records(self, after: Seq, upto: Seq, table: TableId) -> list[pa.RecordBatch]:
        """Return one table's records of a stretch."""
        return [
            batch for span in self._reader.spans(after, upto) for _, batch in table_batches(self._reader, span, table)
        ]

    def _spans(self, after: Seq, upto: Seq) -> list[LogSpan]:
        reached = self._reader.cut(after, bytes_max=self._bytes_max)
        spans = self._reader.spans(after, upto) if reached >= upto else []
        if reached < upto or sum(span.byte_end - span.byte_start for span in spans) > self._bytes_max:
            token = StreamToken.scalar(self._reader.stream_id, after)
            raise LakeBehind(
                f"the log has more than {self._bytes_max} bytes after {token}, where the lake ends",
                reached=int(after),
            )
        return spans
