"""The dead letters of a consumer, each with its record, its error, and what can be done with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.console.actions import Order, order_form
from millstream.console.html import Html, shortened, tag
from millstream.console.page_frame import error_content
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.writers.home_consumers import HomeConsumers

LETTERS_SHOWN: Final = 50
_RECORD_MAX: Final = 10_000


def letters(consumers: HomeConsumers, stream: str, name: str, *, may_act: bool) -> Html | None:
    """Return a consumer's oldest dead letters; None if it has none. Blocks."""
    title = tag("h2", "Dead letters")
    try:
        body = consumers.call(stream, "dead", name, {"limit": LETTERS_SHOWN}).body
    except MillstreamError as error:
        return tag("section", title, error_content(error))
    if not body["dead"]:
        return None
    more = tag("p", "These are the oldest. `millstream consumer dead ls` lists all.", class_="note")
    items = [_letter(stream, name, one, may_act=may_act) for one in body["dead"]]
    return tag("section", title, tag("ul", *items, class_="records"), more if body["next"] else None, id="dead")


def _letter(stream: str, name: str, letter: Mapping[str, Any], *, may_act: bool) -> Html:
    record = json.dumps(json.loads(letter["record"]), ensure_ascii=False, indent=1)
    lines = [tag("code", line, tag("br")) for line in shortened(record, _RECORD_MAX).split("\n")]
    deliveries = letter["deliveries"]
    summary = f", {letter['died']}, after {deliveries:,} {'delivery' if deliveries == 1 else 'deliveries'}"
    asked = [Order("", each, stream, name, letter["id"]) for each in ("retry_letter", "drop_letter")] if may_act else []
    return tag(
        "li",
        tag("p", tag("strong", letter["id"]), summary, f": {letter['error']}" if letter["error"] else None),
        tag("div", *map(order_form, asked), class_="row") if asked else None,
        tag("details", tag("summary", "Record"), tag("p", *lines, class_="record")),
        class_="trouble",
    )
