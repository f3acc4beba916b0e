"""Current: one row a key, the source's columns, folded from history in one commit a fold.

A fold reads history above the n that `current` stands at, so it may come at any time, twice, or after a crash: the same
rows come out. Small tables are rewritten whole; large ones are merged, which rewrites only files that may hold a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from millstream import failpoints
from millstream.errors import LakeUnavailable
from millstream.lake.build import Built, build_rows
from millstream.lake.commits import cuts_between
from millstream.lake.delta import WRITER, OpenTable, create_table, lake_errors, open_table, size_bytes
from millstream.lake.fold import EXACT, Folded, Lookup, fold_records
from millstream.lake.history import count_history, newest_schema, read_history
from millstream.lake.keys import Keys, key_codes
from millstream.lake.layout import LakeLayout, TableCommit, folder_name, has_current
from millstream.lake.types import conform, lake_columns, same_type, widest
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

REWRITE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Tables up to here are rewritten whole by a fold: one file, and quicker than delta-rs's MERGE."""
BUILD_ROWS_MIN: Final = 500_000
"""Fewer records are folded in memory, in one read."""
FOLD_ROWS_MAX: Final = 2_000_000
"""Records that one fold holds in memory: some hundred MiB of short rows."""
_BATCH_ROWS: Final = 1 << 19
_GONE: Final = "__gone"
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
"""Names that need no thought inside a MERGE's expressions; tables with others are rewritten."""


def fold_table(
    layout: LakeLayout,
    schema: TableSchema,
    upto: Seq,
    *,
    rewrite_bytes_max: int = REWRITE_BYTES_MAX,
    build_rows_min: int = BUILD_ROWS_MIN,
    rows_max: int = FOLD_ROWS_MAX,
) -> TableCommit:
    """Bring a table's `current` to `upto`, in one commit; nothing is done where it stands there.

    Where very many records wait, it goes there by way of earlier cuts, one commit each.

    Call it only once the history up to `upto` is committed, and not while the table's copy runs.

    Args:
        layout: where the lake is.
        schema: names the table; the columns folded are those of the newest schema in history.
        upto: a cut that history has reached.
        rewrite_bytes_max: tables above this are merged instead of rewritten.
        build_rows_min: a first fold of more records than this is done in bounded memory, reading history twice.
        rows_max: more records than this are folded in several steps.

    Raises:
        LakeTableForeign: somebody else wrote into `current` or history.
        LakeUnavailable: history isn't there yet, or can't be reached.
        LakeConflict: another task committed first; call again.
    """
    assert has_current(schema), f"{schema.namespace}.{schema.name} has history only"
    path = layout.table_path("current", schema)
    app = layout.app_id("current", schema.table_id)
    opened = open_table(layout, path, app)
    if opened is not None and opened.n is not None and opened.n >= upto:
        return _commit(schema, opened, 0, opened.n)
    history = open_table(layout, layout.table_path("history", schema), layout.app_id("history", schema.table_id))
    if history is None:
        # The catalog may know of a new name before a record under it has landed.
        raise LakeUnavailable(f"{schema.namespace}.{schema.name} has no history to fold yet", path=path)
    newest = newest_schema(history)
    if newest.table_id != schema.table_id:
        # Dropped at the source and made again: `current` is the new table's.
        return _commit(schema, opened, 0, upto)
    schema = newest
    columns = current_columns(layout, schema, history)
    first = opened is None or opened.n is None
    if opened is None:
        opened = _create(layout, schema, path, app, columns)
    if first and schema.key and count_history(history, after=Seq(0))(upto) > build_rows_min:
        return _commit(schema, opened, _build(opened, build_rows(history, schema, columns, upto), columns, upto), upto)
    step = upto if first else _step(layout, history, opened.n or Seq(0), upto, rows_max)
    tail = read_history(history, after=opened.n or Seq(0), upto=step, columns=tail_columns(columns), table=schema)
    held = opened

    def lookup(keys: Keys) -> pa.Table:
        return rows_of(held.table, keys, columns)

    folded = fold_records(tail, schema, columns, _nothing(columns) if first else lookup)
    del tail
    written = _write(opened, schema, columns, folded, step, first=first, rewrite_bytes_max=rewrite_bytes_max)
    if step == upto:
        return _commit(schema, opened, written, upto)
    rest = fold_table(layout, schema, upto, rewrite_bytes_max=rewrite_bytes_max, rows_max=rows_max)
    return replace(rest, rows=rest.rows + written)


def _step(layout: LakeLayout, history: OpenTable, after: Seq, upto: Seq, rows_max: int) -> Seq:
    """The furthest cut that a fold can reach with `rows_max` records in memory; the next one where none is so near."""
    count = count_history(history, after=after)
    if count(upto) <= rows_max:
        return upto
    cuts = cuts_between(layout, after, upto)
    near = [n for n in cuts if count(n) <= rows_max]
    # A cut without records would bring the fold no further.
    far = [n for n in cuts if count(n) > rows_max]
    return near[-1] if near and count(near[-1]) else (far[0] if far else upto)


def current_columns(layout: LakeLayout, schema: TableSchema, history: OpenTable) -> pa.Schema:
    """The columns of `current`: the newest schema's, in the types that history keeps them in."""
    have = history.schema()
    fields = []
    for field in lake_columns(schema, layout.types):
        index = have.get_field_index(field.name)
        wide = None if index < 0 else widest(field.type, have.field(index).type)
        fields.append(field if wide is None else pa.field(field.name, wide))
    # Statistics cover a table's first columns, and a fold looks for keys.
    keys = [field for field in fields if field.name in schema.key]
    return pa.schema([*keys, *(field for field in fields if field.name not in schema.key)])


def tail_columns(columns: pa.Schema) -> list[str]:
    """What a fold reads of history."""
    return ["__op", "__seq", "__unchanged", EXACT.name, "__before", *columns.names]


def rows_of(table: DeltaTable, keys: Keys, columns: pa.Schema) -> pa.Table:
    """Rows of `current` that may have one of the keys: all whose first key column holds one of their values."""
    wanted = pc.field(keys.names[0]).isin(keys.columns[0].drop_null())
    if keys.columns[0].null_count:
        wanted = wanted | pc.field(keys.names[0]).is_null()
    files = table.to_pyarrow_dataset()
    return conform(files.to_table(filter=wanted), pa.schema([*columns, EXACT]))


def surviving(rows: pa.Table, folded: Folded, taken: npt.NDArray[np.bool_] | None = None) -> pa.Table:
    """Rows of `current` that a fold leaves in place.

    For a bag (`taken` given) the counts in `taken` are used up as equal rows go by: one entry a row of `folded.gone`.
    """
    have, gone = key_codes([Keys.of(rows, folded.gone.names), folded.gone], signed_zero=taken is not None)
    if taken is None:
        return rows.filter(pa.array(~np.isin(have, gone)))
    keep = np.ones(len(have), bool)
    open_by_code: dict[int, list[int]] = {}
    for place in np.flatnonzero(~taken).tolist():
        open_by_code.setdefault(int(gone[place]), []).append(place)
    for row in np.flatnonzero(np.isin(have, gone)).tolist():
        places = open_by_code.get(int(have[row]))
        if places:
            taken[places.pop()] = True
            keep[row] = False
    return rows.filter(pa.array(keep))


def _nothing(columns: pa.Schema) -> Lookup:
    empty = pa.schema([*columns, EXACT]).empty_table()
    return lambda _keys: empty


def _create(layout: LakeLayout, schema: TableSchema, path: str, app: str, columns: pa.Schema) -> OpenTable:
    return create_table(
        layout,
        path,
        app,
        columns,
        description=(
            f"The rows of {schema.namespace}.{schema.name}, written by Millstream (stream {layout.stream_name}). Don't write here."
        ),
    )


def _build(opened: OpenTable, built: Built, columns: pa.Schema, upto: Seq) -> int:
    target = pa.schema([*columns, EXACT]) if built.exact else columns
    failpoints.hit("lake.before_fold_commit")
    with lake_errors(opened.path):
        _overwrite(opened, target, built.rows, upto)
    failpoints.hit("lake.after_fold_commit")
    return built.count


def _overwrite(opened: OpenTable, target: pa.Schema, rows: Iterable[pa.Table], upto: Seq) -> None:
    """Make the table hold just these rows, in one commit; they are pulled one by one."""
    pieces = (piece for some in rows for piece in conform(some, target).to_batches())
    write_deltalake(
        opened.table,
        pa.RecordBatchReader.from_batches(target, pieces),
        mode="overwrite",
        schema_mode="overwrite",
        writer_properties=WRITER,
        commit_properties=opened.commit(upto),
    )


def _write(
    opened: OpenTable,
    schema: TableSchema,
    columns: pa.Schema,
    folded: Folded,
    upto: Seq,
    *,
    first: bool,
    rewrite_bytes_max: int,
) -> int:
    have = opened.schema()
    exact_held = EXACT.name in have.names
    exact_new = folded.rows.column(EXACT.name).null_count < folded.rows.num_rows
    target = pa.schema([*columns, EXACT]) if exact_held or exact_new else columns
    evolved = _evolved(have, target)
    if not first and folded.records == 0 and not evolved:
        return 0
    failpoints.hit("lake.before_fold_commit")
    replaced = first or folded.truncated
    with lake_errors(opened.path):
        mergeable = not replaced and evolved != "rewrite" and _mergeable(schema, folded, target)
        if mergeable and size_bytes(opened.table) > rewrite_bytes_max:
            _merge(opened, target, folded, schema.key, upto)
        else:
            _rewrite(opened, target, folded, upto, keyed=bool(schema.key), replaced=replaced)
    failpoints.hit("lake.after_fold_commit")
    return int(folded.rows.num_rows + len(folded.gone))


def _evolved(have: pa.Schema, target: pa.Schema) -> str:
    """What the columns need: nothing (empty), `add`, or `rewrite`."""
    if any(target.get_field_index(field.name) < 0 for field in have):
        return "rewrite"
    for field in target:
        index = have.get_field_index(field.name)
        if index >= 0 and not same_type(have.field(index).type, field.type):
            return "rewrite"
    return "add" if len(have) < len(target) else ""


def _mergeable(schema: TableSchema, folded: Folded, target: pa.Schema) -> bool:
    if not schema.key or not folded.gone.typed or not all(_PLAIN_NAME.match(name) for name in target.names):
        return False
    return not any(pa.types.is_floating(c.type) or pa.types.is_nested(c.type) for c in folded.gone.columns)


def _rewrite(opened: OpenTable, target: pa.Schema, folded: Folded, upto: Seq, *, keyed: bool, replaced: bool) -> None:
    full = pa.schema([*(field for field in target if field.name != EXACT.name), EXACT])
    kept = iter(()) if replaced else opened.table.to_pyarrow_dataset().scanner(batch_size=_BATCH_ROWS).to_batches()

    def rows() -> Iterator[pa.Table]:
        taken = None if keyed else np.zeros(len(folded.gone), bool)
        for batch in kept:
            if batch.num_rows:
                yield surviving(conform(pa.Table.from_batches([batch]), full), folded, taken)
        yield folded.rows

    _overwrite(opened, target, rows(), upto)


def _merge(opened: OpenTable, target: pa.Schema, folded: Folded, key: tuple[str, ...], upto: Seq) -> None:
    rows = conform(folded.rows, target)
    put = Keys.of(folded.rows, key)
    gone_codes, put_codes = key_codes([folded.gone, put])
    deleted = folded.gone.to_table().filter(pa.array(~np.isin(gone_codes, put_codes)))
    source = pa.concat_tables(
        [
            rows.append_column(_GONE, pa.array(np.zeros(rows.num_rows, bool))),
            conform(deleted, target).append_column(_GONE, pa.array(np.ones(deleted.num_rows, bool))),
        ]
    )
    values = {f"`{name}`": f"s.`{name}`" for name in target.names}
    (
        opened.table.merge(
            source,
            " AND ".join(f"t.`{name}` = s.`{name}`" for name in key),
            source_alias="s",
            target_alias="t",
            merge_schema=True,
            writer_properties=WRITER,
            commit_properties=opened.commit(upto),
        )
        .when_matched_delete(f"s.`{_GONE}`")
        .when_matched_update({name: value for name, value in values.items() if name[1:-1] not in key})
        .when_not_matched_insert(values, f"NOT s.`{_GONE}`")
        .execute()
    )


def _commit(schema: TableSchema, opened: OpenTable | None, rows: int, n: Seq) -> TableCommit:
    return TableCommit(
        table_id=schema.table_id,
        name=qualified_name(schema.namespace, schema.name),
        folder=folder_name(schema.namespace, schema.name),
        view="current",
        version=-1 if opened is None else opened.version,
        rows=rows,
        n=n,
    )
