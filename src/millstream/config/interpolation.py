"""`${NAME}` in the strings of a configuration.

In a DSN a variable may stand for a part only, and that part has rules of its own (`@` and `/` in a URL's
password, spaces and quotes in a keyword's value). The variable holds the plain text; it is escaped here,
as its place requires.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from millstream.libpq import is_address

_VARIABLE: Final = re.compile(r"\$\$\{|\$\{([^}]*)\}|\$\{")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_URL_USERINFO: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<userinfo>[^/?#]*)@")
_KEYWORD_VARIABLE: Final = re.compile(r"(?P<key>\w+\s*=\s*)(?P<quote>'?)\$\{(?P<name>[^}]*)\}(?P=quote)(?=\s|$)")


class MissingVariable(LookupError):
    """A string names a variable that isn't set (or an invalid name).

    Args:
        name: the variable that would have to be set; None if the text isn't a variable's name.
    """

    def __init__(self, what: str, name: str | None = None) -> None:
        super().__init__(what)
        self.name = name


def variables_in(text: str) -> set[str]:
    """Return the names of the variables in a string."""
    return {found[1] for found in _VARIABLE.finditer(text) if found[1]}


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """Replace variables in a string; `$${` stands for `${` itself. `MissingVariable` names the missing one."""

    def value(found: re.Match[str]) -> str:
        return "${" if found[0] == "$${" else _lookup(found[1], environ)

    return _VARIABLE.sub(value, text)


def interpolate_dsn(text: str, environ: Mapping[str, str]) -> str:
    """Replace variables in a DSN, each escaped as its place requires; a DSN that is one variable is taken as it is."""
    userinfo = _URL_USERINFO.match(text)
    if userinfo is not None:
        quoted = {name: quote(value, safe="") for name, value in environ.items() if f"${{{name}}}" in text}
        head = userinfo["scheme"] + interpolate(userinfo["userinfo"], quoted) + "@"
        return head + interpolate(text[userinfo.end() :], environ)

    def value(found: re.Match[str]) -> str:
        plain = _lookup(found["name"], environ)
        return found["key"] + "'" + plain.replace("\\", "\\\\").replace("'", "\\'") + "'"

    if "://" in text:
        return interpolate(text, environ)
    pieces = []
    at = 0
    for found in _KEYWORD_VARIABLE.finditer(text):
        pieces += [interpolate(text[at : found.start()], environ), value(found)]
        at = found.end()
    return "".join(pieces) + interpolate(text[at:], environ)


def is_database(path: tuple[str | int, ...], value: str) -> bool:
    """Return whether the key at a path holds a database's address, whose parts have rules of their own."""
    if path[-2:] == ("lake", "location"):
        return is_address(value)
    return path[-1:] == ("dsn",) or path[-2:] == ("catalog", "url")


def _lookup(name: str | None, environ: Mapping[str, str]) -> str:
    if name is None or _NAME.match(name) is None:
        raise MissingVariable(
            # A password may hold these characters: the text between them isn't repeated.
            "it holds ${ and no variable's name behind it; write ${NAME}, or $${ for the characters themselves"
        )
    if name not in environ:
        raise MissingVariable(f"the environment variable {name} is not set", name)
    return environ[name]
