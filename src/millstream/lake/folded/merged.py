"""`merged`: one row a key, as all regions that write a table have it together; folded from the regions' logs.

Two tables: `merged` has the rows that readers see, `regions` the state that they are computed from: each region's
row of each key (`crdt.row_merge`), and the *head*, one row in a partition of its own, which records what was received.
A fold joins new region rows into those of the same keys, and rewrites only the files that may hold these keys.

A fold commits `merged` first, then `regions`. If it is interrupted between the two, the next fold receives the same
records again, and joins them to the same state: the same keys get the same rows, or later ones.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream import failpoints
from millstream.crdt.declared import union_of
from millstream.crdt.region_state import Missing, ReconciliationEngine, RegionState, widened
from millstream.crdt.row_merge import WALL, own_columns, state_schema
from millstream.errors import LakeError, LakeTableForeign
from millstream.lake.column_conversion import EXACT, conform, same_type
from millstream.lake.data_files import TableFiles, new_name
from millstream.lake.file_statistics import boundable
from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldSizes
from millstream.lake.folded.key_leaves import Leaf, Leaves
from millstream.lake.folded.leaf_rewriting import Change, LeafWriter, placed, touched
from millstream.lake.layout import LakeLayout
from millstream.lake.row_identity import Keys, having, key_codes
from millstream.lake.table_format import Commit, NewTable, OpenTable, create_table, format_of, open_table
from millstream.model.positions import Seq

MERGED: Final = "merged"
REGIONS: Final = "regions"
_PART: Final = pa.field("__part", pa.string())
_ROWS: Final = "__part=rows"
_HEADS: Final = "__part=head"
_HEAD: Final = pa.field("__head", pa.string())


@dataclass(frozen=True, slots=True)
class MergedPlace:
    """The place of one table in a lake. The name identifies it: regions have table ids of their own."""

    layout: LakeLayout
    folder: str
    name: str
    """`schema.table`, for descriptions."""

    def path(self, view: str) -> str:
        """Return the folder of `merged` or `regions`."""
        return f"{self.layout.root}/{view}/{self.folder}"

    def app(self, view: str) -> str:
        """Return the application id of the commits of one of them."""
        return f"millstream/{self.layout.stream_id}/{self.layout.pipeline}/{view}/{self.folder}"

    def open(self, view: str) -> OpenTable | None:
        """Open one of them; None if there is none."""
        return open_table(self.layout, self.path(view), self.app(view))


@dataclass(frozen=True, slots=True)
class Head:
    """The head of the state: what it has received."""

    text: bytes
    """The text of `ReconciliationEngine.head`."""
    n: Seq
    """Number of the fold: those of a table are counted from 1."""
    merged_n: Seq
    """Number of the last fold until then that wrote `merged`."""
    wall_ns: int
    """Hybrid time of the newest record received."""

    def encode(self) -> str:
        """Return the head as JSON."""
        numbers = {"n": int(self.n), "merged_n": int(self.merged_n), "wall_ns": self.wall_ns}
        return json.dumps({"state": self.text.decode()} | numbers)

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the head that `encode` encoded."""
        facts = json.loads(text)
        return cls(facts["state"].encode(), Seq(facts["n"]), Seq(facts["merged_n"]), int(facts["wall_ns"]))


@dataclass(frozen=True, slots=True)
class MergedOutcome:
    """The outcome of a fold."""

    n: Seq
    keys: int
    """Number of keys whose rows were written."""
    live_bytes: int
    """Size in bytes of the files of both tables now."""
    removed_bytes: int = 0
    """Size in bytes of the files that were replaced."""


class MergedFold:
    """One fold of a table. Open it, receive what follows `received` from the logs, and call `join` or `replace`.

    `columns` are the table's own now: a format may store a column in a wider type than the logs.

    Raises:
        LakeTableForeign: another program wrote into one of the tables.
        LakeUnavailable: they can't be reached.
    """

    def __init__(
        self,
        place: MergedPlace,
        engine: ReconciliationEngine,
        columns: pa.Schema,
        *,
        sizes: FoldSizes = DEFAULT_SIZES,
    ) -> None:
        self._place = place
        self._engine = engine
        self._columns = columns
        self._sizes = sizes
        self._merged = place.open(MERGED)
        self._regions = place.open(REGIONS)
        self.head: Final = self._read_head()
        """The head; None if there is no state."""

    @cached_property
    def received(self) -> RegionState | None:
        """The vector and ends of the state, without its rows; None without state, or if it is for another merge."""
        if self.head is None or self._regions is None:
            return None
        return self._engine.received(self.head.text, self._shape(self._regions).empty_table())

    def known(self, records: pa.Table) -> pa.Table:
        """Return the region rows of the state that have a key of some records."""
        assert self._regions is not None, "there is a state"
        return self._read(self._regions, Keys.of(records, self._key))

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the state's files."""
        return 0 if self._regions is None else Leaves(self._regions, self._key, partition=_ROWS).size_bytes

    @property
    def state(self) -> RegionState | None:
        """The state with all its rows; None as `received`."""
        received = self.received
        if received is None or self._regions is None:
            return None
        return RegionState(self._read(self._regions, None), received.vector, received.ends)

    def fits(self, columns: pa.Schema) -> bool:
        """Return whether keys without news may keep their rows.

        They may if the table has no new columns, merges as before, and `merged` isn't older than the state.
        """
        if self.head is None or self._regions is None or self._merged is None:
            return False
        have, shape = self._shape(self._regions), self._shape_with(columns)
        if have.names != shape.names or not all(same_type(have.field(f.name).type, f.type) for f in shape):
            return False
        return (self._merged.n or 0) >= self.head.merged_n and self._engine.merges_as(self.head.text)

    def join(self, news: RegionState) -> MergedOutcome:
        """Join region rows into the view: the effect of what the logs have after `received`.

        Raises:
            LakeConflict: another process folded at the same time; begin again.
            InvalidValue: a counter's sum is beyond its type.
        """
        held, regions = self.received, self._regions
        assert held is not None, "there is a state to join to"
        assert regions is not None, "the state's table"
        shape = self._shape_with(own_columns(news.rows.schema))
        is_whole = not self.fits(own_columns(news.rows.schema))
        rows = held.rows
        if is_whole:
            rows = widened(self._read(regions, None), shape)
        elif news.rows.num_rows:
            rows = self._read(regions, Keys.of(news.rows, self._key))
        state = RegionState(rows, held.vector, held.ends)
        return self._write(self._engine.apply(state, Missing(news.rows, news.vector, news.ends)), is_whole=is_whole)

    def replace(self, state: RegionState) -> MergedOutcome:
        """Write the view of a whole state, in place of whatever is there. Raises as `join`."""
        return self._write(state, is_whole=True)

    @property
    def _key(self) -> tuple[str, ...]:
        return self._engine.key

    def _shape_with(self, columns: pa.Schema) -> pa.Schema:
        """Return the columns of region rows of a table that has some columns now."""
        assert self.received is not None, "there is a state"
        both = union_of(self._place.name, [columns, own_columns(self.received.rows.schema)])
        return state_schema(both, self._engine.merge)

    def _write(self, state: RegionState, *, is_whole: bool) -> MergedOutcome:
        newest = pc.max(state.rows.column(WALL.name)).as_py() if state.rows.num_rows else 0
        wall_ns = max(newest, 0 if self.head is None or self.received is None else self.head.wall_ns)
        numbers = [
            0 if opened is None or opened.n is None else int(opened.n) for opened in (self._merged, self._regions)
        ]
        n = Seq(max(numbers) + 1)
        shown = self._engine.value(state, at_ns=wall_ns)
        merged_n, live, removed = Seq(numbers[0]), 0, 0
        if is_whole or shown.num_rows:
            live, removed = self._put(MERGED, shown, n, is_whole=is_whole)
            merged_n = n
            failpoints.hit("lake.merged_between_commits")
        head = Head(self._engine.head(state), n, merged_n, wall_ns)
        state_live, state_removed = self._put(REGIONS, state.rows, n, is_whole=is_whole, head=head)
        return MergedOutcome(n, shown.num_rows, live + state_live, removed + state_removed)

    def _put(self, view: str, rows: pa.Table, n: Seq, *, is_whole: bool, head: Head | None = None) -> tuple[int, int]:
        """Replace the rows that have a key of some rows by these, in one commit; all rows, if `is_whole`.

        Returns:
            The size in bytes of the table's files now, and of those that were replaced.
        """
        layout = self._place.layout
        target = self._stored([pa.field(f.name, f.type) for f in rows.schema])
        columns = target if head is None else pa.schema([*target, _HEAD, _PART])
        opened = self._opened(view, columns, target)
        leaves = Leaves(opened, self._key, partition=None if head is None else _ROWS)
        files = TableFiles(layout, opened.path, boundable(target, self._key))
        writer = LeafWriter(
            files,
            target,
            self._key,
            opened.version + 1,
            leaf_bytes=self._sizes.leaf_bytes,
            partition="" if head is None else _ROWS,
        )
        replaced = self._rewrite(writer, leaves, conform(rows, pa.schema([*target, EXACT])), is_whole=is_whole)
        written, remove = writer.written(), [leaf.path for leaf in replaced]
        if head is not None:
            shape = pa.schema([*target, _HEAD])
            line = conform(pa.table({_HEAD.name: [head.encode()]}), shape)
            written.append(files.write(line, shape, new_name(opened.version + 1), partition=_HEADS))
            remove += _heads_of(opened)
        opened.swap(
            Commit(n, exact=True),
            add=written,
            remove=() if is_whole else remove,
            mode="overwrite" if is_whole else "append",
            schema=columns if is_whole else None,
        )
        removed = sum(leaf.size_bytes for leaf in replaced)
        return leaves.size_bytes - removed + sum(file.size_bytes for file in written), removed

    def _opened(self, view: str, columns: pa.Schema, own: pa.Schema) -> OpenTable:
        """Return one of the tables, created if it isn't there."""
        place, opened = self._place, self._merged if view == MERGED else self._regions
        if opened is None:
            what = "The rows" if view == MERGED else "The state"
            opened = create_table(
                place.layout,
                place.path(view),
                place.app(view),
                NewTable(
                    columns,
                    description=(
                        f"{what} of {place.name}, merged from its regions, written by Millstream (stream "
                        f"{place.layout.stream_name}). Don't write here."
                    ),
                    bounded=boundable(own, self._key),
                    partition_by=() if view == MERGED else [_PART.name],
                ),
            )
        return opened.ready_for(columns)

    def _rewrite(self, writer: LeafWriter, leaves: Leaves, rows: pa.Table, *, is_whole: bool) -> list[Leaf]:
        """Write the changed leaves; return those that they replace."""
        if is_whole:
            writer.add(rows)
            return list(leaves.files)
        if not rows.num_rows:
            return []
        keys = Keys.of(rows, self._key)
        put_at = placed(leaves, keys, leaf_bytes=self._sizes.leaf_bytes)
        found = touched(leaves, keys, put_at, everything=leaves.size_bytes < self._sizes.small_bytes)
        changes = []
        for at in found.hit:
            leaf, some = leaves.files[at] if at < len(leaves) else None, found.gone.get(at)
            gone = keys if some is None else keys.take(some)
            changes.append((at, Change(leaf, gone, rows.filter(pa.array(put_at == at)))))
        writer.rewrite(changes)
        return [change.leaf for _, change in changes if change.leaf is not None]

    def _read(self, regions: OpenTable, keys: Keys | None) -> pa.Table:
        """Return the region rows that have one of some keys; all of them for None."""
        leaves = Leaves(regions, self._key, partition=_ROWS)
        files, shape = TableFiles(self._place.layout, regions.path), self._shape(regions)
        hit = np.ones(len(leaves), bool) if keys is None else leaves.holding(keys)[0]
        found = []
        for leaf in np.flatnonzero(hit).tolist():
            rows = conform(files.read(leaves.files[leaf].path), shape)
            if keys is not None:
                rows = having(rows, keys)
                have, wanted = key_codes([Keys.of(rows, self._key), keys])
                rows = rows.filter(pa.array(np.isin(have, wanted)))
            found.append(rows)
        return pa.concat_tables([shape.empty_table(), *found])

    def _shape(self, regions: OpenTable) -> pa.Schema:
        """Return the columns of the region rows in the lake, in the logs' types."""
        stored = {field.name: field.type for field in self._stored(self._columns)}
        return pa.schema(
            [
                self._columns.field(field.name) if same_type(field.type, stored.get(field.name, pa.null())) else field
                for field in regions.schema()
                if field.name not in {_PART.name, _HEAD.name}
            ]
        )

    def _stored(self, columns: Iterable[pa.Field]) -> pa.Schema:
        """Return columns in the types of the lake's format."""
        schema = pa.schema(columns)
        _check_names(self._place.name, schema)
        return format_of(self._place.layout).stored_schema(schema)

    def _read_head(self) -> Head | None:
        if self._regions is None or self._regions.n is None:
            return None
        paths = _heads_of(self._regions)
        if len(paths) != 1:
            path = self._regions.path
            raise LakeTableForeign(
                f"{path} has {len(paths)} heads instead of one",
                hint=f"Build the view again: `millstream pipeline rebuild {shlex.quote(self._place.name)} --view merged`.",
                path=path,
            )
        files = TableFiles(self._place.layout, self._regions.path)
        return Head.decode(files.read(paths[0]).column(_HEAD.name)[0].as_py())


def _check_names(table: str, columns: pa.Schema) -> None:
    """Raise an error if two columns' names differ by case alone: regions may each have added one of them."""
    seen: dict[str, str] = {}
    for name in columns.names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise LakeError(
                f"{table}: columns {other} and {name} differ by case alone, and have one name in the lake",
                code="lake_schema_conflict",
                hint="Let all regions write the column under one name, or read the table by `home.merged`.",
                table=table,
                column=name,
            )


def _heads_of(opened: OpenTable) -> list[str]:
    """Return the files that have a head."""
    actions = opened.files()
    held = pc.equal(pc.cast(actions.column(f"partition.{_PART.name}"), pa.string()), "head")
    found: list[str] = actions.filter(held).column("path").to_pylist()
    return found
