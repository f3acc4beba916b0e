"""PostgreSQL's types and their columns: the Arrow type in the log, and the one in the lake.

Relation messages give a column's type as (oid, modifier). Only built-in oids mean the same
everywhere. A domain, an enum or an extension's type is text, and so is each type without an exact
column type. docs/reference/types.md holds the same table in words, and a test compares the two. `model.exact_values` parses and
renders each type; `codec.pgoutput._columns_to_arrow` has the fast parsers.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

from millstream.errors import ConfigError
from millstream.model.records import INSTANT
from millstream.model.schema import Column, PgType

DECIMAL_DIGITS_MAX: Final = 38

# oid: (format_type(oid, NULL), oid of its array type or 0). From pg_type of PostgreSQL 18; older
# versions have the same oids.
_BUILTIN: Final[dict[int, tuple[str, int]]] = {
    16: ("boolean", 1000),
    17: ("bytea", 1001),
    18: ('"char"', 1002),
    19: ("name", 1003),
    20: ("bigint", 1016),
    21: ("smallint", 1005),
    22: ("int2vector", 1006),
    23: ("integer", 1007),
    24: ("regproc", 1008),
    25: ("text", 1009),
    26: ("oid", 1028),
    27: ("tid", 1010),
    28: ("xid", 1011),
    29: ("cid", 1012),
    30: ("oidvector", 1013),
    114: ("json", 199),
    142: ("xml", 143),
    194: ("pg_node_tree", 0),
    600: ("point", 1017),
    601: ("lseg", 1018),
    602: ("path", 1019),
    603: ("box", 1020),
    604: ("polygon", 1027),
    628: ("line", 629),
    650: ("cidr", 651),
    700: ("real", 1021),
    701: ("double precision", 1022),
    718: ("circle", 719),
    774: ("macaddr8", 775),
    790: ("money", 791),
    829: ("macaddr", 1040),
    869: ("inet", 1041),
    1033: ("aclitem", 1034),
    1042: ("character", 1014),
    1043: ("character varying", 1015),
    1082: ("date", 1182),
    1083: ("time without time zone", 1183),
    1114: ("timestamp without time zone", 1115),
    1184: ("timestamp with time zone", 1185),
    1186: ("interval", 1187),
    1266: ("time with time zone", 1270),
    1560: ("bit", 1561),
    1562: ("bit varying", 1563),
    1700: ("numeric", 1231),
    1790: ("refcursor", 2201),
    2202: ("regprocedure", 2207),
    2203: ("regoper", 2208),
    2204: ("regoperator", 2209),
    2205: ("regclass", 2210),
    2206: ("regtype", 2211),
    2950: ("uuid", 2951),
    2970: ("txid_snapshot", 2949),
    3220: ("pg_lsn", 3221),
    3361: ("pg_ndistinct", 0),
    3402: ("pg_dependencies", 0),
    3614: ("tsvector", 3643),
    3615: ("tsquery", 3645),
    3642: ("gtsvector", 3644),
    3734: ("regconfig", 3735),
    3769: ("regdictionary", 3770),
    3802: ("jsonb", 3807),
    3904: ("int4range", 3905),
    3906: ("numrange", 3907),
    3908: ("tsrange", 3909),
    3910: ("tstzrange", 3911),
    3912: ("daterange", 3913),
    3926: ("int8range", 3927),
    4072: ("jsonpath", 4073),
    4089: ("regnamespace", 4090),
    4096: ("regrole", 4097),
    4191: ("regcollation", 4192),
    4451: ("int4multirange", 6150),
    4532: ("nummultirange", 6151),
    4533: ("tsmultirange", 6152),
    4534: ("tstzmultirange", 6153),
    4535: ("datemultirange", 6155),
    4536: ("int8multirange", 6157),
    4600: ("pg_brin_bloom_summary", 0),
    4601: ("pg_brin_minmax_multi_summary", 0),
    5017: ("pg_mcv_list", 0),
    5038: ("pg_snapshot", 5039),
    5069: ("xid8", 271),
}
_ELEMENT: Final[dict[int, int]] = {array: oid for oid, (_, array) in _BUILTIN.items() if array}

NUMERIC_OID: Final = 1700

_TYPED: Final[dict[int, pa.DataType]] = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: INSTANT,
    # Types that are text by nature: they have columns of their own, and their arrays are lists.
    19: pa.string(),
    25: pa.string(),
    114: pa.string(),
    142: pa.string(),
    1042: pa.string(),
    1043: pa.string(),
    2950: pa.string(),
    3802: pa.string(),
}


_OF_LENGTH: Final = frozenset({1042, 1043})
"""`char` and `varchar`: their modifier is the length and that of a varlena's head."""
_LENGTH_WORD: Final = 4


def builtin_name(oid: int) -> str | None:
    """Return `format_type(oid, NULL)` of a built-in type or an array of one; None for every other type."""
    if oid in _BUILTIN:
        return _BUILTIN[oid][0]
    element = _ELEMENT.get(oid)
    return None if element is None else f"{_BUILTIN[element][0]}[]"


def element_oid(oid: int) -> int | None:
    """Return the element type of a built-in array type; None for every other type."""
    return _ELEMENT.get(oid)


def numeric_precision(modifier: int) -> tuple[int, int] | None:
    """Return (precision, scale) of a numeric column's modifier; None if it has none.

    The scale may be negative (15+).
    """
    if modifier < 4:
        return None
    packed = modifier - 4
    # make_numeric_typmod in numeric.c: 16 bits of precision, then the scale as an 11-bit two's complement.
    return (packed >> 16) & 0xFFFF, ((packed & 0x7FF) ^ 0x400) - 0x400


def type_in_words(pg: PgType) -> str:
    """Return a type as PostgreSQL prints it, with the bounds of a numeric, `varchar` or `char`: `numeric(12,2)[]`."""
    name = pg.name.removesuffix("[]")
    oid, brackets = element_oid(pg.oid) or pg.oid, pg.name[len(name) :]
    if oid == NUMERIC_OID and (found := numeric_precision(pg.modifier)) is not None:
        return f"{name}({found[0]},{found[1]}){brackets}"
    if oid in _OF_LENGTH and pg.modifier >= _LENGTH_WORD:
        return f"{name}({pg.modifier - _LENGTH_WORD}){brackets}"
    return pg.name


def _decimal(modifier: int) -> pa.DataType | None:
    """Return the decimal that holds every finite value of such a numeric column; None if there is none."""
    found = numeric_precision(modifier)
    if found is None:
        return None
    precision, scale = found
    # numeric(3,-2) holds up to 99900: five digits. numeric(2,4) holds up to 0.0099: four digits behind the point.
    digits = max(precision - min(scale, 0), scale)
    return pa.decimal128(digits, max(scale, 0)) if 1 <= digits <= DECIMAL_DIGITS_MAX else None


def log_type(oid: int, modifier: int) -> pa.DataType:
    """Return the Arrow type of a column in the log: the type's own Arrow type if that is exact, else `string`."""
    element = _ELEMENT.get(oid)
    if element is not None:
        inner = _scalar(element, modifier)
        return pa.string() if inner is None else pa.list_(inner)
    inner = _scalar(oid, modifier)
    return pa.string() if inner is None else inner


def _scalar(oid: int, modifier: int) -> pa.DataType | None:
    return _decimal(modifier) if oid == NUMERIC_OID else _TYPED.get(oid)


def is_text_for_want_of_better(column: Column) -> bool:
    """Whether a column is text in the log although PostgreSQL's type isn't: `init` and `doctor` list these."""
    pg = column.pg
    return pg is not None and pa.types.is_string(column.arrow) and _scalar(pg.oid, pg.modifier) is None


_OVERRIDE: Final = re.compile(r"(?:decimal|numeric)\(\s*(\d{1,2})\s*(?:,\s*(\d{1,2})\s*)?\)\Z")


def parse_lake_override(text: str) -> pa.DataType:
    """Return the type that `[streams.S.types]` asks for: `decimal(p,s)` or `text`.

    Raises:
        ConfigError: anything else.
    """
    body = text.strip().lower()
    if body in {"text", "string"}:
        return pa.string()
    found = _OVERRIDE.match(body)
    if found is not None:
        precision, scale = int(found[1]), int(found[2] or 0)
        if 1 <= precision <= DECIMAL_DIGITS_MAX and scale <= precision:
            return pa.decimal128(precision, scale)
    raise ConfigError(
        f"{text!r} is not a type that a lake column can be given",
        hint="Write decimal(p,s) with p up to 38 and s up to p, or text.",
        type=text,
    )


def lake_type(column: Column, override: str | None = None) -> pa.DataType:
    """Return the Arrow type of a column in the lake: the log's, unless the configuration asks for another.

    Raises:
        ConfigError: the override is no type, or doesn't fit the column (a decimal for a column that isn't numeric).
    """
    if override is None:
        return column.arrow
    wanted = parse_lake_override(override)
    if pa.types.is_string(wanted) or wanted == column.arrow:
        return wanted
    if pa.types.is_decimal(column.arrow) or pa.types.is_integer(column.arrow) or is_numeric_text(column):
        return wanted
    raise ConfigError(
        f"column {column.name} can't be {override} in the lake: it is {'text' if column.pg is None else column.pg.name}",
        hint="A decimal may be asked for numeric and integer columns only.",
        column=column.name,
    )


def is_numeric_text(column: Column) -> bool:
    """Return whether a column has PostgreSQL's texts of numerics: those without a precision, or with one beyond 38 digits."""
    return column.pg is not None and column.pg.oid == NUMERIC_OID and pa.types.is_string(column.arrow)
