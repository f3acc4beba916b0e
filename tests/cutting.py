"""A link between processes that a test cuts: a TCP proxy on loopback.

It resets connections, keeps silent, delays, or drops the connection that carries a given text.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from enum import StrEnum
from typing import Final

_PIECE_BYTES: Final = 1 << 16
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: close with RST."""
_LOOKS_MS: Final = 200
"""How often a sender that has no room checks whether its connection is to be reset."""


class Way(StrEnum):
    """Direction of bytes."""

    TO = "to"
    """To the server."""
    BACK = "back"


BOTH: Final = frozenset(Way)


class Link:
    """A proxy for the connections to a port; `heal` undoes what was done to it.

    Args:
        target: the server's port.
    """

    def __init__(self, target: int) -> None:
        self.target: Final = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: Final = int(self._listening.getsockname()[1])
        self._changed = threading.Condition()
        self._is_cut = False
        self._silent: frozenset[Way] = frozenset()
        self._delay_s = 0.0
        self._losing: tuple[bytes, bool] | None = None
        self.losses = 0
        """How many connections `lose` has dropped."""
        self._pairs: set[_Pair] = set()
        threading.Thread(target=self._accept, name="link-accept", daemon=True).start()

    def cut(self) -> None:
        """Reset all connections, and those that come."""
        with self._changed:
            self._is_cut = True
            self._reset_all()

    def silence(self, ways: frozenset[Way] = BOTH) -> None:
        """A black hole: nothing passes, and neither end gets an error.

        Held bytes go on after `heal`, as TCP would resend them.
        """
        with self._changed:
            self._silent = ways

    def delay(self, seconds: float) -> None:
        """Delay each piece by so many seconds."""
        with self._changed:
            self._delay_s = seconds

    def lose(self, text: bytes, *, arrives: bool) -> None:
        """Drop the next connection that sends the text to the server in one piece: its client gets no answer.

        Args:
            text: the bytes to look for.
            arrives: whether the server gets the piece.
        """
        with self._changed:
            self._losing = text, arrives

    def refuse(self) -> None:
        """Take no more connections, for ever; existing ones go on."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends a waiting accept, too
        self._listening.close()

    def heal(self) -> None:
        """Let everything pass."""
        with self._changed:
            self._is_cut, self._silent, self._delay_s = False, frozenset(), 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """Let nothing pass from now on, for ever."""
        with self._changed:
            self._is_cut = True
            self._reset_all()
        self.refuse()

    def _reset_all(self) -> None:
        pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            pair.wake()
        self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 1.0)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            pair = _Pair(client, server)
            with self._changed:
                self._pairs.add(pair)
                if self._is_cut:
                    self._reset_all()
            for way in Way:
                threading.Thread(target=self._pump, args=(way, pair), name=f"link-{way}", daemon=True).start()

    def _pump(self, way: Way, pair: _Pair) -> None:
        try:
            while data := pair.receive(way):
                self._hold(way, pair)
                if way is Way.TO:
                    data = self._left(pair, data)
                while data and pair in self._pairs:
                    data = data[pair.send(way, data) :]
            self._hold(way, pair)
            pair.finish(way)
        except OSError:
            with self._changed:
                self._pairs.discard(pair)
            pair.wake()
        finally:
            with self._changed:
                pair.pumps -= 1
                is_last, is_reset = not pair.pumps, pair not in self._pairs
                if is_last:
                    self._pairs.discard(pair)
            if is_last:
                pair.close(reset=is_reset)

    def _left(self, pair: _Pair, data: bytes) -> bytes:
        """Return the part of a piece to send to the server; close the client's side if `lose` asked for it."""
        with self._changed:
            if self._losing is None or self._losing[0] not in data:
                return data
            (_, arrives), self._losing = self._losing, None
            self.losses += 1
        pair.leave_client()
        return data if arrives else b""

    def _hold(self, way: Way, pair: _Pair) -> None:
        """Return when a piece may go on, or its connection is to be reset."""
        with self._changed:
            if self._delay_s:
                self._changed.wait_for(lambda: pair not in self._pairs, self._delay_s)
            self._changed.wait_for(lambda: way not in self._silent or pair not in self._pairs)


class _Pair:
    """A connection's two halves; the last of its two threads closes it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._ends: Final = {Way.TO: (client, server), Way.BACK: (server, client)}
        self.pumps = len(self._ends)
        for end in (client, server):
            end.setblocking(True)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self, way: Way) -> bytes:
        return self._ends[way][0].recv(_PIECE_BYTES)

    def send(self, way: Way, data: bytes) -> int:
        """Return how many bytes were sent; 0 if there was no room for a moment."""
        sink = self._ends[way][1]
        waiting = select.poll()
        waiting.register(sink, select.POLLOUT)
        return sink.send(data, socket.MSG_DONTWAIT) if waiting.poll(_LOOKS_MS) else 0

    def finish(self, way: Way) -> None:
        """End this direction; the other one may go on."""
        self._ends[way][1].shutdown(socket.SHUT_WR)

    def leave_client(self) -> None:
        """Shut down the client's connection in both directions."""
        self._ends[Way.TO][0].shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """Wake the threads that read; the remote ends don't see an end of the stream so far."""
        for end in self._ends[Way.TO]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)

    def close(self, *, reset: bool) -> None:
        for end in self._ends[Way.TO]:
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()
