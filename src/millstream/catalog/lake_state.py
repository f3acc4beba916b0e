"""Whether a stream's lake can be reached, as a fact of the catalog: it outlives the process that found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millstream.catalog.store import Catalog
from millstream.errors import LakeUnavailable
from millstream.model.ids import StreamId

WORKS: Final = "ok"
_NAME: Final = "lake_state"


@contextmanager
def keeping_lake_state(catalog: Catalog, stream: StreamId) -> Iterator[None]:
    """Run a pipeline in the block; keep the code of its error if the lake ended it."""
    try:
        yield
    except LakeUnavailable as error:
        catalog.put_fact(_scope(stream), _NAME, error.code)
        raise


def forget_lake_state(catalog: Catalog, stream: StreamId) -> None:
    """Record that the lake takes batches."""
    catalog.drop_fact(_scope(stream), _NAME)


def lake_state(catalog: Catalog, stream: StreamId) -> str:
    """Return `ok`, or the code of the error by which the lake ended the last run of the pipeline."""
    return str(catalog.fact(_scope(stream), _NAME, WORKS))


def _scope(stream: StreamId) -> str:
    return f"pipeline/{stream}"
