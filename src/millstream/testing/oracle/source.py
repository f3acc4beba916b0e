"""Reads a table of the source as PostgreSQL prints it.

The text is COPY's, under a session pinned for it: a cast to text would print other things for some types (a padded
`char(n)`, a boolean).
"""

import re
from typing import Any

import psycopg
from psycopg import sql

from millstream.testing.oracle.table_rows import TableRows

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
