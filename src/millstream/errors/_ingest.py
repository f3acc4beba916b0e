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
