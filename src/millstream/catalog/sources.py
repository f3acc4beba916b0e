"""The catalog's sources: each one database's one history, and how far the log has it."""

from __future__ import annotations

from sqlalchemy import select, update

from millstream.catalog import tables as t
from millstream.catalog.part import CatalogPart, lock_stream
from millstream.catalog.values import SourceRow
from millstream.errors import CatalogError
from millstream.model.ids import SourceId, StreamId
from millstream.model.positions import Lsn


class Sources(CatalogPart):
    """Sources and the positions reached."""

    def resolve_source(self, stream: StreamId, system_identifier: int, database: str, timeline: int) -> SourceId:
        """The number of one database's one history, given when it is first met.

        A new timeline is a new number that starts at 0; whether it may be followed is the caller's to judge, who
        then moves it to where the old one stood.
        """
        facts = {
            "stream": str(stream),
            "system_identifier": str(system_identifier),
            "database": database,
            "timeline": timeline,
        }
        with self._database.write() as connection:
            lock_stream(connection, stream)
            same = [t.sources.c[name] == value for name, value in facts.items()]
            found = connection.execute(select(t.sources.c.id).where(*same)).scalar()
            if found is None:
                fresh = self._database.insert(t.sources).values(facts)
                found = connection.execute(fresh.returning(t.sources.c.id)).scalar_one()
            return SourceId(found)

    def sources(self, stream: StreamId) -> list[SourceRow]:
        """The stream's sources, oldest first."""
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
