"""The position of an SQL session: the one that a moment or a token asks for, the cut at or below it, and its tables."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from millstream.errors import BeyondRetention, LakeBehind, LakeUnavailable, PositionError, TokenFromFuture
from millstream.lake.delta import OpenTable, open_table
from millstream.lake.known_tables import KnownTable
from millstream.lake.layout import MESSAGES, LakeLayout, folder_of
from millstream.lake.operations import whole_upto
from millstream.lake.schema_history import era_at
from millstream.lake.snapshots import Cut, CutTable, cut_at, cut_at_time, cut_from, first_cut, last_cut
from millstream.model.ids import TableId
from millstream.model.positions import Seq, StreamToken
from millstream.model.schema import TableSchema


def standing_at(layout: LakeLayout, as_of: Seq | datetime | None) -> tuple[Seq, Cut | None]:
    """Return the position to show, which splits no operation, and the last cut at or below it.

    Raises:
        TokenFromFuture, PositionError (`time_from_future`), BeyondRetention: as `LakeSession`.
    """
    if as_of is None:
        cut = last_cut(layout)
        return (Seq(0), None) if cut is None else (cut.n, cut)
    if isinstance(as_of, datetime):
        now = datetime.now(UTC)
        if as_of > now:
            raise PositionError(
                f"{as_of.isoformat()} lies in the future",
                code="time_from_future",
                hint=f"Use a time up to now, {now.isoformat()}.",
            )
        cut = cut_at_time(layout, as_of)
        if cut is None:
            raise _before(layout, as_of.isoformat())
        return cut.n, cut
    last = last_cut(layout)
    reached = Seq(0) if last is None else last.n
    if as_of > reached:
        token, asked = (StreamToken.scalar(layout.stream_id, n) for n in (reached, as_of))
        raise TokenFromFuture(
            f"the lake has records only up to {token}, not {asked}",
            hint=f"Query at {token} or earlier; `millstream status` shows the records still to land.",
            reached=int(reached),
        )
    cut = cut_at(layout, as_of)
    first = None if cut is not None else first_cut(layout)
    if first is not None and first.number > 1:
        raise _before(layout, str(StreamToken.scalar(layout.stream_id, as_of)))
    return whole_upto(layout, as_of), cut


def add_since_the_cut(layout: LakeLayout, n: Seq, tables: dict[str, CutTable]) -> None:
    """Add to a cut's tables, by folder, those that came, or were renamed, between the cut below a position and that."""
    later = cut_from(layout, n)
    for folder, table in ({} if later is None else later.tables).items():
        if folder in tables or folder == MESSAGES:
            continue
        era = era_at(open_history(layout, folder, table.table_id), n)
        if era is None or folder_of(era.schema) != folder:
            continue
        tables[folder] = table
        for old in [f for f, t in tables.items() if t.table_id == table.table_id and f != folder]:
            del tables[old]


def open_history(layout: LakeLayout, folder: str, table_id: TableId) -> OpenTable:
    """Open a table's history; `LakeUnavailable` if it is gone."""
    path = f"{layout.root}/history/{folder}"
    opened = open_table(layout, path, layout.app_id("history", table_id))
    if opened is None:
        raise LakeUnavailable(
            f"the Delta table {path} is gone", hint="Run `millstream tables copy` for the table.", path=path
        )
    return opened


def beyond(layout: LakeLayout, schema: TableSchema, n: Seq, gone: Seq, *, anew: bool) -> BeyondRetention:
    """Return the error for a table that can't be shown at a position.

    Its records up to another position were dropped, or its history was begun again.
    """
    cut = cut_from(layout, gone)
    when = "" if cut is None else f" ({(cut.commit_ts_max or cut.committed_at).isoformat(timespec='seconds')})"
    at, begins = (StreamToken.scalar(layout.stream_id, position) for position in (n, gone))
    return BeyondRetention(
        f"{schema.full_name} can't be shown as of {at}: its history begins after {begins}{when}",
        hint="Query a later time: `millstream pipeline rebuild --from source` restarted the history then; the old one "
        "was quarantined next to it."
        if anew
        else "Query a later time, or raise `history_retention`.",
        first=int(gone),
    )


def rebuilding(schema: TableSchema, known: Iterable[KnownTable]) -> LakeBehind:
    """Return the error for a table whose history was begun again, and whose first copy hasn't landed.

    `known` gives what the copy waits for.
    """
    waits = next((table.waits for table in known if table.table_id == schema.table_id), "")
    return LakeBehind(
        f"{schema.full_name} is being rebuilt from its source: {waits or 'its copy has yet to land'}",
        hint="Query again when its copy has landed; `millstream tables` shows how far that is.",
        table=schema.full_name,
    )


def _before(layout: LakeLayout, asked: str) -> BeyondRetention:
    first = first_cut(layout)
    if first is None:
        return BeyondRetention(f"the lake is empty, so it can't be read at {asked}", first=None)
    at = first.commit_ts_max or first.committed_at
    token = StreamToken.scalar(layout.stream_id, first.n)
    return BeyondRetention(
        f"the lake begins at {at.isoformat()} ({token}), after {asked}",
        hint=f"Query {at.isoformat()} or later.",
        first=str(token),
    )
