"""Vectors of texts: the same bits everywhere, near for like texts, and only those of the protocol's shape."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_forage.embedding import DIMENSIONS, Floats, HashedGrams, cosines, unit_vectors


class Fixed:
    """An embedder that returns what it was given."""

    name = "fixed"

    def __init__(self, vectors: Floats) -> None:
        self.vectors = vectors

    def embed(self, texts: Sequence[str]) -> Floats:
        del texts
        return self.vectors


@given(st.lists(st.text(max_size=80), max_size=5))
def test_any_text_has_a_unit_vector_of_64_dimensions(texts: list[str]) -> None:
    vectors = unit_vectors(HashedGrams(), texts)
    assert vectors.shape == (len(texts), DIMENSIONS)
    assert np.abs(np.square(vectors).sum(axis=1) - 1).max(initial=0) < 1e-12


def test_a_text_has_the_same_bits_on_every_machine() -> None:
    vectors = unit_vectors(HashedGrams(), ["The log is the database.", "Größe, 東京 and №7", "", "…"])
    assert hashlib.sha256(vectors.tobytes()).hexdigest() == GOLDEN


GOLDEN = "a272fb2a97303d5857ab68f293ab60be23fa9c26faf1f51cd327ccd98b12f31d"


def test_texts_with_common_words_are_nearer_than_others() -> None:
    texts = ["tide tables for every sailor", "A sailor reads the tide table", "sourdough bread from rye"]
    near = cosines(*[unit_vectors(HashedGrams(), texts)] * 2)
    assert near[0, 1] > 0.35 > near[0, 2]
    assert near.diagonal().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.ones((1, 3)), "returned .1, 3. for 1 texts"),
        (np.zeros((1, DIMENSIONS)), "zero"),
        (np.full((1, DIMENSIONS), np.nan), "not a number"),
    ],
)
def test_an_embedder_that_breaks_its_protocol_is_refused(vectors: Floats, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unit_vectors(Fixed(vectors), ["text"])
