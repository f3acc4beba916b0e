"""Words in SQL with special effects: lists of tables, and names that DuckDB takes for keywords."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

TEXTS: Final = re.compile(
    r"\$(\w*)\$.*?\$\1\$|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*(?:\n|\Z)|/\*.*?\*/", re.DOTALL
)
"""Text in quotes, and comments."""
CATALOG_WORDS: Final = re.compile(r"\b(information_schema|pg_catalog|duckdb_\w+|sqlite_master|pg_\w+)\b", re.IGNORECASE)
"""A query with one of these may list tables that it doesn't name."""
LIST: Final = re.compile(r"\s*(show(\s+all)?\s+tables|show|describe)\s*;?\s*", re.IGNORECASE)
LISTED: Final = (
    "SELECT list_aggregate([CASE WHEN regexp_full_match(part, '[a-z_][a-z0-9_]*') THEN part"
    """ ELSE '"' || replace(part, '"', '""') || '"' END FOR part IN [schema_name, view_name]], 'string_agg', '.') AS name"""
    " FROM duckdb_views() WHERE NOT internal AND NOT temporary ORDER BY schema_name, view_name"
)
"""The result of `SHOW TABLES` here: DuckDB's own also lists the data behind views, and no schemas."""
_WORD: Final = re.compile(r"[A-Za-z_]\w*")


def words_to_quote(sql: str, keywords: Collection[str], columns: Collection[str]) -> list[str]:
    """Return the columns whose names are keywords and stand in a text without quotes, in its order."""
    bare = {name.lower(): name for name in columns if name.lower() in keywords}
    found = (bare.get(word.lower()) for word in _WORD.findall(TEXTS.sub(" ", sql)))
    return list(dict.fromkeys(name for name in found if name is not None))


def stands_in(table: str, text: str) -> bool:
    """Return whether a query (in lower case) may name a table, given without its schema."""
    bare = re.escape(table.replace('"', '""').lower())
    return re.search(rf"(?<!\w){bare}(?!\w)", text) is not None
