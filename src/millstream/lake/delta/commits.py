"""Commits to Delta tables, through a handle that is opened again for every write: owned, and committed exactly once.

Every commit of ours carries Delta's `txn(app, n)` and, in its commit info, a stamp `millstream` with the version
that it was based on. A data-changing commit without a stamp is another program's: the table is foreign from then
on, and nothing more is written to it. The check costs one read of the newest commit's JSON, because each stamped
commit vouches for all commits up to the version that it was based on. The stamp has an id of the commit, too
(`object_store.lost_answers`).

A handle is used for one write only. delta-rs rejects a transaction through a handle that is older than another
commit of the same app, but accepts it through a table opened since. The handle's `n` is the app's
`transaction_version` when it was opened: writers compare `n` by the rule of `exactly_once`, and write through that handle.
In an object store, a handle to land through works on a copy of the log (`object_store.log_copy`), by the same rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
from deltalake import (
    CommitProperties,
    DeltaTable,
    PostCommitHookProperties,
    Schema,
    TableFeatures,
    Transaction,
)
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from deltalake.writer import WriterProperties

from millstream.errors import LakeConflict, LakeTableForeign
from millstream.lake.delta.object_store.log_copy import LogCopy, copied_log
from millstream.lake.delta.object_store.lost_answers import settled
from millstream.lake.delta.object_store.small_files import LakeStorageHandler
from millstream.lake.format_mismatch import check_format
from millstream.lake.layout import MESSAGES, LakeLayout
from millstream.lake.store_errors import lake_errors
from millstream.lake.table_format import Commit, Tail
from millstream.model.column_renames import FilledNames
from millstream.model.positions import Seq

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from millstream.lake.data_files import NewFile

STAMP: Final = "millstream"
STREAM_PROPERTY: Final = "millstream.stream"
BOUNDED_PROPERTY: Final = "delta.dataSkippingStatsColumns"
_BENIGN: Final = frozenset(
    {"OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "ADD FEATURE", "FSCK", "COMPUTE STATS"}
)
"""Other programs' operations that leave every row as it was."""
_OTHER_LAKE: Final = "Name another lake location, or give the stream another name."
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
class DeltaHandle:
    """See `OpenTable`: the handle of delta-rs, and this app's last commit when it was opened."""

    layout: LakeLayout
    table: DeltaTable
    path: str
    app: str
    n: Seq | None
    tail: Tail | None = None
    log: LogCopy | None = None
    """The copy of the log that `table` works on; None: it works on the log."""

    @property
    def folder(self) -> str:
        return self.path.rsplit("/", 1)[1] if self.tail is None else self.tail.folder

    @property
    def version(self) -> int:
        return int(self.table.version())

    @property
    def properties(self) -> Mapping[str, str | None]:
        found = dict(self.table.metadata().configuration)
        return found if self.tail is None else found | dict(self.tail.properties)

    @property
    def bounded(self) -> tuple[str, ...]:
        names = (self.properties.get(BOUNDED_PROPERTY) or "").split(",")
        return tuple(name.strip("`") for name in names if name)

    @property
    def held(self) -> bool:
        holder, _, mine = self.app.rpartition("/")
        found = self.table.transaction_version(f"{holder}/{_HOLDER}")
        return self.n is not None and found is not None and int(found) == int(mine)

    def schema(self) -> pa.Schema:
        return pa.schema(self.table.schema().to_arrow()) if self.tail is None else self.tail.schema

    def number(self, name: str) -> int | None:
        """See `OpenTable`: it is a transaction of its own app."""
        found = self.table.transaction_version(name)
        return None if found is None else int(found)

    def files(self) -> pa.Table:
        with lake_errors(self.path):
            found: Any = self.table.get_add_actions(flatten=True)
            # Not by `pa.table`, which checks for a DataFrame and imports pandas for that.
            files = pa.RecordBatchReader.from_stream(found).read_all()
        return files if self.tail is None else self.tail.among(files)

    def dataset(self, within: tuple[str, int, int] | None = None) -> ds.FileSystemDataset:
        condition = None if within is None else f"{within[0]} > {within[1]} AND {within[0]} <= {within[2]}"
        storage = None if self.log is None else LakeStorageHandler.of(self.layout, self.path)
        return self.table.to_pyarrow_dataset(filesystem=storage, file_pruning_predicate=condition)

    def with_tail(self, n: Seq, tail: Tail) -> DeltaHandle:
        return replace(self, n=n, tail=tail)

    def ready_for(self, columns: pa.Schema) -> DeltaHandle:
        """See `OpenTable`: add every feature that the protocol lacks, and open the table again if there was any.

        delta-rs adds `timestampNtz` when it creates a table or adds columns, but not with `create_write_transaction`: no
        reader would open the table.
        """
        if not self._add_features(columns):
            return self
        again = open_handle(self.layout, self.path, self.app)
        assert again is not None, "it was there just now"
        return again

    def set_properties(self, properties: Mapping[str, str]) -> None:

        def change(facts: CommitProperties) -> None:
            self.table.alter.set_table_properties(dict(properties), raise_if_not_exists=False, commit_properties=facts)

        self._alter(change)

    def name_apart(self, column: str) -> str | None:  # noqa: ARG002 - readers of Delta refuse tables with column mapping
        return None

    def set_bounded(self, columns: Sequence[str]) -> None:
        self.set_properties(bounded_property(columns))

    def add_columns(self, columns: pa.Schema) -> None:
        self._add_features(columns)
        have = set(self.schema().names)
        fields = Schema.from_arrow(pa.schema([f.with_nullable(True) for f in columns if f.name not in have])).fields
        self._alter(lambda facts: self.table.alter.add_columns(fields, commit_properties=facts))

    def _alter(self, change: Callable[[CommitProperties], object]) -> None:
        """Commit a change of the table's metadata."""
        with lake_errors(self.path):
            if self.log is not None:
                self.log.commit(self.table, lambda: change(self._maintenance()))
                return
            change(self._maintenance())
            self.table.update_incremental()

    def swap(
        self,
        commit: Commit,
        *,
        add: Sequence[NewFile],
        remove: Sequence[str] = (),
        mode: Literal["append", "overwrite"] = "append",
        schema: pa.Schema | None = None,
        key: Sequence[str] = (),  # noqa: ARG002 - Delta declares none
        renamed: FilledNames | None = None,  # noqa: ARG002 - its columns have no ids
        data_change: bool = True,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        if properties:
            self.set_properties(properties)
            # The handle is at the newest version now: an append that came before isn't a conflict for it.
            if self.table.transaction_version(self.app) != self.n:
                raise LakeConflict(f"another task appended to {self.path} at the same time", path=self.path)
        now = time.time_ns() // 1_000_000
        added = [AddAction(file.path, file.size_bytes, file.partition, now, data_change, file.stats) for file in add]
        gone = [RemoveAction(path, data_change, now) for path in remove]

        def write(facts: CommitProperties) -> None:
            self.table.create_write_transaction(
                [*added, *gone],
                mode,
                self.table.schema() if schema is None else schema,
                partition_by=list(self.table.metadata().partition_columns) or None,
                commit_properties=facts,
                post_commithook_properties=PostCommitHookProperties(create_checkpoint=True),
            )

        if self.log is not None:
            with lake_errors(self.path):
                self.log.commit(self.table, lambda: write(self.commit_properties(commit)))
            return
        facts = self.commit_properties(commit)
        stamp = (facts.custom_metadata or {})[STAMP]
        with settled(self.table, STAMP, stamp), lake_errors(self.path):
            write(facts)
        with lake_errors(self.path):
            self.table.update_incremental()

    def commit_properties(self, commit: Commit) -> CommitProperties:
        """Return the properties of a commit through this handle."""
        if commit.n is None:
            return self._maintenance(exact=commit.exact)
        holder, _, mine = self.app.rpartition("/")
        numbers = {self.app: int(commit.n), **commit.numbers}
        if commit.holds:
            numbers[f"{holder}/{_HOLDER}"] = int(mine)
        return CommitProperties(
            custom_metadata={STAMP: json.dumps({"on": self.version, "n": int(commit.n), "id": token_hex(8)})},
            app_transactions=[Transaction(app, number) for app, number in numbers.items()],
            max_commit_retries=0 if commit.exact else None,
        )

    def _maintenance(self, *, exact: bool = False) -> CommitProperties:
        """Return the properties of a commit that changes no rows."""
        return CommitProperties(
            custom_metadata={STAMP: json.dumps({"on": self.version, "id": token_hex(8)})},
            max_commit_retries=0 if exact else None,
        )

    def _add_features(self, columns: pa.Schema) -> bool:
        """Add the features that the protocol lacks; return whether there were any.

        The handle is at the new version afterwards.
        """
        protocol = self.table.protocol()
        has = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
        if not has and not any(_has_local_time(column.type) for column in columns):
            return False  # a protocol version without features
        missing = [feature for name, feature in _FEATURES.items() if name not in has]
        if missing:
            self._alter(
                lambda facts: self.table.alter.add_feature(
                    missing, allow_protocol_versions_increase=True, commit_properties=facts
                )
            )
        return bool(missing)

    def version_before(self, before_ms: int) -> int | None:
        from millstream.lake.delta import log

        return log.version_before(self._in_store(), before_ms)

    def removed(self) -> set[str]:
        with lake_errors(self.path):
            table = self._in_store().table
            return set(table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=True))

    def pinned(self) -> set[str]:
        """See `OpenTable`: a log has no names for versions."""
        return set()

    def trim(self, *, now_ms: int, keep_s: float, retention_s: float, spared: int | None) -> None:
        from millstream.lake.delta import log

        log.trim_log(self._in_store(), now_ms=now_ms, keep_s=keep_s, retention_s=retention_s, spared=spared)

    def _in_store(self) -> DeltaHandle:
        """Return a handle on the whole log: a copy lacks the part before the last checkpoint."""
        if self.log is None:
            return self
        with lake_errors(self.path):
            table = DeltaTable(self.path, storage_options=self.layout.client_options(self.path))
        return replace(self, table=table, log=None)


def open_handle(layout: LakeLayout, path: str, app: str, *, version: int | None = None) -> DeltaHandle | None:
    """Open a table, at a version or the newest; None if there is none. The newest one must be this stream's."""
    with lake_errors(path):
        try:
            table = DeltaTable(path, version=version, storage_options=layout.client_options(path))
        except TableNotFoundError:
            check_format(layout, path, "metadata")
            return None
        # Not of the newest commit's stamp: `history` reads commits that came after the handle, and numbers them as if they hadn't.
        found = table.transaction_version(app)
        opened = DeltaHandle(layout, table, path, app, None if found is None else Seq(found))
        if version is None:
            check_owned(layout, opened)
        return opened


def open_copy(layout: LakeLayout, path: str, app: str) -> DeltaHandle | None:
    """Open a table by a copy of its log; None if it isn't to be had so, or isn't enough to tell whose the table is."""
    with lake_errors(path):
        log = copied_log(layout, path)
        if log is None:
            return None
        try:
            table = DeltaTable(log.folder)
        except DeltaError:
            return None  # of a kind that needs more files
        found = table.transaction_version(app)
        opened = DeltaHandle(layout, table, path, app, None if found is None else Seq(found), log=log)
        return opened if check_owned(layout, opened) else None


def bounded_property(columns: Sequence[str]) -> dict[str, str]:
    """Return the table property that lists the columns with bounds in every file.

    Readers assume that every column has bounds unless this property lists them. delta-rs (1.6) gives Arrow "at
    least null" for a bound that a file lacks; no value satisfies it, and the file is skipped. The same happens with
    a column that was added later.
    """
    return {BOUNDED_PROPERTY: ",".join(f"`{name}`" for name in columns)}


def _has_local_time(kind: pa.DataType) -> bool:
    """Whether a type holds timestamps without a time zone, the only lake type that needs a table feature."""
    if pa.types.is_nested(kind):
        return any(_has_local_time(kind.field(place).type) for place in range(kind.num_fields))
    return bool(pa.types.is_timestamp(kind) and kind.tz is None)


def _way_out(layout: LakeLayout, path: str) -> str:
    """Return what brings a table back whose folder is foreign, as the begin of a hint; empty for the table of cuts.

    The content of that table exists nowhere else. Logical messages can't be copied from the source: they begin again.
    """
    if path == layout.commits_path:
        return ""
    if path.endswith(f"/history/{MESSAGES}"):
        return f"Move that folder away, then run `millstream tables retry {MESSAGES}`"
    return "Run `millstream pipeline rebuild`, which moves that folder away and rebuilds the table"


def check_owned(layout: LakeLayout, opened: DeltaHandle) -> bool:
    """Raise `LakeTableForeign` unless every row of the table is this stream's; return False if too few commits are there to tell."""
    way_out = _way_out(layout, opened.path)
    owner = opened.properties.get(STREAM_PROPERTY)
    if owner != str(layout.stream_id):
        raise LakeTableForeign(
            f"{opened.path} holds a Delta table that "
            + ("this stream didn't make" if owner is None else f"stream {owner} made"),
            code=None if owner is None else "lake_of_another_stream",
            hint=f"{way_out}, or set another lake location." if way_out else _OTHER_LAKE,
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
                hint=f"{way_out or 'Name another lake location'}; let no other program write into the lake.",
                path=opened.path,
                version=version,
            )
        if horizon is not None and version - 1 <= horizon:
            return True
    return False


def _commit_infos(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Yield commit infos, newest first; nearly always one is enough."""
    newest = table.history(1)
    yield from newest
    yield from table.history(_LOOK_BACK_VERSIONS)[len(newest) :]
