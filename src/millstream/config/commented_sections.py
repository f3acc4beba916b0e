"""Section headers that are commented out: a key uncommented below one gets into another section in TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import Any, Final

from millstream.config.toml_lines import KeyPath

_COMMENTED: Final = re.compile(r"\s*#[\s#]*(\[[^\[\]#]+\])\s*(?:#.*)?\Z")
_HEADER: Final = re.compile(r"\s*\[{1,2}[^\[\]=]+\]{1,2}\s*(?:#.*)?\Z")


def section_meant(text: str, line: int, key: str, takes: Callable[[KeyPath, str], bool]) -> tuple[str, int] | None:
    """Return the section that a key was written for, as its header is written, and the header's line.

    None if no commented header above it has the key.

    Args:
        line: the key's line, from 1.
        takes: returns whether the section at a path has a key.
    """
    lines = text.split("\n")[: line - 1]
    for number in range(len(lines), 0, -1):
        found = _COMMENTED.match(lines[number - 1])
        if found is not None and takes(_path(found[1]), key):
            return found[1], number
        if _HEADER.match(lines[number - 1]):
            return None
    return None


def _path(header: str) -> KeyPath:
    try:
        table: Any = tomllib.loads(header)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while table:
        name = next(iter(table))
        path.append(name)
        table = table[name]
    return tuple(path)
