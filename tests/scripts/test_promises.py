"""The pages of promises name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "internals"


@pytest.mark.parametrize(("page", "rows_min"), [("capture-promises.md", 30), ("ARCHITECTURE.md", 10)])
def test_each_promise_is_held_by_tests_that_are_there(page: str, rows_min: int) -> None:
    tables = re.findall(r"(?<=\| promise \| held by \|\n\| --- \| --- \|\n)(?:\| .*\n)+", (PAGES / page).read_text())
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) >= rows_min
    tests = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", file.read_text())
    }
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, f"nothing holds: {row}"
        assert set(named) <= tests, f"no such tests: {sorted(set(named) - tests)}"
