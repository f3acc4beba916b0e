"""Errors of what applications write: which rows can't be taken, and why."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class IngestError(MillstreamError):
    """An application's rows can't be taken; nothing of the call was appended."""

    code = "ingest"


class TableCaptured(IngestError):
    """The table's rows come from PostgreSQL, so that nobody else may write them; details: table."""

    code = "table_captured"
    default_hint = "Write to a table of another name; what the source has is changed at the source."


class UnknownColumn(IngestError):
    """Rows have a column that the table hasn't, and it may not be added; details: table, columns."""

    code = "unknown_column"
    default_hint = 'Leave it out, or allow it: `schema_on_write = "add_columns"` in [streams.S.ingest].'


class KeyChanged(IngestError):
    """The configuration gives a table another key than its rows have been written with; details: table, key, configured."""

    code = "key_changed"
    retry = Retry.OPERATOR


class RowsTooLarge(IngestError):
    """A call brings more at once than is taken: rows' bytes, columns, or a name's length; details: what, size, size_max."""

    code = "rows_too_large"


class WriterVersionDiffers(IngestError):
    """The process that writes the home is of another version than the one that appends through it; details: writer, own."""

    code = "writer_version_differs"
    retry = Retry.OPERATOR
    default_hint = "Give both one version of Millstream, and start again the one that was changed."


class IdempotencyKeyReused(IngestError):
    """A session's number, or an idempotency key, was another write's, with other rows or for another table; details: session and number, or idempotency_key."""

    code = "idempotency_key_reused"
    default_hint = "Give each write a number or a key of its own, and send a write again with the rows that it had."


class DedupWindowExpired(IngestError):
    """The write is in the log since an earlier call, and where isn't known any more; details: session and number, or idempotency_key."""

    code = "dedup_window_expired"
    default_hint = "Take it for done: its rows are durable, and nothing was appended now."


class SessionExpired(IngestError):
    """The session hasn't written for so long that it isn't known any more: whether this write is in the log can't be told; details: session, number."""

    code = "session_expired"
    default_hint = "Look whether its last rows are there, and go on in a session of another name, from number 1."


class SessionGap(IngestError):
    """Too many writes of the session with lower numbers haven't come yet; details: session, number, mark."""

    code = "session_gap"
    retry = Retry.BACKOFF
    default_hint = "Send the session's earlier writes first: no number may be left out, and one that was refused is used for the next rows."


class SessionsNeedOneWriter(IngestError):
    """The stream has several writers, none of which knows the others' sessions and keys."""

    code = "sessions_need_one_writer"
    retry = Retry.OPERATOR
    default_hint = "Append without session and key, or let one process write the stream: without `[writer] name`."
