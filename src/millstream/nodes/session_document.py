"""What a log's writer knows of applications' sessions, as a document that goes along with the log: `sessions.state`, as it was replaced last.

What it says also stands in the log's operations; it is for those that retention has dropped.
"""

from __future__ import annotations

from pathlib import Path

from millstream.model.replication import Document
from millstream.protocol.replication.roles import SESSIONS
from millstream.wal.layout import SESSIONS_NAME


class SessionDocument:
    """A stream's. Not for sharing between threads."""

    def __init__(self, wal_folder: Path) -> None:
        self._file = wal_folder / SESSIONS_NAME
        self._newest: Document | None = None

    def newest(self) -> Document | None:
        """What it is now; None where there is none."""
        try:
            version = self._file.stat().st_mtime_ns
            if self._newest is None or self._newest.version != version:
                # Replaced meanwhile it is newer than the version says, and comes again.
                self._newest = Document(SESSIONS, version, self._file.read_bytes())
        except FileNotFoundError:
            return self._newest
        return self._newest
