"""Iceberg as a format of the lake's tables (`TableFormat`): it opens, creates and names them, and refuses those of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.fs as pafs
from pyiceberg.exceptions import NamespaceNotEmptyError, NoSuchNamespaceError, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.transforms import DayTransform, IdentityTransform

from millstream.errors import LakeError, LakeFilesGone, LakeTableForeign
from millstream.lake.data_files import remove_folder
from millstream.lake.format_mismatch import check_format
from millstream.lake.iceberg import erasure
from millstream.lake.iceberg.catalog import catalog_errors, catalog_of, files_read, make_namespace, metadata_addresses
from millstream.lake.iceberg.clearing import clear, is_cleared, renew
from millstream.lake.iceberg.columns import arrow_columns, evolve, new_schema, sort_fields, stored_columns, with_ids
from millstream.lake.iceberg.commits import IcebergHandle
from millstream.lake.iceberg.facts import (
    BOUNDED,
    PARTITION,
    STREAM,
    TABLE_ID,
    VIEW,
    known_ids,
    remember,
    snapshot_of,
    table_id_of,
    version_of,
)
from millstream.lake.iceberg.files import address_of, check_location, storage_of
from millstream.lake.iceberg.moving import IcebergMove
from millstream.lake.iceberg.names import identifier_of, view_of
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import NewTable, SetAside, refuse_other_format
from millstream.model.column_renames import FilledNames

if TYPE_CHECKING:
    from pyiceberg.table import Table

_DATE: Final = "__commit_date"


class IcebergFormat:
    """See `TableFormat`."""

    partition = PARTITION
    metadata_folder = "metadata"
    names_snapshots = True

    def open(
        self,
        layout: LakeLayout,
        path: str,
        app: str,
        *,
        version: int | None = None,
        lands: bool = False,  # noqa: ARG002 - metadata are in memory for all handles
    ) -> IcebergHandle | None:
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
        return None if is_cleared(table) else IcebergHandle(layout, table, path, app, version=None)

    def create(self, layout: LakeLayout, path: str, app: str, table: NewTable) -> IcebergHandle:
        """See `TableFormat`.

        Raises:
            LakeError: the lake's location contains a character that other programs take for a part of a URL.
        """
        check_location(path)
        refuse_other_format(path, self.metadata_folder)
        columns = new_schema(table.schema, table.key)
        spec = UNPARTITIONED_PARTITION_SPEC
        if list(table.partition_by) == [PARTITION.name]:
            source = columns.find_field(_DATE).field_id
            spec = PartitionSpec(PartitionField(source, 1000, DayTransform(), PARTITION.name))
        elif table.partition_by:
            sources = [columns.find_field(name).field_id for name in table.partition_by]
            spec = PartitionSpec(
                *(
                    PartitionField(source, 1000 + place, IdentityTransform(), name)
                    for place, (source, name) in enumerate(zip(sources, table.partition_by, strict=True))
                )
            )
        fields = sort_fields(columns, table.key)
        owner = table_id_of(app)
        namespace, name = identifier_of(layout, path)
        facts = {
            "comment": table.description,
            STREAM: str(layout.stream_id),
            VIEW: view_of(layout, path),
            "millstream.layout": "1",
            **({} if owner is None else {TABLE_ID: owner}),
            BOUNDED: json.dumps(list(table.bounded)),
            "commit.retry.num-retries": "0",
            "commit.manifest-merge.enabled": "true",
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": "20",
            **table.properties,
        }
        with catalog_errors(path):
            catalog = catalog_of(layout)
            make_namespace(catalog, namespace)
            try:
                catalog.create_table(
                    (namespace, name),
                    columns,
                    location=address_of(layout, path),
                    partition_spec=spec,
                    sort_order=SortOrder(*fields) if fields else UNSORTED_SORT_ORDER,
                    properties={"format-version": "2", **facts},
                )
            except TableAlreadyExistsError:
                there = _load(layout, path)
                if there is not None and is_cleared(there):
                    _check_owned(layout, path, there)
                    renew(there, table.schema, table.key, facts)
        opened = self.open(layout, path, app, version=None)
        assert opened is not None, "it was made just now"
        return opened

    def move(self, old: LakeLayout, new: LakeLayout) -> IcebergMove:
        return IcebergMove(old, new)

    def remove(self, layout: LakeLayout, path: str) -> None:
        with catalog_errors(path):
            catalog, (namespace, name) = catalog_of(layout), identifier_of(layout, path)
            with suppress(NoSuchTableError, NoSuchNamespaceError):
                catalog.drop_table((namespace, name))
            with suppress(NoSuchNamespaceError, NamespaceNotEmptyError):
                catalog.drop_namespace(namespace)
            remove_folder(layout, path)

    def set_aside(self, layout: LakeLayout, path: str) -> SetAside | None:
        try:
            table = _load(layout, path)
        except LakeFilesGone:
            with catalog_errors(path), suppress(NoSuchTableError, NoSuchNamespaceError):
                catalog_of(layout).drop_table(identifier_of(layout, path))
            return None
        if table is None:
            return None
        _check_made(layout, path, table)
        with catalog_errors(path):
            tag = clear(layout, path, table)
        return SetAside(None if tag is None else f"the tag {tag} of {'.'.join(table.name())}")

    def erase(self, layout: LakeLayout, path: str) -> None:
        table = _load(layout, path)
        if table is None:
            remove_folder(layout, path)
            return
        _check_made(layout, path, table)
        with catalog_errors(path):
            erasure.empty(layout, path, table)

    def forget_versions(self, layout: LakeLayout, path: str) -> None:
        table = _load(layout, path)
        if table is not None:
            _check_made(layout, path, table)
            with catalog_errors(path):
                erasure.forget_versions(layout, path, table)

    def storage(self, layout: LakeLayout, path: str) -> pafs.FileSystem:
        return storage_of(layout, path)

    def stored_schema(self, columns: pa.Schema) -> pa.Schema:
        return stored_columns(columns)

    def snapshot_ids(self, layout: LakeLayout, versions: Mapping[str, int]) -> dict[str, int]:
        found = {}
        for path, version in versions.items():
            if (path, version) not in known_ids:
                table = _load(layout, path)
                snapshot = None if table is None else snapshot_of(table, version)
                if snapshot is None:
                    continue
                remember(path, snapshot)
            found[".".join(identifier_of(layout, path))] = known_ids[path, version]
        return found

    def probe_catalog(self, layout: LakeLayout) -> str | None:
        with catalog_errors(layout.root):
            count = len(catalog_of(layout).list_namespaces())
        return f"the catalog answers, and has {count} {'namespace' if count == 1 else 'namespaces'}"

    def file_columns(self, layout: LakeLayout, path: str, columns: pa.Schema, renamed: FilledNames | None) -> pa.Schema:
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
        replaces = bool(others or renamed)
        evolved = evolve(table.transaction(), columns, replaces=replaces, renamed=renamed)._apply()  # noqa: SLF001 - what a commit would make of it
        return with_ids(evolved, columns)


def _load(layout: LakeLayout, path: str) -> Table | None:
    table = _in_catalog(layout, path)
    if table is None and _was_committed(layout, path):
        table = _in_catalog(layout, path)  # its first commit may have come in between
        if table is None:
            raise LakeFilesGone(
                f"{path} has the metadata of an Iceberg table that the catalog doesn't have",
                code="lake_catalog_lost",
                path=path,
            )
    if table is None:
        with catalog_errors(path):
            check_format(layout, path, "_delta_log")
        return None
    if table.location() != address_of(layout, path):
        _check_made(layout, path, table)  # another stream's table of this name lies where it should
    _check_place(layout, path, table.location())
    return table


def _check_place(layout: LakeLayout, path: str, address: str) -> None:
    """Raise `lake_moved` if the catalog has another address for a table than its folder's."""
    if address != address_of(layout, path):
        raise LakeError(
            f"the catalog has the table at {address}, and its place is {address_of(layout, path)} now",
            code="lake_moved",
            path=path,
        )


def _in_catalog(layout: LakeLayout, path: str) -> Table | None:
    with catalog_errors(path):
        try:
            # A catalog server reads the metadata there.
            with nullcontext() if layout.catalog.get("type") == "rest" else files_read(path):
                return catalog_of(layout).load_table(identifier_of(layout, path))
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        except LakeFilesGone:
            namespace, name = identifier_of(layout, path)
            known = metadata_addresses(catalog_of(layout), [namespace]).get((namespace, name), "")
            _check_place(layout, path, known.rpartition("/metadata/")[0])
            raise


def _was_committed(layout: LakeLayout, path: str) -> bool:
    """Whether a folder has the metadata of a commit; a table that was being made has that of version 0 alone."""
    with catalog_errors(path):
        infos = storage_of(layout, path).get_file_info(pafs.FileSelector("metadata", allow_not_found=True))
    names = (info.base_name for info in infos)
    return any(name.endswith(".metadata.json") and not name.startswith("00000-") for name in names)


def _check_made(layout: LakeLayout, path: str, table: Table) -> None:
    """Raise `LakeTableForeign` unless this stream made the table."""
    owner, mine = table.properties.get(STREAM), str(layout.stream_id)
    if owner != mine:
        raise LakeTableForeign(
            f"{'.'.join(table.name())} is an Iceberg table that "
            + ("this stream didn't make" if owner is None else f"stream {owner} made"),
            code="lake_of_another_stream",
            path=path,
            version=version_of(table.current_snapshot()),
        )


def _check_owned(layout: LakeLayout, path: str, table: Table) -> None:
    """Raise `LakeTableForeign` unless every row of the table is this stream's."""
    _check_made(layout, path, table)
    mine = str(layout.stream_id)
    snapshot = table.current_snapshot()
    while snapshot is not None:
        summary = snapshot.summary
        if summary is not None and summary.get(STREAM) == mine:
            return
        if summary is None or summary.operation is not Operation.REPLACE:
            raise LakeTableForeign(
                f"another program's {'commit' if summary is None else summary.operation.value} changed {path} in snapshot "
                f"{snapshot.snapshot_id}",
                hint="Name another lake location; let no other program write into the lake.",
                path=path,
                version=version_of(snapshot),
            )
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)
