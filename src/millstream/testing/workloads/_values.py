"""Values of every PostgreSQL type as text that PostgreSQL parses, ordinary ones and edge cases.

A generator takes a `random.Random` and returns text to be cast to its type. The result depends on nothing
else.
"""

import json
from collections.abc import Callable, Mapping
from random import Random

Generator = Callable[[Random], str]

_EDGE_SHARE = (
    0.3  # share of edge cases in each type's values: enough that a table of some hundred rows has each of them
)

_STRANGE_TEXTS = (
    "",
    "NULL",
    "null",
    "\\N",
    "\\",
    "'quoted' \"twice\"",
    "tab\tnewline\ncarriage\rreturn",
    "\x01\x7f\b\f\v",
    "ünïcödé ß 漢字 \U0001f980 e\u0301",
    "{}",
    "__unchanged",
    " leading and trailing ",
    "a,b;c|d",
    "%s $1 ${HOME}",
)
_STRANGE_JSON = (
    '{"a": 1, "a": 2}',
    "null",
    '"text"',
    "[]",
    "{}",
    "12345678901234567890123456789012345678901234567890.1234567890",
    "1e-300",
    '{"nested": [1, {"deep": [null, true, "\\u00e9\\n"]}], "": ""}',
    '  { "spaces" :  "kept"  } ',
)
_WORDS = [
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "echo",
    "foxtrot",
    "golf",
    "hotel",
    "india",
    "juliett",
    "kilo",
    "lima",
    "mike",
    "november",
]


def edged(ordinary: Generator, *edges: str) -> Generator:
    """Return a generator that mostly draws from `ordinary`, at times one of the edges."""
    return lambda rng: rng.choice(edges) if edges and rng.random() < _EDGE_SHARE else ordinary(rng)


def integers(low: int, high: int) -> Generator:
    """Return a generator of integers between two bounds, with these and zero among them."""
    return edged(lambda rng: str(rng.randint(low, high)), str(low), str(high), "0")


def words(count: int = 4) -> Generator:
    """Return a generator of a few words."""
    return lambda rng: " ".join(rng.choices(_WORDS, k=rng.randint(1, count)))


def wide_text(low: int, high: int) -> Generator:
    """Return a generator of incompressible text of that many characters: wide enough to be stored out of line."""
    return lambda rng: f"{rng.getrandbits(4 * rng.randint(low, high)):x}"


def _decimal(digits: int, scale: int) -> Generator:
    def draw(rng: Random) -> str:
        number = rng.randrange(10 ** rng.randint(1, digits))
        text = str(number).rjust(scale + 1, "0")
        body = f"{text[:-scale]}.{text[-scale:]}" if scale else text
        return rng.choice(("", "-")) + body

    return draw


def _date(rng: Random) -> str:
    return f"{rng.randint(1, 9999):04d}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _time(rng: Random) -> str:
    fraction = rng.choice(("", f".{rng.randrange(1_000_000):06d}", f".{rng.randrange(1000):03d}"))
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}{fraction}"


def _moment(rng: Random) -> str:
    return f"{rng.randint(1900, 2100)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d} {_time(rng)}"


def _uuid(rng: Random) -> str:
    return f"{rng.getrandbits(128):032x}"


def _bytes(rng: Random) -> str:
    return "\\x" + rng.randbytes(rng.randrange(40)).hex()


def _json(rng: Random) -> str:
    return json.dumps({"n": rng.randrange(10**6), "tags": rng.sample(_WORDS, 2), "on": rng.random() < 0.5})


def _address(rng: Random) -> str:
    return ".".join(str(rng.randrange(256)) for _ in range(4))


def _pair(rng: Random) -> str:
    return f"({rng.uniform(-180, 180)!r},{rng.uniform(-90, 90)!r})"


def _range(one: Generator, order: Callable[[str], float]) -> Generator:
    def draw(rng: Random) -> str:
        low, high = sorted((one(rng), one(rng)), key=order)
        return rng.choice("[(") + rng.choice((low, "")) + "," + rng.choice((high, "")) + rng.choice("])")

    return draw


def quoted(text: str) -> str:
    """Return an element of an array (or field of a row) in quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def array_of(one: Generator, *edges: str) -> Generator:
    """Return a generator of arrays of one dimension, with some null elements."""

    def draw(rng: Random) -> str:
        items = ("NULL" if rng.random() < 0.15 else quoted(one(rng)) for _ in range(rng.randrange(5)))
        return "{" + ",".join(items) + "}"

    return edged(draw, "{}", "{NULL}", *edges)


_small = lambda rng: str(rng.randint(-1000, 1000))  # noqa: E731 - one of many generators
_float = edged(
    lambda rng: repr(rng.uniform(-1, 1) * 10.0 ** rng.randint(-20, 20)),
    *("NaN", "Infinity", "-Infinity", "-0", "0", "0.1", "1e15", "123456789012345.6", "4.94065645841247e-324"),
    *("1.7976931348623157e308", "0.0001", "0.00001", "22538068976063392"),
)
_real = edged(
    lambda rng: repr(rng.uniform(-1, 1) * 10.0 ** rng.randint(-20, 20)),
    *("NaN", "Infinity", "-Infinity", "-0", "0.1", "1e6", "999999", "16777216", "1.4e-45", "3.4028235e38", "61691168"),
)
_numeric = edged(
    _decimal(20, 5),
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "0",
        "0.000",
        "1.50",
        "1e-100",
        "12345678901234567890123456789012345678.9",
        "-1e50",
    ),
    *(
        "99999999999999999999999999999999999999999999.00000000000000000001",
        "0.1000000000000000000000000000000000000000",
    ),
)
_dates = edged(
    _date,
    *("infinity", "-infinity", "0044-03-15 BC", "4713-01-01 BC", "5874897-12-31", "0001-01-01", "9999-12-31"),
    *("10000-01-01", "1582-10-10", "1969-12-31", "2024-02-29"),
)
_moments = edged(
    _moment,
    *("infinity", "-infinity", "0044-03-15 12:00:00.000001 BC", "294276-12-31 23:59:59.999999", "0001-01-01 00:00:00"),
    *("9999-12-31 23:59:59.999999", "1969-12-31 23:59:59.999999", "1582-10-10 10:10:10", "1883-11-18 12:03:57.5"),
)
_texts = edged(words(), *_STRANGE_TEXTS)

ENUM = ("sad", "ok", "happy", "très content", "with space", 'quo"te')

# By the type's SQL name. The order is that of a table's columns.
VALUES: Mapping[str, Generator] = {
    "smallint": integers(-(2**15), 2**15 - 1),
    "integer": integers(-(2**31), 2**31 - 1),
    "bigint": integers(-(2**63), 2**63 - 1),
    "boolean": lambda rng: rng.choice(("true", "false")),
    "real": _real,
    "double precision": _float,
    "text": _texts,
    "varchar(60)": _texts,
    "char(9)": edged(lambda rng: rng.choice(_WORDS), "", "  x", "123456789"),
    '"char"': lambda rng: rng.choice("abc"),
    "name": words(2),
    "date": _dates,
    "timestamp": _moments,
    "timestamp(3)": _moments,
    "timestamptz": edged(
        lambda rng: f"{_moment(rng)}{rng.randint(-12, 12):+03d}", "infinity", "-infinity", "0044-03-15 12:00+00 BC"
    ),
    "time": edged(_time, "24:00:00", "00:00:00", "23:59:59.999999"),
    "timetz": edged(lambda rng: f"{_time(rng)}{rng.randint(-12, 12):+03d}", "24:00:00-07", "00:00:00+15:59:59"),
    "interval": edged(
        lambda rng: f"{rng.randint(-50, 50)} mon {rng.randint(-50, 50)} day {rng.randint(-90000, 90000) / 8} sec",
        *("0", "1 mon -1 day +00:00:00.000001", "-178000000 years", "1000000 hours", "P1Y2M3DT4H5M6.7S"),
    ),
    "bytea": edged(_bytes, "\\x", "\\x00", "\\xff00ff"),
    "uuid": edged(_uuid, "0" * 32, "f" * 32),
    "json": edged(_json, *_STRANGE_JSON),
    "jsonb": edged(_json, *_STRANGE_JSON),
    "numeric": _numeric,
    "numeric(12,2)": edged(_decimal(12, 2), "NaN", "0", "-9999999999.99"),
    "numeric(38,10)": edged(_decimal(38, 10), "NaN", "9" * 28 + "." + "9" * 10),
    "numeric(60,20)": edged(_decimal(60, 20), "NaN", "9" * 40),
    "money": edged(lambda rng: f"{rng.uniform(-1e6, 1e6):.2f}", "-92233720368547758.08", "92233720368547758.07"),
    "inet": edged(_address, "::1", "2001:db8::1/64", "10.0.0.0/8"),
    "cidr": edged(lambda rng: f"10.{rng.randrange(256)}.0.0/16", "::/0", "192.0.2.1/32"),
    "macaddr": lambda rng: rng.randbytes(6).hex(":"),
    "macaddr8": lambda rng: rng.randbytes(8).hex(":"),
    "bit(5)": lambda rng: f"{rng.getrandbits(5):05b}",
    "varbit": edged(lambda rng: f"{rng.getrandbits(20):b}", ""),
    "tsvector": edged(
        lambda rng: " ".join(f"{w}:{rng.randint(1, 9)}A" for w in rng.sample(_WORDS, 3)), "", "'it''s':1"
    ),
    "tsquery": lambda rng: " & ".join(rng.sample(_WORDS, 2)),
    "point": edged(_pair, "(NaN,Infinity)"),
    "lseg": lambda rng: f"[{_pair(rng)},{_pair(rng)}]",
    "box": lambda rng: f"{_pair(rng)},{_pair(rng)}",
    "path": lambda rng: f"[{_pair(rng)},{_pair(rng)}]",
    "polygon": lambda rng: f"({_pair(rng)},{_pair(rng)},{_pair(rng)})",
    "circle": lambda rng: f"<{_pair(rng)},{rng.uniform(0, 9)!r}>",
    "line": lambda rng: f"{{1,{rng.randint(-9, 9)},{rng.randint(-9, 9)}}}",
    "int4range": edged(_range(_small, float), "empty", "(,)"),
    "numrange": edged(_range(_decimal(9, 3), float), "empty", "[1.50,1.500]"),
    "tstzrange": edged(lambda rng: f'["{rng.randint(1900, 1999)}-01-01 00:00+00",infinity)', "empty"),
    "int4multirange": lambda rng: f"{{[1,{rng.randint(2, 9)}),[{rng.randint(20, 29)},30)}}",
    "pg_lsn": lambda rng: f"{rng.getrandbits(32):X}/{rng.getrandbits(32):X}",
    "oid": integers(0, 2**32 - 1),
    "public.mood": lambda rng: rng.choice(ENUM),
    "public.spot": lambda rng: f"({rng.randint(-9, 9)},{quoted(rng.choice(_STRANGE_TEXTS))},)",
    "public.short_text": lambda rng: rng.choice(_WORDS),
    "public.amount": _decimal(10, 2),
    "smallint[]": array_of(integers(-(2**15), 2**15 - 1)),
    "integer[]": array_of(_small, "{{1,2},{3,4}}", "[0:1]={5,6}", "[-1:0][2:3]={{1,NULL},{3,4}}"),
    "bigint[]": array_of(integers(-(2**63), 2**63 - 1)),
    "boolean[]": array_of(lambda rng: rng.choice("tf")),
    "double precision[]": array_of(_float),
    "real[]": array_of(_real),
    "text[]": array_of(_texts, '{{"a b",NULL},{"",","}}'),
    "numeric(12,2)[]": array_of(_decimal(12, 2), "{NaN,1.50}"),
    "numeric[]": array_of(_numeric),
    "date[]": array_of(_dates),
    "timestamp[]": array_of(_moments),
    "timestamptz[]": array_of(lambda rng: f"{_moment(rng)}+00", "{infinity}"),
    "bytea[]": array_of(_bytes),
    "uuid[]": array_of(_uuid),
    "jsonb[]": array_of(_json),
    "char(3)[]": array_of(lambda rng: rng.choice("abc")),
    "public.mood[]": array_of(lambda rng: rng.choice(ENUM)),
    "public.spot[]": array_of(lambda rng: f"({rng.randint(0, 9)},x,)"),
    "xml": lambda rng: f"<a b='{rng.randrange(9)}'>{rng.choice(_WORDS)} &amp; <c/></a>",
}

_LABELS = ", ".join(f"'{label}'" for label in ENUM)
CREATE_TYPES = (
    f"CREATE TYPE public.mood AS ENUM ({_LABELS})",
    "CREATE TYPE public.spot AS (x integer, label text, note text)",
    "CREATE DOMAIN public.short_text AS text CHECK (length(value) < 100)",
    "CREATE DOMAIN public.amount AS numeric(10,2)",
)
