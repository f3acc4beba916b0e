"""Delta as a format of the lake's tables (`TableFormat`): it opens and creates them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import DeltaError

from millstream.errors import LakeError
from millstream.lake.commit_cuts import last_cut
from millstream.lake.data_files import erase_folder, remove_folder
from millstream.lake.delta.commits import STAMP, STREAM_PROPERTY, DeltaHandle, bounded_property, open_copy, open_handle
from millstream.lake.delta.object_store.small_files import LakeStorageHandler
from millstream.lake.layout import LakeLayout
from millstream.lake.store_errors import lake_errors
from millstream.lake.table_format import NewTable, Partition, TableFormat, refuse_other_format
from millstream.model.addresses import mask_address
from millstream.model.records import MONTH_COLUMN


class DeltaFormat(TableFormat):
    """See `TableFormat`."""

    partition = Partition(MONTH_COLUMN, "%Y-%m", pa.field(MONTH_COLUMN, pa.string()))
    metadata_folder = "_delta_log"
    names_snapshots = False

    def open(
        self, layout: LakeLayout, path: str, app: str, *, version: int | None = None, lands: bool = False
    ) -> DeltaHandle | None:
        return (open_copy(layout, path, app) if lands else None) or open_handle(layout, path, app, version=version)

    def create(self, layout: LakeLayout, path: str, app: str, table: NewTable) -> DeltaHandle:
        """See `TableFormat`.

        Raises:
            LakeError: the lake's location contains a percent sign, which delta-rs confuses with an escape.
        """
        if "%" in path:
            raise LakeError(
                f"a Delta table can't lie at {path}: its path holds a percent sign",
                hint="Name another location for the lake, or move the home to a folder without %.",
                path=path,
            )
        refuse_other_format(path, self.metadata_folder)
        with lake_errors(path):
            try:
                DeltaTable.create(
                    path,
                    schema=table.schema,
                    mode="error",
                    partition_by=list(table.partition_by) or None,
                    description=table.description,
                    configuration={
                        STREAM_PROPERTY: str(layout.stream_id),
                        **bounded_property(table.bounded),
                        # Tables are opened again for every write, which reads the commits since the last checkpoint.
                        "delta.checkpointInterval": "20",
                        **log_properties(),
                        **table.properties,
                    },
                    storage_options=layout.client_options(path),
                    commit_properties=CommitProperties(custom_metadata={STAMP: json.dumps({"on": -1})}),
                    raise_if_key_not_exists=False,
                )
            except (DeltaError, FileExistsError):
                if not DeltaTable.is_deltatable(path, storage_options=layout.client_options(path)):
                    raise
        opened = open_handle(layout, path, app)
        assert opened is not None
        return opened.ready_for(table.schema)

    def erase(self, layout: LakeLayout, path: str) -> None:
        """See `TableFormat`: the table goes with its folder."""
        erase_folder(layout, path)

    def forget_versions(self, layout: LakeLayout, path: str) -> None:
        """See `TableFormat`: history's log has the bounds of positions and days alone."""

    def move(self, old: LakeLayout, new: LakeLayout) -> DeltaMove:

        return DeltaMove(old, new)

    def remove(self, layout: LakeLayout, path: str) -> None:
        remove_folder(layout, path)

    def storage(self, layout: LakeLayout, path: str) -> pafs.FileSystem:
        if "://" in path:
            return LakeStorageHandler.of(layout, path)
        return pafs.SubTreeFileSystem(path, pafs.LocalFileSystem())

    def stored_schema(self, columns: pa.Schema) -> pa.Schema:
        return pa.schema(Schema.from_arrow(columns).to_arrow())


def log_properties(keep_s: float = 0.0) -> dict[str, str]:
    """Return the table properties that leave maintenance of the log to `log`.

    Args:
        keep_s: how long replaced data files stay. The log remembers them for twice that, at least 10 minutes: every
            checkpoint names each file that it remembers, and maintenance deletes those files long before.
    """
    return {
        "delta.enableExpiredLogCleanup": "false",
        "delta.deletedFileRetentionDuration": f"interval {round(max(600.0, 2 * keep_s))} seconds",
    }


class DeltaMove:
    """See `TablesMove`."""

    def __init__(self, old: LakeLayout, new: LakeLayout) -> None:
        self._old, self._new = old, new
        self.is_done = old.root == new.root

    def is_copied(self, path: str) -> bool:  # noqa: ARG002 - all are
        return True

    def write(self) -> None:
        """See `TablesMove`: both places must have the same last cut, through the tables' logs, as the pipeline reads them."""
        if last_cut(self._old) != last_cut(self._new):
            raise LakeError(
                f"the lake at {mask_address(self._new.root)} isn't the one that was copied", path=self._new.root
            )

    def switch(self, last: Callable[[], None]) -> None:
        last()
