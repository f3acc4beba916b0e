"""Types: their form in the log and in the lake, as the reference page lists them."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.errors import ConfigError
from millstream.model.pgtypes import (
    builtin_name,
    element_oid,
    is_text_for_want_of_better,
    lake_type,
    log_type,
    numeric_precision,
    parse_lake_override,
    type_in_words,
)
from millstream.model.schema import Column, PgType
from millstream.testing.pytest_plugin import Database

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "types.md"


def numeric(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


def test_built_in_names_and_arrays_are_postgresqls(postgres: Database):
    with postgres.connect() as connection:
        rows = connection.execute(
            "SELECT oid::int, format_type(oid, NULL), typelem::int, typcategory FROM pg_type WHERE oid < 10000 AND typtype <> 'p'"
        ).fetchall()
    assert len(rows) > 100
    for oid, name, element, category in rows:
        known = builtin_name(oid)
        if known is not None:
            assert known == name
            if category == "A" and name.endswith("[]"):
                assert element_oid(oid) == element


@pytest.mark.parametrize(
    ("modifier", "kind"),
    [
        (-1, pa.string()),
        (numeric(12, 2), pa.decimal128(12, 2)),
        (numeric(38, 0), pa.decimal128(38, 0)),
        (numeric(39, 0), pa.string()),
        (numeric(2, 4), pa.decimal128(4, 4)),
        (numeric(3, -2), pa.decimal128(5, 0)),
        (numeric(38, -1), pa.string()),
        (numeric(1000, 1000), pa.string()),
        (numeric(1, -1000), pa.string()),
    ],
)
def test_a_numeric_column_is_the_decimal_that_holds_all_its_values(modifier: int, kind: pa.DataType):
    assert log_type(1700, modifier) == kind
    assert log_type(1231, modifier) == (pa.string() if pa.types.is_string(kind) else pa.list_(kind))


def test_modifiers_of_numeric_are_read_as_postgresql_reads_them(postgres: Database):
    with postgres.connect() as connection:
        new = connection.info.server_version >= 150000
        wanted = [(1, 0), (12, 2), (38, 38), (1000, 0)] + ([(3, -2), (2, 4), (1, -1000), (1, 1000)] if new else [])
        columns = ", ".join(f"c{n} numeric({p},{s})" for n, (p, s) in enumerate(wanted))
        connection.execute(f"CREATE TABLE t ({columns})")
        found = connection.execute(
            "SELECT atttypmod FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 ORDER BY attnum"
        ).fetchall()
    assert [numeric_precision(modifier) for (modifier,) in found] == wanted
    assert numeric_precision(-1) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("decimal(38,9)", pa.decimal128(38, 9)),
        (" DECIMAL(10) ", pa.decimal128(10, 0)),
        ("numeric(5, 5)", pa.decimal128(5, 5)),
        ("text", pa.string()),
        ("string", pa.string()),
    ],
)
def test_overrides_are_read(text: str, kind: pa.DataType):
    assert parse_lake_override(text) == kind


@pytest.mark.parametrize(
    "text", ["", "decimal", "decimal(39,0)", "decimal(0,0)", "decimal(3,4)", "double", "decimal(3,-1)"]
)
def test_what_is_no_override_is_a_configuration_error(text: str):
    with pytest.raises(ConfigError):
        parse_lake_override(text)


@pytest.mark.parametrize(
    ("pg", "words"),
    [
        (PgType(1700, ((12 << 16) | 2) + 4, "numeric"), "numeric(12,2)"),
        (PgType(1231, ((12 << 16) | 2) + 4, "numeric[]"), "numeric(12,2)[]"),
        (PgType(1700, -1, "numeric"), "numeric"),
        (PgType(1043, 84, "character varying"), "character varying(80)"),
        (PgType(1043, -1, "character varying"), "character varying"),
        (PgType(1042, 7, "character"), "character(3)"),
        (PgType(23, -1, "integer"), "integer"),
    ],
)
def test_a_type_has_its_bounds_in_words(pg: PgType, words: str):
    assert type_in_words(pg) == words


def test_a_decimal_can_be_asked_for_numbers_only():
    unconstrained = Column("n", pa.string(), PgType(1700, -1, "numeric"))
    assert lake_type(unconstrained) == pa.string()
    assert lake_type(unconstrained, "decimal(38,9)") == pa.decimal128(38, 9)
    assert lake_type(Column("i", pa.int64(), PgType(20, -1, "bigint")), "decimal(20,0)") == pa.decimal128(20, 0)
    assert lake_type(Column("d", pa.date32(), PgType(1082, -1, "date")), "text") == pa.string()
    with pytest.raises(ConfigError, match="n can't be"):
        lake_type(Column("n", pa.string(), PgType(25, -1, "text")), "decimal(38,9)")


def test_columns_that_are_text_for_want_of_better_are_told_apart():
    assert is_text_for_want_of_better(Column("m", pa.string(), PgType(790, -1, "money")))
    assert is_text_for_want_of_better(Column("n", pa.string(), PgType(1700, -1, "numeric")))
    assert not is_text_for_want_of_better(Column("t", pa.string(), PgType(25, -1, "text")))
    assert not is_text_for_want_of_better(Column("u", pa.string(), PgType(2950, -1, "uuid")))


ARROW_NAMES = {
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "date32": pa.date32(),
    "timestamp[us]": pa.timestamp("us"),
    "timestamp[us, UTC]": pa.timestamp("us", "UTC"),
    "binary": pa.binary(),
    "decimal128(p, s)": pa.decimal128(12, 2),
}


def told_types() -> dict[str, str]:
    """Return the types that have a row in the reference page, with their form in the log."""
    told: dict[str, str] = {}
    for line in PAGE.read_text().partition("## What applications append")[0].splitlines():
        found = re.match(r"\| (`.*?) \| `(.*?)` \|", line)
        if found is not None:
            for name in re.findall(r"`(.*?)`", found[1]):
                told[name] = found[2]
    return told


def test_every_type_of_the_server_has_a_row_in_the_reference_page(postgres: Database):
    """A type made of others is there through its parts: the page covers arrays, enums, domains and composites."""
    with postgres.connect() as connection:
        told = {
            connection.execute("SELECT %s::regtype::oid::int", [re.sub(r"\(.*?\)", "", name)]).fetchone()[0]
            for name in told_types()
        }
        rows = connection.execute(
            "SELECT t.oid::int, t.oid::regtype::text, log.kind FROM pg_type t, LATERAL (SELECT CASE"
            " WHEN EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid) THEN 'array' WHEN t.typtype = 'c' THEN 'composite'"
            " WHEN t.typtype = 'd' THEN 'domain' WHEN t.typtype = 'e' THEN 'enum' END) log (kind)"
            " WHERE t.typtype <> 'p' AND t.oid < 16384"
        ).fetchall()
    plain = {name: oid for oid, name, kind in rows if kind is None}
    assert len(plain) > 75
    assert sorted(name for name, oid in plain.items() if oid not in told) == []
    page = " ".join(PAGE.read_text().split())
    assert "An array of one of these types is a list" in page
    assert "Enums, domains, composites (including row types of tables), the types of extensions" in page
    for oid, name, kind in rows:
        if kind in {"composite", "domain", "enum"}:
            assert log_type(oid, -1) == pa.string(), name


def test_the_reference_page_says_what_the_code_does(postgres: Database):
    told = told_types()
    assert len(told) > 40
    with postgres.connect() as connection:
        for name, arrow in told.items():
            declared = name.replace("(p,s)", "(12,2)").replace("(n)", "(9)")
            oid = connection.execute("SELECT %s::regtype::oid::int", [re.sub(r"\(.*?\)", "", declared)]).fetchone()[0]
            modifier = numeric(12, 2) if "(12,2)" in declared else -1
            assert log_type(oid, modifier) == ARROW_NAMES[arrow], name
            if element_oid(oid) is None:
                array = connection.execute("SELECT typarray::int FROM pg_type WHERE oid = %s", [oid]).fetchone()[0]
                if array == 0:
                    continue
                typed = arrow != "string" or log_type(array, modifier) == pa.list_(pa.string())
                assert pa.types.is_list(log_type(array, modifier)) == typed
