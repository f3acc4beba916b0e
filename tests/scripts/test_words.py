"""The check of words finds what it is for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def words(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("words")


@pytest.mark.parametrize(
    "text",
    [
        '"""Who is cancelled is not written."""\n',
        '"""It waits.\n\nOf two at once one gives way.\n"""\n',
        "x = 1  # nobody is told\n",
        "# It begins\n# anew.\n",
    ],
)
def test_a_breach_in_code_is_found(words: ModuleType, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert len(list(words.breaches(path))) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""The writer waits for the end\nOf what there is."""\n',
        'text = "Who nobody anew"\n',
        '"""Return `Of` and `nobody`."""\n',
        "# A sequence of\n# Of's kind\n",
    ],
)
def test_plain_words_pass(words: ModuleType, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert list(words.breaches(path)) == []


def test_a_breach_in_a_message_of_the_package_is_found(words: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "src/millstream/a.py"
    path.parent.mkdir(parents=True)
    path.write_text('fail("no space")\nfail(f"nobody can follow {node}", key="anew")\n')
    assert [breach.rpartition(":")[0] for breach in words.breaches(path)] == [f"{path}:2: 'nobody'"]


def test_a_page_is_read_without_its_headings_and_code(words: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("# What it is\n\nPlain.\n\n```\nWho nobody\n```\n\nWho asks? Somebody.\n")
    assert [breach.rpartition(":")[0] for breach in words.breaches(path)] == [f"{path}:9: 'Somebody'"]
