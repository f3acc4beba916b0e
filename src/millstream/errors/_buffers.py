"""Errors of write buffers: what couldn't be stored, and what can't be read any more."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class WriteBufferError(MillstreamError):
    """Something about a write buffer."""

    code = "write_buffer"


class BufferUnavailable(WriteBufferError):
    """The write buffer's server doesn't answer, or isn't ready; nothing was stored. Details: buffer."""

    code = "buffer_unavailable"
    retry = Retry.BACKOFF
    default_hint = "Check its address and that the server runs; it is tried again."


class BufferRefused(WriteBufferError):
    """The write buffer's server refuses what it is asked, and nothing was stored: rights, size, settings. Details: buffer."""

    code = "buffer_refused"
    retry = Retry.OPERATOR


class BufferOutcomeUnknown(WriteBufferError):
    """The operation was sent to a write buffer, and no answer came: it may or may not be stored. Details: buffer, shard."""

    code = "buffer_outcome_unknown"
    retry = Retry.REOPEN
    default_hint = (
        "Send it again under the same session number or idempotency key: who reads the buffer then takes it once."
    )


class BufferMissing(WriteBufferError):
    """The topic or stream of a write buffer isn't there, and may not be made here; details: buffer."""

    code = "buffer_missing"
    retry = Retry.OPERATOR
    default_hint = "Make it where it lives, or let Millstream do so: [streams.S.buffer] create = true."


class BufferReplaced(WriteBufferError):
    """The write buffer of that name isn't the one that was read before: it was made anew. Details: buffer, known, found."""

    code = "buffer_replaced"
    retry = Retry.OPERATOR
    default_hint = "Restore it; or give the stream a buffer under another `name`, from whose start it then reads."


class BufferTruncated(WriteBufferError):
    """A write buffer ends before the place that was read up to: it was truncated, or restored from an older copy.

    Details: buffer, shard, place, end.
    """

    code = "buffer_truncated"
    retry = Retry.OPERATOR
    default_hint = "Restore what it held; what was taken from it before is in the log."


class BufferNotDurable(WriteBufferError):
    """The write buffer's server doesn't promise to keep what it acknowledged; details: buffer, settings."""

    code = "buffer_not_durable"
    retry = Retry.OPERATOR


class UnknownBufferShard(WriteBufferError):
    """The write buffer has no such shard; details: buffer, shard, shards."""

    code = "unknown_buffer_shard"


class BufferOffsetGone(WriteBufferError):
    """What lies at a reader's place was dropped by the buffer's retention; details: buffer, shard, place, first (what is still there)."""

    code = "buffer_offset_gone"
    retry = Retry.OPERATOR
    default_hint = "Restore what was dropped; readers must come by within the buffer's retention."


class BufferSeekBeyondEnd(WriteBufferError):
    """A reader was to go to a place past the buffer's end; it stays where it was. Details: buffer, shard, place, end."""

    code = "buffer_seek_beyond_end"


class BufferedOpUndecodable(WriteBufferError):
    """An item of a write buffer holds no operation; the reader's place is behind it. Details: buffer, shard, offset."""

    code = "buffered_op_undecodable"
    default_hint = "Look who else writes into the buffer; what follows is read."


class SessionsNotKnown(WriteBufferError):
    """What a session wrote lies in a write buffer, and the home that writes there doesn't know of it; details: session, buffer."""

    code = "sessions_not_known"
    retry = Retry.OPERATOR
    default_hint = "Number its writes yourself: `next_number=` says where a session begins. Or leave its name out, or give each write an idempotency key."


class StreamReadsBuffer(WriteBufferError):
    """The stream takes its rows from a write buffer, so that applications can't append to it; details: stream, buffer."""

    code = "stream_reads_buffer"
    retry = Retry.OPERATOR
    default_hint = "Append where the buffer is written, or take [streams.S.buffer] out of the configuration."
