"""Lake tables that are damaged: how they are found and moved aside, and how they are built again.

A folded table is rebuilt from its history, whatever its state; a history is restarted before a copy from the source.

A table's data can also be erased before such a copy (`erase_view`), under all the names that the table has had.

A folder that another program wrote into, or whose log can't be read, is never deleted: it is moved aside
(`<folder>.set-aside-<n>`), and the table is built in its place. A table that is known to a catalog is emptied in place
instead. Readers see an intact table until one commit replaces it: that of a fold (`folded.current_table`,
`folded.scd2_table`), which a running pipeline makes itself.
"""

from __future__ import annotations

from collections.abc import Collection
from glob import escape
from pathlib import Path
from shlex import quote
from typing import Final

import pyarrow.fs as pafs
from deltalake.exceptions import DeltaError

from millstream import failpoints
from millstream.errors import LakeError, LakeFilesGone, LakeTableForeign, LakeUnavailable
from millstream.lake.commit_cuts import last_cut
from millstream.lake.data_files import TableFiles, erase_folder, storage_of, table_in
from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldSizes, fold_table
from millstream.lake.folded.scd2_table import rebuild_versions
from millstream.lake.history import begin_history
from millstream.lake.history_folder import history_from, history_from_property, lacks_beginning
from millstream.lake.layout import BESIDE, LakeLayout, TableCommit, View
from millstream.lake.schema_history import Eras
from millstream.lake.table_format import Commit, OpenTable, format_of, open_table
from millstream.lake.table_renames import lost_records, places_of
from millstream.model.ids import TableId
from millstream.model.names import qualified_name
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

_ASIDE: Final = ".set-aside-"


def damage_of(layout: LakeLayout, view: View, schema: TableSchema) -> str | None:
    """Describe the damage of a table's view: foreign, unreadable, set back, or missing files; None if it is intact.

    A folded view that doesn't exist is intact: the next fold makes it. A history that doesn't exist is lost.

    Lists the folder's files, which takes a while for very many.
    """
    try:
        return certain_damage_of(layout, view, schema)
    except LakeUnavailable as error:
        return error.message


def certain_damage_of(layout: LakeLayout, view: View, schema: TableSchema) -> str | None:
    """Describe a view's damage as `damage_of`.

    Raises:
        LakeUnavailable: the lake can't be read at present, so that the view may be intact.
    """
    path, app = layout.table_path(view, schema), layout.app_id(view, schema.table_id)
    try:
        places = places_of(last_cut(layout))  # before the table, which a batch may take further at any moment
        opened = open_table(layout, path, app)
        lost = lost_records(layout, schema, opened, places) if view == "history" else None
        if opened is None or lost is not None:
            return lost or ("it isn't there" if view == "history" else None)
        listed = opened.files().select(["path", "size_bytes"]).to_pylist()
        have = TableFiles(layout, path).all()
    except (LakeFilesGone, LakeTableForeign) as error:
        return error.message
    gone = [file["path"] for file in listed if file["path"] not in have]
    if gone:
        return f"{len(gone)} of its files are gone, {min(gone)} for one"
    changed = [file["path"] for file in listed if have[file["path"]].size != file["size_bytes"]]
    return (
        f"{len(changed)} of its files have another size than when written, {min(changed)} for one" if changed else None
    )


def check_history(layout: LakeLayout, schema: TableSchema) -> None:
    """Raise unless all of a table can be built from its history.

    Raises:
        LakeError (`lake_history_lost`): it is gone, damaged, or lacks its beginning.
    """
    name = qualified_name(schema.namespace, schema.name)
    damage = damage_of(layout, "history", schema)
    if damage is None:
        history = open_table(layout, layout.table_path("history", schema), layout.app_id("history", schema.table_id))
        assert history is not None, "it was there just now"
        if lacks_beginning(history):
            damage = f"records up to {history_from(history)} have been dropped from it"
    if damage is not None:
        raise LakeError(
            f"{name} can't be built from its history: {damage}",
            code="lake_history_lost",
            hint=f"Run `millstream pipeline rebuild {quote(name)} --from source` to copy the table again, with a new history.",
            table=name,
        )


def prepare_rebuild(layout: LakeLayout, view: View, schema: TableSchema) -> str | None:
    """Check that a view can be built from history, and set an unusable table aside; return where it is kept (`set_aside`).

    Raises:
        LakeError (`lake_history_lost`): see `check_history`.
        LakeUnavailable: a table in a catalog can't be read at present.
        Else as `set_aside`.
    """
    check_history(layout, schema)
    path = layout.table_path(view, schema)
    try:
        opened = open_table(layout, path, layout.app_id(view, schema.table_id))
        if opened is not None:
            opened.files()  # a format may read their list only now
    except LakeUnavailable:
        if layout.catalog:
            raise  # the catalog or its store doesn't answer: the table may be intact
        return set_aside(layout, path)
    except (LakeFilesGone, LakeTableForeign):
        return set_aside(layout, path)
    return None


def rebuild_view(
    layout: LakeLayout, view: View, schema: TableSchema, upto: Seq, *, sizes: FoldSizes = DEFAULT_SIZES
) -> TableCommit:
    """Rebuild `current` or `scd2` from history, up to a cut, in this process and in one commit.

    Call it only after `prepare_rebuild`, while nothing else folds the table, and no copy of it runs.

    Raises:
        LakeError, and its kin: as the folds.
    """
    if view == "scd2":
        return rebuild_versions(layout, schema, upto, sizes=sizes).commit
    assert view == "current", "history isn't built from anything"
    return fold_table(layout, schema, upto, sizes=sizes, anew=True)


def set_aside(layout: LakeLayout, path: str) -> str | None:
    """Make a table count as one that isn't there; return where it is kept, None if nothing was there: its folder's new path.

    A table in a catalog is emptied in place, unless its metadata can't be read; a tag keeps what it had.

    Raises:
        LakeError: the lake is in an object store, where folders can't be moved.
        LakeTableForeign (`lake_of_another_stream`): another stream or program made the table in the catalog.
        LakeConflict: another program committed at the same time; call again.
    """
    emptied = format_of(layout).set_aside(layout, path)
    if emptied is not None:
        return emptied.kept_in
    if "://" in path:
        raise LakeError(
            f"{path} must be moved away, and an object store can't move it",
            hint="Move it away by hand, then request the rebuild again.",
            path=path,
        )
    number = 1
    while Path(f"{path}{_ASIDE}{number}").exists():
        number += 1
    aside = f"{path}{_ASIDE}{number}"
    try:
        Path(path).rename(aside)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LakeUnavailable(f"{path} can't be moved aside: {error}", path=path) from error
    failpoints.hit("lake.rebuild.set_aside")
    return aside


def make_way(layout: LakeLayout, view: View, schema: TableSchema, n: Seq, *, forget: bool = False) -> str | None:
    """Move a damaged view out of the way of a requested copy of the table; return its new path.

    Nothing may write into the view during this.

    Args:
        n: the position of its history; if that is to be forgotten, the position from which on records count again.
        forget: whether an intact history or versions are moved too, because their columns can't follow the source's.
            (`current` has no rows from before the copy, and is rewritten in the new columns.)
    """
    if view == "history":
        return restart_history(layout, schema, n, forget=forget)
    goes = (forget and view == "scd2") or damage_of(layout, view, schema) is not None
    return set_aside(layout, layout.table_path(view, schema)) if goes else None


def erase_view(
    layout: LakeLayout, view: View, schema: TableSchema, n: Seq, *, earlier: Collection[TableSchema] = ()
) -> None:
    """Delete one table's files of a view, under all its names, before a copy of it; its history begins at `n`, empty.

    Folders that were moved aside count too. Other tables keep what they have in the same folders: records that wait there for
    their table's next record, and rows under a name that another table has by now. Nothing may write into the view during
    this, and no copy of the table may be under way: everything at or below `n` is gone. A second call completes one that
    was interrupted.

    Args:
        schema: the table's latest.
        n: the position from which on its records count again.
        earlier: all its schemas, for the names that it has had.

    Raises:
        LakeUnavailable: a file can't be deleted, or a catalog doesn't answer, or the folder of an earlier name can't be read. Or one aside can't, and
            another table has the name by now.
        LakeTableForeign: another program wrote into the folder of an earlier name, or made the table.
        LakeError: another program keeps a version of the table by a branch or a tag.
        LakeConflict: another commit removed some of the files; call again.
    """
    present = layout.table_path(view, schema)
    paths = {layout.table_path(view, known) for known in earlier} - {present}
    for path in (*sorted(paths), present):
        try:
            if view == "history":
                _erase_records(layout, path, schema, n, is_present=path == present)
            else:
                _erase_rows(layout, view, path, schema.table_id, is_present=path == present)
        except (OSError, DeltaError) as error:
            raise LakeUnavailable(f"{path} can't be deleted: {error}", path=path) from error
    if view == "history":
        begin_history(layout, schema, n)


def _erase_records(layout: LakeLayout, path: str, schema: TableSchema, n: Seq, *, is_present: bool) -> None:
    """Delete one table's records in a folder of history and those moved aside from it, by the tables in files' names."""
    table = schema.table_id
    for aside in _asides(path):
        mine, others = _files_of(layout, aside, table)
        if others:
            TableFiles(layout, aside).delete(mine)
        elif mine or is_present:
            erase_folder(layout, aside)
    mine, shared = _files_of(layout, path, table)
    opened: OpenTable | None = None
    try:
        opened = open_table(layout, path, layout.app_id("history", table))
        shared |= opened is not None and any(known.table_id != table for _, known in Eras.of(opened).told)
    except (LakeFilesGone, LakeTableForeign, LakeUnavailable):
        if not is_present:
            raise
    if not shared:
        format_of(layout).erase(layout, path)
        return
    live = [] if opened is None else sorted(mine.intersection(opened.files().column("path").to_pylist()))
    if is_present and opened is not None:
        begin_history(layout, schema, n, remove=live)
    elif live and opened is not None:
        opened.swap(Commit(), add=[], remove=live, properties={history_from_property(table): str(int(n))})
    TableFiles(layout, path).delete(mine)
    format_of(layout).forget_versions(layout, path)
    if opened is None:
        set_aside(layout, path)


def _files_of(layout: LakeLayout, path: str, table: TableId) -> tuple[set[str], bool]:
    """Return the files in a folder of history that have a table's records, and whether others have another table's."""
    storage = storage_of(layout, path)
    found = storage.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True))
    tables = {info.path.lstrip("/"): table_in(info.path) for info in found if info.is_file}
    mine = {name for name, owner in tables.items() if owner == table}
    return mine, any(owner not in {None, table} for owner in tables.values())


def _erase_rows(layout: LakeLayout, view: View, path: str, table: TableId, *, is_present: bool) -> None:
    """Delete a folder of folded rows with those moved aside from it, unless the rows are another table's.

    One aside that can't be read is this table's if no other table has the name; else nothing tells whose it is.
    """
    app = layout.app_id(view, table)
    if view == "scd2":
        format_of(layout).remove(layout, path + BESIDE)  # of a rebuild that was killed
        erase_folder(layout, path + BESIDE)
    opened = None if is_present else open_table(layout, path, app)
    for folder in _asides(path):
        is_mine = True
        if not is_present:
            try:
                aside = open_table(layout, folder, app)
                is_mine = aside is not None and aside.held
            except (LakeFilesGone, LakeTableForeign, LakeUnavailable) as error:
                if opened is not None and not opened.held:
                    raise LakeUnavailable(
                        f"{folder} can't be read, and may have rows of another table: {error.message}",
                        hint="If that lasts, delete the folder, or move it out of the lake. Then repeat the command.",
                        path=folder,
                    ) from error
        if is_mine:
            erase_folder(layout, folder)
    if is_present or (opened is not None and opened.held):
        format_of(layout).erase(layout, path)


def _asides(path: str) -> list[str]:
    """Return the folders that were moved aside from a table's; an object store has none."""
    if "://" in path:
        return []
    return sorted(str(found) for found in Path(path).parent.glob(f"{escape(Path(path).name)}{_ASIDE}*"))


def restart_history(layout: LakeLayout, schema: TableSchema, n: Seq, *, forget: bool = False) -> str | None:
    """Restart a damaged history at `n`, empty; return the old one's path.

    None if it is intact and isn't to be forgotten. Nothing may be appended to it during this, and a copy of the
    table must have been requested, because everything at or below `n` is gone.
    """
    if damage_of(layout, "history", schema) is None and not forget:
        return None
    aside = set_aside(layout, layout.table_path("history", schema))
    begin_history(layout, schema, n)
    return aside
