"""The position of an SQL session: the one that a moment or a token asks for, the cut at or below it, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import pyarrow as pa

from millstream.errors import (
    CorruptWal,
    InvalidQuery,
    LakeBehind,
    LakeUnavailable,
    MillstreamError,
    OffsetExpired,
    PositionError,
    TokenFromFuture,
)
from millstream.lake.commit_cuts import Cut, CutTable, cut_at, cut_at_time, cut_from, first_cut, last_cut
from millstream.lake.data_files import TableFiles, files_of, table_in
from millstream.lake.history_folder import history_begun, history_from
from millstream.lake.known_tables import KnownTable, is_meant
from millstream.lake.layout import MESSAGES, LakeLayout, folder_of
from millstream.lake.operation_ends import upto_moment, whole_upto
from millstream.lake.query.tail_effect import SEQ
from millstream.lake.schema_history import era_at, era_of
from millstream.lake.table_format import OpenTable, open_table
from millstream.model.ids import TableId
from millstream.model.positions import Seq, StreamToken
from millstream.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class TailPart:
    """A table's records in a stretch of the log, of one schema version."""

    schema: TableSchema
    first: Seq
    """A lower bound of their numbers."""
    last: Seq
    """An upper bound of them."""


class LogTail(Protocol):
    """The stream's log, to read records that haven't landed. Every method raises `CorruptWal` if it is damaged."""

    def end(self) -> Seq:
        """Return the readable end."""
        ...

    def whole_upto(self, n: Seq) -> Seq:
        """Return the greatest position at or below `n` that splits no operation."""
        ...

    def upto_moment(self, after: Seq, moment: datetime) -> Seq:
        """Return the end of the last operation before the first one above `after` that committed after a moment.

        It is the readable end if none did. Raises as `parts`.
        """
        ...

    def parts(self, after: Seq, upto: Seq) -> Sequence[TailPart]:
        """Return the contents of `(after, upto]`, without quarantined tables.

        Raises:
            LakeBehind: it is larger than a query may merge.
            OffsetExpired: retention has deleted part of it.
        """
        ...

    def records(self, after: Seq, upto: Seq, table: TableId) -> list[pa.RecordBatch]:
        """Return one table's records of `(after, upto]`, in `record_schema`; raises `OffsetExpired`."""
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """A session's position, which splits no operation."""

    n: Seq
    cut: Cut | None
    """The last cut at or below it."""
    tail: Sequence[TailPart] = ()
    """The log's records between the two; empty if the lake has them all."""
    left_out: str = ""
    """The reason why the log's newest records are left out; empty if none are."""


def standing_at(layout: LakeLayout, as_of: Seq | datetime | None, log: LogTail | None = None) -> Standing:
    """Return the position to show.

    Raises:
        TokenFromFuture, PositionError (`time_from_future`, `beyond_retention`), LakeBehind: as `LakeSession`.
    """
    cut = last_cut(layout)
    while True:
        try:
            return _standing(layout, cut, as_of, log)
        except OffsetExpired as error:
            # Retention deletes only what has landed since, unless the log is another node's copy.
            before, cut = cut, last_cut(layout)
            if cut == before:
                gone = LakeBehind(f"the log no longer has all records after {_token(layout, cut)}: {error.message}")
                if as_of is not None:
                    raise gone from error
                return _left_out(cut, gone)


def _standing(layout: LakeLayout, cut: Cut | None, as_of: Seq | datetime | None, log: LogTail | None) -> Standing:
    landed = Seq(0) if cut is None else cut.n
    if as_of is None:
        try:
            return _in_tail(cut, landed if log is None else log.end(), log)
        except (LakeBehind, CorruptWal) as error:
            return _left_out(cut, error)
    if isinstance(as_of, datetime):
        return _at_moment(layout, cut, as_of, log)
    if as_of <= landed:
        below = cut_at(layout, as_of)
        first = None if below is not None else first_cut(layout)
        if first is not None and first.number > 1:
            raise _before(layout, str(StreamToken.scalar(layout.stream_id, as_of)))
        return Standing(whole_upto(layout, as_of), below)
    end = landed if log is None else max(landed, log.end())
    if as_of > end or log is None:
        token, asked = (StreamToken.scalar(layout.stream_id, n) for n in (end, as_of))
        raise TokenFromFuture(
            f"the {'lake has' if log is None else 'lake and the log have'} records only up to {token}, not {asked}",
            hint=f"Query at {token} or earlier"
            + ("; `millstream status` shows the records still to land." if log is None else "."),
            reached=int(end),
        )
    return _in_tail(cut, log.whole_upto(as_of), log)


def _at_moment(layout: LakeLayout, last: Cut | None, moment: datetime, log: LogTail | None) -> Standing:
    now = datetime.now(UTC)
    if moment > now:
        raise PositionError(
            f"{moment.isoformat()} lies in the future",
            code="time_from_future",
            hint=f"Use a time up to now, {now.isoformat()}.",
        )
    cut = None if last is None else cut_at_time(layout, moment)
    reached = Seq(0) if cut is None else cut.n
    above = None if last is None else cut_from(layout, Seq(reached + 1))
    if above is not None:
        if cut is None and above.number > 1:
            raise _before(layout, moment.isoformat())
        n = upto_moment(layout, cut, above, moment)
        found = Standing(n, cut_at(layout, n))
    else:
        found = _in_tail(cut, reached if log is None else log.upto_moment(reached, moment), log)
    if not found.n:
        raise _before(layout, moment.isoformat())
    return found


def _in_tail(cut: Cut | None, n: Seq, log: LogTail | None) -> Standing:
    """Return a position at or behind the last cut."""
    landed = Seq(0) if cut is None else cut.n
    if log is None or n <= landed:
        return Standing(landed, cut)
    return Standing(n, cut, log.parts(landed, n))


def _left_out(cut: Cut | None, error: MillstreamError) -> Standing:
    return Standing(Seq(0) if cut is None else cut.n, cut, left_out=error.message)


def _token(layout: LakeLayout, cut: Cut | None) -> StreamToken:
    return StreamToken.scalar(layout.stream_id, Seq(0) if cut is None else cut.n)


def add_since_the_cut(layout: LakeLayout, n: Seq, tables: dict[str, CutTable]) -> dict[str, str]:
    """Add to a cut's tables, by folder, those that came, or were renamed, between the cut below a position and that.

    Returns:
        By the folder of a table that was renamed behind the position, the folder of its later name, which has its records
        since the cut.
    """
    later, elsewhere = cut_from(layout, n), dict[str, str]()
    for folder, table in ({} if later is None else later.tables).items():
        old = [f for f, t in tables.items() if t.table_id == table.table_id]
        if folder == MESSAGES or folder in old:
            continue
        history = open_history(layout, folder, table.table_id)
        era = era_of(history, table.table_id, n)
        if era is None:
            continue
        if folder_of(era.schema) != folder:
            elsewhere |= {f: folder for f in old if _has_more(history, tables[f], n)}
        elif folder not in tables:
            tables[folder] = table
            for other in old:
                del tables[other]
    return elsewhere


def _has_more(history: OpenTable, table: CutTable, n: Seq) -> bool:
    """Return whether a history may have records of a table up to a position that its history in a cut lacks."""
    mine = [file for file in files_of(history, SEQ) if table_in(file.path) == table.table_id]
    return any(file.low is None or (file.high > table.history_n and file.low <= n) for file in mine)


def known_later(layout: LakeLayout, n: Seq, said: str, tables: Iterable[CutTable]) -> InvalidQuery | None:
    """Return the error for a table that wasn't there, or so named, at a position; None if the lake has none so named."""
    last, token = last_cut(layout), StreamToken.scalar(layout.stream_id, n)
    for folder, table in ({} if last is None else last.tables).items():
        if folder == MESSAGES or not is_meant(said, table.name):
            continue
        had = next((one.name for one in tables if one.table_id == table.table_id), None)
        if had is not None and had != table.name:
            return InvalidQuery(f"there was no table {table.name} at {token}: it was called {had} then")
        history = open_history(layout, folder, table.table_id)
        era = None if last is None else era_at(history, last.n)
        begins = None if era is None or not era.first else cut_from(layout, era.first)
        return InvalidQuery(
            f"there was no table {table.name} at {token}, or it was empty: it had no record yet",
            hint=f"Query {'a later time' if begins is None else f'{_moment_of(layout, begins)} or later'}.",
        )
    return None


def open_history(layout: LakeLayout, folder: str, table_id: TableId) -> OpenTable:
    """Open a table's history; `LakeUnavailable` if it is gone."""
    path = f"{layout.root}/history/{folder}"
    opened = open_table(layout, path, layout.app_id("history", table_id))
    if opened is None:
        raise LakeUnavailable(
            f"the table {path} is gone", hint="Run `millstream tables copy` for the table.", path=path
        )
    return opened


def open_whole(layout: LakeLayout, path: str, app: str, version: int, n: Seq) -> OpenTable | None:
    """Open a table at an earlier version, at or below a position; None if its log entry or one of its files is gone."""
    try:
        old = open_table(layout, path, app, version=version)
        if old is None or old.n is None or old.n > n:
            return None
        live = set(old.files().column("path").to_pylist())
        return old if live <= TableFiles(layout, path).all().keys() else None
    except LakeUnavailable:
        return None


def whole_history(
    layout: LakeLayout,
    standing: Standing,
    folder: str,
    schema: TableSchema,
    history: OpenTable,
    after: Seq,
    *,
    known: Callable[[], Iterable[KnownTable]] | None,
) -> OpenTable:
    """Return a history with a table's records between a position from which it is read and a session's.

    It is the given one, or that of the session's cut if records have been dropped since the session began. A session
    at an earlier position has only the given one: retention is to hold at once.

    Args:
        folder: the table's, in the session.
        history: its history, as it is now.
        after: the position from which it is read.
        known: returns the source's tables, as of `LakeSession`; None if the session stands at an earlier position.

    Raises:
        PositionError (`beyond_retention`): both lack some.
        LakeBehind: the table is being rebuilt from its source.
    """
    try:
        _check_beginning(layout, schema, history, after, standing.n, known=known)
    except PositionError:
        earlier = None if known is None else _history_of_cut(layout, standing, folder, schema.table_id, history)
        if earlier is None:
            raise
        _check_beginning(layout, schema, earlier, after, standing.n, known=known)
        return earlier
    return history


def _history_of_cut(
    layout: LakeLayout, standing: Standing, folder: str, table_id: TableId, history: OpenTable
) -> OpenTable | None:
    """Return a table's history as the cut of a session at the end names it; None if it is gone, or lacks records."""
    if standing.cut is None or history.path != f"{layout.root}/history/{folder}":
        return None
    table = standing.cut.tables.get(folder)
    # The log's records behind the cut may have landed since.
    if table is None or table.table_id != table_id or any(part.schema.table_id == table_id for part in standing.tail):
        return None
    return open_whole(layout, history.path, history.app, table.history, standing.n)


def _check_beginning(
    layout: LakeLayout,
    schema: TableSchema,
    history: OpenTable,
    after: Seq,
    n: Seq,
    *,
    known: Callable[[], Iterable[KnownTable]] | None,
) -> None:
    """Raise as `whole_history` if a history lacks records in `(after, n]`."""
    gone = history_from(history)
    if after >= gone or after >= n:
        return
    anew = history_begun(history) == gone
    if anew and known is not None:
        raise _rebuilding(schema, known())
    raise _beyond(layout, schema, n, gone, anew=anew)


def _beyond(layout: LakeLayout, schema: TableSchema, n: Seq, gone: Seq, *, anew: bool) -> PositionError:
    """Return the error for a table that can't be shown at a position.

    Its records up to another position were dropped, or its history was begun again.
    """
    cut = cut_from(layout, gone)
    when = "" if cut is None else f" ({(cut.commit_ts_max or cut.committed_at).isoformat(timespec='seconds')})"
    at, begins = (StreamToken.scalar(layout.stream_id, position) for position in (n, gone))
    return PositionError(
        f"{schema.full_name} can't be shown as of {at}: its history begins after {begins}{when}",
        code="beyond_retention",
        hint="Query a later time: the history was restarted then, by `millstream tables copy --forget`, which deletes the old "
        "one, or by `millstream pipeline rebuild --from source`, which quarantines it."
        if anew
        else "Query a later time, or raise `history_retention`.",
        first=int(gone),
    )


def _rebuilding(schema: TableSchema, known: Iterable[KnownTable]) -> LakeBehind:
    """Return the error for a table whose history was begun again, and whose first copy hasn't landed.

    `known` gives what the copy waits for.
    """
    waits = next((table.waits for table in known if table.table_id == schema.table_id), "")
    return LakeBehind(
        f"{schema.full_name} is being rebuilt from its source: {waits or 'its copy has yet to land'}",
        hint="Query again when its copy has landed; `millstream tables` shows how far that is.",
        table=schema.full_name,
    )


def _before(layout: LakeLayout, asked: str) -> PositionError:
    first = first_cut(layout)
    if first is None:
        return PositionError(
            f"the lake is empty, so it can't be read at {asked}",
            code="beyond_retention",
            hint="Run `millstream run`, which lands the log's records; nothing can be read as of a time before that.",
            first=None,
        )
    hint = f"Query {_moment_of(layout, first)} or later."
    last = last_cut(layout)
    tables = {} if last is None else last.tables
    begun = max((table.since for folder, table in tables.items() if folder != MESSAGES), default=first.n)
    if begun > first.n and (whole := cut_from(layout, begun)) is not None:
        hint += f" All tables that the lake has now have begun by {_moment_of(layout, whole)}; one may still be in its first copy there."
    return PositionError(
        f"the lake has nothing as old as {asked}: it begins at {_moment_of(layout, first)}",
        code="beyond_retention",
        hint=hint,
        first=str(StreamToken.scalar(layout.stream_id, first.n)),
    )


def _moment_of(layout: LakeLayout, cut: Cut) -> str:
    """Return the moment and the token of a cut; a query at either shows it, or a later one of the same moment."""
    at = cut.commit_ts_max or cut.committed_at
    return f"{at.isoformat()} ({StreamToken.scalar(layout.stream_id, cut.n)})"
