"""SQL that only reads: which statements a query may have.

This gives a clear error early, and no safety: a statement can hold another one as text. No statement can write what
the connection can't write (`duckdb_connection`, `readable_files`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from millstream.errors import InvalidQuery

if TYPE_CHECKING:
    import duckdb

READ_ONLY_HINT: Final = (
    "SELECT, WITH, FROM, VALUES, DESCRIBE, SUMMARIZE, SHOW and EXPLAIN can be asked; in WITH, too, nothing is copied."
)
_COPY: Final = re.compile(r"copy", re.IGNORECASE)
"""A statement without this word copies nothing, whatever its form."""
_COPIES: Final = '"type":"COPY'
"""In a statement's tree as JSON, in which no text has bare quotes."""
_EXPLAINED: Final = re.compile(r"\s*explain\s+(analyze\b)?\s*(\([^)]*\)\s*)?", re.IGNORECASE)


def reading_statements(connection: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    """Return the statements of a text, each of which only reads.

    Raises:
        InvalidQuery: DuckDB can't parse it, or it would do more than read.
    """
    import duckdb

    try:
        found = connection.extract_statements(sql)
        for statement in found:
            kind, text = _kind(statement), statement.query
            if kind is duckdb.StatementType.EXPLAIN:
                text = _EXPLAINED.sub("", text, count=1)
                inner = connection.extract_statements(text)
                kind = _kind(inner[0]) if len(inner) == 1 else kind
            allowed = kind in {duckdb.StatementType.SELECT, duckdb.StatementType.MULTI}
            if not allowed or _may_copy(connection, text):
                raise InvalidQuery(f"the lake is read only: {' '.join(text.split())[:80]}", hint=READ_ONLY_HINT)
    except duckdb.Error as error:
        raise InvalidQuery(str(error)) from error
    return [statement.query for statement in found]


def _kind(statement: duckdb.Statement) -> duckdb.StatementType | None:
    """Return a statement's kind; None if DuckDB's Python lacks its name, as for UPDATE EXTENSIONS."""
    try:
        return statement.type
    except ValueError:
        return None


def _may_copy(connection: duckdb.DuckDBPyConnection, statement: str) -> bool:
    """Whether a SELECT has a COPY in its WITH, as DuckDB parses it; assumed if it has the word and no tree (PIVOT)."""
    if _COPY.search(statement) is None:
        return False
    # fetchall ends the result: an open result keeps the connection from other work.
    ((tree,),) = connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchall()
    return _COPIES in tree or not tree.startswith('{"error":false')
