"""Errors of numbering a stream: writers, their leases, and the numbers that they draw."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class SequencingError(MillstreamError):
    """A stream's numbers can't be given out or settled; numbers already settled stay settled."""

    code = "sequencing"


class InvalidCount(SequencingError):
    """The count of numbers asked for is zero, negative, or more than a stream has; details: count."""

    code = "invalid_count"


class NotInFlight(SequencingError):
    """A finished or aborted range isn't in flight here: never given, given to another writer, or already ended.

    Details: first, count.
    """

    code = "not_in_flight"


class WriterNameTaken(SequencingError):
    """Another process writes the stream under this name, from another folder, and its lease is valid.

    Details: writer, location.
    """

    code = "writer_name_taken"
    retry = Retry.OPERATOR
    default_hint = "Give each writer of a stream a name of its own: `[writer] name` in millstream.toml."


class WriterAlive(SequencingError):
    """A writer can't be taken over or forgotten while its lease is valid; details: writer, lease_s (time left)."""

    code = "writer_alive"
    retry = Retry.BACKOFF
    default_hint = "Stop it, or wait until its lease has run out; `millstream writers` shows it."


class LeaseTooShort(SequencingError):
    """The lease is shorter than a renewal takes: it would expire under a live writer.

    Details: lease_s, round_trip_s.
    """

    code = "lease_too_short"
    retry = Retry.OPERATOR
    exit_code = 2
    default_hint = "Raise `[writer] lease`, or bring the catalog's server nearer."


class UnknownWriter(SequencingError):
    """The stream has no writer of that name or number; details: writer, known."""

    code = "unknown_writer"


class SequenceUnusable(SequencingError):
    """The store's numbers can't be right for this stream. Details: the value found and the value expected.

    The store was restored from an older copy, moved back, or set up otherwise. Numbers would be
    given twice, so none is given.
    """

    code = "sequence_unusable"
    retry = Retry.OPERATOR
