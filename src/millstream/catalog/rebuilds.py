"""Requests to build lake tables anew: a person asks, whoever holds the pipeline's role does it and says how it went.

Kept as facts, so that a request outlives the processes of both: a pipeline that was killed in the middle begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from millstream.catalog.store import Catalog
from millstream.model.ids import StreamId, TableId

_ASKED: Final = "asked"


@dataclass(frozen=True, slots=True)
class RebuildRequest:
    """What waits to be done for one table."""

    table_id: TableId
    views: tuple[str, ...]
    """Views that wait."""
    before_copy: bool
    """Whether these views are only put out of the way of a copy from the source, which builds them; else: built from history."""


class Rebuilds:
    """One pipeline's requests. Any thread, any process."""

    def __init__(self, catalog: Catalog, stream: StreamId, pipeline: str) -> None:
        self._catalog = catalog
        self._scope = f"rebuild/{stream}/{pipeline}"

    def ask(self, table_id: TableId, views: Sequence[str], *, before_copy: bool = False) -> None:
        """Ask for some views of a table; replaces what was asked for it before."""
        value = {"views": {view: {"state": _ASKED} for view in views}, "before_copy": before_copy}
        self._catalog.put_fact(self._scope, str(table_id), value)

    def waiting(self) -> list[RebuildRequest]:
        """What waits to be done, by table."""
        found = []
        for table_id, fact in self._catalog.facts(self._scope).items():
            views = tuple(view for view, told in fact["views"].items() if told["state"] == _ASKED)
            if views:
                found.append(RebuildRequest(TableId(int(table_id)), views, bool(fact["before_copy"])))
        return found

    def settle(self, table_id: TableId, view: str, told: dict[str, Any]) -> None:
        """Say how it went: `state` is `done` or `failed`. One process settles at a time: the one that holds the role."""
        fact = self._catalog.fact(self._scope, str(table_id))
        if fact is not None and view in fact["views"]:
            fact["views"][view] = told
            self._catalog.put_fact(self._scope, str(table_id), fact)

    def outcome(self, table_id: TableId) -> dict[str, dict[str, Any]] | None:
        """By view how it went, once nothing of the table waits any more; None before, and where nothing was asked for."""
        fact = self._catalog.fact(self._scope, str(table_id))
        if fact is None or any(told["state"] == _ASKED for told in fact["views"].values()):
            return None
        return dict(fact["views"])

    def forget(self, table_id: TableId) -> None:
        """The outcome has been told."""
        self._catalog.drop_fact(self._scope, str(table_id))
