"""Files of versions that have ended, which folds only append. `scd2_rules` decides when a version ends."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from millstream.lake.column_conversion import conform
from millstream.lake.data_files import NewFile, TableFiles, new_name
from millstream.lake.folded.key_leaves import in_key_order
from millstream.lake.folded.scd2_rules import ENDED_FOLDER, VALID_FROM

_FILE_ROWS: Final = 1 << 20


class EndedVersions:
    """Writes versions that have ended.

    Args:
        columns: the columns of the files; those of the key come first, before the version columns.
        version: the only version that the files can be committed as.
    """

    def __init__(self, files: TableFiles, columns: pa.Schema, version: int) -> None:
        self._files = files
        self._columns = columns
        self._version = version
        self._held: list[pa.Table] = []
        self.written: list[NewFile] = []

    def add(self, rows: pa.Table) -> None:
        """Add rows; files are written once there are enough."""
        if rows.num_rows:
            self._held.append(conform(rows, self._columns))
        if sum(held.num_rows for held in self._held) >= _FILE_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the held rows."""
        if self._held:
            rows = pa.concat_tables(self._held)
            self._held = []
            key = self._columns.names[: self._columns.get_field_index(VALID_FROM.name)]
            rows = in_key_order(rows, [*key, VALID_FROM.name])
            self.written.append(self._files.write(rows, self._columns, new_name(self._version), partition=ENDED_FOLDER))
