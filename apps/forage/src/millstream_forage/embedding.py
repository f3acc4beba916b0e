"""Unit vectors of texts, and their cosine.

`HashedGrams` needs nothing but the text: it counts words and character n-grams in hashed dimensions. Its sums are of
whole numbers, so that every machine gets the same bits. A real model takes its place by the protocol `Embedder`.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

DIMENSIONS: Final = 64
DECIMALS: Final = 9
"""Digits of a cosine that count: the order in which a build of numpy sums products changes the digits after them."""
WORD: Final = re.compile(r"[^\W_]+")
WORD_WEIGHT: Final = 3
"""Weight of a whole word against one of its n-grams, so that related forms are near and others of the same letters not."""
GRAM: Final = 4
STOP_WORDS: Final = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "been",
        "but",
        "by",
        "can",
        "do",
        "for",
        "from",
        "had",
        "has",
        "have",
        "how",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "more",
        "no",
        "not",
        "of",
        "on",
        "or",
        "our",
        "so",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "up",
        "was",
        "we",
        "were",
        "what",
        "when",
        "which",
        "who",
        "why",
        "will",
        "with",
        "you",
        "your",
    ]
)
CATEGORY_WEIGHT: Final = 0.7
TAGS_WEIGHT: Final = 0.5
TEXT_WEIGHT: Final = 0.5
"""Weights of an item's parts. In the default corpus the cosine of two items has its median at 0.50 within a category and at
0.01 between two, so that the threshold of a match (0.35) parts them."""


class Described(Protocol):
    """An item, as far as its vector goes."""

    @property
    def title(self) -> str:
        """The title."""
        ...

    @property
    def category(self) -> str:
        """The category, one or a few words."""
        ...

    @property
    def tags(self) -> Sequence[str]:
        """The tags."""
        ...

    @property
    def entities(self) -> Sequence[str]:
        """Names of people, places and things; may be empty."""
        ...

    @property
    def summary(self) -> str:
        """The summary."""
        ...


class Embedder(Protocol):
    """A model that gives texts of like meaning near vectors. The same text has the same vector for ever."""

    @property
    def name(self) -> str:
        """Name and version of the model: vectors of different names are never compared."""
        ...

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return one vector a text, as rows of `DIMENSIONS` columns, not all of them zero."""
        ...


class HashedGrams:
    """The embedder that is built in: counts of hashed words and of their character n-grams."""

    name: Final = "hashed-grams-1"

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return one vector a text. A text without words gets a direction of its own, by its hash."""
        counts = np.zeros((len(texts), DIMENSIONS), dtype=np.int64)
        for row, text in enumerate(texts):
            for word in WORD.findall(text.lower()):
                if word not in STOP_WORDS:
                    counts[row] += word_counts(word)
            if not counts[row].any():
                counts[row] = word_counts(text)
        return counts.astype(np.float64)


@lru_cache(maxsize=1 << 15)
def word_counts(word: str) -> npt.NDArray[np.int64]:
    """Return what a word adds to each dimension; never zero in all of them."""
    counts = np.zeros(DIMENSIONS, dtype=np.int64)
    marked = f"<{word}>"
    add(counts, marked, WORD_WEIGHT)
    for begin in range(len(marked) - GRAM + 1):
        add(counts, marked[begin : begin + GRAM], 1)
    if not counts.any():
        add(counts, marked, 1)
    counts.flags.writeable = False
    return counts


def add(counts: npt.NDArray[np.int64], gram: str, weight: int) -> None:
    """Add a gram to the dimension, and with the sign, that its hash picks."""
    # CRC-32 alone is linear in its input; the product spreads near texts over the high bits.
    mixed = zlib.crc32(gram.encode("utf-8", "surrogatepass")) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    counts[mixed >> 58] += weight if mixed >> 57 & 1 else -weight


def unit_vectors(embedder: Embedder, texts: Sequence[str]) -> Floats:
    """Return the embedder's vectors at length 1: rows of `DIMENSIONS` columns.

    Raises:
        ValueError: the embedder returned another shape, or a vector that has no direction.
    """
    vectors = np.asarray(embedder.embed(texts), dtype=np.float64)
    if vectors.shape != (len(texts), DIMENSIONS):
        raise ValueError(f"{embedder.name} returned {vectors.shape} for {len(texts)} texts of {DIMENSIONS} dimensions")
    return at_length_one(vectors, embedder)


def at_length_one(vectors: Floats, embedder: Embedder) -> Floats:
    """Return each row divided by its length; ValueError if a row has no direction."""
    lengths = row_lengths(vectors)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        raise ValueError(f"{embedder.name} gives a vector that is zero, infinite or not a number")
    units: Floats = vectors / lengths[:, None]
    return units


def row_lengths(vectors: Floats) -> Floats:
    """Return the length of each row, from a sum that is rounded once: the same bits in whatever order a machine adds."""
    return np.array([math.sqrt(math.fsum(row)) for row in np.square(vectors).tolist()], dtype=np.float64)


def length_of(vector: Floats) -> float:
    """Return the length of one vector, as `row_lengths`."""
    return math.sqrt(math.fsum(np.square(vector).tolist()))


def cosines(left: Floats, right: Floats) -> Floats:
    """Return the cosine of each row of `left` with each row of `right`, both unit vectors, to nine digits."""
    # Adding zero turns -0.0 into 0.0, which prints alike everywhere.
    rounded: Floats = (left @ right.T).round(DECIMALS) + 0.0
    return rounded


def item_vectors(embedder: Embedder, items: Sequence[Described]) -> Floats:
    """Return the unit vector of each item: a weighted sum of those of its category, its tags and its text.

    The category has a weight of its own, since a text of forty words would drown its one.

    Raises:
        ValueError: as `unit_vectors`.
    """
    parts = (
        (CATEGORY_WEIGHT, [item.category for item in items]),
        (TAGS_WEIGHT, [" ".join((*item.tags, *item.entities)) for item in items]),
        (TEXT_WEIGHT, [f"{item.title}. {item.summary}" for item in items]),
    )
    total = sum((weight * unit_vectors(embedder, texts) for weight, texts in parts), np.zeros((len(items), DIMENSIONS)))
    return at_length_one(total, embedder)
