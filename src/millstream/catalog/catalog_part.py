"""The common base of the catalog's parts: the database, the time, and the lock that serialises a stream's calls."""

from __future__ import annotations

import time

from sqlalchemy import ColumnElement, Connection, case, select

import millstream.catalog.sql_tables as t
from millstream.catalog.database import CatalogDatabase
from millstream.errors import UnknownStream
from millstream.model.ids import StreamId


class CatalogPart:
    """One subject of the catalog's calls. `Catalog` combines all of them."""

    _database: CatalogDatabase


def now_us() -> int:
    """Return microseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1000


def lock_stream(connection: Connection, stream: StreamId) -> None:
    """Lock the stream against other calls that do so, until the transaction ends.

    SQLite's writers are serial anyway. On PostgreSQL the lock makes a call correct that reads and then writes
    accordingly. All of these calls take this lock first, so they don't deadlock. Rows that only refer to the stream
    can be written concurrently.

    Raises:
        UnknownStream: the catalog has no such stream.
    """
    mine = select(t.streams.c.id).where(t.streams.c.id == str(stream)).with_for_update(key_share=True)
    if connection.execute(mine).first() is None:
        raise UnknownStream(f"the catalog has no stream {stream}", stream=str(stream))


def greater(one: ColumnElement[int], other: ColumnElement[int] | int) -> ColumnElement[int]:
    """Return the greater of two: `max(a, b)` on SQLite, `greatest(a, b)` on PostgreSQL."""
    return case((one >= other, one), else_=other)
