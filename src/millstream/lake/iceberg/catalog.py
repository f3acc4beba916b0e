"""The catalog of an Iceberg lake: opened once in a process, and its errors as the lake's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import pydantic
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    CommitFailedException,
    ForbiddenError,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    OAuthError,
    RESTError,
    UnauthorizedError,
    ValidationError,
    ValidationException,
)
from requests.exceptions import RequestException

from millstream.errors import LakeConflict, LakeError, LakeFilesGone, LakeUnavailable, UsageError
from millstream.lake.layout import LakeLayout
from millstream.lake.store_errors import lake_errors, plain_text

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog


def _sql_errors() -> tuple[type[Exception], ...]:
    """Return the errors of SQLAlchemy; none in an executor's Python, which lacks it: only an SQL catalog needs it."""
    with suppress(ModuleNotFoundError):
        from sqlalchemy.exc import SQLAlchemyError

        return (SQLAlchemyError,)
    return ()


_SQL_ERRORS: Final = _sql_errors()
_CATALOGS: Final[tuple[type[Exception], ...]] = (RESTError, *_SQL_ERRORS)
ANSWER_LOST: Final[tuple[type[Exception], ...]] = (RESTError, RequestException, *_SQL_ERRORS)
"""Errors after which the catalog may have a commit or not."""
_STORE: Final = {
    "AWS_ACCESS_KEY_ID": "s3.access-key-id",
    "AWS_SECRET_ACCESS_KEY": "s3.secret-access-key",
    "AWS_SESSION_TOKEN": "s3.session-token",
    "AWS_REGION": "s3.region",
    "AWS_ENDPOINT_URL": "s3.endpoint",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "s3.force-virtual-addressing",
}
"""Properties of a catalog by the names of a store's options (`LakeLayout.storage_options`)."""
_FILE_IO: Final = {"py-io-impl": "millstream.lake.iceberg.files.LakeFileIO"}
_FOREIGN: Final = frozenset({"json_invalid", "model_type"})
"""The kinds of pydantic's errors for an answer that isn't a JSON object: a page of a proxy, or of another server."""
_lock: Final = Lock()


def catalog_of(layout: LakeLayout) -> Catalog:
    """Return the catalog of a lake, whose properties include those of the lake's store.

    Raises:
        LakeUnavailable: the store's address isn't encrypted, and nothing allows that.
    """
    layout.check_encrypted()
    store = {_STORE[name]: value for name, value in layout.storage_options.items() if name in _STORE}
    with _lock:
        return _opened(tuple(sorted((store | dict(layout.catalog)).items())))


@lru_cache(maxsize=8)
def _opened(properties: tuple[tuple[str, str], ...]) -> Catalog:
    taken = dict(properties) | _FILE_IO
    if taken.get("type") == "rest":
        from millstream.lake.iceberg.rest import BoundedRestCatalog

        return BoundedRestCatalog("millstream", **taken)
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    from millstream.lake.iceberg.sql import OrderedSqlCatalog

    try:
        catalog = OrderedSqlCatalog("millstream", **taken)
    except _SQL_ERRORS:
        # Another process made the tables of a new SQL catalog at the same time.
        catalog = OrderedSqlCatalog("millstream", **taken)
    if taken["uri"].startswith("sqlite"):
        # A kept connection would go on with a file that was moved away, also after another was put in its place.
        catalog.engine = create_engine(taken["uri"], poolclass=NullPool)
    return catalog


def metadata_addresses(catalog: Catalog, namespaces: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return where an SQL catalog has the newest metadata of each table of some namespaces, by namespace and name; none of a server."""
    from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
    from sqlalchemy import select
    from sqlalchemy.orm import Session

    if not isinstance(catalog, SqlCatalog):
        return {}
    asked = select(IcebergTables).where(
        IcebergTables.catalog_name == catalog.name, IcebergTables.table_namespace.in_(namespaces)
    )
    with Session(catalog.engine) as session:
        return {(row.table_namespace, row.table_name): row.metadata_location or "" for row in session.scalars(asked)}


def make_namespace(catalog: Catalog, namespace: str) -> None:
    """Create a namespace, unless it is there."""
    if catalog.namespace_exists(namespace):
        return  # a REST catalog may allow no new ones
    try:
        catalog.create_namespace(namespace)
    except NamespaceAlreadyExistsError:
        return
    except _SQL_ERRORS:
        # Another table's task created it in between, which an SQL catalog reports as a broken constraint.
        if not catalog.namespace_exists(namespace):
            raise


@contextmanager
def catalog_errors(path: str) -> Iterator[None]:
    """Translate errors of pyiceberg, of the catalog and of files."""
    try:
        with lake_errors(path), _request_errors(path):
            yield
    except (CommitFailedException, NoSuchNamespaceError, ValidationException) as error:
        # The namespace of rebuilt tables is dropped with the last of them, perhaps while another one is begun.
        raise LakeConflict(f"another writer committed to {path} first: {error}", path=path) from error
    except (UnauthorizedError, AuthorizationExpiredError, OAuthError) as error:
        raise LakeUnavailable(
            f"the catalog of {path} doesn't accept the credentials: {error}",
            code="lake_credentials",
            hint="Set `credential` or `token` in `[streams.S.lake.catalog]`, and start `millstream run` again.",
            path=path,
        ) from error
    except ForbiddenError as error:
        raise LakeUnavailable(
            f"the catalog of {path} doesn't allow this: {error}",
            code="lake_forbidden",
            hint="Allow the role of `[streams.S.lake.catalog]` to create namespaces and tables and to change them, and start "
            "`millstream run` again.",
            path=path,
        ) from error
    except _CATALOGS as error:
        raise _unreachable(path, error) from error
    except pydantic.ValidationError as error:
        if _FOREIGN.isdisjoint(one["type"] for one in error.errors()):
            raise LakeError(f"{path}: {plain_text(error)}", path=path) from error
        raise _unreachable(path, "what answers there isn't a catalog") from error
    except ModuleNotFoundError as error:
        raise UsageError(
            "the catalog's database needs a driver that isn't installed",
            code="missing_extra",
            hint="Install the driver that `uri` in `[streams.S.lake.catalog]` names; postgresql+psycopg:// needs none.",
        ) from error
    except ValueError as error:
        raise LakeError(f"{path}: {error}", path=path) from error


@contextmanager
def files_read(path: str) -> Iterator[None]:
    """Translate errors of metadata's files that are gone or broken, inside of `catalog_errors`.

    Raises:
        LakeFilesGone: one is.
    """
    try:
        yield
    except (FileNotFoundError, EOFError, ValueError, ValidationError) as error:
        raise LakeFilesGone(f"the metadata of {path} can't be read: {error}", path=path) from error


@contextmanager
def _request_errors(path: str) -> Iterator[None]:
    """Translate failed requests before `lake_errors`: to Python they are errors of files."""
    try:
        yield
    except RequestException as error:
        raise _unreachable(path, error) from error


def _unreachable(path: str, error: Any) -> LakeUnavailable:
    # SQLAlchemy's own text holds the statement and its values.
    reason = plain_text(getattr(error, "orig", None) or error)
    return LakeUnavailable(f"the catalog of {path} doesn't answer: {reason}", code="catalog_unreachable", path=path)
