"""`current`: one row a key, the source's columns, folded from history in one commit a fold.

A fold reads history above the position of `current`. So it may run at any time, twice, or after a crash: the result
is the same rows. It rewrites only the files (leaves) that may hold a key of its records.

It has three steps, which may run in three processes: `begin_fold` plans the work, `Fold.write` writes the files of
one part of the table (parts are independent), `Fold.commit` swaps them in. An interrupted fold leaves files that no
version names. Their names contain the version they were meant for, so that maintenance can identify leftovers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from shlex import quote
from typing import Final

import numpy as np
import pyarrow as pa

from millstream import failpoints
from millstream.errors import LakeError, LakeUnavailable
from millstream.lake.column_conversion import EXACT, lake_columns, same_type
from millstream.lake.column_names import names_at, own_types, schema_at
from millstream.lake.data_files import NewFile, TableFiles
from millstream.lake.exactly_once import reached
from millstream.lake.file_statistics import boundable
from millstream.lake.filled_columns import inexact_texts
from millstream.lake.folded.build import BuildPart, build_rows, plan_build
from millstream.lake.folded.current_rules import Folded, fold_records
from millstream.lake.folded.key_leaves import LEAF_BYTES, Leaf, Leaves
from millstream.lake.folded.leaf_rewriting import (
    Change,
    LeafWriter,
    Touched,
    having_partitions,
    in_their_partitions,
    named,
    partitions_in,
    placed,
    touched,
)
from millstream.lake.folded.left_partitions import UNKNOWN, without_left
from millstream.lake.history import open_history
from millstream.lake.history_folder import history_from, lacks_beginning
from millstream.lake.history_scan import Held, count_history, emptied, fold_step, scan_live
from millstream.lake.layout import LakeLayout, TableCommit, folder_of, has_current
from millstream.lake.new_and_wider_columns import widest
from millstream.lake.row_identity import Keys, having
from millstream.lake.schema_history import newest_schema
from millstream.lake.table_format import Commit, NewTable, OpenTable, create_table, format_of, open_table
from millstream.model.column_renames import FilledNames, name_in_rows
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.records import PARTITION_OID
from millstream.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class FoldSizes:
    """Bounds of a fold's memory, and sizes of the files that it writes."""

    leaf_bytes: int = LEAF_BYTES
    small_bytes: int = 4 << 20
    """A table up to this size is rewritten whole: one file, and few of them over time."""
    part_bytes: int = 4 * LEAF_BYTES
    """Bytes of the files that one part of a fold rewrites; parts run in parallel."""
    rows_max: int = 1_000_000
    """Records that a fold holds in memory: some hundred MiB of short rows."""
    fold_bytes: int = 512 << 20
    """Approximate Arrow bytes of these records: long rows are fewer."""
    build_rows_min: int = 500_000
    """A first fold of fewer records is done in memory, in one read, unless they take more than `fold_bytes`."""
    build_bytes: int = 256 << 20
    """Approximate Arrow bytes that a part of a first fold holds."""

    @property
    def at_once(self) -> tuple[int, int]:
        """How many records a fold holds in memory, and about how many bytes of Arrow."""
        return self.rows_max, self.fold_bytes


DEFAULT_SIZES: Final = FoldSizes()


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """The plan of a fold. A value: crosses processes."""

    layout: LakeLayout
    schema: TableSchema
    columns: pa.Schema
    """Columns of `current`, without `__exact`."""
    exact: bool
    """Whether the table has `__exact`."""
    bounded: tuple[str, ...]
    """Columns whose bounds are recorded with each file."""
    after: Seq | None
    """The table's position; None before its first fold."""
    upto: Seq
    """The table's position after this fold."""
    version: int
    """Version of the Delta table that was read."""
    anew: bool
    """Whether all files are rewritten, in columns that the table doesn't have yet."""
    sizes: FoldSizes
    renamed: FilledNames | None = None
    """The columns' names in the table's files, if they are others, and values that the files lack."""
    parts: tuple[tuple[int, ...], ...] = ()
    """Indexes of the leaves that each part rewrites."""
    build: tuple[BuildPart, ...] = ()
    """Parts of a first fold in bounded memory."""

    @property
    def target(self) -> pa.Schema:
        """The columns of the table's files."""
        return pa.schema([*self.columns, EXACT]) if self.exact else self.columns

    @property
    def part_count(self) -> int:
        """Number of parts."""
        return len(self.build) or len(self.parts)

    @property
    def path(self) -> str:
        """The table's folder."""
        return self.layout.table_path("current", self.schema)

    @property
    def app(self) -> str:
        """The app id of the commits."""
        return self.layout.app_id("current", self.schema.table_id)

    def forgets(self, folded: Folded) -> bool:
        """Whether no existing row stays: the table was truncated, or its rows are of another table of this name."""
        return self.after is None or folded.truncated

    def leaves(self, opened: OpenTable) -> Leaves:
        """Return the table's files."""
        renamed = self.renamed or {}
        return Leaves(opened, [name_in_rows(renamed, name) for name in self.schema.key])

    def history(self) -> OpenTable:
        """Return the table's history, opened now."""
        return open_history(self.layout, self.schema)


@dataclass(frozen=True, slots=True)
class FoldOutcome:
    """The outcome of a fold."""

    commit: TableCommit
    live_bytes: int
    """Size in bytes of `current`'s files now."""
    removed_bytes: int = 0
    """Size in bytes of the files that were replaced."""


@dataclass
class Fold:
    """A fold in progress. `write` may be called in other processes, on a `Fold` of the same plan."""

    plan: FoldPlan
    held: tuple[OpenTable, Leaves, Folded] | None = field(default=None, repr=False)
    """The data that `begin_fold` has already read."""

    @cached_property
    def _read(self) -> tuple[OpenTable, Leaves, Folded]:
        """Return the table as it was planned, and the folded records."""
        if self.held is not None:
            return self.held
        opened = _at(self.plan)
        leaves = self.plan.leaves(opened)
        return opened, leaves, _folded(self.plan, leaves)

    def write(self, part: int) -> list[NewFile]:
        """Write the files of one part.

        Raises:
            LakeError: a record leaves a column unchanged and the lake holds no earlier row of it.
        """
        plan = self.plan
        files = TableFiles(plan.layout, plan.path, plan.bounded, plan.renamed)
        writer = LeafWriter(
            files,
            plan.target,
            plan.schema.key,
            plan.version + 1,
            leaf_bytes=plan.sizes.leaf_bytes,
            renamed=plan.renamed,
        )
        if plan.build:
            writer.add(build_rows(plan.history(), plan.schema, plan.columns, plan.upto, plan.build[part]))
            return writer.written()
        _, leaves, folded = self._read
        key = plan.schema.key
        if not key:
            self._rewrite_bag(writer, leaves, folded)
            return writer.written()
        put_at = placed(leaves, Keys.of(folded.rows, key), leaf_bytes=plan.sizes.leaf_bytes)
        which = touched(leaves, folded.gone, put_at, everything=False).gone
        changes = []
        for place in plan.parts[part]:
            leaf = leaves.files[place] if place < len(leaves) and not plan.forgets(folded) else None
            some = which.get(place)
            gone = folded.gone if some is None else folded.gone.take(some)
            put = folded.rows.filter(pa.array(put_at == place))
            changes.append((place, Change(leaf, gone, put, folded.left)))
        writer.rewrite(changes)
        return writer.written()

    def _rewrite_bag(self, writer: LeafWriter, leaves: Leaves, folded: Folded) -> None:
        """For a table without a key: search for each deleted row in every file, until it is found."""
        taken = np.zeros(len(folded.gone), bool)
        nothing = folded.rows.slice(0, 0)
        old = () if self.plan.forgets(folded) else leaves.files
        gone = self._placed_gone(folded, old)
        changes = ((place, Change(leaf, gone, nothing, folded.left)) for place, leaf in enumerate(old))
        writer.rewrite(changes, taken)
        writer.add(folded.rows)

    def _placed_gone(self, folded: Folded, old: Sequence[Leaf]) -> Keys:
        """Return a bag's rows to delete, in the partitions in which files have them (`in_their_partitions`)."""
        plan, gone = self.plan, folded.gone
        files = TableFiles(plan.layout, plan.path)
        if PARTITION_OID.name not in gone.names or not len(gone):
            return gone
        is_known = (not (partitions_in(files, leaf.path) == UNKNOWN).any() for leaf in old)
        if gone.columns[gone.names.index(PARTITION_OID.name)].null_count == 0 and all(is_known):
            return gone
        shape = pa.schema([*plan.columns, EXACT])
        read = (named(files.read(leaf.path), plan.renamed, shape) for leaf in old)
        return in_their_partitions(gone, (without_left(rows, folded.left) for rows in read))

    def commit(self, written: Sequence[NewFile]) -> FoldOutcome:
        """Commit the parts' files in place of the old ones.

        Raises:
            LakeConflict: the table has changed since the fold began; begin another.
        """
        plan = self.plan
        opened = _at(plan)
        leaves = plan.leaves(opened)
        rewritten = (
            range(len(leaves)) if plan.anew else sorted({p for part in plan.parts for p in part if p < len(leaves)})
        )
        removed = [leaves.files[place] for place in rewritten]
        failpoints.hit("lake.before_fold_commit")
        opened.swap(
            Commit(plan.upto, exact=True, holds=True),
            add=written,
            remove=() if plan.anew else [leaf.path for leaf in removed],
            mode="overwrite" if plan.anew else "append",
            schema=plan.target if plan.anew else None,
            renamed=plan.renamed,
            key=plan.schema.key,
        )
        failpoints.hit("lake.after_fold_commit")
        if not _bounds_stand(plan, opened):
            # Not earlier: the previous files lack these bounds, and this commit's files have the old ones as well.
            opened.set_bounded(boundable(plan.columns, plan.schema.key))
        removed_bytes = sum(leaf.size_bytes for leaf in removed)
        live_bytes = leaves.size_bytes - removed_bytes + sum(file.size_bytes for file in written)
        rows = sum(file.rows for file in written)
        return FoldOutcome(_commit(plan.schema, opened, rows, plan.upto), live_bytes, removed_bytes)


def fold_table(
    layout: LakeLayout, schema: TableSchema, upto: Seq, *, sizes: FoldSizes = DEFAULT_SIZES, anew: bool = False
) -> TableCommit:
    """Fold a table's `current` to `upto`, in this process; do nothing if it is there already.

    If very many records wait, it proceeds by way of earlier cuts, one commit each.

    Args and errors: as of `begin_fold`.
    """
    while True:
        begun = begin_fold(layout, schema, upto, sizes=sizes, anew=anew)
        if isinstance(begun, FoldOutcome):
            return begun.commit
        done = begun.commit([file for part in range(begun.plan.part_count) for file in begun.write(part)])
        if done.commit.n >= upto:
            return done.commit


def begin_fold(
    layout: LakeLayout, schema: TableSchema, upto: Seq, *, sizes: FoldSizes = DEFAULT_SIZES, anew: bool = False
) -> Fold | FoldOutcome:
    """Plan the fold of a table's `current` to `upto`, or as far as one fold goes.

    Call it only once the history up to `upto` is committed, and not while the table's copy runs.

    Args:
        schema: names the table; the columns folded are those of the newest schema in history.
        upto: a cut that history has reached.
        `anew`: rebuild it all from history, whatever exists; no existing file is read, and one commit replaces them.

    Returns:
        The fold to carry out, or the existing state if nothing has to be done.

    Raises:
        LakeTableForeign: another program wrote into `current` or history.
        LakeUnavailable: history isn't there yet, or can't be reached.
        LakeConflict: another task committed first; call again.
        LakeError: a record leaves a column unchanged and the lake holds no earlier row of it.
    """
    assert has_current(schema), f"{schema.namespace}.{schema.name} has history only"
    path = layout.table_path("current", schema)
    app = layout.app_id("current", schema.table_id)
    opened = open_table(layout, path, app)
    done = reached(opened, upto, holds=True)
    if done is not None:
        if not anew:
            return _standing(schema, opened, done)
        upto = done
    history = open_history(layout, schema)
    newest = newest_schema(history)
    if newest.table_id != schema.table_id:
        # Another table has the name by now, and `current` is its table.
        return _standing(schema, opened, upto)
    schema = schema_at(history, newest, upto)
    columns = current_columns(layout, schema, history)
    opened = (opened or _create(layout, schema, path, app, columns)).ready_for(columns)
    first = anew or not opened.held
    stands = Seq(0) if first else opened.n or Seq(0)
    gone = history_from(history)
    if stands < gone and lacks_beginning(history):
        if not emptied(history, gone, upto, schema.table_id):
            raise LakeError(
                f"{schema.namespace}.{schema.name} can't be built from its history, which was dropped up to {gone}"
                + (f", from what it was at {stands}" if stands else ""),
                hint=f"Run `millstream pipeline rebuild {quote(schema.full_name)} --from source` to copy the table again.",
                path=path,
            )
        first = True
    step = upto
    if not first:
        step = fold_step(layout, history, after=stands, upto=upto, most=sizes.at_once, table=schema.table_id)
    if step < upto and emptied(history, stands, upto, schema.table_id):
        # In steps, readers would see the partial table in between: a copy that follows an earlier one empties it
        # first.
        first, step = True, upto
    if step < upto:
        schema = schema_at(history, newest, step)
        columns = current_columns(layout, schema, history)
    bounded = _bounded(opened, columns, schema.key)
    if first and schema.key and _is_large(history, schema, upto, sizes):
        parts, exact = plan_build(history, schema, columns, upto, part_bytes=sizes.build_bytes)
        plan = FoldPlan(layout, schema, columns, exact, bounded, None, upto, opened.version, True, sizes)
        return Fold(replace(plan, build=parts))
    after = None if first else opened.n
    renamed = None if after is None else names_at(history, schema, after)
    plan = FoldPlan(layout, schema, columns, False, bounded, after, step, opened.version, first, sizes, renamed)
    return _begun(plan, opened, history)


def _is_large(history: OpenTable, schema: TableSchema, upto: Seq, sizes: FoldSizes) -> bool:
    """Whether the first fold of a table's records is built in parts."""
    return (
        count_history(history, after=Seq(0))(upto) > sizes.build_rows_min
        or Held.of(history, after=Seq(0), upto=upto, table=schema.table_id).size_bytes > sizes.fold_bytes
    )


def _begun(plan: FoldPlan, opened: OpenTable, history: OpenTable) -> Fold | FoldOutcome:
    """Return the fold with its parts; columns to add have already been added to the table."""
    leaves = plan.leaves(opened)
    folded = _folded(plan, leaves, history)
    have = opened.schema()
    exact = EXACT.name in have.names or folded.rows.column(EXACT.name).null_count < folded.rows.num_rows
    exact = exact or bool(inexact_texts(plan.renamed or {}, plan.columns))
    plan = replace(plan, exact=exact)
    evolved = _evolved(have, plan.target)
    if plan.after is not None and folded.records == 0 and not evolved and plan.renamed is None:
        return _standing(plan.schema, opened, plan.upto, leaves.size_bytes)
    anew = plan.anew or evolved == "rewrite" or plan.renamed is not None or not _bounds_stand(plan, opened)
    if evolved == "add" and not anew:
        opened.add_columns(plan.target)
        plan = replace(plan, version=opened.version)
    everything = anew or folded.truncated or not plan.schema.key or leaves.size_bytes < plan.sizes.small_bytes
    hit = _hit(leaves, folded, plan, everything=everything).hit
    plan = replace(plan, anew=anew, parts=_parts(hit, leaves, plan.sizes.part_bytes if plan.schema.key else None))
    return Fold(plan, (opened, leaves, folded))


def _bounded(opened: OpenTable, columns: pa.Schema, key: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the key, and those that had bounds before, under another key."""
    before = [name for name in opened.bounded if columns.get_field_index(name) >= 0 and name not in key]
    return boundable(columns, [*key, *before])


def _bounds_stand(plan: FoldPlan, opened: OpenTable) -> bool:
    """Whether the table declares bounds for the key's columns."""
    return opened.bounded == boundable(plan.columns, plan.schema.key)


def _hit(leaves: Leaves, folded: Folded, plan: FoldPlan, *, everything: bool) -> Touched:
    if not plan.schema.key:
        return Touched(tuple(range(len(leaves) + 1)), {})
    put_at = placed(leaves, Keys.of(folded.rows, plan.schema.key), leaf_bytes=plan.sizes.leaf_bytes)
    also = [] if everything else having_partitions(TableFiles(plan.layout, plan.path), leaves, folded.left)
    return touched(leaves, folded.gone, put_at, everything=everything, also=also)


def _parts(hit: Sequence[int], leaves: Leaves, part_bytes: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the leaves to rewrite, in runs of similar size; one run if `part_bytes` is None."""
    parts: list[list[int]] = [[]]
    size = 0
    for place in hit:
        if part_bytes is not None and size >= part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(place)
        size += leaves.files[place].size_bytes if place < len(leaves) else 0
    return tuple(map(tuple, parts))


def _folded(plan: FoldPlan, leaves: Leaves, history: OpenTable | None = None) -> Folded:
    """Return the folded records after the table's position."""
    columns = plan.columns
    tail = scan_live(
        history or plan.history(),
        plan.schema,
        after=plan.after or Seq(0),
        upto=plan.upto,
        columns=tail_columns(columns),
        own=columns,
    ).to_table()
    files = TableFiles(plan.layout, plan.path)

    def lookup(keys: Keys) -> pa.Table:
        if plan.after is None:
            return pa.schema([*columns, EXACT]).empty_table()
        return _rows_in(files, leaves, keys, columns, plan.renamed)

    return fold_records(tail, plan.schema, columns, lookup)


def _at(plan: FoldPlan) -> OpenTable:
    opened = open_table(plan.layout, plan.path, plan.app, version=plan.version)
    if opened is None:
        raise LakeUnavailable(f"the table {plan.path} is gone", path=plan.path)
    return opened


def current_columns(layout: LakeLayout, schema: TableSchema, history: OpenTable) -> pa.Schema:
    """Return the columns of `current`: the newest schema's, in the types that history keeps them in.

    A partitioned table's rows have `__partition_oid`, too, which queries don't show.
    """
    have = history.schema()
    own = own_types(history, schema, layout.types)
    have = have if own is None else own
    fields = []
    for column in lake_columns(schema, layout.types):
        index = have.get_field_index(column.name)
        wide = None if index < 0 else widest(column.type, have.field(index).type)
        fields.append(column if wide is None else pa.field(column.name, wide))
    # Statistics cover a table's first columns, and a fold searches for keys.
    keys = [column for column in fields if column.name in schema.key]
    others = (column for column in fields if column.name not in schema.key)
    partition = [PARTITION_OID] if schema.partitioned else []
    return format_of(layout).stored_schema(pa.schema([*keys, *others, *partition]))


def tail_columns(columns: pa.Schema) -> list[str]:
    """Return the columns of history that a fold reads."""
    return ["__op", "__seq", "__unchanged", EXACT.name, "__before", *columns.names]


def _rows_in(
    files: TableFiles, leaves: Leaves, keys: Keys, columns: pa.Schema, renamed: FilledNames | None
) -> pa.Table:
    """Return rows that may have one of the keys.

    They come from leaves that may have such rows, and share a value of the first key column.
    """
    shape = pa.schema([*columns, EXACT])
    hit, _ = leaves.holding(keys)
    read = (named(files.read(leaves.files[leaf].path), renamed, shape) for leaf in np.flatnonzero(hit).tolist())
    return pa.concat_tables([shape.empty_table(), *(having(rows, keys) for rows in read)])


def _create(layout: LakeLayout, schema: TableSchema, path: str, app: str, columns: pa.Schema) -> OpenTable:
    return create_table(
        layout,
        path,
        app,
        NewTable(
            columns,
            description=f"The rows of {schema.namespace}.{schema.name}, written by Millstream (stream {layout.stream_name}). Don't write here.",
            bounded=boundable(columns, schema.key),
            key=schema.key,
        ),
    )


def _evolved(have: pa.Schema, target: pa.Schema) -> str:
    """Return what the columns need: nothing (empty), `add`, or `rewrite`."""
    if any(target.get_field_index(column.name) < 0 for column in have):
        return "rewrite"
    for column in target:
        index = have.get_field_index(column.name)
        if index >= 0 and not same_type(have.field(index).type, column.type):
            return "rewrite"
    return "add" if len(have) < len(target) else ""


def _standing(schema: TableSchema, opened: OpenTable | None, n: Seq, live_bytes: int = 0) -> FoldOutcome:
    return FoldOutcome(_commit(schema, opened, 0, n), live_bytes)


def _commit(schema: TableSchema, opened: OpenTable | None, rows: int, n: Seq) -> TableCommit:
    return TableCommit(
        table_id=schema.table_id,
        name=qualified_name(schema.namespace, schema.name),
        folder=folder_of(schema),
        view="current",
        version=-1 if opened is None else opened.version,
        rows=rows,
        n=n,
    )
