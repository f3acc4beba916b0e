"""Whether a region's log still has what was read of it.

A region's log can be cut back: its leader is lost with a tail that no other node there had, another one
is promoted with `--accept-loss`, and a node with that tail sets it aside. Numbers alone don't show that,
because the new leader continues with its own. So a kept state also records, for each region, the commit
group at which it ended. If two logs of one stream share a group, under one epoch and at one time,
everything before it is the same.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from millstream.crdt.region_state import HeardEnd
from millstream.errors import LogTruncated, OffsetExpired, TokenFromFuture
from millstream.model.positions import Seq

if TYPE_CHECKING:
    from millstream.wal.reader import StreamReader

_LOOKS: Final = 8
"""Number of tries: more than a log is shortened within a moment."""


def end_at(reader: StreamReader, upto: Seq) -> HeardEnd | None:
    """Return a log's last commit group with numbers at or below one; None if it has none, or none left.

    Raises:
        LogError: the log is damaged.
        OffsetExpired, TokenFromFuture, LogTruncated: the log had just been shortened at every try.
    """
    for _ in range(_LOOKS - 1):
        # Retention, or the cut of a log, may happen between two reads of it.
        with suppress(OffsetExpired, TokenFromFuture, LogTruncated):
            return _end_at(reader, upto)
    return _end_at(reader, upto)


def _end_at(reader: StreamReader, upto: Seq) -> HeardEnd | None:
    upto = min(upto, reader.persisted_upto())
    lowest = Seq(reader.first_seq() - 1)
    # Reserved numbers that were never used may precede `upto`: few, or very many.
    step = 1
    while lowest < upto:
        after = max(lowest, Seq(upto - step))
        header = None
        for group in reader.read_groups(after, upto):
            header = group[0].header
        if header is not None:
            return HeardEnd(header.group_last_seq, header.group, header.epoch, header.hybrid_time)
        if after == lowest:
            break
        step *= 2
    return None


def still_says(reader: StreamReader, upto: Seq, end: HeardEnd | None) -> bool:
    """Return whether a log still has what was read of it up to a number.

    If retention has dropped the group that shows it, assume that it has.

    Args:
        reader: on the log as it is now: a newly made one.
        end: the commit group at which the read ended; None: unknown, and then the answer is no.

    Raises:
        As `end_at`.
    """
    if upto == 0:
        return True
    first = reader.first_seq()
    if first > upto or (end is not None and first > end.seq):
        return True
    return end is not None and end_at(reader, upto) == end
