"""The base of every command: its home, and how to print."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from millstream.errors import UsageError
from millstream.model.human_text import readable
from millstream.model.ids import can_name_stream

if TYPE_CHECKING:
    from millstream.home.home import Home


@dataclass(frozen=True, slots=True)
class Invocation:
    """One invocation of `millstream`: the options before the command, and the home that they name."""

    home_named: str | None
    debug: bool = False

    def home(self, *, needs_source: bool = True) -> Home:
        """Return the command's home. Raises `home_not_found`, `home_too_new`.

        Args:
            needs_source: False for a command that never connects: the variables of DSNs need not be set
                then.
        """
        from millstream.home.home import Home

        home = Home.find(self.home_named, needs_source=needs_source)
        home.check_format()
        return home

    def own_home(self, *, needs_source: bool = True) -> Home:
        """Return it for a process that writes it.

        All files of the process and its children (Spark's Java too) are private from here on.
        """
        from millstream.private_files import mask_files_of

        home = self.home(needs_source=needs_source)
        mask_files_of(home.data)
        return home


class SuggestingGroup(click.Group):
    """A group that suggests commands for a mistyped one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; `UsageError` with the nearest names if there is none."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=3)
            if near:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)


def misplaced_words_hint(error: click.UsageError, home_named: str | None) -> str | None:
    """Return the likely meaning of a word or option that a command doesn't take: a home, a stream, an option of all commands.

    None for another `error`.
    """
    context = error.ctx
    if isinstance(error, click.NoSuchOption) and context is not None:
        root = context.find_root()
        for parameter in root.command.params:
            if error.option_name in parameter.opts and context is not root:
                option = " ".join(filter(None, (error.option_name, parameter.metavar)))
                path = context.command_path.removeprefix("millstream ")
                return f"Put {error.option_name} before the command: millstream {option} {path}"
        return None
    found = re.match(r"Got unexpected extra arguments? \((.+)\)", error.message)
    if context is None or found is None or context.parent is None:
        return None
    words, path = found[1], context.command_path.removeprefix("millstream ")
    word = words.split()[0]
    option = f"--home {home_named} " if home_named else ""
    takes_stream = any("--stream" in parameter.opts for parameter in context.command.params)
    is_home = (Path(word) / "millstream.toml").is_file()
    if takes_stream and not is_home:
        if not can_name_stream(word):
            return None
        return f"Name a stream with an option: millstream {option}{path} --stream {word}"
    if home_named is not None:
        return f"Leave out {words}: {path} works on the whole home {home_named}."
    instead = "Name the home" if is_home else f"Leave out {words}, or name a home"
    return f"{instead} before the command: millstream --home {word} {path}"


pass_invocation = click.make_pass_decorator(Invocation)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
stream_option = click.option("--stream", metavar="S", help="The stream; required if the home has several.")


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


_COMMAND: Final = re.compile(r"`millstream (?!--|init\b|demo\b)(?![^`]*` (?:on|there)\b)")
"""The beginning of a command that acts on a home of this machine, and not on another node's."""
_named: str | None = None
"""The home that the command line names."""


def name_home(home_named: str | None) -> None:
    """Have `say` and `note` name this home in the commands that they tell to run; None: none was named."""
    global _named  # noqa: PLW0603 - a process runs one command, and any of its threads may print
    _named = home_named


def for_home(text: str) -> str:
    """Return a text whose commands act on the home that this command acts on, wherever they are copied to."""
    if _named is None or "`millstream " not in text:
        return text
    option = f"`millstream --home {shlex.quote(_named)} "
    return _COMMAND.sub(lambda _: option, text)


def say(text: str = "", *, err: bool = False, nl: bool = True, fg: str | None = None, bold: bool | None = None) -> None:
    """Print a line for people, on stdout or stderr, with colour on a terminal only.

    Control characters are escaped: foreign names and values can't control the terminal, nor look like our
    lines.
    """
    click.secho(readable(for_home(text)), err=err, nl=nl, fg=fg, bold=bold)


def note(text: str) -> None:
    """Print a line for people on stderr, as `say`."""
    say(text, err=True)


def note_lines(text: str) -> None:
    """Print a text of several lines on stderr; the later ones are marked, so that none looks like a line of ours."""
    first, *others = text.split("\n")
    note(first)
    for line in others:
        note(f"  | {line}")


def print_raw(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print a text for programs, as it is."""
    click.echo(text, nl=nl, err=err)


def silence_stdout() -> None:
    """Write stdout to nothing from here on: its reader has closed it, and the interpreter flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()) -> None:
    """Print rows for people, on stdout: aligned, with colour on a terminal only."""
    cells = [["" if cell is None else readable(str(cell)) for cell in row] for row in rows]
    widths = [max(len(title), *(len(row[n]) for row in cells), 0) for n, title in enumerate(columns)]
    rightward = frozenset(right)

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if title in rightward else cell.ljust(width)
            for cell, width, title in zip(row, widths, columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    click.secho(readable(line(columns)), bold=True)
    for row in cells:
        click.secho(line(row))


def confirm(question: str, *, yes: bool) -> None:
    """Ask on the terminal and end the command unless the answer is yes; ask nothing if `yes` is set.

    Raises `UsageError` without a terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to confirm on", hint="Run the command again, with --yes.")
    click.confirm(readable(question), abort=True, err=True)


def on_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()
