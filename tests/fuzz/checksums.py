"""Correct the checksums of a changed log, so that its content is decoded and not just refused.

Written from docs/internals/FORMAT.md; inconsistent parts are left as they are.
"""

from __future__ import annotations

import struct

from millstream.codec.checksums import crc32c

HEADER_BYTES, TRAILER_BYTES, HEAD_BYTES = 4096, 64, 116
WITHOUT_SHARD = 8
"""Size in bytes of what a head of version 1 lacks."""
MARK_SLOTS = ((0, 100), (512, 100), (1024, 100), (2048, 40), (2560, 40))


def of_frames(data: bytes, start: int = 0) -> bytes:
    """Correct consecutive frames from a byte on, as far as their lengths make sense."""
    found = bytearray(data)
    at = start
    while at + HEAD_BYTES <= len(found):
        length, _, head_length = struct.unpack_from("<III", found, at)
        fixed = HEAD_BYTES - (WITHOUT_SHARD if found[at + 12] == 1 else 0)
        if not fixed <= head_length <= length <= len(found) - at:
            break
        shards, sources, parts = struct.unpack_from("<HHI", found, at + fixed - 16)
        place, payload = at + fixed + 4 * shards + 12 * sources, at + head_length
        of_part = 24 if found[at + 12] == 1 else 28
        for _ in range(min(parts, 1000)):
            if place + of_part > at + head_length:
                break
            (size,) = struct.unpack_from("<I", found, place + 16)
            struct.pack_into("<I", found, place + 20, crc32c(bytes(found[payload : min(payload + size, at + length)])))
            place, payload = place + of_part, payload + size
        head = bytes(found[at : at + head_length])
        struct.pack_into("<I", found, at + 4, crc32c(head[:4], head[8:]))
        at += length
    return bytes(found)


def of_segment(data: bytes) -> bytes:
    """Correct a whole segment: header, frames, footer."""
    found = bytearray(of_frames(data, HEADER_BYTES))
    if len(found) >= HEADER_BYTES:
        struct.pack_into("<I", found, 8, crc32c(bytes(found[:8]), bytes(found[12:HEADER_BYTES])))
    trailer = len(found) - TRAILER_BYTES
    if trailer >= HEADER_BYTES:
        (length,) = struct.unpack_from("<I", found, trailer + 4)
        if length <= trailer - HEADER_BYTES:
            crc = crc32c(bytes(found[trailer - length : trailer]), bytes(found[trailer + 4 :]))
            struct.pack_into("<I", found, trailer, crc)
    return bytes(found)


def of_mark(data: bytes) -> bytes:
    """Correct every slot of a mark."""
    found = bytearray(data)
    for at, size in MARK_SLOTS:
        if at + size <= len(found):
            struct.pack_into("<I", found, at + 8, crc32c(bytes(found[at + 12 : at + size])))
    return bytes(found)


def of_operation(data: bytes) -> bytes:
    """Correct an operation as write buffers store it."""
    return data if len(data) < 8 else data[:4] + struct.pack("<I", crc32c(data[8:])) + data[8:]
