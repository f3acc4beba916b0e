"""One table's records of a span, as the pipeline lands them: typed batches, of one schema version each."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import Final

import pyarrow as pa

from millstream.errors import MillstreamError
from millstream.model.ids import TableId
from millstream.model.positions import Seq, StreamToken
from millstream.model.schema import TableKind, TableSchema
from millstream.wal.reader import LogSpan, StreamReader, TableRecords

_TOGETHER_ROWS: Final = 1 << 15
"""A batch of this many rows, plus one frame, is large enough."""


def table_batches(
    reader: StreamReader, span: LogSpan, table_id: TableId
) -> Iterator[tuple[TableSchema, pa.RecordBatch]]:
    """Yield a table's records in `record_schema`, each batch with its schema, in order.

    Copied rows have the moment of their copy as `__commit_ts`. Records of a quarantined table are left out.

    Raises:
        OffsetExpired, CorruptWal: as `StreamReader.read_span`.
    """
    held: list[TableRecords] = []
    rows = 0
    for piece in reader.read_span(span, tables=[table_id], moments=True):
        if is_raw(piece.schema):
            continue
        if held and (piece.schema.version != held[0].schema.version or rows >= _TOGETHER_ROWS):
            yield held[0].schema, one_batch(held)
            held, rows = [], 0
        held.append(piece)
        rows += piece.batch.num_rows
    if held:
        yield held[0].schema, one_batch(held)


def one_batch(pieces: list[TableRecords]) -> pa.RecordBatch:
    """Return many small frames as one batch: every later step has a cost per batch."""
    if len(pieces) == 1:
        return pieces[0].batch
    return pa.concat_batches([piece.batch for piece in pieces])


def is_raw(schema: TableSchema) -> bool:
    """Whether the records are of a table that was quarantined: bytes of the protocol, which no lake table takes."""
    return schema.kind is TableKind.RAW


def set_aside(
    reader: StreamReader, part: TableRecords, rest: Iterator[TableRecords], begin: StreamToken, reach: StreamToken
) -> MillstreamError:
    """Return the error for a reader of a table that has come to records of it which nothing has decoded.

    Args:
        part: the first of those records.
        rest: the parts behind it of what is read; it is taken up to the first part that was decoded.
        begin: what is read begins behind it.
        reach: the end of what is read; both tokens split no operation.
    """
    last = part.last_seq
    for more in rest:
        if not is_raw(more.schema):
            break
        last = max(last, more.last_seq)

    def cut(n: int) -> StreamToken:
        """Return the position between both tokens at which each writer that gets so far stands at `n`, in whole operations."""
        at = {writer: Seq(max(begin.of(writer), min(n, reach.of(writer)))) for writer in {*begin.ahead, *reach.ahead}}
        least = Seq(max(begin.minimum, min(n, reach.minimum)))
        if not at:
            return StreamToken.scalar(reader.stream_id, reader.whole_upto(least))
        return reader.whole_token(StreamToken(begin.stream, min([least, *at.values()]), at))

    def has_last(token: StreamToken) -> bool:
        ends = [(token.of(writer), end) for writer, end in reach.ahead.items()]
        return all(at >= last for at, end in [(token.minimum, reach.minimum), *ends] if end >= last)

    # The end of the last record's operation: the first position that isn't moved back to before that.
    low, step = int(last), 1
    while not has_last(cut(low + step - 1)):
        low, step = low + step, 2 * step
    high = low + step - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has_last(cut(middle)) else (middle + 1, high)
    before, behind, name = cut(part.first_seq - 1), cut(high), part.schema.full_name
    return MillstreamError(
        f"records of {name} between {before} and {behind} weren't decoded: the table was quarantined when they came",
        code="table_quarantined",
        hint=f"Run `millstream tables retry {quote(name)}` if it still is, and read on after {behind} to skip them.",
        table=name,
        before=str(before),
        behind=str(behind),
    )
