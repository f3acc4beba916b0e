"""The default corpus: a hundred invented items, so that a new Forage has something to show."""

from __future__ import annotations

import json
from importlib import resources

from millstream_forage.items import NewItem, new_item


def default_corpus() -> list[NewItem]:
    """Return the items, in the order in which they get their ids; neighbours are of different categories."""
    text = resources.files(__package__).joinpath("corpus.json").read_text(encoding="utf-8")
    return [new_item(body) for body in json.loads(text)]
