r"""The prompt of `query`: statements until `;`, with history and completion, and a few backslash commands.

Each statement sees the newest position, unless `\as-of` holds the prompt at one. Rows go to stdout, everything
else to stderr.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from threading import Event
from typing import TYPE_CHECKING, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import create_output

from millstream.app.lake_sessions import open_lake
from millstream.cli.context import note, print_table
from millstream.cli.main import say_error
from millstream.cli.query_answer import answer
from millstream.cli.query_output import STYLES, Style
from millstream.errors import LakeUnavailable, MillstreamError, UsageError
from millstream.lake.query.sql_keywords import TEXTS
from millstream.model.human_text import counted

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.lake.query.query_session import LakeSession

HELP: Final = r"""Statements end with ; and may take several lines. Tab completes, Ctrl-C cancels, Ctrl-D ends.
  \dt                  list the tables
  \d TABLE             list a table's columns
  \as-of TIME|TOKEN    query the tables at that position; without one, at the newest
  \format STYLE        table, csv or json
  \refresh             read the list of tables again; a statement does so after new data has landed
  \?, \q               help, end; so do help, exit and quit"""
_WORD: Final = re.compile(r'\\?[\w.-]*"?[^\s"(),;]*\Z')
_COMMANDS: Final = ("\\?", "\\as-of", "\\d", "\\dt", "\\format", "\\q", "\\refresh")
_WORDS: Final = {"help": "\\?", "exit": "\\q", "quit": "\\q"}
"""Words that are commands when they stand alone."""


def is_whole(text: str) -> bool:
    """Return whether the input is ready to run: a command, or SQL up to a semicolon outside of a text."""
    stripped = text.strip()
    if not stripped or stripped.startswith("\\") or stripped.lower() in _WORDS:
        return True
    bare = TEXTS.sub("", stripped).rstrip()
    return bare.endswith(";") and not re.search(r"['\"]|/\*", bare)


class Prompt:
    """One user's prompt at one stream's lake."""

    def __init__(self, home: Home, stream: str | None, *, as_of: str | None, lake_only: bool, style: Style) -> None:
        """Open the lake.

        Args:
            as_of: where to hold it; None for always the newest position.
            style: how rows are printed. An Arrow stream is for programs: `table` instead.
        """
        self._home, self._stream = home, home.stream_config(stream)[0]
        self._as_of, self._lake_only = as_of, lake_only
        self._style: Style = "table" if style == "arrow" else style
        self._lake = open_lake(home, self._stream, as_of=as_of, lake_only=lake_only)

    def run(self) -> None:
        """Run until Ctrl-D, or the command that ends it."""
        session: PromptSession[str] = PromptSession(
            history=self._history(),
            completer=_Words(self),
            complete_while_typing=False,
            multiline=Condition(lambda: not is_whole(session.default_buffer.text)),
            prompt_continuation=lambda width, _line, _wrapped: "... ".rjust(width),
            output=create_output(stdout=sys.stderr if sys.stderr.isatty() else sys.stdout),
        )
        note(f"{self._stream}: {len(self._lake.tables)} tables, at {self._lake.token}; \\? helps")
        try:
            while True:
                try:
                    text = session.prompt(f"{self._stream}{'' if self._as_of is None else '@' + self._as_of}> ")
                    if not self._take(text.strip()):
                        return
                except MillstreamError as error:
                    say_error(error.as_dict())
                except KeyboardInterrupt:
                    note("cancelled")
                except EOFError:
                    return
        finally:
            self._lake.close()

    @property
    def tables(self) -> list[str]:
        """Return the names that can follow FROM."""
        return self._lake.tables

    def columns(self, table: str) -> list[str]:
        """Return a table's columns; none if it can't be read."""
        try:
            return [name for name, _ in self._lake.columns(table)]
        except MillstreamError:
            return []

    def _take(self, text: str) -> bool:
        """Carry out the input; return whether to go on."""
        text = _WORDS.get(text.rstrip("; ").lower(), text)
        if not text:
            return True
        if text.startswith("\\"):
            word, _, rest = text.partition(" ")
            return self._command(word, rest.strip().rstrip(";").strip())
        lake = self._newest()
        for statement in lake.statements(text):
            started, begun = time.monotonic(), Event()
            try:
                count = answer(lake, statement, self._style, begun.set)
            except LakeUnavailable:
                # Maintenance deletes replaced files also if nothing new comes.
                lake = self._renewed()
                if begun.is_set():
                    raise
                count = answer(lake, statement, self._style)
            note(f"{counted(count, 'row')} in {time.monotonic() - started:.2f} s")
        return True

    def _command(self, word: str, rest: str) -> bool:
        match word:
            case "\\q":
                return False
            case "\\?":
                for line in HELP.splitlines():
                    note(line)
            case "\\d" if rest:
                print_table(["column", "type"], self._newest().columns(rest))
            case "\\d" | "\\dt":
                self._list()
            case "\\as-of":
                self._move(rest or None)
            case "\\refresh":
                self._move(self._as_of)
            case "\\format" if rest in STYLES and rest != "arrow":
                self._style = rest
            case "\\format":
                raise UsageError(f"there is no format {rest!r} at the prompt", hint="table, csv or json.")
            case _:
                raise UsageError(f"there is no command {word}", hint="\\? lists them.")
        return True

    def _list(self) -> None:
        """List the names that can follow FROM, records and versions too; unreadable ones go to stderr."""
        lake = self._newest()
        print_table(["table"], [[name] for name in lake.query("SHOW TABLES").column("name").to_pylist()])
        for name, reason in lake.missing.items():
            note(f"not readable: {name}: {reason}")

    def _move(self, as_of: str | None) -> None:
        moved = open_lake(self._home, self._stream, as_of=as_of, lake_only=self._lake_only)
        self._lake.close()
        self._lake, self._as_of = moved, as_of
        note(f"at {moved.token}")

    def _newest(self) -> LakeSession:
        """Return a session at the newest position, or where the prompt is held."""
        if self._as_of is None and not self._lake.is_newest():
            self._renewed()
        return self._lake

    def _renewed(self) -> LakeSession:
        """Replace the session by a new one where the prompt is held; return it."""
        fresh = open_lake(self._home, self._stream, as_of=self._as_of, lake_only=self._lake_only)
        self._lake.close()
        self._lake = fresh
        return fresh

    def _history(self) -> History:
        """Return the input history, in a file of the user's own; in memory if the home can't be written."""
        file = self._home.prompt_history
        try:
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))
        except OSError:
            return InMemoryHistory()
        return FileHistory(str(file))


class _Words(Completer):
    """Commands, tables, the columns of tables that the statement names, and SQL's own words."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._columns = lru_cache(maxsize=256)(prompt.columns)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yield candidates for the word before the cursor."""
        del complete_event
        before = document.text_before_cursor
        found = _WORD.search(before)
        word = "" if found is None else found[0]
        if word.startswith("\\"):
            candidates: Iterable[str] = _COMMANDS
        elif before.startswith("\\format "):
            candidates = (style for style in STYLES if style != "arrow")
        else:
            candidates = [*self._prompt.tables, *self._named_columns(document.text), *_keywords()]
        lower = word.lower()
        for candidate in dict.fromkeys(candidates):
            if candidate.lower().startswith(lower):
                shown = candidate.lower() if word.islower() and candidate.isupper() else candidate
                yield Completion(shown, start_position=-len(word))
        if not word.startswith("\\") and "." not in word and word:
            # A table's bare name finds it too.
            for table in self._prompt.tables:
                if table.partition(".")[2].lower().startswith(lower):
                    yield Completion(table, start_position=-len(word))

    def _named_columns(self, text: str) -> Iterator[str]:
        for table in self._prompt.tables:
            if table.lower() in text.lower():
                yield from self._columns(table)


@lru_cache(maxsize=1)
def _keywords() -> tuple[str, ...]:
    """Return SQL's words, as DuckDB has them."""
    import duckdb

    with duckdb.connect(":memory:") as connection:
        rows = connection.execute("SELECT upper(keyword_name) FROM duckdb_keywords() ORDER BY 1").fetchall()
    return tuple(str(word) for (word,) in rows)
