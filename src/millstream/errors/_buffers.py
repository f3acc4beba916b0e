"""Errors of write buffers: operations that couldn't be stored, or can no longer be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class WriteBufferError(MillstreamError):
    """An error about a write buffer."""

    code = "write_buffer"
    codes: ClassVar[Mapping[str, Code]] = {
        "buffer_replaced": Code(
            "The write buffer of that name was created again after it was read. Details: buffer, known, found.",
            Retry.OPERATOR,
            "Restore the old buffer, or give the stream a buffer with another `name`, which it reads from its start.",
        ),
        "buffer_not_durable": Code(
            "The write buffer's server may lose acknowledged writes; details: buffer, settings.",
            Retry.OPERATOR,
        ),
        "unknown_buffer_shard": Code(
            "The write buffer has no such shard; details: buffer, shard, shards.",
        ),
        "sessions_not_known": Code(
            "A session's writes are in a write buffer, and the home that writes to the buffer has no record of "
            "them. Details: session, buffer.",
            Retry.OPERATOR,
            "Pass `next_number=` with the session's first number, leave out the session's name, or give each "
            "write an idempotency key.",
        ),
        "stream_reads_buffer": Code(
            "The stream takes its rows from a write buffer, so applications can't append to it; details: stream, "
            "buffer.",
            Retry.OPERATOR,
            "Append to the stream that writes the buffer, or remove [streams.S.buffer] from the configuration.",
        ),
        "buffer_seek_beyond_end": Code(
            "A seek went past the buffer's end; the reader's position is unchanged. Details: buffer, shard, place, end."
        ),
        "buffer_truncated": Code(
            "A write buffer ends before the position that was read up to: it was truncated, or restored from an older copy. Details: buffer, shard, place, end.",
            Retry.OPERATOR,
            "Restore the buffer's lost operations; those read before are in the log.",
        ),
    }


class BufferUnavailable(WriteBufferError):
    """The write buffer's server doesn't answer, or isn't ready; nothing was stored. The call may be retried. Details: buffer."""

    code = "buffer_unavailable"
    retry = Retry.BACKOFF
    default_hint = "Check the buffer's address and that its server runs."


class BufferRefused(WriteBufferError):
    """The write buffer's server refuses a request (rights, size, settings), and nothing was stored. Details: buffer."""

    code = "buffer_refused"
    retry = Retry.OPERATOR


class BufferOutcomeUnknown(WriteBufferError):
    """The operation was sent to a write buffer, and no answer came: it may or may not be stored.

    Details: buffer, shard.
    """

    code = "buffer_outcome_unknown"
    retry = Retry.REOPEN
    default_hint = (
        "Send the operation again under the same session number or idempotency key, so that readers take it once."
    )


class BufferMissing(WriteBufferError):
    """The topic or stream of a write buffer doesn't exist, and may not be created here; details: buffer."""

    code = "buffer_missing"
    retry = Retry.OPERATOR
    default_hint = "Create the topic or stream, or let Millstream create it: [streams.S.buffer] create = true."


class BufferOffsetGone(WriteBufferError):
    """The buffer's retention dropped the operation at a reader's position.

    Details: buffer, shard, place, first (the first offset left).
    """

    code = "buffer_offset_gone"
    retry = Retry.OPERATOR
    default_hint = "Restore the dropped operations, and run readers within the buffer's retention."


class BufferedOpUndecodable(WriteBufferError):
    """An item of a write buffer holds no operation; the reader's position is behind it.

    Details: buffer, shard, offset.
    """

    code = "buffered_op_undecodable"
    default_hint = "Find the other program that writes into the buffer; later items are read."
