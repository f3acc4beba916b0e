"""The tables of the workload: one for each way in which PostgreSQL identifies rows, and their rows' content.

A table keeps track of its rows, by the values that a statement needs to find one; it makes no statement
itself.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from psycopg import sql

from millstream.testing.workloads._values import VALUES, Generator, edged, integers, wide_text, words

Identity = Literal["default", "full", "index", "nothing", "none"]
Key = tuple[str, ...]

_GONE_MAX = 200  # number of deleted keys to remember, so that some of them come back
_WIDE = (3_000, 9_000)  # characters: above the 2 kB from which values are stored out of line


@dataclass(frozen=True, slots=True)
class WorkloadColumn:
    """A column: its name, its SQL type, the generator of its values, and the frequency of nulls."""

    name: str
    type: str
    values: Generator
    nulls: float = 0.1

    def draw(self, rng: Random) -> str | None:
        """Return a value, or None for null."""
        return None if self.nulls and rng.random() < self.nulls else self.values(rng)


@dataclass(slots=True)
class Table:
    """One table and its current rows.

    Attributes:
        locator: the columns by which statements find a row; they are unique together, except for
            `identity` full without a key, which has equal rows on purpose.
        fresh: draws a locator's values that no row has had, from a number that only grows.
        identity: as its REPLICA IDENTITY; `none` has no key and identity DEFAULT.
        grows: how columns may be added: not at all, only null in old rows, or also with a default.
        live: locators of the current rows.
        gone: locators of some deleted rows.
    """

    schema: str
    name: str
    locator: tuple[WorkloadColumn, ...]
    columns: list[WorkloadColumn]
    fresh: Callable[[Random, int], Key]
    identity: Identity = "default"
    key: str = ""
    after: tuple[str, ...] = ()
    unique: bool = True
    changes: bool = True
    grows: Literal["no", "null", "default"] = "no"
    cascades_to: str = ""
    added: int = 0
    count: int = 0
    live: list[Key] = field(default_factory=list)
    gone: list[Key] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the name as SQL has it, quoted only where necessary."""
        return ".".join(map(_quoted, (self.schema, self.name)))

    @property
    def id(self) -> sql.Identifier:
        """Return the name for statements."""
        return sql.Identifier(self.schema, self.name)

    @property
    def has_current(self) -> bool:
        """Return whether its changes determine its current rows: not if the source sends no old ones."""
        return self.identity not in ("nothing", "none")

    def definition(self) -> list[sql.Composed]:
        """Return the statements that create it."""
        parts: list[sql.Composable] = [
            sql.SQL(f"{{}} {c.type}{'' if c.nulls else ' NOT NULL'}").format(sql.Identifier(c.name))
            for c in (*self.locator, *self.columns)
        ]
        if self.key:
            parts.append(sql.SQL(self.key))
        create = sql.SQL("CREATE TABLE {} ({})").format(self.id, sql.SQL(", ").join(parts))
        forms = {"full": "FULL", "nothing": "NOTHING", "index": "USING INDEX {index}"}
        statements: list[sql.Composed] = [create, *(sql.SQL(text).format(self.id) for text in self.after)]
        if self.identity in forms:
            alter = sql.SQL("ALTER TABLE {table} REPLICA IDENTITY " + forms[self.identity])
            statements.append(alter.format(table=self.id, index=sql.Identifier(f"{self.name}_identity")))
        return statements

    def new_key(self, rng: Random, *, reuse: float = 0.2) -> Key:
        """Return a locator for a row to insert; at times one of a deleted row."""
        if self.gone and rng.random() < reuse:
            return self.gone.pop(rng.randrange(len(self.gone)))
        self.count += 1
        return self.fresh(rng, self.count)

    def take(self, rng: Random) -> Key:
        """Remove and return the locator of a current row."""
        place = rng.randrange(len(self.live))
        self.live[place], self.live[-1] = self.live[-1], self.live[place]
        return self.live.pop()

    def forget(self, keys: Iterable[Key]) -> None:
        """Move some keys to the deleted ones."""
        if self.unique:
            self.gone.extend(keys)
            del self.gone[:-_GONE_MAX]

    def empty(self) -> None:
        """Remove all rows."""
        self.forget(self.live[-_GONE_MAX:])
        self.live.clear()


def _quoted(name: str) -> str:
    plain = name.isascii() and name.replace("_", "a").isalnum() and name == name.lower() and not name[0].isdigit()
    return name if plain and name not in ("select", "order", "table") else '"' + name.replace('"', '""') + '"'


def _number(name: str = "id", kind: str = "bigint") -> tuple[WorkloadColumn, ...]:
    return (WorkloadColumn(name, kind, integers(0, 1), nulls=0),)


def _count(_: Random, number: int) -> Key:
    return (str(number),)


def _columns(*kinds: str) -> list[WorkloadColumn]:
    return [WorkloadColumn(f"c{n}", kind, VALUES[kind]) for n, kind in enumerate(kinds, 1)]


_STRANGE_KEYS = ("", "NULL", "\\N", "a b", "ünï ", 'quo"te', "it's", "\t", "{1}", "\U0001f980", "\\\\x", "%")


def _text_key(rng: Random, number: int) -> Key:
    return (rng.choice(_STRANGE_KEYS) + (str(number) if number > 1 else ""),)


def _uuid_key(rng: Random, number: int) -> Key:
    return (f"{rng.getrandbits(80):020x}{number:012x}",)


def _composite_key(rng: Random, number: int) -> Key:
    return (str(rng.randint(-5, 5)), f"{rng.choice(_STRANGE_KEYS)}{number}", f"2024-01-{1 + number % 28:02d}")


def tables(types: Sequence[str]) -> list[Table]:
    """Return all tables, in the order of their creation.

    Args:
        types: the SQL names of the server's types, in `VALUES`.
    """
    small = ("integer", "text", "timestamptz", "numeric(12,2)")
    wide = [
        WorkloadColumn("small", "integer", VALUES["integer"]),
        WorkloadColumn("big_text", "text", wide_text(*_WIDE)),
        WorkloadColumn("big_json", "jsonb", lambda rng: f'{{"k": "{wide_text(*_WIDE)(rng)}"}}'),
        WorkloadColumn("big_bytes", "bytea", lambda rng: f"\\x{rng.randbytes(4_000).hex()}"),
        WorkloadColumn("at_times_big", "text", edged(words(), "__unchanged", "x" * 100_000)),
    ]
    text_locator = (WorkloadColumn("k", "text", words(), nulls=0),)
    mixed = "Mixed Schema"
    return [
        Table("public", "simple", _number(), _columns(*small), _count, key="PRIMARY KEY (id)", grows="default"),
        Table(
            "public",
            "composite",
            (
                WorkloadColumn("a", "integer", integers(0, 1), nulls=0),
                WorkloadColumn("b", "text", words(), nulls=0),
                WorkloadColumn("d", "date", integers(0, 1), nulls=0),
            ),
            _columns("boolean", "double precision", "jsonb"),
            _composite_key,
            key="PRIMARY KEY (d, a, b)",
            grows="default",
        ),
        Table("public", "text_key", text_locator, _columns("text", "bytea"), _text_key, key="PRIMARY KEY (k)"),
        Table(
            "public",
            "uuid_key",
            (WorkloadColumn("u", "uuid", words(), nulls=0),),
            _columns("numeric", "date", "text[]"),
            _uuid_key,
            key="PRIMARY KEY (u)",
            grows="null",
        ),
        Table(
            "public", "wide", _number(), wide, _count, key="PRIMARY KEY (id)", after=_external(wide), grows="default"
        ),
        Table("public", "wide_full", _number(), wide[:3], _count, "full", "PRIMARY KEY (id)", _external(wide[:3])),
        Table(
            "public",
            "bag",
            (WorkloadColumn("n", "integer", integers(0, 1), nulls=0),),
            _columns("text", "double precision", "numeric", "timestamp", "integer[]"),
            lambda rng, _: (str(rng.randrange(400)),),
            "full",
            after=("CREATE INDEX ON {} (n)",),
            unique=False,
            grows="null",
        ),
        Table(
            "public",
            "by_index",
            (
                WorkloadColumn("code", "text", words(), nulls=0),
                WorkloadColumn("site", "integer", integers(0, 1), nulls=0),
            ),
            [WorkloadColumn("id", "uuid", VALUES["uuid"], nulls=0), *_columns("text", "time", "interval")],
            lambda rng, number: (f"{rng.choice(_STRANGE_KEYS)}{number}", str(rng.randrange(9))),
            "index",
            after=("CREATE UNIQUE INDEX by_index_identity ON {} (site, code)",),
        ),
        Table("public", "appended", _number("n"), _columns("text", "timestamptz"), _count, "none", changes=False),
        Table("public", "unidentified", _number(), _columns("text"), _count, "nothing", "PRIMARY KEY (id)"),
        Table("public", "parents", _number(), _columns("text"), _count, key="PRIMARY KEY (id)", cascades_to="children"),
        Table(
            "public",
            "children",
            _number(),
            _columns("integer"),
            _count,
            key="PRIMARY KEY (id)",
            # Nothing refers to a row: the purpose is to test TRUNCATE … CASCADE.
            after=("ALTER TABLE {} ADD parent bigint REFERENCES public.parents (id) ON DELETE SET NULL",),
        ),
        Table(
            mixed,
            'Größe "Ω".tab',
            (WorkloadColumn("Select", "bigint", integers(0, 1), nulls=0),),
            [
                WorkloadColumn(name, kind, VALUES[kind])
                for name, kind in (
                    ("with space", "text"),
                    ("ünï", "integer"),
                    ('quo"te', "timestamp"),
                    ("a.b", "numeric(38,10)"),
                    ("__op_", "text"),
                    ("UPPER", "boolean"),
                    ("lower", "boolean"),
                )
            ],
            _count,
            key='PRIMARY KEY ("Select")',
            grows="default",
        ),
        Table(mixed, "Clash", _number(), _columns("text"), _count, key="PRIMARY KEY (id)"),
        Table(mixed, "clash", _number(), _columns("text"), _count, key="PRIMARY KEY (id)"),
        Table("public", "every_type", _number(), _columns(*types), _count, key="PRIMARY KEY (id)"),
        Table("public", "every_type_full", _number("n"), _columns(*_COMPARABLE), _count, "full", unique=False),
    ]


# Types for a table without a key. The purpose is that old rows come with each of them.
_COMPARABLE = ("real", "date", "numeric(12,2)", "bytea", "public.mood", "int4range", "public.spot", "json", "text[]")


def _external(columns: Sequence[WorkloadColumn]) -> tuple[str, ...]:
    # Out of line and not compressed: surely TOAST.
    return tuple(f"ALTER TABLE {{}} ALTER {c.name} SET STORAGE EXTERNAL" for c in columns if c.name.startswith("big_"))


# The types and defaults of added columns. None of the defaults makes PostgreSQL rewrite the table.
ADDED: tuple[tuple[str, str | None], ...] = (
    ("text", None),
    ("integer", "42"),
    ("numeric(12,2)", "0.50"),
    ("boolean", None),
    ("text", "déjà vu"),
    ("timestamptz", "2024-02-29 12:00:00+00"),
    ("integer[]", "{1,NULL}"),
    ("jsonb", None),
)
