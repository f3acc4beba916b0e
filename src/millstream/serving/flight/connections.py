"""Ending calls that wait for their callers, which pyarrow's server can't: the caller's connection is cut.

pyarrow's server has no option of gRPC and no way to end a call from its own side (apache/arrow#43819): its thread
reads or writes for as long as the caller likes. gRPC keeps its connections to itself; they are found among the
process's descriptors, by their addresses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
import structlog

from millstream.errors import HttpError
from millstream.workers import Worker

logger = structlog.get_logger("millstream.serve")

READS_WITHIN_S: Final = 60.0
"""How long a reader may take for one batch, of 4 MiB at the most."""
_LEAVES_WITHIN_S: Final = 2.0
"""How long an idle sender has to end its call after the warning."""


def cut_connections(port: int, peer: str | None = None) -> int:
    """End this process's connections of a local port; return how many: none while the process has no descriptor left.

    Args:
        peer: only of this caller, as gRPC names it: `ipv4:192.0.2.1:5000`, `ipv6:[2001:db8::1]:5000`.
    """
    wanted = None if peer is None else _address(peer)
    count = 0
    try:
        descriptors = [int(entry.name) for entry in Path("/dev/fd").iterdir()]
    except OSError as error:  # the walk takes a descriptor of its own; the caller's thread must go on
        logger.warning("connections can't be cut now", error=str(error))
        return 0
    for descriptor in descriptors:
        # Other threads open and close descriptors during the walk.
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            if connection is None or connection.family not in {socket.AF_INET, socket.AF_INET6}:
                continue
            if connection.getsockname()[1] != port:
                continue
            host, of_peer = connection.getpeername()[:2]
            if wanted is None or wanted == (_host(host), of_peer):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """A descriptor as a socket while the block lasts, without closing it; None if it isn't one.

    Nothing is duplicated and nothing is closed. If a process closes any descriptor of a file, POSIX drops all of its `fcntl` locks on that file;
    SQLite's locks on the catalog would go with a duplicate. If gRPC closes the connection during the block, the number may pass to a
    new connection. That one is shut down only if this happens after its addresses were compared, and its owner connects again.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        yield None
        return
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


class Readers:
    """Calls that send records, and when each caller took the last batch.

    Callers that take none for too long are cut off.
    """

    def __init__(self, within_s: float = READS_WITHIN_S) -> None:
        self._within_s = within_s
        self._lock = threading.Lock()
        self._taken: dict[object, tuple[str, float]] = {}

    @contextlib.contextmanager
    def reading(self, peer: str) -> Iterator[Callable[[], None]]:
        """Register one call, for as long as it lasts; yield what notes that its caller took a batch."""
        call = object()

        def took() -> None:
            with self._lock:
                self._taken[call] = (peer, time.monotonic())

        took()
        try:
            yield took
        finally:
            with self._lock:
                del self._taken[call]

    def watch(self, port: int, ended: threading.Event) -> None:
        """Check periodically, until `ended`."""
        while not ended.wait(self._within_s / 4):
            now = time.monotonic()
            with self._lock:
                late = {peer for peer, taken_s in self._taken.values() if now - taken_s > self._within_s}
            for peer in late:
                logger.warning("a Flight reader takes nothing and is cut off", peer=peer, after_s=self._within_s)
                cut_connections(port, peer)


class Senders:
    """Calls that append.

    A caller that sends nothing for too long while its next batch is awaited, or reads no answers, is cut
    off.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._lock = threading.Lock()
        self._calls: set[Sender] = set()

    @contextlib.contextmanager
    def sending(self, peer: str, write: Callable[[bytes], None]) -> Iterator[Sender]:
        """Register one call, for as long as it lasts.

        Args:
            peer: its caller, as gRPC names it.
            write: sends the caller a line; blocks while the caller reads none.
        """
        sender = Sender(peer, write)
        with self._lock:
            self._calls.add(sender)
        try:
            yield sender
        finally:
            with self._lock:
                self._calls.discard(sender)
            sender.end()

    def watch(self, port: int, ended: threading.Event) -> None:
        """Check periodically, until `ended`."""
        while not ended.wait(min(self._within_s / 4, 1.0)):
            now = time.monotonic()
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                self._look(call, now, port)

    def _look(self, call: Sender, now: float, port: int) -> None:
        if call.has_work():
            call.worked_s = now
        # A client that waits for an acknowledgement sends nothing in that time.
        silent_s = now - max(call.waits_since_s or now, call.worked_s)
        untaken_s = now - (call.tells_since_s or now)
        if untaken_s <= self._within_s and silent_s > self._within_s and not call.is_told:
            # On a thread of its own: a client that sends nothing may read nothing either.
            call.is_told = True
            with contextlib.suppress(OSError):  # without a thread for it, it is cut off without a word
                Worker("flight-idle", partial(call.tell_idle, self._within_s)).start()
        elif max(untaken_s, silent_s - _LEAVES_WITHIN_S) > self._within_s:
            does_not = "send" if silent_s > self._within_s else "take"
            logger.warning("a Flight sender is cut off", peer=call.peer, does_not=does_not, after_s=self._within_s)
            cut_connections(port, call.peer)


class Sender:
    """A call that appends, and the state of its waits. `tell` from any thread."""

    def __init__(self, peer: str, write: Callable[[bytes], None]) -> None:
        self.peer: Final = peer
        self.waits_since_s: float | None = None
        """Since when its next batch is awaited."""
        self.tells_since_s: float | None = None
        """Since when a line is being sent to it."""
        self.is_told = False
        """Whether it was warned that it will be cut off."""
        self.has_work: Callable[[], bool] = lambda: False
        """Returns whether something that it sent isn't acknowledged yet."""
        self.worked_s = 0.0
        """When that was last the case."""
        self._write = write
        self._telling = threading.Lock()
        self._has_ended = False

    def end(self) -> None:
        """Send nothing from here on: the call's objects end with it, and a later write would go nowhere."""
        with self._telling:
            self._has_ended = True

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Mark the time while its next batch is awaited."""
        self.is_told, self.waits_since_s = False, time.monotonic()
        try:
            yield
        finally:
            self.waits_since_s = None

    def tell(self, line: bytes) -> None:
        """Send it a line; one at a time, as gRPC requires."""
        with self._telling:
            if self._has_ended:
                return
            self.tells_since_s = time.monotonic()
            try:
                self._write(line)
            finally:
                self.tells_since_s = None

    def tell_idle(self, within_s: float) -> None:
        """Send it an error about its idle time."""
        error = HttpError(
            f"no batch came within {within_s:g} s; the call is going to be cut off",
            code="transfer_idle",
            time_s=within_s,
        )
        with contextlib.suppress(pa.ArrowException, OSError):  # it has gone
            self.tell(json.dumps({"error": error.as_dict()}).encode())


def _address(peer: str) -> tuple[str, int] | None:
    _, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (_host(host.strip("[]")), int(port)) if port.isdigit() else None


def _host(text: str) -> str:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
