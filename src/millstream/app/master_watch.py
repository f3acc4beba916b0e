"""Whether a cluster's master answers while Spark starts: Spark itself is silent for a minute, then gives up."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

from millstream.model.addresses import mask_address
from millstream.workers import Worker

_LOOK_EVERY_S: Final = 2.0
_ANSWERS_WITHIN_S: Final = 2.0
_MASTERS: Final = re.compile(r"spark://(.+)")
_PLACE: Final = re.compile(r"\[?(?P<host>[^\]]+?)\]?:(?P<port>\d+)")


class MasterWatch:
    """Looks whether a standalone master takes connections, while Spark starts.

    Args:
        master: the configuration's master; only a `spark://…` one is watched.
        on_silence: called once for each time that the master stops answering, on another thread.
    """

    def __init__(self, master: str, on_silence: Callable[[], None]) -> None:
        found = _MASTERS.match(master)
        self._places = [] if found is None else list(filter(None, map(_PLACE.fullmatch, found[1].split(","))))
        self._shown = mask_address(master)
        self._on_silence = on_silence
        self.waits_for: str | None = None
        """The master's address while it doesn't answer, else None. Any thread."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at once, and again until the block ends."""
        stop = threading.Event()
        worker = Worker("master-watch", lambda: self._look(stop), stop=stop)
        if self._places:
            worker.start()
        try:
            yield
        finally:
            stop.set()
            self.waits_for = None

    def _look(self, stop: threading.Event) -> bool:
        answers = any(_answers(place["host"], int(place["port"])) for place in self._places)
        if stop.is_set():
            return False
        was_silent, self.waits_for = self.waits_for is not None, None if answers else self._shown
        if not answers and not was_silent:
            self._on_silence()
        return not stop.wait(_LOOK_EVERY_S)


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_ANSWERS_WITHIN_S):
        return True
    return False
