"""Targets for what arrives from another node: see `targets`."""

from __future__ import annotations

import struct
from dataclasses import replace

from millstream.codec.checksums import crc32c
from millstream.codec.replication_messages import Message, decode_message, encode_message
from millstream.errors import Diverged
from millstream.testing.transport import acknowledgement, hello_of, shipments_of, whole_position


def message_seeds() -> list[bytes]:
    """Return one message of each kind."""
    shipments = shipments_of(segments=1, segment_bytes=300, part_bytes=200)
    hello = hello_of(position=whole_position(shipments), documents={"catalog": 7})
    told = replace(shipments[-1], shown=shipments[-1].marks, by_one=True)
    messages: list[Message] = [*shipments, told, hello, acknowledgement(7), Diverged("other bytes", shard=7)]
    return [b"".join(encode_message(message)) for message in messages]


def with_right_start(data: bytes) -> bytes:
    """Correct a message's lengths, as far as possible, and its checksum."""
    if len(data) < 24:
        return data
    (head,) = struct.unpack_from("<I", data, 12)
    head = min(head, len(data) - 24)
    rest = data[8:12] + struct.pack("<IQ", head, len(data) - 24 - head) + data[24:]
    return data[:4] + struct.pack("<I", crc32c(rest)) + rest


def check_message(data: bytes) -> None:
    """Check that a decoded message can be encoded again."""
    encode_message(decode_message(data))
