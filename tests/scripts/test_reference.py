"""The reference pages list every command, key and error of the code; a page that is behind is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest

from millstream.cli.main import cli
from millstream.errors import MillstreamError, codes_of

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ROOT / "docs" / "reference"


@pytest.fixture
def reference(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("reference")


def test_every_error_command_and_key_is_in_the_pages() -> None:
    errors = (PAGES / "errors.md").read_text()
    codes = {code for kind, code in codes_of(MillstreamError) if kind.__module__.startswith("millstream.errors")}
    assert len(codes) > 100
    assert [code for code in codes if f"| `{code}` |" not in errors] == []
    commands = (PAGES / "cli.md").read_text()
    assert [name for name in cli.list_commands(click.Context(cli)) if f"\n## millstream {name}\n" not in commands] == []
    config = (PAGES / "config.md").read_text()
    assert "## `[streams.<name>.lake]`" in config
    assert "| `compact_files` | `int` | `200` |" in config


def test_a_page_that_is_behind_is_found_and_written_again(
    reference: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(PAGES, tmp_path / "pages")
    pages = tmp_path / "pages"
    assert reference.main(["--check"], pages) == 0
    page = pages / "errors.md"
    current = page.read_text()
    page.write_text(current.replace("| `millstream` |", "| `changed` |"))
    assert reference.main(["--check"], pages) == 1
    assert "errors.md" in capsys.readouterr().out
    assert reference.main([], pages) == 0
    assert page.read_text() == current
    page.write_text("# Errors\n")
    assert reference.main(["--check"], pages) == 1


def test_the_text_is_the_same_everywhere(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import reference; "
        "print('\\n'.join('\\n'.join(make()) for make in reference.GENERATORS.values()))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "COLUMNS": width, "HOME": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, width in (("1", "40"), ("2", "200"))
    ]
    assert texts[0] == texts[1]
    assert str(ROOT) not in texts[0]
    assert str(tmp_path) not in texts[0]
