"""The leader's end of an exchange over Flight: one follower's link, kept by the call's own thread until it ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from millstream.codec.replication_messages import decode_message, encode_message
from millstream.errors import LinkLost, MillstreamError, ShipmentUnreadable
from millstream.model.replication import Acknowledgement, Hello, Shipment
from millstream.replication.flight.link_watch import Silence
from millstream.replication.flight.wire import (
    BEAT,
    BEATS_IN_SILENCE,
    CLOSES_WITHIN_S,
    COUNT,
    FLIGHT_FAILURES,
    MESSAGE,
    QUIT,
    REFUSAL,
    SCHEMA,
    TAKEN,
    WELCOME,
    FollowRequest,
    Sending,
    error_of_flight,
)
from millstream.replication.queues import BytesInFlight, Inbox
from millstream.workers import Worker

_INBOX_BYTES: Final = 4 << 20
"""Bytes of a follower's messages that haven't been read yet."""


class ServedLink:
    """See `ports.FollowerLink`.

    Args:
        request: the follower's first message.
        writer: the exchange's.
        window_bytes: bound of the bytes in flight; lower if the follower has less room.
        silent_s: seconds of silence after which the follower counts as gone.
        cut: ends the follower's connection, without waiting: pyarrow's server can't end a call.
        check: raises the error to refuse the follower with; called at each heartbeat.
    """

    def __init__(
        self,
        request: FollowRequest,
        writer: Any,
        *,
        window_bytes: int,
        silent_s: float,
        cut: Callable[[], object],
        check: Callable[[], None],
    ) -> None:
        self._hello = request.hello
        self._writer = writer
        self._sending = Sending(writer)
        self._window = BytesInFlight(min(window_bytes, request.window_bytes))
        self._inbox: Inbox[Acknowledgement | Hello | MillstreamError] = Inbox(_INBOX_BYTES)
        self._silence = Silence(silent_s)
        self._beats_s = silent_s / BEATS_IN_SILENCE
        self._cut = cut
        self._check = check
        self._closing = threading.Event()
        self._closed_s = 0.0

    @property
    def hello(self) -> Hello:
        """See the port."""
        return self._hello

    def send(self, shipment: Shipment) -> None:
        """See the port."""
        buffers = encode_message(shipment)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._window.send(size)
        self._sending.ship(buffers, size)

    def recv(self, timeout_s: float) -> Acknowledgement | Hello | None:
        """See the port."""
        said = self._inbox.take(timeout_s)
        if said is None:
            return None
        if isinstance(said[0], MillstreamError):
            self.close()
            raise said[0]
        return said[0]

    def refuse(self, error: MillstreamError) -> None:
        """See the port."""
        with contextlib.suppress(LinkLost):
            self._sending.say(REFUSAL, b"".join(encode_message(error)))
        self.close()

    def close(self) -> None:
        """See the port. The call's own thread notifies the other end and ends the call."""
        self._break(LinkLost("the link was closed"), forget=True)

    # --- the call ------------------------------------------------------------------------------------------------

    def keep(self, reader: Any) -> None:
        """Read the follower's messages until the link has ended. Nothing uses the exchange once this returns."""
        beats = Worker(f"replication-beats-{self._hello.node}", self._beat).start()
        try:
            self._hear(reader)
            self._break(LinkLost(f"{self._hello.node} has closed the link"))
        except FLIGHT_FAILURES as error:
            self._break(error_of_flight(error))
        except MillstreamError as error:
            self._break(error)
        finally:
            self._break(LinkLost("the link has failed"))
            beats.join()
            self._sending.shut()

    def welcome(self) -> None:
        """Send the first message. Raises `LinkLost`."""
        self._writer.begin(SCHEMA)
        self._sending.say(WELCOME)

    def look(self, now_s: float) -> None:
        """Cut the connection of a follower that is silent, or doesn't end."""
        if self._closing.is_set():
            if now_s - self._closed_s > CLOSES_WITHIN_S:
                self._cut()
        elif (lost := self._silence.too_long(now_s)) is not None:
            self._break(lost)
            self._cut()

    def _hear(self, reader: Any) -> None:
        while True:
            try:
                said = memoryview(reader.read_chunk().app_metadata or b"")
            except StopIteration:
                return
            self._silence.heard()
            kind, behind = bytes(said[:1]), said[1:]
            if kind == QUIT:
                return
            if kind == TAKEN and len(behind) == COUNT.size:
                self._window.taken(COUNT.unpack(behind)[0])
            elif kind == MESSAGE:
                message = decode_message(behind)
                if isinstance(message, Shipment):
                    raise ShipmentUnreadable(f"{self._hello.node} has sent a shipment")
                self._inbox.put(message, len(behind))
            elif kind != BEAT:
                raise ShipmentUnreadable(f"{self._hello.node} sent an unreadable message")

    def _beat(self) -> None:
        """Send heartbeats; at the end, report that the link is closed."""
        while not self._closing.wait(self._beats_s):
            try:
                self._check()
                self._sending.beat(self._beats_s)
            except LinkLost as error:
                # The receiving thread gets a better reason, soon.
                self._closing.wait(CLOSES_WITHIN_S)
                self._break(error)
            except MillstreamError as error:
                self.refuse(error)
        self._sending.end()

    def _break(self, error: MillstreamError, *, forget: bool = False) -> None:
        self._inbox.end(error, forget=forget)
        self._window.end(error if isinstance(error, LinkLost) else LinkLost(error.message))
        if not self._closing.is_set():
            self._closed_s = time.monotonic()
            self._closing.set()
