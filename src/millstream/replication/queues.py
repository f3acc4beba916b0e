"""What two threads of one link share: what came and isn't taken yet, and how many bytes may be on their way. Both end at once where the link breaks."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Generic, TypeVar

from millstream.errors import MillstreamError

Item = TypeVar("Item")

WINDOW_BYTES: Final = 32 << 20
"""How much may be on its way to a follower that it hasn't taken: several shipments of the usual size, so that its disk never waits for the wire."""


class Inbox(Generic[Item]):
    """Things that came, in order. What came before the end is still given out; then everybody gets the error that ended it.

    Args:
        bytes_max: who brings more waits; one thing of any size has room in an empty one.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._items: deque[tuple[Item, int]] = deque()
        self._changed = threading.Condition()
        self._error: MillstreamError | None = None

    def put(self, item: Item, size: int) -> None:
        """Bring something of so many bytes; nothing where it has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._items or self._bytes + size <= self._bytes_max or self._error is not None
            )
            if self._error is None:
                self._items.append((item, size))
                self._bytes += size
                self._changed.notify_all()

    def take(self, timeout_s: float) -> tuple[Item, int] | None:
        """The next one with its size; None where none came in time. Raises what `end` was given."""
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
        """Nothing comes any more; the first error counts. With `forget`, what came isn't given out either."""
        with self._changed:
            if self._error is None:
                self._error = error
            if forget:
                self._items.clear()
                self._bytes = 0
            self._changed.notify_all()


class Window:
    """Bytes on their way: who sends takes room, and gets it back once the other end has taken them."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sent = 0
        self._taken = 0
        self._changed = threading.Condition()
        self._error: MillstreamError | None = None

    def send(self, size: int) -> None:
        """Wait for room for so many bytes, and take it; a single thing of any size has room where nothing is on its way. Raises what `end` was given."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._has_room(size))
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._sent += size

    def taken(self, total: int) -> None:
        """The other end has taken so many bytes, of all that were ever sent."""
        with self._changed:
            self._taken = max(self._taken, total)
            self._changed.notify_all()

    def end(self, error: MillstreamError) -> None:
        """Nobody gets room any more; the first error counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        on_way = self._sent - self._taken
        return on_way <= 0 or on_way + size <= self._bytes_max
