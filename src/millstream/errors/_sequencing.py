"""Errors of numbering a stream: writers, their leases, and the numbers that they draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class SequencingError(MillstreamError):
    """A stream's sequence numbers can't be allocated or settled; numbers already settled stay settled."""

    code = "sequencing"
    codes: ClassVar[Mapping[str, Code]] = {
        "invalid_count": Code(
            "The number of sequence numbers requested is zero, negative, or more than a stream has; details: count.",
        ),
        "not_in_flight": Code(
            "A finished or aborted range isn't in flight here: it was never allocated, belongs to another writer,"
            " or has ended. Details: first, count.",
        ),
        "writer_name_taken": Code(
            "Another process writes the stream under this name, and its lease is valid. Details: writer, location.",
            Retry.OPERATOR,
            "Give each writer of a stream its own `[writer] name` in millstream.toml.",
        ),
        "lease_too_short": Code(
            "The lease is shorter than a renewal takes: it would expire under a live writer. Details: lease_s, "
            "round_trip_s.",
            Retry.OPERATOR,
            "Raise `[writer] lease`, or use a catalog server with a shorter round trip.",
            exit_code=2,
        ),
        "unknown_writer": Code(
            "The stream has no writer of that name or number; details: writer, known.",
            exit_code=2,
        ),
        "sequence_unusable": Code(
            "The store's sequence numbers can't be right for this stream. It was restored from an older copy, "
            "moved back, or set up differently; numbers would be allocated twice, so none is. Details: the value "
            "found and the value expected.",
            Retry.OPERATOR,
        ),
        "writer_alive": Code(
            "A writer can't be taken over or forgotten while its lease is valid; details: writer, lease_s (the remaining time).",
            Retry.BACKOFF,
            "Stop that writer, or wait until its lease has expired; `millstream writers` shows it.",
        ),
    }
