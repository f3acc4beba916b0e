"""The table of versions (`scd2`): every version that a row has had, folded from history in one commit a fold.

It is partitioned by `is_current`. Open versions (one a key) lie in leaves, as the rows of `current` do, and a fold
rewrites only leaves that may hold a key of its records. Ended versions are only appended. From earlier records, a
fold also needs the greatest time so far (`Versions.clock_us`), which is committed with the rows as a second number of the commit.

Versions belong to a name. When another table takes over a name (dropped and created again, renamed, given back),
the previous table's open versions end at the time of its first record there. Its rows begin then, in their state at
that time; its past under other names makes no versions here. If history has lost records, the rows of
`current`, as of its cut, take their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from shlex import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream import failpoints
from millstream.errors import LakeError, LakeFilesGone, LakeUnavailable
from millstream.lake.column_conversion import EXACT, conform, same_type
from millstream.lake.commit_cuts import cut_at, cuts_between
from millstream.lake.data_files import NewFile, TableFiles, new_name
from millstream.lake.exactly_once import reached
from millstream.lake.file_statistics import boundable
from millstream.lake.filled_columns import inexact_texts
from millstream.lake.folded.committed_times import at_entry, clock_of, continues, entry_us, new_times, taken_since
from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldOutcome, FoldSizes
from millstream.lake.folded.ended_versions import EndedVersions
from millstream.lake.folded.key_leaves import Leaves
from millstream.lake.folded.leaf_rewriting import Change, LeafWriter, having_partitions, named, placed, touched
from millstream.lake.folded.scd2_rules import (
    BEGAN_BY,
    ENDED_FOLDER,
    IS_CURRENT,
    OPEN_FOLDER,
    VALID_FROM,
    VALID_TO,
    VERSION_COLUMNS,
    Versions,
    copy_of,
    fold_versions,
)
from millstream.lake.folded.version_columns import VersionColumns, version_columns
from millstream.lake.history import open_history
from millstream.lake.history_folder import history_begun, history_from, lacks_beginning
from millstream.lake.history_scan import emptied, fold_step
from millstream.lake.layout import BESIDE, LakeLayout, TableCommit, folder_of
from millstream.lake.new_and_wider_columns import widest
from millstream.lake.row_identity import Keys, having, key_codes
from millstream.lake.schema_history import newest_schema
from millstream.lake.table_format import Commit, NewTable, OpenTable, create_table, format_of, open_table
from millstream.model.column_renames import FilledNames, name_in_rows, under_names
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.records import INSTANT
from millstream.model.schema import TableSchema


def has_versions(schema: TableSchema) -> bool:
    """Whether a table's rows have versions, which need a key."""
    return bool(schema.key)


def fold_into_versions(
    layout: LakeLayout, schema: TableSchema, upto: Seq, *, sizes: FoldSizes = DEFAULT_SIZES
) -> FoldOutcome:
    """Fold a table's versions to `upto`; do nothing if they are there already.

    If very many records wait, it makes one commit for each of several cuts. But a repeated copy is folded whole, in
    memory.

    Args:
        schema: names the table, which has a key; the columns folded are those of its history.
        upto: a cut that history has reached. Not inside a copy of the table.

    Raises:
        LakeTableForeign: another program wrote into the versions or into history.
        LakeError (`lake_schema_conflict`): a column of the table has the name of a version column, and no number.
        LakeUnavailable: history isn't there yet, or can't be reached.
        LakeConflict: another task committed first; call again.
        LakeError: a record leaves a column unchanged and the lake holds no earlier row of it.
    """
    assert has_versions(schema), f"{schema.namespace}.{schema.name} has no key"
    return _Fold.begin(layout, schema, upto, sizes).all()


def rebuild_versions(
    layout: LakeLayout, schema: TableSchema, upto: Seq, *, sizes: FoldSizes = DEFAULT_SIZES
) -> FoldOutcome:
    """Rebuild a table's versions from history in a separate table, and put them in place in one commit.

    Existing versions are read only if another table had the name before: this table's records don't contain them.
    Not twice at once for one table.

    Raises:
        As `fold_into_versions`.
    """
    path = layout.table_path("scd2", schema)
    format_of(layout).remove(layout, path + BESIDE)
    try:
        history = open_history(layout, schema)
        stands = open_table(layout, path, layout.app_id("scd2", schema.table_id))
        entered_us = entry_us(stands, history) if newest_schema(history).table_id == schema.table_id else None
        built = _Fold.begin(layout, schema, upto, sizes, path + BESIDE, entered_us).all()
        beside = open_table(layout, path + BESIDE, layout.app_id("scd2", schema.table_id))
        assert beside is not None, "what was built is there"
        return _Fold.begin(layout, schema, built.commit.n, sizes, entered_us=entered_us).replace_by(beside)
    finally:
        format_of(layout).remove(layout, path + BESIDE)


def unfolded_versions(
    layout: LakeLayout, schema: TableSchema, opened: OpenTable, history: OpenTable, upto: Seq
) -> tuple[Versions | None, pa.Schema, FilledNames | None]:
    """Return the effect of later records on a table's versions, for a reader to overlay.

    With it come the table's own columns, and the names that they have in its files, if those are others.

    Records from the start of a later copy on are left out: until such a copy is complete, its result is unknown.

    Raises:
        LakeTableForeign, LakeUnavailable, LakeError: as `fold_into_versions`.
    """
    if not opened.held:
        raise LakeError("has no versions yet: they are being folded for the first time")
    fold = _Fold(layout, schema, upto, DEFAULT_SIZES, opened, history, path=opened.path)
    fold.stands = opened.n
    fold.take_columns(upto)
    tail = fold.own.records(history, after=opened.n or Seq(0), upto=upto)
    begins = _copy_begins(tail)
    if begins is not None:
        tail = tail.filter(pc.less(tail.column("__seq"), int(begins)))
    return fold.folded(tail, whole=True), fold.columns, fold.renamed


@dataclass
class _Fold:
    """One commit."""

    layout: LakeLayout
    schema: TableSchema
    upto: Seq
    sizes: FoldSizes
    opened: OpenTable | None
    history: OpenTable | None = None
    own: VersionColumns = field(init=False)
    """The table's own columns where this commit ends."""
    renamed: FilledNames | None = None
    """Their names in the table's files, if those are others, and values that the files lack."""
    path: str = ""
    entered_us: int | None = None
    """When the table took over the name from another, µs since 1970; None if it didn't, and while it isn't known."""
    since: Seq = Seq(0)
    """The number from which on the table has had the name; 0 if no other table did before."""
    stands: Seq | None = None
    """The position of these versions in the table's records; None if they are another table's, or an earlier era's."""

    @classmethod
    def begin(
        cls,
        layout: LakeLayout,
        schema: TableSchema,
        upto: Seq,
        sizes: FoldSizes,
        path: str = "",
        entered_us: int | None = None,
    ) -> _Fold:
        path = path or layout.table_path("scd2", schema)
        opened = open_table(layout, path, layout.app_id("scd2", schema.table_id))
        return cls(layout, schema, upto, sizes, opened, path=path, entered_us=entered_us)

    @property
    def columns(self) -> pa.Schema:
        """The table's own columns, those of the key first."""
        return self.own.columns

    def take_columns(self, n: Seq) -> None:
        """Take the table's columns and their names at a position."""
        assert self.history is not None
        self.own = version_columns(self.layout, self.history, newest_schema(self.history), n)
        self.schema = self.own.schema
        self.renamed = self.own.names_at(self.history, self.stands)

    def all(self) -> FoldOutcome:
        """Run as many commits as it takes."""
        done = self.run()
        while done.commit.n < self.upto:
            done = self.begin(self.layout, self.schema, self.upto, self.sizes, self.path, self.entered_us).run()
        return done

    def run(self) -> FoldOutcome:
        opened = self.opened
        done = reached(opened, self.upto, holds=True)
        if done is not None:
            return self._standing(done)
        history = open_history(self.layout, self.schema)
        newest = newest_schema(history)
        if newest.table_id != self.schema.table_id:
            return self._standing(self.upto)  # another table has the name by now, and the versions are its versions
        self.history = history
        self.take_columns(self.upto)
        opened = self.opened = (opened or self._create()).ready_for(self.columns)
        self.since = taken_since(history)
        self.stands = opened.n if continues(opened, history) else None
        self.take_columns(self.upto)
        self.entered_us = entry_us(opened, history) if self.entered_us is None else self.entered_us
        gone = history_from(history)
        if (self.stands or Seq(0)) < gone and lacks_beginning(history):
            copied = emptied(history, gone, self.upto, newest.table_id)
            if self.stands is None and not (copied and history_begun(history) == gone):
                return self._begin_from_current(opened, gone)
            if not copied:
                return self._go_on_from_current(opened, gone)
        return self._fold(opened, history)

    # --- from history ------------------------------------------------------------------------------------------

    def _fold(self, opened: OpenTable, history: OpenTable) -> FoldOutcome:
        step, tail = self._tail(history, self.stands or Seq(0))
        found = self.folded(tail, whole=step == self.upto)
        del tail
        exact = found is not None and any(
            rows.column(EXACT.name).null_count < rows.num_rows for rows in (found.opened, found.closed)
        )
        return self._write(opened, self._open_leaves(opened), found, step, exact=exact)

    def _open_leaves(self, opened: OpenTable) -> Leaves:
        renamed = self.renamed or {}
        return Leaves(opened, [name_in_rows(renamed, name) for name in self.schema.key], partition=OPEN_FOLDER)

    def folded(self, tail: pa.Table, *, whole: bool) -> Versions | None:
        """Return the folded records; None if there are none."""
        if not tail.num_rows:
            return None
        assert self.opened is not None
        leaves = self._open_leaves(self.opened)
        clock = clock_of(self.opened)
        if self.stands is None and self.entered_us is not None:
            clock = max(self.entered_us, self.entered_us if clock is None else clock)
        found = fold_versions(
            tail,
            self.schema,
            self.columns,
            lambda keys: self._look_up(leaves, keys),
            clock_us=clock,
            anew=self.stands is None and len(leaves) > 0,
            whole=whole,
        )
        return replace(found, closed=self._under_the_name(found.closed, tail.column("__seq")))

    def _under_the_name(self, closed: pa.Table, seqs: pa.ChunkedArray) -> pa.Table:
        """Drop ended versions that only existed under another name: they have no length at the moment of entry."""
        if self.entered_us is None:
            return closed
        # In its first fold, versions of the previous table end too.
        mine = pc.is_in(closed.column(BEGAN_BY.name), seqs) if self.stands is None else True
        return closed.filter(pc.invert(pc.and_(at_entry(closed, self.entered_us, self.since), mine)))

    def _tail(self, history: OpenTable, after: Seq) -> tuple[Seq, pa.Table]:
        """Return the records of this commit, and the cut that they end at."""
        step = fold_step(
            self.layout, history, after=after, upto=self.upto, most=self.sizes.at_once, table=self.schema.table_id
        )
        self.take_columns(step)
        tail = self.own.records(history, after=after, upto=step)
        if step == self.upto:
            return step, tail
        begins = _copy_begins(tail)
        if begins is None:
            return step, tail
        # No record marks the end of such a copy; the caller ensures that `upto` isn't inside of one.
        before = cuts_between(self.layout, after, Seq(begins - 1))
        if before:
            self.take_columns(before[-1])
            earlier = self.own.records(history, after=after, upto=before[-1])
            if earlier.num_rows:
                return before[-1], earlier
        self.take_columns(self.upto)
        return self.upto, self.own.records(history, after=after, upto=self.upto)

    def _look_up(self, leaves: Leaves, keys: Keys) -> pa.Table:
        """Return open versions that may have one of the keys."""
        shape = pa.schema([*self.columns, EXACT, VALID_FROM, BEGAN_BY])
        hit, _ = leaves.holding(keys)
        read = (self._read(leaves.files[leaf].path, shape) for leaf in np.flatnonzero(hit).tolist())
        return pa.concat_tables([shape.empty_table(), *(having(rows, keys) for rows in read)])

    def _read(self, path: str, shape: pa.Schema) -> pa.Table:
        """Return the versions of a file of the table, under the names of this commit."""
        return named(self._files.read(path), self.renamed, shape)

    # --- from current ------------------------------------------------------------------------------------------

    def _current(self, gone: Seq) -> tuple[OpenTable, datetime]:
        """Return `current`, which has what history lost up to `gone`, and the time of its cut; take its columns."""
        assert self.history is not None
        path = self.layout.table_path("current", self.schema)
        current = open_table(self.layout, path, self.layout.app_id("current", self.schema.table_id))
        if current is None or current.n is None or current.n < gone or not current.held:
            raise LakeError(
                f"the history of {self.schema.namespace}.{self.schema.name} was dropped up to {gone}, its versions stand at "
                f"{self.stands or 0}, and there is no `current` to go on from",
                hint=f"Run `millstream pipeline rebuild {quote(self.schema.full_name)} --from source` to copy the table again.",
                path=path,
            )
        cut = cut_at(self.layout, current.n)
        assert cut is not None, "a fold ends at a cut"
        self.take_columns(current.n)
        return current, cut.commit_ts_max or cut.committed_at

    def _rows_of(self, current: OpenTable) -> Iterator[pa.Table]:
        """Yield the rows of `current` by file, in the columns of these versions and `__exact`."""
        files, shape = TableFiles(self.layout, current.path), pa.schema([*self.columns, EXACT])
        for leaf in Leaves(current, [name_in_rows(self.own.in_current, name) for name in self.schema.key]).files:
            yield conform(under_names(files.read(leaf.path), self.own.in_current), shape)

    def _go_on_from_current(self, opened: OpenTable, gone: Seq) -> FoldOutcome:
        """Commit `current`'s rows as a later copy, in place of lost records; it confirms or ends open versions."""
        current, began = self._current(gone)
        assert current.n is not None, "said above"
        shape = pa.schema([*self.columns, EXACT])
        rows = pa.concat_tables([shape.empty_table(), *self._rows_of(current)])
        tail = copy_of(rows, self.stands or Seq(0), current.n, began)
        found = self.folded(tail, whole=True)
        exact = EXACT.name in current.schema().names
        return self._write(opened, self._open_leaves(opened), found, current.n, exact=exact)

    def _begin_from_current(self, opened: OpenTable, gone: Seq) -> FoldOutcome:
        """Make the first commit if history lacks its beginning: the rows of `current` as open versions."""
        current, began = self._current(gone)
        assert current.n is not None, "said above"
        have = current.schema()
        writer = self._writer(opened, exact=EXACT.name in have.names)
        for rows in self._rows_of(current):
            begun = rows.append_column(VALID_FROM, pa.array([began] * rows.num_rows, INSTANT))
            begun = begun.append_column(BEGAN_BY, pa.array([int(current.n)] * rows.num_rows, pa.int64()))
            writer.add(conform(begun, self._file_columns(exact=True)))
            writer.flush()
        clock = pc.cast(pa.scalar(began, INSTANT), pa.int64()).as_py()
        exact = EXACT.name in have.names
        written = writer.written()
        if self.entered_us is not None:
            written += self._of_another(opened, self._file_columns(exact=exact), self.entered_us)
        return self._commit(opened, written, [], current.n, clock, anew=True, exact=exact)

    # --- writing -----------------------------------------------------------------------------------------------

    def _write(
        self, opened: OpenTable, leaves: Leaves, found: Versions | None, upto: Seq, *, exact: bool
    ) -> FoldOutcome:
        have = opened.schema()
        exact = exact or EXACT.name in have.names or bool(inexact_texts(self.renamed or {}, self.columns))
        target = self._table_columns(exact=exact)
        clock = None if found is None else found.clock_us
        anew = self.renamed is not None
        if not anew and (
            _widened(have, target) or _respelled(have, target) or not set(self._bounded) <= set(opened.bounded)
        ):
            # Not every reader reads older files' types as the new ones; a column has bounds in all files or in none.
            self._rewrite_all(opened, target, exact=exact)
            return self._again(upto)
        if not anew and not set(target.names) <= set(have.names):
            opened.add_columns(target)
        if found is None and not anew and opened.held:
            return self._standing(upto)
        found = found or Versions.unchanged(self.columns, self.schema.key)
        full = self._file_columns(exact=True)
        put = conform(found.opened, full)
        writer = self._writer(opened, exact=exact)
        put_at = placed(leaves, Keys.of(put, self.schema.key), leaf_bytes=self.sizes.leaf_bytes)
        small = leaves.size_bytes < self.sizes.small_bytes
        everything = anew or found.rest_closed_us is not None or (small and bool(len(found.gone) + len(put)))
        also = [] if everything else having_partitions(self._files, leaves, [oid for oid, _ in found.left_us])
        places = touched(leaves, found.gone, put_at, everything=everything, also=also)
        extra = EndedVersions(self._files, self._file_columns(exact=exact), opened.version + 1)
        extra.add(conform(found.closed, full))
        changes = []
        removed: list[str] = []
        for place in places.hit:
            leaf = leaves.files[place] if place < len(leaves) else None
            some = places.gone.get(place)
            gone = found.gone if some is None else found.gone.take(some)
            mine = put.filter(pa.array(put_at == place))
            if leaf is not None and found.ends_others:
                gone = self._end_rest(leaf.path, found, extra)
            if leaf is not None and not len(gone) and not mine.num_rows and not (small or anew):
                continue
            if leaf is not None:
                removed.append(leaf.path)
            changes.append((place, Change(leaf, gone, mine)))
        writer.rewrite(changes)
        extra.flush()
        written = [*writer.written(), *extra.written]
        if not anew:
            return self._commit(opened, written, removed, upto, clock, anew=False, exact=exact, leaves=leaves)
        written += self._ended_anew(opened, self._file_columns(exact=exact))
        done = self._commit(opened, written, [], upto, clock, anew=True, exact=exact)
        if set(self._bounded) != set(opened.bounded):
            opened.set_bounded(self._bounded)
        return done

    def _ended_anew(self, opened: OpenTable, columns: pa.Schema) -> list[NewFile]:
        """Rewrite the files of ended versions under the names of this commit."""
        files = Leaves(opened, (), partition=ENDED_FOLDER).files
        version = opened.version + 1
        return [
            self._files.write(self._read(leaf.path, columns), columns, new_name(version), partition=ENDED_FOLDER)
            for leaf in files
        ]

    def _end_rest(self, path: str, found: Versions, extra: EndedVersions) -> Keys:
        """End a leaf's versions that the run left open and whose table or partition ended; return the keys to delete."""
        rows = self._read(path, self._file_columns(exact=True))
        keys = Keys.of(rows, self.schema.key)
        have, gone, kept = key_codes([keys, found.gone, found.kept])
        is_gone, moments = np.isin(have, gone), found.ends_of(rows)
        ends = ~is_gone & ~np.isin(have, kept) & np.asarray(moments.is_valid())
        place = rows.schema.get_field_index(VALID_TO.name)
        extra.add(rows.set_column(place, VALID_TO, moments).filter(pa.array(ends)))
        return keys.take(np.flatnonzero(is_gone | ends))

    def _rewrite_all(self, opened: OpenTable, target: pa.Schema, *, exact: bool) -> None:
        """Rewrite every file in wider columns, as a commit of its own that changes no version."""
        columns = self._file_columns(exact=exact)
        written = []
        for folder in (OPEN_FOLDER, ENDED_FOLDER):
            for leaf in Leaves(opened, self.schema.key, partition=folder).files:
                rows = self._files.read(leaf.path)
                spelled = _respelled(rows.schema, columns)
                rows = conform(rows.rename_columns([spelled.get(name, name) for name in rows.column_names]), columns)
                written.append(self._files.write(rows, columns, new_name(opened.version + 1), partition=folder))
        failpoints.hit("lake.before_scd2_commit")
        opened.swap(Commit(exact=True), add=written, mode="overwrite", schema=target)
        again = open_table(self.layout, opened.path, opened.app)
        assert again is not None
        again.set_bounded(self._bounded)

    def _again(self, upto: Seq) -> FoldOutcome:
        return self.begin(self.layout, self.schema, upto, self.sizes, self.path).run()

    def replace_by(self, beside: OpenTable) -> FoldOutcome:
        """Replace all of this table's files by those of a separately built table."""
        history = self.history = open_history(self.layout, self.schema)
        self.take_columns(self.upto)
        self.since = taken_since(history)
        opened = self.opened = (self.opened or self._create()).ready_for(self.columns)
        self.stands = opened.n if continues(opened, history) else None
        self.take_columns(self.upto)
        exact = EXACT.name in beside.schema().names or EXACT.name in opened.schema().names
        columns = self._file_columns(exact=exact)
        theirs = TableFiles(self.layout, beside.path)
        written = []
        for folder in (OPEN_FOLDER, ENDED_FOLDER):
            for leaf in Leaves(beside, self.schema.key, partition=folder).files:
                rows = conform(theirs.read(leaf.path), columns)
                written.append(self._files.write(rows, columns, new_name(opened.version + 1), partition=folder))
        if self.entered_us is not None:
            written += self._of_another(opened, columns, self.entered_us)
        failpoints.hit("lake.rebuild.before_swap")
        return self._commit(opened, written, [], self.upto, clock_of(beside), anew=True, exact=exact)

    def _of_another(self, opened: OpenTable, columns: pa.Schema, entered_us: int) -> list[NewFile]:
        """Rewrite versions from before the table took over the name; those that are still open end at that moment."""
        kept = EndedVersions(self._files, columns, opened.version + 1)
        moment = pa.scalar(entered_us, pa.int64()).cast(INSTANT)
        for folder in (ENDED_FOLDER, OPEN_FOLDER) if self.stands is None else (ENDED_FOLDER,):
            for leaf in Leaves(opened, self.schema.key, partition=folder).files:
                with contextlib.suppress(LakeFilesGone, LakeUnavailable):  # a deleted file, which can't be restored
                    rows = self._read(leaf.path, columns)
                    ends = pc.fill_null(rows.column(VALID_TO.name), moment)
                    rows = rows.set_column(rows.schema.get_field_index(VALID_TO.name), VALID_TO, ends)
                    before = pc.less(rows.column(VALID_FROM.name), moment)
                    kept.add(rows.filter(pc.or_(before, at_entry(rows, entered_us, self.since))))
        kept.flush()
        return kept.written

    def _commit(
        self,
        opened: OpenTable,
        written: Sequence[NewFile],
        removed: Sequence[str],
        upto: Seq,
        clock_us: int | None,
        *,
        anew: bool,
        exact: bool,
        leaves: Leaves | None = None,
    ) -> FoldOutcome:
        times = new_times(opened, clock_us, self.entered_us, self.since)
        failpoints.hit("lake.before_scd2_commit")
        opened.swap(
            Commit(upto, exact=True, holds=True, numbers=times),
            add=written,
            remove=removed,
            mode="overwrite" if anew else "append",
            schema=self._table_columns(exact=exact) if anew else None,
        )
        failpoints.hit("lake.after_scd2_commit")
        rows = sum(file.rows for file in written)
        sizes = {} if leaves is None else {leaf.path: leaf.size_bytes for leaf in leaves.files}
        removed_bytes = sum(sizes[path] for path in removed)
        live_bytes = sum(sizes.values()) - removed_bytes + sum(file.size_bytes for file in written)
        return FoldOutcome(self._told(opened.version, rows, upto), live_bytes, removed_bytes)

    # --- what it is --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return qualified_name(self.schema.namespace, self.schema.name)

    @property
    def _files(self) -> TableFiles:
        assert self.opened is not None
        return TableFiles(self.layout, self.opened.path, self._bounded)

    @property
    def _bounded(self) -> tuple[str, ...]:
        # Columns of an earlier key keep their bounds.
        before = [] if self.opened is None else self.opened.bounded
        names = [*self.schema.key, *(name for name in before if name not in self.schema.key)]
        mine = [name for name in names if self.columns.get_field_index(name) >= 0]
        return (*boundable(self.columns, mine), VALID_FROM.name, BEGAN_BY.name)

    def _writer(self, opened: OpenTable, *, exact: bool) -> LeafWriter:
        return LeafWriter(
            self._files,
            self._file_columns(exact=exact),
            self.schema.key,
            opened.version + 1,
            leaf_bytes=self.sizes.leaf_bytes,
            partition=OPEN_FOLDER,
            renamed=self.renamed,
        )

    def _table_columns(self, *, exact: bool) -> pa.Schema:
        """Return the table's columns: the key's and the version columns first, within reach of statistics."""
        key = [column for column in self.columns if column.name in self.schema.key]
        rest = [column for column in self.columns if column.name not in self.schema.key]
        return pa.schema([*key, *VERSION_COLUMNS, *rest, *([EXACT] if exact else [])])

    def _file_columns(self, *, exact: bool) -> pa.Schema:
        """Return the same columns without the partition column."""
        return pa.schema([column for column in self._table_columns(exact=exact) if column.name != IS_CURRENT.name])

    def _create(self) -> OpenTable:
        return create_table(
            self.layout,
            self.path,
            self.layout.app_id("scd2", self.schema.table_id),
            NewTable(
                self._table_columns(exact=False),
                description=(
                    f"Every version of the rows of {self.schema.namespace}.{self.schema.name}, written by Millstream "
                    f"(stream {self.layout.stream_name}). Don't write here."
                ),
                bounded=self._bounded,
                partition_by=[IS_CURRENT.name],
            ),
        )

    def _standing(self, n: Seq) -> FoldOutcome:
        return FoldOutcome(self._told(-1 if self.opened is None else self.opened.version, 0, n), 0)

    def _told(self, version: int, rows: int, n: Seq) -> TableCommit:
        folder = folder_of(self.schema)
        return TableCommit(self.schema.table_id, self.name, folder, "scd2", version, rows, n)


def _copy_begins(tail: pa.Table) -> Seq | None:
    """Return the first record of a copy that follows an earlier one; None if none begins among these records."""
    marker = pc.and_(pc.equal(tail.column("__op"), "t"), pc.is_null(tail.column("__commit_index")))
    found = pc.min(tail.filter(marker).column("__seq")).as_py()
    return None if found is None else Seq(found)


def _respelled(have: pa.Schema, target: pa.Schema) -> dict[str, str]:
    """Return the columns whose names differ by case alone from the target's, with the names under which they go on.

    They are of another table that had this one's name. Values that the target's column can't hold are left out.
    """
    own = {column.name.lower(): column for column in target}
    return {
        column.name: wanted.name if widest(column.type, wanted.type) == wanted.type else column.name
        for column in have
        if (wanted := own.get(column.name.lower(), column)).name != column.name
    }


def _widened(have: pa.Schema, target: pa.Schema) -> bool:
    return any(
        have.get_field_index(column.name) >= 0 and not same_type(have.field(column.name).type, column.type)
        for column in target
    )
