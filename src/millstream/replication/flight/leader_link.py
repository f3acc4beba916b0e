"""The leader's end of an exchange over Flight: one follower's link, kept by the call's own thread until it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from millstream.codec.replication_messages import decode_message, encode_message
from millstream.errors import LinkLost, MillstreamError, ShipmentUnreadable
from millstream.model.replication import Acknowledgement, Hello, Shipment
from millstream.replication.flight import wire
from millstream.replication.flight.link_watch import WatchedLink
from millstream.replication.queues import BytesInFlight, Inbox
from millstream.workers import Worker

_INBOX_BYTES: Final = 4 << 20
"""Bytes of a follower's messages that haven't been read yet."""


class ServedLink(WatchedLink):
    """See `ports.FollowerLink`.

    Args:
        window_bytes: bound of the bytes in flight; lower if the follower has less room.
        silent_s: seconds of silence after which the follower counts as gone.
        cut: ends the follower's connection, without waiting: pyarrow's server can't end a call.
        check: raises the error to refuse the follower with; called at each heartbeat.
    """

    def __init__(
        self,
        request: wire.FollowRequest,
        writer: Any,
        *,
        window_bytes: int,
        silent_s: float,
        cut: Callable[[], object],
        check: Callable[[], None],
    ) -> None:
        super().__init__(silent_s)
        self._hello = request.hello
        self._writer = writer
        self._sending = wire.Sending(writer)
        self._window = BytesInFlight(min(window_bytes, request.window_bytes))
        self._inbox: Inbox[Acknowledgement | Hello | MillstreamError] = Inbox(_INBOX_BYTES)
        self._cut_off = cut
        self._check = check

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
            self._sending.say(wire.REFUSAL, b"".join(encode_message(error)))
        self.close()

    # --- the call ------------------------------------------------------------------------------------------------

    def keep(self, reader: Any) -> None:
        """Read the follower's messages until the link has ended. Nothing uses the exchange once this returns."""
        beats = Worker(f"replication-beats-{self._hello.node}", self._beat)
        try:
            beats.start()
            self._hear(reader)
            self._break(LinkLost(f"{self._hello.node} has closed the link"))
        except wire.FLIGHT_FAILURES as error:
            self._break(wire.error_of_flight(error))
        except MillstreamError as error:
            self._break(error)
        finally:
            self._break(LinkLost("the link has failed"))
            beats.join()
            self._sending.shut()

    def welcome(self) -> None:
        """Send the first message. Raises `LinkLost`."""
        self._writer.begin(wire.SCHEMA)
        self._sending.say(wire.WELCOME)

    def _hear(self, reader: Any) -> None:
        while True:
            try:
                said = memoryview(reader.read_chunk().app_metadata or b"")
            except StopIteration:
                return
            self._heard_s = time.monotonic()
            kind, behind = bytes(said[:1]), said[1:]
            if kind == wire.QUIT:
                return
            if kind == wire.TAKEN and len(behind) == wire.COUNT.size:
                self._window.taken(wire.COUNT.unpack(behind)[0])
            elif kind == wire.MESSAGE:
                message = decode_message(behind)
                if isinstance(message, Shipment):
                    raise ShipmentUnreadable(f"{self._hello.node} has sent a shipment")
                self._inbox.put(message, len(behind))
            elif kind != wire.BEAT:
                raise ShipmentUnreadable(f"{self._hello.node} sent an unreadable message")

    def _beat(self) -> None:
        """Send heartbeats; at the end, report that the link is closed."""
        while not self._closing.wait(self._beats_s):
            try:
                self._check()
                self._sending.beat(self._beats_s)
            except LinkLost as error:
                # The receiving thread gets a better reason, soon.
                self._closing.wait(wire.CLOSES_WITHIN_S)
                self._break(error)
            except MillstreamError as error:
                self.refuse(error)
        self._sending.end()

    def _break(self, error: MillstreamError, *, forget: bool = False) -> None:
        self._inbox.end(error, forget=forget)
        self._window.end(error if isinstance(error, LinkLost) else LinkLost(error.message))
        super()._break(error)

    def _cut(self) -> None:
        self._cut_off()
