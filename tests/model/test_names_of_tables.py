"""Names of tables and columns: one rule for valid names, wherever they come from."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import UsageError
from millstream.model.names import NAME_BYTES_MAX, TablePattern, name_fault, parse_qualified_name, qualified_name


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "is empty"),
        ("a\0b", "has a zero byte"),
        ("\ud800", "isn't text"),
        ("é" * 128, "has 256 bytes, of at most 255"),
        ("é" * 127 + "x", None),
        ("a\n\x1b", None),
    ],
)
def test_what_may_be_a_name(name: str, fault: str | None) -> None:
    assert name_fault(name) == fault


@pytest.mark.parametrize("text", ['public."a\0b"', "a\0b", '"\0".t', "\0", "public.a\0", '"\ud800"', "\udfff"])
def test_a_name_with_a_zero_byte_or_half_a_character_is_none(text: str) -> None:
    """A zero byte ends a name for PostgreSQL, for the lake and for every C library: there, two tables would be one."""
    with pytest.raises(UsageError, match="not the name of a table") as caught:
        parse_qualified_name(text)
    assert "\0" not in caught.value.message
    with pytest.raises(UsageError, match="not a pattern"):
        TablePattern.parse(text)


@pytest.mark.parametrize("pattern", ["*a" * 40, "?*a" * 40, "a" + "*" * 10_000 + "x"])
def test_no_pattern_takes_for_ever(pattern: str) -> None:
    """Stars that backtracked held the whole process: the regular expressions of Python release no lock."""
    name = "a" * 250
    assert not TablePattern.parse(pattern).matches("public", f"{name}b")
    assert TablePattern.parse(f"{pattern}*").matches("public", f"{name}x{name}b")


@given(st.text(alphabet="ab*?", min_size=1, max_size=8), st.text(alphabet="ab", min_size=1, max_size=9))
def test_a_pattern_matches_as_in_a_shell(pattern: str, name: str) -> None:
    assert TablePattern.parse(pattern).matches("public", name) == fnmatchcase(name, pattern)


@given(st.text(min_size=1, max_size=80), st.text(min_size=1, max_size=80))
def test_every_other_name_is_read_back(namespace: str, name: str) -> None:
    if name_fault(namespace) is None and name_fault(name) is None:
        assert parse_qualified_name(qualified_name(namespace, name)) == (namespace, name)
    assert NAME_BYTES_MAX >= 63
