"""SQL sessions over a home's lake tables, all at one token."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.app.home_merged_tables import FOLDED_TIMES, HomeMergedTables
from millstream.app.log_readers import open_reader
from millstream.errors import CatalogError, LakeBehind, LogError
from millstream.lake.query.time_travel import TailPart
from millstream.model.as_of_parsing import parse_as_of
from millstream.model.names import qualified_name
from millstream.model.positions import Seq, StreamToken
from millstream.model.query_reasons import Reason
from millstream.model.schema import TableKind
from millstream.wal.table_batches import is_raw, table_batches

if TYPE_CHECKING:
    from millstream.catalog import TableRow
    from millstream.home.home import Home
    from millstream.lake.known_tables import KnownTable
    from millstream.lake.query.query_limits import QueryBounds
    from millstream.lake.query.query_session import LakeSession
    from millstream.model.ids import StreamId, TableId
    from millstream.wal.reader import LogSpan, StreamReader


def _landed_elsewhere(home: Home, stream: str) -> str | None:
    """Return the node that lands a stream's tables, if this one doesn't."""
    if not home.role_file(stream).exists():
        return None
    from millstream.leadership.node_roles import Roles

    return Roles(home).led_elsewhere(stream)


def open_lake(
    home: Home,
    stream: str | None = None,
    *,
    as_of: StreamToken | datetime | str | None = None,
    lake_only: bool = False,
    bounds: QueryBounds | None = None,
) -> LakeSession:
    """Open a stream's lake tables at one token, for SQL.

    Args:
        as_of: a token, a moment (UTC if it has no zone), or the text of either; None for the newest position.
        lake_only: whether to read nothing of the log, so that `merged` tables, which are read from it, are unknown.

    Raises:
        PositionError (`invalid_time`, `invalid_token`): the text is neither.
        PositionError (`beyond_retention`, `time_from_future`), TokenFromFuture: the lake no longer has it, or the log
            doesn't have it yet.
        LakeBehind: the log has more records up to it than a query merges.
        CorruptWal (`log_missing`): the log was moved or removed; not if `lake_only`.
    """
    from millstream.home.config_mapping import lake_layout
    from millstream.lake.query.query_session import LakeSession

    name, config = home.stream_config(stream)
    log: HomeLogTail | None = None
    try:
        reader = open_reader(home, name, definitions=True)
        stream_id, log = reader.stream_id, None if lake_only else HomeLogTail(reader)
    except LogError as error:
        # The lake alone may lack records that were acknowledged.
        if error.code == "log_missing" and not lake_only:
            raise
        # The log may be elsewhere, or gone; the catalog has the stream too.
        with home.open_catalog() as catalog:
            stream_id = catalog.stream(name).id
    if isinstance(as_of, str):
        as_of = parse_as_of(as_of, stream_id, now=datetime.now(UTC))
    if isinstance(as_of, datetime):
        moment: Seq | datetime | None = as_of.replace(tzinfo=UTC) if as_of.tzinfo is None else as_of
    else:
        moment = None if as_of is None else StreamToken.parse(str(as_of), stream=stream_id).linear()
    return LakeSession(
        lake_layout(home, name, config, stream_id),
        as_of=moment,
        held=lambda: _quarantined(home, stream_id),
        known=lambda: _known(home, name, stream_id),
        copies=lambda: _copies(home, stream_id),
        landed_by=_landed_elsewhere(home, name),
        merged=None
        if lake_only
        else HomeMergedTables(
            home, name, bytes_max=None if bounds is None else max(1, bounds.memory_bytes // FOLDED_TIMES)
        ),
        log=log,
        bounds=bounds,
    )


def _known(home: Home, stream: str, stream_id: StreamId) -> list[KnownTable]:
    """Return the stream's tables as capture knows them."""
    from millstream.catalog import TableState
    from millstream.lake.known_tables import KnownTable

    if not home.has_catalog():
        return []
    with home.open_catalog() as catalog:
        rows, schemas = catalog.tables(stream_id), catalog.latest_schemas(stream_id)
    try:
        logged = set(open_reader(home, stream).schemas())
    except LogError:
        logged = set(schemas)  # unknown here

    def waits(row: TableRow) -> str:
        if row.state not in {TableState.STREAMING, TableState.HISTORY_ONLY}:
            return f"it is {row.shown_state.replace('_', ' ')}{': ' if row.reason else ''}{row.reason}"
        return "the pipeline hasn't landed it" if row.id in logged else row.reason if lacks_key(row) else ""

    def lacks_key(row: TableRow) -> bool:
        return row.state is TableState.HISTORY_ONLY and row.id not in schemas and row.id not in logged

    def hint(row: TableRow) -> str:
        if not lacks_key(row):
            return ""
        statement = f"ALTER TABLE {qualified_name(row.namespace, row.name)} REPLICA IDENTITY FULL"
        return f"Give it a primary key, or run `{statement}` at the source (`millstream doctor` has the SQL); it is copied whole then."

    return [
        KnownTable(row.id, row.namespace, row.name, schemas.get(row.id), waits(row), hint(row))
        for row in rows
        if row.kind is TableKind.TABLE
    ]


def _copies(home: Home, stream: StreamId) -> dict[TableId, Reason]:
    """Return the tables whose copy isn't whole, or that are gone, with what their rows are until then, or for good."""
    from millstream.catalog import TableState

    if not home.has_catalog():
        return {}
    # A query needs no catalog: without one, it only can't report this.
    with contextlib.suppress(CatalogError), home.open_catalog() as catalog:
        told = {TableState.COPY_REQUESTED, TableState.COPYING, TableState.GONE}
        return {row.id: _copy_of(row) for row in catalog.tables(stream, gone=True) if row.state in told}
    return {}


def _copy_of(row: TableRow) -> Reason:
    from millstream.catalog import TableState

    name = qualified_name(row.namespace, row.name)
    if row.state is TableState.GONE:
        return Reason("gone", name, f"its rows are those of its last records: {row.reason}")
    if row.is_copy_held:
        return Reason("copy_held", name, f"rows that were not written since are as before the change: {row.reason}")
    if row.state is TableState.COPYING:
        return Reason(
            "copying", name, "its copy is under way: from its begin on, rows that it has yet to read are missing"
        )
    return Reason(
        "copy_requested",
        name,
        "its copy has yet to begin: rows that were not written since its request are missing or old",
    )


def _quarantined(home: Home, stream: StreamId) -> dict[str, str]:
    """Return the names of tables that capture or the pipeline has quarantined, with the reason.

    Tables whose fold alone fails aren't among them: their records land, and a query reads them.
    """
    from millstream.app.table_status import quarantine_of, shown_tables, table_facts
    from millstream.catalog import TableState

    if not home.has_catalog():
        return {}
    with home.open_catalog() as catalog:
        held = quarantine_of(catalog, stream).all()
        rows = [row for row in shown_tables(catalog, stream, held) if row.kind is TableKind.TABLE]
    found = [table_facts(row, {}, None, held.get(row.id), {}) for row in rows]
    return {table["name"]: table["reason"] for table in found if table["state"] == TableState.QUARANTINED.value}


TAIL_BYTES_MAX: Final = 64 << 20
"""Bytes of the log that a query merges at most: a second or two of work, and far more than a pipeline leaves that keeps
up."""


class HomeLogTail:
    """The `LogTail` of a home's stream.

    Args:
        bytes_max: bytes of the log above which a tail isn't merged.
    """

    def __init__(self, reader: StreamReader, *, bytes_max: int = TAIL_BYTES_MAX) -> None:
        self._reader = reader
        self._bytes_max = bytes_max

    def end(self) -> Seq:
        """Return the readable end."""
        return self._reader.persisted_upto()

    def whole_upto(self, n: Seq) -> Seq:
        """Return the greatest position at or below `n` that splits no operation."""
        return self._reader.whole_upto(n)

    def upto_moment(self, after: Seq, moment: datetime) -> Seq:
        """Return the end of the last operation before the first one above `after` that committed after a moment."""
        end = self.end()
        if end <= after:
            return after
        first: int | None = None
        for span in self._spans(after, end):
            for found in self._reader.read_span(span, columns=frozenset({"__commit_ts"}), moments=True):
                if is_raw(found.schema):
                    continue
                times = found.batch.column("__commit_ts")
                later = found.batch.column("__seq").filter(pc.greater(times, pa.scalar(moment, times.type)))
                if len(later):
                    least = pc.min(later).as_py()
                    first = least if first is None else min(first, least)
        return end if first is None else max(after, self.whole_upto(Seq(first - 1)))

    def parts(self, after: Seq, upto: Seq) -> Sequence[TailPart]:
        """Return the contents of a stretch; raises as `LogTail.parts`."""
        return [
            TailPart(part.schema.defined(), max(part.first_seq, Seq(after + 1)), min(part.last_seq, upto))
            for span in self._spans(after, upto)
            for part in self._reader.parts_of(span)
            if not is_raw(part.schema) and part.first_seq <= upto and part.last_seq > after
        ]

    def records(self, after: Seq, upto: Seq, table: TableId) -> list[pa.RecordBatch]:
        """Return one table's records of a stretch."""
        return [
            batch for span in self._reader.spans(after, upto) for _, batch in table_batches(self._reader, span, table)
        ]

    def _spans(self, after: Seq, upto: Seq) -> list[LogSpan]:
        reached = self._reader.cut(after, bytes_max=self._bytes_max)
        spans = self._reader.spans(after, upto) if reached >= upto else []
        if reached < upto or sum(span.byte_end - span.byte_start for span in spans) > self._bytes_max:
            token = StreamToken.scalar(self._reader.stream_id, after)
            raise LakeBehind(
                f"the log has more than {self._bytes_max} bytes after {token}, where the lake ends",
                reached=int(after),
            )
        return spans
