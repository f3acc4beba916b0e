"""Errors of bytes that make no sense, raised by pure decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class CodecError(MillstreamError):
    """Bytes can't be decoded. Raised by pure decoders; rooms that know the file or the LSN translate it."""

    code = "codec"


class CorruptFrame(CodecError):
    """A frame, header or footer fails its checksum or its own rules."""

    code = "corrupt_frame"
    codes: ClassVar[Mapping[str, Code]] = {
        "truncated_frame": Code("The bytes end before the frame does."),
    }


class UnreadableBytes(CorruptFrame):
    """The disk fails to return bytes of a file; details: path, byte, errno."""

    code = "unreadable_bytes"
    retry = Retry.OPERATOR
    default_hint = "Check the operating system's log (`dmesg`) for the disk, and restore the file from a copy."


class ProtocolViolation(CodecError):
    """The source sent a message that the replication protocol doesn't allow; details: lsn, kind."""

    code = "protocol_violation"
    retry = Retry.OPERATOR


class TableUndecodable(CodecError):
    """A change of one table can't be decoded; the table has to be quarantined. Details: table, relation_oid, reason."""

    code = "table_undecodable"
    retry = Retry.OPERATOR


class InvalidValue(CodecError):
    """A value, or its text, is not valid for its type; details: column, type."""

    code = "invalid_value"
    codes: ClassVar[Mapping[str, Code]] = {
        "increment_unsuitable": Code(
            "A value can't be added to a column that takes increments; details: table, column.",
            hint=(
                "Send what the counter grows by: a whole number if the column is of whole numbers, or null for nothing."
            ),
        ),
        "counter_grows_only": Code(
            "An increment of a counter that only grows is negative; details: table, column.",
            hint=('Send increments of 0 or more, or declare a column of another name as "pn_counter(increments)".'),
        ),
    }
