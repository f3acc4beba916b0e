"""The log's records behind the lake, as a session reads them: each named table's history, as if they had landed.

The tail is what the log has after the lake's last cut, up to the session's position. The pipeline's own conversion
makes it rows of history, in a file of the session's; all else that reads history then reads them too. So there is one
way to fold a record, whether it has landed or not.

A session doesn't hold the log. Retention deletes only what has landed; if it deletes part of the tail, that part is
read from the lake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeError, OffsetExpired
from millstream.lake.commit_cuts import Cut, CutTable, last_cut, merged
from millstream.lake.history import tailed_history
from millstream.lake.history_scan import records_of
from millstream.lake.layout import LakeLayout, TableCommit, folder_of
from millstream.lake.query.time_travel import LogTail, Standing, TailPart, open_history
from millstream.lake.schema_history import Eras, owned_since, table_of
from millstream.lake.table_format import OpenTable, open_table
from millstream.lake.table_renames import places_of
from millstream.model.ids import TableId
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema


class TailTables:
    """The tables that have records in a session's tail.

    Args:
        log: the log; None if the session reads the lake alone.
        held: returns the tables that are quarantined, by name, with the reason.
    """

    def __init__(
        self,
        layout: LakeLayout,
        log: LogTail | None,
        standing: Standing,
        scratch: str,
        held: Callable[[], Mapping[str, str]],
    ) -> None:
        self._layout, self._log, self._scratch, self._held = layout, log, scratch, held
        self._cut, self._upto = standing.cut, standing.n
        self._after = Seq(0) if standing.cut is None else standing.cut.n
        self._places = {t.table_id: (folder, t) for folder, t in self._landed().items()}
        self._parts: dict[TableId, list[TailPart]] = {}
        """By table, its records in the tail, in order."""
        for part in sorted(standing.tail, key=lambda part: part.last):
            self._parts.setdefault(part.schema.table_id, []).append(part)
        self._opened: dict[TableId, OpenTable] = {}
        self.left_out: dict[str, str] = {}
        """Tables whose records of the tail aren't shown, because they can't land as they are: by name, the reason."""

    def tables(self) -> dict[str, CutTable]:
        """Return the session's tables by folder: those of the cut, and those that the tail brings or renames."""
        claims = {table_id: {folder_of(part.schema) for part in parts} for table_id, parts in self._parts.items()}
        claimed = Counter(chain(self._landed(), *claims.values()))
        commits = []
        for table_id, folders in claims.items():
            folder, had = self._places.get(table_id, ("", None))
            first, newest = self._parts[table_id][0].first, self._parts[table_id][-1].schema
            name = _name(newest)
            alone = all(claimed[other] <= (other == folder) + 1 for other in folders)
            if (alone and folders == {folder}) or self._is_held(had.name if had else name):
                continue
            # Only records themselves show which of several tables had a name last.
            since = first if alone else owned_since(self.history(table_id, name, folder_of(newest)), table_id)
            commits.append(TableCommit(table_id, name, folder_of(newest), "history", 0, 0, self._upto, since))
        return merged(self._landed(), sorted(commits, key=lambda commit: commit.since))

    def history(self, table_id: TableId, name: str, folder: str) -> OpenTable:
        """Open a table's history, with its records of the tail.

        Raises:
            LakeUnavailable, LakeTableForeign: it can't be read.
            OffsetExpired: retention has deleted records that haven't landed.
        """
        if table_id not in self._parts:
            return open_history(self._layout, folder, table_id)
        if self._is_held(name):
            self.left_out[name] = self._held()[name]
            return open_history(self._layout, folder, table_id)
        if table_id not in self._opened:
            try:
                self._opened[table_id] = self._tailed(table_id)
            except LakeError as error:
                if error.code != "lake_schema_conflict" or self._places.get(table_id, ("",))[0] != folder:
                    raise
                self.left_out[name] = error.message
                return open_history(self._layout, folder, table_id)
        return self._opened[table_id]

    def more_records(self, opened: OpenTable) -> Iterator[object]:
        """Yield the records that will lie in the folder of a table, and that its history here lacks, as datasets."""
        import pyarrow.dataset as ds

        if opened.tail is None:
            return
        mine = table_of(opened)
        path = f"{self._layout.root}/history/{opened.folder}"
        there = None if path == opened.path else open_table(self._layout, path, opened.app)
        if there is not None:
            for other in {schema.table_id for _, schema in Eras.of(there).told} - {mine}:
                yield records_of(there, table=other)
        for table_id, parts in self._parts.items():
            newest = parts[-1].schema
            if table_id != mine and folder_of(newest) == opened.folder:
                theirs = self.history(table_id, _name(newest), opened.folder)
                if theirs.path != path:
                    yield records_of(theirs, table=table_id)
                elif theirs.tail is not None:
                    yield ds.dataset(theirs.tail.path, schema=theirs.tail.schema, format="parquet")

    def _landed(self) -> Mapping[str, CutTable]:
        return {} if self._cut is None else self._cut.tables

    def _is_held(self, name: str) -> bool:
        return name in self._held()

    def _tailed(self, table_id: TableId) -> OpenTable:
        cut, batches = self._read(table_id)
        last = max(batches, key=lambda batch: pc.max(batch.column("__seq")).as_py(), default=None)
        schema = self._parts[table_id][-1].schema if last is None else TableSchema.from_arrow(last.schema).defined()
        # As if tables landed in the order of their last records.
        rivals = [
            batch
            for other, parts in self._parts.items()
            if parts[-1].last < self._parts[table_id][-1].last and folder_of(parts[-1].schema) == folder_of(schema)
            for batch in self._read(other)[1]
        ]
        return tailed_history(
            self._layout,
            schema,
            batches,
            self._upto,
            places=places_of(cut),
            rivals=rivals,
            scratch=self._scratch,
        )

    def _read(self, table_id: TableId) -> tuple[Cut | None, list[pa.RecordBatch]]:
        """Return a table's records in the tail, without those that have landed by the cut that comes with them."""
        assert self._log is not None, "a tail comes from a log"
        try:
            return self._cut, self._log.records(self._after, self._upto, table_id)
        except OffsetExpired:
            cut = last_cut(self._layout)
            if cut is None or cut.n <= self._after:
                raise
            return cut, self._log.records(cut.n, self._upto, table_id) if cut.n < self._upto else []


def _name(schema: TableSchema) -> str:
    return qualified_name(schema.namespace, schema.name)
