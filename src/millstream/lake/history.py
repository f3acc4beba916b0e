"""History: every record of a table, appended exactly once, partitioned by the day of its commit.

Runs in executors: the core package and deltalake are enough. A table's records go into history in order of `seq`; the
Delta table keeps the union of all versions' columns, the newest schema stands in its properties.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake

from millstream import failpoints
from millstream.errors import LakeConflict, LakeHistoryLost, LakeTableForeign, LakeUnavailable
from millstream.lake.commits import Cut, cuts_between, last_cut
from millstream.lake.data_files import NewFile, TableFiles, new_name, swap
from millstream.lake.delta import (
    WRITER,
    OpenTable,
    add_columns,
    create_table,
    lake_errors,
    live_files,
    open_table,
    set_properties,
)
from millstream.lake.layout import MESSAGES, LakeLayout, TableCommit
from millstream.lake.types import conform, lake_columns, same_type, to_lake, union_schema
from millstream.model.ids import TableId
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.records import RECORD_PREFIX
from millstream.model.schema import TableKind, TableSchema

if TYPE_CHECKING:
    import pyarrow.dataset as ds  # brings pandas along, where that is installed: seconds that a query needn't wait

SCHEMA_PROPERTY: Final = "millstream.schema"
FROM_SEQ_PROPERTY: Final = "millstream.from_seq"
"""The first `seq` of the table that now bears this name, where one of that name was dropped before."""
ERA_PROPERTY: Final = "millstream.schema.at."
"""Followed by a `seq`: the schema of the records from there on, so that `--as-of` shows a table as it was."""
HISTORY_FROM_PROPERTY: Final = "millstream.history_from_seq"
"""Records at or below this `seq` may be gone; what they made is in `current`."""
HISTORY_BEGUN_PROPERTY: Final = "millstream.history_begun_seq"
"""The `HISTORY_FROM_PROPERTY` that a history was begun with in the place of one that was lost."""
PARTITION: Final = "__commit_date"
BOUNDED: Final = ("__seq",)
"""Whose bounds are noted with each file. It is in every record, which is what makes the bounds safe to skip files by."""
_NO_DAY: Final = "__HIVE_DEFAULT_PARTITION__"
_SCAN_ROWS: Final = 1 << 17


def append_history(layout: LakeLayout, schema: TableSchema, batches: Sequence[pa.RecordBatch], n: Seq) -> TableCommit:
    """Append one table's records up to `n` to its history, exactly once, in one commit.

    Records at or below what the table has already are dropped, so any earlier batch bounds, a second call and a call by a
    task that was thought dead do no harm.

    Args:
        layout: where the lake is.
        schema: the newest of the batches' schemas.
        batches: in `record_schema`, possibly of several versions (each batch's metadata holds its own), `seq` ascending,
            none above `n`.
        n: the cut that these records end at.

    Raises:
        LakeSchemaConflict: a column can't follow its change; nothing was written.
        LakeTableForeign: somebody else wrote into the table; nothing was written.
        LakeConflict: another task committed first; call again.
        LakeHistoryLost: the folder is gone, though the last cut says that it had records.
    """
    assert schema.kind is not TableKind.RAW, "rows of a table that is set aside have no place in the lake"
    path = layout.table_path("history", schema)
    app = layout.app_id("history", schema.table_id)
    opened = open_table(layout, path, app)
    if opened is None or opened.n is None:
        cut = last_cut(layout)
        _check_not_lost(path, schema, cut)
        opened = opened or _create(layout, schema, path, app, batches)
        if cut is not None and schema.kind is TableKind.TABLE:
            opened = _bring_past(layout, schema, opened, cut)
    if opened.n is not None and opened.n >= n:
        return _commit(schema, path, opened, 0, n)
    rows = _rows(schema, opened.schema(), batches, layout.types, after=opened.n or Seq(0), upto=n)
    if not rows.num_rows:
        return _commit(schema, path, opened, 0, n)
    ready = _ready(layout, schema, opened, rows, batches)
    if ready.n != opened.n:
        # What was filtered by the first handle's n may not be written through one that has seen another commit.
        raise LakeConflict(f"another task appended to {path} meanwhile", path=path)
    written = write_days(TableFiles(layout, path, BOUNDED), conform(rows, ready.schema()))
    failpoints.hit("lake.before_history_commit")
    swap(ready, ready.commit(n), add=written, partition_by=[PARTITION])
    failpoints.hit("lake.after_history_commit")
    return _commit(schema, path, ready, rows.num_rows, n)


def write_days(files: TableFiles, rows: pa.Table) -> list[NewFile]:
    """Write records as files of history, one for each day of theirs: in order of `seq`, not yet committed."""
    days = rows.column(PARTITION)
    rows = rows.drop_columns([PARTITION])
    written = []
    for day in pc.unique(days).to_pylist():
        some = rows.filter(pc.is_null(days) if day is None else pc.equal(days, pa.scalar(day, pa.date32())))
        written.append(in_day(files.write(some, some.schema, new_name(), partition=day_folder(day)), day))
    return written


def day_folder(day: date | None) -> str:
    """The folder of a day's files."""
    return f"{PARTITION}={_NO_DAY if day is None else day.isoformat()}"


def in_day(file: NewFile, day: date | None) -> NewFile:
    """A file as one of a day."""
    return replace(file, partition={PARTITION: None if day is None else day.isoformat()})


def open_history(layout: LakeLayout, schema: TableSchema) -> OpenTable:
    """A table's history, to fold from.

    Raises:
        LakeUnavailable: it isn't there yet, or can't be reached.
        LakeTableForeign: somebody else wrote into it.
    """
    path = layout.table_path("history", schema)
    history = open_table(layout, path, layout.app_id("history", schema.table_id))
    if history is None:
        # The catalog may know of a new name before a record under it has landed.
        raise LakeUnavailable(f"{schema.namespace}.{schema.name} has no history to fold yet", path=path)
    return history


def newest_schema(opened: OpenTable) -> TableSchema:
    """The schema that the table's newest records had.

    Raises:
        LakeTableForeign: the table's properties don't hold it.
    """
    encoded = opened.properties.get(SCHEMA_PROPERTY)
    if encoded is None:
        raise LakeTableForeign(f"{opened.path} doesn't say what its columns were at the source", path=opened.path)
    return _decode(encoded)


def read_history(
    opened: OpenTable, *, after: Seq, upto: Seq, columns: Sequence[str] | None = None, table: TableSchema | None = None
) -> pa.Table:
    """History's records in `(after, upto]`, in any order; see `scan_history`."""
    with lake_errors(opened.path):
        return scan_history(opened, after=after, upto=upto, columns=columns, table=table).to_table()


def scan_history(
    opened: OpenTable,
    *,
    after: Seq,
    upto: Seq,
    columns: Sequence[str] | None = None,
    table: TableSchema | None = None,
    only: pc.Expression | None = None,
) -> ds.Scanner:
    """A scan of history's records in `(after, upto]`; files that hold none of them aren't opened.

    Args:
        opened: the history table.
        after: exclusive.
        upto: inclusive.
        columns: all where None; names that the table lacks are left out.
        table: where given, only records of this table, not of one that bore its name before.
        only: where given, only records for which it holds.
    """
    if table is not None:
        after = Seq(max(after, first_seq(opened) - 1))
    with lake_errors(opened.path):
        files = opened.table.to_pyarrow_dataset(file_pruning_predicate=f"__seq > {int(after)} AND __seq <= {int(upto)}")
        names = None if columns is None else [name for name in columns if name in files.schema.names]
        wanted = (pc.field("__seq") > int(after)) & (pc.field("__seq") <= int(upto))
        wanted = wanted if only is None else wanted & only
        return files.scanner(
            columns=names, filter=wanted, batch_size=_SCAN_ROWS, batch_readahead=4, fragment_readahead=2
        )


def count_history(opened: OpenTable, *, after: Seq) -> Callable[[Seq], int]:
    """At most how many records lie in `(after, upto]`, for any `upto`, by what the files' statistics tell."""
    actions = live_files(opened)
    if not {"min.__seq", "max.__seq"} <= set(actions.column_names):
        return lambda _upto: 0  # no file holds a record
    counts, lows, highs = (actions.column(name).to_numpy() for name in ("num_records", "min.__seq", "max.__seq"))
    later = highs > after
    counts, lows = counts[later], lows[later]
    return lambda upto: int(counts[lows <= upto].sum())


def fold_step(
    layout: LakeLayout, opened: OpenTable, *, after: Seq, upto: Seq, rows_max: int, table: TableSchema
) -> Seq:
    """How far a fold from `after` goes: to `upto`, or to the last cut before it that is reached with `rows_max` records in memory.

    Where no cut is so near, to the next one. There is a record in each step, so that folds get on: a file's bounds alone don't
    tell, for compaction makes files of which a fold has covered half.
    """
    if count_history(opened, after=after)(upto) <= rows_max:
        return upto
    seqs = _first_seqs(opened, after=after, upto=upto, most=rows_max + 1, table=table)
    if len(seqs) <= rows_max:
        return upto
    cuts = cuts_between(layout, after, upto)
    near = [n for n in cuts if seqs[0] <= n < seqs[rows_max]]
    far = [n for n in cuts if n >= seqs[rows_max]]
    return near[-1] if near else (far[0] if far else upto)


def _first_seqs(opened: OpenTable, *, after: Seq, upto: Seq, most: int, table: TableSchema) -> npt.NDArray[np.int64]:
    """The lowest numbers of the table's records in `(after, upto]`, ascending; a few times `most` are held at once."""
    held = np.zeros(0, np.int64)
    for batch in scan_history(opened, after=after, upto=upto, columns=["__seq"], table=table).to_batches():
        held = np.concatenate([held, batch.column("__seq").to_numpy()])
        if len(held) > 4 * most:
            held = np.partition(held, most)[:most]
    return np.sort(held)[:most]


def first_seq(opened: OpenTable) -> Seq:
    """The lowest `seq` that a record of the table that now bears this name can have."""
    return Seq(int(opened.properties.get(FROM_SEQ_PROPERTY) or 0))


@dataclass(frozen=True, slots=True)
class Era:
    """What a history table was at one position: whose records, and with which columns."""

    schema: TableSchema
    first: Seq
    """No record of this table lies below it; of another that bore the name before, one may."""


def era_at(opened: OpenTable, n: Seq) -> Era | None:
    """What the table was at `n`; None where no record is so old.

    A history that was written before schemas were kept by position gives its newest schema for every one.
    """
    eras = _eras(opened)
    if not eras:
        return Era(newest_schema(opened), first_seq(opened))
    earlier = [start for start in eras if start <= n]
    if not earlier:
        return None
    schema = _decode(eras[earlier[-1]])
    first = earlier[-1]
    for start in reversed(earlier[:-1]):
        if _decode(eras[start]).table_id != schema.table_id:
            break
        first = start
    return Era(schema, first)


def history_from(opened: OpenTable) -> Seq:
    """Records at or below this may be gone; 0 where all are there."""
    return Seq(int(opened.properties.get(HISTORY_FROM_PROPERTY) or 0))


def history_begun(opened: OpenTable) -> Seq:
    """Where the history was begun anew, in the place of one that was lost; 0 where it wasn't."""
    return Seq(int(opened.properties.get(HISTORY_BEGUN_PROPERTY) or 0))


def _rows(
    schema: TableSchema,
    have: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    types: Mapping[str, str],
    *,
    after: Seq,
    upto: Seq,
) -> pa.Table:
    """The batches' records above `after` in lake types, over the union of the columns that the lake has and theirs."""
    tables = []
    for batch in batches:
        last = pc.max(batch.column("__seq")).as_py() if batch.num_rows else None
        assert last is None or last <= upto, f"record {last} lies above the cut {upto}"
        if last is not None and last > after:
            first = pc.min(batch.column("__seq")).as_py()
            kept = batch if first > after else batch.filter(pc.greater(batch.column("__seq"), int(after)))
            tables.append(to_lake(TableSchema.from_arrow(batch.schema), kept, types))
    newest = pa.schema([*RECORD_PREFIX, *lake_columns(schema, types)])
    union = have
    for columns in [*(table.schema for table in tables), newest]:
        union = union_schema(f"{schema.namespace}.{schema.name}", union, columns)
    return pa.concat_tables([conform(table, union) for table in tables]) if tables else union.empty_table()


def _create(
    layout: LakeLayout, schema: TableSchema, path: str, app: str, batches: Sequence[pa.RecordBatch]
) -> OpenTable:
    name = "logical messages" if schema.kind is TableKind.MESSAGES else f"{schema.namespace}.{schema.name}"
    return create_table(
        layout,
        path,
        app,
        pa.schema([*RECORD_PREFIX, *lake_columns(schema, layout.types)]),
        description=f"Every change of {name}, written by Millstream (stream {layout.stream_name}). Append-only; don't write here.",
        bounded=BOUNDED,
        partition_by=[PARTITION],
        properties=_properties(schema) | _begun(batches, None),
    )


def begin_history(layout: LakeLayout, schema: TableSchema, n: Seq) -> OpenTable:
    """An empty history in a folder where there is none, as if it had everything up to `n` and had lost it."""
    path, app = layout.table_path("history", schema), layout.app_id("history", schema.table_id)
    opened = _create(layout, schema, path, app, [])
    set_properties(opened, dict.fromkeys((HISTORY_FROM_PROPERTY, HISTORY_BEGUN_PROPERTY), str(int(n))))
    if opened.n is None:
        swap(opened, opened.commit(n), add=[], partition_by=[PARTITION])
    return opened


def _check_not_lost(path: str, schema: TableSchema, cut: Cut | None) -> None:
    """Raise where a folder without records had some, as the last cut says."""
    known = None if cut is None else cut.tables.get(path.rsplit("/", 1)[1])
    if known is not None and known.table_id == schema.table_id and known.history >= 0:
        name = qualified_name(schema.namespace, schema.name)
        raise LakeHistoryLost(
            f"the history of {name} is gone: {path} was moved away or deleted",
            hint=f"Put the folder back and run `millstream tables retry {name}`, or have the table copied anew, into a history that begins "
            f"there: `millstream pipeline rebuild {name} --from source`.",
            table=name,
        )


def _bring_past(layout: LakeLayout, schema: TableSchema, opened: OpenTable, cut: Cut) -> OpenTable:
    """Copy the table's records from the folder of the name that it bore before it was renamed, where there is one.

    Looked for once, before a folder's first records: what is copied is committed under the position that it reaches.
    """
    for folder in cut.tables:
        path = f"{layout.root}/history/{folder}"
        old = None if path == opened.path or folder == MESSAGES else open_table(layout, path, opened.app)
        if old is None or old.n is None:
            continue
        # A table made anew under the old name may have taken the folder over.
        taken = newest_schema(old).table_id != schema.table_id
        after, upto = (Seq(0), Seq(min(old.n, first_seq(old) - 1))) if taken else (Seq(first_seq(old) - 1), old.n)
        scan = scan_history(old, after=after, upto=upto)
        eras = _eras(old) or {first_seq(old): _encode(schema if taken else newest_schema(old))}
        past = {f"{ERA_PROPERTY}{s}": e for s, e in eras.items() if _decode(e).table_id == schema.table_id}
        with lake_errors(opened.path):
            opened.table.alter.set_table_properties(past, raise_if_not_exists=False, commit_properties=opened.upkeep())
            write_deltalake(
                opened.table,
                pa.RecordBatchReader.from_batches(scan.projected_schema, scan.to_batches()),
                mode="append",
                schema_mode="merge",
                writer_properties=WRITER,
                commit_properties=opened.commit(old.n),
            )
        return _reopen(layout, opened.path, opened.app)
    return opened


def _properties(schema: TableSchema) -> dict[str, str]:
    return {SCHEMA_PROPERTY: base64.b64encode(schema.to_arrow().serialize().to_pybytes()).decode()}


def _encode(schema: TableSchema) -> str:
    """A schema as a property: packed, for each change of columns adds one, for ever."""
    return "z" + base64.b64encode(zlib.compress(schema.to_arrow().serialize().to_pybytes(), 9)).decode()


def _decode(encoded: str) -> TableSchema:
    # A message of Arrow's begins with 0xFFFFFFFF, which in base64 is no z.
    packed = encoded.startswith("z")
    raw = base64.b64decode(encoded[1:] if packed else encoded)
    return TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(zlib.decompress(raw) if packed else raw)))


def _eras(opened: OpenTable) -> dict[Seq, str]:
    """The schemas that the table's records had, encoded, by the position from which on; ascending."""
    found = {
        Seq(int(name.removeprefix(ERA_PROPERTY))): value
        for name, value in opened.properties.items()
        if name.startswith(ERA_PROPERTY) and value is not None
    }
    return dict(sorted(found.items()))


def _begun(batches: Sequence[pa.RecordBatch], known: TableSchema | None) -> dict[str, str]:
    """The properties that tell where each schema newer than `known` begins."""
    begun = {}
    for batch in batches:
        schema = TableSchema.from_arrow(batch.schema)
        if batch.num_rows and (known is None or _newer(schema, known)):
            begun[f"{ERA_PROPERTY}{pc.min(batch.column('__seq')).as_py()}"] = _encode(schema)
            known = schema
    return begun


def _ready(
    layout: LakeLayout, schema: TableSchema, opened: OpenTable, rows: pa.Table, batches: Sequence[pa.RecordBatch]
) -> OpenTable:
    """The table with columns wide enough and properties that are true of the rows about to be appended."""
    path, app = opened.path, opened.app
    name = f"{schema.namespace}.{schema.name}"
    have = opened.schema()
    union = union_schema(name, have, rows.schema)
    if any(not same_type(union.field(field.name).type, field.type) for field in have):
        _rewrite(opened, union)
        opened = _reopen(layout, path, app)
    elif len(union) > len(have):
        add_columns(opened, union)
        opened = _reopen(layout, path, app)
    known = newest_schema(opened)
    if schema.kind is TableKind.MESSAGES or not _newer(schema, known):
        return opened
    properties = _properties(schema) | _begun(batches, known)
    if not _eras(opened):
        properties |= {f"{ERA_PROPERTY}{first_seq(opened)}": _encode(known)}
    if schema.table_id != known.table_id:
        properties[FROM_SEQ_PROPERTY] = str(pc.min(rows.column("__seq")).as_py())
    set_properties(opened, properties)
    return _reopen(layout, path, app)


def _newer(schema: TableSchema, known: TableSchema) -> bool:
    return (schema.table_id, schema.version) > (known.table_id, known.version)


def _rewrite(opened: OpenTable, union: pa.Schema) -> None:
    """Rewrite all files with wider columns: Delta's type widening is beyond delta-rs. Rare, and bounded in memory."""
    with lake_errors(opened.path):
        batches = opened.table.to_pyarrow_dataset().scanner().to_batches()
        wide = (
            piece
            for batch in batches
            if batch.num_rows
            for piece in conform(pa.Table.from_batches([batch]), union).to_batches()
        )
        write_deltalake(
            opened.table,
            pa.RecordBatchReader.from_batches(union, wide),
            mode="overwrite",
            schema_mode="overwrite",
            partition_by=[PARTITION],
            writer_properties=WRITER,
            commit_properties=opened.upkeep(exact=True),
        )


def _reopen(layout: LakeLayout, path: str, app: str) -> OpenTable:
    opened = open_table(layout, path, app)
    assert opened is not None
    return opened


def _commit(schema: TableSchema, path: str, opened: OpenTable, rows: int, n: Seq) -> TableCommit:
    return TableCommit(
        table_id=TableId(schema.table_id),
        name=qualified_name(schema.namespace, schema.name),
        folder=path.rsplit("/", 1)[1],
        view="history",
        version=opened.version,
        rows=rows,
        n=n,
    )
