"""Which captured tables are copied and followed, which are in history only, and which are copied again or quarantined.

A table whose updates and deletes carry a usable replica identity is copied, then streamed. Without one, its rows can't
be kept current: only inserts and truncates are captured, and the reason is in the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Any, Final

import structlog

from millstream.capture.source_tables import SourceTable
from millstream.catalog import COPY_HELD, Catalog, TableRow, TableState
from millstream.model.human_text import human_bytes
from millstream.model.names import qualified_name

_NO_IDENTITY: Final = (
    "its replica identity gives updates and deletes no key; inserts and truncates alone are captured, into history"
)

logger = structlog.get_logger("millstream.capture")

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


def request_copy_again(
    catalog: Catalog, row: TableRow, facts: SourceTable | None, news: str, *, held_above: int | None
) -> None:
    """Request another copy of a copied table, whose rows changed with its definition.

    Args:
        facts: the table as last seen; None if no look has listed it.
        news: the change.
        held_above: the copy of a larger table, in bytes, is held: it waits until an operator asks for it.
    """
    held = held_above is not None and facts is not None and facts.size_bytes > held_above
    amount = "its rows" if facts is None else _amount(facts)
    table = qualified_name(row.namespace, row.name)
    if held:
        reason = f"{news}: {amount} wait for `millstream tables copy {quote(table)}`"
    else:
        reason = f"{news}: {amount} are copied again"
    copied = [TableState.STREAMING, TableState.COPYING]
    details = {"cause": COPY_HELD} if held else None
    if catalog.set_state(row.id, TableState.COPY_REQUESTED, reason, details=details, only_from=copied):
        if held:
            logger.warning("the copy of a table waits", code=COPY_HELD, table=table, reason=reason)
        else:
            logger.warning("table is copied again", table=table, reason=reason)


def quarantine(catalog: Catalog, row: TableRow, reason: str, *, details: Mapping[str, Any] | None = None) -> None:
    """Quarantine a table, and log that.

    Args:
        details: what the catalog keeps with the reason; a `cause` there says what ends the quarantine without an operator.
    """
    logger.warning("table quarantined", table=qualified_name(row.namespace, row.name), reason=reason)
    catalog.set_state(row.id, TableState.QUARANTINED, reason, details=details)


def _amount(table: SourceTable) -> str:
    """Return how much a copy of a table reads, by the source's estimate."""
    size = human_bytes(table.size_bytes)
    return f"its rows ({size})" if table.row_estimate <= 0 else f"its about {table.row_estimate:,} rows ({size})"
