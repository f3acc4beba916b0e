"""Which captured tables are copied and followed, and which are captured into history only: their identity decides.

A table whose updates and deletes carry a usable replica identity is copied, then streamed. Without one, its rows can't
be kept current: only inserts and truncates are captured, and the reason is in the catalog.
"""

from __future__ import annotations

from typing import Final

from millstream.catalog import TableRow, TableState

_NO_IDENTITY: Final = (
    "its replica identity gives updates and deletes no key; inserts and truncates alone are captured, into history"
)

_FOLLOWED: Final = frozenset({TableState.STREAMING, TableState.COPYING, TableState.COPY_REQUESTED})


def copy_or_history_only(*, usable: bool, reason: str = "") -> tuple[TableState, str]:
    """Return the state of a table whose capture begins, and the reason to record."""
    return (TableState.COPY_REQUESTED, reason) if usable else (TableState.HISTORY_ONLY, _NO_IDENTITY)


def after_identity_change(row: TableRow, *, usable: bool) -> tuple[TableState, str] | None:
    """Return the new state of a captured table, with its reason, if its identity came or went; None otherwise.

    A quarantined table stays so, and so does one that is in history only for another cause.
    """
    came = usable and row.state is TableState.HISTORY_ONLY and not row.details.get("cause")
    went = not usable and row.state in _FOLLOWED
    if came or went:
        return copy_or_history_only(usable=usable, reason="it has got a usable replica identity")
    return None
