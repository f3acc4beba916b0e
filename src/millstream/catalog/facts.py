"""The catalog's facts: values stored by components, each under a scope and a name."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, select

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart
from millstream.catalog.database import CatalogDatabase


def read_fact(connection: Connection, scope: str, name: str, default: Any = None) -> Any:
    """Return the value of that name, else `default`, within an open transaction."""
    found = connection.execute(select(t.facts.c.value).where(_is(scope, name))).scalar()
    return default if found is None else json.loads(found)


def write_fact(database: CatalogDatabase, connection: Connection, scope: str, name: str, value: Any) -> None:
    """Store a JSON-able value within an open transaction; replaces the old one."""
    change = database.insert(t.facts).values(scope=scope, name=name, value=json.dumps(value))
    keys = [t.facts.c.scope, t.facts.c.name]
    connection.execute(change.on_conflict_do_update(index_elements=keys, set_={"value": change.excluded["value"]}))


def delete_fact(connection: Connection, scope: str, name: str) -> bool:
    """Delete a value within an open transaction; return whether there was one."""
    return connection.execute(delete(t.facts).where(_is(scope, name))).rowcount > 0


def _is(scope: str, name: str) -> ColumnElement[bool]:
    return and_(t.facts.c.scope == scope, t.facts.c.name == name)


class Facts(CatalogPart):
    """Facts, each call a transaction of its own."""

    def put_fact(self, scope: str, name: str, value: Any) -> None:
        """Store a JSON-able value; replaces the old one. `scope` separates components (`capture/<stream id>`)."""
        with self._database.write() as connection:
            write_fact(self._database, connection, scope, name, value)

    def add_fact(self, scope: str, name: str, value: Any) -> None:
        """Store a JSON-able value if there is none of the name; otherwise the old one stays."""
        change = self._database.insert(t.facts).values(scope=scope, name=name, value=json.dumps(value))
        with self._database.write() as connection:
            connection.execute(change.on_conflict_do_nothing(index_elements=[t.facts.c.scope, t.facts.c.name]))

    def fact(self, scope: str, name: str, default: Any = None) -> Any:
        """Return the value of that name, else `default`."""
        with self._database.read() as connection:
            return read_fact(connection, scope, name, default)

    def facts(self, scope: str) -> dict[str, Any]:
        """Return all values of a scope."""
        query = select(t.facts.c.name, t.facts.c.value).where(t.facts.c.scope == scope)
        with self._database.read() as connection:
            return {row.name: json.loads(row.value) for row in connection.execute(query)}

    def drop_fact(self, scope: str, name: str) -> None:
        """Delete a value."""
        with self._database.write() as connection:
            delete_fact(connection, scope, name)
