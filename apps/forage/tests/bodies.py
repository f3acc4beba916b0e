"""Items as callers send them."""

from typing import Any, Final

ITEM: Final[dict[str, Any]] = {
    "url": "https://lantern.example/a",
    "title": "A Lamp",
    "creator": "Ana Bell",
    "category": "design",
    "source": "Lantern",
    "tags": ["light", "design"],
    "entities": [],
    "content_type": "review",
    "summary": "It shines. It lasts.",
    "words": 401,
}
ENTRY: Final[dict[str, Any]] = {
    "url": "https://tides.example/4",
    "title": "Harbours That Rise",
    "creator": "Malin",
    "tags": ["harbours", "climate"],
    "entities": [],
    "content_type": "analysis",
    "summary": "A quay must last. It is made to be raised.",
    "words": 1420,
}
"""An item in a source, which adds its category and its own name."""
