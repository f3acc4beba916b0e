"""Where a consumer begins: the number before its first record, from `earliest`, `latest`, a token or a time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final, Protocol

import pyarrow.compute as pc

from millstream.errors import CursorExpired, MillstreamError, PositionError, TokenFromFuture
from millstream.model.ids import StreamId
from millstream.model.positions import Seq, StreamToken
from millstream.wal.reader import StreamReader

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
Moment = datetime | StreamToken


class ParseMoment(Protocol):
    """Reads a token or a time: `millstream.model.as_of_parsing.parse_as_of` with the present moment."""

    def __call__(self, text: str, stream: StreamId) -> Moment:
        """Return it; `PositionError` if it is neither."""


def resolve(
    text: str,
    reader: StreamReader,
    stream: StreamId,
    parse: ParseMoment,
    now: Callable[[], datetime],
    refuse: Callable[[str], MillstreamError],
) -> Seq:
    """Return the number behind which a consumer begins.

    Args:
        text: the start or the target of a rewind.
        reader: the log.
        stream: its id.
        parse: reads tokens and times.
        now: the clock.
        refuse: makes the error for a text that names no place.

    Raises:
        TokenFromFuture: the token is beyond the readable end.
        CursorExpired: retention has passed the token.
        MillstreamError: as `refuse` made it.
    """
    end, first = reader.persisted_upto(), reader.first_seq()
    if text == LATEST:
        return end
    if text == EARLIEST:
        return Seq(min(end, first - 1))
    try:
        moment = parse(text, stream)
        seq = moment.linear() if isinstance(moment, StreamToken) else None
    except PositionError as error:
        raise refuse(error.message) from error
    if seq is not None:
        if seq > end:
            raise TokenFromFuture(
                f"{text} is beyond the stream's end, {StreamToken.scalar(stream, end)}",
                hint="Use `latest`, or a token that this stream has given.",
                persisted_upto=int(end),
            )
        check_kept(seq, reader, stream)
        return reader.whole_upto(seq)
    assert isinstance(moment, datetime)
    if moment > now():
        raise refuse(f"{text!r} lies in the future")
    return _before(moment, reader, end)


def check_kept(seq: Seq, reader: StreamReader, stream: StreamId) -> None:
    """Raise `CursorExpired` if retention has dropped what follows a number."""
    first = reader.first_seq()
    if seq < first - 1:
        raise CursorExpired(
            f"retention has dropped records behind {StreamToken.scalar(stream, seq)}; the log begins at {first}",
            hint="Begin at `earliest`, or raise `retention_bytes_max`.",
            needed_from=int(seq + 1),
            first=int(first),
        )


def _before(moment: datetime, reader: StreamReader, end: Seq) -> Seq:
    """Return the number before the first operation, in log order, that committed at or after a moment."""
    moment_us = round(moment.timestamp() * 1_000_000)
    since, _ = reader.numbers_at(moment_us)
    lowest: Seq | None = None
    for found in reader.read_between(since, end):
        if lowest is not None and found.first_seq > lowest:
            break
        times = pc.cast(found.batch.column("__commit_ts"), "int64")
        late = pc.fill_null(pc.greater_equal(times, moment_us), fill_value=False)
        first = pc.min(found.operation_seq.filter(late)).as_py()
        if first is not None:
            lowest = Seq(first) if lowest is None else min(lowest, Seq(first))
    return end if lowest is None else reader.whole_upto(Seq(lowest - 1))
