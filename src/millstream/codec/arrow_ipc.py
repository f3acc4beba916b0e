"""Record batches as Arrow IPC messages without their schema, which is stored elsewhere.

Decoded messages are validated in full: Arrow follows offsets unchecked, and a valid checksum
doesn't authenticate the writer. Validation takes a quarter of the time of decoding strings, and
next to nothing for numbers.

Large batches are LZ4-compressed buffer by buffer, as the IPC format defines; a message itself marks
whether it is compressed. Small ones are not compressed: below a few KiB the fixed cost exceeds the
saving. Nor are batches that are mostly one buffer that a sample shows not to shrink (random bytes,
images, compressed data).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from millstream.codec.checksums import Bytes
from millstream.errors import CorruptFrame

COMPRESS_FROM_BYTES: Final = 8192
PICK_FROM_BYTES: Final = 32 << 10
"""From this size on, decompressing an unneeded column costs more than setting up a decoder that leaves it out."""
_THREADS_FROM_BYTES: Final = 256 << 10
"""Smaller messages are decoded before other threads have woken up."""
_SAMPLED_FROM_BYTES: Final = 32 << 10
_SAMPLE_BYTES: Final = 16 << 10
_MOSTLY: Final = 0.75
_GAIN: Final = 0.95
_SAMPLER: Final = pa.Codec("lz4_raw")
_PREFIX: Final = struct.Struct("<Ii")
"""An Arrow message's mark, and the length of its metadata."""
_INT: Final = struct.Struct("<i")
_SHORT: Final = struct.Struct("<H")
_HEADER, _NODES, _BUFFERS = 8, 6, 8
"""Places of a Message's header, and of a RecordBatch's nodes and buffers, in the lists of their tables' fields."""
_NOT_A_BATCH: Final = (pa.ArrowException, OSError, EOFError, ValueError)
# Without Arrow's thread pool: handing a group's few buffers to other threads took 190 µs; compressing them takes 50 µs.
_LZ4: Final = ipc.IpcWriteOptions(compression="lz4", use_threads=False)


def encode_batch(batch: pa.RecordBatch) -> pa.Buffer:
    """Encode one encapsulated RecordBatch message; its length is a multiple of 8."""
    if batch.get_total_buffer_size() < COMPRESS_FROM_BYTES:  # `nbytes` takes longer than encoding a small batch
        return batch.serialize()
    if not _shrinks(batch):
        return batch.serialize()
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, batch.schema, options=_LZ4) as stream:
        stream.write_batch(batch)
        end = sink.tell()  # before the stream's end marker
    stream_bytes = sink.getvalue()
    start = _PREFIX.size + _PREFIX.unpack_from(stream_bytes)[1]  # behind the schema's message
    return stream_bytes.slice(start, end - start)


def _shrinks(batch: pa.RecordBatch) -> bool:
    """Whether compression is likely to pay, by a sample of the largest column's largest buffer."""
    size, largest = 0, None
    total = 0
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is not None:
                total += buffer.size
                if buffer.size > size:
                    size, largest = buffer.size, buffer
    if largest is None or size < _SAMPLED_FROM_BYTES or size < _MOSTLY * total:
        return True
    sample = largest.slice(size // 2, _SAMPLE_BYTES)
    return bool(_SAMPLER.compress(sample, asbytes=False).size < _GAIN * sample.size)


def decode_batch(message: Bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch of a message made under `schema`; raises `CorruptFrame` if it isn't one."""
    try:
        batch = ipc.read_record_batch(pa.py_buffer(message), schema)
        batch.validate(full=True)
        return batch
    except _NOT_A_BATCH as error:
        raise _not_a_batch(error) from error


class ColumnPicker:
    """Decodes some columns of messages made under one schema; the others are neither decompressed nor validated.

    Args:
        names: the columns to decode; names that `schema` lacks are ignored. None: all.
        threads: decompress in Arrow's threads: faster, and costlier if other work keeps the cores busy.
    """

    def __init__(self, schema: pa.Schema, names: Collection[str] | None, *, threads: bool = True) -> None:
        plain = schema.remove_metadata()
        self._schema = plain
        self._shape = message_shape(pa.RecordBatch.from_pylist([], plain).serialize())
        self._names = [name for name in schema.names if names is None or name in names]
        self._has_all = self._names == schema.names
        self._head = plain.serialize().to_pybytes()
        places = [place for place, name in enumerate(schema.names) if name in self._names]
        self._options = ipc.IpcReadOptions(included_fields=places, use_threads=threads)
        self._of_small = ipc.IpcReadOptions(included_fields=places, use_threads=False)

    def decode(self, message: Bytes) -> pa.RecordBatch:
        """Return a message's batch of those columns; raises `CorruptFrame` if it isn't one."""
        self._check_shapes([message])
        if len(message) < PICK_FROM_BYTES or not self._names:
            batch = decode_batch(message, self._schema)
            return batch if self._has_all else batch.select(self._names)
        try:
            batch = ipc.open_stream(b"".join((self._head, message)), options=self._options).read_next_batch()
            batch.validate(full=True)
            return batch
        except (StopIteration, *_NOT_A_BATCH) as error:
            raise _not_a_batch(error) from error

    def decode_all(self, messages: Sequence[Bytes]) -> tuple[pa.RecordBatch, list[int]]:
        """Return the concatenated rows of several messages, of those columns, and the row count of each message.

        A call costs little more than one call of `decode`.

        Raises:
            CorruptFrame: one of the messages isn't a batch.
        """
        if len(messages) > 1 and (alike := self._decode_alike(messages)) is not None:
            return alike, [alike.num_rows // len(messages)] * len(messages)
        self._check_shapes(messages)
        try:
            data = b"".join((self._head, *messages))
            are_small = len(data) < _THREADS_FROM_BYTES * len(messages)
            found = list(ipc.open_stream(data, options=self._of_small if are_small else self._options))
            whole = pa.Table.from_batches(found)
            whole.validate(full=True)  # before anything follows an offset
        except _NOT_A_BATCH as error:
            raise _not_a_batch(error) from error
        if len(found) != len(messages):
            raise CorruptFrame("not an Arrow record batch: another message lies there")
        joined = found if len(found) == 1 else whole.combine_chunks().to_batches()
        if len(joined) > 1:
            raise AssertionError("some frames hold more than an Arrow array does")
        return joined[0] if joined else found[0], [batch.num_rows for batch in found]

    def _check_shapes(self, messages: Sequence[Bytes]) -> None:
        """Raise `CorruptFrame` unless messages have as many columns as the schema: Arrow ignores some that follow."""
        for message in messages:
            if message_shape(message) != self._shape:
                raise CorruptFrame("not an Arrow record batch of the expected schema: it has other columns")

    def _decode_alike(self, messages: Sequence[Bytes]) -> pa.RecordBatch | None:
        """Return the rows of small messages that differ by nothing but numbers; None if they differ otherwise.

        The directories of frames of one size are such. Arrow takes 20 µs for each.
        """
        first = messages[0]
        length = len(first)
        if length >= COMPRESS_FROM_BYTES or any(len(message) != length for message in messages):
            return None
        start = _PREFIX.size + _PREFIX.unpack_from(first)[1]
        data = b"".join(messages)
        stacked = np.frombuffer(data, np.uint8).reshape(len(messages), length)
        if (stacked[:, :start] != stacked[0, :start]).any():
            return None  # of other counts
        self._check_shapes(messages[:1])
        whole = pa.py_buffer(data)
        of_first = decode_batch(whole.slice(0, length), self._schema).select(self._names)
        rows = of_first.num_rows
        columns = []
        for column in of_first.columns:
            type_, count = column.type, rows * len(messages)
            is_null = column.null_count == rows
            if not is_null and (column.null_count or not (pa.types.is_integer(type_) or pa.types.is_timestamp(type_))):
                return None
            presence, *others = column.buffers()
            for buffer in (presence, *(others if is_null else ())):
                if buffer is not None and buffer.size:
                    at = buffer.address - whole.address
                    if not 0 <= at <= length - buffer.size:
                        return None  # it was compressed
                    if (stacked[:, at : at + buffer.size] != stacked[0, at : at + buffer.size]).any():
                        return None
            if is_null:
                columns.append(pa.nulls(count, type_))
                continue
            at, size = others[0].address - whole.address, rows * type_.bit_width // 8
            if not 0 <= at <= length - size:
                return None
            values = pa.py_buffer(np.ascontiguousarray(stacked[:, at : at + size]))
            columns.append(pa.Array.from_buffers(type_, count, [None, values]))
        return pa.RecordBatch.from_arrays(columns, schema=of_first.schema)


def message_shape(message: Bytes) -> tuple[int, int]:
    """Return how many arrays (nested ones, too) and buffers a message holds.

    They stand in its metadata, a FlatBuffers table. Raises `CorruptFrame` if there is no such table.
    """
    try:
        batch = _member(message, _PREFIX.size + _INT.unpack_from(message, _PREFIX.size)[0], _HEADER)
        nodes, buffers = _member(message, batch, _NODES), _member(message, batch, _BUFFERS)
        return int(_INT.unpack_from(message, nodes)[0]), int(_INT.unpack_from(message, buffers)[0])
    except struct.error as error:
        raise _not_a_batch(error) from error


def _member(message: Bytes, table: int, number: int) -> int:
    """Return the position of what a field of a FlatBuffers table refers to."""
    fields = table - _INT.unpack_from(message, table)[0]
    field = table + int(_SHORT.unpack_from(message, fields + number)[0])
    return field + int(_INT.unpack_from(message, field)[0])


def _not_a_batch(error: Exception) -> CorruptFrame:
    return CorruptFrame(f"not an Arrow record batch of the expected schema: {error}")


def encode_schema(schema: pa.Schema) -> pa.Buffer:
    """Encode one encapsulated Schema message, metadata included."""
    return schema.serialize()


def decode_schema(message: Bytes) -> pa.Schema:
    """Return the schema of a message; raises `CorruptFrame` if it isn't one."""
    try:
        return ipc.read_schema(pa.py_buffer(message))
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise CorruptFrame(f"not an Arrow schema: {error}") from error
