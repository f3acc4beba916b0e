"""The catalog's sources: each is one history of one database, with the position that the log has reached."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, lock_stream
from millstream.catalog.row_types import SourceRow
from millstream.errors import CatalogError
from millstream.model.ids import SourceId, StreamId
from millstream.model.positions import Lsn

OF_A_BUFFER: Final = 0
"""System identifier of a source that is no database: a shard of a write buffer, from which a stream takes
operations."""
_CURRENT: Final = "source"
"""The fact that names the followed source."""


def _scope(stream: StreamId) -> str:
    return f"capture/{stream}"


class Sources(CatalogPart):
    """Sources and the positions reached."""

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
    ) -> SourceId:
        """Follow this history from here on: return its number, which becomes `current_source`.

        Args:
            stream: the stream.
            system_identifier: the system of the WAL.
            database: the database.
            timeline: the timeline.
            reached: LSN up to which the log has everything already; a source with a higher position keeps that.
            history: the earlier timelines, oldest first, each with the LSN at which it was left; None if that isn't
                known.

        Everything is in one transaction: a number that started at 0 would pass for a source of which nothing was
        captured.
        """
        facts = _facts(stream, system_identifier, database, timeline)
        with self._database.write() as connection:
            lock_stream(connection, stream)
            source = self._resolve(connection, facts)
            higher = (t.sources.c.id == source) & (t.sources.c.reached < reached)
            connection.execute(update(t.sources).where(higher).values(reached=reached))
            value = json.dumps({"id": source, "history": None if history is None else [list(part) for part in history]})
            put = self._database.insert(t.facts).values(scope=_scope(stream), name=_CURRENT, value=value)
            keys = [t.facts.c.scope, t.facts.c.name]
            connection.execute(put.on_conflict_do_update(index_elements=keys, set_={"value": put.excluded["value"]}))
        return source

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
        followed = self._followed(stream).get("id")
        return next((row for row in known if row.id == followed), known[-1] if known else None)

    def source_history(self, stream: StreamId) -> tuple[tuple[int, Lsn], ...] | None:
        """Return the timelines before `current_source`'s, oldest first, each with the LSN at which it was left.

        None: unknown.
        """
        history = self._followed(stream).get("history")
        return None if history is None else tuple((int(timeline), Lsn(lsn)) for timeline, lsn in history)

    def _followed(self, stream: StreamId) -> dict[str, Any]:
        query = select(t.facts.c.value).where(t.facts.c.scope == _scope(stream), t.facts.c.name == _CURRENT)
        with self._database.read() as connection:
            found = connection.execute(query).scalar()
        return {} if found is None else dict(json.loads(found))

    def sources(self, stream: StreamId) -> list[SourceRow]:
        """Return the stream's sources that are databases, oldest first."""
        return [row for row in self.all_sources(stream) if row.system_identifier != OF_A_BUFFER]

    def all_sources(self, stream: StreamId) -> list[SourceRow]:
        """Return all sources of the log's numbers, oldest first: databases, and buffers' shards (`OF_A_BUFFER`)."""
        with self._database.read() as connection:
            query = select(t.sources).where(t.sources.c.stream == str(stream)).order_by(t.sources.c.id)
            rows = connection.execute(query).all()
        return [
            SourceRow(SourceId(r.id), stream, int(r.system_identifier), r.database, r.timeline, Lsn(r.reached))
            for r in rows
        ]

    def reached(self, source: SourceId) -> Lsn:
        """Return the position that capture of the source last stored; the log's own group headers may be ahead."""
        with self._database.read() as connection:
            found = connection.execute(select(t.sources.c.reached).where(t.sources.c.id == source)).scalar()
        if found is None:
            raise CatalogError(f"the catalog has no source {source}", source=source)
        return Lsn(found)

    def move_reached(self, source: SourceId, lsn: Lsn) -> Lsn:
        """Move the position upward, durably; a lower one changes nothing. Returns the position.

        Call it before the slot is confirmed up to there.
        """
        with self._database.write() as connection:
            higher = (t.sources.c.id == source) & (t.sources.c.reached < lsn)
            connection.execute(update(t.sources).where(higher).values(reached=lsn))
            found = connection.execute(select(t.sources.c.reached).where(t.sources.c.id == source)).scalar()
        if found is None:
            raise CatalogError(f"the catalog has no source {source}", source=source)
        return Lsn(found)

    def forget_reached(self, stream: StreamId) -> None:
        """Forget the stored positions of a stream whose log was cut back: from now on its group headers alone count."""
        of_databases = (t.sources.c.stream == str(stream)) & (t.sources.c.system_identifier != OF_A_BUFFER)
        with self._database.write() as connection:
            connection.execute(update(t.sources).where(of_databases).values(reached=0))


def _facts(stream: StreamId, system_identifier: int, database: str, timeline: int) -> dict[str, Any]:
    return {
        "stream": str(stream),
        "system_identifier": str(system_identifier),
        "database": database,
        "timeline": timeline,
    }
