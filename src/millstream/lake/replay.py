"""Replays: the records of one table between two positions, as a Delta table of its own, written in one commit.

The request is stored in the new table's properties, so that a repeated request finds it done. A replay that was
killed leaves files that no table names; the next replay of its name removes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import write_deltalake

from millstream import failpoints
from millstream.errors import LakeError, LakeTableForeign, PositionError, TokenFromFuture, UnknownTable, UsageError
from millstream.lake.commit_cuts import Cut, CutTable
from millstream.lake.delta.commits import WRITER, DeltaHandle
from millstream.lake.delta.format import DeltaFormat
from millstream.lake.history_folder import BOUNDED, history_from
from millstream.lake.history_scan import scan_history
from millstream.lake.layout import MESSAGES, LakeLayout, is_folder_of
from millstream.lake.store_errors import lake_errors
from millstream.lake.table_format import Commit, NewTable, format_of, open_table
from millstream.model.addresses import IN_CATALOG
from millstream.model.names import parse_qualified_name
from millstream.model.positions import Seq, StreamToken

REPLAYS: Final = "replays"
REPLAY_PROPERTY: Final = "millstream.replay"
_LEFT_BEHIND: Final = re.compile(r"part-[0-9]+-[0-9a-f-]+-c[0-9]+(\.[a-z]+)?\.parquet\Z")
"""Names of delta-rs's files."""


@dataclass(frozen=True, slots=True)
class TableReplay:
    """A replay that exists."""

    path: str
    rows: int
    after: Seq
    upto: Seq
    already: bool
    """Whether it existed before, of the same table and range."""


def replay_path(layout: LakeLayout, into: str) -> str:
    """Return a replay's path: `<lake>/<stream>/replays/<name>`, or `into`.

    `into` counts as a path (from the current folder) or a URL if it has a slash.

    Raises:
        UsageError: it is a name, and the lake lies where its catalog says.
    """
    if "/" not in into:
        if layout.location == IN_CATALOG:
            raise UsageError(
                "the lake lies where its catalog says, and a replay is a Delta table that no catalog has",
                hint=f"Name a folder or a URL, such as ./{into}.",
            )
        return f"{layout.root}/{REPLAYS}/{into}"
    return into.rstrip("/") if "://" in into else str(Path(into).resolve())


def replay_range(layout: LakeLayout, cut: Cut, name: str, *, after: Seq | None, upto: Seq, into: str) -> TableReplay:
    """Write a table's records in `(after, upto]` into a new Delta table, in one commit.

    It reads only history, so it may run concurrently with the pipeline. Not twice into one place at once.

    Args:
        cut: the lake's last cut.
        name: the table, `schema.table`.
        after: exclusive; None: from the first record that history has.
        upto: inclusive; `cut` has reached it.
        into: a new name among the stream's replays, or a path or URL of its own.

    Raises:
        UnknownTable: the lake has no table of that name.
        LakeError (`lake_table_exists`): something else is there already; details: path.
        PositionError (`beyond_retention`): part of the range may have been dropped from history.
        TokenFromFuture: the lake hasn't reached `upto`.
    """
    folder, table = table_named(cut, name)
    if upto > cut.n:
        reached, beyond = (StreamToken.scalar(layout.stream_id, n) for n in (cut.n, upto))
        raise TokenFromFuture(f"the lake has records only up to {reached}, not {beyond}", reached=int(cut.n))
    path = replay_path(layout, into)
    history_path = f"{layout.root}/history/{folder}"
    history = open_table(layout, history_path, layout.app_id("history", table.table_id))
    if history is None:
        raise LakeError(f"the table {history_path} is gone", path=history_path)
    begins = history_from(history)
    after = begins if after is None else after
    if upto <= after:
        raise UsageError(f"the range after {after} up to {upto} is empty")
    if after < begins:
        token = StreamToken.scalar(layout.stream_id, begins)
        raise PositionError(
            f"records of {name} up to {token} may have been dropped",
            code="beyond_retention",
            hint=f"Begin at {token} or later; without --from, all records are taken that the lake has.",
            first=int(begins),
        )
    app = layout.app_id("history", table.table_id) + f"/{REPLAYS}"
    asked = {"stream": str(layout.stream_id), "table": int(table.table_id), "after": int(after), "upto": int(upto)}
    opened = _opened(layout, path, app)
    already = opened is not None
    columns = format_of(layout).partition.without(history.schema())
    if opened is None:
        _clear(layout, path)
        description = f"Changes of {name} in ({after}, {upto}] of stream {layout.stream_name}, written by Millstream."
        replayed = NewTable(columns, description, BOUNDED, properties={REPLAY_PROPERTY: json.dumps(asked)})
        opened = DeltaFormat().create(layout, path, app, replayed)
    if json.loads(opened.properties.get(REPLAY_PROPERTY) or "null") != asked:
        raise LakeError(f"{path} holds another table already", code="lake_table_exists", path=path)
    if opened.n is None:
        already = False
        _clear(layout, path)
        only = None if folder == MESSAGES else table.table_id
        scan = scan_history(history, after=after, upto=upto, columns=columns.names, table=only)
        with lake_errors(path):
            write_deltalake(
                opened.table,
                pa.RecordBatchReader.from_batches(scan.projected_schema, _until_written(scan.to_batches())),
                mode="append",
                schema_mode="merge",
                writer_properties=WRITER,
                commit_properties=opened.commit_properties(Commit(upto)),
            )
        failpoints.hit("lake.replay.after_commit")
    counts = opened.files().column("num_records").to_pylist()
    return TableReplay(path, int(sum(counts)), after, upto, already)


def table_named(cut: Cut, name: str) -> tuple[str, CutTable]:
    """Return the folder of a table by its name, and the cut's facts about it.

    Raises:
        UnknownTable: the lake has none of that name.
    """
    parts = parse_qualified_name(name)
    folder = next((of for of in cut.tables if is_folder_of(of, *parts)), None)
    if folder is None:
        known = sorted(table.name for of, table in cut.tables.items() if of != MESSAGES)
        raise UnknownTable(
            f"the lake has no table {name}",
            hint=f"Use one of its tables: {', '.join(known[:20]) or 'there is none yet'}.",
            table=name,
        )
    return folder, cut.tables[folder]


def _until_written(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches
    failpoints.hit("lake.replay.before_commit")


def _opened(layout: LakeLayout, path: str, app: str) -> DeltaHandle | None:
    try:
        return DeltaFormat().open(layout, path, app)
    except LakeTableForeign as error:
        raise LakeError(f"{path} holds another table already", code="lake_table_exists", path=path) from error


def _clear(layout: LakeLayout, path: str) -> None:
    """Remove files that a killed replay left in this place."""
    with lake_errors(path):
        if "://" not in path and not Path(path).is_dir():
            return
        files = DeltaFormat().storage(layout, path)
        every = [
            info.path.lstrip("/") for info in files.get_file_info(pafs.FileSelector("", recursive=True)) if info.is_file
        ]
        left = [name for name in every if not name.startswith("_delta_log/")]
        others = [name for name in left if not _LEFT_BEHIND.match(name)]
        if others:
            raise LakeError(f"{path} holds other files: {others[0]}", code="lake_table_exists", path=path)
        for name in left:
            files.delete_file(name)
