"""The catalog's streams and their homes, their writers with epochs, and the numbers reserved."""

from __future__ import annotations

import json
import os
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, Select, func, literal, select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, greater, lock_stream, now_us
from millstream.catalog.database import CatalogDatabase
from millstream.catalog.facts import write_fact
from millstream.catalog.row_types import HomeIdentity, StreamRow, WriterRow
from millstream.errors import CatalogError, StaleEpoch, UnknownStream
from millstream.model.ids import Epoch, StreamId, WriterId, check_stream_name
from millstream.model.positions import Seq


class Streams(CatalogPart):
    """Streams and writers."""

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

    # --- writers and numbers -----------------------------------------------------------------------------------

    def register_writer(
        self, stream: StreamId, name: str = "writer", *, above: Epoch = Epoch(0)
    ) -> tuple[WriterId, Epoch]:
        """Register the newest incarnation of a writer; the earlier one is fenced from now on.

        Args:
            above: an epoch in the log, if the catalog is older than the log.

        Returns:
            The writer's id (from 1; the same for a name for ever) and an epoch above all epochs of the stream so far.
        """
        with self._database.write() as connection:
            lock_stream(connection, stream)
            epoch = connection.execute(
                update(t.streams)
                .where(t.streams.c.id == str(stream))
                .values(epoch=greater(t.streams.c.epoch, above) + 1)
                .returning(t.streams.c.epoch)
            ).scalar_one()
            mine = (t.writers.c.stream == str(stream)) & (t.writers.c.name == name)
            writer = connection.execute(select(t.writers.c.id).where(mine)).scalar()
            values = {"epoch": epoch, "pid": os.getpid(), "registered_us": now_us()}
            if writer is None:
                last = select(func.coalesce(func.max(t.writers.c.id), 0)).where(t.writers.c.stream == str(stream))
                writer = connection.execute(last).scalar_one() + 1
                connection.execute(
                    self._database.insert(t.writers).values(stream=str(stream), id=writer, name=name, **values)
                )
            else:
                connection.execute(update(t.writers).where(mine).values(**values))
        return WriterId(writer), Epoch(epoch)

    def writers(self, stream: StreamId) -> list[WriterRow]:
        """Return the stream's writers, each in its newest incarnation, by id."""
        with self._database.read() as connection:
            query = select(t.writers).where(t.writers.c.stream == str(stream)).order_by(t.writers.c.id)
            rows = connection.execute(query).all()
        return [writer_row(row) for row in rows]

    def reservations(self, stream: StreamId) -> StreamReservations:
        """Return the stream's number reservations, as `ports.SeqReservations`."""
        return StreamReservations(self._database, stream)

    def reserved(self, stream: StreamId) -> Seq:
        """Return the greatest number ever reserved for a stream."""
        return self.reservations(stream).reserved()


def stream_row(row: Row[Any]) -> StreamRow:
    """Return a row of `streams` as a value."""
    return StreamRow(StreamId(UUID(row.id)), row.name, row.created_us)


def writer_row(row: Row[Any]) -> WriterRow:
    """Return a row of `writers` as a value."""
    stream = StreamId(UUID(row.stream))
    return WriterRow(stream, WriterId(row.id), row.name, Epoch(row.epoch), row.pid, row.registered_us)


class StreamReservations:
    """The embedded sequencer's durable bound for one stream: `ports.SeqReservations`."""

    def __init__(self, database: CatalogDatabase, stream: StreamId) -> None:
        self._database = database
        self._stream = stream

    def reserved(self) -> Seq:
        """Return the greatest number ever reserved; numbers up to it may have been given out."""
        with self._database.read() as connection:
            query = select(t.streams.c.reserved).where(t.streams.c.id == str(self._stream))
            return Seq(connection.execute(query).scalar() or 0)

    def reserve_to(self, seq: Seq, *, epoch: Epoch) -> None:
        """Durably reserve up to `seq`; a lower one changes nothing.

        Raises:
            StaleEpoch: no writer of the stream has `epoch` now.
        """
        with self._database.write() as connection:
            lock_stream(connection, self._stream)  # a newer writer registers before this or after it, never during it
            query = select(t.writers.c.epoch).where(t.writers.c.stream == str(self._stream))
            epochs = connection.execute(query).scalars().all()
            if epoch not in epochs:
                raise StaleEpoch(
                    f"epoch {epoch} is fenced: a newer writer registered (now {max(epochs, default=0)})", epoch=epoch
                )
            lower = (t.streams.c.id == str(self._stream)) & (t.streams.c.reserved < seq)
            connection.execute(update(t.streams).where(lower).values(reserved=seq))
