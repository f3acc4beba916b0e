"""The catalog's facts: JSON-able values that components store, by scope and name."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import delete, select

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart


class Facts(CatalogPart):
    """Values stored by components."""

    def put_fact(self, scope: str, name: str, value: Any) -> None:
        """Store a JSON-able value; replaces the old one. `scope` separates components (`capture/<stream id>`)."""
        change = self._database.insert(t.facts).values(scope=scope, name=name, value=json.dumps(value))
        keys = [t.facts.c.scope, t.facts.c.name]
        with self._database.write() as connection:
            connection.execute(
                change.on_conflict_do_update(index_elements=keys, set_={"value": change.excluded["value"]})
            )

    def add_fact(self, scope: str, name: str, value: Any) -> None:
        """Store a JSON-able value if there is none of the name; otherwise the old one stays."""
        change = self._database.insert(t.facts).values(scope=scope, name=name, value=json.dumps(value))
        with self._database.write() as connection:
            connection.execute(change.on_conflict_do_nothing(index_elements=[t.facts.c.scope, t.facts.c.name]))

    def fact(self, scope: str, name: str, default: Any = None) -> Any:
        """Return the value of that name, else `default`."""
        query = select(t.facts.c.value).where(t.facts.c.scope == scope, t.facts.c.name == name)
        with self._database.read() as connection:
            found = connection.execute(query).scalar()
        return default if found is None else json.loads(found)

    def facts(self, scope: str) -> dict[str, Any]:
        """Return all values of a scope."""
        query = select(t.facts.c.name, t.facts.c.value).where(t.facts.c.scope == scope)
        with self._database.read() as connection:
            return {row.name: json.loads(row.value) for row in connection.execute(query)}

    def drop_fact(self, scope: str, name: str) -> None:
        """Delete a value."""
        with self._database.write() as connection:
            connection.execute(delete(t.facts).where(t.facts.c.scope == scope, t.facts.c.name == name))
