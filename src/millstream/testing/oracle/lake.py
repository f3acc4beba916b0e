"""The current rows of a lake table, as text, and the check that its columns have the promised types."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from deltalake import DeltaTable

from millstream.testing.oracle.pgtext import texts
from millstream.testing.oracle.source import _relation
from millstream.testing.oracle.table_rows import TableRows

_SCALARS = {
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "date": pa.date32(),
    "bytea": pa.binary(),
    "timestamp without time zone": pa.timestamp("us"),
    "timestamp with time zone": pa.timestamp("us", tz="UTC"),
}
_NUMERIC = re.compile(r"numeric\((\d+),(-?\d+)\)")
_DECIMAL_DIGITS_MAX = 38
_TYPES = """
    SELECT attname, format_type(atttypid, atttypmod), format_type(t.typelem, atttypmod), typtype = 'd'
    FROM pg_attribute JOIN pg_type t ON t.oid = atttypid
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
    AND (attgenerated = '' OR (attgenerated = 's' AND current_setting('server_version_num')::int >= 180000)) ORDER BY attnum
"""
_ESCAPED = re.compile(rb"~([0-9a-f]{2})")
_TEXTS = ("text", "character", "bpchar", "uuid", "json", "jsonb")


def current_rows(path: str | os.PathLike[str], like: TableRows, *, version: int | None = None) -> TableRows:
    """Read a Delta table of one row per key, as text.

    Args:
        path: the table's folder.
        like: the source's rows: they define the columns and their order, and the key.
        version: the Delta table's version; the newest by default.

    Raises:
        KeyError: the table lacks a column of the source.
        AssertionError: it has two rows of one key.
    """
    table = read_delta(path, version=version)
    result = TableRows(like.columns, like.key)
    for row in zip(*text_columns(table, like.columns), strict=True):
        assert result.add(row), f"{path}: two rows of key {result.key_of(row)}"
    return result


def read_delta(
    path: str | os.PathLike[str], *, version: int | None = None, columns: list[str] | None = None
) -> pa.Table:
    """Read a Delta table from a local folder."""
    return DeltaTable(os.fspath(path), version=version).to_pyarrow_table(columns=columns)


def text_columns(table: pa.Table, names: Sequence[str]) -> list[list[str | None]]:
    """Return columns as text; a null whose name is in its row's `__exact` map is that text."""
    columns = {name: texts(table.column(name)) for name in names}
    if "__exact" in table.column_names:
        for index, exact in enumerate(table.column("__exact").to_pylist()):
            for name, text in exact or ():
                if name in columns:
                    assert columns[name][index] is None, f"{name} has a value and an exact text: {text}"
                    columns[name][index] = text
    return [columns[name] for name in names]


def check_types(path: str | os.PathLike[str], connection: "psycopg.Connection[Any]", table: str) -> list[str]:
    """Return the columns of a lake table without the type that their PostgreSQL type requires.

    Domains are left out: whether one keeps its base type isn't promised.
    """
    schema = read_delta(path).schema
    found = {field.name: _plain(field.type) for field in schema}
    oid, _, _ = _relation(connection, table)
    lines = []
    for name, kind, element, domain in connection.execute(_TYPES, [oid]).fetchall():
        expected = _lake_type(kind, element)
        if not domain and found.get(name) != expected:
            lines.append(f"{table}.{name}: {kind} should be {expected}, is {found.get(name)}")
    return lines


def table_folder(view: str | os.PathLike[str], schema: str, table: str) -> Path:
    """Return the folder of a table under a view's; bytes of its name may be escaped as `~` and two digits of hex.

    The id of a table may stand behind the name, after `~t`.

    Raises:
        FileNotFoundError: there's none, or there are several.
    """
    wanted = f"{schema}.{table}"
    found = [entry for entry in Path(view).iterdir() if _unescaped(entry.name) == wanted.encode()]
    if len(found) != 1:
        names = sorted(entry.name for entry in Path(view).iterdir())
        raise FileNotFoundError(f"{len(found)} folders for {wanted} among {names}")
    return found[0]


def _unescaped(name: str) -> bytes:
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), name.partition("~t")[0].encode())


def _lake_type(kind: str, element: str) -> pa.DataType:
    if kind.endswith("[]"):
        item = _scalar(element)
        return pa.string() if item is None else pa.list_(item)
    return _scalar(kind) or pa.string()


def _scalar(kind: str) -> pa.DataType | None:
    """Return the type of a value that keeps its type; None for one that is stored as PostgreSQL's text."""
    bare = re.sub(r"^(timestamp|time)\(\d\)", r"\1", kind)
    if bare in _SCALARS:
        return _SCALARS[bare]
    if found := _NUMERIC.fullmatch(kind):
        precision, scale = int(found[1]), int(found[2])
        if precision <= _DECIMAL_DIGITS_MAX and 0 <= scale <= precision:
            return pa.decimal128(precision, scale)
        return None
    return pa.string() if kind.startswith(_TEXTS) else None


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type without a reader's choices: large and view layouts, names of list items."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_string(kind) or kind == pa.string_view():
        return pa.string()
    if pa.types.is_large_binary(kind) or kind == pa.binary_view():
        return pa.binary()
    return kind
