"""The ids of deliveries as texts that only the home can make: an `ack_id` is 54 URL-safe characters."""

from __future__ import annotations

import binascii
import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Final

from millstream.protocol.delivery import DeliveryId

_FIELDS: Final = struct.Struct(">IqQI")
_MAC_BYTES: Final = 16
_LAST: Final = frozenset("AEIMQUYcgkosw048")
"""The characters with which base64 of this length ends: their last two bits are zero."""
_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL_SAFE: Final = bytes.maketrans(b"-_+/", b"+/  ")
"""`+` and `/`, which no id has, become characters that base64 refuses."""
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
        own_key = hashlib.blake2b(incarnation.encode(), key=key, digest_size=32).digest()
        self._keyed: Final = hashlib.blake2b(key=own_key, digest_size=_MAC_BYTES)
        """A code that has taken its key: copying it takes half the time."""

    def text(self, delivery: DeliveryId) -> str:
        """Return the text of a delivery."""
        fields = _FIELDS.pack(*delivery)
        text = binascii.b2a_base64(fields + self._mac(fields), newline=False)
        return text.translate(_URL_SAFE)[:_LENGTH].decode()

    def read(self, text: str) -> DeliveryId | None:
        """Return the delivery of a text; None if it isn't one of this consumer's.

        A delivery that the bounds exclude is returned with generation -1, so that it counts as rewound.
        """
        if len(text) != _LENGTH or text[-1] not in _LAST:  # else two texts would have the same bytes
            return None
        try:
            data = binascii.a2b_base64(text.encode("ascii").translate(_FROM_URL_SAFE) + b"==", strict_mode=True)
        except ValueError:  # binascii.Error is one, and so is the error of a character that isn't ASCII
            return None
        fields, mac = data[: _FIELDS.size], data[_FIELDS.size :]
        if not hmac.compare_digest(mac, self._mac(fields)):
            return None
        delivery = DeliveryId(*_FIELDS.unpack(fields))
        if any(delivery.run < run and delivery.position > position for run, position in self._bounds):
            return delivery._replace(generation=-1)
        return delivery

    def _mac(self, fields: bytes) -> bytes:
        code = self._keyed.copy()
        code.update(fields)
        return code.digest()
