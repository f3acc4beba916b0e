"""Errors of write buffers: operations that couldn't be stored, or can no longer be read."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class WriteBufferError(MillstreamError):
    """An error about a write buffer."""

    code = "write_buffer"


class BufferUnavailable(WriteBufferError):
    """The write buffer's server doesn't answer, or isn't ready; nothing was stored. Details: buffer."""

    code = "buffer_unavailable"
    retry = Retry.BACKOFF
    default_hint = "Check its address and that the server runs; it is tried again."


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
        "Send it again under the same session number or idempotency key: who reads the buffer then takes it once."
    )


class BufferMissing(WriteBufferError):
    """The topic or stream of a write buffer doesn't exist, and may not be created here; details: buffer."""

    code = "buffer_missing"
    retry = Retry.OPERATOR
    default_hint = "Make it where it lives, or let Millstream do so: [streams.S.buffer] create = true."


class BufferReplaced(WriteBufferError):
    """The write buffer of that name isn't the one read before: it was created again. Details: buffer, known, found."""

    code = "buffer_replaced"
    retry = Retry.OPERATOR
    default_hint = "Restore it; or give the stream a buffer under another `name`, from whose start it then reads."


class BufferTruncated(WriteBufferError):
    """A write buffer ends before the position that was read up to: it was truncated, or restored from an older copy.

    Details: buffer, shard, place, end.
    """

    code = "buffer_truncated"
    retry = Retry.OPERATOR
    default_hint = "Restore what it held; what was taken from it before is in the log."


class BufferNotDurable(WriteBufferError):
    """The write buffer's server isn't set to keep what it acknowledges; details: buffer, settings."""

    code = "buffer_not_durable"
    retry = Retry.OPERATOR


class UnknownBufferShard(WriteBufferError):
    """The write buffer has no such shard; details: buffer, shard, shards."""

    code = "unknown_buffer_shard"


class BufferOffsetGone(WriteBufferError):
    """The buffer's retention dropped the operation at a reader's position.

    Details: buffer, shard, place, first (the first offset left).
    """

    code = "buffer_offset_gone"
    retry = Retry.OPERATOR
    default_hint = "Restore what was dropped; readers must come by within the buffer's retention."


class BufferSeekBeyondEnd(WriteBufferError):
    """A seek went past the buffer's end; the reader's position is unchanged. Details: buffer, shard, place, end."""

    code = "buffer_seek_beyond_end"


class BufferedOpUndecodable(WriteBufferError):
    """An item of a write buffer holds no operation; the reader's position is behind it.

    Details: buffer, shard, offset.
    """

    code = "buffered_op_undecodable"
    default_hint = "Look who else writes into the buffer; what follows is read."


class SessionsNotKnown(WriteBufferError):
    """A session's writes lie in a write buffer, and the home that writes to the buffer has no record of them.

    Details: session, buffer.
    """

    code = "sessions_not_known"
    retry = Retry.OPERATOR
    default_hint = "Number its writes yourself: `next_number=` says where a session begins. Or leave its name out, or give each write an idempotency key."


class StreamReadsBuffer(WriteBufferError):
    """The stream takes its rows from a write buffer, so applications can't append to it; details: stream, buffer."""

    code = "stream_reads_buffer"
    retry = Retry.OPERATOR
    default_hint = "Append where the buffer is written, or take [streams.S.buffer] out of the configuration."
