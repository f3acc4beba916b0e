"""The Parquet files of a lake's tables: written here, listed, read and replaced.

Millstream writes the files itself and leaves their commit to the table's format. delta-rs (1.6) truncates the bounds
that it records of a file's values, and can't write files in several processes for one commit. Bounds recorded here
are exact, and cover only the columns that the table declares (`OpenTable.bounded`). Files are read one by
one when that starts sooner than a dataset, which imports pandas if it is installed.
"""

from __future__ import annotations

import re
import secrets
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError

from millstream.errors import LakeConflict, LakeUnavailable
from millstream.lake.file_statistics import ColumnBounds
from millstream.lake.layout import LakeLayout
from millstream.lake.store_errors import lake_errors, plain_text, store_error
from millstream.lake.table_format import Commit, OpenTable, format_of, open_table
from millstream.model.addresses import IN_CATALOG, mask_address
from millstream.model.column_renames import FilledNames
from millstream.model.ids import TableId

ROW_GROUP_ROWS: Final = 1 << 16
"""Small enough that a look-up by key reads little, large enough to compress well."""
UNCOMMITTED_S_MAX: Final = 3_600.0
"""Maintenance takes a file that isn't committed for abandoned at this age: no write of ours keeps one for as long."""
FIELD_ID: Final = b"PARQUET:field_id"
"""The key under which a column of Arrow has the id that its file gives it."""
_SAMPLE_ROWS: Final = 4096
_REPLACE_TRIES: Final = 20
_SLASH: Final = "/"
_TABLE: Final = re.compile(r"(?:part|v[0-9]{20})-t([0-9]+)-")


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that was written and isn't committed yet. A value: crosses processes."""

    path: str
    """Path within the table's folder."""
    size_bytes: int
    rows: int
    stats: str
    """Statistics as Delta has them, JSON."""
    partition: dict[str, str | None] = field(default_factory=dict)
    field_ids: dict[str, int] = field(default_factory=dict)
    """Ids of the file's columns by name, if the table's format has ids."""
    null_decimals: frozenset[str] = frozenset()
    """Decimals of which the file has nulls. A key's decimal is null for a NaN, which its type can't hold."""


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A file of a table, with its log's facts about one column."""

    path: str
    """Path within the table's folder."""
    rows: int
    size_bytes: int
    low: Any
    """The column's least value; None if the log has none."""
    high: Any


def files_of(opened: OpenTable, column: str) -> list[LiveFile]:
    """Return a table's live files with the facts about one column."""
    actions = opened.files()
    names = ("path", "num_records", "size_bytes", f"min.{column}", f"max.{column}")
    columns = [
        actions.column(name).to_pylist() if name in actions.column_names else [None] * actions.num_rows
        for name in names
    ]
    return [
        LiveFile(path, rows or 0, size or 0, low, high) for path, rows, size, low, high in zip(*columns, strict=True)
    ]


def storage_of(layout: LakeLayout, path: str) -> pafs.FileSystem:
    """Return the file system whose root is a table's folder."""
    return format_of(layout).storage(layout, path)


def local_folder(layout: LakeLayout) -> Path | None:
    """Return the folder of this machine in which a lake lies; None if it lies in an object store.

    Raises:
        LakeUnavailable: the catalog that says where it lies doesn't answer.
    """
    if "://" not in layout.location:
        return Path(layout.location)
    storage = storage_of(layout, layout.location) if layout.location == IN_CATALOG else None
    return Path(storage.base_path) if storage is not None and _is_local(storage) else None


def probe_storage(layout: LakeLayout) -> None:
    """Write a test file into the lake's object store, read it and delete it.

    Raises:
        LakeUnavailable: one of the steps failed, under its own code for keys, rights and the bucket; details: path, step.
    """
    name, step = f".millstream-probe-{secrets.token_hex(8)}", "written"
    said = pa.table({"written_by": ["millstream doctor"]})
    try:
        storage = storage_of(layout, layout.location)
        with storage.open_output_stream(name) as sink:
            pq.write_table(said, sink)
        step = "read"
        with storage.open_input_file(name) as handle, pq.ParquetFile(handle) as file:
            found = file.read()
        step = "deleted"
        storage.delete_file(name)
    except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
        raise store_error(layout.location, error) or _unfit(layout, step, plain_text(error)) from error
    if not found.equals(said):
        raise _unfit(layout, "read", "something else came back")


def _unfit(layout: LakeLayout, step: str, why: str) -> LakeUnavailable:
    return LakeUnavailable(
        f"{mask_address(layout.location)}: an object can't be {step}: {why}",
        hint="Check `location` and `storage_options` of the lake (`AWS_ENDPOINT_URL`, and `AWS_ALLOW_HTTP` without TLS), and that "
        "the credentials may write, read and delete there.",
        path=layout.location,
        step=step,
    )


def remove_folder(layout: LakeLayout, path: str) -> None:
    """Delete a table's folder with everything in it; does nothing if there is none."""
    with lake_errors(path):
        if "://" not in path:
            shutil.rmtree(path, ignore_errors=True)
            return
        storage = storage_of(layout, path)
        for info in storage.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True)):
            if info.is_file:
                storage.delete_file(info.path)


def erase_folder(layout: LakeLayout, path: str) -> None:
    """Delete a folder as `remove_folder` does; raise `OSError` if a file of it can't be deleted."""
    if "://" in path:
        remove_folder(layout, path)
        return
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def folders_in(layout: LakeLayout, path: str) -> list[str]:
    """Return the names of the folders in one; none if it doesn't exist."""
    with lake_errors(path):
        found = storage_of(layout, path).get_file_info(pafs.FileSelector("", allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)


class TableFiles:
    """Writes new files of one table, and reads its existing ones."""

    def __init__(
        self, layout: LakeLayout, path: str, bounded: Sequence[str] = (), renamed: FilledNames | None = None
    ) -> None:
        """See the class.

        Args:
            path: the table's folder.
            bounded: `boundable` columns, whose lowest and greatest values are recorded with each file.
            renamed: the names that the table's columns had before the commit of new files.
        """
        self._storage = storage_of(layout, path)
        self._path = path
        self._bounded = tuple(bounded)
        self._layout = layout
        self._format = format_of(layout)
        self._renamed = renamed
        self._stored: dict[pa.Schema, pa.Schema] = {}

    def write(
        self, rows: Iterable[pa.RecordBatch] | pa.Table, schema: pa.Schema, name: str, *, partition: str = ""
    ) -> NewFile:
        """Write one file.

        Args:
            rows: in `schema`.
            schema: of the file: the table's columns without its partition columns.
            name: the file's name, unique in the table.
            partition: `column=value` for a partitioned table's folder.
        """
        folder = f"{partition}{_SLASH}" if partition else ""
        batches = iter(rows.to_batches() if isinstance(rows, pa.Table) else rows)
        first = next((batch for batch in batches if batch.num_rows), None)
        bounds = ColumnBounds([schema.field(n) for n in self._bounded if schema.get_field_index(n) >= 0])
        stored = self._stored.get(schema)
        if stored is None:
            stored = self._stored[schema] = self._format.file_columns(self._layout, self._path, schema, self._renamed)
        filled = [field.name for field in stored if not field.nullable]
        decimals = [field.name for field in stored if pa.types.is_decimal(field.type)]
        null_decimals = set[str]()
        with lake_errors(self._path):
            if partition and _is_local(self._storage):
                self._storage.create_dir(partition, recursive=True)
            with self._storage.open_output_stream(folder + name) as sink:
                with pq.ParquetWriter(
                    sink,
                    stored,
                    compression="zstd",
                    compression_level=1,
                    store_schema=False,
                    version="2.6",
                    **_encodings(schema, first),
                ) as writer:
                    count = 0
                    for batch in () if first is None else chain([first], batches):
                        if batch.num_rows:
                            assert not any(batch.column(name).null_count for name in filled), "of no such type"
                            null_decimals.update(name for name in decimals if batch.column(name).null_count)
                            renamed = (
                                batch if stored is schema else pa.RecordBatch.from_arrays(batch.columns, schema=stored)
                            )
                            writer.write_batch(renamed, row_group_size=ROW_GROUP_ROWS)
                            bounds.note(batch)
                            count += batch.num_rows
                # Asking the store for it would take a listing and another request.
                size = sink.tell()
        column, _, value = partition.partition("=")
        placed: dict[str, str | None] = {column: value} if column else {}
        ids, nulls = _field_ids(stored), frozenset(null_decimals)
        return NewFile(folder + name, int(size), count, bounds.stats(count), placed, ids, nulls)

    @contextmanager
    def open(self, path: str) -> Iterator[pq.ParquetFile]:
        """Open one file for reading; an absolute path is that of a tail (`OpenTable.tail`)."""
        storage = pafs.LocalFileSystem() if path.startswith(_SLASH) else self._storage
        with lake_errors(self._path), storage.open_input_file(path) as handle, pq.ParquetFile(handle) as file:
            yield file

    def read(self, path: str) -> pa.Table:
        """Return one file's rows, in the columns that the file has."""
        with self.open(path) as file:
            return file.read()

    def batches(
        self, path: str, columns: Sequence[str], *, rows: int = 1 << 14, least: tuple[str, int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield one file's rows, in its order and batch by batch; the table's partition columns aren't in it.

        Args:
            path: within the table's folder.
            columns: which, by name.
            rows: maximum rows of a batch.
            least: a column and a number: row groups without a value at least as great are skipped.
        """
        with self.open(path) as file:
            groups = [
                g for g in range(file.num_row_groups) if least is None or _reaches(file.metadata.row_group(g), *least)
            ]
            yield from file.iter_batches(batch_size=rows, row_groups=groups, columns=list(columns))

    def all(self) -> dict[str, pafs.FileInfo]:
        """Return every file in the folder, except those of the format's metadata, by path."""
        with lake_errors(self._path):
            found = self._storage.get_file_info(pafs.FileSelector("", recursive=True))
        named = ((info.path.lstrip(_SLASH), info) for info in found if info.is_file)
        return {path: info for path, info in named if not path.startswith(f"{self._format.metadata_folder}/")}

    def delete(self, paths: Iterable[str]) -> int:
        """Delete files, ignoring those already gone; return the number deleted."""
        deleted = 0
        for path in paths:
            try:
                self._storage.delete_file(path)
            except FileNotFoundError:
                continue
            deleted += 1
        return deleted


def new_name(version: int | None = None, *, table: TableId | None = None) -> str:
    """Return a name for a new file.

    Args:
        version: set if the file may only be committed as this version of the table, so that a later reader of the
            name can tell whether it was; None if any version will do.
        table: of history: the only table whose records the file has.
    """
    of = "" if table is None else f"t{table}-"
    return f"{'part' if version is None else f'v{version:020d}'}-{of}{uuid.uuid4()}.zstd.parquet"


def table_in(path: str) -> TableId | None:
    """Return the table whose records a file of history has, by its name; None for files of other views."""
    found = _TABLE.match(path.rpartition(_SLASH)[2])
    return None if found is None else TableId(int(found[1]))


def version_in(path: str) -> int | None:
    """Return the only version that a file can have been committed as, by its name; None if the name has none."""
    name = path.rpartition(_SLASH)[2]
    return int(name[1:21]) if name.startswith("v") and name[1:21].isdecimal() and name[21:22] == "-" else None


def replace_files(
    layout: LakeLayout,
    opened: OpenTable,
    *,
    add: Sequence[NewFile],
    remove: Sequence[str],
) -> bool:
    """Commit that some files take the place of others, and no row changes; return False if one of those is gone.

    delta-rs (1.6) accepts a commit that removes files which another commit has removed since the handle was opened:
    their rows would be there twice. So each try goes by the list of live files in the version right before it.

    Raises:
        LakeConflict: other commits came first at every try.
    """
    for remaining in reversed(range(_REPLACE_TRIES)):
        try:
            opened.swap(Commit(exact=True), add=add, remove=remove, data_change=False)
            return True
        except LakeConflict:
            if not remaining:
                raise
        again = open_table(layout, opened.path, opened.app)
        if again is None or not set(remove) <= set(again.files().column("path").to_pylist()):
            return False
        opened = again
    return False


def _is_local(storage: pafs.FileSystem) -> bool:
    """Whether a table's folder is one of this machine, where files need folders."""
    return isinstance(storage, pafs.SubTreeFileSystem) and isinstance(storage.base_fs, pafs.LocalFileSystem)


def _field_ids(columns: pa.Schema) -> dict[str, int]:
    """Return the ids of a file's columns by name, nested ones included; none if it has no ids."""
    found: dict[str, int] = {}

    def take(column: pa.Field, name: str) -> None:
        if FIELD_ID in (column.metadata or {}):
            found[name] = int(column.metadata[FIELD_ID])
        if pa.types.is_list(column.type):
            take(column.type.value_field, f"{name}.element")
        elif pa.types.is_map(column.type):
            take(column.type.key_field, f"{name}.key")
            take(column.type.item_field, f"{name}.value")

    for column in columns:
        take(column, column.name)
    return found


def _encodings(schema: pa.Schema, sample: pa.RecordBatch | None) -> dict[str, Any]:
    """Return the encodings of columns: a dictionary if values repeat, differences for numbers and times.

    A dictionary of values that don't repeat costs three quarters of a file's time, and makes it larger.
    """
    plain = [f for f in schema if not pa.types.is_nested(f.type)]
    repeating = {f.name for f in plain if sample is not None and _repeats(sample.column(f.name))}
    steps = [f.name for f in plain if f.name not in repeating and _is_whole_number(f.type)]
    return {"use_dictionary": sorted(repeating), "column_encoding": dict.fromkeys(steps, "DELTA_BINARY_PACKED")}


def _repeats(values: pa.Array) -> bool:
    some = values.slice(0, _SAMPLE_ROWS)
    return bool(pc.count_distinct(some, mode="all").as_py() * 4 <= len(some))


def _is_whole_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _reaches(group: Any, column: str, bound: int) -> bool:
    """Whether a row group's statistics allow a value of at least `bound`."""
    for place in range(group.num_columns):
        facts = group.column(place)
        if facts.path_in_schema == column:
            return not facts.is_stats_set or not facts.statistics.has_min_max or facts.statistics.max >= bound
    return True
