"""The catalog of an Iceberg lake: opened once in a process, and its errors as the lake's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Final

from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    RESTError,
    ValidationException,
)
from sqlalchemy.exc import SQLAlchemyError

from millstream.errors import LakeConflict, LakeError, LakeUnavailable
from millstream.lake.layout import LakeLayout
from millstream.lake.store_errors import lake_errors

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

_lock: Final = Lock()


def catalog_of(layout: LakeLayout) -> Catalog:
    """Return the catalog of a lake."""
    with _lock:
        return _opened(tuple(sorted(layout.catalog.items())))


@lru_cache(maxsize=8)
def _opened(properties: tuple[tuple[str, str], ...]) -> Catalog:
    from pyiceberg.catalog import load_catalog

    try:
        return load_catalog("millstream", **dict(properties))
    except SQLAlchemyError:
        # Another process made the tables of a new SQL catalog at the same time.
        return load_catalog("millstream", **dict(properties))


def make_namespace(catalog: Catalog, namespace: str) -> None:
    """Create a namespace, unless it is there."""
    try:
        catalog.create_namespace(namespace)
    except NamespaceAlreadyExistsError:
        return
    except SQLAlchemyError:
        # Another table's task created it in between, which an SQL catalog reports as a broken constraint.
        if not catalog.namespace_exists(namespace):
            raise


@contextmanager
def catalog_errors(path: str) -> Iterator[None]:
    """Translate errors of pyiceberg, of the catalog and of files."""
    try:
        with lake_errors(path):
            yield
    except (CommitFailedException, ValidationException) as error:
        raise LakeConflict(f"another writer committed to {path} first: {error}", path=path) from error
    except CommitStateUnknownException as error:
        raise LakeUnavailable(
            f"the catalog didn't say whether a commit to {path} succeeded: {error}", path=path
        ) from error
    except (SQLAlchemyError, RESTError) as error:
        raise LakeUnavailable(
            f"the catalog of {path} doesn't answer: {error}", code="catalog_unreachable", path=path
        ) from error
    except ValueError as error:
        raise LakeError(f"{path}: {error}", path=path) from error
