"""Whether the log of a region still says what was heard of it.

A region's log can be cut back: its leader is lost with a tail that no other node there had, another one is promoted with `--accept-loss`, and whoever has
that tail sets it aside. Numbers alone don't show that, for the new leader goes on with some of its own. So what is kept says of each region by which commit
group it ended, too. Of two logs of one stream that have one group, under one epoch and at one time, all that lies in front of it is the same.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from millstream.crdt.reconcile import HeardEnd
from millstream.errors import LogTruncated, OffsetExpired, TokenFromFuture
from millstream.model.positions import Seq

if TYPE_CHECKING:
    from millstream.wal.reader import StreamReader

_LOOKS: Final = 8
"""More often than a log is shortened within a moment."""


def end_at(reader: StreamReader, upto: Seq) -> HeardEnd | None:
    """The last commit group of a log with numbers at or below one; None where it has none, or none any more.

    Raises:
        LogError: the log is damaged.
        OffsetExpired, TokenFromFuture, LogTruncated: at each of some looks the log had just been shortened.
    """
    for _ in range(_LOOKS - 1):
        # Retention, or whoever cuts the log back, may go on between two looks at it.
        with suppress(OffsetExpired, TokenFromFuture, LogTruncated):
            return _end_at(reader, upto)
    return _end_at(reader, upto)


def _end_at(reader: StreamReader, upto: Seq) -> HeardEnd | None:
    upto = min(upto, reader.persisted_upto())
    lowest = Seq(reader.first_seq() - 1)
    # Numbers that were reserved and never used may lie in front of `upto`: few, or very many.
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
    """Whether a log still has what was heard of it up to a number. Where retention has dropped the group that would show it: it does, as far as can be known.

    Args:
        reader: on the log as it is now: one that was just made.
        upto: the number.
        end: by which group what was heard ended; None: nobody knows, and it can't be said that it does.

    Raises:
        As `end_at`.
    """
    if upto == 0:
        return True
    first = reader.first_seq()
    if first > upto or (end is not None and first > end.seq):
        return True
    return end is not None and end_at(reader, upto) == end
