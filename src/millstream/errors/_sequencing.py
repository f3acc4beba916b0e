"""Errors of numbering a stream: writers, their leases, and the numbers that they ask for."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class SequencingError(MillstreamError):
    """A stream's numbers can't be given out or settled as asked; whatever was settled stays so."""

    code = "sequencing"


class InvalidCount(SequencingError):
    """A range of no numbers, of fewer than none, or of more than a stream has was asked for; details: count."""

    code = "invalid_count"


class NotInFlight(SequencingError):
    """A range was finished or aborted that isn't in flight here: never given, given to another, or ended before; details: first, count."""

    code = "not_in_flight"


class WriterNameTaken(SequencingError):
    """Another process writes the stream under this name, from another folder, and its lease runs; details: writer, location."""

    code = "writer_name_taken"
    retry = Retry.OPERATOR
    default_hint = "Give each writer of a stream a name of its own: `[writer] name` in millstream.toml."


class WriterAlive(SequencingError):
    """A writer can't be taken over or forgotten while its lease runs; details: writer, lease_s (what is left of it)."""

    code = "writer_alive"
    retry = Retry.BACKOFF
    default_hint = "Stop it, or wait until its lease has run out; `millstream writers` shows it."


class LeaseTooShort(SequencingError):
    """The lease is shorter than what renewing it takes: it would run out under a writer that lives; details: lease_s, round_trip_s."""

    code = "lease_too_short"
    retry = Retry.OPERATOR
    exit_code = 2
    default_hint = "Raise `[writer] lease`, or bring the catalog's server nearer."


class UnknownWriter(SequencingError):
    """The stream has no writer of that name or number; details: writer, known."""

    code = "unknown_writer"


class SequenceUnusable(SequencingError):
    """The store's numbers can't be right for this stream: it was restored from an older copy, moved back, or set up otherwise.

    Numbers would be given twice, so none is given; details: what is found and what it should be.
    """

    code = "sequence_unusable"
    retry = Retry.OPERATOR
