"""Files of an Iceberg table: their facts as manifests have them, and as the lake reads them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntry, ManifestEntryStatus
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, PrimitiveType, TimestampType, TimestamptzType

from millstream.lake.iceberg.columns import arrow_type

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.schema import Schema
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

    from millstream.lake.data_files import NewFile

_ENTRIES_MAX: Final = 50_000
"""Entries of manifests that a process remembers, some 50 MB; a manifest never changes."""
_TRUTHS: Final = ("false", "true")
_EPOCH: Final = date(1970, 1, 1)
_known: OrderedDict[str, list[ManifestEntry]] = OrderedDict()
_lock: Final = Lock()


def entries_of(snapshot: Snapshot | None, io: FileIO) -> list[ManifestEntry]:
    """Return the live entries of a snapshot."""
    if snapshot is None:
        return []
    return [
        entry
        for manifest in snapshot.manifests(io)
        for entry in _entries(manifest, io)
        if entry.status != ManifestEntryStatus.DELETED
    ]


def removed_by(snapshot: Snapshot, io: FileIO) -> list[str]:
    """Return the addresses of the files that a snapshot removed."""
    return [
        entry.data_file.file_path
        for manifest in snapshot.manifests(io)
        if manifest.added_snapshot_id == snapshot.snapshot_id and manifest.deleted_files_count
        for entry in _entries(manifest, io)
        if entry.status == ManifestEntryStatus.DELETED
    ]


def _entries(manifest: ManifestFile, io: FileIO) -> list[ManifestEntry]:
    entries = _known.get(manifest.manifest_path)
    if entries is None:
        entries = manifest.fetch_manifest_entry(io, discard_deleted=False)
        with _lock:
            _known[manifest.manifest_path] = entries
            while len(_known) > 1 and sum(map(len, _known.values())) > _ENTRIES_MAX:
                _known.popitem(last=False)
    return entries


def data_file(file: NewFile, location: str, metadata: TableMetadata, schema: Schema) -> DataFile:
    """Return a new file as a commit adds it."""
    # Decimals keep all digits.
    facts = json.loads(file.stats, parse_float=Decimal)
    fields = {field.name: field for field in schema.fields}
    bounds: dict[str, dict[int, bytes]] = {}
    for which in ("minValues", "maxValues"):
        bounds[which] = {
            fields[name].field_id: _to_bytes(fields[name].field_type, value) for name, value in facts[which].items()
        }
    spec = metadata.spec()
    made = DataFile.from_args(
        _table_format_version=2,
        content=DataFileContent.DATA,
        file_path=f"{location}/{file.path}",
        file_format=FileFormat.PARQUET,
        partition=Record(*(_partition_value(value) for value in file.partition.values())),
        record_count=file.rows,
        file_size_in_bytes=file.size_bytes,
        column_sizes=None,
        value_counts=dict.fromkeys((fields[name].field_id for name in facts["nullCount"]), file.rows),
        null_value_counts={fields[name].field_id: count for name, count in facts["nullCount"].items()},
        nan_value_counts=None,
        lower_bounds=bounds["minValues"],
        upper_bounds=bounds["maxValues"],
        key_metadata=None,
        split_offsets=None,
        equality_ids=None,
        sort_order_id=None,
    )
    made.spec_id = spec.spec_id
    return made


def _partition_value(value: str | None) -> int | bool | str | None:
    """Return a day, a truth value or a word as a manifest has it; these alone partition tables here."""
    if value in _TRUTHS:
        return value == "true"
    if value is None or value.isalpha():
        return value
    return (date.fromisoformat(value) - _EPOCH).days


def flat_files(entries: Sequence[ManifestEntry], location: str, schema: Schema, partitions: Sequence[str]) -> pa.Table:
    """Return files as `OpenTable.files` has them."""
    files = [entry.data_file for entry in entries]
    columns: dict[str, pa.Array] = {
        "path": pa.array([file.file_path.removeprefix(f"{location}/") for file in files], pa.string()),
        "size_bytes": pa.array([file.file_size_in_bytes for file in files], pa.int64()),
        "num_records": pa.array([file.record_count for file in files], pa.int64()),
    }
    for field in schema.fields:
        kind = field.field_type
        if not isinstance(kind, PrimitiveType):
            continue
        shape = arrow_type(kind)
        for name, bounds in (
            ("min", [file.lower_bounds for file in files]),
            ("max", [file.upper_bounds for file in files]),
        ):
            values = [_from_bytes(kind, (known or {}).get(field.field_id)) for known in bounds]
            if any(value is not None for value in values):
                columns[f"{name}.{field.name}"] = pa.array(values, shape)
        nulls = [(file.null_value_counts or {}).get(field.field_id) for file in files]
        if any(count is not None for count in nulls):
            columns[f"null_count.{field.name}"] = pa.array(nulls, pa.int64())
    for place, partition in enumerate(partitions):
        values = [_shown(file.partition[place]) for file in files]
        columns[f"partition.{partition}"] = pa.array(values, pa.string())
    return pa.table(columns)


def addresses(entries: Iterable[ManifestEntry], location: str) -> Mapping[str, DataFile]:
    """Return files by their path within the table's folder."""
    return {entry.data_file.file_path.removeprefix(f"{location}/"): entry.data_file for entry in entries}


def _shown(value: Any) -> str | None:
    """Return a partition's value as the folder's name has it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return _TRUTHS[value]
    if isinstance(value, str):
        return value
    return (value if isinstance(value, date) else _EPOCH + timedelta(days=value)).isoformat()


def _to_bytes(kind: Any, value: Any) -> bytes:
    """Return a bound from the statistics of a new file, as a manifest has it."""
    match kind:
        case DateType():
            value = (date.fromisoformat(value) - _EPOCH).days
        case TimestampType() | TimestamptzType():
            moment = datetime.fromisoformat(value).replace(tzinfo=None) - datetime(1970, 1, 1)  # noqa: DTZ001 - in UTC, or local
            value = (moment.days * 86_400 + moment.seconds) * 1_000_000 + moment.microseconds
        case _ if isinstance(value, int) and "decimal" in str(kind):
            value = Decimal(value)
        case _:
            pass
    return to_bytes(kind, value)


def _from_bytes(kind: PrimitiveType, raw: bytes | None) -> Any:
    return None if raw is None else from_bytes(kind, raw)
