"""Names of PostgreSQL objects as text: quoted as PostgreSQL quotes them, parsed, and matched by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

from millstream.errors import UsageError

CATALOG_SCHEMA: Final = "millstream"
"""The schema of a catalog in PostgreSQL. It is never captured: capture writes to it, and would feed itself."""

NAME_BYTES_MAX: Final = 255
"""Maximum size in UTF-8 bytes of the name of an application's table, schema or column."""

DEFAULT_SCHEMA: Final = "public"
"""The schema of a name that has none."""

_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*\Z")

# Every keyword of PostgreSQL 14 to 18 that isn't "unreserved" (pg_get_keywords().catcode <> 'U'):
# quote_identifier in ruleutils.c quotes just these. The union over versions makes a name read the
# same whatever the source's version.
_KEYWORDS: Final = frozenset(
    """
    all analyse analyze and any array as asc asymmetric authorization between bigint binary bit boolean both case cast char
    character check coalesce collate collation column concurrently constraint create cross current_catalog current_date
    current_role current_schema current_time current_timestamp current_user dec decimal default deferrable desc distinct do
    else end except exists extract false fetch float for foreign freeze from full grant greatest group grouping having ilike
    in initially inner inout int integer intersect interval into is isnull join json json_array json_arrayagg json_exists
    json_object json_objectagg json_query json_scalar json_serialize json_table json_value lateral leading least left like
    limit localtime localtimestamp merge_action national natural nchar none normalize not notnull null nullif numeric offset
    on only or order out outer overlaps overlay placing position precision primary real references returning right row
    select session_user setof similar smallint some substring symmetric system_user table tablesample then time timestamp to
    trailing treat trim true union unique user using values varchar variadic verbose when where window with xmlattributes
    xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable
    """.split()  # noqa: SIM905 — a list of five hundred quotes can't be read
)


def name_fault(name: str) -> str | None:
    """Return why a table, a schema or a column can't have this name, as `has a zero byte`; None if it can."""
    if not name:
        return "is empty"
    if "\0" in name:
        return "has a zero byte"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "isn't text"
    return f"has {size} bytes, of at most {NAME_BYTES_MAX}" if size > NAME_BYTES_MAX else None


def quote_ident(name: str) -> str:
    """Quote the identifier as PostgreSQL's `quote_ident` does: bare if that is safe, else in double quotes."""
    if _PLAIN.match(name) is not None and name not in _KEYWORDS:
        return name
    return quote(name)


def quote(name: str) -> str:
    """Return an SQL identifier, quoted whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return an SQL string, for a session with standard strings."""
    return "'" + text.replace("'", "''") + "'"


@lru_cache(maxsize=65536)
def qualified_name(namespace: str, name: str) -> str:
    """Return `schema.name`, each part quoted if it must be."""
    return f"{quote_ident(namespace)}.{quote_ident(name)}"


_PART: Final = re.compile(r'"((?:[^"\0\ud800-\udfff]|"")+)"|([^\s".*?!\0\ud800-\udfff]+)')


def parse_qualified_name(text: str) -> tuple[str, str]:
    """Return the (schema, name) that a text like `public.orders` or `"My schema"."T"` names.

    Every command and SQL follow this rule (`docs/reference/names.md`): unquoted parts are folded to
    lower case, as in PostgreSQL, and a text without a schema means `public`.

    Raises:
        UsageError: the text is no such name.
    """
    if not isinstance(text, str):
        raise _invalid(text)
    found = _dotted(_PART, text)
    if not found:
        raise _invalid(text)
    *schema, name = (part[2].lower() if part[1] is None else part[1].replace('""', '"') for part in found)
    return schema[0] if schema else DEFAULT_SCHEMA, name


def table_names(tables: str | Iterable[str] | None) -> list[str] | None:
    """Return the tables that a reader named: one, or several; None for all.

    Raises:
        UsageError: there is none, or one isn't a table's name.
    """
    if tables is None:
        return None
    try:
        names = [tables] if isinstance(tables, str) else list(tables)
    except TypeError:
        raise _invalid(tables) from None
    if not names:
        raise UsageError("no table is named", hint="Name at least one table, or leave the argument out for all.")
    for name in names:
        parse_qualified_name(name)
    return names


def _dotted(part: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return the parts of a text: one, or two with a dot between them; none if it is something else."""
    parts: list[re.Match[str]] = []
    position = 0
    while len(parts) < 2 and (found := part.match(text, position)) is not None:
        parts.append(found)
        if found.end() == len(text):
            return parts
        if text[found.end()] != ".":
            break
        position = found.end() + 1
    return []


def parse_column(text: str) -> tuple[str, str, str]:
    """Return the (schema, table, column) that `public.orders.total` names; its table as `parse_qualified_name`.

    Raises:
        UsageError: the text is no such name.
    """
    table, _, column = text.rpartition(".")
    if not column.strip('"'):
        raise _invalid(text)
    return (*parse_qualified_name(table), column.strip('"'))


def same_bare(name: str, tables: Iterable[tuple[str, str]]) -> list[str]:
    """Return the full names of tables with this bare name in any schema, ignoring case, as candidates for a hint."""
    return sorted(qualified_name(*table) for table in set(tables) if table[1].lower() == name.lower())


def name_in_full(candidates: Sequence[str]) -> str:
    """Return the hint for an unknown name, listing the candidates of `same_bare`; empty if there are none."""
    return f"Name its schema too: {' or '.join(candidates)}." if candidates else ""


def _invalid(text: object) -> UsageError:
    return UsageError(
        f"{repr(text)[:200]} is not the name of a table",
        hint='Write schema.table; a part with capitals, spaces or dots goes in double quotes: public."My.Table".',
    )


@dataclass(frozen=True, slots=True)
class TablePattern:
    """One pattern: `public.*`, `public.orders`, `!public.audit_*`.

    `*` is any text and `?` any character, except dots.
    """

    text: str
    leaves_out: bool
    namespace: re.Pattern[str]
    name: re.Pattern[str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a pattern; a part in double quotes is taken literally, including capitals and stars.

        Raises:
            UsageError: the text is no pattern.
        """
        body = text.strip()
        leaves_out = body.startswith("!")
        parts = _split_pattern(body[1:] if leaves_out else body, text)
        if len(parts) == 1:
            parts = [re.escape(DEFAULT_SCHEMA), *parts]
        return cls(text, leaves_out, re.compile(parts[0] + r"\Z", re.DOTALL), re.compile(parts[1] + r"\Z", re.DOTALL))

    @property
    def takes_whole_schemas(self) -> bool:
        """Whether the pattern matches every table of the schemas that it matches."""
        return self.name.pattern == _expression("*") + r"\Z"

    def matches(self, namespace: str, name: str) -> bool:
        """Whether the table matches the pattern (also a pattern that leaves out)."""
        return self.namespace.match(namespace) is not None and self.name.match(name) is not None


_PATTERN_PART: Final = re.compile(r'"((?:[^"\0\ud800-\udfff]|"")+)"|([^\s".!\0\ud800-\udfff]+)')


def _split_pattern(body: str, text: str) -> list[str]:
    found = _dotted(_PATTERN_PART, body)
    if not found:
        raise _invalid_pattern(text)
    return [
        _expression(part[2].lower()) if part[1] is None else re.escape(part[1].replace('""', '"')) for part in found
    ]


def _expression(part: str) -> str:
    """Return a pattern's part as a regular expression, which matches in polynomial time.

    The text between two stars stands at the first place where it fits: an atomic group tries no other one.
    """
    pieces = ["".join("." if c == "?" else re.escape(c) for c in piece) for piece in re.split(r"\*+", part)]
    if len(pieces) == 1:
        return pieces[0]
    first, *between, last = pieces
    return first + "".join(f"(?>.*?{piece})" for piece in between) + ".*" + last


def _invalid_pattern(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is not a pattern of tables",
        hint='Write schema.table with * for any text and a leading "!" to exclude: ["public.*", "!public.audit_*"].',
    )


@dataclass(frozen=True, slots=True)
class TablePatterns:
    """A list of patterns: a table is selected if one of them matches and none that leaves out does.

    A list of only patterns that leave out selects all other tables. No pattern selects the schema
    of Millstream's own catalog.
    """

    patterns: tuple[TablePattern, ...]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Parse patterns. `UsageError` names the text that is none."""
        return cls(tuple(TablePattern.parse(text) for text in texts))

    def select(self, namespace: str, name: str) -> bool:
        """Whether the table is selected."""
        if namespace == CATALOG_SCHEMA:
            return False
        if self.leave_out(namespace, name):
            return False
        taken = self._taken
        return not taken or any(p.matches(namespace, name) for p in taken)

    def select_partition(self, namespace: str, name: str, ancestors: Iterable[tuple[str, str]]) -> bool:
        """Whether a partition is selected as a table of its own.

        If a pattern leaves out a partitioned table, its partitions are left out too. Only a pattern that matches the
        partition, not that table, and has more than a schema, selects them nevertheless.

        Args:
            ancestors: schemas and names of the partitioned tables above it; empty for any other table.
        """
        if not self.select(namespace, name):
            return False
        roots = [root for root in ancestors if self.leave_out(*root)]
        return not roots or any(
            p.matches(namespace, name) and not p.takes_whole_schemas and not any(p.matches(*root) for root in roots)
            for p in self._taken
        )

    def leave_out(self, namespace: str, name: str) -> bool:
        """Whether a pattern with `!` matches the table."""
        return any(p.leaves_out and p.matches(namespace, name) for p in self.patterns)

    @property
    def leave_some_out(self) -> bool:
        """Whether any pattern begins with `!`."""
        return any(p.leaves_out for p in self.patterns)

    @property
    def _taken(self) -> Sequence[TablePattern]:
        return [p for p in self.patterns if not p.leaves_out]
