"""The answers of the engine, with the names that its HTTP interface and its users see.

Times are whole nanoseconds since 1970. `as_json` turns an answer into the object of its document.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Answer: TypeAlias = "BrowseTasks | Feed | Heartbeat | HideAnswer | ItemAnswer | ItemsPage | SignalAnswer"


@dataclass(frozen=True, slots=True)
class FeedItem:
    """One slot of a feed."""

    item_id: int
    title: str
    url: str
    creator: str
    category: str
    source: str
    summary: str
    tags: list[str]
    reading_time_min: int
    label: str
    """`match`, `exploring` or `none`."""
    explore: bool
    """Whether the slot was given to an arm that is still unexplored."""
    reason: str
    """One sentence for people."""
    slot: int
    """From 1."""
    impression_id: int | None
    """None in a preview."""
    propensity: float
    """Probability over all seeds that this item stands here, given the items and `explore` flags of the slots before."""
    similarity: float
    """Greatest cosine with one of the user's confirmed centroids; 0 if there is none."""
    threshold: float
    """Least similarity of a `match`."""
    category_share: float
    """Part of the user's impressions that the category had."""
    target_share: float
    """Part that it should have."""


@dataclass(frozen=True, slots=True)
class Feed:
    """A feed: a function of the log up to `token`, the user, the limit, the seed and `now`."""

    feed_id: int | None
    """None for a preview."""
    policy: str
    seed: int
    token: str
    """Position that the feed was computed at, before its own impressions."""
    now: int
    items: list[FeedItem]


@dataclass(frozen=True, slots=True)
class SignalAnswer:
    """A signal that the log has."""

    signal_id: int
    token: str
    duplicate: bool
    """Whether the log had it before; then the id is the first one's."""


@dataclass(frozen=True, slots=True)
class HideAnswer:
    """A change of what a user hides. No feed shows the target after this."""

    token: str


@dataclass(frozen=True, slots=True)
class ItemAnswer:
    """An item that the log has."""

    item_id: int
    token: str
    duplicate: bool
    """Whether an item of this URL was there before; then the id is its."""


@dataclass(frozen=True, slots=True)
class ListedItem:
    """An item with the signals of all users that count."""

    item_id: int
    url: str
    title: str
    creator: str
    category: str
    source: str
    tags: list[str]
    entities: list[str]
    content_type: str
    summary: str
    reading_time_min: int
    added: int
    signals: dict[str, int]
    """Number of signals of each kind; all kinds are there."""


@dataclass(frozen=True, slots=True)
class ItemsPage:
    """A page of items by id."""

    items: list[ListedItem]
    next: int | None
    """Id to continue after; None on the last page."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that a browsing agent should look for."""

    name: str
    priority: float
    """From 0 to 1."""
    sources: list[str]


@dataclass(frozen=True, slots=True)
class BrowseTasks:
    """Instructions for an agent that discovers items."""

    should_run: bool
    interval_minutes: int
    topics: list[Topic]
    """By falling priority."""
    limit_per_topic: int
    tag_hints: list[str]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The answer to a discovery run."""

    next_run: int


def as_json(answer: Answer) -> dict[str, Any]:
    """Return the object of an answer's document, its fields in order."""
    return asdict(answer)
