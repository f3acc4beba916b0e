"""The ids of deliveries as texts that only the home can make: an `ack_id` is 54 URL-safe characters."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Final

from millstream.protocol.delivery import DeliveryId

_FIELDS: Final = struct.Struct(">IQQI")
_MAC_BYTES: Final = 16
_LAST: Final = frozenset("AEIMQUYcgkosw048")
"""The characters with which base64 of this length ends: their last two bits are zero."""
_LENGTH: Final = 4 * -(-(_FIELDS.size + _MAC_BYTES) // 3) - 2


class AckIds:
    """Makes and reads the ids of one consumer's deliveries.

    Args:
        key: the home's secret.
        incarnation: hex digits that no other consumer has, not even a later one of the same name.
        bounds: pairs of a run and a position; see `Stored.bounds`.
    """

    def __init__(self, key: bytes, incarnation: str, bounds: Sequence[Sequence[int]] = ()) -> None:
        self._bounds = bounds
        self._key = hashlib.blake2b(incarnation.encode(), key=key, digest_size=32).digest()

    def text(self, delivery: DeliveryId) -> str:
        """Return the text of a delivery."""
        fields = _FIELDS.pack(*delivery)
        return base64.urlsafe_b64encode(fields + self._mac(fields)).decode().rstrip("=")

    def read(self, text: str) -> DeliveryId | None:
        """Return the delivery of a text; None if it isn't one of this consumer's.

        A delivery that counts no longer by the bounds has a generation before all others.
        """
        if len(text) != _LENGTH or text[-1] not in _LAST:  # else two texts would have the same bytes
            return None
        try:
            data = base64.b64decode(text + "==", altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        fields, mac = data[: _FIELDS.size], data[_FIELDS.size :]
        if not hmac.compare_digest(mac, self._mac(fields)):
            return None
        delivery = DeliveryId(*_FIELDS.unpack(fields))
        if any(delivery.run < run and delivery.position > position for run, position in self._bounds):
            return delivery._replace(generation=-1)
        return delivery

    def _mac(self, fields: bytes) -> bytes:
        return hashlib.blake2b(fields, key=self._key, digest_size=_MAC_BYTES).digest()
