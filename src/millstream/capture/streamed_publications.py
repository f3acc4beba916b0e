"""Which publications a session streams: those that existed for every change that it may decode.

PostgreSQL 14 to 17 look a publication up in the catalogs as they were at each change, and end the stream if it didn't
exist. `<publication>_inserts` may be created while capture is stopped, or while a transaction is open that has changed
something before. So a publication joins the stream only at an LSN above the end of every transaction that ran when it
was first seen. The catalog keeps that LSN; until the log has reached it, the tables that it alone sends aren't captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millstream.capture.connection import RECOPY_HINT, Connection
from millstream.capture.source_tables import current_snapshot, insert_lsn, on_standby, running_bound
from millstream.catalog import Catalog
from millstream.errors import SourceError
from millstream.model.positions import Lsn

_FACT: Final = "publications"
"""By name, the LSN from which on a publication may be streamed."""
_UNDEFINED: Final = "42704"


@contextmanager
def publications_known() -> Iterator[None]:
    """Raise `publication_replaced` if the block's stream meets a change at which a publication didn't exist.

    They exist now, because a session looks for them before it streams.
    """
    try:
        yield
    except SourceError as error:
        if error.details.get("sqlstate") != _UNDEFINED:
            raise
        raise SourceError(
            f"the stream can't pass the changes from before a publication was created again, or renamed: {error.message}",
            code="publication_replaced",
            hint=RECOPY_HINT,
        ) from error


class StreamedPublications:
    """The publications of one session.

    Args:
        catalog: keeps the LSNs.
        reached: X, where the session begins; None if it creates its slot, so that every present publication may be streamed.
    """

    def __init__(self, catalog: Catalog, scope: str, reached: Lsn | None) -> None:
        self._catalog = catalog
        self._scope = scope
        self._reached = reached
        self._names: tuple[str, ...] | None = None
        self._late: set[str] = set()
        self._bound = 0
        self.renew_at: Lsn | None = None
        """LSN from which a new session has to stream, with a publication that this one doesn't."""

    def choose(self, existing: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of the existing publications that the session streams; its first call decides."""
        if self._names is None:
            known = {} if self._reached is None else self._catalog.fact(self._scope, _FACT, default={})
            reached = self._reached or Lsn(0)
            self._names = tuple(name for name in existing if name in known and known[name] <= reached)
            if not self._names:  # capture begins, or the configuration names another publication
                self._names = existing
                self._catalog.put_fact(self._scope, _FACT, dict.fromkeys(existing, reached))
        return tuple(name for name in existing if name in self._names)

    def look(self, connection: Connection, existing: tuple[str, ...]) -> None:
        """Set `renew_at` once no transaction runs that may have changed something before a publication existed."""
        late = set(existing) - set(self._names or existing)
        if not late or self.renew_at is not None:
            return
        if late != self._late:
            self._late, self._bound = late, running_bound(connection)
        if current_snapshot(connection).xmin < self._bound:
            return
        # A standby has replayed a transaction's end before it reports the LSN of that.
        self.renew_at = Lsn(insert_lsn(connection) + int(on_standby(connection)))
        known = self._catalog.fact(self._scope, _FACT, default={})
        self._catalog.put_fact(self._scope, _FACT, known | dict.fromkeys(late, self.renew_at))
