"""Reservations of numbers: how far the embedded sequencer may have given them out, kept in the catalog."""

from __future__ import annotations

from sqlalchemy import select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import lock_stream
from millstream.catalog.database import CatalogDatabase
from millstream.errors import StaleEpoch
from millstream.model.ids import Epoch, StreamId
from millstream.model.positions import Seq


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
