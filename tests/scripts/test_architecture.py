"""The page of the architecture names modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ROOT / "src" / "millstream"
HOME_CALLS = {"append", "consume", "follow", "merged"}
"""Calls of an open home, which documents write as `home.append`; the room `home` has no such modules."""


def is_there(name: str) -> bool:
    """Whether a dotted name is a room, a module, or a name that a module or a package mentions."""
    place, words = ROOMS, name.split(".")
    for position, word in enumerate(words):
        module = place / f"{word}.py"
        if module.exists():
            rest = words[position + 1 :]
            return not rest or re.search(rf"\b{rest[0]}\b", module.read_text()) is not None
        if not (place / word).is_dir():
            return re.search(rf"\b{word}\b", (place / "__init__.py").read_text()) is not None
        place /= word
    return True


def dotted_names(page: str) -> set[str]:
    names = re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", page)
    rooms = {name for name in names if (ROOMS / name.split(".")[0]).is_dir()}
    return rooms - {f"home.{call}" for call in HOME_CALLS}


def test_each_module_that_the_page_names_is_there() -> None:
    names = dotted_names((ROOT / "docs" / "internals" / "ARCHITECTURE.md").read_text())
    assert len(names) > 80
    missing = sorted(name for name in names if not is_there(name))
    assert not missing, f"no such modules: {missing}"


@pytest.mark.parametrize("name", ["wal.writing.retired", "capture.schema_registry", "wal.reader.NoSuchReader"])
def test_a_name_that_is_gone_is_noticed(name: str) -> None:
    assert not is_there(name)
