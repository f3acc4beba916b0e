"""What the parts of the catalog share: the database, the time, and the lock that makes a stream's calls take turns."""

from __future__ import annotations

import time

from sqlalchemy import ColumnElement, Connection, case, select

from millstream.catalog import tables as t
from millstream.catalog.database import Database
from millstream.errors import UnknownStream
from millstream.model.ids import StreamId


class CatalogPart:
    """One subject of the catalog's calls. `Catalog` is all of them together."""

    _database: Database


def now_us() -> int:
    """Microseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1000


def lock_stream(connection: Connection, stream: StreamId) -> None:
    """Let no other call that locks this stream come between, until the transaction ends.

    SQLite's writers take turns anyway. On PostgreSQL it is what makes a call that reads and then writes by what it has read right:
    all of them come here first, so that they meet in one order. Rows that only refer to the stream can be written beside it.

    Raises:
        UnknownStream: the catalog has no such stream.
    """
    mine = select(t.streams.c.id).where(t.streams.c.id == str(stream)).with_for_update(key_share=True)
    if connection.execute(mine).first() is None:
        raise UnknownStream(f"the catalog has no stream {stream}", stream=str(stream))


def greater(one: ColumnElement[int], other: ColumnElement[int] | int) -> ColumnElement[int]:
    """The greater of two: `max(a, b)` on SQLite, `greatest(a, b)` on PostgreSQL."""
    return case((one >= other, one), else_=other)
