"""A lake's Iceberg tables moved to another place: their metadata hold absolute addresses, so they are written again there.

Manifests, their lists and each table's metadata are copied with the new addresses, under new names, and read again. Snapshots
keep their ids and numbers, so that every cut and every earlier version can be read. The catalog learns of all tables in one
transaction. Before it, the old lake is the lake.

The catalog may have other addresses than those of the old place: the home or the lake's folder was moved by hand. Metadata are then
read where the files are now, and may be written next to the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from pyiceberg.io.pyarrow import PyArrowFile
from pyiceberg.manifest import ManifestFile, read_manifest_list, write_manifest, write_manifest_list
from pyiceberg.serializers import FromInputFile, ToOutputFile
from pyiceberg.typedef import Record

from millstream.errors import LakeConflict, LakeError, LakeTableForeign
from millstream.lake.iceberg.catalog import catalog_errors, catalog_of, files_read, metadata_addresses
from millstream.lake.iceberg.facts import STREAM
from millstream.lake.iceberg.files import LakeFileIO, address_of, check_location, forget_content
from millstream.lake.iceberg.names import namespaces_of
from millstream.lake.layout import LakeLayout

if TYPE_CHECKING:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

_METADATA: Final = "/metadata/"
_CODEC: Final = "deflate"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A table as the catalog has it."""

    namespace: str
    name: str
    metadata: str
    """Address of its metadata."""
    root: str
    """Address of the lake."""
    within: str
    """Path of the table's folder in the lake, with a slash in front."""


class IcebergMove:
    """See `TablesMove`."""

    def __init__(self, old: LakeLayout, new: LakeLayout) -> None:
        """See the class.

        Raises:
            LakeError (`lake_format_unsupported`): the catalog is a server.
            LakeError: the new place has a character that other programs take for a part of a URL.
            LakeError (`lake_moved`): the tables' metadata are neither in the old place nor in the new one.
        """
        if old.catalog.get("type") != "sql":
            raise LakeError(
                "the tables of a catalog's server can't be moved by this command",
                code="lake_format_unsupported",
                hint="Copy all tables by Iceberg's procedures rewrite_table_path and register_table while nothing runs, then set `location`.",
                path=old.root,
            )
        check_location(new.root)
        self._old, self._new = old, new
        self._here, self._there = address_of(old, old.root), address_of(new, new.root)
        self._from = _MovedFiles(catalog_of(old).properties)
        self._to = LakeFileIO(catalog_of(new).properties)
        self._from.was, self._from.here = f"{self._was}/", f"{self._here}/"
        self._written: dict[_Entry, str] = {}
        if not self.is_done:
            self._check_place()

    @cached_property
    def _entries(self) -> list[_Entry]:
        namespaces, found = namespaces_of(self._old), []
        with catalog_errors(self._old.root):
            known = metadata_addresses(self._catalog, namespaces)
        for (namespace, name), address in known.items():
            place = address.rpartition(_METADATA)[0]
            root = place.rsplit("/", 1 if namespace == namespaces[0] else 2)[0]
            if root.endswith(f"/{self._old.stream_name}"):
                found.append(_Entry(namespace, name, address, root, place.removeprefix(root)))
        return found

    @cached_property
    def _was(self) -> str:
        """The lake's address, as the catalog has it."""
        roots = {entry.root for entry in self._entries} or {self._here}
        if len(roots) > 1:
            raise LakeError(f"the catalog has the stream's tables in several places: {', '.join(sorted(roots))}")
        return roots.pop()

    def _check_place(self) -> None:
        """Raise `lake_moved` unless the newest metadata of all tables are where the lake's files should be."""
        with catalog_errors(self._old.root):
            gone = [entry for entry in self._entries if not self._from.new_input(entry.metadata).exists()]
        if gone:
            raise LakeError(
                f"the catalog has {gone[0].namespace}.{gone[0].name} at {self._was}, and its metadata aren't at {self._here}",
                code="lake_moved",
                path=self._old.root,
            )

    @property
    def _catalog(self) -> SqlCatalog:
        from pyiceberg.catalog.sql import SqlCatalog

        catalog = catalog_of(self._old)
        assert isinstance(catalog, SqlCatalog)
        return catalog

    @property
    def is_done(self) -> bool:
        return self._was == self._there

    def is_copied(self, path: str) -> bool:
        return not any(f"/{path}".startswith(f"{entry.within}{_METADATA}") for entry in self._entries)

    def write(self) -> None:
        for entry in self._entries:
            with catalog_errors(self._new.root):
                self._written[entry] = self._write(entry)

    def switch(self, last: Callable[[], None]) -> None:
        from pyiceberg.catalog.sql import IcebergTables
        from sqlalchemy import update
        from sqlalchemy.orm import Session

        catalog = self._catalog
        with catalog_errors(self._old.root), Session(catalog.engine) as session:
            for entry, address in self._written.items():
                known = update(IcebergTables).where(
                    IcebergTables.catalog_name == catalog.name,
                    IcebergTables.table_namespace == entry.namespace,
                    IcebergTables.table_name == entry.name,
                    IcebergTables.metadata_location == entry.metadata,
                )
                taken = known.values(metadata_location=address, previous_metadata_location=entry.metadata)
                if session.execute(taken).rowcount != 1:  # type: ignore[attr-defined]
                    raise LakeConflict(
                        f"another program changed {entry.namespace}.{entry.name} while the lake was copied"
                    )
            last()
            session.commit()

    def _write(self, entry: _Entry) -> str:
        """Write a table's metadata with new addresses; return the address of the newest."""
        folder = f"{self._there}{entry.within}{_METADATA}"
        with files_read(self._here + entry.within):
            metadata = FromInputFile.table_metadata(self._from.new_input(entry.metadata))
        if metadata.properties.get(STREAM) != str(self._old.stream_id):
            raise LakeTableForeign(
                f"another stream or program made {entry.namespace}.{entry.name}", code="lake_of_another_stream"
            )
        known: dict[str, ManifestFile] = {}
        snapshots = [self._with_snapshot(metadata, snapshot, folder, known) for snapshot in metadata.snapshots]
        # The files that these would name aren't copied: the log of earlier metadata, and statistics, which are computed again.
        none: dict[str, Any] = {"metadata_log": [], "statistics": [], "partition_statistics": []}
        place = {"location": f"{self._there}{entry.within}", "snapshots": snapshots}
        moved = metadata.model_copy(update=none | place)
        number = entry.metadata.rpartition("/")[2].partition("-")[0]
        address = f"{folder}{number}-{uuid4()}.metadata.json"
        ToOutputFile.table_metadata(moved, self._to.new_output(address))
        self._check(FromInputFile.table_metadata(self._again(address)) == moved, address)
        return address

    def _with_snapshot(
        self, metadata: TableMetadata, snapshot: Snapshot, folder: str, known: dict[str, ManifestFile]
    ) -> Snapshot:
        with files_read(f"{self._here} (snapshot {snapshot.snapshot_id})"):
            before = list(read_manifest_list(self._from.new_input(snapshot.manifest_list)))
        listed = []
        for manifest in before:
            path = manifest.manifest_path
            if path not in known:
                known[path] = self._with_manifest(metadata, manifest, folder)
            listed.append(known[path])
        address = f"{folder}snap-{snapshot.snapshot_id}-0-{uuid4()}.avro"
        with write_manifest_list(
            format_version=metadata.format_version,
            output_file=self._to.new_output(address),
            snapshot_id=snapshot.snapshot_id,
            parent_snapshot_id=snapshot.parent_snapshot_id,
            sequence_number=snapshot.sequence_number,
            avro_compression=_CODEC,
        ) as writer:
            writer.add_manifests(listed)
        self._check(_same(list(read_manifest_list(self._again(address))), listed), address)
        return snapshot.model_copy(update={"manifest_list": address})

    def _with_manifest(self, metadata: TableMetadata, manifest: ManifestFile, folder: str) -> ManifestFile:
        with files_read(f"{self._here} ({manifest.manifest_path})"):
            entries = manifest.fetch_manifest_entry(self._from, discard_deleted=False)
        for entry in entries:
            path = entry.data_file.file_path
            if not path.startswith(f"{self._was}/"):
                raise LakeError(f"{path} doesn't lie in the lake at {self._was}: another program wrote it", path=path)
            entry.data_file[1] = f"{self._there}{path.removeprefix(self._was)}"
        output = self._to.new_output(f"{folder}{uuid4()}-m0.avro")
        with write_manifest(
            format_version=metadata.format_version,
            spec=metadata.specs()[manifest.partition_spec_id],
            schema=metadata.schema(),
            output_file=output,
            snapshot_id=manifest.added_snapshot_id or 0,
            avro_compression=_CODEC,
        ) as writer:
            for entry in entries:
                writer.add_entry(entry)
        moved = ManifestFile(*manifest._data)  # noqa: SLF001 - the values in their order
        moved[0], moved[1] = output.location, len(output.to_input_file())
        forget_content(output.location)
        self._check(_same(moved.fetch_manifest_entry(self._to, discard_deleted=False), entries), output.location)
        return moved

    def _again(self, address: str) -> PyArrowFile:
        forget_content(address)
        return self._to.new_input(address)

    def _check(self, is_same: bool, address: str) -> None:  # noqa: FBT001 - of a comparison
        if not is_same:
            raise LakeError(f"{address} isn't what was written there", path=self._new.root)


class _MovedFiles(LakeFileIO):
    """Files whose addresses are those of an earlier place."""

    was = here = ""

    def new_input(self, location: str) -> PyArrowFile:
        """Return a file to read."""
        moved = location.startswith(self.was)
        return super().new_input(f"{self.here}{location.removeprefix(self.was)}" if moved else location)


def _same(some: Sequence[Record], others: Sequence[Record]) -> bool:
    """Whether records are the same in all values; pyiceberg compares some by their path alone."""
    return bool(_plain(some) == _plain(others))


def _plain(value: Any) -> Any:
    """Return a value of Avro, its records as lists."""
    if isinstance(value, Record):
        return [_plain(value[place]) for place in range(len(value))]
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    return [_plain(one) for one in value] if isinstance(value, list) else value
