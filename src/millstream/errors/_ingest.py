"""Errors of applications' writes: which rows can't be taken, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class IngestError(MillstreamError):
    """An application's rows are rejected; nothing of the call was appended."""

    code = "ingest"
    codes: ClassVar[Mapping[str, Code]] = {
        "table_captured": Code(
            "The table's rows come from PostgreSQL, so applications may not write them; details: table.",
            hint="Write to a table of another name, or change the rows at the source.",
        ),
        "unknown_column": Code(
            "Rows have a column that the table lacks, and it may not be added; details: table, columns.",
            hint=('Leave out the column, or allow it: `schema_on_write = "add_columns"` in [streams.S.ingest].'),
        ),
        "key_changed": Code(
            "The configuration gives a table another key than its rows were written with; details: table, key, "
            "configured.",
            Retry.OPERATOR,
        ),
        "merge_changed": Code(
            "The configuration says that a column's rows hold increments, and its earlier rows hold totals, or the "
            "other way round; details: table, column, merge, configured.",
            Retry.OPERATOR,
            "Restore the column's word in [streams.S.merge], or count in a column of another name.",
        ),
        "writer_version_differs": Code(
            "The process that writes the home has another version than the one that appends; details: writer, own.",
            Retry.OPERATOR,
            "Run the same version of Millstream in both processes, and restart the one that you changed.",
        ),
        "rows_too_large": Code(
            "A call exceeds a limit: on rows' bytes, columns, or a name's length; details: what, size, size_max."
        ),
    }


class IdempotencyKeyReused(IngestError):
    """A session's number, or an idempotency key, was used by another write, with other rows or for another table.

    Details: session and number, or idempotency_key.
    """

    code = "idempotency_key_reused"
    default_hint = "Give each write its own number or key, and repeat a write with the same rows."


class DedupWindowExpired(IngestError):
    """An earlier call wrote this to the log, but its position is no longer known.

    Details: session and number, or idempotency_key.
    """

    code = "dedup_window_expired"
    default_hint = "Treat the write as done: its rows are durable, and this call appended nothing."


class SessionExpired(IngestError):
    """The session was idle for so long that it was forgotten. It is unknown whether this write is in the log.

    Details: session, number.
    """

    code = "session_expired"
    default_hint = (
        "Check whether the session's last rows are in the table, and continue in a session with another name,"
        " from number 1."
    )


class SessionGap(IngestError):
    """Too many writes of the session with lower numbers are still missing; details: session, number, mark."""

    code = "session_gap"
    retry = Retry.BACKOFF
    default_hint = (
        "Send the session's earlier writes first, without a gap; use the number of a rejected write for the next rows."
    )


class SessionsNeedOneWriter(IngestError):
    """The stream has several writers, and none has the others' sessions and keys."""

    code = "sessions_need_one_writer"
    retry = Retry.OPERATOR
    default_hint = "Append without session and key, or write the stream from one process, without `[writer] name`."
