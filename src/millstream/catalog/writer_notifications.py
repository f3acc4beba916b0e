"""Announcements between a stream's writers through PostgreSQL's LISTEN and NOTIFY: `ports.Announcements`.

Nothing depends on them: a process that receives none asks the store a little later. So nothing here raises. A
connection that broke, or that a pooler shares among others, is silent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import sql

from millstream.catalog.database import CatalogDatabase
from millstream.libpq import fetch_row
from millstream.model.ids import StreamId
from millstream.protocol.sequencer import Announcement


class PostgresAnnouncements:
    """The announcements of one stream.

    Args:
        again_s: how long a server that couldn't be reached is left alone.

    Concurrency: one thread.
    """

    def __init__(self, database: CatalogDatabase, stream: StreamId, *, again_s: float = 5.0) -> None:
        assert database.address is not None
        self._address: Final = database.address
        self._channel: Final = f"millstream_{stream.hex}"
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._again_s: Final = again_s
        self._not_before_s = 0.0

    def tell(self, told: Announcement) -> None:
        """Implement the port."""
        line = self._line()
        if line is not None:
            with self._silent():
                fetch_row(line, "SELECT pg_notify({}, {})", self._channel, str(told))

    def hear(self, timeout_s: float) -> list[Announcement]:
        """Implement the port."""
        line, heard = self._line(), list[psycopg.Notify]()
        end = time.monotonic() + timeout_s
        if line is not None:
            with self._silent():
                heard.extend(line.notifies(timeout=timeout_s, stop_after=1))
        if self._connection is None:
            time.sleep(max(0.0, end - time.monotonic()))
            return []
        own = self._connection.info.backend_pid
        said = (Announcement.parse(found.payload) for found in heard if found.pid != own)
        return [told for told in said if told is not None]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _line(self) -> psycopg.Connection[tuple[Any, ...]] | None:
        if self._connection is None and time.monotonic() >= self._not_before_s:
            with self._silent():
                # A statement prepared on one server connection is missing on the next, behind a pooler.
                self._connection = psycopg.connect(self._address, autocommit=True, prepare_threshold=None)
                self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        return self._connection

    @contextmanager
    def _silent(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error:
            self.close()
            self._not_before_s = time.monotonic() + self._again_s
