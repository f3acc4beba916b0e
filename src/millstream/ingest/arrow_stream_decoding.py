"""Rows from an Arrow IPC stream, sent by untrusted clients.

The data that a stream's few bytes expand to is unbounded: buffers are compressed a thousandfold, columns
of nulls have no bytes, a dictionary's text may repeat in every row. So the messages' headers are read
before anything is decoded, and the expanded size is computed first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from millstream.errors import HttpError, InvalidValue
from millstream.ingest.json_rows import ROWS_MAX
from millstream.ingest.nested import Sizes, is_countable, is_shared, is_view, python_bytes, text_bytes, values_in
from millstream.ingest.python_rows import COLUMNS_MAX, NESTING_MAX, ROWS_BYTES_MAX, table_of, too_large

_NOT_A_STREAM: Final = (pa.ArrowException, OSError, EOFError, ValueError, struct.error, IndexError, OverflowError)
_RECORD_BATCH: Final = 3
_DICTIONARY_BATCH: Final = 2
_VALUES_MAX: Final = 64 << 20
"""Limit over all columns and their nested values."""
_NUMBER_BYTES: Final = 4
"""Size of a row's place in the stream, mostly implied by the one before. Columns of nulls have no other bytes."""
_NESTED_VALUES_MAX: Final = 8 << 20
"""Limit of nested values: they become text through Python's objects."""
_NESTED_BYTES_MAX: Final = 32 << 20
"""Size in bytes of one row's value as Python's objects; a column's rows are converted piece by piece."""
_NESTED_WORK_BYTES: Final = 256
"""Size in bytes of a plain column that takes as long to decode as one nested value: microseconds, through Python's objects."""
_BODY_BYTES_MAX: Final = 2 * ROWS_BYTES_MAX
"""Size in bytes of all messages' buffers, decompressed: buffers of rows within bounds are padded, and
strings have offsets."""


def work_bytes(body: bytes, *, rows_max: int = ROWS_MAX) -> int:
    """Return the size in bytes of plain columns that take as long to decode as a stream's, by the headers of its messages.

    Raises:
        HttpError (`invalid_body`), IngestError (`rows_too_large`): as `rows_of_arrow`.
    """
    _refuse_file(body)
    try:
        return _check_messages(body, rows_max)
    except _NOT_A_STREAM as error:
        raise _invalid(error) from error


def rows_of_arrow(body: bytes, *, rows_max: int = ROWS_MAX, is_checked: bool = False) -> pa.Table:
    """Return the rows of an Arrow IPC stream (`application/vnd.apache.arrow.stream`), in the log's types.

    Args:
        is_checked: whether `work_bytes` has read the headers of its messages.

    Raises:
        HttpError (`invalid_body`): it isn't one, or it is cut off.
        IngestError (`rows_too_large`): more rows than `rows_max`, or more decompressed bytes, columns or nested values than
            allowed.
        InvalidValue: a column has an unsupported type or value; details: column.
    """
    if not is_checked:
        work_bytes(body, rows_max=rows_max)
    try:
        with ipc.open_stream(pa.py_buffer(body)) as stream:
            table: pa.Table = stream.read_all()
        table.validate(full=True)
    except _NOT_A_STREAM as error:
        raise _invalid(error) from error
    if not table.num_rows:
        raise InvalidValue("an append needs at least one row", hint="Don't send a request without rows.")
    meant = sum(_check_unfolded(field, column) for field, column in zip(table.schema, table.columns, strict=True))
    if meant > ROWS_BYTES_MAX:
        raise too_large("the bytes of its columns, written out,", meant, ROWS_BYTES_MAX)
    return table_of(table)


def check_batch(rows: pa.RecordBatch) -> None:
    """Check that a batch decoded without validation is consistent, before it is used.

    Offsets beyond its buffers would crash the process.

    Raises:
        HttpError (`invalid_body`): it is inconsistent.
        IngestError (`rows_too_large`): it has too many columns.
    """
    try:
        rows.validate(full=True)
    except _NOT_A_STREAM as error:
        raise HttpError(f"a batch isn't whole: {error}", code="invalid_body") from error
    if rows.num_columns > COLUMNS_MAX:
        raise too_large("its columns", rows.num_columns, COLUMNS_MAX)


def written_bytes(rows: pa.RecordBatch) -> int:
    """Estimate the bytes that rows take in an append: their own, their repeated values, and a number for each.

    Raises:
        IngestError (`rows_too_large`), InvalidValue: as `rows_of_arrow`, for an unsupported column.
    """
    columns = zip(rows.schema, rows.columns, strict=True)
    meant = sum(_check_unfolded(field, pa.chunked_array([column])) for field, column in columns)
    return meant + int(rows.nbytes + _NUMBER_BYTES * rows.num_rows)


def _refuse_file(body: bytes) -> None:
    if body[:6] == b"ARROW1":
        raise HttpError(
            "the body is a file of Arrow's, not a stream",
            code="invalid_body",
            hint="Write it with `pyarrow.ipc.new_stream`, not `new_file`.",
        )


def _invalid(error: Exception) -> HttpError:
    return HttpError(f"the body isn't an Arrow IPC stream: {error}", code="invalid_body")


def _check_messages(body: bytes, rows_max: int) -> int:
    """Add up the sizes in the messages' headers, before any message is decoded; return as `work_bytes`."""
    rows = values = size = 0
    is_nested = False
    reader = ipc.MessageReader.open_stream(pa.py_buffer(body))
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            break
        if message.type == "schema":
            schema = ipc.read_schema(message)
            if len(schema) > COLUMNS_MAX:
                raise too_large("its columns", len(schema), COLUMNS_MAX)
            is_nested = is_nested or any(_is_nested(field.type) for field in schema)
            continue
        head = _BatchHead(message.metadata.to_pybytes(), message.body)
        rows += 0 if head.is_dictionary else head.rows
        values += sum(head.lengths())
        size += head.size_bytes()
        if rows > rows_max:
            raise too_large("its rows", rows, rows_max)
        if values > _VALUES_MAX:
            raise too_large("its values", values, _VALUES_MAX)
        if size > _BODY_BYTES_MAX:
            raise too_large("its rows' bytes", size, ROWS_BYTES_MAX)
    return size + (values * _NESTED_WORK_BYTES if is_nested else 0)


def _is_nested(kind: pa.DataType) -> bool:
    return _is_nested(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else bool(pa.types.is_nested(kind))


class _BatchHead:
    """The header of a RecordBatch or DictionaryBatch message, in flatbuffers as Arrow's Message.fbs lays it out.

    Raises `struct.error`, `ValueError` or `IndexError` if it isn't one.
    """

    def __init__(self, metadata: bytes, body: pa.Buffer) -> None:
        self._data = metadata
        self._body = memoryview(body) if body is not None else memoryview(b"")
        message = self._uint(0)
        kind = self._field(message, 1)
        header = self._field(message, 2)
        if kind is None or header is None:
            raise ValueError("a message without a header")
        self.is_dictionary = metadata[kind] == _DICTIONARY_BATCH
        batch: int | None = self._follow(header)
        if self.is_dictionary:
            data = self._field(self._follow(header), 1)
            batch = None if data is None else self._follow(data)
        elif metadata[kind] != _RECORD_BATCH:
            raise ValueError("a message that is neither schema nor rows")
        if batch is None:
            raise ValueError("a dictionary without values")
        self._batch = batch
        length = self._field(batch, 0)
        self.rows = 0 if length is None else self._long(length)
        if self.rows < 0:
            raise ValueError("a batch with a negative row count")

    def lengths(self) -> Iterator[int]:
        """Yield the number of values of each array, including nested ones."""
        for place in self._structs(1):
            if (length := self._long(place)) < 0:
                raise ValueError("an array with a negative number of values")
            yield length

    def size_bytes(self) -> int:
        """Return the size of all buffers, decompressed."""
        is_compressed = self._field(self._batch, 3) is not None
        size = 0
        for place in self._structs(2):
            offset, length = self._long(place), self._long(place + 8)
            if length <= 0:
                continue
            inflated = length
            if is_compressed:
                (inflated,) = struct.unpack_from("<q", self._body, offset)
            size += length if inflated < 0 else inflated  # -1: this buffer is uncompressed
        return size

    def _structs(self, field: int) -> Iterator[int]:
        """Yield the places of a vector's structs of two longs."""
        found = self._field(self._batch, field)
        if found is None:
            return
        start = self._follow(found)
        count = self._uint(start)
        if start + 4 + count * 16 > len(self._data):
            raise ValueError("a vector beyond its message")
        for place in range(count):
            yield start + 4 + place * 16

    def _field(self, table: int, number: int) -> int | None:
        """Return the place of a table's field; None if it has its default."""
        (back,) = struct.unpack_from("<i", self._data, table)
        vtable = table - back
        if vtable < 0:
            raise ValueError("a table beyond its message")
        (size,) = struct.unpack_from("<H", self._data, vtable)
        if 4 + 2 * number >= size:
            return None
        (offset,) = struct.unpack_from("<H", self._data, vtable + 4 + 2 * number)
        return table + offset if offset else None

    def _follow(self, place: int) -> int:
        return place + self._uint(place)

    def _uint(self, place: int) -> int:
        return int(struct.unpack_from("<I", self._data, place)[0])

    def _long(self, place: int) -> int:
        return int(struct.unpack_from("<q", self._data, place)[0])


def _check_unfolded(field: pa.Field, column: pa.ChunkedArray) -> int:
    """Refuse a column that is larger than any append once expanded; return the bytes of its repeated values."""
    while isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    kind = column.type
    if pa.types.is_nested(kind) and not is_shared(kind):
        if not is_countable(kind, NESTING_MAX):
            raise InvalidValue(
                f"column {field.name}: its types are nested more than {NESTING_MAX} deep, or one of them may use a value many times "
                "(a view, a union, a dictionary, runs)",
                hint="Cast nested columns to structs, maps, lists and plain types before sending them.",
                column=field.name,
            )
        nested = sum(values_in(chunk) for chunk in column.chunks)
        if nested > _NESTED_VALUES_MAX:
            raise too_large(f"the nested values of column {field.name}", nested, _NESTED_VALUES_MAX)
        largest = max((int(np.max(python_bytes(chunk))) for chunk in column.chunks if len(chunk)), default=0)
        if largest > _NESTED_BYTES_MAX:
            raise too_large(f"the bytes of a value of column {field.name}, in memory,", largest, _NESTED_BYTES_MAX)
        return 0
    size = sum(_unfolded_bytes(chunk) for chunk in column.chunks)
    if size > ROWS_BYTES_MAX:
        raise too_large(f"the bytes of column {field.name}, written out,", size, ROWS_BYTES_MAX)
    return size


def _unfolded_bytes(array: pa.Array) -> int:
    """Return the expanded size of a column that repeats values; 0 for others."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        sizes = _sizes(array.dictionary)
        indices = array.indices.drop_null().to_numpy(zero_copy_only=False)
        return int(sizes[indices].sum()) if len(sizes) else 0
    if pa.types.is_run_end_encoded(kind):
        runs = np.diff(np.concatenate([[0], array.run_ends.to_numpy(zero_copy_only=False).astype(np.int64)]))
        return int((runs * _sizes(array.values)).sum())
    return int(_sizes(array).sum()) if is_view(kind) else 0


def _sizes(values: pa.Array) -> Sizes:
    """Return each value's bytes."""
    kind = values.type
    if is_view(kind):
        # A view begins with its length, also if it contains the text.
        views = np.frombuffer(values.buffers()[1], dtype="<i4")[::4][values.offset : values.offset + len(values)]
        sizes: Sizes = views.astype(np.int64) * values.is_valid().to_numpy(zero_copy_only=False)
        return sizes
    texts = text_bytes(values)
    if texts is not None:
        return texts
    if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind):
        return np.full(len(values), max(1, kind.bit_width // 8), dtype=np.int64)
    raise InvalidValue(f"values of {kind} can't be shared between rows", hint="Cast the column to a plain type first.")
