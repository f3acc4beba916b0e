"""CRC32C (Castagnoli) over separate buffers as if they were one."""

from __future__ import annotations

from typing import Any, TypeAlias

import google_crc32c
import pyarrow as pa

Bytes: TypeAlias = bytes | bytearray | memoryview | Any
"""Anything with a contiguous buffer; the last arm is `pyarrow.Buffer`, which has no type stubs."""


def crc32c(*buffers: Bytes) -> int:
    """Return the CRC32C of the buffers' concatenated bytes."""
    crc = 0
    for buffer in buffers:
        # The C code takes only read-only buffers, `bytes` and Arrow's; anything else is wrapped without a copy.
        crc = google_crc32c.extend(crc, buffer if isinstance(buffer, bytes | pa.Buffer) else _readonly(buffer))
    return int(crc)


def crc32c_on(crc: int, buffer: Bytes) -> int:
    """Extend a CRC32C by more bytes; the CRC32C of no bytes is 0."""
    return int(google_crc32c.extend(crc, buffer if isinstance(buffer, bytes | pa.Buffer) else _readonly(buffer)))


def _readonly(buffer: bytearray | memoryview) -> Bytes:
    view = memoryview(buffer)
    return pa.py_buffer(view) if view.readonly else bytes(view)
