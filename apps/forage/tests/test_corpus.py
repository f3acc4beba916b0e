"""The default corpus keeps every rule of an item, and is varied enough to explore."""

from collections import Counter, defaultdict

import numpy as np

from millstream_forage.corpus import default_corpus
from millstream_forage.embedding import HashedGrams, cosines, item_vectors
from millstream_forage.taste import Liked, taste


def test_the_corpus_has_a_hundred_items_in_eight_categories_of_several_sources() -> None:
    items = default_corpus()
    assert len(items) == len({item.url for item in items}) == len({item.title for item in items}) == 100
    assert len({item.creator for item in items}) > 20
    assert set(Counter(item.category for item in items).values()) == {12, 13}
    sources: dict[str, set[str]] = defaultdict(set)
    for item in items:
        sources[item.category].add(item.source)
    assert len(sources) == 8
    assert all(len(names) >= 3 for names in sources.values())
    assert len({item.content_type for item in items}) == 7


def test_two_liked_items_of_a_category_match_most_of_it_and_little_else() -> None:
    items = default_corpus()
    vectors = item_vectors(HashedGrams(), items)
    categories = np.array([item.category for item in items])
    for category in set(categories):
        liked = np.flatnonzero(categories == category)[:3]
        found = taste([Liked(int(item), 1, 1.0, 0) for item in liked], dict(enumerate(vectors)))
        matches = found.similarities(vectors) >= 0.35
        assert matches[categories == category].mean() > 0.8
        assert matches[categories != category].mean() < 0.05


def test_items_of_a_category_are_near_and_others_not() -> None:
    items = default_corpus()
    vectors = item_vectors(HashedGrams(), items)
    near = cosines(vectors, vectors)
    categories = np.array([item.category for item in items])
    same = categories[:, None] == categories
    assert np.median(near[same & ~np.eye(100, dtype=bool)]) > 0.35 > np.quantile(near[~same], 0.99)
