"""Names: quoted as PostgreSQL quotes them, parsed back, and selected by patterns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import UsageError
from millstream.model.names import TablePattern, TablePatterns, parse_qualified_name, qualified_name, quote_ident
from millstream.testing.pytest_plugin import Database

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


def test_identifiers_are_quoted_as_postgresql_quotes_them(postgres: Database):
    with postgres.connect() as connection:
        words = [row[0] for row in connection.execute("SELECT word FROM pg_get_keywords()").fetchall()]
        words += ["a", "A", "a b", 'a"b', "_x", "1a", "a1", "a$", "ä", "", "a.b"]
        query = "SELECT quote_ident(w) FROM unnest(%s::text[]) WITH ORDINALITY AS t(w, n) ORDER BY n"
        quoted = [row[0] for row in connection.execute(query, [words]).fetchall()]
    assert [quote_ident(word) for word in words] == quoted


@given(NAMES, NAMES)
def test_a_qualified_name_names_the_same_table_when_read_back(namespace: str, name: str):
    assert parse_qualified_name(qualified_name(namespace, name)) == (namespace, name)


def test_unquoted_parts_fold_to_lower_case_and_public_is_the_default():
    assert parse_qualified_name("Public.Orders") == ("public", "orders")
    assert parse_qualified_name("orders") == ("public", "orders")
    assert parse_qualified_name('"My.Schema"."T""1"') == ("My.Schema", 'T"1')


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a.b.c", 'a."b', "a b", "a.*", '""'])
def test_what_names_no_table_is_an_error_with_a_hint(text: str):
    with pytest.raises(UsageError) as caught:
        parse_qualified_name(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("patterns", "table", "selected"),
    [
        (["public.*"], ("public", "orders"), True),
        (["public.*"], ("other", "orders"), False),
        (["public.*", "!public.audit_*"], ("public", "audit_log"), False),
        (["!public.audit_*", "public.*"], ("public", "audit_log"), False),
        (["!public.audit_*"], ("other", "t"), True),
        (["*.*"], ("anything", "At All"), True),
        (["orders"], ("public", "orders"), True),
        (["Public.Orders"], ("public", "orders"), True),
        (['public."Orders"'], ("public", "Orders"), True),
        (['public."a*"'], ("public", "ab"), False),
        (["public.order?"], ("public", "orders"), True),
        (["public.order"], ("public", "orders"), False),
        (["pub*.o*s"], ("public", "orders\n"), False),
        ([], ("public", "orders"), True),
    ],
)
def test_patterns_select_tables(patterns: list[str], table: tuple[str, str], *, selected: bool):
    assert TablePatterns.parse(patterns).select(*table) is selected


@pytest.mark.parametrize(
    ("patterns", "selected"),
    [
        (["public.*"], True),
        (["public.*", "!public.orders"], False),
        (["!public.orders"], False),
        (["public.*", "public.orders*", "!public.orders"], False),
        (["*.*", "pub*.**", "!public.orders"], False),
        (["public.*", "!public.orders", "public.orders_2026_*"], True),
        (["public.*", "!public.orders*", "public.orders_2026_*"], False),
        (["public.orders_2026_*"], True),
        (["other.*"], False),
    ],
)
def test_a_table_that_is_left_out_leaves_out_partitions_that_no_pattern_names(patterns: list[str], *, selected: bool):
    chosen = TablePatterns.parse(patterns)
    assert chosen.select_partition("public", "orders_2026_01", [("public", "orders")]) is selected
    assert chosen.select_partition("public", "orders_2026_01", []) is chosen.select("public", "orders_2026_01")


@pytest.mark.parametrize("text", ["", "!", "a.b.c", 'public."x', "a b.c", "public."])
def test_what_is_no_pattern_is_an_error_that_names_it(text: str):
    with pytest.raises(UsageError, match="is not a pattern"):
        TablePattern.parse(text)
