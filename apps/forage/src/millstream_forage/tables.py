"""The stream `forage`: its tables, their columns and keys, and the configuration of a home that holds it.

| table | one record is |
| --- | --- |
| `items` | an item that may be shown |
| `signals` | a user's reaction to an item, mostly to one impression of it |
| `impressions` | an item in a slot of a feed that was shown |
| `hides` | a change of what a user hides, keyed by user and target |
| `heartbeats` | a run of an agent that discovers items |

Ids are whole numbers that the writing region hands out: `region << 40 | n`, n from 1. So they grow within a region, and
two regions never give the same one.
"""

from __future__ import annotations

import tomllib
from typing import Any, Final, Literal, TypeAlias, get_args

import pyarrow as pa

STREAM: Final = "forage"
ID_MAX: Final = (1 << 53) - 1
"""The greatest user, item or seed: the last whole number that every JSON reader keeps exactly."""
REGION_BITS: Final = 40
"""Ids of a region, as bits: a trillion. Above them 13 bits are left for the region's number."""
REGION_MAX: Final = ID_MAX >> REGION_BITS
"""The greatest number of a region."""
DIMENSIONS: Final = 64
"""Dimensions of an embedding."""

Kind: TypeAlias = Literal["view", "dwell", "save", "skip", "share"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
DWELL_FULL_MS: Final = 60_000
"""A dwell of this length is worth as much as a save."""
WEIGHTS: Final = {"save": 1.0, "share": 1.0, "view": 0.3, "skip": 0.0}
"""The rewards of signals, except dwells."""
Target: TypeAlias = Literal["item", "source", "creator"]
TARGETS: Final[tuple[Target, ...]] = get_args(Target)
HideKind: TypeAlias = Literal["hide", "mute", "block", "unhide"]
TARGET_OF: Final[dict[str, Target]] = {"hide": "item", "mute": "source", "block": "creator"}
"""The target of each kind that hides. A skip hides an item, too, as a record of kind `skip`."""

_TEXTS: Final = pa.list_(pa.string())
ITEMS: Final = pa.schema(
    {
        "id": pa.int64(),
        "url": pa.string(),
        "title": pa.string(),
        "creator": pa.string(),
        "category": pa.string(),
        "source": pa.string(),
        "tags": _TEXTS,
        "entities": _TEXTS,
        "content_type": pa.string(),
        "summary": pa.string(),
        "reading_time_min": pa.int64(),
        "embedding": pa.list_(pa.float32()),
        "added": pa.int64(),
    }
)
"""`embedding` is a unit vector of `DIMENSIONS`; `added` is in nanoseconds since 1970."""
SIGNALS: Final = pa.schema(
    {
        "id": pa.int64(),
        "user": pa.int64(),
        "item": pa.int64(),
        "kind": pa.string(),
        "weight": pa.float64(),
        "duration_ms": pa.int64(),
        "impression": pa.int64(),
        "idempotency_key": pa.string(),
        "now": pa.int64(),
    }
)
"""`weight` is the reward of this signal; `duration_ms` of a dwell; `impression` and the key may be null."""
IMPRESSIONS: Final = pa.schema(
    {
        "id": pa.int64(),
        "feed": pa.int64(),
        "user": pa.int64(),
        "item": pa.int64(),
        "slot": pa.int64(),
        "arm": pa.string(),
        "label": pa.string(),
        "explore": pa.bool_(),
        "propensity": pa.float64(),
        "policy": pa.string(),
        "seed": pa.int64(),
        "limit": pa.int64(),
        "token": pa.string(),
        "now": pa.int64(),
    }
)
"""A feed's rows are one operation, in the order of their slots. With the log up to `token` they give the feed again."""
HIDES: Final = pa.schema(
    {
        "user": pa.int64(),
        "target": pa.string(),
        "value": pa.string(),
        "hidden": pa.bool_(),
        "kind": pa.string(),
    }
)
"""`value` is an item's id as text, or a source's or creator's name."""
HEARTBEATS: Final = pa.schema({"now": pa.int64()})

SCHEMAS: Final[dict[str, pa.Schema]] = {
    "items": ITEMS,
    "impressions": IMPRESSIONS,
    "signals": SIGNALS,
    "hides": HIDES,
    "heartbeats": HEARTBEATS,
}
"""The tables: each after those that its records refer to."""


def arm_name(category: str, source: str) -> str:
    """Return the name of an arm in records: its first slash ends the category, in which `%` and `/` are `%25` and `%2F`."""
    return f"{category.replace('%', '%25').replace('/', '%2F')}/{source}"


def home_config(region: int = 0) -> str:
    """Return the `millstream.toml` of a new home.

    The log is the only copy of the state, so nothing of it is ever dropped.
    """
    return f"""# Forage's home: one stream, which holds the whole state of the feed.
[streams.{STREAM}]
region = {region}

[streams.{STREAM}.log]
# The log is the only copy of the state: it is kept for ever.
retention_age = "36500d"
retention_bytes = "100%"
retention_bytes_max = "100%"

[streams.{STREAM}.keys]
"public.items" = ["id"]
"public.hides" = ["user", "target", "value"]

[streams.{STREAM}.merge."public.hides"]
hidden = "hide"
"""


def has_stream(config: str) -> bool:
    """Return whether a home's configuration has the stream."""
    return STREAM in tomllib.loads(config).get("streams", {})


def lacking(config: str) -> list[str]:
    """Return the settings of `home_config` that a home's configuration of the stream lacks.

    Without its merge and keys, regions couldn't merge what users hide. How long the log is kept may be set otherwise, but
    not be left to the default, which drops it after days.
    """
    found, wanted = (tomllib.loads(text)["streams"][STREAM] for text in (config, home_config()))
    lacks = [f"log.{name}" for name in wanted["log"] if name not in found.get("log", {})]
    for section in ("keys", "merge"):
        tables = {name.removeprefix("public."): of for name, of in found.get(section, {}).items()}
        lacks += [
            f'{section}."{name}"'
            for name, of in wanted[section].items()
            if tables.get(name.removeprefix("public.")) != of
        ]
    return lacks


def region_of(config: str) -> int:
    """Return the region's number in a home's configuration."""
    stream: dict[str, Any] = tomllib.loads(config).get("streams", {}).get(STREAM, {})
    return int(stream.get("region", 0))


def other_regions(config: str) -> list[int]:
    """Return the numbers of the regions that a home follows."""
    regions: dict[str, str] = tomllib.loads(config).get("replication", {}).get("regions", {})
    return sorted(map(int, regions))
