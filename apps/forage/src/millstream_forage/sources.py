"""The registry of sources: feeds and files that an operator names, read into items that keep every rule.

Nothing here follows a link. A source is one RSS or Atom document, one JSON file or the files of one folder. Addresses
are fetched only if the registry says `http = true`, and only if the host's robots.txt allows it (`fetching`).
An entry or a source that can't be used is reported with its reason and doesn't stop the others.

    http = false

    [[sources]]
    name = "Open Lecture"
    feed = "feeds/open-lecture.xml"   # or json = "items.json", or directory = "inbox"
    category = "science"
    tags = ["lectures", "science"]    # for entries that name fewer than two
    content_type = "analysis"         # "news" if it isn't named
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from xml.etree import ElementTree as ET

from millstream_forage.errors import InvalidField, SourceUnreadable
from millstream_forage.fetching import fetch
from millstream_forage.items import CONTENT_TYPES, NAME_MAX, SENTENCE_END, TAGS, NewItem, new_item, short_name, text
from millstream_forage.items import names as distinct_names

Kind: TypeAlias = Literal["feed", "json", "directory"]
KINDS: Final[tuple[Kind, ...]] = ("feed", "json", "directory")
BYTES_MAX: Final = 8 << 20
"""Bytes of one document. Feeds have tens of kilobytes; it bounds what a broken one takes."""
FEED_SUFFIXES: Final = {".xml", ".rss", ".atom"}
ADDRESS: Final = re.compile(r"https?://", re.IGNORECASE)
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
    """An entry that breaks a rule, or a whole source that can't be read."""

    source: str
    entry: str
    """Address or title of the entry; empty for a whole source."""
    reason: str


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
            SourceUnreadable: the file can't be read, or isn't TOML.
            InvalidField: a field is missing, unknown or breaks its rule.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SourceUnreadable(f"{path}: {error}") from error
        if unknown := sorted(document.keys() - {"http", "sources"}):
            raise InvalidField(unknown[0], "is no field of a registry", hint="The fields are http and sources.")
        http, entries = document.get("http", False), document.get("sources", [])
        if not isinstance(http, bool):
            raise InvalidField("http", "must be true or false")
        if not isinstance(entries, list):
            raise InvalidField("sources", "must be a list of tables", hint="Begin each source with [[sources]].")
        return cls(tuple(source_of(entry, path.parent) for entry in entries), http)

    def capture(self) -> Captured:
        """Read every source. Items come in the order of the sources and of the entries in each."""
        captured = Captured()
        for source in self.sources:
            try:
                for body in self._bodies(source):
                    add(captured, source, body)
            except SourceUnreadable as error:
                captured.refused.append(Refused(source.name, "", error.message))
        return captured

    def _bodies(self, source: Source) -> Iterator[object]:
        """Yield the fields of an item for each entry of a source."""
        if not ADDRESS.match(source.location):
            yield from file_bodies(source, Path(source.location))
        elif self.http:
            yield from feed_bodies(source, fetch(source.location, bytes_max=BYTES_MAX))
        else:
            raise SourceUnreadable(f"{source.location}: http is off", hint="Set `http = true` in the registry.")


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
        name=short_name("name", entry.get("name")),
        kind=kinds[0],
        location=location,
        category=short_name("category", entry.get("category")),
        tags=distinct_names("tags", entry.get("tags", []), least=0, most=TAGS[1]),
        content_type=content_type,
    )


def add(captured: Captured, source: Source, body: object) -> None:
    """Add the item of one entry, or the reason why there is none."""
    try:
        captured.items.append(new_item(body))
    except InvalidField as error:
        entry = (body.get("url") or body.get("title") or "") if isinstance(body, Mapping) else ""
        captured.refused.append(Refused(source.name, str(entry), error.message))


def file_bodies(source: Source, path: Path) -> Iterator[object]:
    """Yield the entries of a file, or of a folder's files in the order of their names."""
    if source.kind == "directory":
        try:
            files = sorted(path.iterdir())
        except OSError as error:
            raise SourceUnreadable(f"{path}: {error.strerror}") from error
        for file in files:
            if file.suffix == ".json":
                yield from json_bodies(source, read(file))
            elif file.suffix in FEED_SUFFIXES:
                yield from feed_bodies(source, read(file))
    else:
        yield from (json_bodies if source.kind == "json" else feed_bodies)(source, read(path))


def read(path: Path) -> bytes:
    """Return a file's content."""
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise SourceUnreadable(f"{path}: {error.strerror}") from error
    if len(content) > BYTES_MAX:
        raise SourceUnreadable(f"{path}: has more than {BYTES_MAX} bytes")
    return content


def json_bodies(source: Source, content: bytes) -> Iterator[object]:
    """Yield the objects of a JSON list, or the one object; source and category are the source's if they are missing."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SourceUnreadable(f"{source.location}: is no JSON: {error}") from error
    for entry in document if isinstance(document, list) else [document]:
        yield {"source": source.name, "category": source.category} | entry if isinstance(entry, dict) else entry


def feed_bodies(source: Source, content: bytes) -> Iterator[object]:
    """Yield an item's fields for each entry of an RSS or Atom document."""
    try:
        # Expat bounds how far entities may expand, and BYTES_MAX what they expand from; external ones are never read.
        root = ET.fromstring(content)  # noqa: S314
    except (ET.ParseError, ValueError, LookupError) as error:
        raise SourceUnreadable(f"{source.location}: is no XML: {error}") from error
    for entry in root.iter():
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
    if len(tags) < TAGS[0]:
        tags = [*dict.fromkeys([*tags, *source.tags])]
    return {
        "url": link(children.get("link", [])),
        "title": plain(first("title")),
        # Atom's author has a name within, and perhaps an address that is no one's business.
        "creator": first("creator") or author(children.get("author", [])) or source.name,
        "category": source.category,
        "source": source.name,
        "tags": tags[: TAGS[1]],
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


class PlainText(HTMLParser):
    """Collects the text of a piece of HTML, without scripts and styles."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a tag: a word ends there."""
        del attrs
        self.parts.append(" ")
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        """End a tag."""
        self.parts.append(" ")
        self._hidden -= tag in ("script", "style") and self._hidden > 0

    def handle_data(self, data: str) -> None:
        """Keep a piece of text."""
        if not self._hidden:
            self.parts.append(data)


def plain(html: str) -> str:
    """Return the text of a piece of HTML in one line."""
    parser = PlainText()
    parser.feed(html)
    parser.close()
    # A tag within a sentence (<b>word</b>.) leaves a space before its full stop.
    return re.sub(r"\s+([.,;:!?])", r"\1", " ".join("".join(parser.parts).split()))


def first_sentences(prose: str, count: int) -> str:
    """Return the first sentences of a text, or all of it if it has fewer."""
    ends = [found.end() for found in SENTENCE_END.finditer(prose)]
    return prose[: ends[count - 1]] if len(ends) >= count else prose
