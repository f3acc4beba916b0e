"""A log as Arrow files, without loss: `log_import` restores the log from them, and any Arrow reader gets tables.

    DIR/operations.arrow                              a row for each operation, in order: what its records have in common
    DIR/<schema>.<table>-t<id>-v<version>-s<shard>.arrow   the records of one table, under one version of its schema, on one shard;
                                                      of a partitioned table one file a partition (…-p<number>.arrow)
    DIR/export.json                                   written last: what belongs to it, with sizes and checksums

Operations are numbered in the log's order (`number`). Records have their operation's number (`__operation`), and are in
its order. All files are Arrow IPC (Feather v2), LZ4. Memory is bounded by a frame, and by the directories of a commit
group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import ipc

from millstream.codec.checksums import crc32c
from millstream.codec.log_frame import RecordsFrame
from millstream.errors import CorruptFrame, CorruptWal, LogError, UsageError
from millstream.lake.layout import folder_of
from millstream.model.ids import SchemaVersion, ShardId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind
from millstream.model.positions import Seq
from millstream.model.records import LOG_ROW_PREFIX, RECORD_OFFSET, record_prefix
from millstream.model.schema import TableSchema
from millstream.private_files import replacing
from millstream.wal.reader import StreamReader

EXPORT_VERSION: Final = 1
EXPORT_FILE: Final = "export.json"
OPERATIONS_FILE: Final = "operations.arrow"
ORDINAL: Final = pa.field("__operation", pa.int64(), nullable=False)
_COUNTS: Final = pa.list_(pa.struct([("shard", pa.int32()), ("table_id", pa.int64()), ("records", pa.int64())]))
EXPORTED_OPERATION: Final = pa.schema(
    [pa.field("number", pa.int64(), nullable=False), *OPERATION_SCHEMA, pa.field("counts", _COUNTS, nullable=False)]
)
_OPTIONS: Final = ipc.IpcWriteOptions(compression="lz4")
_OPERATIONS_A_BATCH: Final = 10_000
_SHARDS_MAX: Final = 100_000
"""Their folders have five digits."""
_INT64_END: Final = 1 << 63
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _ExportedOperation:
    """One operation of a commit group, over its shards."""

    facts: dict[str, Any]
    first_seq: int
    number: int = -1
    counts: dict[tuple[ShardId, TableId], int] = field(default_factory=dict)


_FileKey = tuple[ShardId, TableId, SchemaVersion, str | None]


@dataclass(slots=True)
class _Placed:
    """A frame, with the operation of each entry of its directory."""

    frame: RecordsFrame
    operations: list[_ExportedOperation]


def exported_rows(schema: TableSchema) -> pa.Schema:
    """Return the schema of a table's file: operation, offset, index, and then what every reader gets."""
    return schema.to_arrow((ORDINAL, RECORD_OFFSET, LOG_ROW_PREFIX[1], *record_prefix(schema)))


def export_arrow(
    reader: StreamReader,
    folder: Path,
    *,
    stream: str,
    after: Seq,
    upto: Seq,
    tables: frozenset[TableId] | None = None,
    catalog: Mapping[str, Any] | None = None,
) -> int:
    """Write the operations with numbers in `(after, upto]` to a folder; return how many records.

    Args:
        folder: made; must be empty.
        tables: only their records.
        catalog: the home's facts of sources and tables, JSON-able.

    Raises:
        UsageError: the folder isn't empty.
        CorruptWal: the log is damaged. The written files have no `export.json`, and are no export.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"{folder} holds something already", hint="Name a folder that is new, or empty.")
    writer = _Writer(folder, tables)
    reached: dict[str, int] = {}
    is_whole = tables is None and after < reader.first_seq()
    try:
        for group in reader.read_groups(after, upto):
            if is_whole:  # a partial log has reached no source position
                reached.update({str(source): int(lsn) for source, lsn in group[-1].header.reached.items()})
            writer.write_group(group)
        files = writer.close()
    except CorruptFrame as error:
        writer.abandon()
        raise CorruptWal(f"the log is damaged: {error.message}; {folder} isn't whole") from error
    except BaseException:
        writer.abandon()
        raise
    facts = {
        "format": "millstream-export",
        "version": EXPORT_VERSION,
        "stream": stream,
        "stream_id": str(reader.stream_id),
        "after": int(after),
        "upto": int(upto),
        "operations": writer.operations,
        "records": writer.records,
        "reached": reached,
        "sources": sorted(writer.sources),
        "catalog": dict(catalog or {}),
        "files": files,
    }
    with replacing(folder / EXPORT_FILE, private=False) as out:
        out.write(json.dumps(facts, indent=1).encode())
    return writer.records


class _Writer:
    def __init__(self, folder: Path, tables: frozenset[TableId] | None) -> None:
        self._folder = folder
        self._tables = tables
        self._files: dict[_FileKey, tuple[str, ipc.RecordBatchFileWriter]] = {}
        self._rows: dict[str, int] = {}
        self._waiting: list[dict[str, Any]] = []
        self._out = ipc.new_file(str(folder / OPERATIONS_FILE), EXPORTED_OPERATION, options=_OPTIONS)
        self.operations = 0
        self.records = 0
        self.sources: set[int] = set()

    def write_group(self, group: Sequence[RecordsFrame]) -> None:
        """Number a commit group's operations, and write their records."""
        placed = _place(group)
        operations = list({id(op): op for found in placed for op in found.operations}.values())
        for operation in sorted(operations, key=lambda op: op.first_seq):
            if self._tables is not None:
                operation.counts = {key: n for key, n in operation.counts.items() if key[1] in self._tables}
            if not operation.counts:
                continue
            self.sources.add(operation.facts["source"])
            operation.number = self.operations
            self.operations += 1
            counts = [{"shard": s, "table_id": t, "records": n} for (s, t), n in operation.counts.items()]
            self._waiting.append({"number": operation.number, **operation.facts, "counts": counts})
        if len(self._waiting) >= _OPERATIONS_A_BATCH:
            self._write_operations()
        for found in placed:
            self._write_frame(found)

    def close(self) -> list[dict[str, Any]]:
        """Finish the files; return their entries in `export.json`."""
        self._write_operations()
        self._out.close()
        self._rows[OPERATIONS_FILE] = self.operations
        keys: dict[str, dict[str, Any]] = {OPERATIONS_FILE: {}}
        for (shard, table, version, partition), (name, out) in self._files.items():
            out.close()
            keys[name] = {"shard": shard, "table_id": table, "schema_version": version}
            if partition is not None:
                keys[name]["partition"] = partition
        return [
            {"name": name, "rows": self._rows[name], **file_facts(self._folder / name), **key}
            for name, key in keys.items()
        ]

    def abandon(self) -> None:
        """Close open files, after a failure."""
        for out in (self._out, *(out for _, out in self._files.values())):
            out.close()

    def _write_operations(self) -> None:
        if self._waiting:
            self._out.write_batch(pa.RecordBatch.from_pylist(self._waiting, schema=EXPORTED_OPERATION))
            self._waiting = []

    def _write_frame(self, found: _Placed) -> None:
        frame = found.frame
        numbers = np.array([op.number for op in found.operations], dtype=np.int64)
        of_batch, counts, tables, versions = (
            frame.batches.column(name).to_numpy() for name in ("operation", "count", "table_id", "schema_version")
        )
        for part in frame.header.parts:
            if self._tables is not None and part.table_id not in self._tables:
                continue
            mine = (tables == part.table_id) & (versions == part.schema_version)
            schema = frame.schemas.find(part.table_id, part.schema_version)
            rows = frame.log_rows(part.table_id, part.schema_version)
            records = frame.as_records(schema, rows)
            ordinals = pa.array(np.repeat(numbers[of_batch[mine]], counts[mine]))
            target = exported_rows(schema)
            columns = [ordinals, rows.column("__offset"), rows.column("__index"), *records.columns]
            batch = pa.RecordBatch.from_arrays(columns, schema=target)
            partitions = frame.batches.column("partition").filter(pa.array(mine))
            for partition, rows_of in _by_partition(batch, partitions, counts[mine]):
                name, out = self._file((frame.header.shard, schema.table_id, schema.version, partition), schema, target)
                out.write_batch(rows_of)
                self._rows[name] = self._rows.get(name, 0) + rows_of.num_rows
            self.records += batch.num_rows

    def _file(self, key: _FileKey, schema: TableSchema, target: pa.Schema) -> tuple[str, ipc.RecordBatchFileWriter]:
        if key not in self._files:
            shard, table_id, version, partition = key
            self.sources.add(schema.source)
            name = f"{folder_of(schema)}-t{table_id}-v{version}-s{shard}"
            name += ".arrow" if partition is None else f"-p{len(self._files)}.arrow"
            self._files[key] = (name, ipc.new_file(str(self._folder / name), target, options=_OPTIONS))
        return self._files[key]


def _by_partition(
    batch: pa.RecordBatch, partitions: pa.StringArray, counts: Ints
) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """Yield the rows of each partition, in their order.

    `partitions` and `counts` are those of the batches that they came in.
    """
    if partitions.null_count == len(partitions):
        yield None, batch
        return
    names = partitions.to_pylist()
    for name in dict.fromkeys(names):
        yield name, batch.filter(pa.array(np.repeat([other == name for other in names], counts)))


def _place(group: Sequence[RecordsFrame]) -> list[_Placed]:
    """Return the operations of a group's frames: one that continues in the next frame, or on another shard, is one."""
    known: dict[tuple[Any, ...], _ExportedOperation] = {}
    placed: list[_Placed] = []
    before: _Placed | None = None
    for frame in group:
        facts = frame.operations.to_pylist()
        batches = frame.batches.to_pydict()
        firsts: dict[int, int] = {}
        for operation, first in zip(batches["operation"], batches["first_seq"], strict=True):
            firsts[operation] = min(first, firsts.get(operation, first))
        operations: list[_ExportedOperation] = []
        for ordinal, of in enumerate(facts):
            identity = _identity(of)
            found = known.get(identity) if identity is not None else None
            if found is None and identity is None and ordinal == 0:
                found = _goes_on(before, frame, of)
            if found is None:
                found = _ExportedOperation(of, firsts[ordinal])
                if identity is not None:
                    known[identity] = found
            found.first_seq = min(found.first_seq, firsts[ordinal])
            operations.append(found)
        for operation, table, count in zip(batches["operation"], batches["table_id"], batches["count"], strict=True):
            key = (frame.header.shard, TableId(table))
            counts = operations[operation].counts
            counts[key] = counts.get(key, 0) + count
        before = _Placed(frame, operations)
        placed.append(before)
    return placed


def _identity(facts: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what distinguishes an operation from all others of its group; None for an append without an identity."""
    named = facts["session"], facts["session_number"], facts["idempotency_key"]
    if facts["kind"] == OperationKind.APPEND and named == (None, None, None):
        return None
    return (facts["kind"], facts["source"], facts["commit_lsn"], facts["xid"], facts["chunk_id"], *named)


def _goes_on(before: _Placed | None, frame: RecordsFrame, facts: Mapping[str, Any]) -> _ExportedOperation | None:
    """Return the operation at the end of the previous frame, if this frame begins with the rest of it."""
    if before is None or before.frame.header.shard != frame.header.shard or before.operations[-1].facts != facts:
        return None
    last, first = _indexes(before.frame, len(before.operations) - 1), _indexes(frame, 0)
    return before.operations[-1] if max(last) < min(first) else None


def _indexes(frame: RecordsFrame, operation: int) -> list[int]:
    """Return the indexes of the records that one operation has in a frame."""
    found: list[int] = []
    for part in frame.header.parts:
        at = 0
        rows = frame.log_rows(part.table_id, part.schema_version).column("__index")
        for entry in frame.batches.to_pylist():
            if (entry["table_id"], entry["schema_version"]) == (part.table_id, part.schema_version):
                if entry["operation"] == operation:
                    found += rows.slice(at, entry["count"]).to_pylist()
                at += entry["count"]
    return found


def file_facts(path: Path) -> dict[str, int]:
    """Return a file's size and checksum."""
    crc = size = 0
    with path.open("rb") as data:
        while piece := data.read(1 << 20):
            crc = crc32c(crc.to_bytes(4, "little"), piece)
            size += len(piece)
    return {"size_bytes": size, "chained_crc32c": crc}


def read_export(folder: Path) -> dict[str, Any]:
    """Return an export's facts, after all of its files have been checked against them.

    Raises:
        LogError (`export_unusable`): it is incomplete, isn't an export, or a newer Millstream wrote it.
    """
    try:
        facts: dict[str, Any] = json.loads((folder / EXPORT_FILE).read_bytes())
        if facts["format"] != "millstream-export":
            raise ValueError("it is none of ours")
        if facts["version"] != EXPORT_VERSION:
            raise LogError(
                f"{folder} is an export of version {facts['version']}; this Millstream reads {EXPORT_VERSION}",
                code="export_unusable",
                hint="Import it with the version that wrote it, or a later one.",
            )
        _check_facts(facts)
        for file in facts["files"]:
            path = folder / file["name"]
            if path.parent != folder or file_facts(path) != {k: file[k] for k in ("size_bytes", "chained_crc32c")}:
                raise LogError(
                    f"{path} differs from the export's description: it was changed or truncated",
                    code="export_unusable",
                    file=str(path),
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LogError(f"{folder} holds no whole export: {error}", code="export_unusable", file=str(folder)) from error
    return facts


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Raise `ValueError`, `TypeError` or `KeyError` unless an import's facts are there, and of their types."""
    _check_types(facts, {"stream": str, "records": int, "reached": dict, "catalog": dict, "files": list})
    _check_types(facts["reached"], dict.fromkeys(facts["reached"], int))
    for source in (*facts.get("sources", ()), *map(int, facts["reached"])):
        _check_types({"source": source}, {"source": int})
    for file in facts["files"]:
        _check_types(file, {"name": str} if file["name"] == OPERATIONS_FILE else {"name": str, "shard": int})
        if not 0 <= file.get("shard", 0) < _SHARDS_MAX or not isinstance(file.get("partition", ""), str):
            raise ValueError(f"{file['name']} is of no shard or partition that there can be")
    if OPERATIONS_FILE not in (file["name"] for file in facts["files"]):
        raise ValueError(f"{OPERATIONS_FILE} isn't among its files")
    for source in facts["catalog"].get("sources", []):
        _check_types(source, {"id": int, "system_identifier": int, "database": str, "timeline": int})
    for table in facts["catalog"].get("tables", []):
        _check_types(table, {"id": int, "state": str, "reason": str})


def _check_types(facts: Mapping[str, Any], types: Mapping[str, type]) -> None:
    if not isinstance(facts, dict):
        raise TypeError(f"{facts!r} isn't an object")
    for name, of in types.items():
        if type(facts[name]) is not of or (of is int and not -_INT64_END <= facts[name] < _INT64_END):
            raise ValueError(f"{name} can't be {facts[name]!r}")


def check_columns(path: Path, found: pa.Schema, needed: pa.Schema) -> None:
    """Raise `export_unusable` if a file lacks a column, or has one of another type."""
    for column in needed:
        place = found.get_field_index(column.name)
        if place < 0 or found.field(place).type != column.type:
            raise LogError(
                f"{path} has no column {column.name} of type {column.type}", code="export_unusable", file=str(path)
            )


def batches_of(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the file of operations, one at a time. `export_unusable` if it is none."""
    try:
        with pa.OSFile(str(path)) as source:
            reader = ipc.open_file(source)
            check_columns(path, reader.schema, EXPORTED_OPERATION)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
    except (pa.ArrowException, OSError) as error:
        raise LogError(f"{path} can't be read: {error}", code="export_unusable", file=str(path)) from error
