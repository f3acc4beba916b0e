"""Rules of columns in a table copy: what is read in their place, and the hashing of COPY's text.

Excluded columns aren't read, and PostgreSQL itself returns the constant for redacted ones. Hashed columns are replaced
in the text as soon as it has come, before anything decodes or keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, assert_never

from psycopg import pq, sql

from millstream.capture.connection import Connection, translate_result
from millstream.capture.copying.copy_output import CopyText, as_messages
from millstream.capture.source_tables import SourceTable
from millstream.codec.pgoutput import Relation
from millstream.errors import SourceError
from millstream.model.column_rules import REDACTED, Rule

NULL: Final = b"\\N"
"""A null in COPY's text."""
_ESCAPE: Final = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPES: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def read_columns(table: SourceTable) -> list[sql.Composable]:
    """Return the expressions that a table's columns are read by, in the order of its relation."""
    found: list[sql.Composable] = []
    for column in table.relation.columns:
        named = sql.Identifier(column.name)
        match rule := table.rules.get(column.name):
            case None | Rule.HASH:  # `hasher` hashes what is read
                found.append(named)
            case Rule.REDACT:
                # IS NULL is also true of a row of nulls, which is sent as a value.
                found.append(sql.SQL("CASE WHEN num_nulls({}) = 0 THEN {} END").format(named, sql.Literal(REDACTED)))
            case Rule.EXCLUDE:
                raise AssertionError("the relation has no excluded columns")
            case _:
                assert_never(rule)
    return found


def check_numbers(connection: Connection, table: SourceTable) -> None:
    """Check that the names of a table with rules mean the columns whose numbers its rules were decided by.

    A snapshot shows the catalogs of an earlier moment, while PostgreSQL resolves names by the present ones.

    Raises:
        SourceError: a column was renamed since; read the table again.
    """
    if not table.rules:
        return
    names = [column.name for column in table.relation.columns]
    query = sql.SQL("SELECT {} FROM {} LIMIT 0").format(
        sql.SQL(", ").join(map(sql.Identifier, names)), sql.Identifier(table.namespace, table.name)
    )
    result = connection.pgconn.exec_(query.as_bytes(connection))
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise translate_result(result)
    numbers = {column.name: column.number for column in table.layout}
    if [result.ftablecol(place) for place in range(len(names))] != [numbers[name] for name in names]:
        raise SourceError(f"the columns of table {table.full_name} were renamed during the read", sqlstate="40001")


def hasher(table: SourceTable, hashed: Callable[[bytes], bytes]) -> Callable[[CopyText], CopyText]:
    """Return a function that hashes the columns of a table's text that have the rule."""
    places = hashed_places(table.relation, table)
    if not places:
        return lambda piece: piece
    return lambda piece: CopyText(as_messages(_hashed(piece.lines(), places, hashed)), piece.row_count, piece.whole)


def hashed_places(relation: Relation, table: SourceTable) -> list[int]:
    """Return the places of the hashed columns in a relation."""
    return [n for n, column in enumerate(relation.columns) if table.rules.get(column.name) is Rule.HASH]


def _hashed(lines: Iterable[bytes], places: Sequence[int], hashed: Callable[[bytes], bytes]) -> Iterator[bytes]:
    for line in lines:
        values = line.split(b"\t")
        for place in places:
            if values[place] != NULL:
                values[place] = hashed(plain_text(values[place]))
        yield b"\t".join(values)


def lines_with(piece: CopyText, places: Sequence[int], wanted: Collection[tuple[bytes, ...]]) -> list[bytes]:
    """Return the lines of the rows whose values at some places, which have no escapes, are wanted."""
    return [line for line in piece.lines() if tuple(line.split(b"\t")[place] for place in places) in wanted]


def plain_text(value: bytes) -> bytes:
    """Return a value as PostgreSQL prints it, without COPY's escapes."""
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), value) if b"\\" in value else value
