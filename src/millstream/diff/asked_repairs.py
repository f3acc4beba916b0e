"""`diff --repair`: has capture read the differing keys again, through the log, and reports the result.

Nothing here writes into the log or the lake: requests are in the catalog, and the home's owner carries
them out, now or in its next run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from millstream.app.table_requests import copy_table
from millstream.capture.copying.repair_request import CHUNK_KEYS, SCANNED_KEYS, ask_repair, open_chunks
from millstream.catalog import TableState
from millstream.diff.compare import Compared, DiffReport, TableDiff
from millstream.errors import LakeBehind, MillstreamError
from millstream.home.home import Home
from millstream.model.names import parse_qualified_name
from millstream.processes.role_locks import runs

if TYPE_CHECKING:
    from millstream.catalog import Catalog

_POLL_S: Final = 0.2


@dataclass(slots=True)
class RepairAsked:
    """The request for one table."""

    table: str
    how: str
    """`keys`: that many keys' rows are read again; `copy`: the whole table is; `refused`: neither is possible."""
    keys: int = 0
    request: str = ""
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the request, JSON-able."""
        return {"table": self.table, "how": self.how, "keys": self.keys, "reason": self.reason}


@dataclass(slots=True)
class Repair:
    """The requests after a `diff`."""

    tables: list[RepairAsked] = field(default_factory=list)
    capture_runs: bool = False
    """Whether a running capture carries them out now."""


def ask_repairs(home: Home, report: DiffReport) -> Repair:
    """Request that everything a `diff` found different is read again.

    A table without a key, or with more differing keys than were listed, is copied whole.
    """
    asked = Repair(capture_runs=runs(home.run_folder, "owner"))
    with home.open_catalog() as catalog:
        for table in report.tables:
            if table.state is Compared.DIFFERENT:
                asked.tables.append(_ask_one(catalog, report, table))
    return asked


def _ask_one(catalog: Catalog, report: DiffReport, table: TableDiff) -> RepairAsked:
    try:
        if not table.key or table.different > len(table.differences):
            copy_table(catalog, report.stream_id, table.name)
            why = "it has no key" if not table.key else "more keys differ than --limit lists"
            return RepairAsked(table.name, "copy", reason=why)
        row = catalog.find_table(report.stream_id, *parse_qualified_name(table.name))
        keys = [tuple(text or "" for text in difference.key.values()) for difference in table.differences]
        keys_each = SCANNED_KEYS if table.key_is_hashed else CHUNK_KEYS
        request = ask_repair(catalog, report.stream_id, row.id, table.key, keys, keys_each=keys_each)
    except MillstreamError as error:
        return RepairAsked(table.name, "refused", reason=error.message)
    return RepairAsked(table.name, "keys", len(keys), request)


def wait_for_repairs(
    home: Home, report: DiffReport, repair: Repair, *, timeout_s: float, on_wait: Callable[[str], None]
) -> None:
    """Return once everything requested is durable in the log.

    Raises:
        LakeBehind: capture doesn't run, reports that it can't be done, or takes too long.
    """
    deadline = time.monotonic() + timeout_s
    requests = [asked.request for asked in repair.tables if asked.request]
    copies = [asked.table for asked in repair.tables if asked.how == "copy"]
    with home.open_catalog() as catalog:
        while True:
            left = list(open_chunks(catalog, report.stream_id, requests))
            failed = next((chunk.failed for chunk in left if chunk.failed), None)
            if failed is not None:
                raise LakeBehind(
                    f"the rows can't be read again: {failed}", hint="`millstream tables copy` copies a table whole."
                )
            copying = [table for table in copies if _is_copying(catalog, report, table)]
            if not left and not copying:
                return
            if not runs(home.run_folder, "owner"):
                raise LakeBehind("the repair waits: no capture runs", hint="Start `millstream run`; it does it then.")
            if time.monotonic() > deadline:
                raise LakeBehind(
                    "the repair isn't done yet; time has run out",
                    hint="Run `millstream diff` later; the repair continues.",
                )
            on_wait(_words(sum(len(chunk.keys) for chunk in left), copying))
            time.sleep(_POLL_S)


def _is_copying(catalog: Catalog, report: DiffReport, table: str) -> bool:
    row = catalog.find_table(report.stream_id, *parse_qualified_name(table))
    return row.state in {TableState.COPY_REQUESTED, TableState.COPYING}


def _words(keys: int, copying: Sequence[str]) -> str:
    parts = [f"{keys:,} keys to be read again"] * bool(keys) + [f"{table} is being copied" for table in copying]
    return "waiting for the repair: " + ", ".join(parts)
