"""Write the reference pages of commands, configuration and errors from the code, or check that they are current.

A page in `docs/reference` has two lines of its own:
`<!-- generated: cli -->` (or `config`, `errors`) and `<!-- end of generated text -->`. This script writes the text
between them. The page is committed, so that it can be read in the repository. Its order is that of the code.

    reference.py            write the pages
    reference.py --check    exit 1 if a page differs from the generated one
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel

CLI = ("millstream.cli.main", "cli")
CONFIG = ("millstream.config.model", "Config")
PAGES = Path(__file__).resolve().parent.parent / "docs" / "reference"
GENERATED = re.compile(r"^(<!-- generated: (\w+) -->)\n.*?^(<!-- end of generated text -->)$", re.MULTILINE | re.DOTALL)
NOT_BUILT = "*Not in this version.*"


def load(module: str, name: str) -> Any | None:
    """Return the object; None if its module isn't part of this version yet."""
    try:
        present = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if present is None else getattr(importlib.import_module(module), name)


def cell(text: str) -> str:
    """Make text fit into a table's cell."""
    return " ".join(text.replace("|", "\\|").split())


def code(text: object) -> str:
    """Make text a code span of a table's cell."""
    return f"`{cell(str(text))}`"


# --- commands --------------------------------------------------------------------------------------------------------


def cli() -> Iterator[str]:
    """Yield a section a command, the whole tree of them."""
    import click

    group = load(*CLI)
    if group is None:
        yield NOT_BUILT
        return
    context = click.Context(group, info_name="millstream")
    yield "## millstream"
    yield from command(group, context)
    yield from subcommands(group, context)


def subcommands(group: click.Command, parent: click.Context) -> Iterator[str]:
    """Yield the sections of a group's commands, each followed by its own."""
    import click

    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(parent):
        found = group.get_command(parent, name)
        if found is None or found.hidden:
            continue
        context = click.Context(found, info_name=name, parent=parent)
        yield f"## {context.command_path}"
        yield from command(found, context)
        yield from subcommands(found, context)


def command(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield one command: its usage, its description, its options."""
    import click

    yield "```text\n" + " ".join([context.command_path, *command.collect_usage_pieces(context)]) + "\n```"
    if command.help:
        yield re.sub(
            r"[\b\f]", "", click.formatting.wrap_text(inspect.cleandoc(command.help), 10_000, preserve_paragraphs=True)
        )
    rows = []
    for parameter in command.get_params(context):
        if not isinstance(parameter, click.Option) or parameter.hidden or "--help" in parameter.opts:
            continue
        names = ", ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))
        value = "" if parameter.is_flag or parameter.count else f" {code(parameter.make_metavar(context))}"
        rows.append(f"| {names}{value} | {cell(parameter.help or '')} |")
    if rows:
        yield "\n".join(["| option | |", "| --- | --- |", *rows])


# --- configuration ---------------------------------------------------------------------------------------------------


def config() -> Iterator[str]:
    """Yield a section a table of the TOML file, with every key."""
    model = load(*CONFIG)
    if model is None:
        yield NOT_BUILT
        return
    yield from table(model, [])


def table(model: type[BaseModel], path: list[str]) -> Iterator[str]:
    """Yield the keys of one TOML table, then the tables inside it."""
    if path:
        yield f"## `[{'.'.join(path)}]`"
    if path and model.__doc__:
        yield " ".join(model.__doc__.split())
    rows, inner = [], []
    for name, field in model.model_fields.items():
        key = field.alias or name
        nested = nested_model(field.annotation)
        if nested:
            of_several, kind = nested
            inner.append((kind, [*path, key, *(["<name>"] if of_several else [])]))
            continue
        default = "required" if field.is_required() else code(plain(field.get_default(call_default_factory=True)))
        rows.append(
            f"| {code(key)} | {code(type_name(field.annotation))} | {default} | {cell(field.description or '')} |"
        )
    if rows:
        yield "\n".join(["| key | type | default | |", "| --- | --- | --- | --- |", *rows])
    for kind, inner_path in inner:
        yield from table(kind, inner_path)


def nested_model(annotation: object) -> tuple[bool, type[BaseModel]] | None:
    """Return the model of a key's table, and whether it holds one a name."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return False, annotation
    arguments = typing.get_args(annotation)
    for argument in arguments:
        found = nested_model(argument)
        if found:
            return found[0] or typing.get_origin(annotation) is dict, found[1]
    return None


def type_name(annotation: object) -> str:
    """Return a type in plain words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(argument) for argument in arguments if argument is not type(None))
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is not None:
        inner = ", ".join(type_name(argument) for argument in arguments if argument is not Ellipsis)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    if annotation in (str, bool):
        return "text" if annotation is str else "true | false"
    return str(getattr(annotation, "__name__", annotation))


def plain(value: object) -> object:
    """Return a default in TOML's notation."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | list):
        return json.dumps(value, ensure_ascii=False)
    return "none" if value is None else value


# --- errors ----------------------------------------------------------------------------------------------------------


def errors() -> Iterator[str]:
    """Yield the tree of errors as one table: a class, its further codes, then its subclasses."""
    from millstream.errors import MillstreamError

    def rows(kind: type[MillstreamError], depth: int) -> Iterator[str]:
        for name in (kind.code, *vars(kind).get("codes", ())):
            error = kind("", code=name)
            shown = "↳ " * depth + (f"`{kind.__name__}`" if name == kind.code else "↳")
            mending = cell(f"{error.summary} {error.hint}")
            yield f"| {shown} | {code(name)} | {error.retry.value} | {error.exit_code} | {mending} |"
        for child in kind.__subclasses__():
            if child.__module__ == "millstream.errors":
                yield from rows(child, depth + 1)

    header = ["| error | code | retry | exit | what happened, what to do |", "| --- | --- | --- | --- | --- |"]
    yield "\n".join([*header, *rows(MillstreamError, 0)])


GENERATORS: dict[str, Callable[[], Iterator[str]]] = {"cli": cli, "config": config, "errors": errors}


def filled(page: str) -> str:
    """Return a page with the code's present text between its marks."""

    def text(marked: re.Match[str]) -> str:
        return "\n\n".join([marked[1], *GENERATORS[marked[2]](), marked[3]])

    return GENERATED.sub(text, page)


def main(arguments: list[str], pages: Path = PAGES) -> int:
    """Write or check all pages; 1 if one wasn't current in a check."""
    stale = []
    for name in GENERATORS:
        page = pages / f"{name}.md"
        now = page.read_text(encoding="utf-8")
        if GENERATED.search(now) is None:
            print(f"{page.name} has no marks for generated text")
            return 1
        then = filled(now)
        if then == now:
            continue
        stale.append(page.name)
        if "--check" not in arguments:
            page.write_text(then, encoding="utf-8")
            print(f"{page.name} written")
    if "--check" in arguments and stale:
        print(f"docs/reference: {', '.join(stale)}: not what the code has now; run `make reference`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
