"""The bytes of `consumers.log`: a mark, then frames. Damage is distinguished from an end torn by a power cut.

    0    8 bytes  MAGIC
    8    u64      the durable end: everything below it was durable when the mark was written
    16   u32      CRC32C of the 8 bytes before
    20   frames   length and CRC32C of a JSON value (u32 each), then the value; all little-endian

The mark is written after each fsync, and is durable with the next one. After a power cut, bytes behind the durable end may be missing,
zero or older, in any combination: frames there count up to the first one that isn't whole. Frames below the durable end were whole
once, so one that isn't whole now is damage: readers stop.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from millstream.codec.checksums import crc32c

MAGIC: Final = b"MSTCONS1"
MARK_AT: Final = len(MAGIC)
_MARK: Final = struct.Struct("<QI")
HEAD_BYTES: Final = MARK_AT + _MARK.size
_FRAME: Final = struct.Struct("<II")
_BEGINS: Final = b'["'
"""The first bytes of every value."""

Entry = list[Any]


@dataclass(frozen=True, slots=True)
class Contents:
    """The readable part of a log."""

    entries: list[Entry]
    """The entries before the first frame that isn't whole."""
    ends: list[int]
    """The end of each entry in the file."""
    end: int
    """The end of these entries."""
    durable: int
    """The durable end; 0 if the mark is torn."""
    size: int
    """The file's size."""

    @property
    def is_damaged(self) -> bool:
        """Whether a frame that was durable isn't whole."""
        return self.end < self.durable


def parse(data: bytes) -> Contents:
    """Return a log's readable part. Raises `ValueError` if the data isn't a log of this version, or an entry isn't JSON."""
    durable = _durable(data)
    entries, ends, at = [], [], HEAD_BYTES
    while (body := _body(data, at)) is not None:
        entries.append(json.loads(body.decode(errors="surrogatepass")))
        at += _FRAME.size + len(body)
        ends.append(at)
    return Contents(entries, ends, at, durable, len(data))


def whole(data: bytes) -> bytes | None:
    """Return a log up to its last whole entry, with all of it marked as durable; None if it is damaged or no log."""
    try:
        durable = _durable(data)
    except ValueError:
        return None
    at = HEAD_BYTES
    while (body := _body(data, at)) is not None:
        at += _FRAME.size + len(body)
    return None if at < durable else MAGIC + mark(at) + data[HEAD_BYTES:at]


def entries_behind(data: bytes, damage: int) -> list[Entry]:
    """Return the whole entries behind a damaged place, as far as they can be found."""
    found, at = [], damage
    while (begin := data.find(_BEGINS, at + _FRAME.size)) >= 0:
        body = _body(data, begin - _FRAME.size)
        if body is None:
            at = begin - _FRAME.size + 1
        else:
            found.append(json.loads(body.decode(errors="surrogatepass")))
            at = begin + len(body)
    return found


def frame(entry: Entry) -> bytes:
    """Return an entry's frame."""
    try:
        data = msgspec.json.encode(entry)
    except UnicodeEncodeError:  # half of a surrogate pair
        data = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
    return _FRAME.pack(len(data), crc32c(data)) + data


def mark(durable: int) -> bytes:
    """Return the mark of a durable end."""
    data = _MARK.pack(durable, 0)[:8]
    return data + struct.pack("<I", crc32c(data))


def log_of(entries: Iterable[Entry]) -> bytes:
    """Return a whole log, for a file that is made durable before it has its name."""
    body = b"".join(map(frame, entries))
    return MAGIC + mark(HEAD_BYTES + len(body)) + body


def _durable(data: bytes) -> int:
    if len(data) < HEAD_BYTES or not data.startswith(MAGIC):
        raise ValueError("it isn't a log of this version")
    durable, checksum = _MARK.unpack_from(data, MARK_AT)
    return durable if crc32c(data[MARK_AT : MARK_AT + 8]) == checksum else 0


def _body(data: bytes, at: int) -> bytes | None:
    """Return the value of the frame at a place; None if there is no whole one."""
    if at + _FRAME.size > len(data):
        return None
    length, checksum = _FRAME.unpack_from(data, at)
    if not length or at + _FRAME.size + length > len(data):  # a power cut may leave zeros at the end
        return None
    body = data[at + _FRAME.size : at + _FRAME.size + length]
    return body if crc32c(body) == checksum else None
