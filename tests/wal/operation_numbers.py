"""A reader that knows operations' numbers only, as programs did before batches had their own numbers.

It reads sealed segments by docs/internals/FORMAT.md, without any code of Millstream's. From a frame it
takes the operations with their `seq`, and never looks at the batches' `first_seq`. It refuses frames
whose flag says that operations have no numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import ipc

OPERATION_NUMBERS, KNOWN_FLAGS = 2, 7
SCHEMA, RECORDS = 1, 2


class Refused(Exception):
    """A frame that this reader can't read."""


class Found(NamedTuple):
    """One record."""

    group: int
    operation: int
    """The operation's number."""
    index: int
    table: int
    facts: dict[str, Any]
    """The operation's columns, and the record's own."""

    @property
    def seq(self) -> int:
        return self.operation + self.index


def read_segment(data: bytes) -> Iterator[Found]:
    """Yield the records of a sealed segment."""
    schemas_at = 104
    operations_length, batches_length = struct.unpack_from("<II", data, 96)
    of_operations = ipc.read_schema(pa.py_buffer(data[schemas_at : schemas_at + operations_length]))
    batches_at = schemas_at + operations_length
    of_batches = ipc.read_schema(pa.py_buffer(data[batches_at : batches_at + batches_length]))
    assert data.endswith(b"MILLEND\n")
    end = len(data) - 64 - struct.unpack_from("<I", data, len(data) - 60)[0]
    tables: dict[tuple[int, int], pa.Schema] = {}
    position = 4096
    while position < end:
        length, _, head_length, version, kind, flags = struct.unpack_from("<IIIBBH", data, position)
        if version != 2 or flags & ~KNOWN_FLAGS or not flags & OPERATION_NUMBERS:
            raise Refused(f"version {version}, flags {flags}")
        (group,) = struct.unpack_from("<q", data, position + 64)
        shards, sources = struct.unpack_from("<HH", data, position + 100)
        count, operations_size, batches_size = struct.unpack_from("<III", data, position + 104)
        parts = list(
            struct.iter_unpack("<qIIII", data[(at := position + 116 + 4 * shards + 12 * sources) : at + 24 * count])
        )
        head_end = behind = position + head_length
        messages = head_end - batches_size - operations_size
        if kind == SCHEMA:
            table, table_version, _, size, _ = parts[0]
            tables[table, table_version] = ipc.read_schema(pa.py_buffer(data[behind : behind + size]))
        elif kind == RECORDS:
            first, second = data[messages : head_end - batches_size], data[head_end - batches_size : head_end]
            operations = ipc.read_record_batch(pa.py_buffer(first), of_operations).to_pylist()
            batches = ipc.read_record_batch(pa.py_buffer(second), of_batches)
            batches = batches.select(["operation", "table_id", "schema_version", "count"]).to_pylist()
            for table, table_version, _, size, _ in parts:
                rows = ipc.read_record_batch(pa.py_buffer(data[behind : behind + size]), tables[table, table_version])
                behind += size
                mine = [b for b in batches if (b["table_id"], b["schema_version"]) == (table, table_version)]
                of_rows = [operations[b["operation"]] for b in mine for _ in range(b["count"])]
                for operation, row in zip(of_rows, rows.to_pylist(), strict=True):
                    yield Found(
                        group, operation["seq"], row["__index"], table, {"xid": operation["xid"], "text": row["text"]}
                    )
        position += length


def read_log(segments: dict[str, list[str]], read: Callable[[str], bytes]) -> list[Found]:
    """Return a whole log's records, by operation, then by index; `segments` lists each shard's segments in order."""
    found = [record for paths in segments.values() for path in paths for record in read_segment(read(path))]
    return sorted(found, key=lambda record: (record.operation, record.index))
