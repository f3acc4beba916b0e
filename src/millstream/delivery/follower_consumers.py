"""A stream's consumers on a node that follows: shown from its leader's state, and made this node's own by a promotion.

The leader ships its `consumers.log`, compressed by zlib, and the key that signs the ids of deliveries. A leader without
consumers ships an empty log.
"""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from millstream.delivery.consumer_lookup import unknown_consumer
from millstream.delivery.consumer_store import KEY_BYTES, LOG_NAME, Stored, put_consumers, read_consumers
from millstream.delivery.consumers_log_format import log_of
from millstream.delivery.request_fields import page
from millstream.delivery.running_consumer import Running
from millstream.delivery.service import Answer
from millstream.delivery.wait_clock import now_ms
from millstream.errors import DeliveryError
from millstream.model.ids import StreamId
from millstream.private_files import make_folder, replace_file
from millstream.protocol.delivery import Phase, position_of
from millstream.wal.files import error_of_os
from millstream.wal.reader import StreamReader

logger = structlog.get_logger("millstream.delivery")

SHOWN: Final = frozenset({"list", "show", "dead"})
"""The calls that a node that follows answers."""
_BYTES_MAX: Final = 1 << 30
"""Largest unpacked size in bytes: a larger document is no state."""


def packed(log: bytes | None) -> bytes:
    """Return a `consumers.log` as it is shipped; None: the leader has no consumers."""
    return zlib.compress(log_of(()) if log is None else log, level=1)


def unpacked(data: bytes) -> bytes:
    """Return the `consumers.log` of a document; as it is if it can't be unpacked."""
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(data, _BYTES_MAX)
    except zlib.error:
        return data
    return found if unpacking.eof else data


def copied_consumers(file: Path) -> dict[str, Stored]:
    """Return the consumers in a document's file; none if it isn't there. Raises `consumer_state_unreadable`."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise error_of_os(error) from error
    return read_consumers(file, unpacked(data))[1]


class CopiedConsumers:
    """The consumers of a stream that this node follows, as its leader had them a second ago. Nothing of them changes here.

    Args:
        stream: the stream's name.
        file: the document's file.
        open_reader: opens this node's log.

    Concurrency: any number of threads.
    """

    def __init__(self, stream: str, file: Path, open_reader: Callable[[], StreamReader]) -> None:
        self._stream = stream
        self._file = file
        self._open_reader = open_reader
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._running: dict[str, Running] = {}

    def call(self, what: str, name: str | None, body: Any) -> Answer:
        """Carry out a call of `SHOWN`. Raises as `StreamConsumers.call`."""
        with self._lock:
            self._refresh()
            if what == "list":
                return Answer({"consumers": [one.shown() for _, one in sorted(self._running.items())]})
            running = self._running.get(str(name))
            if running is None:
                raise unknown_consumer(self._stream, str(name))
            if what == "show":
                return Answer(running.shown())
            after, limit = page(body)
            running.machine.expire(now_ms())
            running.save()
            found, following = running.dead_letters(after, limit)
            return Answer({"dead": found, "next": following})

    def _refresh(self) -> None:
        """Take the leader's newest state, and no record of how it changes here."""
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            self._seen, self._running = None, {}
            return
        seen = stat.st_ino, stat.st_mtime_ns
        if seen == self._seen:
            return
        found = copied_consumers(self._file)
        # Without consumers this node may have no log so far.
        stream_id = self._open_reader().stream_id if found else None
        self._running = (
            {}
            if stream_id is None
            else {
                name: _running(self._stream, stream_id, stored, self._open_reader()) for name, stored in found.items()
            }
        )
        self._seen = seen


def adopt_consumers(
    folder: Path, data: bytes, key: bytes | None, stream: str, open_reader: Callable[[], StreamReader]
) -> dict[str, int] | None:
    """Make the consumers of a shipped document this home's own; they continue on its log.

    A cursor behind the log's end is moved back. Deliveries count on, except those of records that the log lacks.

    Args:
        folder: the folder of this home's own state, which is replaced.
        data: the document.
        key: the key that came with it; None: a new one is made, and no earlier delivery counts.
        stream: the stream's name.
        open_reader: opens this home's log: nothing was appended to it since it was taken over.

    Returns:
        The cursors of the consumers that weren't cut off; None if the document is damaged. Then it is the state of this home
        all the same: each call reports that, and `millstream consumer repair` may mend it.

    Raises:
        MillstreamError (`io_failed`, …): the disk or the log can't be read or written.
    """
    log = unpacked(data)
    usable = key if key is not None and len(key) == KEY_BYTES else None
    try:
        try:
            _, found = read_consumers(folder / LOG_NAME, log)
        except DeliveryError as error:
            logger.exception("the shipped state of the consumers is damaged", stream=stream, error=error.message)
            make_folder(folder)
            put_consumers(folder, usable, ())
            replace_file(folder / LOG_NAME, log)
            return None
        if not found:
            shutil.rmtree(folder, ignore_errors=True)
            return {}
        stream_id, end = open_reader().stream_id, position_of(int(open_reader().persisted_upto()), 1)
        adopted = []
        for stored in found.values():
            running = _running(stream, stream_id, stored, open_reader())
            running.save()
            now = running.stored()
            adopted.append(replace(now, bounds=[*now.bounds, [now.state.run, end]]))
        make_folder(folder)
        put_consumers(folder, usable, adopted)
    except OSError as error:
        raise error_of_os(error) from error
    return {one.definition.name: one.state.cursor for one in adopted if one.state.phase is not Phase.CUT_OFF}


def _running(stream: str, stream_id: StreamId, stored: Stored, reader: StreamReader) -> Running:
    return Running(stream, stream_id, stored, reader, b"", _note_nothing, _none_quarantined)


def _note_nothing(_name: str, _changes: object, _letters: object) -> None:
    """Keep no change: the leader has the state."""


def _none_quarantined() -> Mapping[Any, str]:
    return {}
