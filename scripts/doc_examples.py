"""Check the examples in the documentation: README, CONTRIBUTING, CHANGELOG and every page of `docs/`.

By the language of a fenced block:

- `console`: after `$ `, each `millstream` names commands and options that exist, each `make` a target, each extra in
  `pip install 'millstream[…]'` one of pyproject.toml's. Output is free.
- `toml`: is a part of a `millstream.toml`. `json`: parses. `python`: runs as a doctest if it has prompts, else compiles; the names
  that it imports from `millstream` exist.
- `sql`, `text`, `bash` scripts and the rest of LANGUAGES: free. A block of no or of another language fails, so that a missing
  name hides nothing.

Links from the files outside the site to files of the repository must lead somewhere; those inside are Sphinx's.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from markdown_it import MarkdownIt
from pydantic import BaseModel, ValidationError

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = {"console", "toml", "json", "python", "sql", "text", "ini", "yaml", "mermaid", "c"}
SEPARATORS = {"&&", "||", "|", ";", "&"}
ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")


class WrongExampleError(Exception):
    """An example that doesn't hold; the text has the reason."""


def check_console(text: str) -> None:
    """Check every command after a prompt."""
    commands = [line[2:] for line in text.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    if not commands:
        raise WrongExampleError("a console block without a line that begins with '$ '")
    for command in commands:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for words in split_commands(list(lexer)):
            match words:
                case ["millstream", *arguments]:
                    check_millstream(arguments)
                case ["make", *targets]:
                    check_make([target for target in targets if not ASSIGNMENT.match(target)])
                case ["pip" | "uv", *arguments]:
                    check_extras(" ".join(arguments))
                case _:
                    pass


def split_commands(words: list[str]) -> Iterator[list[str]]:
    """Yield the single commands of a shell line, without variables set before and redirections after them."""
    single: list[str] = []
    for word in [*words, ";"]:
        if word in SEPARATORS:
            if single:
                yield single
            single = []
        elif word in {">", ">>", "<"}:
            single.append("--")  # A file's name follows, not an option.
        elif single or not ASSIGNMENT.match(word):
            single.append(word)


def check_millstream(arguments: list[str]) -> None:
    """Follow the arguments through click's own tree of commands."""
    command: click.Command = importlib.import_module("millstream.cli.main").cli
    context = click.Context(command, info_name="millstream")
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return
        if word.startswith("-") and word != "-":
            name, equals, _ = word.partition("=")
            option = find_option(command, context, name)
            if not (option.is_flag or option.count or equals):
                del waiting[: option.nargs]
        elif isinstance(command, click.Group):
            found = command.get_command(context, word)
            if found is None:
                raise WrongExampleError(f"`{context.command_path}` has no command {word!r}")
            command, context = found, click.Context(found, info_name=word, parent=context)


def find_option(command: click.Command, context: click.Context, name: str) -> click.Option:
    """Return the option of a command that has this name."""
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option) and name in (*parameter.opts, *parameter.secondary_opts):
            return parameter
    raise WrongExampleError(f"`{context.command_path}` has no option {name!r}")


def check_make(targets: list[str]) -> None:
    """Look every target up in the Makefile."""
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in targets:
        if target not in known:
            raise WrongExampleError(f"the Makefile has no target {target!r}")


def check_extras(command: str) -> None:
    """Look every extra of Millstream up in pyproject.toml."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"(?:millstream|\.)\[([^\]]+)\]", command):
        for extra in extras.split(","):
            if extra.strip() not in known:
                raise WrongExampleError(f"there is no extra {extra.strip()!r}")


def check_toml(text: str) -> None:
    """Parse it, and check it against the configuration's model: it may be a part, but every key must be valid."""
    document = tomllib.loads(text)
    model: type[BaseModel] = importlib.import_module("millstream.config.model").Config
    try:
        model.model_validate(document)
    except ValidationError as error:
        wrong = [problem for problem in error.errors() if problem["type"] != "missing"]
        if wrong:
            where = ".".join(map(str, wrong[0]["loc"]))
            raise WrongExampleError(f"{where}: {wrong[0]['msg']}") from error


def check_python(text: str) -> None:
    """Run it if it has prompts; else compile it and look up its imports from Millstream."""
    if ">>>" in text:
        test = doctest.DocTestParser().get_doctest(text, {}, "example", None, 0)
        report: list[str] = []
        if doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append).failed:
            raise WrongExampleError("the doctest fails:\n" + "".join(report))
        text = "".join(example.source for example in test.examples)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "millstream":
            for alias in node.names:
                require_name(node.module, alias.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "millstream":
            require_name("millstream", node.attr)


def require_name(module: str, name: str) -> None:
    """Raise unless the module has that name."""
    try:
        found = (
            hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
        )
    except ModuleNotFoundError:
        found = False
    if not found:
        raise WrongExampleError(f"there is no {name!r} in {module}")


CHECKS: dict[str, Callable[[str], object]] = {
    "console": check_console,
    "toml": check_toml,
    "json": json.loads,
    "python": check_python,
}


def pages() -> Iterator[Path]:
    """Yield the files that hold examples."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
    yield from sorted((ROOT / "apps").glob("*/README.md"))
    yield from (page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts)


def problems(page: Path) -> Iterator[str]:
    """Yield each problem of a page, with its line."""
    name = page.relative_to(ROOT)
    text = page.read_text()
    for token in MarkdownIt("commonmark").parse(text):
        line = (token.map or [0])[0] + 1
        if token.type == "fence" and not token.info.startswith("{"):
            language = token.info.split()[0] if token.info.split() else ""
            if language not in LANGUAGES:
                yield f"{name}:{line}: a block of {language or 'no language'}; one of: {', '.join(sorted(LANGUAGES))}"
                continue
            try:
                CHECKS.get(language, str)(token.content)
            except (WrongExampleError, ValueError, SyntaxError) as error:
                yield f"{name}:{line}: {error}"
        elif token.type == "inline" and page.parent == ROOT:
            for link in (child.attrGet("href") for child in token.children or () if child.type == "link_open"):
                target = str(link).partition("#")[0]
                if target and "://" not in target and not (ROOT / target).exists():
                    yield f"{name}:{line}: the link to {target} leads nowhere"


def main() -> int:
    """Print every problem; 1 if there is one."""
    found = [problem for page in pages() for problem in problems(page)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
