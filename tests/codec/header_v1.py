"""Batch header, version 1, as it was written: version 2 without region and shard. No code writes it now."""

from __future__ import annotations

import struct

from millstream.codec.checksums import Bytes, crc32c

START = 16
"""Size in bytes of what precedes the fixed fields: length, CRC, head length, version, kind, flags."""
REGION = 88
"""Position of region and shard in version 2: 8 bytes that version 1 lacks."""
VARIABLE = 116
"""Position at which version 2's fixed fields end."""


def as_header_v1(buffers: list[Bytes]) -> list[Bytes]:
    """Return a frame's buffers with a head of version 1, which has no region or shard: both must be 0."""
    head = bytes(buffers[0])
    length, _, head_length, version, kind, flags = struct.unpack_from("<IIIBBH", head)
    assert (version, head[REGION : REGION + 8]) == (2, bytes(8))
    shards, sources = struct.unpack_from("<HH", head, 100)
    parts, operations, batches = struct.unpack_from("<III", head, 104)
    lists_end = VARIABLE + 4 * shards + 12 * sources + 24 * parts
    body = head[START:REGION] + head[REGION + 8 : lists_end]
    body += bytes(-(START + len(body)) % 8) + head[head_length - operations - batches :]
    length += START + len(body) - head_length
    start = struct.pack("<IIIBBH", length, 0, START + len(body), 1, kind, flags)
    crc = crc32c(start[:4], start[8:], body)
    return [start[:4] + struct.pack("<I", crc) + start[8:] + body, *buffers[1:]]
