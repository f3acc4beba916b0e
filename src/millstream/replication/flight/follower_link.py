"""The follower's end of an exchange over Flight."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as fl

from millstream.codec.checksums import Bytes
from millstream.codec.replication_messages import decode_message, encode_message
from millstream.errors import LinkLost, MillstreamError, ShipmentUnreadable
from millstream.model.replication import Acknowledgement, Hello, Shipment
from millstream.replication.flight import wire
from millstream.replication.flight.address import LeaderAddress
from millstream.replication.flight.link_watch import WatchedLink
from millstream.replication.queues import Inbox
from millstream.workers import Worker

_SHIPMENT_BYTES_MAX: Final = 2 << 30


class ConnectedLink(WatchedLink):
    """See `ports.LeaderLink`.

    Args:
        silent_s: seconds of silence after which the leader counts as gone.
    """

    def __init__(self, address: LeaderAddress, request: wire.FollowRequest, *, silent_s: float) -> None:
        super().__init__(silent_s)
        self._address = address
        self._request = request
        # A leader keeps to the window. If one sends more than twice that, the rest isn't read.
        self._shipments: Inbox[Sequence[Bytes]] = Inbox(2 * request.window_bytes)
        self._lock = threading.Lock()
        self._sending: wire.Sending | None = None
        self._reader: Any = None
        self._wakes = threading.Event()
        self._welcome = threading.Event()
        self._taken = 0

    def begin(self, timeout_s: float, ended: Callable[[], None]) -> None:
        """Connect, and wait for the leader's first message.

        `ended` is called at the very end. Raises as `Transport.connect`.
        """
        try:
            Worker("replication-link", partial(self._run, ended)).start()
        except OSError as error:
            ended()
            raise LinkLost(f"the link can't begin: {error}") from error
        if not self._welcome.wait(timeout_s):
            self._break(LinkLost(f"{self._address.place} didn't answer within {timeout_s:g} s"), forget=True)
        if self._closing.is_set():
            self._shipments.take(0.0)  # raises the reason

    def recv(self, timeout_s: float) -> Shipment | None:
        """See the port."""
        came = self._shipments.take(timeout_s)
        if came is None:
            return None
        data, size = came
        try:
            shipment = decode_message(*data)
            if not isinstance(shipment, Shipment):
                raise ShipmentUnreadable("the leader sent a message that only followers send")
        except ShipmentUnreadable:
            self.close()
            raise
        self._taken += size
        self._wakes.set()
        return shipment

    def send(self, message: Acknowledgement | Hello | MillstreamError) -> None:
        """See the port."""
        sending = self._sending
        if sending is None or self._closing.is_set():
            raise LinkLost("the link was closed")
        sending.say(wire.MESSAGE, b"".join(encode_message(message)))

    # --- its threads ---------------------------------------------------------------------------------------------

    def _run(self, ended: Callable[[], None]) -> None:
        try:
            with contextlib.closing(self._address.client()) as client:
                descriptor = fl.FlightDescriptor.for_command(self._request.command())
                writer, reader = client.do_exchange(descriptor, self._address.call_options())
                self._keep(writer, reader)
        except wire.FLIGHT_FAILURES as error:
            self._break(wire.error_of_flight(error))
        except MillstreamError as error:
            self._break(error)
        finally:
            self._break(LinkLost("the leader has closed the link"))
            self._welcome.set()
            ended()

    def _keep(self, writer: Any, reader: Any) -> None:
        sending = wire.Sending(writer)
        with self._lock:
            self._sending, self._reader = sending, reader
        beats = Worker("replication-beats", partial(self._beat, sending)).start()
        try:
            self._hear(reader)
        except wire.FLIGHT_FAILURES as error:
            self._break(wire.error_of_flight(error))
        except MillstreamError as error:
            self._break(error)
        finally:
            self._break(LinkLost("the leader has closed the link"))
            beats.join()
            with self._lock:
                self._reader = None
            # Otherwise the call lasts until the leader has closed it, too.
            reader.cancel()
            with contextlib.suppress(*wire.FLIGHT_FAILURES):
                writer.close()

    def _hear(self, reader: Any) -> None:
        pieces: list[Bytes] = []
        came = 0
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            self._heard_s = time.monotonic()
            said = memoryview(chunk.app_metadata or b"")
            kind, behind = bytes(said[:1]), said[1:]
            if kind == wire.WELCOME:
                self._welcome.set()
            elif kind in (wire.PIECE, wire.LAST_PIECE) and chunk.data is not None and len(behind) == wire.COUNT.size:
                size = wire.COUNT.unpack(behind)[0]
                pieces.append(_body(chunk.data))
                came += len(pieces[-1])
                if came > size or size > _SHIPMENT_BYTES_MAX or (kind == wire.LAST_PIECE and came != size):
                    raise ShipmentUnreadable("a shipment's length differs from the one in its header")
                if kind == wire.LAST_PIECE:
                    self._shipments.put(pieces, size)
                    pieces, came = [], 0
            elif kind == wire.REFUSAL:
                message = decode_message(behind)
                self._break(
                    message if isinstance(message, MillstreamError) else ShipmentUnreadable("a refusal is none")
                )
            elif kind == wire.QUIT:
                # Our last messages may still be in flight: the leader ends the call once it has
                # read all of them.
                self._break(LinkLost("the leader has closed the link"))
            elif kind != wire.BEAT:
                raise ShipmentUnreadable("the leader sent an unreadable message")

    def _beat(self, sending: wire.Sending) -> None:
        """Report what was taken, and send heartbeats; at the end, report that the link is closed."""
        told = 0
        while not self._closing.is_set():
            self._wakes.wait(self._beats_s)
            self._wakes.clear()
            try:
                if self._taken != told:
                    told = self._taken
                    sending.say(wire.TAKEN, wire.COUNT.pack(told))
                sending.beat(self._beats_s)
            except LinkLost as error:
                # The receiving thread gets a better reason, soon.
                self._closing.wait(wire.CLOSES_WITHIN_S)
                self._break(error)
        sending.end()

    def _cut(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.cancel()

    def _break(self, error: MillstreamError, *, forget: bool = False) -> None:
        self._shipments.end(error, forget=forget)
        super()._break(error)
        self._wakes.set()


def _body(batch: pa.RecordBatch) -> Bytes:
    column = batch.column(0)
    if column.type != pa.uint8() or column.offset or column.buffers()[1] is None:
        raise ShipmentUnreadable("a shipment's bytes aren't where they should be")
    return memoryview(column.buffers()[1])[: len(column)]
