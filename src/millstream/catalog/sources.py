"""The catalog's sources: each is one history of one database, with the position that the log has reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, lock_stream
from millstream.catalog.facts import delete_fact, read_fact, write_fact
from millstream.catalog.row_types import SourceRow
from millstream.errors import CatalogError
from millstream.model.ids import SourceId, StreamId
from millstream.model.positions import Lsn

OF_A_BUFFER: Final = 0
"""System identifier of a source that is no database: a shard of a write buffer, from which a stream takes
operations."""
_CURRENT: Final = "source"
"""The fact that names the followed source."""
_NOTHING: Final = Lsn(1)
"""A position below every commit: capture has run, and the log has nothing of it."""


def _scope(stream: StreamId | str) -> str:
    return f"capture/{stream}"


def _log_had(source: SourceId) -> str:
    """Return the name of the fact that says what a log must have for the source's position to count."""
    return f"log_had/{source}"


class Sources(CatalogPart):
    """Sources and the positions reached.

    A position says that the log has everything up to there. It is true of the log that it was stored for. A log that was
    cut back since, or put back from a copy, may lack some of that. So a position is stored together with what the
    log's group headers had reached by then, and counts only for a log that has reached as much (`reached_in`).
    """

    def resolve_source(self, stream: StreamId, system_identifier: int, database: str, timeline: int) -> SourceId:
        """Return the number of one history of one database, given at its first use.

        A new timeline is a new source at 0.
        """
        facts = _facts(stream, system_identifier, database, timeline)
        with self._database.write() as connection:
            lock_stream(connection, stream)
            return self._resolve(connection, facts)

    def follow_source(
        self,
        stream: StreamId,
        system_identifier: int,
        database: str,
        timeline: int,
        *,
        reached: Lsn,
        history: Sequence[tuple[int, Lsn]] | None,
        before: SourceId | None = None,
        log: Mapping[SourceId, Lsn] | None = None,
    ) -> SourceId:
        """Follow this history from here on: return its number, which becomes `current_source`.

        Args:
            reached: LSN up to which the log has everything already; a source with a higher position keeps that.
            history: the earlier timelines, oldest first, each with the LSN at which it was left; None if that isn't
                known.
            before: the source whose position `reached` is; None: the source begins, whatever a log has.
            log: the positions that the log's own group headers have reached.

        Everything is in one transaction: a number that started at 0 would pass for a source of which nothing was
        captured.
        """
        facts = _facts(stream, system_identifier, database, timeline)
        with self._database.write() as connection:
            lock_stream(connection, stream)
            source = self._resolve(connection, facts)
            higher = (t.sources.c.id == source) & (t.sources.c.reached < reached)
            moved = connection.execute(update(t.sources).where(higher).values(reached=reached)).rowcount > 0
            if before is None or (moved and before != source):
                had = None if before is None else self._log_had(connection, _scope(stream), before, log or {})
                self._put(connection, _scope(stream), _log_had(source), had)
            value = {"id": source, "history": None if history is None else [list(part) for part in history]}
            self._put(connection, _scope(stream), _CURRENT, value)
        return source

    def _log_had(
        self, connection: Connection, scope: str, source: SourceId, log: Mapping[SourceId, Lsn]
    ) -> list[int] | None:
        """Return a source of a log's group headers, and its position there, that a log needs for the source's position."""
        if source in log:
            return [source, log[source]]
        had = read_fact(connection, scope, _log_had(source))
        return None if had is None else [had[0], min(had[1], log.get(SourceId(had[0]), Lsn(0)))]

    def _put(self, connection: Connection, scope: str, name: str, value: Any) -> None:
        """Put a fact, or remove it if the value is None."""
        if value is None:
            delete_fact(connection, scope, name)
        else:
            write_fact(self._database, connection, scope, name, value)

    def _resolve(self, connection: Connection, facts: Mapping[str, Any]) -> SourceId:
        same = [t.sources.c[name] == value for name, value in facts.items()]
        found = connection.execute(select(t.sources.c.id).where(*same)).scalar()
        if found is None:
            fresh = self._database.insert(t.sources).values(facts)
            found = connection.execute(fresh.returning(t.sources.c.id)).scalar_one()
        return SourceId(found)

    def current_source(self, stream: StreamId) -> SourceRow | None:
        """Return the source that the stream follows; None if it has none so far."""
        known = self.sources(stream)
        followed = self.followed_source(stream).get("id")
        return next((row for row in known if row.id == followed), known[-1] if known else None)

    def source_history(self, stream: StreamId) -> tuple[tuple[int, Lsn], ...] | None:
        """Return the timelines before `current_source`'s, oldest first, each with the LSN at which it was left.

        None: unknown.
        """
        history = self.followed_source(stream).get("history")
        return None if history is None else tuple((int(timeline), Lsn(lsn)) for timeline, lsn in history)

    def followed_source(self, stream: StreamId) -> dict[str, Any]:
        """Return the facts of the followed source, `id` and `history`; empty if the stream has none so far."""
        with self._database.read() as connection:
            return dict(read_fact(connection, *followed_fact(stream)) or {})

    def sources(self, stream: StreamId) -> list[SourceRow]:
        """Return the stream's sources that are databases, oldest first."""
        return [row for row in self.all_sources(stream) if row.system_identifier != OF_A_BUFFER]

    def all_sources(self, stream: StreamId) -> list[SourceRow]:
        """Return all sources of the log's numbers, oldest first: databases, and buffers' shards (`OF_A_BUFFER`)."""
        with self._database.read() as connection:
            query = select(t.sources).where(t.sources.c.stream == str(stream)).order_by(t.sources.c.id)
            rows = connection.execute(query).all()
        return [source_row(row) for row in rows]

    def reached(self, source: SourceId) -> Lsn:
        """Return the position that capture of the source last stored; the log's own group headers may be ahead."""
        with self._database.read() as connection:
            return Lsn(self._row(connection, source).reached)

    def reached_in(self, source: SourceId, log: Mapping[SourceId, Lsn]) -> Lsn:
        """Return X: up to here everything of the source is in a log, whatever happens next; 0 if capture never ran.

        Args:
            log: the positions that the log's own group headers have reached.

        The stored position counts only if the log has what it had when the position was stored; else the headers
        alone count. Without any header of the source, X lies below every commit.
        """
        with self._database.read() as connection:
            row = self._row(connection, source)
            had = read_fact(connection, _scope(row.stream), _log_had(source))
        reached = log.get(source, Lsn(0))
        in_log = Lsn(0) if had is None else log.get(SourceId(had[0]), Lsn(0))
        if had is None or in_log >= had[1]:
            return max(reached, Lsn(row.reached))
        return max(reached, in_log, _NOTHING)

    def move_reached(self, source: SourceId, lsn: Lsn, *, log_had: Lsn | None = None) -> Lsn:
        """Move the position upward, durably; a lower one changes nothing. Returns the position.

        Args:
            log_had: position of the source in the log's group headers: for a log with less than this, the position doesn't
                count. None: what was stored before goes on to hold.

        Call it before the slot is confirmed up to there.
        """
        with self._database.write() as connection:
            upward = (t.sources.c.id == source) & (t.sources.c.reached <= lsn)
            moved = connection.execute(update(t.sources).where(upward).values(reached=lsn)).rowcount > 0
            row = self._row(connection, source)
            if moved and log_had is not None:
                self._put(connection, _scope(row.stream), _log_had(source), [source, log_had])
        return Lsn(row.reached)

    def set_back_reached(self, source: SourceId, log: Mapping[SourceId, Lsn]) -> None:
        """Make `reached_in` of a log the position: the log has less than the position was stored for."""
        reached = self.reached_in(source, log)
        with self._database.write() as connection:
            scope = _scope(self._row(connection, source).stream)
            connection.execute(update(t.sources).where(t.sources.c.id == source).values(reached=reached))
            self._put(connection, scope, _log_had(source), self._log_had(connection, scope, source, log))

    def require_reached(self, stream: StreamId) -> None:
        """Let positions that were stored without what the log had count only for a log that has as much: it was cut.

        The position where a slot began is stored so.
        """
        with self._database.write() as connection:
            of_databases = (t.sources.c.stream == str(stream)) & (t.sources.c.system_identifier != str(OF_A_BUFFER))
            for row in connection.execute(select(t.sources).where(of_databases, t.sources.c.reached > 0)).all():
                if read_fact(connection, _scope(stream), _log_had(row.id)) is None:
                    self._put(connection, _scope(stream), _log_had(row.id), [row.id, row.reached])

    def _row(self, connection: Connection, source: SourceId) -> Row[Any]:
        row = connection.execute(select(t.sources).where(t.sources.c.id == source)).first()
        if row is None:
            raise CatalogError(f"the catalog has no source {source}", source=source)
        return row


def followed_fact(stream: StreamId) -> tuple[str, str]:
    """Return scope and name of the fact that names the followed source."""
    return _scope(stream), _CURRENT


def source_row(row: Row[Any]) -> SourceRow:
    """Return a row of `sources` as a value."""
    system, stream = int(row.system_identifier), StreamId(UUID(row.stream))
    return SourceRow(SourceId(row.id), stream, system, row.database, row.timeline, Lsn(row.reached))


def _facts(stream: StreamId, system_identifier: int, database: str, timeline: int) -> dict[str, Any]:
    return {
        "stream": str(stream),
        "system_identifier": str(system_identifier),
        "database": database,
        "timeline": timeline,
    }
