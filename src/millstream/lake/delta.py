"""Delta tables as this lake uses them: opened again for every write, owned, and committed exactly once.

Every commit of ours carries Delta's `txn(app, n)` and, in its commit info, a stamp `millstream` with the version
that it was based on. A data-changing commit without a stamp is another program's: the table is foreign from then
on, and nothing more is written to it. The check costs one read of the newest commit's JSON, because each stamped
commit vouches for all commits up to the version that it was based on.

A handle is used for one write only. delta-rs rejects a transaction through a handle that is older than another
commit of the same app, but accepts it through a table opened since. So open, compare `transaction_version`, and
write through that handle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, SchemaMismatchError, TableNotFoundError
from deltalake.writer import WriterProperties

from millstream.errors import LakeConflict, LakeError, LakeFilesGone, LakeTableForeign, LakeUnavailable
from millstream.lake.layout import LakeLayout
from millstream.lake.store_errors import plain_text, store_error
from millstream.model.positions import Seq

STAMP: Final = "millstream"
STREAM_PROPERTY: Final = "millstream.stream"
BOUNDED_PROPERTY: Final = "delta.dataSkippingStatsColumns"
_BENIGN: Final = frozenset(
    {"OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "ADD FEATURE", "FSCK", "COMPUTE STATS"}
)
"""Other programs' operations that leave every row as it was."""
_LOOK_BACK_VERSIONS: Final = 200
_FEATURES: Final = {
    "timestampNtz": TableFeatures.TimestampWithoutTimezone,
    "invariants": TableFeatures.Invariants,
    "appendOnly": TableFeatures.AppendOnly,
}
"""The features that a table needs for timestamps without a time zone. For a table with columns that are never null,
Spark also requires `invariants`, which earlier protocol versions imply and delta-rs leaves out."""
_HOLDER: Final = "holder"
"""Suffix of the app id under which a folded table's commits record the owner of its rows: a folder's name may go to
another table."""
WRITER: Final = WriterProperties(compression="ZSTD", compression_level=1)
"""zstd 1 halves snappy's bytes on rows of short texts for about the same CPU."""


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


@dataclass(frozen=True, slots=True)
class OpenTable:
    """A table opened for one write: the handle, and this app's last commit when it was opened."""

    table: DeltaTable
    path: str
    app: str
    n: Seq | None
    """The app's last transaction version; None before its first."""
    tail: Tail | None = None
    """Records that a query reads as if they had landed; a table with some is never written."""

    @property
    def folder(self) -> str:
        """Name of the table's folder."""
        return self.path.rsplit("/", 1)[1] if self.tail is None else self.tail.folder

    @property
    def version(self) -> int:
        """The Delta version of the handle (after a write through it: that write's)."""
        return int(self.table.version())

    @property
    def properties(self) -> Mapping[str, str | None]:
        """The table's configuration."""
        found = dict(self.table.metadata().configuration)
        return found if self.tail is None else found | dict(self.tail.properties)

    def schema(self) -> pa.Schema:
        """Return the table's columns in Arrow."""
        return pa.schema(self.table.schema().to_arrow()) if self.tail is None else self.tail.schema

    def commit(self, n: Seq, *, exact: bool = False, holds: bool = False) -> CommitProperties:
        """Return the properties of a data commit at `n` through this handle.

        Args:
            n: the table's position after the commit.
            exact: whether the commit must be the version after the handle's, and fail if any other came first.
            holds: whether the rows belong to this app from then on, whoever owned them before (`held`).
        """
        holder, _, mine = self.app.rpartition("/")
        return CommitProperties(
            custom_metadata={STAMP: json.dumps({"on": self.version, "n": int(n)})},
            app_transactions=[
                Transaction(self.app, int(n)),
                *([Transaction(f"{holder}/{_HOLDER}", int(mine))] if holds else []),
            ],
            max_commit_retries=0 if exact else None,
        )

    @property
    def held(self) -> bool:
        """Whether a folded table's rows are this app's, not those of a later table with the name."""
        holder, _, mine = self.app.rpartition("/")
        found = self.table.transaction_version(f"{holder}/{_HOLDER}")
        return self.n is not None and found is not None and int(found) == int(mine)

    def upkeep(self, *, exact: bool = False) -> CommitProperties:
        """Return the properties of a commit that changes no rows; `exact` as of `commit`, if it replaces every file."""
        return CommitProperties(
            custom_metadata={STAMP: json.dumps({"on": self.version})}, max_commit_retries=0 if exact else None
        )


def live_files(opened: OpenTable) -> pa.Table:
    """Return the table's live files from its log, and its tail's.

    The columns are flat: path, size_bytes, num_records, min.…, max.…, null_count.…, partition.…
    """
    with lake_errors(opened.path):
        found: Any = opened.table.get_add_actions(flatten=True)
        # Not by `pa.table`, which checks for a DataFrame and imports pandas for that.
        files = pa.RecordBatchReader.from_stream(found).read_all()
    if (tail := opened.tail) is None:
        return files
    low, high = tail.seqs
    facts = {
        "path": tail.path,
        "size_bytes": tail.size_bytes,
        "num_records": tail.rows,
        "min.__seq": low,
        "max.__seq": high,
    }
    return pa.concat_tables([files, pa.Table.from_pylist([facts])], promote_options="permissive")


@contextmanager
def lake_errors(path: str) -> Iterator[None]:
    """Translate delta-rs's errors."""
    try:
        yield
    except (DeltaError, OSError) as error:
        raise _translated(path, error) from error
    except pa.ArrowException as error:
        raise LakeError(f"{path}: {error}", path=path) from error


def _translated(path: str, error: Exception) -> LakeError:
    if (refused := store_error(path, error)) is not None:
        return refused
    told = plain_text(error)
    match error:
        case CommitFailedError():
            return LakeConflict(f"another writer committed to {path} first: {told}", path=path)
        case SchemaMismatchError():
            return LakeError(f"{path} can't take these columns: {told}", code="lake_schema_conflict", path=path)
        case FileNotFoundError():
            return LakeFilesGone(f"a file of {path} is gone: {told}", path=path)
        case _:
            return LakeUnavailable(f"{path}: {told}", path=path)


def open_table(layout: LakeLayout, path: str, app: str, *, version: int | None = None) -> OpenTable | None:
    """Open the table at `path`, checked to be this stream's and written by no other program; None if there is none.

    Raises:
        LakeTableForeign: another program made the table or wrote rows into it; details: path, version.
        LakeUnavailable: it can't be read.
    """
    with lake_errors(path):
        try:
            table = DeltaTable(path, version=version, storage_options=layout.client_options(path))
        except TableNotFoundError:
            return None
        found = table.transaction_version(app)
        opened = OpenTable(table, path, app, None if found is None else Seq(found))
        if version is None:
            check_owned(layout, opened)
        return opened


def create_table(
    layout: LakeLayout,
    path: str,
    app: str,
    schema: pa.Schema,
    *,
    description: str,
    bounded: Sequence[str],
    partition_by: list[str] | None = None,
    properties: Mapping[str, str] | None = None,
) -> OpenTable:
    """Create an empty table of ours, or open it if another task has created it since.

    Args:
        layout: where the lake is.
        path: the table's folder.
        app: the app that commits to it.
        schema: its columns.
        description: a description for people.
        bounded: columns whose bounds are recorded with every file.
        partition_by: its partition columns.
        properties: more of the table's configuration.

    Raises:
        LakeError: the lake's location contains a percent sign, which delta-rs confuses with an escape.
    """
    if "%" in path:
        raise LakeError(
            f"a Delta table can't lie at {path}: its path holds a percent sign",
            hint="Name another location for the lake, or move the home to a folder without %.",
            path=path,
        )
    with lake_errors(path):
        try:
            DeltaTable.create(
                path,
                schema=schema,
                mode="error",
                partition_by=partition_by,
                description=description,
                configuration={
                    STREAM_PROPERTY: str(layout.stream_id),
                    **bounded_property(bounded),
                    # Tables are opened again for every write, which reads the commits since the last checkpoint.
                    "delta.checkpointInterval": "20",
                    **log_properties(),
                    **(properties or {}),
                },
                storage_options=layout.client_options(path),
                commit_properties=CommitProperties(custom_metadata={STAMP: json.dumps({"on": -1})}),
                raise_if_key_not_exists=False,
            )
        except (DeltaError, FileExistsError):
            if not DeltaTable.is_deltatable(path, storage_options=layout.client_options(path)):
                raise
    opened = open_table(layout, path, app)
    assert opened is not None
    return with_features(layout, opened, schema)


def log_properties(keep_s: float = 0.0) -> dict[str, str]:
    """Return the table properties that leave upkeep of the log to `delta_log`.

    Args:
        keep_s: how long replaced data files stay. The log remembers them for twice that, at least 10 minutes: every
            checkpoint names each file that it remembers, and upkeep deletes those files long before.
    """
    return {
        "delta.enableExpiredLogCleanup": "false",
        "delta.deletedFileRetentionDuration": f"interval {round(max(600.0, 2 * keep_s))} seconds",
    }


def bounded_property(columns: Sequence[str]) -> dict[str, str]:
    """Return the table property that lists the columns with bounds in every file.

    Readers assume that every column has bounds unless this property lists them. delta-rs (1.6) gives Arrow "at
    least null" for a bound that a file lacks; no value satisfies it, and the file is skipped. The same happens with
    a column that was added later.
    """
    return {BOUNDED_PROPERTY: ",".join(f"`{name}`" for name in columns)}


def bounded_columns(opened: OpenTable) -> tuple[str, ...]:
    """Return the columns that have bounds in every file, by that property."""
    names = (opened.properties.get(BOUNDED_PROPERTY) or "").split(",")
    return tuple(name.strip("`") for name in names if name)


def set_properties(opened: OpenTable, properties: Mapping[str, str]) -> None:
    """Change the table's configuration; the handle is at the new version afterwards."""
    with lake_errors(opened.path):
        opened.table.alter.set_table_properties(
            dict(properties), raise_if_not_exists=False, commit_properties=opened.upkeep()
        )
        opened.table.update_incremental()


def stored_schema(columns: pa.Schema) -> pa.Schema:
    """Return columns as a table that has them returns them (`OpenTable.schema`)."""
    return pa.schema(Schema.from_arrow(columns).to_arrow())


def add_columns(opened: OpenTable, columns: pa.Schema) -> None:
    """Add those of some columns that the table lacks; the handle is at the new version afterwards."""
    _add_features(opened, columns)
    have = set(opened.schema().names)
    fields = Schema.from_arrow(pa.schema([f.with_nullable(True) for f in columns if f.name not in have])).fields
    with lake_errors(opened.path):
        opened.table.alter.add_columns(fields, commit_properties=opened.upkeep())
        opened.table.update_incremental()


def with_features(layout: LakeLayout, opened: OpenTable, columns: pa.Schema) -> OpenTable:
    """Return the table once its protocol has every feature that some columns need, opened again if a feature was added.

    Call it before a commit that replaces the table's schema. delta-rs adds `timestampNtz` when it creates a table
    or adds columns, but not with `create_write_transaction`: no reader would open the table.

    Raises:
        LakeConflict: another commit changed the protocol at the same time.
    """
    if not _add_features(opened, columns):
        return opened
    again = open_table(layout, opened.path, opened.app)
    assert again is not None, "it was there just now"
    return again


def _add_features(opened: OpenTable, columns: pa.Schema) -> bool:
    """Add the features that the protocol lacks; return whether there were any.

    The handle is at the new version afterwards.
    """
    protocol = opened.table.protocol()
    has = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    if not has and not any(_has_local_time(column.type) for column in columns):
        return False  # a protocol version without features
    missing = [feature for name, feature in _FEATURES.items() if name not in has]
    if missing:
        with lake_errors(opened.path):
            opened.table.alter.add_feature(
                missing, allow_protocol_versions_increase=True, commit_properties=opened.upkeep()
            )
            opened.table.update_incremental()
    return bool(missing)


def _has_local_time(kind: pa.DataType) -> bool:
    """Whether a type holds timestamps without a time zone, the only lake type that needs a table feature."""
    if pa.types.is_nested(kind):
        return any(_has_local_time(kind.field(place).type) for place in range(kind.num_fields))
    return bool(pa.types.is_timestamp(kind) and kind.tz is None)


def check_owned(layout: LakeLayout, opened: OpenTable) -> None:
    """Raise `LakeTableForeign` unless every row of the table is this stream's."""
    # The table of cuts can't be rebuilt: its content exists nowhere else.
    rebuilt = opened.path != layout.commits_path
    owner = opened.properties.get(STREAM_PROPERTY)
    if owner != str(layout.stream_id):
        raise LakeTableForeign(
            f"{opened.path} holds a Delta table that "
            + ("this stream didn't make" if owner is None else f"stream {owner} made"),
            hint="Run `millstream pipeline rebuild`, which moves that folder away and rebuilds the table, or set another "
            "lake location."
            if rebuilt
            else "Name another lake location.",
            path=opened.path,
            version=opened.version,
        )
    horizon: int | None = None
    for info in _commit_infos(opened.table):
        version = int(info["version"])
        stamp = info.get(STAMP)
        if stamp is not None:
            horizon = int(json.loads(stamp)["on"]) if horizon is None else horizon
        elif info.get("operation") not in _BENIGN:
            raise LakeTableForeign(
                f"another program's {info.get('operation', 'commit')} changed {opened.path} in version {version}",
                hint=(
                    "Run `millstream pipeline rebuild`, which moves that folder away and rebuilds the table"
                    if rebuilt
                    else "Name another lake location"
                )
                + "; let no other program write into the lake.",
                path=opened.path,
                version=version,
            )
        if horizon is not None and version - 1 <= horizon:
            return


def _commit_infos(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Yield commit infos, newest first; nearly always one is enough."""
    newest = table.history(1)
    yield from newest
    yield from table.history(_LOOK_BACK_VERSIONS)[len(newest) :]
