"""The registry of sources: feeds and files that an operator names, read into items that keep every rule.

Nothing here follows a link. A source is one RSS or Atom document, one JSON file or the files of one folder. Addresses
are fetched only if the registry says `http = true`, and only if the host's robots.txt allows it (`fetching`).
An entry, a file or a source that can't be used is reported with its reason and doesn't stop the others.

    http = false

    [[sources]]
    name = "Open Lecture"
    feed = "feeds/open-lecture.xml"   # or json = "items.json", or directory = "inbox"
    category = "science"              # for entries of JSON that name none, and for all entries of feeds
    tags = ["lectures", "science"]    # for entries that name fewer than two
    content_type = "analysis"         # as the category; "news" if it isn't named
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from xml.etree import ElementTree as ET

from millstream_forage.errors import InvalidField, RegistryUnreadable, SourceUnreadable
from millstream_forage.fetching import fetch
from millstream_forage.items import (
    CONTENT_TYPES,
    NAME_MAX,
    SENTENCE_END,
    TAGS,
    NewItem,
    new_item,
    present,
    short_name,
    text,
)
from millstream_forage.items import names as distinct_names

Kind: TypeAlias = Literal["feed", "json", "directory"]
KINDS: Final[tuple[Kind, ...]] = ("feed", "json", "directory")
SUFFIXES: Final[dict[str, Kind]] = {".json": "json", ".xml": "feed", ".rss": "feed", ".atom": "feed"}
"""The files that a folder's source reads."""
BYTES_MAX: Final = 8 << 20
"""Bytes of one document. Feeds have tens of kilobytes; it bounds what a broken one takes."""
ADDRESS: Final = re.compile(r"https?://", re.IGNORECASE)
MARKUP: Final = re.compile(
    r"""
    <!-- .*? (?: --> | \Z )
    | < (script|style) \b .*? (?: </ \1 \b [^>]* (?: > | \Z ) | \Z )
    | < [a-z/!?] (?: [^>=] | = \s* (?: " [^"]* (?: " | \Z ) | ' [^']* (?: ' | \Z ) )? )* (?: > | \Z )
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
"""Comments, scripts and styles, and tags. As in a browser, one that nothing ends takes the rest of the text: so a match
that has begun never fails, and the time grows with the length alone. The time of html.parser grows with its square."""
SPACE_BEFORE_STOP: Final = re.compile(r" ([.,;:!?])")
FIELDS: Final = {"name", "category", "tags", "content_type", *KINDS}


@dataclass(frozen=True, slots=True)
class Source:
    """One source, and the fields that its entries get if they lack them."""

    name: str
    kind: Kind
    location: str
    """A path, or the address of a feed."""
    category: str
    tags: tuple[str, ...] = ()
    content_type: str = "news"


@dataclass(frozen=True, slots=True)
class Refused:
    """An entry that breaks a rule, a file of no known kind, or a whole source or file that can't be read."""

    source: str
    entry: str
    """Address, title or number of the entry; the path of a file; empty for a whole source."""
    reason: str
    is_unread: bool = False
    """Whether it is a whole source or file that can't be read."""


@dataclass(slots=True)
class Captured:
    """The result of one reading of all sources."""

    items: list[NewItem] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Registry:
    """All sources."""

    sources: tuple[Source, ...]
    http: bool = False
    """Whether addresses are fetched."""

    @classmethod
    def load(cls, path: Path) -> Registry:
        """Return the registry that a TOML file describes. Paths in it start from the file's folder.

        Raises:
            RegistryUnreadable: the file can't be read, or isn't TOML.
            InvalidField: a field is missing, unknown or breaks its rule. The reason names the source.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RegistryUnreadable(f"{path}: {reason}") from error
        if unknown := sorted(document.keys() - {"http", "sources"}):
            raise InvalidField(unknown[0], "is no field of a registry", hint="The fields are http and sources.")
        http, entries = document.get("http", False), document.get("sources", [])
        if not isinstance(http, bool):
            raise InvalidField("http", "must be true or false")
        if not isinstance(entries, list):
            raise InvalidField("sources", "must be a list of tables", hint="Begin each source with [[sources]].")
        return cls(tuple(numbered(entry, number, path.parent) for number, entry in enumerate(entries, 1)), http)

    def capture(self) -> Captured:
        """Read every source. Items come in the order of the sources and of the entries in each."""
        captured = Captured()
        for source in self.sources:
            if source.kind == "directory":
                add_folder(captured, source)
            else:
                add_document(captured, source, "", self._content)
        return captured

    def _content(self, source: Source) -> bytes:
        """Return the document of a source that isn't a folder."""
        if not ADDRESS.match(source.location):
            return content_of(source)
        if not self.http:
            raise SourceUnreadable(f"{source.location}: http is off", hint="Set `http = true` in the registry.")
        return fetch(source.location, bytes_max=BYTES_MAX)


def numbered(entry: object, number: int, folder: Path) -> Source:
    """Return `source_of` an entry; an error names the source, or its number if it has no name."""
    try:
        return source_of(entry, folder)
    except InvalidField as error:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        where = f"source {name!r}" if isinstance(name, str) and name else f"source {number}"
        raise InvalidField(error.field, f"{error.reason} ({where})", hint=error.hint) from None


def source_of(entry: object, folder: Path) -> Source:
    """Return the source that one table of the registry describes."""
    if not isinstance(entry, Mapping):
        raise InvalidField("sources", "must be a list of tables", hint="Begin each source with [[sources]].")
    if unknown := sorted(entry.keys() - FIELDS):
        raise InvalidField(unknown[0], "is no field of a source", hint=f"The fields are {', '.join(sorted(FIELDS))}.")
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        raise InvalidField("feed", f"exactly one of {', '.join(KINDS)} must be named")
    location = text(kinds[0], entry[kinds[0]], most=4_096)
    if not ADDRESS.match(location):
        location = str(folder / location)
    elif kinds[0] != "feed":
        raise InvalidField(kinds[0], "must be a path: only feeds are fetched")
    content_type = entry.get("content_type", "news")
    if content_type not in CONTENT_TYPES:
        raise InvalidField("content_type", f"must be one of {', '.join(CONTENT_TYPES)}")
    return Source(
        name=short_name("name", present(entry, "name")),
        kind=kinds[0],
        location=location,
        category=short_name("category", present(entry, "category")),
        tags=distinct_names("tags", entry.get("tags", []), least=0, most=TAGS[1]),
        content_type=content_type,
    )


def add_folder(captured: Captured, source: Source) -> None:
    """Add the items of a folder's files in the order of their names. Hidden files are left out."""
    folder = Path(source.location)
    try:
        files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        captured.refused.append(Refused(source.name, "", f"{folder}: {error.strerror}", is_unread=True))
        return
    for path in files:
        kind = SUFFIXES.get(path.suffix.lower())
        if kind is None or path.is_dir():
            reason = f"is not read: a folder's files end in {', '.join(SUFFIXES)}"
            captured.refused.append(Refused(source.name, str(path), reason))
        else:
            add_document(captured, replace(source, kind=kind, location=str(path)), str(path), content_of)


def add_document(captured: Captured, source: Source, entry: str, content: Callable[[Source], bytes]) -> None:
    """Add the items of one document; or the reason why it can't be read, under the name `entry`."""
    try:
        bodies = (json_bodies if source.kind == "json" else feed_bodies)(source, content(source))
        for number, body in enumerate(bodies, 1):
            add(captured, source, body, number)
    except SourceUnreadable as error:
        captured.refused.append(Refused(source.name, entry, error.message, is_unread=True))


def add(captured: Captured, source: Source, body: object, number: int) -> None:
    """Add the item of one entry, or the reason why there is none."""
    try:
        captured.items.append(new_item(body))
    except InvalidField as error:
        named = (body.get("url") or body.get("title")) if isinstance(body, Mapping) else None
        captured.refused.append(Refused(source.name, str(named or f"entry {number}"), error.message))


def content_of(source: Source) -> bytes:
    """Return the content of a source's file."""
    try:
        with Path(source.location).open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise SourceUnreadable(f"{source.location}: {error.strerror}") from error
    if len(content) > BYTES_MAX:
        raise SourceUnreadable(f"{source.location}: has more than {BYTES_MAX} bytes")
    return content


def json_bodies(source: Source, content: bytes) -> Iterator[object]:
    """Yield the objects of a JSON list, or the one object, with the source's name and fields for those that are missing."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SourceUnreadable(f"{source.location}: is no JSON: {error}") from error
    given = {"source": source.name, "category": source.category, "content_type": source.content_type, "tags": []}
    for entry in document if isinstance(document, list) else [document]:
        if isinstance(entry, dict):
            body = given | entry
            yield body | {"tags": with_tags(source, body["tags"])}
        else:
            yield entry


def with_tags(source: Source, tags: object) -> object:
    """Return an entry's tags, with those of its source if it names fewer than two. `new_item` refuses what is no list."""
    if not isinstance(tags, list) or len(tags) >= TAGS[0]:
        return tags
    return [*tags, *(tag for tag in source.tags if tag not in tags)][: TAGS[1]]


def feed_bodies(source: Source, content: bytes) -> Iterator[object]:
    """Yield an item's fields for each entry of an RSS or Atom document."""
    try:
        # Expat bounds how far entities may expand, and BYTES_MAX what they expand from; external ones are never read.
        root = ET.fromstring(content)  # noqa: S314
    except (ET.ParseError, ValueError, LookupError) as error:
        raise SourceUnreadable(f"{source.location}: is no XML: {error}") from error
    # RSS 2 has its entries in a channel, RSS 1 and Atom in the root, and Atom may be one entry. An entry within another
    # isn't one: in a deep nest of them, the text of each would be that of all within it.
    for parent in ([root], root, *root):
        for entry in parent:
            if local_name(entry) in ("item", "entry"):
                yield entry_body(source, entry)


def entry_body(source: Source, entry: ET.Element) -> dict[str, Any]:
    """Return the fields of one entry: the first two sentences as summary, all of its text counted."""
    children: dict[str, list[ET.Element]] = {}
    for child in entry:
        children.setdefault(local_name(child), []).append(child)

    def first(*names: str) -> str:
        """Return the text of the first child that has some."""
        texts = (" ".join("".join(child.itertext()).split()) for name in names for child in children.get(name, []))
        return next(filter(None, texts), "")

    description = plain(first("description", "summary", "encoded", "content"))
    whole = plain(first("encoded", "content", "description", "summary"))
    labels = [child.get("term") or child.text or "" for child in children.get("category", [])]
    tags = [*dict.fromkeys(tag for label in labels if (tag := label.strip().lower()) and len(tag) <= NAME_MAX)]
    return {
        "url": link(children.get("link", [])),
        "title": plain(first("title")),
        # Atom's author has a name within, and perhaps an address that is no one's business.
        "creator": first("creator") or author(children.get("author", [])) or source.name,
        "category": source.category,
        "source": source.name,
        "tags": with_tags(source, tags[: TAGS[1]]),
        "entities": [],
        "content_type": source.content_type,
        "summary": first_sentences(description, 2),
        "words": len(whole.split()),
    }


def local_name(element: ET.Element) -> str:
    """Return an element's name without its namespace: RSS 1, RSS 2 and Atom differ by it."""
    return element.tag.rpartition("}")[2]


def link(elements: list[ET.Element]) -> str:
    """Return the address of the entry itself: RSS's text, or Atom's `href` of the alternate link."""
    for element in elements:
        if element.get("rel", "alternate") == "alternate" and (address := element.get("href") or element.text):
            return address.strip()
    return ""


def author(elements: list[ET.Element]) -> str:
    """Return an author's name."""
    for element in elements:
        named = [child.text for child in element if local_name(child) == "name"]
        if name := ((named[0] if named else element.text) or "").strip():
            return name
    return ""


def plain(markup: str) -> str:
    """Return the text of a piece of HTML in one line, without scripts, styles and comments. A tag ends a word."""
    prose = MARKUP.sub(" ", markup)
    # int() refuses a character's number of thousands of digits. The text stays, and the rules of an item judge it.
    with contextlib.suppress(ValueError):
        prose = html.unescape(prose)
    # A tag within a sentence (<b>word</b>.) leaves a space before its full stop.
    return SPACE_BEFORE_STOP.sub(r"\1", " ".join(prose.split()))


def first_sentences(prose: str, count: int) -> str:
    """Return the first sentences of a text, or all of it if it has fewer."""
    ends = [found.end() for found in SENTENCE_END.finditer(prose)]
    return prose[: ends[count - 1]] if len(ends) >= count else prose
