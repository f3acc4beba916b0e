"""Move a table's records along when the table is renamed.

History lies in a folder of the table's name. When the table gets another name, or an earlier one again,
the first append there copies the records that the new folder lacks from the old one. It copies by number,
so each record arrives once, even if a copy is interrupted or repeated. The last cut says where the records
are. If another table has taken over the name since, the folders themselves say it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from shlex import quote
from typing import Final

import pyarrow as pa

from millstream.errors import LakeError, LakeTableForeign, LakeUnavailable
from millstream.lake.commit_cuts import Cut
from millstream.lake.data_files import TableFiles, folders_in, new_name, table_in
from millstream.lake.exactly_once import check_unmoved
from millstream.lake.history_folder import (
    BOUNDED,
    files_by_period,
    history_from,
    history_from_property,
    records_in,
    reopened,
)
from millstream.lake.layout import BESIDE, MESSAGES, LakeLayout, has_current
from millstream.lake.new_and_wider_columns import widened
from millstream.lake.reused_column_names import columns_in_history
from millstream.lake.schema_history import Eras, has_eras
from millstream.lake.table_format import Commit, OpenTable, format_of, open_table
from millstream.model.ids import TableId
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.records import RECORD_COLUMNS
from millstream.model.schema import TableKind, TableSchema


@dataclass(frozen=True, slots=True)
class RecordFolder:
    """The folder of a table's records, according to the last cut."""

    folder: str
    n: Seq
    """Position that the commits there have reached at least."""


_CHANGED_MIN: Final = 16
_CHANGED_SHARE: Final = 8
Places = Mapping[TableId, RecordFolder]
"""Places of the tables that the last cut names, by table id."""


def places_of(cut: Cut | None) -> Places:
    """Return the place of each table's records according to a cut."""
    return {} if cut is None else {t.table_id: RecordFolder(folder, t.history_n) for folder, t in cut.tables.items()}


@dataclass(frozen=True, slots=True)
class PackedPlaces:
    """Places in a form that tasks receive at little cost: those of all tables at some moment, and those that differ."""

    base: bytes = b"{}"
    """JSON: folder and position by table id."""
    changed: Mapping[TableId, RecordFolder | None] = field(default_factory=dict)
    """Places that differ from these; None: the table has no place now."""

    def unpacked(self) -> Places:
        """Return the places. A process parses a base once."""
        places: dict[TableId, RecordFolder | None] = {**_parsed(self.base), **self.changed}
        return {table: place for table, place in places.items() if place is not None}

    def followed_by(self, places: Places) -> PackedPlaces:
        """Return other places in this form, with the same base if few differ from it."""
        base = _parsed(self.base)
        changed: dict[TableId, RecordFolder | None] = {t: p for t, p in places.items() if base.get(t) != p}
        changed |= dict.fromkeys(base.keys() - places.keys())
        if len(changed) <= max(_CHANGED_MIN, len(places) // _CHANGED_SHARE):
            return PackedPlaces(self.base, changed)
        return PackedPlaces(json.dumps({int(t): [p.folder, int(p.n)] for t, p in places.items()}).encode())


@lru_cache(maxsize=8)
def _parsed(base: bytes) -> Mapping[TableId, RecordFolder]:
    return {TableId(int(table)): RecordFolder(folder, Seq(n)) for table, (folder, n) in json.loads(base).items()}


def lost_records(layout: LakeLayout, schema: TableSchema, opened: OpenTable | None, places: Places) -> str | None:
    """Describe what is missing of the records that a table has according to the last cut; None if nothing is.

    Args:
        opened: the history under this name; None if there is none.
    """
    place = places.get(schema.table_id)
    if place is None or schema.kind is not TableKind.TABLE:
        return None
    path, app = layout.table_path("history", schema), layout.app_id("history", schema.table_id)
    stands = None if opened is None else opened.n
    if stands is not None and stands >= place.n:
        return None
    if path.rsplit("/", 1)[1] != place.folder:
        path = f"{layout.root}/history/{place.folder}"
        before = open_table(layout, path, app)
        stands = None if before is None else before.n
    if stands is None:
        return f"{path} was moved away or deleted"
    if stands < place.n:
        return f"{path} was set back: it ends at {stands}, and went to {place.n} before"
    return None


def records_elsewhere(
    layout: LakeLayout, schema: TableSchema, opened: OpenTable | None, places: Places
) -> OpenTable | None:
    """Return the folder that has records which the folder of the table's name lacks; None if there is none.

    The arguments are those of `lost_records`.

    Raises:
        LakeError (`lake_history_lost`): records that the table had no longer exist.
    """
    lost = lost_records(layout, schema, opened, places)
    if lost is not None:
        name = qualified_name(schema.namespace, schema.name)
        raise LakeError(
            f"the history of {name} is gone: {lost}",
            code="lake_history_lost",
            hint=f"Move the folder back and run `millstream tables retry {quote(name)}`, or copy the table again, with a new "
            f"history: `millstream pipeline rebuild {quote(name)} --from source`.",
            table=name,
        )
    path = layout.table_path("history", schema)
    place = places.get(schema.table_id)
    if place is not None:
        folders = [] if path.rsplit("/", 1)[1] == place.folder else [place.folder]
    else:
        # Another table took over the name before a record came under the new one. Folders moved aside may have it too.
        folders = folders_in(layout, f"{layout.root}/history") if places else []
    found: OpenTable | None = None
    stands = Seq(-1) if opened is None or opened.n is None else opened.n
    for folder in folders:
        source = f"{layout.root}/history/{folder}"
        if source == path or folder == MESSAGES or folder.endswith(BESIDE):
            continue
        try:
            before = open_table(layout, source, layout.app_id("history", schema.table_id))
        except (LakeTableForeign, LakeUnavailable):
            if place is not None:
                raise
            continue
        if before is not None and before.n is not None and before.n > stands:
            found, stands = before, before.n
    return found


def open_left_behind(layout: LakeLayout, schema: TableSchema) -> OpenTable | None:
    """Return the history that a table left behind when another took over its name; None if it left none.

    Its records lie there until its next record.

    Args:
        schema: the schema of its newest record, under the name at that time; no cut names the table.
    """
    if not has_current(schema):
        return None
    opened = open_table(layout, layout.table_path("history", schema), layout.app_id("history", schema.table_id))
    return None if opened is None or opened.n is None else opened


def columns_of(layout: LakeLayout, table: TableId, source: OpenTable) -> pa.Schema:
    """Return those columns of a history that one table's records have had."""
    eras = Eras.of(source).of_table(table)
    mine = {name for _, era in eras for name in columns_in_history(era, layout.types).names} | RECORD_COLUMNS
    return pa.schema([column for column in source.schema() if column.name in mine])


def bring_records(layout: LakeLayout, schema: TableSchema, opened: OpenTable, source: OpenTable) -> OpenTable:
    """Copy the records that a table's folder lacks from another folder, and commit at the position reached there.

    Raises:
        LakeError (`lake_schema_conflict`): the columns of that time don't fit those of this folder; nothing was written.
        LakeConflict: another task committed first; call again.
    """
    assert source.n is not None, "it was chosen for its records"
    after = opened.n or Seq(0)
    theirs = Eras.of(source)
    ready = widened(layout, opened, schema.full_name, columns_of(layout, schema.table_id, source))
    gone = history_from(source)
    gone = max(gone if gone > after else Seq(0), history_from(ready) if ready.n is not None else Seq(0))
    told = _eras_with(Eras.of(ready), theirs, schema) if has_eras(source) and has_eras(ready) else {}
    told |= {history_from_property(schema.table_id): str(int(gone))}
    check_unmoved(opened, ready)
    partition = format_of(layout).partition
    shape = partition.without(ready.schema())
    left, files = TableFiles(layout, source.path), TableFiles(layout, ready.path, BOUNDED)
    written = []
    for path, period in files_by_period(layout, source):
        if table_in(path) == schema.table_id:
            rows = records_in(left, path, shape, after=after, upto=source.n)
            file = files.write(rows, shape, new_name(table=schema.table_id), partition=partition.folder(period))
            written += [partition.placed(file, period)] if file.rows else []
    ready.swap(Commit(source.n), add=written, properties=told)
    return reopened(layout, ready)


def _eras_with(eras: Eras, theirs: Eras, schema: TableSchema) -> dict[str, str]:
    """Return the properties of a folder to which a table brings its eras from another folder."""
    for start, era in theirs.of_table(schema.table_id):
        eras = eras.having(start, era)
    complete_from = max(eras.complete_from, theirs.complete_from)
    return replace(eras, complete_from=complete_from).bounded().properties()
