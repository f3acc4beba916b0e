"""The rules that an item keeps before it enters the log, and the error that names the field which breaks one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from millstream_forage.errors import InvalidField

CONTENT_TYPES: Final = ("analysis", "news", "tutorial", "opinion", "review", "interview", "research")
WORDS_PER_MINUTE: Final = 200
WORDS_MAX: Final = 10_000_000
"""More than any book has."""
URL_MAX: Final = 2_048
TITLE_MAX: Final = 300
NAME_MAX: Final = 100
"""Characters of a creator, a category, a source, a tag or an entity."""
SUMMARY_MAX: Final = 2_000
TAGS: Final = (2, 5)
ENTITIES_MAX: Final = 5
UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line separators and lone surrogates: no text of one line has them."""
INVISIBLE: Final = {"Cf", "Mn", "Me", "Zs"}
"""Unicode's categories of characters that are invisible alone: zero-width ones, combining marks and spaces."""
SENTENCE_END: Final = re.compile(r"[.!?](?=\s|\Z)")


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item that keeps every rule."""

    url: str
    title: str
    creator: str
    category: str
    source: str
    tags: tuple[str, ...]
    entities: tuple[str, ...]
    content_type: str
    summary: str
    reading_time_min: int


def new_item(body: object) -> NewItem:
    """Return the item that a JSON object describes.

    Raises:
        InvalidField: a field is missing, unknown, of the wrong type or breaks its rule; the first one in the order of
            the fields, unknown ones last.
    """
    if not isinstance(body, Mapping):
        raise InvalidField("body", "must be an object", hint=f"Send an object with {', '.join(RULES)}.")
    found: dict[str, Any] = {name: rule(name, present(body, name)) for name, rule in RULES.items()}
    minutes = -(-found.pop("words") // WORDS_PER_MINUTE)
    if "reading_time_min" in body and (
        type(body["reading_time_min"]) is not int or body["reading_time_min"] != minutes
    ):
        raise InvalidField(
            "reading_time_min",
            f"must be {minutes}: the words divided by {WORDS_PER_MINUTE}, rounded up",
            hint="Omit it.",
        )
    for name in body:
        if name not in RULES and name != "reading_time_min":
            raise InvalidField(str(name), "is no field of an item", hint=f"The fields are {', '.join(RULES)}.")
    return NewItem(**found, reading_time_min=minutes)


def present(body: Mapping[str, object], name: str) -> object:
    """Return a field's value."""
    if name not in body:
        raise InvalidField(name, "is missing")
    return body[name]


def text(name: str, value: object, *, most: int) -> str:
    """Check a text of one line."""
    if not isinstance(value, str):
        raise InvalidField(name, "must be a text")
    if not value.strip():
        raise InvalidField(name, "must not be empty")
    if len(value) > most:
        raise InvalidField(name, f"must have at most {most} characters, and has {len(value)}")
    if UNPRINTABLE.search(value):
        raise InvalidField(name, "must not contain control characters, line breaks or half a character")
    if all(unicodedata.category(character) in INVISIBLE for character in value):
        raise InvalidField(name, "must have a character that can be seen")
    return value


def names(name: str, value: object, *, least: int, most: int) -> tuple[str, ...]:
    """Check a list of distinct names."""
    if not isinstance(value, list | tuple):
        raise InvalidField(name, "must be a list of texts")
    if not least <= len(value) <= most:
        bounds = f"{least} to {most}" if least else f"at most {most}"
        raise InvalidField(name, f"must have {bounds} entries, and has {len(value)}")
    found = tuple(text(name, entry, most=NAME_MAX) for entry in value)
    if len(set(found)) < len(found):
        raise InvalidField(name, "must not name anything twice")
    return found


def title(name: str, value: object) -> str:
    """Check a title."""
    return text(name, value, most=TITLE_MAX)


def short_name(name: str, value: object) -> str:
    """Check the name of a creator, a category or a source."""
    return text(name, value, most=NAME_MAX)


def url(name: str, value: object) -> str:
    """Check an address that a browser may be sent to."""
    address = text(name, value, most=URL_MAX)
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that isn't closed
        usable = False
    if not usable or re.search(r"\s", address):
        raise InvalidField(name, "must be an http or https address without spaces")
    return address


def tags(name: str, value: object) -> tuple[str, ...]:
    """Check the tags: lower-case names."""
    found = names(name, value, least=TAGS[0], most=TAGS[1])
    for tag in found:
        if tag != tag.lower():
            raise InvalidField(name, f"{tag!r} is not lower-case")
    return found


def entities(name: str, value: object) -> tuple[str, ...]:
    """Check the names of people, places and things."""
    return names(name, value, least=0, most=ENTITIES_MAX)


def content_type(name: str, value: object) -> str:
    """Check the kind of content."""
    if not isinstance(value, str) or value not in CONTENT_TYPES:
        raise InvalidField(name, f"must be one of {', '.join(CONTENT_TYPES)}")
    return value


def summary(name: str, value: object) -> str:
    """Check a summary: two sentences, each of which ends in a full stop, an exclamation mark or a question mark."""
    sentences = SENTENCE_END.split(text(name, value, most=SUMMARY_MAX).rstrip())
    # The text behind the last end is empty, each sentence before it has a letter or a digit.
    if len(sentences) != 3 or sentences[2] or not all(re.search(r"\w", sentence) for sentence in sentences[:2]):
        raise InvalidField(
            name,
            "must be exactly two sentences",
            hint="End each sentence in . ! or ? and a space, abbreviations in none.",
        )
    return str(value)


def words(name: str, value: object) -> int:
    """Check the number of words of the whole text."""
    if type(value) is not int:
        raise InvalidField(name, "must be a whole number")
    if not 1 <= value <= WORDS_MAX:
        raise InvalidField(name, f"must be from 1 to {WORDS_MAX}")
    return value


RULES: Final[dict[str, Callable[[str, object], Any]]] = {
    "url": url,
    "title": title,
    "creator": short_name,
    "category": short_name,
    "source": short_name,
    "tags": tags,
    "entities": entities,
    "content_type": content_type,
    "summary": summary,
    "words": words,
}
"""The fields of an item, in order, and the rule of each. `reading_time_min` may be sent too, if it is right."""
