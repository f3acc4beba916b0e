"""Writers of streams with their epochs, which fence earlier incarnations, and the numbers that a single writer reserves.

Several writers of a stream draw from `shared_sequence`, whose rules are `protocol.sequencer.ledger`.
"""

from __future__ import annotations

import os
from typing import Any
from uuid import UUID

from sqlalchemy import Row, func, select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, greater, lock_stream, now_us
from millstream.catalog.database import CatalogDatabase
from millstream.catalog.row_types import WriterRow
from millstream.errors import StaleEpoch
from millstream.model.ids import Epoch, StreamId, WriterId
from millstream.model.positions import Seq


class WriterEpochs(CatalogPart):
    """Writers and their epochs."""

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
