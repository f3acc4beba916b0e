"""The catalog's sources: each one database's one history, and how far the log has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, select, update

from millstream.catalog import tables as t
from millstream.catalog.part import CatalogPart, lock_stream
from millstream.catalog.values import SourceRow
from millstream.errors import CatalogError
from millstream.model.ids import SourceId, StreamId
from millstream.model.positions import Lsn

OF_A_BUFFER: Final = 0
"""The system identifier of what is no database: a shard of a write buffer, from which a stream takes operations."""
_CURRENT: Final = "source"
"""The fact that says which source is followed."""


def _scope(stream: StreamId) -> str:
    return f"capture/{stream}"


class Sources(CatalogPart):
    """Sources and the positions reached."""

    def resolve_source(self, stream: StreamId, system_identifier: int, database: str, timeline: int) -> SourceId:
        """The number of one database's one history, given when it is first met: a new timeline is a new number that starts at 0."""
        facts = {
            "stream": str(stream),
            "system_identifier": str(system_identifier),
            "database": database,
            "timeline": timeline,
        }
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
        """From here on the stream follows this history: its number, that becomes `current_source`.

        Args:
            stream: the stream.
            system_identifier: whose WAL it is.
            database: of which database.
            timeline: on which timeline.
            reached: up to here the log has all of it already; a source that stands higher stays there.
            history: the timelines before it, oldest first, each with where it was left; None where that isn't known.

        All of it is in one transaction: a number that started at 0 would pass for a source of which nothing was captured.
        """
        facts = {
            "stream": str(stream),
            "system_identifier": str(system_identifier),
            "database": database,
            "timeline": timeline,
        }
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
        """The source that the stream follows; None where it has none yet."""
        known = self.sources(stream)
        followed = self._followed(stream).get("id")
        return next((row for row in known if row.id == followed), known[-1] if known else None)

    def source_history(self, stream: StreamId) -> tuple[tuple[int, Lsn], ...] | None:
        """The timelines before that of `current_source`, oldest first, each with where it was left; None: not known."""
        history = self._followed(stream).get("history")
        return None if history is None else tuple((int(timeline), Lsn(lsn)) for timeline, lsn in history)

    def _followed(self, stream: StreamId) -> dict[str, Any]:
        query = select(t.facts.c.value).where(t.facts.c.scope == _scope(stream), t.facts.c.name == _CURRENT)
        with self._database.read() as connection:
            found = connection.execute(query).scalar()
        return {} if found is None else dict(json.loads(found))

    def sources(self, stream: StreamId) -> list[SourceRow]:
        """The stream's sources that are databases, oldest first."""
        return [row for row in self.all_sources(stream) if row.system_identifier != OF_A_BUFFER]

    def all_sources(self, stream: StreamId) -> list[SourceRow]:
        """Whatever the stream's log may have numbers of, oldest first: databases, and shards of write buffers (`OF_A_BUFFER`)."""
        with self._database.read() as connection:
            query = select(t.sources).where(t.sources.c.stream == str(stream)).order_by(t.sources.c.id)
            rows = connection.execute(query).all()
        return [
            SourceRow(SourceId(r.id), stream, int(r.system_identifier), r.database, r.timeline, Lsn(r.reached))
            for r in rows
        ]

    def reached(self, source: SourceId) -> Lsn:
        """Where capture of the source has got to, as last told; the log's own group headers may know more."""
        with self._database.read() as connection:
            found = connection.execute(select(t.sources.c.reached).where(t.sources.c.id == source)).scalar()
        if found is None:
            raise CatalogError(f"the catalog has no source {source}", source=source)
        return Lsn(found)

    def move_reached(self, source: SourceId, lsn: Lsn) -> Lsn:
        """Move the position upward, durably; a lower one changes nothing. Returns where it stands.

        Call it before the slot is confirmed up to there.
        """
        with self._database.write() as connection:
            higher = (t.sources.c.id == source) & (t.sources.c.reached < lsn)
            connection.execute(update(t.sources).where(higher).values(reached=lsn))
            found = connection.execute(select(t.sources.c.reached).where(t.sources.c.id == source)).scalar()
        if found is None:
            raise CatalogError(f"the catalog has no source {source}", source=source)
        return Lsn(found)
