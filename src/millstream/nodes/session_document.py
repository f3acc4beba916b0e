"""The writer's facts about applications' sessions, as a document shipped with the log: the current `sessions.state`.

The log's operations contain the same facts; the document covers those that retention has dropped.
"""

from __future__ import annotations

from pathlib import Path

from millstream.model.replication import Document
from millstream.protocol.replication.promises_and_fencing import SESSIONS
from millstream.wal.layout import SESSIONS_NAME


class SessionDocument:
    """A stream's session document. Not for sharing between threads."""

    def __init__(self, wal_folder: Path) -> None:
        self._file = wal_folder / SESSIONS_NAME
        self._newest: Document | None = None

    def newest(self) -> Document | None:
        """Return the current document; None if there is none."""
        try:
            version = self._file.stat().st_mtime_ns
            if self._newest is None or self._newest.version != version:
                # If it was replaced in between, it is newer than the version claims, and comes again.
                self._newest = Document(SESSIONS, version, self._file.read_bytes())
        except FileNotFoundError:
            return self._newest
        return self._newest
