"""Iceberg tables as this lake uses them: opened again for every write, owned, and committed exactly once.

The position of a table is a property that is set in the commit of its rows. pyiceberg (0.12) repeats a stale append,
and the rows double; with `commit.retry.num-retries = 0` it is refused, but only if the snapshot moved. So a
position never moves without a snapshot, and each commit here requires the snapshot that its handle has seen. A commit
that may follow others compares the position in the table opened again.

Every snapshot of ours has the stream's id in its summary. A snapshot without it is another program's. The table is
foreign from then on, unless that program only replaced files by others with the same rows.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import AddSortOrderUpdate, SetDefaultSortOrderUpdate
from pyiceberg.transforms import DayTransform

from millstream.errors import LakeConflict, LakeError, LakeTableForeign
from millstream.lake.data_files import storage_of
from millstream.lake.iceberg import upkeep
from millstream.lake.iceberg.catalog import catalog_errors, catalog_of, make_namespace
from millstream.lake.iceberg.columns import (
    arrow_columns,
    evolve,
    ids_of,
    new_schema,
    sort_fields,
    stored_columns,
    with_ids,
)
from millstream.lake.iceberg.data_files import addresses, data_file, entries_of, flat_files, removed_by
from millstream.lake.iceberg.names import identifier_of, view_of
from millstream.lake.layout import LakeLayout
from millstream.lake.other_formats import check_format
from millstream.lake.table_format import Commit, Partition, Tail, refuse_other_format
from millstream.model.positions import Seq

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.snapshots import Snapshot

    from millstream.lake.data_files import NewFile

_STREAM: Final = "millstream.stream"
_VIEW: Final = "millstream.view"
_TABLE_ID: Final = "millstream.table-id"
_N: Final = "millstream.n"
_BOUNDED: Final = "millstream.bounded"
_NUMBER: Final = "millstream.number."
_TRIES: Final = 20
_KNOWN_MAX: Final = 50_000
_known_ids: OrderedDict[tuple[str, int], int] = OrderedDict()
"""Ids of snapshots by the table's folder and the snapshot's sequence number."""
_PARTITION: Final = Partition("__commit_date_day", "%Y-%m-%d", None)
_DATE: Final = "__commit_date"


class IcebergHandle:
    """See `OpenTable`: pyiceberg's handle, and this app's position when it was opened."""

    def __init__(self, layout: LakeLayout, table: Table, path: str, app: str, *, version: int | None) -> None:
        """See the class.

        Args:
            layout: where the lake is.
            table: as the catalog has it now.
            path: the table's folder.
            app: the app that commits.
            version: an earlier version to read; None: the newest.
        """
        self._layout, self._table = layout, table
        self.path: Final = path
        self.app: Final = app
        self.tail: Tail | None = None
        self._is_past = version is not None and version != _version(table.current_snapshot())
        self._base = _snapshot_of(table, version) if self._is_past else table.current_snapshot()
        self.n: Seq | None = self._position()

    @property
    def folder(self) -> str:
        """See `OpenTable`."""
        return self.path.rsplit("/", 1)[1] if self.tail is None else self.tail.folder

    @property
    def version(self) -> int:
        """See `OpenTable`: the snapshot's sequence number."""
        return _version(self._base)

    @property
    def properties(self) -> Mapping[str, str | None]:
        """See `OpenTable`."""
        return self._table.properties if self.tail is None else self._table.properties | dict(self.tail.properties)

    @property
    def bounded(self) -> tuple[str, ...]:
        """See `OpenTable`."""
        return tuple(json.loads(self._table.properties.get(_BOUNDED, "[]")))

    @property
    def held(self) -> bool:
        """See `OpenTable`."""
        return self.n is not None and self._facts().get(_TABLE_ID) == self._owner

    def schema(self) -> pa.Schema:
        """See `OpenTable`."""
        return arrow_columns(self._schema) if self.tail is None else self.tail.schema

    def number(self, name: str) -> int | None:
        """See `OpenTable`."""
        found = self._table.properties.get(_NUMBER + name)
        return None if found is None else int(found)

    def files(self) -> pa.Table:
        """See `OpenTable`."""
        with catalog_errors(self.path):
            entries = entries_of(self._base, self._table.io)
        partition = None if self._table.spec().is_unpartitioned() else _PARTITION.name
        files = flat_files(entries, self._table.location(), self._schema, partition)
        return files if self.tail is None else self.tail.among(files)

    def dataset(self, within: tuple[str, int, int] | None = None) -> ds.FileSystemDataset:
        """See `OpenTable`."""
        import pyarrow.dataset as ds

        files = self.files() if self.tail is None else self._landed().files()
        if within is not None and f"min.{within[0]}" in files.column_names:
            column, after, upto = within
            reaches = pc.and_(pc.greater(files[f"max.{column}"], after), pc.less_equal(files[f"min.{column}"], upto))
            files = files.filter(pc.fill_null(reaches, fill_value=True))
        parquet, storage = ds.ParquetFileFormat(), storage_of(self._layout, self.path)
        fragments = [parquet.make_fragment(path, storage) for path in files.column("path").to_pylist()]
        return ds.FileSystemDataset(fragments, arrow_columns(self._schema), parquet, storage)

    def _landed(self) -> IcebergHandle:
        return IcebergHandle(self._layout, self._table, self.path, self.app, version=self.version)

    def with_tail(self, n: Seq, tail: Tail) -> IcebergHandle:
        """See `OpenTable`."""
        tailed = self._landed()
        tailed.n, tailed.tail = n, tail
        return tailed

    def ready_for(self, columns: pa.Schema) -> IcebergHandle:  # noqa: ARG002 - format 2 has every type
        """See `OpenTable`."""
        return self

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """See `OpenTable`."""
        with catalog_errors(self.path):
            self._apply(lambda transaction: transaction.set_properties(dict(properties)))

    def set_bounded(self, columns: Sequence[str]) -> None:
        """See `OpenTable`."""
        self.set_properties({_BOUNDED: json.dumps(list(columns))})

    def add_columns(self, columns: pa.Schema) -> None:
        """See `OpenTable`."""
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
        data_change: bool = True,  # noqa: ARG002 - a snapshot of ours is recognized by its summary
    ) -> None:
        """See `OpenTable`."""
        moved = LakeConflict(f"another writer committed to {self.path} first", path=self.path)
        with catalog_errors(self.path):
            for remaining in reversed(range(_TRIES)):
                is_same = _id_of(self._table.current_snapshot()) == _id_of(self._base)
                if self._is_past or (commit.exact and not is_same):
                    raise moved
                if not is_same and self._position() != self.n:
                    raise moved
                transaction = self._table.transaction()
                self._stage(transaction, commit, add, remove, schema if mode == "overwrite" else None, key, mode)
                try:
                    transaction.commit_transaction()
                except CommitFailedException:
                    if not remaining:
                        raise
                    self._table.refresh()
                    continue
                self._base = self._table.current_snapshot()
                _remember(self.path, self._base)
                return

    def _stage(
        self,
        transaction: Transaction,
        commit: Commit,
        add: Sequence[NewFile],
        remove: Sequence[str],
        columns: pa.Schema | None,
        key: Sequence[str],
        mode: Literal["append", "overwrite"],
    ) -> None:
        """Add everything that a commit does to a transaction."""
        if columns is not None:
            _take_columns(transaction, columns, key)
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
        transaction.set_properties(facts | {_NUMBER + name: str(number) for name, number in commit.numbers.items()})
        update = transaction.update_snapshot(snapshot_properties=facts)
        with update.overwrite() if live else update.merge_append() as snapshot:
            for file in add:
                snapshot.append_data_file(data_file(file, self._table.location(), metadata, metadata.schema()))
            for path, gone in live.items():
                if mode == "overwrite" or path in remove:
                    snapshot.delete_data_file(gone)

    def _positions(self, commit: Commit) -> dict[str, str]:
        """Return the table's positions after a commit, as properties of the table and of the snapshot."""
        facts = {name: value for name, value in self._table.properties.items() if _is_position(name)}
        facts[_STREAM] = str(self._layout.stream_id)
        if commit.n is None:
            return facts
        before = facts.get(_TABLE_ID)
        if before is not None and before != self._owner and _N in facts:
            facts[f"{_N}.{before}"] = facts[_N]
        if self._owner is not None:
            facts[_TABLE_ID] = self._owner
        return facts | {_N: str(int(commit.n))}

    def _position(self) -> Seq | None:
        """Return the app's position in the snapshot that the handle has, or in the table as it is now."""
        facts = self._facts()
        mine = facts.get(_TABLE_ID) == self._owner
        found = facts.get(_N) if mine else facts.get(f"{_N}.{self._owner}")
        return None if found is None else Seq(int(found))

    def _facts(self) -> Mapping[str, str]:
        """Return the positions that the handle's version has: the table's, or those in the summary of a past snapshot."""
        if not self._is_past:
            return self._table.properties
        snapshot = self._base
        while snapshot is not None:
            summary = snapshot.summary
            if summary is not None and summary.get(_STREAM) is not None:
                return {name: value for name, value in summary.additional_properties.items() if _is_position(name)}
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return {}

    @property
    def _owner(self) -> str | None:
        """The table id of the app; None for the table of cuts, which has none."""
        return _table_id(self.app)

    @property
    def _schema(self) -> Schema:
        if self._is_past and self._base is not None and self._base.schema_id is not None:
            return self._table.schemas()[self._base.schema_id]
        return self._table.schema()

    def _apply(self, change: Callable[[Transaction], object]) -> None:
        """Commit a change of the metadata alone, again if another commit came first."""
        for remaining in reversed(range(_TRIES)):
            transaction = self._table.transaction()
            change(transaction)
            try:
                transaction.commit_transaction()
            except CommitFailedException:
                if not remaining:
                    raise
                self._table.refresh()
                continue
            return

    def version_before(self, before_ms: int) -> int | None:
        """See `OpenTable`."""
        snapshot = self._base
        while snapshot is not None and snapshot.timestamp_ms > before_ms:
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return None if snapshot is None else _version(snapshot)

    def removed(self) -> set[str]:
        """See `OpenTable`."""
        prefix = f"{self._table.location()}/"
        with catalog_errors(self.path):
            return {
                address.removeprefix(prefix)
                for snapshot in self._table.snapshots()
                if _version(snapshot) <= self.version
                for address in removed_by(snapshot, self._table.io)
            }

    def trim(self, *, now_ms: int, keep_s: float, retention_s: float, spared: int | None) -> None:
        """See `OpenTable`."""
        with catalog_errors(self.path):
            # A snapshot remembers which files it removed, until they are deleted.
            upkeep.expire(self._table, before_ms=now_ms - max(retention_s, 2 * keep_s) * 1000, spared=spared)
            upkeep.delete_orphans(self._layout, self.path, self._table, now_ms=now_ms)


class IcebergFormat:
    """See `TableFormat`."""

    partition = _PARTITION
    metadata_folder = "metadata"
    is_movable = False  # the catalog has its address
    names_snapshots = True

    def open(self, layout: LakeLayout, path: str, app: str, *, version: int | None) -> IcebergHandle | None:
        """See `TableFormat`.

        Raises:
            LakeError (`lake_moved`): the home was moved, and the embedded catalog has the old addresses.
        """
        table = _load(layout, path)
        if table is None:
            return None
        if version is not None:
            handle = IcebergHandle(layout, table, path, app, version=version)
            return handle if version in {0, handle.version} else None
        _check_owned(layout, path, table)
        return IcebergHandle(layout, table, path, app, version=None)

    def create(
        self,
        layout: LakeLayout,
        path: str,
        app: str,
        schema: pa.Schema,
        *,
        description: str,
        bounded: Sequence[str],
        partition_by: Sequence[str],
        key: Sequence[str],
        properties: Mapping[str, str],
    ) -> IcebergHandle:
        """See `TableFormat`.

        Raises:
            LakeError: the lake's location contains a character that other programs take for a part of a URL.
        """
        if any(character in path for character in "%#?"):
            raise LakeError(
                f"an Iceberg table can't lie at {path}: its path holds %, # or ?",
                hint="Name another location for the lake, or move the home to a folder without these.",
                path=path,
            )
        refuse_other_format(path, self.metadata_folder)
        columns = new_schema(schema, key)
        spec = UNPARTITIONED_PARTITION_SPEC
        if list(partition_by) == [_PARTITION.name]:
            source = columns.find_field(_DATE).field_id
            spec = PartitionSpec(PartitionField(source, 1000, DayTransform(), _PARTITION.name))
        elif partition_by:
            raise LakeError(f"an Iceberg table can't be partitioned by {', '.join(partition_by)} here", path=path)
        fields = sort_fields(columns, key)
        owner = _table_id(app)
        namespace, name = identifier_of(layout, path)
        with catalog_errors(path):
            catalog = catalog_of(layout)
            make_namespace(catalog, namespace)
            with suppress(TableAlreadyExistsError):
                catalog.create_table(
                    (namespace, name),
                    columns,
                    location=_address(path),
                    partition_spec=spec,
                    sort_order=SortOrder(*fields) if fields else UNSORTED_SORT_ORDER,
                    properties={
                        "format-version": "2",
                        "comment": description,
                        _STREAM: str(layout.stream_id),
                        _VIEW: view_of(layout, path),
                        "millstream.layout": "1",
                        **({} if owner is None else {_TABLE_ID: owner}),
                        _BOUNDED: json.dumps(list(bounded)),
                        "commit.retry.num-retries": "0",
                        "commit.manifest-merge.enabled": "true",
                        "write.metadata.delete-after-commit.enabled": "true",
                        "write.metadata.previous-versions-max": "20",
                        **properties,
                    },
                )
        opened = self.open(layout, path, app, version=None)
        assert opened is not None, "it was made just now"
        return opened

    def stored_schema(self, columns: pa.Schema) -> pa.Schema:
        """See `TableFormat`."""
        return stored_columns(columns)

    def snapshot_ids(self, layout: LakeLayout, versions: Mapping[str, int]) -> dict[str, int]:
        """See `TableFormat`."""
        found = {}
        for path, version in versions.items():
            if (path, version) not in _known_ids:
                table = _load(layout, path)
                snapshot = None if table is None else _snapshot_of(table, version)
                if snapshot is None:
                    continue
                _remember(path, snapshot)
            found[".".join(identifier_of(layout, path))] = _known_ids[path, version]
        return found

    def probe_catalog(self, layout: LakeLayout) -> str | None:
        """See `TableFormat`."""
        with catalog_errors(layout.root):
            count = len(catalog_of(layout).list_namespaces())
        return f"the catalog answers, and has {count} {'namespace' if count == 1 else 'namespaces'}"

    def file_columns(self, layout: LakeLayout, path: str, columns: pa.Schema) -> pa.Schema:
        """See `TableFormat`."""
        table = _load(layout, path)
        if table is None:
            return with_ids(new_schema(columns, ()), columns)
        have = table.schema()
        fits = arrow_columns(have)
        others = [
            field
            for field in columns
            if field.name in fits.names and not field.type.equals(fits.field(field.name).type)
        ]
        evolved = evolve(table.transaction(), columns, replaces=bool(others))._apply()  # noqa: SLF001 - what a commit would make of it
        return with_ids(evolved, columns)


def _take_columns(transaction: Transaction, columns: pa.Schema, key: Sequence[str]) -> None:
    """Give a table columns and a key in place of its own, in a commit that replaces all of its files."""
    # In one step: pyiceberg checks a sort order and a schema against each other after each.
    update = evolve(transaction, columns, replaces=True, key=key)
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


def _load(layout: LakeLayout, path: str) -> Table | None:
    table = _in_catalog(layout, path)
    if table is None and _was_committed(path):
        table = _in_catalog(layout, path)  # its first commit may have come in between
        if table is None:
            raise LakeError(
                f"{path} has the metadata of an Iceberg table that the catalog doesn't have",
                code="lake_catalog_lost",
                path=path,
            )
    if table is None:
        check_format(layout, path, "_delta_log")
        return None
    if table.location() != _address(path):
        raise LakeError(
            f"the catalog has the table at {table.location()}, and the lake is at {layout.root} now",
            code="lake_moved",
            path=path,
        )
    return table


def _in_catalog(layout: LakeLayout, path: str) -> Table | None:
    with catalog_errors(path):
        try:
            return catalog_of(layout).load_table(identifier_of(layout, path))
        except (NoSuchTableError, NoSuchNamespaceError):
            return None


def _was_committed(path: str) -> bool:
    """Whether a folder has the metadata of a commit; a table that was being made has that of version 0 alone."""
    return any(not found.name.startswith("00000-") for found in Path(path).glob("metadata/*.metadata.json"))


def _address(path: str) -> str:
    """Return a folder's address, as a catalog has it."""
    return path if "://" in path else f"file://{path}"


def _check_owned(layout: LakeLayout, path: str, table: Table) -> None:
    """Raise `LakeTableForeign` unless every row of the table is this stream's."""
    owner, mine = table.properties.get(_STREAM), str(layout.stream_id)
    if owner != mine:
        raise LakeTableForeign(
            f"{'.'.join(table.name())} is an Iceberg table that "
            + ("this stream didn't make" if owner is None else f"stream {owner} made"),
            code="lake_of_another_stream",
            path=path,
            version=_version(table.current_snapshot()),
        )
    snapshot = table.current_snapshot()
    while snapshot is not None:
        summary = snapshot.summary
        if summary is not None and summary.get(_STREAM) == mine:
            return
        if summary is None or summary.operation is not Operation.REPLACE:
            raise LakeTableForeign(
                f"another program's {'commit' if summary is None else summary.operation.value} changed {path} in snapshot "
                f"{snapshot.snapshot_id}",
                hint="Name another lake location; let no other program write into the lake.",
                path=path,
                version=_version(snapshot),
            )
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)


def _remember(path: str, snapshot: Snapshot | None) -> None:
    """Keep the id of a snapshot of this process's, for the next cut."""
    if snapshot is not None:
        _known_ids[path, _version(snapshot)] = snapshot.snapshot_id
        while len(_known_ids) > _KNOWN_MAX:
            _known_ids.popitem(last=False)


def _snapshot_of(table: Table, version: int | None) -> Snapshot | None:
    return next((found for found in table.snapshots() if _version(found) == version), None)


def _version(snapshot: Snapshot | None) -> int:
    return 0 if snapshot is None else int(snapshot.sequence_number or 0)


def _id_of(snapshot: Snapshot | None) -> int | None:
    return None if snapshot is None else snapshot.snapshot_id


def _is_position(name: str) -> bool:
    return name in {_N, _TABLE_ID} or name.startswith(f"{_N}.")


def _table_id(app: str) -> str | None:
    last = app.rpartition("/")[2]
    return last if last.isdecimal() else None
