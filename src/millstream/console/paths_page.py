"""The page of the server's paths, `/docs`: what `/openapi.json` describes, for people.

It is open to everyone, as that is, and shows nothing of the home.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from millstream.console.html import Content, Html, tag, with_code

Described: TypeAlias = Mapping[str, Any]
"""An OpenAPI document, or a part of it."""
_TITLES: Final = {"read": "Reading", "write": "Writing", "consume": "Consuming", "health": "Health"}
"""Headings by the tag of a path; others get their tag."""


def paths(described: Described) -> Iterator[Content]:
    """Yield the server's paths, by what they are for."""
    groups: dict[str, list[Html]] = defaultdict(list)
    for path, methods in described["paths"].items():
        for method, facts in methods.items():
            groups[next(iter(facts.get("tags", ())), "other")].append(_path(method.upper(), path, facts))
    yield tag("p", *with_code("`GET /openapi.json` has all of it, with the forms of bodies and answers, for programs."))
    for name, found in groups.items():
        yield tag("section", tag("h2", _TITLES.get(name, name.capitalize())), *found)


def _path(method: str, path: str, facts: Described) -> Html:
    texts = [facts.get("summary", ""), facts.get("description", "")]
    return tag(
        "article",
        tag("h3", tag("code", f"{method} {path}")),
        *(tag("p", with_code(paragraph)) for text in texts for paragraph in text.split("\n\n") if paragraph),
        tag("ul", *(_parameter(one) for one in facts["parameters"])) if facts.get("parameters") else None,
        class_="path",
    )


def _parameter(described: Described) -> Html:
    """Return a parameter: its name, where it stands, and what it takes."""
    form = described.get("schema", {})
    kinds = sorted({one["type"] for one in (form, *form.get("anyOf", ())) if one.get("type", "null") != "null"})
    said = [f"in the {described['in']}", *kinds]
    said += [f"{word} {form[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in form]
    if form.get("default") is not None:
        said.append(f"default {form['default']}")
    if described.get("required"):
        said.append("required")
    about = described.get("description", "")
    return tag("li", tag("code", described["name"]), f" ({', '.join(said)})", *with_code(f": {about}" if about else ""))
