"""Requests to rebuild or to fold lake tables: an operator requests, and the process that holds the pipeline's role carries it out.

Requests and outcomes are facts, so they outlive both processes: a pipeline that was killed during a rebuild begins it
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from millstream.catalog.store import Catalog
from millstream.model.ids import StreamId, TableId

_ASKED: Final = "asked"


@dataclass(frozen=True, slots=True)
class RebuildRequest:
    """The pending request of one table."""

    table_id: TableId
    views: tuple[str, ...]
    """Views that wait."""
    before_copy: bool
    """Whether the views are only moved aside for a copy from the source, which builds them; else they are built from
    history."""
    erases: bool
    """Whether they are deleted before that copy, intact or not, instead of being moved aside."""


class Rebuilds:
    """The requests of one kind to one pipeline. Safe from any thread and process.

    Args:
        kind: `rebuild`: build views again; `fold`: bring them to the last cut.
    """

    def __init__(
        self, catalog: Catalog, stream: StreamId, pipeline: str, kind: Literal["rebuild", "fold"] = "rebuild"
    ) -> None:
        self._catalog = catalog
        self._scope = f"{kind}/{stream}/{pipeline}"

    def ask(self, table_id: TableId, views: Sequence[str], *, before_copy: bool = False, erases: bool = False) -> None:
        """Request it for some views of a table; replaces its earlier request."""
        asked = {view: {"state": _ASKED} for view in views}
        value = {"views": asked, "before_copy": before_copy, "erases": erases}
        self._catalog.put_fact(self._scope, str(table_id), value)

    def waiting(self) -> list[RebuildRequest]:
        """Return the pending requests, by table."""
        found = []
        for table_id, fact in self._catalog.facts(self._scope).items():
            views = tuple(view for view, told in fact["views"].items() if told["state"] == _ASKED)
            if views:
                erases = bool(fact.get("erases"))
                found.append(RebuildRequest(TableId(int(table_id)), views, bool(fact["before_copy"]), erases))
        return found

    def settle(self, table_id: TableId, view: str, told: dict[str, Any]) -> None:
        """Record the outcome: `state` is `done` or `failed`.

        One process settles at a time: the one that holds the role.
        """
        fact = self._catalog.fact(self._scope, str(table_id))
        if fact is not None and view in fact["views"]:
            fact["views"][view] = told
            self._catalog.put_fact(self._scope, str(table_id), fact)

    def outcome(self, table_id: TableId) -> dict[str, dict[str, Any]] | None:
        """Return the outcome by view, once no view of the table waits; None before. Empty: there is no request."""
        fact = self._catalog.fact(self._scope, str(table_id))
        views = {} if fact is None else dict(fact["views"])
        return None if any(told["state"] == _ASKED for told in views.values()) else views

    def forget(self, table_id: TableId) -> None:
        """Delete the request, after its outcome has been reported."""
        self._catalog.drop_fact(self._scope, str(table_id))
