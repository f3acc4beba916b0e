"""A table's rows as PostgreSQL prints them, and how two sets of rows differ.

The text is COPY's, under a session pinned for it: a cast to text would print other things for some types (a padded
`char(n)`, a boolean).
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import psycopg
from psycopg import sql


class Unknown(Enum):
    """An undetermined value: of a record with an `unchanged` value and no earlier record."""

    VALUE = "unknown"


Text = str | None | Unknown
RowText = tuple[Text, ...]

_PINNED = {
    "datestyle": "ISO, YMD",
    "timezone": "UTC",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "client_encoding": "UTF8",
    "search_path": "",
}
_COLUMNS = """
    SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
    AND (attgenerated = '' OR (attgenerated = 's' AND current_setting('server_version_num')::int >= 180000)) ORDER BY attnum
"""
# The identity's columns: the chosen index, or the primary key (also under FULL); none under NOTHING.
_KEY = """
    SELECT attname FROM pg_class c
    JOIN pg_index i ON i.indrelid = c.oid AND CASE c.relreplident
        WHEN 'i' THEN i.indisreplident WHEN 'n' THEN false ELSE i.indisprimary END
    CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
    WHERE c.oid = %s AND k.place <= i.indnkeyatts ORDER BY k.place
"""
_ESCAPES = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TableRows:
    """All rows of a table as text, by key; without a key, a bag of rows.

    Attributes:
        columns: names, in the source's order; a row is a tuple in this order.
        key: names of the key's columns, in its index's order; empty if there is none.
        rows: by the key's values, for a table that has a key.
        bag: how often each row occurs, for a table without one.
    """

    columns: tuple[str, ...]
    key: tuple[str, ...]
    rows: dict[RowText, RowText] = field(default_factory=dict)
    bag: Counter[RowText] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.rows) + self.bag.total()

    def key_of(self, row: RowText) -> RowText:
        """Return the key's values in a row of these columns."""
        return tuple(row[self.columns.index(name)] for name in self.key)

    def add(self, row: RowText) -> bool:
        """Add a row; return False if a row of that key existed (it's replaced)."""
        if not self.key:
            self.bag[row] += 1
            return True
        key = self.key_of(row)
        new = key not in self.rows
        self.rows[key] = row
        return new


def source_rows(connection: "psycopg.Connection[Any]", table: str) -> TableRows:
    """Read a whole table, under the connection's own transaction if it's in one.

    Args:
        connection: to the database; its settings are left as they were.
        table: as SQL names it, quoted where necessary: `public.orders`, `"Mixed Case".t`.

    Returns:
        Its rows. Virtual generated columns are left out, and before version 18 stored ones: they aren't replicated.
    """
    # Rolled back to before the settings, also if this is a part of the caller's transaction.
    with connection.transaction(force_rollback=True):
        oid, namespace, name = _relation(connection, table)
        for setting, value in _PINNED.items():
            connection.execute("SELECT set_config(%s, %s, true)", [setting, value])
        columns = [c for (c,) in connection.execute(_COLUMNS, [oid]).fetchall()]
        key = [c for (c,) in connection.execute(_KEY, [oid]).fetchall()]
        result = TableRows(tuple(columns), tuple(key))
        query = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(namespace, name)
        )
        with connection.cursor() as cursor, cursor.copy(query) as copy:
            data = b"".join(bytes(block) for block in copy)
    for line in data.split(b"\n")[:-1]:
        row = tuple(map(_field, line.split(b"\t"))) if result.columns else ()
        assert result.add(row), f"{table}: two rows of one key"
    return result


def difference(ours: TableRows, source: TableRows, *, limit: int = 10) -> list[str]:
    """Describe how rows differ from the source's: one line per key (or row), at most `limit`; empty if equal."""
    if (ours.columns, ours.key) != (source.columns, source.key):
        return [f"columns {ours.columns} key {ours.key}, but {source.columns} key {source.key} in the source"]
    lines = []
    for key in ours.rows.keys() | source.rows.keys():
        old, new = ours.rows.get(key), source.rows.get(key)
        if old != new:
            lines.append(f"{dict(zip(ours.key, key, strict=True))}: {_compare(ours.columns, old, new)}")
    bags = ((row, ours.bag[row], source.bag[row]) for row in ours.bag.keys() | source.bag.keys())
    lines += [f"{mine} times, {theirs} in the source: {row}" for row, mine, theirs in bags if mine != theirs]
    if len(lines) > limit:
        lines[limit:] = [f"and {len(lines) - limit} more"]
    return lines


def _compare(columns: tuple[str, ...], mine: RowText | None, theirs: RowText | None) -> str:
    if mine is None:
        return "missing"
    if theirs is None:
        return f"not in the source: {mine}"
    cells = zip(columns, mine, theirs, strict=True)
    return ", ".join(f"{name} is {a!r}, {b!r} in the source" for name, a, b in cells if a != b)


def _relation(connection: "psycopg.Connection[Any]", table: str) -> tuple[int, str, str]:
    query = (
        "SELECT c.oid, nspname, relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = %s"
    )
    row = connection.execute(f"{query}::regclass", [table]).fetchone()
    assert row is not None
    return int(row[0]), str(row[1]), str(row[2])


def _field(raw: bytes) -> str | None:
    if raw == b"\\N":
        return None
    if b"\\" in raw:
        raw = _ESCAPED.sub(lambda found: _ESCAPES.get(found[1], found[1]), raw)
    return raw.decode()
