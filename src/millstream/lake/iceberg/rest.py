"""pyiceberg's client of a REST catalog, with bounded requests: without a bound it waits for an answer for ever.

New snapshots have moments in order; see `commit_moments`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyiceberg.catalog.rest import RestCatalog
from requests.adapters import HTTPAdapter

from millstream.lake.iceberg.commit_moments import ordered

if TYPE_CHECKING:
    from pyiceberg.table import CommitTableResponse, Table
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from requests import Session

_CONNECT_S: Final = 10.0
_ANSWER_S: Final = 60.0
"""Longer than any commit takes: the time between two parts of an answer."""


class BoundedRestCatalog(RestCatalog):
    """See the module."""

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit, as the base class."""
        done: CommitTableResponse = super().commit_table(table, requirements, ordered(table.metadata, updates))
        return done

    def _create_session(self) -> Session:
        session = super()._create_session()
        for scheme in ("https://", "http://"):
            session.mount(scheme, _BoundedRequests())
        return session


class _BoundedRequests(HTTPAdapter):
    def send(self, request: Any, stream: bool = False, timeout: Any = None, *rest: Any, **named: Any) -> Any:  # noqa: FBT001, FBT002 - the base class's
        return super().send(request, stream, timeout or (_CONNECT_S, _ANSWER_S), *rest, **named)
