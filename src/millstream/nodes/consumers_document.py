"""The leader's consumers as documents that are shipped with the log; see `delivery.follower_consumers`.

The key can sign ids of deliveries, so it goes to followers and not to an object store: a restored home makes a new one.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from millstream.delivery.consumer_store import KEY_NAME, LOG_NAME
from millstream.delivery.consumers_log_format import whole
from millstream.delivery.follower_consumers import adopt_consumers, packed
from millstream.errors import CatalogError
from millstream.model.replication import Document
from millstream.nodes.catalog_document import later_version
from millstream.protocol.replication.node_promises import CONSUMERS, CONSUMERS_KEY
from millstream.wal.reader import StreamReader
from millstream.writers.home_consumers import ConsumerHolders

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.model.ids import StreamId

logger = structlog.get_logger("millstream.ship")

_EVERY_S: Final = 1.0
_IDLE_SHARE: Final = 10
"""A look at a large state that takes longer than a tenth of `_EVERY_S` is followed by a pause of so many times its duration."""


class ConsumersDocuments:
    """A stream's consumers, read when they have changed. Not for sharing between threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, int, int] | None = None
        self._due_s = 0.0
        self._state: Document | None = None
        self._key: Document | None = None
        self._is_damaged = False

    def newest(self) -> tuple[Document, ...]:
        """Return the consumers as of now or a second ago; the last whole state if the present one is damaged.

        Raises:
            CatalogError: the files can't be read.
        """
        now_s = time.monotonic()
        if now_s >= self._due_s:
            try:
                self._look()
            except OSError as error:
                raise CatalogError(f"the consumers' state can't be read: {error}") from error
            self._due_s = now_s + max(_EVERY_S, _IDLE_SHARE * (time.monotonic() - now_s))
        return tuple(one for one in (self._state, self._key) if one is not None)

    def _look(self) -> None:
        try:
            with (self._folder / LOG_NAME).open("rb") as file:
                stat = os.fstat(file.fileno())  # of this file: another may have its name by now
                seen = stat.st_ino, stat.st_size, stat.st_mtime_ns
                if seen == self._seen:
                    return
                data: bytes | None = file.read()
            key: bytes | None = (self._folder / KEY_NAME).read_bytes()
        except FileNotFoundError:
            seen, data, key = None, None, None
        if data is not None:
            data = whole(data)
            if data is None:
                if not self._is_damaged:
                    logger.warning(
                        "the consumers' state is damaged: followers keep the last whole one", folder=str(self._folder)
                    )
                self._is_damaged, self._seen = True, seen
                return
        self._is_damaged, self._seen = False, seen
        self._state = _newer(self._state, CONSUMERS, packed(data))
        if key is not None:
            self._key = _newer(self._key, CONSUMERS_KEY, key)


def _newer(before: Document | None, name: str, data: bytes) -> Document:
    if before is not None and before.data == data:
        return before
    return Document(name, later_version(before), data)


def take_consumers(home: Home, catalog: Catalog, stream: StreamId, name: str, data: bytes, key: bytes | None) -> bool:
    """Make a leader's consumers this home's, with what they hold of the log; return False if their document is damaged.

    Raises:
        MillstreamError: the disk, the log or the catalog can't be read or written.
    """
    folder = str(home.wal_folder(name))
    cursors = adopt_consumers(home.delivery_folder(name), data, key, name, partial(StreamReader, folder))
    if cursors is not None:
        ConsumerHolders(catalog, stream).replace(cursors)
    return cursors is not None
