"""The rows of a table that is copied whole, in a file: decoded once, then read as one operation's, repeatedly.

The file is in Arrow's stream format, each batch a piece of the table as COPY sent it, its columns named by number.
They are those that `copy_text.copied_records` takes. The file only extends memory: it is never synced, and another
session can't use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import pyarrow as pa

from millstream.capture.copying.chunk_reader import Begun
from millstream.capture.copying.copy_text import CopiedRows, chunk_operation, copied_records, single_row
from millstream.capture.stream.spill_files import told
from millstream.model.ids import ShardId, SourceId
from millstream.model.operations import SpilledOp, TableRows
from millstream.model.records import Op
from millstream.model.schema import TableSchema
from millstream.private_files import open_private

_COMPRESSION: Final = pa.ipc.IpcWriteOptions(compression="lz4")  # faster than most disks


class CopiedFile:
    """Rows of one table as of one moment.

    One thread appends at a time; after `finish` any thread may read, repeatedly.
    """

    def __init__(self, path: Path, begun: Begun, schema: TableSchema) -> None:
        self.table: Final = begun.table
        self.lsn: Final = begun.lsn
        self.at_us: Final = begun.at_us
        self.schema: Final = schema
        self.row_count = 0
        self.size_bytes = 0
        """Size of the rows' text."""
        self._path = path
        self._file: IO[bytes] | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, rows: CopiedRows) -> None:
        """Add rows.

        Raises:
            DiskFull: there is no space for them; the file is no longer usable.
            MillstreamError (`home_unwritable`): it can't be written for another reason.
        """
        arrays = rows.arrays()
        batch = pa.RecordBatch.from_arrays(arrays, names=[str(number) for number in range(len(arrays))])
        with told(self._path):
            if self._writer is None:
                self._file = os.fdopen(open_private(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")
                self._writer = pa.ipc.new_stream(self._file, batch.schema, options=_COMPRESSION)
            self._writer.write_batch(batch)
        self.row_count += rows.row_count
        self.size_bytes += rows.size_bytes

    def finish(self) -> None:
        """Close the file for writing: all rows are in it. Raises as `append`."""
        writer, file, self._writer, self._file = self._writer, self._file, None, None
        if writer is not None and file is not None:
            with told(self._path), file:
                writer.close()

    def remove(self) -> None:
        """Remove the file, if there is one."""
        file, self._writer, self._file = self._file, None, None
        if file is not None:
            file.close()
        self._path.unlink(missing_ok=True)

    def operation(self, source: SourceId, chunk_id: str, shard: ShardId, *, voids: bool) -> SpilledOp:
        """Return all rows as one operation; if it `voids`, after a record that voids what the log had of the table."""
        return SpilledOp(
            operation=chunk_operation(source, chunk_id, self.lsn, self.at_us),
            counts={(shard, self.schema.table_id): voids + self.row_count},
            chunks=lambda: self._pieces(shard, voids=voids),
            size_bytes=self.size_bytes,
        )

    def _pieces(self, shard: ShardId, *, voids: bool) -> Iterator[tuple[TableRows, ...]]:
        if voids:
            yield (TableRows(self.schema, single_row(self.schema, Op.TRUNCATE), shard),)
        if not self.row_count:
            return
        index = int(voids)
        with self._path.open("rb") as file, pa.ipc.open_stream(file) as batches:
            for batch in batches:
                rows = copied_records(self.schema, batch.columns, batch.num_rows, first_index=index)
                yield (TableRows(self.schema, rows, shard),)
                index += batch.num_rows
