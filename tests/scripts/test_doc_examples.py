"""The checker of examples finds wrong examples and accepts correct ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest
from pydantic import BaseModel


@click.group()
@click.option("--home")
def cli() -> None:
    """Stand in for the program."""


@cli.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--limit", type=int)
@click.argument("words", nargs=-1)
def show(as_json: bool, limit: int, words: tuple[str, ...]) -> None:
    """Stand in for a command."""
    click.echo((as_json, limit, words))


class Log(BaseModel, extra="forbid"):
    """Stand in for a table of the configuration."""

    name: str
    retention_age: str = "7d"


class Config(BaseModel, extra="forbid"):
    """Stand in for the configuration."""

    streams: dict[str, Log]


@pytest.fixture
def checker(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    module = script("doc_examples")
    program = ModuleType("millstream.cli.main")
    program.cli = cli  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "millstream.cli.main", program)
    configuration = ModuleType("millstream.config.model")
    configuration.Config = Config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "millstream.config.model", configuration)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "Makefile").write_text("test:\n")
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\nspark = ["x"]\n')
    return module


def found(checker: ModuleType, tmp_path: Path, language: str, text: str) -> str:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```{language}\n{text}\n```\n")
    return "\n".join(checker.problems(page))


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("console", "$ millstream --home shop show --json --limit 3 --limit=3 --help x -- --any"),
        ("console", "$ A=1 millstream show \\\n  --limit 3 | wc --lines > --file"),
        ("console", "$ pip install '.[spark]' 'millstream[spark]'\n$ make test ARGS='-k x'\nwhat it prints --nonsense"),
        ("toml", '[streams.shop]\nretention_age = "1d"'),
        ("python", ">>> 1 + 1\n2"),
        ("python", "from millstream.errors import EngineError"),
        ("text", "anything"),
    ],
)
def test_a_right_example_passes(checker: ModuleType, tmp_path: Path, language: str, text: str) -> None:
    assert found(checker, tmp_path, language, text) == ""


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("console", "$ millstream shwo", "no command 'shwo'"),
        ("console", "$ cd x && millstream show --jason", "no option '--jason'"),
        ("console", "$ millstream --limit 3 show", "no option '--limit'"),
        ("console", "$ make tset", "no target 'tset'"),
        ("console", "$ pip install 'millstream[sparkle]'", "no extra 'sparkle'"),
        ("console", "millstream show", "without a line that begins"),
        ("toml", "a = ", "page.md:3"),
        ("toml", '[streams.shop]\nretention_aeg = "1d"', "streams.shop.retention_aeg"),
        ("toml", "[streams.shop]\nretention_age = 7", "streams.shop.retention_age"),
        ("json", "{", "page.md:3"),
        ("python", "def", "page.md:3"),
        ("python", ">>> 1 + 1\n3", "doctest fails"),
        ("python", "from millstream.errors import NoSuchError", "no 'NoSuchError'"),
        ("", "anything", "no language"),
    ],
)
def test_a_wrong_example_is_found(checker: ModuleType, tmp_path: Path, language: str, text: str, problem: str) -> None:
    assert problem in found(checker, tmp_path, language, text)


def test_a_link_that_leads_nowhere_is_found(checker: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[here](Makefile) [there](docs/gone.md#part) [out](https://example.com)\n")

    assert list(checker.problems(tmp_path / "README.md")) == ["README.md:1: the link to docs/gone.md leads nowhere"]
