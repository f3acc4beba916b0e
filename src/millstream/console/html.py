"""HTML, escaped where it is made: a text becomes HTML only by `tag`, which escapes it.

A page's live area is a list of pieces. A `Part` has an id and changes alone, so that a viewer gets the parts that differ
and not the page.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from millstream.model.human_text import readable

_VOID: Final = frozenset({"input", "link", "meta", "br"})
_CODE: Final = re.compile(r"`([^`]+)`")


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


Content: TypeAlias = "str | int | Iterable[Content] | None"
"""A text, which is escaped unless it is `Html`; None for nothing; or several of them."""


def escaped(content: Content) -> str:
    """Return content as HTML."""
    if content is None:
        return ""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return html.escape(readable(content))
    if isinstance(content, int):
        return str(content)
    return "".join(map(escaped, content))


def tag(name: str, /, *contents: Content, **attributes: str | int | bool | None) -> Html:
    """Return an element. An attribute's `_` is a hyphen, and a last one is left out; None and False omit it."""
    return Html(opened(name, **attributes) + ("" if name in _VOID else f"{escaped(contents)}</{name}>"))


def opened(name: str, /, **attributes: str | int | bool | None) -> Html:
    """Return the start of an element. A `value` is sent as it is; people read the other attributes."""
    texts = [
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(str(value) if key == "value" else readable(str(value)))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    return Html(f"<{name}{''.join(texts)}>")


def with_code(text: str) -> list[str]:
    """Return a text with its `…` as code."""
    pieces = _CODE.split(text)
    return [tag("code", piece) if number % 2 else piece for number, piece in enumerate(pieces)]


def shortened(text: str, chars_max: int) -> str:
    """Return a text, or its start and its length."""
    return text if len(text) <= chars_max else f"{text[:chars_max]}… ({len(text):,} characters)"


def described(facts: Iterable[tuple[str, Content]]) -> Part:
    """Return a page's facts with their titles, without those that are empty."""
    pairs = [tag("div", tag("dt", title), tag("dd", text)) for title, value in facts if (text := Html(escaped(value)))]
    return Part("facts", tag("dl", *pairs, id="facts", class_="facts"))


def grid(heads: Iterable[Content], rows: Iterable[Content], **attributes: str | int | bool | None) -> Html:
    """Return a table that scrolls on its own; the attributes are those of its frame."""
    titles = tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads)))
    return tag("div", tag("table", titles, tag("tbody", *rows)), class_="scroll", **attributes)


@dataclass(frozen=True, slots=True)
class Part:
    """An element that changes alone."""

    id: str
    """The id of the element, without others of the page."""
    html: Html


Piece: TypeAlias = "Html | Part"


class Rendered:
    """A live area as it is at one moment."""

    def __init__(self, pieces: Sequence[Piece], troubles: int = 0) -> None:
        self._pieces: Final = pieces
        self.troubles: Final = troubles
        self.parts: Final[Mapping[str, Html]] = {piece.id: piece.html for piece in pieces if isinstance(piece, Part)}
        self.skeleton: Final = [piece.id if isinstance(piece, Part) else piece for piece in pieces]
        """The area without the content of its parts."""

    @cached_property
    def whole(self) -> str:
        """The area's HTML."""
        return "".join(piece.html if isinstance(piece, Part) else piece for piece in self._pieces)

    @cached_property
    def version(self) -> str:
        """A text that other contents don't have."""
        return hashlib.blake2b(self.whole.encode(), digest_size=9).hexdigest()

    def since(self, before: Rendered | None) -> dict[str, dict[str, str]]:
        """Return what changes a page that shows `before`: `parts` by id, or the `whole` of it; empty if nothing does."""
        if before is None or before.skeleton != self.skeleton:
            return {"whole": {"live": self.whole}}
        changed = {key: str(value) for key, value in self.parts.items() if value != before.parts[key]}
        return {"parts": changed} if changed else {}
