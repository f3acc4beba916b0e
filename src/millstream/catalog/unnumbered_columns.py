"""Tables of which records in the log lack the columns' numbers, as capture notes them."""

from __future__ import annotations

from millstream.catalog.store import Catalog
from millstream.model.ids import StreamId
from millstream.model.schema import TableKind


def unnumbered_columns(catalog: Catalog, stream: StreamId, scope: str, *, complete: bool) -> dict[str, list[str]]:
    """Return the columns of a stream's newest records without numbers, by table.

    Args:
        scope: the scope of the facts.
        complete: add, once in the stream's life, the tables that the schemas show: a stream with a lake in PostgreSQL didn't
            note them before. They come without columns, as several versions may lack numbers: only a copy ends that.
    """
    found: dict[str, list[str]] = catalog.facts(scope)
    once = f"{scope}/completed"
    if complete and not catalog.facts(once):
        captured = {row.id for row in catalog.tables(stream) if row.is_captured}
        for (table, _), schema in catalog.schemas(stream).items():
            if table in captured and schema.kind is TableKind.TABLE and not schema.is_numbered:
                found[str(table)] = []
                catalog.put_fact(scope, str(table), [])
        catalog.put_fact(once, "done", True)
    return found
