"""The transport of answers with many batches: pieces that can each be read alone, and an unmistakable end.

A piece is an Arrow IPC stream in parts: each is a little-endian u32 length, whose highest bit is set if another part
of the piece follows, and that many bytes. A length of 0 ends the answer. `FAILED` in place of a length, also between
the parts of a piece, reports that the rest isn't available; a length and a JSON object with the error follow. An answer
that just stops was cut off.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from millstream.errors import MillstreamError, PositionError, RemoteError, error_of
from millstream.model.positions import StreamToken

PIECES_TYPE: Final = "application/vnd.millstream.batches"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
PART_BYTES: Final = 256 << 10
"""Size in bytes of one part: the server holds a part in memory until its caller takes it."""
_LENGTH: Final = struct.Struct("<I")
_FAILED: Final = 0xFFFF_FFFF
_MORE: Final = 0x8000_0000
"""Bit of a length: another part of the piece follows."""
END: Final = _LENGTH.pack(0)

_TOKEN: Final = b"millstream.token"
_EMPTIED: Final = b"millstream.emptied"


def piece(batches: list[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
    """Yield a piece with the batches, in consecutive parts."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as out:
        for batch in batches:
            out.write_batch(batch)
    encoded = sink.getvalue()
    for begin in range(0, encoded.size, PART_BYTES):
        part = memoryview(encoded)[begin : begin + PART_BYTES]
        is_last = begin + PART_BYTES >= encoded.size
        yield _LENGTH.pack(len(part) if is_last else len(part) | _MORE) + part


def failed(error: MillstreamError) -> bytes:
    """Return the bytes that replace the unavailable rest of an answer."""
    said = json.dumps(error.as_dict(), default=str).encode()
    return _LENGTH.pack(_FAILED) + _LENGTH.pack(len(said)) + said


def latest_piece(emptied: bool, rows: pa.Table, token: StreamToken) -> Iterator[bytes]:  # noqa: FBT001 - as `Latest` has them
    """Yield a step of `read_latest`: its facts are in the metadata of the rows' schema."""
    said = {**(rows.schema.metadata or {}), _TOKEN: str(token).encode(), _EMPTIED: b"1" if emptied else b"0"}
    return piece(rows.to_batches(), rows.schema.with_metadata(said))


def change_piece(batch: pa.RecordBatch, token: StreamToken) -> Iterator[bytes]:
    """Yield a step of `follow`: the token is in the metadata of the batch's schema."""
    said = {**(batch.schema.metadata or {}), _TOKEN: str(token).encode()}
    schema = batch.schema.with_metadata(said)
    return piece([batch.replace_schema_metadata(said)], schema)


def change_of(rows: pa.Table) -> tuple[list[pa.RecordBatch], StreamToken]:
    """Return the arguments of `change_piece`.

    Raises:
        RemoteError (`answer_unreadable`): it isn't one.
    """
    said = dict(rows.schema.metadata or {})
    try:
        token = StreamToken.parse(said.pop(_TOKEN).decode())
    except (KeyError, ValueError, PositionError) as error:
        raise RemoteError(f"a batch has no token: {error}", code="answer_unreadable") from error
    return rows.replace_schema_metadata(said or None).to_batches(), token


def latest_of(rows: pa.Table) -> tuple[bool, pa.Table, StreamToken]:
    """Return the arguments of `latest_piece`.

    Raises:
        RemoteError (`answer_unreadable`): it isn't one.
    """
    said = dict(rows.schema.metadata or {})
    try:
        token, emptied = StreamToken.parse(said.pop(_TOKEN).decode()), said.pop(_EMPTIED) == b"1"
    except (KeyError, ValueError, PositionError) as error:
        raise RemoteError(f"a range of rows has no end position: {error}", code="answer_unreadable") from error
    return emptied, rows.replace_schema_metadata(said or None), token


class Pieces:
    """Takes an answer's bytes as they come, and yields its pieces."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._parts = bytearray()
        """The parts of a piece that isn't whole."""
        self.ended = False
        """Whether the end has come: an answer without it was cut off."""

    def feed(self, data: bytes) -> Iterator[pa.Table]:
        """Yield the pieces that are whole now, each as a table.

        Raises:
            MillstreamError: the error that the server sent for the rest.
            RemoteError (`answer_unreadable`): the bytes are no pieces.
        """
        self._held += data
        while (whole := self._next()) is not None:
            yield _table_of(whole)

    def _next(self) -> bytes | None:
        while (found := self._part()) is not None:
            part, has_more = found
            self._parts += part
            if not has_more:
                whole = bytes(self._parts)
                self._parts.clear()
                return whole
        return None

    def _part(self) -> tuple[bytes, bool] | None:
        """Return the next part if it is there, and whether another one of its piece follows."""
        held = self._held
        if self.ended and held:
            raise RemoteError(f"{len(held)} bytes stand behind an answer's end", code="answer_unreadable")
        if len(held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(held)
        begins, has_failed, has_more = _LENGTH.size, length == _FAILED, bool(length & _MORE)
        if has_failed:
            if len(held) < 2 * _LENGTH.size:
                return None
            begins, (length,) = 2 * _LENGTH.size, _LENGTH.unpack_from(held, _LENGTH.size)
        elif has_more:
            length &= ~_MORE
        if len(held) < begins + length:
            return None
        part = bytes(memoryview(held)[begins : begins + length])
        del held[: begins + length]
        if has_failed:
            raise error_of(_facts_of(part))
        if length == 0:
            if has_more or self._parts:
                raise RemoteError("a piece of an answer lacks its last part", code="answer_unreadable")
            self.ended = True
            return self._part()
        return part, has_more


def _facts_of(said: bytes) -> Mapping[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(said)
        return {"code": facts["code"], "message": facts["message"], "hint": facts["hint"], "details": facts["details"]}
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteError(f"an error in an answer can't be read: {error}", code="answer_unreadable") from error


def _table_of(encoded: bytes) -> pa.Table:
    try:
        with pa.ipc.open_stream(pa.py_buffer(encoded)) as stream:
            return stream.read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RemoteError(f"a piece of an answer can't be read: {error}", code="answer_unreadable") from error
