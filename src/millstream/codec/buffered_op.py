"""An operation as bytes, as write buffers keep it: decoding gives back every value, type and null.

    start         magic "MSOP", CRC32C of the rest, version, flags, tables, sources reached, length of the operation row
    reached       for each source: its number, an LSN
    tables        for each entry: lengths of its schema, its rows and its partition's name
    operation     an Arrow record batch message of one row, under `OPERATION_COLUMNS` of the version
    entries       each: the partition's name (UTF-8), an Arrow schema message, a record batch message

Everything is little-endian, and Arrow's messages start at multiples of 8. A schema message holds
the table's id, name, key and the types of its columns (`TableSchema.to_arrow`). The shard isn't
encoded: it is the shard that stores the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa

from millstream.codec.arrow_ipc import decode_batch, decode_schema, encode_batch, encode_schema
from millstream.codec.checksums import Bytes, crc32c
from millstream.errors import CorruptFrame, InvalidValue, UnsupportedFormat
from millstream.model.ids import ShardId, SourceId
from millstream.model.operations import OPERATION_SCHEMA, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import INSTANT, LOG_ROW_PREFIX, OPERATION_ORDINAL, append_row_schema
from millstream.model.schema import TableSchema

MAGIC: Final = b"MSOP"
VERSION: Final = 1
OPERATION_COLUMNS: Final[Mapping[int, pa.Schema]] = MappingProxyType({1: OPERATION_SCHEMA})
"""The columns of an operation's row, by version. A new column makes a new version, and older versions stay."""

_START: Final = struct.Struct("<4sIBBHII4x")
_REACHED: Final = struct.Struct("<IQ")
_ENTRY: Final = struct.Struct("<IIi")
_TYPES: Final = frozenset({
    pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.binary(), pa.date32(),
    pa.timestamp("us"), INSTANT,
})  # fmt: skip
_NO_PARTITION: Final = -1
_NEVER_NULL: Final = tuple(field.name for field in (OPERATION_ORDINAL, *LOG_ROW_PREFIX[1:]) if not field.nullable)


def encode_op(op: WriteOps) -> bytes:
    """Encode one operation.

    Args:
        op: exactly one, with at least one row; `behind` isn't encoded, because it concerns only the sender.

    Raises:
        InvalidValue: it is none, or several.
    """
    tables = [table for table in op.tables if table.rows.num_rows]
    if op.operations.num_rows != 1 or not tables:
        raise InvalidValue(
            f"a write buffer takes one operation with rows at a time, and this is {op.operations.num_rows} with {op.row_count} rows"
        )
    operation = encode_batch(op.operations)
    pieces: list[Bytes] = [_REACHED.pack(source, lsn) for source, lsn in op.reached.items()]
    bodies: list[Bytes] = [operation]
    for table in tables:
        partition = None if table.partition is None else table.partition.encode()
        schema, rows = encode_schema(append_row_schema(table.schema)), encode_batch(table.rows)
        pieces.append(_ENTRY.pack(len(schema), len(rows), _NO_PARTITION if partition is None else len(partition)))
        bodies += [_padded(partition or b""), schema, rows]
    head = b"".join(bytes(piece) for piece in pieces)
    rest = b"".join((_padded(head), *(bytes(body) for body in bodies)))
    start = _START.pack(MAGIC, 0, VERSION, 0, len(tables), len(op.reached), len(operation))
    crc = crc32c(start[8:], rest)
    return b"".join((start[:4], struct.pack("<I", crc), start[8:], rest))


def decode_op(data: Bytes, shard: ShardId) -> WriteOps:
    """Decode an operation, with its rows on that shard.

    Raises:
        CorruptFrame, UnsupportedFormat: never a wrong operation.
    """
    view = memoryview(data)
    if len(view) < _START.size:
        raise CorruptFrame("the bytes end inside of an operation's start", code="truncated_frame")
    magic, crc, version, flags, n_tables, n_reached, n_operation = _START.unpack_from(view)
    if magic != MAGIC:
        raise CorruptFrame("no operation begins here")
    if crc != crc32c(view[8:]):
        raise CorruptFrame("an operation fails its checksum")
    if version not in OPERATION_COLUMNS or flags:
        raise UnsupportedFormat(f"version {version} of operations with flags {flags:#x} is unknown", version=version)
    taken = _ByteCursor(view, _START.size)
    head = _ByteCursor(taken.take(n_reached * _REACHED.size + n_tables * _ENTRY.size), 0)
    reached = {
        SourceId(s): Lsn(lsn) for s, lsn in _REACHED.iter_unpack(head.take(n_reached * _REACHED.size, pad=False))
    }
    entries = list(_ENTRY.iter_unpack(head.take(n_tables * _ENTRY.size, pad=False)))
    operations = decode_batch(taken.take(n_operation), OPERATION_COLUMNS[version])
    if operations.num_rows != 1:
        raise CorruptFrame(f"one operation was announced, {operations.num_rows} are there")
    tables = tuple(_decode_table(taken, entry, shard) for entry in entries)
    if taken.left or not tables:
        raise CorruptFrame("an operation's lengths contradict each other")
    return WriteOps(operations, tables, reached)


def _decode_table(taken: _ByteCursor, entry: tuple[int, int, int], shard: ShardId) -> TableRows:
    n_schema, n_rows, n_partition = entry
    partition = bytes(taken.take(max(n_partition, 0)))
    message = decode_schema(taken.take(n_schema))
    try:
        name = None if n_partition == _NO_PARTITION else partition.decode()
        schema = TableSchema.from_arrow(message)
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptFrame(f"an operation holds no table schema: {error!r}") from error
    if not message.equals(append_row_schema(schema)):
        raise CorruptFrame("an operation's schema differs from the one in its header")
    odd = [column.name for column in schema.columns if not _is_of_log(column.arrow)]
    if odd:
        raise CorruptFrame(f"columns of an operation are of types that no log has: {', '.join(odd)}")
    rows = decode_batch(taken.take(n_rows), append_row_schema(schema))
    if any(rows.column(name).null_count for name in _NEVER_NULL):
        raise CorruptFrame(f"a row of {schema.full_name} lacks its operation, index or op")
    if not rows.num_rows or (rows.column(0).to_numpy() != 0).any() or (np.diff(rows.column(1).to_numpy()) <= 0).any():
        raise CorruptFrame(f"the rows of {schema.full_name} aren't those of one operation, in their order")
    return TableRows(schema, rows, shard, name)


def _is_of_log(kind: pa.DataType) -> bool:
    """Whether a log has columns of that type; bytes from another encoder may have any."""
    if pa.types.is_list(kind):
        return _is_of_log(kind.value_type)
    return kind in _TYPES or pa.types.is_decimal128(kind)


class _ByteCursor:
    """Bytes taken off the front, piece by piece."""

    def __init__(self, view: memoryview, position: int) -> None:
        self._view = view
        self._position = position

    def take(self, length: int, *, pad: bool = True) -> memoryview:
        """Take the next bytes; the piece behind them begins at a multiple of 8."""
        end = self._position + length
        if end > len(self._view):
            raise CorruptFrame("an operation's lengths contradict its size")
        piece = self._view[self._position : end]
        self._position = end + (-length % 8 if pad else 0)
        return piece

    @property
    def left(self) -> bool:
        """Whether anything but exactly everything was taken."""
        return self._position != len(self._view)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
