"""Watches the files of an embedded catalog, and ends the process if they are removed or replaced under it.

Each call on an open catalog checks the same. The watch adds the processes that make no call for long, and those that pass a call's error on to its
caller, as a server does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final

import structlog

from millstream.errors import MillstreamError
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.processes.child_process import Lifeline

logger = structlog.get_logger("millstream.catalog")

_LOOK_EVERY_S: Final = 1.0


@contextmanager
def watched_catalog(home: Home, lifeline: Lifeline) -> Iterator[None]:
    """Watch the home's catalog while the block lasts; the process ends with `CatalogError` (`catalog_replaced`) if its files change.

    A missing catalog is watched from the moment that it is made.
    """
    if home.catalog_address() is not None:
        yield
        return
    # Not by the thread: if two threads import modules of a circle at once, one finds half of a module.
    import_module("millstream.catalog")
    catalog: Catalog | None = None

    def look() -> bool:
        nonlocal catalog
        try:
            if catalog is not None:
                catalog.database.check_files()
            elif home.catalog_file.exists():
                catalog = home.open_catalog()
        except MillstreamError as error:
            if error.code == "catalog_replaced":
                logger.warning("the catalog was replaced; this process ends", error=error.message, code=error.code)
                lifeline.fail(error)
                return False
            logger.debug("the catalog can't be watched now", error=error.message, code=error.code)
        return not worker.stopping.wait(_LOOK_EVERY_S)

    worker = Worker("catalog-watch", look)
    try:
        with worker:
            yield
    finally:
        if catalog is not None:
            catalog.close()
