"""The line of each key in a TOML text.

tomllib returns values without places, and an error without its place is half an error. The scanner gets
text that tomllib has accepted, so it only has to walk it: keys, strings, brackets and comments; it
validates nothing.
"""

from __future__ import annotations

import re
import tomllib
from typing import Final

KeyPath = tuple[str | int, ...]

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_SPACE: Final = re.compile(r"[ \t]*")
_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SCALAR: Final = re.compile(r"[^\s,\]}#]+(?: [0-9:.]+[^\s,\]}#]*)?")  # a date and a time may have a space between
_STRINGS: Final = (
    re.compile(r'"""(?:\\.|[^\\])*?"{3,5}', re.DOTALL),
    re.compile(r"'''.*?'{3,5}", re.DOTALL),
    re.compile(r'"(?:\\.|[^"\\\n])*"'),
    re.compile(r"'[^'\n]*'"),
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return each key's line, from 1, by its path. Tables have their header's line, list items their index."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[KeyPath, int] = {}
        self._array_counts: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        """Walk the text statement by statement."""
        table: KeyPath = ()
        while self._skip(_BLANK) < len(self._text):
            if self._text.startswith("[[", self._at):
                self._at += 2
                name = self._key()
                index = self._array_counts[name] = self._array_counts.get(name, -1) + 1
                table = (*name, index)
                self._note(table)
                self._at = self._text.index("]]", self._at) + 2
            elif self._text.startswith("[", self._at):
                self._at += 1
                table = self._key()
                self._note(table)
                self._at = self._text.index("]", self._at) + 1
            else:
                self._pair(table)
        return self._lines

    def _pair(self, table: KeyPath) -> None:
        start = self._at
        path = (*table, *self._key())
        self._note(path, start)
        self._at = self._text.index("=", self._at) + 1
        self._skip(_SPACE)
        self._value(path)

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            quote = self._text[self._at]
            if quote in "\"'":
                parts.append(next(iter(tomllib.loads(f"{self._string()} = 0"))))
            else:
                found = _BARE.match(self._text, self._at)
                assert found is not None, "tomllib has accepted the text"
                parts.append(found[0])
                self._at = found.end()
            self._skip(_SPACE)
            if not self._text.startswith(".", self._at):
                return tuple(parts)
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        first = self._text[self._at]
        if first in "\"'":
            self._string()
        elif first == "[":
            self._at += 1
            index = 0
            while self._text[self._skip(_BLANK)] != "]":
                self._note((*path, index))
                self._value((*path, index))
                index += 1
                self._skip(_BLANK)
                self._skip_comma()
            self._at += 1
        elif first == "{":
            self._at += 1
            while self._text[self._skip(_BLANK)] != "}":
                self._pair(path)
                self._skip(_BLANK)
                self._skip_comma()
            self._at += 1
        else:
            self._skip(_SCALAR)

    def _string(self) -> str:
        for pattern in _STRINGS:
            found = pattern.match(self._text, self._at)
            if found is not None and not (
                found[0] in {'""', "''"} and self._text[self._at : self._at + 3] == found[0][0] * 3
            ):
                self._at = found.end()
                return found[0]
        raise AssertionError("tomllib has accepted the text")

    def _skip(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return self._at

    def _skip_comma(self) -> None:
        if self._text.startswith(",", self._at):
            self._at += 1

    def _note(self, path: KeyPath, at: int | None = None) -> None:
        line = self._text.count("\n", 0, self._at if at is None else at) + 1
        # A header names its parent tables too, unless they are already there.
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)
