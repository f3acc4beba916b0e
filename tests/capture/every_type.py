"""Every type that a server has, and values of each.

The server lists the types that a column may have; this module doesn't.

Types are read from `pg_type`. A type made of others (arrays, ranges, multiranges, composites, domains,
enums) draws its values from their values. A base type needs a line in `BASE`; if a server has one
without it, the test that asks fails. Values are SQL expressions. So types that no input function takes
(`pg_node_tree`, statistics) get their values from where PostgreSQL keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

import psycopg
from psycopg import sql

from millstream.testing.workloads._values import VALUES as WORKLOAD
from millstream.testing.workloads._values import Generator, edged, integers, quoted

PINNED: Final = (
    "SET client_encoding = UTF8; SET datestyle = ISO; SET timezone = UTC; SET intervalstyle = postgres; SET extra_float_digits = 3;"
    " SET bytea_output = hex; SET lc_monetary = 'C'; SET search_path = pg_catalog; SET quote_all_identifiers = off"
)
"""Settings of a session under which PostgreSQL prints text as Millstream expects it."""

ODD_SETTINGS: Final = {
    "datestyle": "'German, DMY'",
    "timezone": "'Asia/Kathmandu'",
    "intervalstyle": "iso_8601",
    "extra_float_digits": "-5",
    "bytea_output": "escape",
    "xmlbinary": "hex",
    "search_path": "public, pg_catalog",
    "quote_all_identifiers": "on",
}
"""Settings that a database may have, and on which a value's text mustn't depend."""

# Types of our own, shaped like those of applications, and of extensions that no server here has.
TYPES: Final = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'very happy', 'quo\"te', 'NULL', 'a,b', '{}', 'ü\\')",
    "CREATE DOMAIN amount AS numeric(10,2) CHECK (VALUE > -1e7)",
    "CREATE DOMAIN smaller_amount AS amount CHECK (VALUE < 1e7)",
    "CREATE DOMAIN moods AS mood[]",
    "CREATE TYPE spot AS (x integer, label text, at timestamptz)",
    "CREATE TYPE nested AS (id bigint, place spot, places spot[], feeling mood, paid smaller_amount, raw bytea)",
    "CREATE DOMAIN known_spot AS spot",
    "CREATE TYPE nothing AS ()",
    "CREATE TYPE float_range AS RANGE (subtype = float8, multirange_type_name = float_ranges)",
    'CREATE TYPE word_range AS RANGE (subtype = text, collation = "C")',
    "CREATE TYPE mood_range AS RANGE (subtype = mood)",
    "CREATE DOMAIN short_range AS int4range",
    'CREATE TABLE a_table (id int, "Odd name" text, tags text[])',
    # A base type like an extension's. It uses the functions of text and, like PostGIS, has a modifier
    # and ':' between elements.
    "CREATE TYPE geometry",
    "CREATE FUNCTION geometry_in(cstring, oid, integer) RETURNS geometry AS 'textin' LANGUAGE internal IMMUTABLE STRICT",
    "CREATE FUNCTION geometry_out(geometry) RETURNS cstring AS 'textout' LANGUAGE internal IMMUTABLE STRICT",
    (
        "CREATE TYPE geometry (INPUT = geometry_in, OUTPUT = geometry_out, TYPMOD_IN = varchartypmodin,"
        " TYPMOD_OUT = varchartypmodout, LIKE = text, DELIMITER = ':')"
    ),
    "CREATE TYPE unheard_of",
    "CREATE FUNCTION unheard_of_in(cstring) RETURNS unheard_of AS 'byteain' LANGUAGE internal IMMUTABLE STRICT",
    "CREATE FUNCTION unheard_of_out(unheard_of) RETURNS cstring AS 'byteaout' LANGUAGE internal IMMUTABLE STRICT",
    "CREATE TYPE unheard_of (INPUT = unheard_of_in, OUTPUT = unheard_of_out, LIKE = bytea)",
    "CREATE TABLE kept (n int DEFAULT 7, m int DEFAULT 8); INSERT INTO kept SELECT i % 3, i % 3 FROM generate_series(1, 50) i",
    "CREATE STATISTICS kept_statistics (ndistinct, dependencies, mcv) ON n, m FROM kept; ANALYZE kept",
)  # fmt: skip
EXTENSIONS: Final = ("citext", "cube", "hstore", "isn", "lo", "ltree", "seg", "vector")

# Types that have values only inside an index.
VALUELESS: Final = frozenset(
    {"gtsvector", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary", "public.ghstore", "public.ltree_gist"}
)
FROM_CATALOGS: Final = {
    "pg_node_tree": "(SELECT adbin FROM pg_catalog.pg_attrdef ORDER BY oid LIMIT 1)",
    "pg_ndistinct": "(SELECT stxdndistinct FROM pg_catalog.pg_statistic_ext_data LIMIT 1)",
    "pg_dependencies": "(SELECT stxddependencies FROM pg_catalog.pg_statistic_ext_data LIMIT 1)",
    "pg_mcv_list": "(SELECT stxdmcv FROM pg_catalog.pg_statistic_ext_data LIMIT 1)",
}

_WORDS: Final = ("orders", "kept", "a b", "quo'te", "x")


def _one_of(*texts: str) -> Generator:
    return lambda rng: rng.choice(texts)


def _long_number(rng: Random) -> str:
    """Return a very long number, with many digits on either side of the point."""
    whole, part = rng.choice(((131_072, 0), (1, 16_383), (39, 0), (38, 1), (20, 20), (0, 40)))
    digits = "".join(rng.choices("123456789", k=whole)) or "0"
    return rng.choice(("", "-")) + digits + ("." + "".join(rng.choices("0123456789", k=part)) if part else "")


def _snapshot(rng: Random) -> str:
    low = rng.randint(1, 2**40)
    return f"{low}:{low + 9}:{','.join(str(low + n) for n in sorted(rng.sample(range(9), rng.randint(0, 3))))}"


def _vector(rng: Random, low: int = 0) -> str:
    return " ".join(str(rng.randint(low, 32767)) for _ in range(rng.randint(0, 4)))


def _interval(rng: Random) -> str:
    fields = ("year", "month", "day", "hour", "minute", "second", "microsecond")
    return " ".join(f"{rng.randint(-3000, 3000)} {field}" for field in rng.sample(fields, rng.randint(1, 7)))


def _hstore(rng: Random) -> str:
    texts = ("a", "", "NULL", "=>", 'q"uote', "back\\slash", "comma, space", "é\n", "1")
    return ", ".join(
        f"{quoted(rng.choice(texts))}=>{'NULL' if rng.random() < 0.2 else quoted(rng.choice(texts))}"
        for _ in range(rng.randint(0, 4))
    )


def _ewkb(rng: Random) -> str:
    """Return a point as PostGIS prints one: little endian, with its reference system."""
    return "0101000020E6100000" + rng.randbytes(16).hex().upper()


_TEXT: Final = edged(
    WORKLOAD["text"],
    *("__before", "__exact", '{"__exact":1}', "INEXACT", "(never came)", "\\.", "\\x00", "u", "n", "\ufeff", "\u0085\u2028\u00a0"),
    *("\U0010fffd\U000e0041", "a\u0300\u0301", "\u202e right to left", "x" * 9000, "\ue000\uffff", "%", "''", "\r\n", "\t", "NaN"),
)  # fmt: skip
_DATES: Final = edged(WORKLOAD["date"], "5874897-12-31", "4714-11-24 BC", "0001-12-31 BC")
_MOMENTS: Final = edged(WORKLOAD["timestamp"], "4714-11-24 00:00:00 BC", "294276-12-31 23:59:59.999999")

BASE: Mapping[str, Generator] = {
    **{name: WORKLOAD[name] for name in ("bigint", "boolean", "bytea", "integer", "inet", "json", "jsonb", "macaddr", "macaddr8")},
    **{name: WORKLOAD[name] for name in ("point", "lseg", "path", "box", "polygon", "circle", "line", "smallint", "tsquery", "uuid", "xml")},
    "text": _TEXT,
    "character varying": _TEXT,
    "character": edged(_one_of("a", "b", "é"), " ", ""),
    "name": edged(WORKLOAD["name"], "", "x" * 63, "NULL", "é" * 31),
    "refcursor": _TEXT,
    '"char"': edged(_one_of("a", "b"), "", " ", "\\", "'", "{", ","),
    "bit": _one_of("0", "1"),
    "bit varying": edged(WORKLOAD["varbit"], "", "1" * 200),
    "real": edged(WORKLOAD["real"], "1e-45", "-1e-38", "1.17549435e-38", "3.4028234e38", "0.1", "100000", "1000000"),
    "double precision": edged(WORKLOAD["double precision"], "5e-324", "2.2250738585072009e-308", "1e22", "1e23", "9007199254740993"),
    "numeric": edged(WORKLOAD["numeric"], *map(str, (10**38, -(10**37), "1e131071", "1e-16383"))),
    "money": WORKLOAD["money"],
    "cidr": edged(WORKLOAD["cidr"], "2001:db8::/32", "0.0.0.0/0"),
    "date": _DATES,
    "time without time zone": WORKLOAD["time"],
    "time with time zone": edged(WORKLOAD["timetz"], "00:00:00-15:59:59", "23:59:59.999999+05:30", "12:00:00+00:00:01"),
    "timestamp without time zone": _MOMENTS,
    "timestamp with time zone": edged(WORKLOAD["timestamptz"], "294276-12-31 23:59:59.999999+00", "1883-11-18 12:03:58+00"),
    "interval": edged(_interval, *("0", "-0:00:00.000001", "178000000 years", "P-1Y2M-3DT4H-5M6.789S", "1 day -1 hour")),
    "oid": WORKLOAD["oid"],
    "xid": integers(0, 2**32 - 1),
    "cid": integers(0, 2**32 - 1),
    "xid8": integers(0, 2**64 - 1),
    "tid": lambda rng: f"({rng.getrandbits(32)},{rng.getrandbits(16)})",
    "pg_lsn": edged(WORKLOAD["pg_lsn"], "0/0", "FFFFFFFF/FFFFFFFF"),
    "int2vector": _vector,
    "oidvector": _vector,
    "txid_snapshot": _snapshot,
    "pg_snapshot": _snapshot,
    "tsvector": edged(WORKLOAD["tsvector"], "'a b':1A,2B,16383C 'ü''\\\\':7", "x:1D,3"),
    "jsonpath": _one_of("$", "$.a[*] ? (@.b > 1.50)", 'strict $."odd key"[0 to last]', "$.double().abs()", '$ ? (@ like_regex "^a" flag "i")'),
    "aclitem": _one_of("postgres=arwdDxt/postgres", "=r/postgres", "postgres=r*w*/postgres"),
    "regclass": _one_of("pg_class", "public.kept", 'public."a_table"', "0", "4294967295", "-"),
    "regproc": _one_of("now", "public.geometry_in", "0", "-"),
    "regprocedure": _one_of("lower(text)", "public.geometry_out(public.geometry)", "0"),
    "regoper": _one_of("||/", "0"),
    "regoperator": _one_of("+(integer,integer)", "0", "-(none,bigint)"),
    "regtype": _one_of("integer", "public.mood", "public.spot[]", "timestamp with time zone", "0", "-"),
    "regconfig": _one_of("english", "simple"),
    "regdictionary": _one_of("simple", "english_stem"),
    "regnamespace": _one_of("public", "pg_catalog", "0"),
    "regrole": _one_of("postgres", "0", "pg_monitor"),
    "regcollation": _one_of('"C"', '"default"', "0"),
    "regdatabase": _one_of("postgres", "template1", "0"),
    "public.geometry": _ewkb,
    "public.unheard_of": edged(WORKLOAD["bytea"], "\\x"),
    "public.citext": _TEXT,
    "public.hstore": _hstore,
    "public.lo": integers(0, 2**31 - 1),
    "public.ltree": _one_of("", "Top", "Top.Science.Astronomy", "a.b_1.C"),
    "public.lquery": _one_of("*.Astronomy.*", "Top.*{0,2}.sport*@.!football|tennis.Russ*|Spain", "a|b"),
    "public.ltxtquery": _one_of("Europe & Russia*@ & !Transportation", "a"),
    "public.cube": _one_of("(1, 2.5)", "(0.1, 1e20), (3, 4)", "()", "(1), (2)"),
    "public.seg": _one_of("1.50", "~0.1 .. 7.0", "10(+-)1", "<5", "3 .."),
    "public.ean13": _one_of("9780393040029", "4006381333931"),
    "public.isbn": _one_of("0-393-04002-X"),
    "public.isbn13": _one_of("978-0-393-04002-9"),
    "public.ismn": _one_of("979-0-060-11561-5"),
    "public.ismn13": _one_of("979-0-060-11561-5"),
    "public.issn": _one_of("1436-4522"),
    "public.issn13": _one_of("9771436452008"),
    "public.upc": _one_of("220356483481"),
    "public.vector": _one_of("[1,2.5,-3]", "[0]", "[1e-7,3.4e38]"),
    "public.halfvec": _one_of("[1,2.5,-3]", "[65504]"),
    "public.sparsevec": _one_of("{1:1,3:2.5}/5", "{}/3"),
}  # fmt: skip

# Domains with a check that only few of their base's values pass.
_DOMAINS: Mapping[str, Generator] = {
    "information_schema.yes_or_no": _one_of("YES", "NO"),
    "information_schema.cardinal_number": integers(0, 2**31 - 1),
    "public.amount": edged(lambda rng: f"{rng.randint(-(10**6), 10**6)}.{rng.randrange(100):02d}", "0", "0.01"),
}
# Types declared with a modifier; PostgreSQL rounds and cuts the values.
MODIFIED: Mapping[str, str] = {
    "numeric(12,2)": "numeric(12,2)",
    "numeric(38,10)": "numeric(38,10)",
    "numeric(60,20)": "numeric(60,20)",
    "numeric(12,2)[]": "numeric(12,2)[]",
    "numeric(60,20)[]": "numeric(12,2)[]",
    "varchar(60)": "varchar(60)",
    "char(9)": "char(9)",
    "char(3)[]": "char(3)[]",
    "timestamp(3)": "timestamp(3)",
    "timestamptz(0)": "timestamptz",
    "timestamp(2)[]": "timestamp[]",
    "time(2)": "time",
    "interval(3)": "interval",
    "interval year to month": "interval",
    "bit(5)": "bit(5)",
}
"""The type of `testing.workloads._values` whose values a declared type takes."""
MODIFIED_15: Mapping[str, Generator] = {
    "numeric(3,-2)": _one_of("0", "99900", "-100", "NaN"),
    "numeric(2,4)": _one_of("0", "0.0099", "-0.0001", "NaN"),
    "numeric(1,1000)": _one_of("0", "9e-1000"),
    "numeric(2,-3)[]": _one_of("{1000,NULL}", "{}", "{NaN}"),
}


@dataclass(frozen=True)
class ServerType:
    """A type, as `pg_type` has it."""

    oid: int
    name: str
    """`format_type(oid, NULL)`, with the schema unless that is pg_catalog."""
    kind: str
    """`b`ase, `a`rray, `c`omposite, `d`omain, `e`num, `r`ange, `m`ultirange."""
    part: int
    """The element of an array, the base of a domain, the subtype of a range, the range of a multirange."""
    delimiter: str
    labels: tuple[str, ...]
    attributes: tuple[int, ...]
    system_row: bool
    """Whether it is the row type of a table or view of PostgreSQL itself, or an array of such a type."""


_TYPES: Final = """
SELECT t.oid::int8, format_type(t.oid, NULL),
       CASE WHEN e.oid IS NOT NULL THEN 'a' ELSE t.typtype::text END,
       coalesce(e.oid, nullif(t.typbasetype, 0), r.rngsubtype, m.rngtypid, 0)::int8,
       coalesce(e.typdelim, t.typdelim)::text,
       ARRAY(SELECT enumlabel::text FROM pg_enum WHERE enumtypid = t.oid ORDER BY enumsortorder),
       ARRAY(SELECT atttypid::int8 FROM pg_attribute WHERE attrelid = t.typrelid AND attnum > 0 AND NOT attisdropped ORDER BY attnum),
       coalesce(e.typrelid, t.typrelid) BETWEEN 1 AND 16383
  FROM pg_type t
  LEFT JOIN pg_type e ON e.typarray = t.oid
  LEFT JOIN pg_range r ON r.rngtypid = t.oid
  LEFT JOIN pg_range m ON m.rngmultitypid = t.oid
 WHERE t.typtype <> 'p' AND t.typisdefined AND t.typnamespace <> 'pg_toast'::regnamespace
 ORDER BY t.oid
"""


class ServerTypes:
    """The types of a server, in the order of their oids."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        rows = connection.execute(_TYPES).fetchall()
        self._types = {row[0]: ServerType(*row[:5], tuple(row[5]), tuple(row[6]), row[7]) for row in rows}

    def __iter__(self) -> Iterator[ServerType]:
        return iter(self._types.values())

    def get(self, oid: int) -> ServerType | None:
        """Return the type; None for a pseudo-type."""
        return self._types.get(oid)

    def generator(self, type_: ServerType | None) -> Generator | None:
        """Return a generator of texts of the type, or None if no text is a value of it."""
        if type_ is None or type_.name in VALUELESS or type_.name in FROM_CATALOGS:
            return None
        if type_.name in _DOMAINS:
            return _DOMAINS[type_.name]
        part = self.generator(self.get(type_.part)) if type_.part else None
        match type_.kind:
            case "a":
                return partial(_array, part, type_.delimiter)
            case "c":
                return partial(_composite, [self.generator(self.get(oid)) for oid in type_.attributes])
            case "e":
                return lambda rng: rng.choice(type_.labels)
            case "r":
                assert part is not None
                return partial(_range, part)
            case "m":
                assert part is not None
                return lambda rng: "{" + ",".join(part(rng) for _ in range(rng.randint(0, 3))) + "}"
            case "d":
                return part
        assert type_.name in BASE, f"no values of {type_.name} are known: give it a line in tests/capture/every_type.py"
        return BASE[type_.name]

    def columns(self) -> dict[str, Callable[[Random], sql.Composable]]:
        """Return the declared types of columns, each with a generator of expressions of its type."""
        found = {type_.name: partial(self.expression, type_) for type_ in self}
        for name, generator in self.modified().items():
            found[name] = partial(_cast, generator, name)
        return found

    def modified(self) -> dict[str, Generator]:
        """Return the types with a modifier."""
        newer = MODIFIED_15 if self._connection.info.server_version >= 150000 else {}
        return {**{name: WORKLOAD.get(of) or BASE[of] for name, of in MODIFIED.items()}, **newer}

    def expression(self, type_: ServerType, rng: Random) -> sql.Composable:
        """Return a value, or NULL, as an expression."""
        if type_.name in FROM_CATALOGS:
            return sql.SQL(FROM_CATALOGS[type_.name])
        generator = self.generator(type_)
        if generator is None or rng.random() < 0.1:
            return sql.NULL
        if type_.name == "numeric" and rng.random() < 0.1:
            generator = _long_number
        return _cast(generator, type_.name, rng)

    def draw(self, expression: Callable[[Random], sql.Composable], rng: Random) -> sql.Composable:
        """Return an expression that the server accepts: bounds of a range may be drawn in the wrong order."""
        for _ in range(50):
            found = expression(rng)
            try:
                self._connection.execute(sql.SQL("SELECT ({}) IS NULL").format(found))
            except psycopg.errors.FeatureNotSupported:
                return sql.NULL  # xml, if the server was built without it
            except psycopg.DataError:
                continue
            return found
        raise AssertionError(f"nothing of fifty is a value: the last was {found.as_string(self._connection)[:200]}")


def _cast(generator: Generator, name: str, rng: Random) -> sql.Composable:
    return sql.SQL("{}::{}").format(sql.Literal(generator(rng)), sql.SQL(name))


def _array(part: Generator | None, delimiter: str, rng: Random) -> str:
    def element() -> str:
        return "NULL" if part is None or rng.random() < 0.2 else quoted(part(rng))

    def level(sizes: list[int]) -> str:
        return "{" + delimiter.join(level(sizes[1:]) if sizes[1:] else element() for _ in range(sizes[0])) + "}"

    sizes = rng.choice(([rng.randint(1, 4)], [rng.randint(1, 4)], [2, 2], [1, 1, 2], [0]))
    if sizes == [0]:
        return "{}"
    if rng.random() < 0.25:
        lows = [rng.randint(-3, 9) for _ in sizes]
        return "".join(f"[{low}:{low + size - 1}]" for low, size in zip(lows, sizes, strict=True)) + "=" + level(sizes)
    return level(sizes)


def _composite(parts: list[Generator | None], rng: Random) -> str:
    texts = ("" if part is None or rng.random() < 0.3 else quoted(part(rng)) for part in parts)
    return "(" + ",".join(texts) + ")"


def _range(part: Generator, rng: Random) -> str:
    one, other = quoted(part(rng)), quoted(part(rng))
    return rng.choice(
        (
            *("empty", "(,)", f"({one},{one})", f"[{one},)", f"({one},]", f"[,{one}]", f"(,{one})", f"[{one},{one}]"),
            *(f"[{one},{other}]", f"[{one},{other})", f"({one},{other}]", f"({one},{other})"),
        )
    )
