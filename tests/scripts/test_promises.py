"""The page of promises names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_promise_is_held_by_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "internals" / "capture-promises.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| ---"))]
    assert len(rows) > 30
    tests = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", file.read_text())
    }
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, f"nothing holds: {row}"
        assert set(named) <= tests, f"no such tests: {sorted(set(named) - tests)}"
