"""Commits to Iceberg tables, through a handle that is opened again for every write: owned, and committed exactly once.

The position of a table is a property that is set in the commit of its rows. pyiceberg (0.12) repeats a stale append,
and the rows double; with `commit.retry.num-retries = 0` it is refused, but only if the snapshot moved. So a
position never moves without a snapshot, and each commit here requires the snapshot that its handle has seen. A commit
that may follow others compares the position in the table opened again.

Every snapshot of ours has the stream's id in its summary. A snapshot without it is another program's. The table is
foreign from then on, unless that program only replaced files by others with the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.exceptions import (
    CommitFailedException,
)
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import AddSortOrderUpdate, AssertRefSnapshotId, SetDefaultSortOrderUpdate
from pyiceberg.transforms import IdentityTransform

from millstream.errors import LakeConflict
from millstream.lake.iceberg import maintenance
from millstream.lake.iceberg.catalog import ANSWER_LOST, catalog_errors, files_read
from millstream.lake.iceberg.columns import (
    allow_nulls,
    arrow_columns,
    evolve,
    ids_of,
    sort_fields,
)
from millstream.lake.iceberg.data_files import addresses, data_file, entries_of, flat_files, removed_by
from millstream.lake.iceberg.facts import (
    BOUNDED,
    NUMBER,
    STREAM,
    TABLE_ID,
    N,
    by_id,
    id_of,
    is_position,
    kept_by_refs,
    remember,
    snapshot_of,
    table_id_of,
    version_of,
)
from millstream.lake.iceberg.files import storage_of
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import Commit, Tail
from millstream.model.column_renames import FilledNames
from millstream.model.positions import Seq

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table, Transaction

    from millstream.lake.data_files import NewFile

_TRIES: Final = 20


class IcebergHandle:
    """See `OpenTable`: pyiceberg's handle, and this app's position when it was opened."""

    def __init__(self, layout: LakeLayout, table: Table, path: str, app: str, *, version: int | None) -> None:
        self._layout, self._table = layout, table
        self.path: Final = path
        self.app: Final = app
        self.tail: Tail | None = None
        self._is_past = version is not None and version != version_of(table.current_snapshot())
        self._base = snapshot_of(table, version) if self._is_past else table.current_snapshot()
        self.n: Seq | None = self._position()

    @property
    def folder(self) -> str:
        return self.path.rsplit("/", 1)[1] if self.tail is None else self.tail.folder

    @property
    def version(self) -> int:
        """See `OpenTable`: the snapshot's sequence number."""
        return version_of(self._base)

    @property
    def properties(self) -> Mapping[str, str | None]:
        return self._table.properties if self.tail is None else self._table.properties | dict(self.tail.properties)

    @property
    def bounded(self) -> tuple[str, ...]:
        return tuple(json.loads(self._table.properties.get(BOUNDED, "[]")))

    @property
    def held(self) -> bool:
        return self.n is not None and self._facts().get(TABLE_ID) == self._owner

    def schema(self) -> pa.Schema:
        return arrow_columns(self._schema) if self.tail is None else self.tail.schema

    def number(self, name: str) -> int | None:
        found = self._table.properties.get(NUMBER + name)
        return None if found is None else int(found)

    def files(self) -> pa.Table:
        with catalog_errors(self.path), files_read(self.path):
            entries = entries_of(self._base, self._table.io)
        names = [field.name for field in self._table.spec().fields]
        files = flat_files(entries, self._table.location(), self._schema, names)
        return files if self.tail is None else self.tail.among(files)

    def dataset(self, within: tuple[str, int, int] | None = None) -> ds.FileSystemDataset:
        import pyarrow.dataset as ds

        files = self.files() if self.tail is None else self._landed().files()
        if within is not None and f"min.{within[0]}" in files.column_names:
            column, after, upto = within
            reaches = pc.and_(pc.greater(files[f"max.{column}"], after), pc.less_equal(files[f"min.{column}"], upto))
            files = files.filter(pc.fill_null(reaches, fill_value=True))
        parquet, storage = ds.ParquetFileFormat(), storage_of(self._layout, self.path)
        fragments = [
            parquet.make_fragment(path, storage, partition_expression=held)
            for path, held in zip(files.column("path").to_pylist(), self._outside(files), strict=True)
        ]
        return ds.FileSystemDataset(fragments, arrow_columns(self._schema), parquet, storage)

    def _outside(self, files: pa.Table) -> list[pc.Expression | None]:
        """Return for each file the value of the column that its partition holds in the files' place; None if none does."""
        names = [f.name for f in self._table.spec().fields if isinstance(f.transform, IdentityTransform)]
        if not names:
            return [None] * files.num_rows
        (name,) = names
        kind = arrow_columns(self._schema).field(name).type
        return [pc.field(name) == pa.scalar(value).cast(kind) for value in files[f"partition.{name}"].to_pylist()]

    def _landed(self) -> IcebergHandle:
        return IcebergHandle(self._layout, self._table, self.path, self.app, version=self.version)

    def with_tail(self, n: Seq, tail: Tail) -> IcebergHandle:
        tailed = self._landed()
        tailed.n, tailed.tail = n, tail
        return tailed

    def ready_for(self, columns: pa.Schema) -> IcebergHandle:  # noqa: ARG002 - format 2 has every type
        return self

    def name_apart(self, column: str) -> str | None:
        names = {field.name: field.field_id for field in self._schema.fields}
        if column not in names:
            return None
        name, taken = f"{column}__{names[column]}", {other.lower() for other in names}
        while name.lower() in taken:
            name += "_"
        return name

    def set_properties(self, properties: Mapping[str, str]) -> None:

        def change(transaction: Transaction) -> None:
            transaction.set_properties(dict(properties))
            # By themselves they would be accepted from any handle, however old.
            base = {"ref": MAIN_BRANCH, "snapshot-id": id_of(self._table.current_snapshot())}
            transaction._apply((), (AssertRefSnapshotId.model_validate(base),))  # noqa: SLF001

        with catalog_errors(self.path):
            self._apply(change, unmoved=True)

    def set_bounded(self, columns: Sequence[str]) -> None:
        self.set_properties({BOUNDED: json.dumps(list(columns))})

    def add_columns(self, columns: pa.Schema) -> None:
        with catalog_errors(self.path):
            self._apply(lambda transaction: evolve(transaction, columns, replaces=False).commit())

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
        data_change: bool = True,  # noqa: ARG002 - a snapshot of ours is recognized by its summary
        properties: Mapping[str, str] | None = None,
    ) -> None:
        moved = LakeConflict(f"another writer committed to {self.path} first", path=self.path)
        nulls = frozenset[str]().union(*(file.null_decimals for file in add))
        with catalog_errors(self.path):
            for remaining in reversed(range(_TRIES)):
                is_same = id_of(self._table.current_snapshot()) == id_of(self._base)
                if self._is_past or (not is_same and (commit.exact or properties)):
                    raise moved
                if not is_same and self._is_overtaken():
                    raise moved
                transaction = self._table.transaction()
                if mode == "overwrite" and schema is not None:
                    take_columns(transaction, schema, key, renamed, nulls)
                else:
                    allow_nulls(transaction, nulls)
                if properties:
                    transaction.set_properties(dict(properties))
                self._stage(transaction, commit, add, remove, mode)
                made = transaction.table_metadata.current_snapshot_id
                try:
                    transaction.commit_transaction()
                except CommitFailedException:
                    self._table.refresh()
                    if not self._has(made):
                        if not remaining:
                            raise
                        continue
                except ANSWER_LOST:
                    self._table.refresh()
                    if not self._has(made):
                        raise  # it may still come: who tries again compares the position
                self._base = by_id(self._table, made)
                remember(self.path, self._base)
                return

    def _has(self, snapshot_id: int | None) -> bool:
        """Whether the table has the snapshot of a commit whose answer was a failure, or was lost."""
        return by_id(self._table, snapshot_id) is not None

    def _stage(
        self,
        transaction: Transaction,
        commit: Commit,
        add: Sequence[NewFile],
        remove: Sequence[str],
        mode: Literal["append", "overwrite"],
    ) -> None:
        """Add a commit's files and facts to a transaction."""
        metadata = transaction.table_metadata
        ids = ids_of(metadata.schema())
        if any(ids.get(name) != field_id for file in add for name, field_id in file.field_ids.items()):
            raise LakeConflict(f"the columns of {self.path} changed while files were written", path=self.path)
        live: Mapping[str, DataFile] = {}
        if remove or mode == "overwrite":
            live = addresses(entries_of(self._table.current_snapshot(), self._table.io), self._table.location())
        if not set(remove) <= live.keys():
            raise LakeConflict(f"another commit removed files of {self.path}", path=self.path)
        facts = self._positions(commit)
        transaction.set_properties(facts | {NUMBER + name: str(number) for name, number in commit.numbers.items()})
        update = transaction.update_snapshot(snapshot_properties=facts)
        with update.overwrite() if live else update.merge_append() as snapshot:
            for file in add:
                snapshot.append_data_file(data_file(file, self._table.location(), metadata, metadata.schema()))
            for path, gone in live.items():
                if mode == "overwrite" or path in remove:
                    snapshot.delete_data_file(gone)

    def _positions(self, commit: Commit) -> dict[str, str]:
        """Return the table's positions after a commit, as properties of the table and of the snapshot."""
        facts = {name: value for name, value in self._table.properties.items() if is_position(name)}
        facts[STREAM] = str(self._layout.stream_id)
        if commit.n is None:
            return facts
        before = facts.get(TABLE_ID)
        if before is not None and before != self._owner and N in facts:
            facts[f"{N}.{before}"] = facts[N]
        if self._owner is not None:
            facts[TABLE_ID] = self._owner
        return facts | {N: str(int(commit.n))}

    def _position(self) -> Seq | None:
        """Return the app's position in the snapshot that the handle has, or in the table as it is now."""
        facts = self._facts()
        mine = facts.get(TABLE_ID) == self._owner
        found = facts.get(N) if mine else facts.get(f"{N}.{self._owner}")
        return None if found is None else Seq(int(found))

    def _is_overtaken(self) -> bool:
        """Whether another commit of this app came after the handle's snapshot. A cut may be at the position of the one before."""
        if self._position() != self.n:
            return True
        later = (one.summary for one in self._table.snapshots() if version_of(one) > self.version)
        return self._owner is None and any(one is not None and one.operation is Operation.APPEND for one in later)

    def _facts(self) -> Mapping[str, str]:
        """Return the positions that the handle's version has: the table's, or those in the summary of a past snapshot."""
        if not self._is_past:
            return self._table.properties
        snapshot = self._base
        while snapshot is not None:
            summary = snapshot.summary
            if summary is not None and summary.get(STREAM) is not None:
                return {name: value for name, value in summary.additional_properties.items() if is_position(name)}
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return {}

    @property
    def _owner(self) -> str | None:
        """The table id of the app; None for the table of cuts, which has none."""
        return table_id_of(self.app)

    @property
    def _schema(self) -> Schema:
        if self._is_past and self._base is not None and self._base.schema_id is not None:
            return self._table.schemas()[self._base.schema_id]
        return self._table.schema()

    def _apply(self, change: Callable[[Transaction], object], *, unmoved: bool = False) -> None:
        """Commit a change of the metadata alone, again if another commit came first; `unmoved`: at this position only."""
        n = self._position()
        for remaining in reversed(range(_TRIES)):
            transaction = self._table.transaction()
            change(transaction)
            try:
                transaction.commit_transaction()
            except CommitFailedException:
                if not remaining:
                    raise
                self._table.refresh()
                if unmoved and self._position() != n:
                    raise
                continue
            return

    def version_before(self, before_ms: int) -> int | None:
        snapshot = self._base
        while snapshot is not None and snapshot.timestamp_ms > before_ms:
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return None if snapshot is None else version_of(snapshot)

    def removed(self) -> set[str]:
        prefix = f"{self._table.location()}/"
        with catalog_errors(self.path):
            return {
                address.removeprefix(prefix)
                for snapshot in self._table.snapshots()
                if version_of(snapshot) <= self.version
                for address in removed_by(snapshot, self._table.io)
            }

    def pinned(self) -> set[str]:
        found = set[str]()
        with catalog_errors(self.path):
            for snapshot_id in kept_by_refs(self._table):
                entries = entries_of(by_id(self._table, snapshot_id), self._table.io)
                found |= addresses(entries, self._table.location()).keys()
        return found

    def trim(self, *, now_ms: int, keep_s: float, retention_s: float, spared: int | None) -> None:
        with catalog_errors(self.path):
            # A snapshot remembers which files it removed, until they are deleted.
            reached = self.version_before(int(now_ms - max(retention_s, 2 * keep_s) * 1000)) or 0
            maintenance.expire(self._table, below=reached if spared is None else min(reached, spared))
            maintenance.delete_orphans(self._layout, self.path, self._table, now_ms=now_ms)


def take_columns(
    transaction: Transaction,
    columns: pa.Schema,
    key: Sequence[str],
    renamed: FilledNames | None,
    nulls: AbstractSet[str] = frozenset(),
) -> None:
    """Give a table columns and a key in place of its own, in a commit that replaces all of its files."""
    # In one step: pyiceberg checks a sort order and a schema against each other after each.
    update = evolve(transaction, columns, replaces=True, key=key, renamed=renamed, nulls=nulls)
    updates, requirements = update._commit()  # noqa: SLF001
    fields = sort_fields(update._apply(), key)  # noqa: SLF001
    metadata = transaction.table_metadata
    if fields != metadata.sort_order().fields:
        known = {tuple(order.fields): order.order_id for order in metadata.sort_orders}
        order_id = known.get(tuple(fields))
        if order_id is None:
            order_id = 1 + max(known.values(), default=0) if fields else 0
            updates += (
                AddSortOrderUpdate.model_validate(
                    {"action": "add-sort-order", "sort-order": SortOrder(*fields, order_id=order_id)}
                ),
            )
        updates += (
            SetDefaultSortOrderUpdate.model_validate({"action": "set-default-sort-order", "sort-order-id": order_id}),
        )
    transaction._apply(updates, requirements)  # noqa: SLF001
