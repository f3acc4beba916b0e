"""A pipeline's tables, as facts of the catalog: those quarantined, those that it fails to fold, and their last figures.

Nothing lands of a table that is quarantined, and a retry may be requested. A table whose fold fails lands in history, and
the pipeline repeats the fold on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

from millstream.catalog.catalog_part import now_us
from millstream.catalog.store import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq


@dataclass(frozen=True, slots=True)
class QuarantinedTable:
    """A table whose history can't be written for now. Its records wait in the log, from `after` on."""

    table_id: TableId
    name: str
    after: Seq
    """Its history has everything up to here."""
    reason: str
    code: str
    hint: str

    def as_fact(self) -> dict[str, Any]:
        """Return the form for the catalog."""
        return {
            "table_id": int(self.table_id),
            "name": self.name,
            "after": int(self.after),
            "reason": self.reason,
            "code": self.code,
            "hint": self.hint,
        }

    @classmethod
    def from_fact(cls, fact: Mapping[str, Any]) -> QuarantinedTable:
        """Return the value from the catalog's form."""
        return cls(
            TableId(fact["table_id"]), fact["name"], Seq(fact["after"]), fact["reason"], fact["code"], fact["hint"]
        )


class _TableFacts:
    """Facts by table, for one pipeline of a stream; from any thread."""

    kind: ClassVar[str]

    def __init__(self, catalog: Catalog, stream: StreamId, pipeline: str) -> None:
        self._catalog = catalog
        self._scope = f"{self.kind}/{stream}/{pipeline}"

    def all(self) -> dict[TableId, dict[str, Any]]:
        """Return the facts by table."""
        return {TableId(int(table_id)): fact for table_id, fact in self._catalog.facts(self._scope).items()}

    def drop(self, table_id: TableId) -> None:
        """Remove a table's record."""
        self._catalog.drop_fact(self._scope, str(table_id))


class QuarantineFacts(_TableFacts):
    """The facts of the tables that one pipeline of a stream has quarantined."""

    kind = "lake"

    def put(self, table: QuarantinedTable) -> None:
        """Record a quarantined table; replaces what was recorded of it."""
        self._catalog.put_fact(self._scope, str(table.table_id), table.as_fact())

    def request_retry(self, table_id: TableId) -> bool:
        """Ask the pipeline to retry a table; False if the table isn't quarantined. Each start retries it, too."""
        fact = self.all().get(table_id)
        if fact is None:
            return False
        self._catalog.put_fact(self._scope, str(table_id), fact | {"retry": True})
        return True

    def retries_requested(self) -> set[TableId]:
        """Return the tables of which a retry is requested."""
        return {table_id for table_id, fact in self.all().items() if fact.get("retry")}


class FoldFailures(_TableFacts):
    """The errors of folds that failed, until a fold succeeds: `code`, `reason` and `hint`."""

    kind = "fold_failed"

    def put(self, table_id: TableId, *, code: str, reason: str, hint: str) -> None:
        """Record the error of a table's last fold; replaces what was recorded of it."""
        self._catalog.put_fact(self._scope, str(table_id), {"code": code, "reason": reason, "hint": hint})


@dataclass(frozen=True, slots=True)
class TableFigures:
    """A table's figures as a run of the pipeline left them."""

    landed_rows: int
    """Records appended to its history by that run."""
    live_bytes: int | None
    """Size in bytes of `current`'s files; None if it isn't known."""
    disk_bytes: int | None
    """Size in bytes of everything in `current`'s folder; None if it isn't known."""
    changed_us: int | None = None
    """The commit time of its last record that landed, µs since 1970; None if it isn't known."""


class LastFigures:
    """The last figures of each table, for one pipeline of a stream. From any thread."""

    def __init__(self, catalog: Catalog, stream: StreamId, pipeline: str) -> None:
        self._catalog = catalog
        self._scope = f"figures/{stream}/{pipeline}"

    def all(self) -> tuple[int, dict[TableId, TableFigures]]:
        """Return when they were recorded, µs since 1970, and the figures by table; 0 and none if they never were."""
        found = self._catalog.fact(self._scope, "tables") or {"us": 0, "tables": {}}
        return int(found["us"]), {TableId(int(id_)): TableFigures(*each) for id_, each in found["tables"].items()}

    def put(self, figures: Mapping[TableId, TableFigures]) -> None:
        """Record the figures of all tables as of now."""
        tables = {str(id_): list(astuple(each)) for id_, each in figures.items()}
        self._catalog.put_fact(self._scope, "tables", {"us": now_us(), "tables": tables})
