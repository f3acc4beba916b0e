"""Rows as an answer's bytes, a batch at a time: an Arrow IPC stream, or pieces (`millstream.client.batch_stream`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from millstream.client.batch_stream import PART_BYTES, piece


def in_pieces(reader: pa.RecordBatchReader) -> Iterator[bytes]:
    """Yield pieces without their end, which a server adds once it knows how the answer ended."""
    any_came = False
    for batch in reader:
        any_came = True
        yield from piece([batch], reader.schema)
    if not any_came:
        yield from piece([], reader.schema)


def as_stream(reader: pa.RecordBatchReader) -> Iterator[bytes]:
    """Yield an Arrow IPC stream."""
    sink = _OutputBuffer()
    with pa.ipc.new_stream(sink, reader.schema) as out:
        for batch in reader:
            out.write_batch(batch)
            yield from sink.taken()
    yield from sink.taken()


class _OutputBuffer:
    """A file for Arrow to write to, from which the written bytes are taken out again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._size += len(part)
        return len(part)

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Do nothing: everything is in memory."""

    def close(self) -> None:
        self.closed = True

    def taken(self) -> Iterator[bytes]:
        parts, self._parts = b"".join(self._parts), []
        for begin in range(0, len(parts), PART_BYTES):
            yield parts[begin : begin + PART_BYTES]
