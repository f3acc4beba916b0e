"""Whether the source was set back to an older state on its own timeline: a copy of its disk was put back.

Such a server is detected while its WAL ends below X, up to which the log has everything. Later its WAL is as long as
the log's, and its changes at or below X would pass for changes that the log has. So the catalog keeps where the WAL
ended, and the source is refused until the log begins again after `slot drop`. A change of timeline doesn't end the
refusal: a timeline that branches off the copy may begin above X.

The server that the log followed calls its timeline the same. Its slot tells it from the copy: the copy's slot can't be
above the end of the copy's WAL, and only a capture moves it.
"""

from __future__ import annotations

from typing import Final

from millstream.capture.connection import Connection
from millstream.capture.slot import SlotState
from millstream.capture.source_tables import SourceIdentity, as_record_end, insert_lsn
from millstream.catalog import Catalog
from millstream.errors import SourceError
from millstream.model.positions import Lsn, format_lsn

_FACT: Final = "set_back"
"""The end of the WAL of a source that was set back, the highest that was seen."""
_BACK: Final = "Point the DSN back to the server that the log followed. If this one is to be followed"
_AGAIN: Final = "run `millstream slot drop`; the next `millstream run` copies every table again."


def check_end(connection: Connection, identity: SourceIdentity, catalog: Catalog, scope: str, *, reached: Lsn) -> None:
    """Check that the server's WAL reaches at least as far as the log.

    Args:
        identity: the server; its timeline is the one that the log follows.
        catalog: keeps the end of a primary's WAL that fails the check.

    Raises:
        SourceError (`source_replaced`): a primary's WAL ends earlier.
        SourceError (`source_behind`): a standby hasn't replayed that far yet.
    """
    end = insert_lsn(connection)
    if end >= as_record_end(reached):
        return
    if identity.on_standby:
        raise SourceError(
            f"the standby has replayed only up to {format_lsn(end)}, but the log has everything up to {format_lsn(reached)}",
            code="source_behind",
        )
    catalog.put_fact(scope, _FACT, max(end, catalog.fact(scope, _FACT, default=0)))
    raise SourceError(
        f"the source's WAL ends at {format_lsn(end)}, but the log has everything up to {format_lsn(reached)}: the source was set back to an"
        " older state",
        code="source_replaced",
        hint=f"{_BACK}, it needs a timeline of its own: restart it once through recovery (the files recovery.signal and"
        f" restore_command = 'false'), then {_AGAIN}",
    )


def check_never_set_back(catalog: Catalog, scope: str, slot: SlotState) -> None:
    """Raise `source_replaced` if a source was set back, and the slot may be its slot."""
    end = Lsn(catalog.fact(scope, _FACT, default=0))
    if end and slot.confirmed <= end:
        raise SourceError(
            f"the source was set back to an older state: its WAL ended at {format_lsn(end)} when the log had more, and its slot is"
            f" only at {format_lsn(slot.confirmed)}",
            code="source_replaced",
            hint=f"{_BACK}, {_AGAIN}",
        )


def forget_set_back(catalog: Catalog, scope: str) -> None:
    """Delete the record of a source that was set back: the log begins again, with a new slot."""
    catalog.drop_fact(scope, _FACT)
