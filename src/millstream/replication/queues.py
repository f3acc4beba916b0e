"""State shared by two threads of one link: messages not yet taken, and a bound of the bytes in flight.

Both end at once if the link breaks.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Generic, TypeVar

from millstream.errors import MillstreamError

Item = TypeVar("Item")

WINDOW_BYTES: Final = 32 << 20
"""Bytes that a follower hasn't taken, at most: several shipments of the usual size, so that its
disk never waits for the wire.
"""


class Inbox(Generic[Item]):
    """Items that came, in order.

    Items from before the end are still returned; then every caller gets the error that ended it.

    Args:
        bytes_max: bound above which `put` waits; an empty inbox takes one item of any size.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._items: deque[tuple[Item, int]] = deque()
        self._changed = threading.Condition()
        self._error: MillstreamError | None = None

    def put(self, item: Item, size: int) -> None:
        """Add an item of that many bytes; do nothing if the inbox has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._items or self._bytes + size <= self._bytes_max or self._error is not None
            )
            if self._error is None:
                self._items.append((item, size))
                self._bytes += size
                self._changed.notify_all()

    def take(self, timeout_s: float) -> tuple[Item, int] | None:
        """Return the next item with its size; None if none came in time. Raises the error passed to `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._error is not None, timeout_s)
            if self._items:
                item, size = self._items.popleft()
                self._bytes -= size
                self._changed.notify_all()
                return item, size
            if self._error is not None:
                raise self._error.with_traceback(None)
            return None

    def end(self, error: MillstreamError, *, forget: bool = False) -> None:
        """End the inbox; the first error counts. With `forget`, items that came are dropped too."""
        with self._changed:
            if self._error is None:
                self._error = error
            if forget:
                self._items.clear()
                self._bytes = 0
            self._changed.notify_all()


class BytesInFlight:
    """Bytes in flight: the sender takes room, which is freed once the other end has taken the bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sent = 0
        self._taken = 0
        self._changed = threading.Condition()
        self._error: MillstreamError | None = None

    def send(self, size: int) -> None:
        """Wait for room for that many bytes, and take it. Raises the error passed to `end`.

        With nothing in flight, an item of any size has room.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._has_room(size))
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._sent += size

    def taken(self, total: int) -> None:
        """Note how many bytes the other end has taken since the start."""
        with self._changed:
            self._taken = max(self._taken, total)
            self._changed.notify_all()

    def end(self, error: MillstreamError) -> None:
        """End the window: no sender gets room; the first error counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        on_way = self._sent - self._taken
        return on_way <= 0 or on_way + size <= self._bytes_max
