"""The catalog's streams and their homes."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, Select, literal, select

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, now_us
from millstream.catalog.facts import write_fact
from millstream.catalog.row_types import HomeIdentity, StreamRow
from millstream.errors import CatalogError, UnknownStream
from millstream.model.ids import StreamId, check_stream_name


class Streams(CatalogPart):
    """Streams, by name and by home."""

    _home: HomeIdentity | None

    def resolve_stream(self, name: str, *, found: StreamId | None = None) -> StreamId:
        """Return the id of the stream of that name, which is created if it is new.

        Args:
            found: the id in the stream's segments, if its folder has any. A new row takes it over (the catalog was
                lost). If an existing row has another id, that is an error, because its numbers belong to another log.

        Raises:
            CatalogError: the log on disk is another stream's, or the name another home's stream's.
            UsageError: no stream may have that name.
        """
        check_stream_name(name)
        of_name = select(t.streams.c.id).where(t.streams.c.name == name).with_for_update(key_share=True)
        with self._database.write() as connection:
            known = connection.execute(of_name).scalar()
            if known is None:
                values = {"id": str(found or uuid4()), "name": name, "created_us": now_us()}
                # Another process may be doing the same: then this waits for it, and takes its id.
                connection.execute(self._database.insert(t.streams).values(values).on_conflict_do_nothing())
                known = connection.execute(of_name).scalar()
            if known is None:
                other = connection.execute(select(t.streams.c.name).where(t.streams.c.id == str(found))).scalar()
                raise CatalogError(
                    f"the log of stream {name} has the id {found}, which in the catalog is stream {other}",
                    hint="Move the folder back, or use its old name in the configuration.",
                    stream=name,
                )
            stream = StreamId(UUID(known))
            self.claim(connection, name, stream, found=found)
        return stream

    def claim(self, connection: Connection, name: str, stream: StreamId, *, found: StreamId | None = None) -> None:
        """Record in an open transaction that this home has a stream; do nothing without a home.

        Raises:
            CatalogError: the stream is another home's, or the log at hand (`found`) another stream's.
        """
        scope = f"homes/{stream}"
        rows = connection.execute(select(t.facts.c.name, t.facts.c.value).where(t.facts.c.scope == scope)).all()
        homes = {row.name: json.loads(row.value)["place"] for row in rows}
        mine = self._home
        others = ", ".join(sorted(place for home, place in homes.items() if mine is None or home != mine.id))
        if found is not None and found != stream:
            raise CatalogError(
                f"the log of stream {name} has the id {found}, and in the catalog {stream}"
                + (f", which is the stream {name} of {others}" if others else ""),
                hint="The folder or the catalog was exchanged: put back the one that belongs here."
                if not others
                else "Rename this stream, or give its home another database: two streams of one catalog can't share a name.",
                stream=name,
            )
        if mine is None:
            return
        assert mine.id, "who writes has prepared its home"
        # A log with the stream's id is the stream's, whichever home it lies in now.
        if homes and mine.id not in homes and found is None:
            raise CatalogError(
                f"the catalog has a stream {name} already, {stream}, of {others}; this home, {mine.place}, has no log of it",
                hint="Rename this stream in millstream.toml, or give this home another database: two streams of one catalog "
                "can't share a name. If it is the home that lost its data, restore the log.",
                stream=name,
            )
        if homes.get(mine.id) != mine.place:
            fact = {"place": mine.place, "since_us": now_us()}
            write_fact(self._database, connection, scope, mine.id, fact)

    def stream(self, name: str) -> StreamRow:
        """Return the stream of that name; raise `UnknownStream` if it has never run."""
        for row in self.streams():
            if row.name == name:
                return row
        raise UnknownStream(
            f"the catalog has no stream {name}", hint="`millstream run` makes it, when it first runs.", stream=name
        )

    def streams(self) -> list[StreamRow]:
        """Return all streams, by name; only the home's, if the catalog was opened for one."""
        with self._database.read() as connection:
            rows = connection.execute(self._own_streams()).all()
        # Sorted here: the order of text in a database is the database's choice.
        return sorted((stream_row(row) for row in rows), key=lambda stream: stream.name)

    def _own_streams(self) -> Select[Any]:
        """Return a query for the streams; only the home's, if the catalog was opened for one."""
        query = select(t.streams)
        if self._home is None:
            return query
        here = (t.facts.c.scope == literal("homes/").concat(t.streams.c.id)) & (t.facts.c.name == self._home.id)
        return query.join(t.facts, here)


def stream_row(row: Row[Any]) -> StreamRow:
    """Return a row of `streams` as a value."""
    return StreamRow(StreamId(UUID(row.id)), row.name, row.created_us)
