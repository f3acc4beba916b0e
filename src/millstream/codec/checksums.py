"""CRC32C (Castagnoli) over buffers that lie apart, as if they were one."""

from __future__ import annotations

from typing import Any, TypeAlias

import google_crc32c
import pyarrow as pa

Bytes: TypeAlias = bytes | bytearray | memoryview | Any
"""Anything with a contiguous buffer; the last arm is `pyarrow.Buffer`, which has no type stubs."""


def crc32c(*buffers: Bytes) -> int:
    """The CRC32C of the buffers' bytes one after the other."""
    crc = 0
    for buffer in buffers:
        # The C code takes read-only buffers only: `bytes` and Arrow's; anything else is wrapped without a copy.
        crc = google_crc32c.extend(crc, buffer if isinstance(buffer, bytes | pa.Buffer) else _readonly(buffer))
    return int(crc)


def crc32c_on(crc: int, buffer: Bytes) -> int:
    """The CRC32C of what `crc` is that of, with more bytes behind it; of nothing it is 0."""
    return int(google_crc32c.extend(crc, buffer if isinstance(buffer, bytes | pa.Buffer) else _readonly(buffer)))


def _readonly(buffer: bytearray | memoryview) -> Bytes:
    view = memoryview(buffer)
    return pa.py_buffer(view) if view.readonly else bytes(view)
