"""History: every record of a table, appended exactly once, partitioned by its commit's month (Delta) or day (Iceberg).

Runs in executors, with only the packages of the extra `executor`. A table's records go into history in order of `seq`.
The table keeps the union of all versions' columns, and in its properties the schemas of its records (`eras`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millstream import failpoints
from millstream.errors import LakeConflict, LakeError, LakeUnavailable
from millstream.lake.column_conversion import conform, same_type, to_lake
from millstream.lake.commit_cuts import last_cut
from millstream.lake.data_files import ROW_GROUP_ROWS, UNCOMMITTED_S_MAX, NewFile, TableFiles, new_name
from millstream.lake.exactly_once import check_unmoved, reached
from millstream.lake.folded.accumulating import lacking_named
from millstream.lake.history_folder import (
    BOUNDED,
    DATE,
    HISTORY_BEGUN_PROPERTY,
    history_from_property,
    write_periods,
)
from millstream.lake.history_scan import read_history
from millstream.lake.layout import LakeLayout, TableCommit, folder_of
from millstream.lake.new_and_wider_columns import union_schema, widened
from millstream.lake.retyped_columns import with_names_freed
from millstream.lake.reused_column_names import ColumnPlaces, columns_in_history
from millstream.lake.schema_history import SINCE_PROPERTY, Eras, owned_since, schema_property
from millstream.lake.table_format import Commit, NewTable, OpenTable, Tail, create_table, format_of, open_table
from millstream.lake.table_renames import Places, bring_records, columns_of, places_of, records_elsewhere
from millstream.model.column_renames import under_names
from millstream.model.ids import TableId
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.records import record_prefix, record_schema, rows_with
from millstream.model.schema import TableKind, TableSchema

_END: Final = Seq(2**63 - 1)


@dataclass(frozen=True, slots=True)
class WrittenRecords:
    """Some of one table's records in files of its history, which no commit names yet. A value: crosses processes."""

    schema: TableSchema
    """Schema of the last record."""
    after: Seq
    """The history's position when they were written: records at or below it were left out."""
    columns: pa.Schema
    """The history's columns with these records; all files have them."""
    runs: tuple[tuple[TableSchema, Seq, Seq], ...]
    """The records' schemas, each with the first and the last number of some records."""
    files: tuple[NewFile, ...] = ()
    rows: int = 0
    written_s: float = 0.0
    """When their first file was begun, in seconds since 1970."""
    elsewhere: bool = False
    """Whether earlier records lie in the folder of another name, and have to be brought first (`bring_history`)."""

    @property
    def last(self) -> Seq:
        """The greatest number, 0 if there are no records."""
        return max((last for _, _, last in self.runs), default=Seq(0))


def write_records(
    layout: LakeLayout,
    schema: TableSchema,
    batches: Sequence[pa.RecordBatch],
    n: Seq,
    *,
    places: Places | None = None,
) -> WrittenRecords:
    """Write one table's records up to `n` as files of its history; nothing of the table changes.

    Records at or below the table's position are left out. So earlier batch bounds and a second call are harmless.

    Args:
        schema: of the last of the records.
        batches: in `record_schema`, possibly of several versions (each batch's metadata holds its own), none above `n`.
        n: the cut that these records end at.
        places: of the last cut, if the caller has them; otherwise they are read.

    Raises:
        LakeError (`lake_schema_conflict`): a column can't follow its change.
        LakeTableForeign: another program wrote into the table.
        LakeError (`lake_history_lost`): records that the table had at the last cut are gone.
    """
    assert schema.kind is not TableKind.RAW, "rows of a table that is quarantined have no place in the lake"
    path = layout.table_path("history", schema)
    opened = open_table(layout, path, layout.app_id("history", schema.table_id), lands=True)
    source: OpenTable | None = None
    if schema.kind is TableKind.TABLE:
        source = records_elsewhere(layout, schema, opened, _places(layout, schema, places))
    before = source or opened
    if schema.source == 0:
        schema, batches = under_the_newest(schema, batches, before)
    placed = _placed(schema, batches, before, layout.types)
    if opened is not None and source is None:
        freed = with_names_freed(layout, opened, placed[0])
        if freed is not opened:
            opened = before = freed
            placed = _placed(schema, batches, before, layout.types)
    schema, batches = placed
    after = (before and before.n) or Seq(0)
    have = _columns(layout, schema) if opened is None else opened.schema()
    if source is not None:
        had = columns_of(layout, schema.table_id, source)
        have = union_schema(schema.full_name, have, had, narrows=True)
    rows = _rows(schema, have, _records_in(batches), layout.types, after=after, upto=n)
    began_s = time.time()
    columns = format_of(layout).stored_schema(rows.schema)
    files: list[NewFile] = []
    if rows.num_rows:
        files = write_periods(layout, path, conform(rows, columns), schema.table_id)
        failpoints.hit("lake.records_written")
    runs = _runs(batches, after)
    return WrittenRecords(
        schema, after, columns, runs, tuple(files), rows.num_rows, began_s, elsewhere=source is not None
    )


def commit_records(
    layout: LakeLayout, parts: Sequence[WrittenRecords], n: Seq, *, places: Places | None = None
) -> TableCommit:
    """Commit that a table's history has everything up to `n`, with the records that were written, exactly once.

    A call by a driver that was thought dead is harmless: the table has moved on from where its records begin.

    Args:
        parts: the table's records behind its position, one or more; in the order of their numbers, if it is of a source.
        places: of the last cut, if the caller has them; otherwise they are read.

    Raises:
        LakeError (`lake_schema_conflict`): a column can't follow its change; nothing was committed.
        LakeTableForeign: another program wrote into the table; nothing was committed.
        LakeConflict: the table has changed since, or its parts have columns of different types or different names of
            the table; write them again, as one part.
        LakeError (`lake_history_lost`): records that the table had at the last cut are gone.
    """
    opened = bring_history(layout, parts, n, places=places)
    schema, path = _newest(parts), opened.path
    rows = sum(part.rows for part in parts)
    if not any(part.runs for part in parts) or reached(opened, n) is not None:
        # Without records it stays where it is: a cut may not name a position that the table hasn't reached.
        return _commit(schema, path, opened, 0, n if opened.n is None else min(n, opened.n))
    again = LakeConflict(f"the table at {path} changed while its records were written", path=path)
    if any(part.after != (opened.n or Seq(0)) for part in parts):
        raise again
    if any(folder_of(part.schema) != folder_of(schema) for part in parts if part.rows):
        raise again  # it was renamed in between, and the files lie in several folders
    if _are_old(parts):
        raise again  # the machine slept in between: maintenance may be deleting the files
    union = opened.schema()
    for part in parts:
        try:
            union = union_schema(schema.full_name, union, part.columns, narrows=True)
        except LakeError as error:
            if len(parts) > 1:
                raise again from error  # a column may have had one name in one part, and another column in another
            raise
    if not all(same_type(union.field(column.name).type, column.type) for part in parts for column in part.columns):
        raise again
    if schema.source == 0 and any(part.schema.version != schema.version for part in parts):
        raise again
    ready = widened(layout, opened, schema.full_name, union)
    told = _eras_told(layout, schema, ready, parts)
    check_unmoved(opened, ready)
    if _are_old(parts):
        raise again  # a wider type has rewritten all of history
    failpoints.hit("lake.before_history_commit")
    ready.swap(Commit(n), add=[file for part in parts for file in part.files], properties=told)
    failpoints.hit("lake.after_history_commit")
    return _commit(schema, path, ready, rows, n)


def bring_history(
    layout: LakeLayout, parts: Sequence[WrittenRecords], n: Seq, *, places: Places | None = None
) -> OpenTable:
    """Return the history for some records, made if there is none, with the table's records under an earlier name.

    Arguments and errors as of `commit_records`, which calls it. A call beforehand, elsewhere, leaves it nothing to copy.
    """
    schema = _newest(parts)
    path = layout.table_path("history", schema)
    app = layout.app_id("history", schema.table_id)
    opened = open_table(layout, path, app, lands=True)
    source: OpenTable | None = None
    if schema.kind is TableKind.TABLE:
        source = records_elsewhere(layout, schema, opened, _places(layout, schema, places))
    opened = opened or _create(layout, schema, path, app, _ends(parts), n)
    return opened if source is None else bring_records(layout, schema, opened, source)


def _places(layout: LakeLayout, schema: TableSchema, places: Places | None) -> Places:
    return places_of(last_cut(layout)) if places is None and schema.kind is TableKind.TABLE else places or {}


def _are_old(parts: Sequence[WrittenRecords]) -> bool:
    """Whether maintenance may soon take the files for abandoned."""
    began_s = min((part.written_s for part in parts if part.rows), default=time.time())
    return time.time() - began_s > UNCOMMITTED_S_MAX / 2


def _newest(parts: Sequence[WrittenRecords]) -> TableSchema:
    return max(parts, key=lambda part: part.last).schema


def tailed_history(
    layout: LakeLayout,
    schema: TableSchema,
    batches: Sequence[pa.RecordBatch],
    n: Seq,
    *,
    places: Places,
    rivals: Sequence[pa.RecordBatch],
    scratch: str,
) -> OpenTable:
    """Return a table's history as these records would leave it, for a query: nothing is written to the lake.

    A renamed table's records are read from the folder that they still lie in.

    Args:
        schema: as of `write_records`, as is all else.
        batches: the records; those that the history has by now are left out.
        places: of the last cut.
        rivals: the records of other tables that land in the same folder first: the name may have gone to and fro.
        scratch: a folder of the query's own, which keeps the records.

    Raises:
        LakeError (`lake_schema_conflict`, `lake_history_lost`), LakeTableForeign, LakeUnavailable.
    """
    path, app = layout.table_path("history", schema), layout.app_id("history", schema.table_id)
    opened = open_table(layout, path, app)
    source = records_elsewhere(layout, schema, opened, places) if schema.kind is TableKind.TABLE else None
    opened = source or opened
    if schema.source == 0:
        schema, batches = under_the_newest(schema, batches, opened)
    schema, batches = _placed(schema, batches, opened, layout.types)
    if opened is None:
        own = layout.in_scratch(scratch)
        opened = _create(own, schema, own.table_path("history", schema), app, _numbers(batches), n)
    after = opened.n or Seq(0)
    have = opened.schema() if source is None else columns_of(layout, schema.table_id, source)
    rows = _rows(schema, have, _records_in(batches), layout.types, after=after, upto=n)
    runs = _runs(batches, after)
    if not runs:
        return opened
    partition = format_of(layout).partition
    if partition.column is not None:
        periods = partition.of(rows.column(DATE))
        rows = rows.select(partition.without(rows.schema).names).append_column(partition.column, periods)
    properties = dict[str, str]()
    if schema.kind is TableKind.TABLE:
        eras = replace(Eras.of(opened), folder=folder_of(schema))
        properties = _begun(eras, _numbers([*batches, *rivals]), Seq(0)).all_properties()
    file = f"{scratch}/{new_name(table=schema.table_id)}"
    pq.write_table(rows, file, compression="none", row_group_size=ROW_GROUP_ROWS)
    tail = Tail(
        file,
        rows.num_rows,
        Path(file).stat().st_size,
        (min(first for _, first, _ in runs), max(last for _, _, last in runs)),
        rows.schema,
        properties,
        folder_of(schema),
    )
    return opened.with_tail(n, tail)


def under_the_newest(
    schema: TableSchema, batches: Sequence[pa.RecordBatch], opened: OpenTable | None
) -> tuple[TableSchema, Sequence[pa.RecordBatch]]:
    """Return records that applications wrote as records of their table's newest version so far.

    Each of several writers sees a new column only when it needs the column, so that versions alternate among their
    records. The versions differ by added columns, which are null in records that lack them; if a column accumulates, the
    records list them as unchanged.
    """
    versions = {found.version: found for found in (schema, *(TableSchema.from_arrow(b.schema) for b in batches))}
    if opened is not None:
        versions |= {found.version: found for _, found in Eras.of(opened).of_table(schema.table_id)}
    newest = versions[max(versions)]
    if len(versions) == 1:
        return newest, batches
    shape = record_schema(newest)
    return newest, [
        rows_with(shape, dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows)
        for batch in (lacking_named(batch, newest) for batch in batches)
    ]


def open_history(layout: LakeLayout, schema: TableSchema) -> OpenTable:
    """Open a table's history, to fold from.

    Raises:
        LakeUnavailable: it isn't there yet, or can't be reached.
        LakeTableForeign: another program wrote into it.
    """
    path = layout.table_path("history", schema)
    history = open_table(layout, path, layout.app_id("history", schema.table_id))
    if history is None:
        # The catalog may have a new name before a record under it has landed.
        raise LakeUnavailable(f"{schema.namespace}.{schema.name} has no history to fold yet", path=path)
    return history


def begin_history(layout: LakeLayout, schema: TableSchema, n: Seq, *, remove: Sequence[str] = ()) -> OpenTable:
    """Let a table's history begin at `n`, empty, as if it had everything up to there and had lost it.

    Args:
        schema: the table's latest.
        remove: the table's files, if the folder is there because other tables have records in it.
    """
    path, app = layout.table_path("history", schema), layout.app_id("history", schema.table_id)
    opened = _create(layout, schema, path, app, [], n)
    told = dict.fromkeys((history_from_property(schema.table_id), HISTORY_BEGUN_PROPERTY), str(int(n)))
    opened.swap(Commit(max(n, opened.n or n)), add=[], remove=remove, properties=told)
    return opened


def _placed(
    schema: TableSchema, batches: Sequence[pa.RecordBatch], before: OpenTable | None, types: Mapping[str, str]
) -> tuple[TableSchema, Sequence[pa.RecordBatch]]:
    """Return the newest schema, and records, that say in which columns of their history they lie."""
    if schema.kind is not TableKind.TABLE or not schema.is_numbered:
        return schema, batches
    have, eras = (pa.schema([]), None) if before is None else (before.schema(), Eras.of(before))
    places = ColumnPlaces(schema.table_id, have, eras, types)
    batches = places.of_batches(batches)
    return places.of(schema), batches


def _rows(
    schema: TableSchema,
    have: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    types: Mapping[str, str],
    *,
    after: Seq,
    upto: Seq,
) -> pa.Table:
    """Return the batches' records above `after` in lake types, over the union of the lake's columns and theirs."""
    tables = []
    for batch in batches:
        last = pc.max(batch.column("__seq")).as_py() if batch.num_rows else None
        assert last is None or last <= upto, f"record {last} lies above the cut {upto}"
        if last is not None and last > after:
            first = pc.min(batch.column("__seq")).as_py()
            kept = batch if first > after else batch.filter(pc.greater(batch.column("__seq"), int(after)))
            version = TableSchema.from_arrow(batch.schema)
            tables.append(
                under_names(to_lake(version, kept, types), {c.apart: c.name for c in version.columns if c.apart})
            )
    newest = pa.schema([*record_prefix(schema), *columns_in_history(schema, types)])
    name, union = schema.full_name, have
    for table in tables:
        # The table may have its new columns already, from a task that was killed before it could append.
        union = union_schema(name, union, table.schema, narrows=True)
    union = union_schema(name, union, newest)
    return pa.concat_tables([conform(table, union) for table in tables]) if tables else union.empty_table()


def _columns(layout: LakeLayout, schema: TableSchema) -> pa.Schema:
    """Return the columns of a new history."""
    period = format_of(layout).partition.column
    own = columns_in_history(schema, layout.types)
    return pa.schema([*record_prefix(schema), *([] if period is None else [period]), *own])


def _create(layout: LakeLayout, schema: TableSchema, path: str, app: str, numbers: _Numbers, n: Seq) -> OpenTable:
    properties = schema_property(schema)
    name = "logical messages"
    if schema.kind is TableKind.TABLE:
        name = f"{schema.namespace}.{schema.name}"
        eras = _begun(Eras(folder_of(schema), ()), numbers, Seq(0))
        properties |= eras.bounded().properties() | {SINCE_PROPERTY: str(int(eras.since or n))}
    return create_table(
        layout,
        path,
        app,
        NewTable(
            _columns(layout, schema),
            description=f"Every change of {name}, written by Millstream (stream {layout.stream_name}). Append-only; don't write here.",
            bounded=BOUNDED,
            partition_by=[format_of(layout).partition.name],
            properties=properties,
        ),
    )


def _eras_told(
    layout: LakeLayout, schema: TableSchema, ready: OpenTable, parts: Sequence[WrittenRecords]
) -> Mapping[str, str]:
    """Return the properties that match the records about to be appended; none if the table has them."""
    if schema.kind is TableKind.MESSAGES:
        return {}
    eras = Eras.of(ready)
    # Where an era of another table begins in the midst of some records, their numbers decide.
    inside = any(first < start <= last for part in parts for _, first, last in part.runs for start, _ in eras.native)
    numbers = _all_numbers(TableFiles(layout, ready.path), parts) if inside else _ends(parts)
    begun = _begun(eras, numbers, ready.n or Seq(0))
    return {} if begun == eras else _given_back(ready, eras, begun).all_properties()


_Numbers = Sequence[tuple[TableSchema, npt.NDArray[np.int64]]]
"""Numbers of records, with the schema that they have."""


def _numbers(batches: Sequence[pa.RecordBatch]) -> _Numbers:
    """Return the numbers of records, those of definitions with the schema that they name."""
    return [(TableSchema.from_arrow(batch.schema).defined(), batch.column("__seq").to_numpy()) for batch in batches]


def _records_in(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Return the batches without definitions, which history keeps as eras alone."""
    return [batch for batch in batches if TableSchema.from_arrow(batch.schema).kind is not TableKind.DEFINITION]


def _runs(batches: Sequence[pa.RecordBatch], after: Seq) -> tuple[tuple[TableSchema, Seq, Seq], ...]:
    """Return where the schema changes among the records above `after`: each schema, its first and its last number."""
    some = _numbers(batches)
    seqs, which = _ordered(some, after)
    if not len(seqs):
        return ()
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(which)) + 1])
    ends = np.concatenate([starts[1:] - 1, np.array([len(seqs) - 1])])
    return tuple(
        (some[int(which[start])][0], Seq(int(seqs[start])), Seq(int(seqs[end])))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def _ends(parts: Sequence[WrittenRecords]) -> _Numbers:
    """Return the first and last numbers of each run."""
    return [
        (schema, np.array([first, last] if first < last else [first], np.int64))
        for part in parts
        for schema, first, last in part.runs
    ]


def _all_numbers(files: TableFiles, parts: Sequence[WrittenRecords]) -> _Numbers:
    """Return the numbers of all records, from the files."""
    found = []
    for part in parts:
        read = [batch.column(0).to_numpy() for file in part.files for batch in files.batches(file.path, ["__seq"])]
        # A definition has no row in a file.
        ends = np.array([n for _, first, last in part.runs for n in (first, last)], np.int64)
        seqs = np.unique(np.concatenate([ends, *read]))
        found += [(schema, seqs[(seqs >= first) & (seqs <= last)]) for schema, first, last in part.runs]
    return found


def _ordered(some: _Numbers, after: Seq) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the numbers above `after` in order, and of each, its place in `some`."""
    seqs = np.concatenate([np.zeros(0, np.int64), *(numbers for _, numbers in some)])
    which = np.concatenate([np.full(len(numbers), place) for place, (_, numbers) in enumerate(some)] or [seqs])
    order = np.argsort(seqs, kind="stable")
    order = order[seqs[order] > after]
    return seqs[order], which[order]


def _begun(eras: Eras, some: _Numbers, after: Seq) -> Eras:
    """Return the eras, with new ones that begin with one table's records above `after`.

    An era begins when the table's schema changes, and when it takes over the name.
    """
    seqs, which = _ordered(some, after)
    changes = np.flatnonzero(np.diff(which)) + 1
    others = np.searchsorted(seqs, [int(start) for start, _ in eras.native])
    for place in np.unique(np.concatenate([np.zeros(1, np.int64), changes, others])).tolist():
        if place == len(seqs):
            break
        start, schema = Seq(int(seqs[place])), some[int(which[place])][0]
        known = eras.schema_at(schema.table_id, start)
        owner = eras.owner_at(start)
        if known is None or known.version != schema.version or (eras.is_native(schema) and owner != schema.table_id):
            eras = eras.having(start, schema)
    return eras


def _given_back(opened: OpenTable, eras: Eras, begun: Eras) -> Eras:
    """Return the eras, with those of tables that took the name back in the same batch.

    Such a table's records were appended before these.
    """
    for start, taken in begun.native:
        if (start, taken) in eras.native:
            continue
        for table in {schema.table_id for since, schema in eras.native if since < start} - {taken.table_id}:
            seqs = read_history(opened, after=start, upto=_END, columns=["__seq"], table=table).column("__seq")
            known = begun.schema_at(table, start)
            if not len(seqs) or known is None or not begun.is_native(known):
                continue
            again = Seq(pc.min(seqs).as_py())
            if begun.owner_at(again) != table:
                begun = begun.having(again, known)
    return begun


def _commit(schema: TableSchema, path: str, opened: OpenTable, rows: int, n: Seq) -> TableCommit:
    return TableCommit(
        table_id=TableId(schema.table_id),
        name=qualified_name(schema.namespace, schema.name),
        folder=path.rsplit("/", 1)[1],
        view="history",
        version=opened.version,
        rows=rows,
        n=n,
        since=owned_since(opened, schema.table_id),
    )
