"""The port of a table format: what the lake needs of its tables, whichever format keeps their metadata.

A lake is a tree of folders, each with one table. A format opens and creates the tables, and commits which Parquet
files they have. The files themselves are written and read by `data_files`, with the same bytes in every format.

A handle (`OpenTable`) is used for one write only. So open, compare `n` by the rule of `exactly_once`, and write through
that handle: a format rejects a commit at a position if another commit of the same app came after the handle was opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeError
from millstream.lake.layout import LakeLayout
from millstream.model.column_renames import FilledNames
from millstream.model.positions import Seq

if TYPE_CHECKING:
    import pyarrow.dataset as ds  # imports pandas if installed: seconds that a query needn't wait
    import pyarrow.fs as pafs

    from millstream.lake.data_files import NewFile

_METADATA_FOLDERS: Final = frozenset({"_delta_log", "metadata"})
_NO_PERIOD: Final = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class Tail:
    """One table's records that its history lacks: a file of a query's own, and the changes that their commit would make."""

    path: str
    """Absolute path of a Parquet file on this machine, with a name as of a file of history."""
    rows: int
    size_bytes: int
    seqs: tuple[int, int]
    """The least and the greatest `__seq`."""
    schema: pa.Schema
    """The history's columns, those of these records included."""
    properties: Mapping[str, str]
    folder: str
    """Name of the folder in which the records will land."""

    def among(self, files: pa.Table) -> pa.Table:
        """Return a table's live files (`OpenTable.files`) and the tail's."""
        low, high = self.seqs
        facts = {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "num_records": self.rows,
            "min.__seq": low,
            "max.__seq": high,
        }
        return pa.concat_tables([files, pa.Table.from_pylist([facts])], promote_options="permissive")


@dataclass(frozen=True, slots=True)
class Commit:
    """The facts of a commit in addition to its files."""

    n: Seq | None = None
    """The position of the handle's app after the commit; None for maintenance, which changes no row."""
    exact: bool = False
    """Whether the commit must be the version after the handle's, and fail if any other came first."""
    holds: bool = False
    """Whether the rows belong to the handle's app from then on, whichever app owned them before (`OpenTable.held`)."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Numbers to keep by name (`OpenTable.number`)."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How a format partitions history by the dates of its records."""

    name: str
    """Name of the partition's value in `OpenTable.files`, and in the names of folders."""
    period: str
    """The value that a date has, as `strftime` formats it."""
    column: pa.Field | None
    """The column that holds the value in the table; None if the format derives the value."""

    def of(self, dates: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the value of each date; null for a null date."""
        return pc.strftime(dates, self.period)

    def folder(self, value: str | None) -> str:
        """Return the folder of the files of a value; None: of the records without a date."""
        return f"{self.name}={_NO_PERIOD if value is None else value}"

    def placed(self, file: NewFile, value: str | None) -> NewFile:
        """Return a file as a file of a value."""
        return replace(file, partition={self.name: value})

    def without(self, columns: pa.Schema) -> pa.Schema:
        """Return a table's columns as its files have them."""
        return pa.schema([column for column in columns if column.name != self.name])


class OpenTable(Protocol):
    """A table opened for one write, or to be read."""

    @property
    def path(self) -> str:
        """The table's folder."""

    @property
    def app(self) -> str:
        """The app that commits through this handle."""

    @property
    def n(self) -> Seq | None:
        """The app's last position; None before its first commit."""

    @property
    def tail(self) -> Tail | None:
        """Records that a query reads as if they had landed; a table with some is never written."""

    @property
    def folder(self) -> str:
        """Name of the table's folder; that of its tail, if it has one."""

    @property
    def version(self) -> int:
        """The table's version in the handle (after a write through it: that write's). Versions grow with every commit of rows."""

    @property
    def properties(self) -> Mapping[str, str | None]:
        """The table's configuration."""

    @property
    def bounded(self) -> tuple[str, ...]:
        """The columns that have bounds in every file."""

    @property
    def held(self) -> bool:
        """Whether a folded table's rows are this app's, not those of a later table with the name."""

    def schema(self) -> pa.Schema:
        """Return the table's columns in Arrow, in the lake's types."""

    def number(self, name: str) -> int | None:
        """Return the number that a commit kept under a name (`Commit.numbers`); None if none did."""

    def files(self) -> pa.Table:
        """Return the table's live files, and its tail's.

        The columns are flat: path (within the table's folder), size_bytes, num_records, min.…, max.…, null_count.…,
        partition.…
        """

    def dataset(self, within: tuple[str, int, int] | None = None) -> ds.FileSystemDataset:
        """Return the live files, without the tail's, as a dataset.

        Args:
            within: a column with bounds and two numbers, exclusive and inclusive: files without values between them may
                be left out.
        """

    def with_tail(self, n: Seq, tail: Tail) -> OpenTable:
        """Return the handle with records that a query reads as if they had landed, up to `n`."""

    def ready_for(self, columns: pa.Schema) -> OpenTable:
        """Return a handle on the table, once it can hold columns of these types; call it before they replace its own.

        Raises:
            LakeConflict: another commit changed the table at the same time.
        """

    def name_apart(self, column: str) -> str | None:
        """Return the name that a column gets if another one takes its name; None if the format can't rename columns."""

    def set_bounded(self, columns: Sequence[str]) -> None:
        """Declare which columns have bounds in every file; the handle is at the new state afterwards."""

    def add_columns(self, columns: pa.Schema) -> None:
        """Add those of some columns that the table lacks; the handle is at the new state afterwards."""

    def swap(
        self,
        commit: Commit,
        *,
        add: Sequence[NewFile],
        remove: Sequence[str] = (),
        mode: Literal["append", "overwrite"] = "append",
        schema: pa.Schema | None = None,
        key: Sequence[str] = (),
        renamed: FilledNames | None = None,
        data_change: bool = True,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Commit in one step that some files are added to the table and others removed; the handle is at the new version.

        Args:
            remove: paths of live files.
            mode: `overwrite` removes all files, and makes `schema` the table's.
            schema: the table's new columns; None: unchanged.
            key: with new columns, those that identify a row; a format may declare them.
            renamed: with new columns, the names that they had before; a format may keep their ids.
            data_change: False if no row changes.
            properties: changes of the configuration, which must not follow another's; a format may commit them right before.

        Raises:
            LakeConflict: another commit removed files that this one read, or any came first and the commit is exact, or
                another changed the properties or moved the position before these did.
        """

    def version_before(self, before_ms: int) -> int | None:
        """Return the newest version committed at or before a time (ms since 1970); None if the metadata don't reach back so far."""

    def removed(self) -> set[str]:
        """Return files that this version or an earlier one removed, as far as the metadata remember them."""

    def pinned(self) -> set[str]:
        """Return the files of versions that another program keeps, by a branch or a tag."""

    def trim(self, *, now_ms: int, keep_s: float, retention_s: float, spared: int | None) -> None:
        """Bound the table's metadata: delete the parts that no reader needs.

        Versions of the last `retention_s` can still be opened afterwards, and so can `spared` and all later ones. The handle
        may be at a later state afterwards.

        Args:
            now_ms: milliseconds since 1970.
            keep_s: how long the table's replaced data files stay.
            retention_s: how long a version can be opened after a later commit.
            spared: the oldest version that a kept cut names.

        Raises:
            LakeConflict: another commit changed the table's properties at the same time.
            LakeUnavailable: the table can't be reached.
        """


@dataclass(frozen=True, slots=True)
class NewTable:
    """A table to create."""

    schema: pa.Schema
    description: str
    """A description for people."""
    bounded: Sequence[str]
    """Columns whose bounds are recorded with every file."""
    partition_by: Sequence[str] = ()
    """Its partition columns, or the name of the format's `partition`."""
    key: Sequence[str] = ()
    """The columns that identify a row; a format may declare them."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """More of the table's configuration."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A damaged table that was emptied in place."""

    kept_in: str | None
    """Where its rows are kept, for people; None if it had none, or they can't be read."""


class TablesMove(Protocol):
    """A move of a lake's tables to another place; the files that are copied as they are, are the caller's."""

    @property
    def is_done(self) -> bool:
        """Whether the tables are in the new place already."""

    def is_copied(self, path: str) -> bool:
        """Whether a file is copied as it is; its path is that in the stream's folder."""

    def write(self) -> None:
        """Write the other files in the new place, once the rest is there, and compare the tables of both places.

        Raises:
            LakeError: they differ, or a file lies elsewhere than in the lake.
            LakeFilesGone: a table's metadata can't be read.
        """

    def switch(self, last: Callable[[], None]) -> None:
        """Make the new place the tables' place, in one step; `last` is called right before it.

        Raises:
            LakeConflict: another program changed a table; nothing was changed.
        """


class TableFormat(Protocol):
    """A format: it opens and creates tables. A method with a result here has that of a format without a catalog."""

    partition: Partition
    """How history is partitioned."""
    metadata_folder: str
    """The folder, in a table's own, that has the format's metadata."""
    names_snapshots: bool
    """Whether other programs open a version by another number than `OpenTable.version` (`snapshot_ids`)."""

    def open(
        self, layout: LakeLayout, path: str, app: str, *, version: int | None = None, lands: bool = False
    ) -> OpenTable | None:
        """See `open_table`."""

    def create(self, layout: LakeLayout, path: str, app: str, table: NewTable) -> OpenTable:
        """See `create_table`."""

    def move(self, old: LakeLayout, new: LakeLayout) -> TablesMove:
        """Return how a lake's tables follow its files to another place, which may be the same if the catalog has another one.

        Raises:
            LakeError (`lake_format_unsupported`): they can't.
            LakeUnavailable: the catalog doesn't answer.
        """

    def remove(self, layout: LakeLayout, path: str) -> None:
        """Delete a table of ours that readers don't know, with its folder; does nothing if there is none."""

    def set_aside(self, layout: LakeLayout, path: str) -> SetAside | None:
        """Make a damaged table count as one that isn't there, if its folder stays; None if the folder must be moved.

        A format whose tables are in a catalog empties the table in place, and keeps the rows in an earlier version. If the
        table's metadata can't be read, its entry is removed from the catalog, and the folder must be moved. Nothing may write
        into the table during this.

        Raises:
            LakeTableForeign: another stream or program made the table.
            LakeConflict: another commit came first; call again.
            LakeUnavailable: the catalog doesn't answer.
        """
        return None

    def erase(self, layout: LakeLayout, path: str) -> None:
        """Delete all rows of a table of ours, in all versions and with all files; does nothing if there is none.

        A format whose tables are in a catalog leaves the table there, empty and without a position. Nothing may write
        into the table during this.

        Raises:
            LakeTableForeign: another stream or program made the table.
            LakeError: another program keeps a version.
            LakeConflict: another commit came first; call again.
            OSError: a file can't be deleted.
        """

    def forget_versions(self, layout: LakeLayout, path: str) -> None:
        """Delete what the metadata has of files that the newest version lacks, if it may have values. Raises as `erase`."""

    def storage(self, layout: LakeLayout, path: str) -> pafs.FileSystem:
        """Return the file system whose root is a folder of the lake."""

    def stored_schema(self, columns: pa.Schema) -> pa.Schema:
        """Return columns as a table that has them returns them (`OpenTable.schema`)."""

    def snapshot_ids(self, layout: LakeLayout, versions: Mapping[str, int]) -> dict[str, int]:
        """Return the numbers by which other programs open versions of tables, by the tables' names in the catalog.

        Args:
            versions: by table's folder; those that are no longer there are left out.
        """
        return dict(versions)

    def probe_catalog(self, layout: LakeLayout) -> str | None:
        """Reach the lake's catalog and return what it is; None if the format has none.

        Raises:
            LakeUnavailable (`catalog_unreachable`): it doesn't answer.
        """
        return None

    def file_columns(self, layout: LakeLayout, path: str, columns: pa.Schema, renamed: FilledNames | None) -> pa.Schema:
        """Return the columns of a new file of the table at `path` as Parquet gets them; the same if the format adds nothing.

        Args:
            columns: of the file.
            renamed: the names that they had before, if the file's commit renames them.
        """
        return columns


def refuse_other_format(path: str, metadata_folder: str) -> None:
    """Raise `lake_table_exists` if a folder of this machine has a table of another format: maintenance would delete its files."""
    for other in _METADATA_FOLDERS - {metadata_folder}:
        if "://" not in path and Path(path, other).is_dir():
            raise LakeError(
                f"{path} has a table of another format",
                code="lake_table_exists",
                hint="Set `format` back, or name another `location` for the lake.",
                path=path,
            )


def format_of(layout: LakeLayout) -> TableFormat:
    """Return the format of a lake's tables."""
    match layout.format:
        case "delta":
            from millstream.lake.delta.format import DeltaFormat

            return DeltaFormat()
        case "iceberg":
            from millstream.lake.iceberg.format import IcebergFormat

            return IcebergFormat()


def open_table(
    layout: LakeLayout, path: str, app: str, *, version: int | None = None, lands: bool = False
) -> OpenTable | None:
    """Open the table at `path`, checked to be this stream's and written by no other program; None if there is none.

    Args:
        version: an earlier version to read; it isn't checked.
        lands: whether a batch is landed through the handle: a format may keep the table's metadata in memory for the next
            one, if the table lies in an object store, and compares them with the store's.

    Raises:
        LakeTableForeign: another program made the table or wrote rows into it; details: path, version.
        LakeUnavailable: it can't be read.
    """
    return format_of(layout).open(layout, path, app, version=version, lands=lands)


def create_table(layout: LakeLayout, path: str, app: str, table: NewTable) -> OpenTable:
    """Create an empty table of ours at `path`, for the app that commits to it, or open it if another task has created it since.

    Raises:
        LakeError: the format can't have a table at that path.
    """
    return format_of(layout).create(layout, path, app, table)
