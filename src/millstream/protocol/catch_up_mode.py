"""How capture reads: the replication stream, or the backlog in chunks; and when it changes from one to the other.

The rules
---------
The backlog is what the source has written and the log doesn't have. While it is small, the stream is read: each
transaction comes as it commits. A backlog of `start_bytes` is worth reading in chunks; a rest below a quarter of that
isn't.

- The faster of the two is found by measuring, in bytes of WAL passed a second, from the source to the durable log. A
  rate counts for five minutes. A way that hasn't been measured is tried: chunks first, and if those will go on for
  long, the stream briefly.
- Chunks have to be faster by a tenth for a change to them.
- A chunk may be full though the backlog hardly moved, or have several times the bytes of the WAL that it is to read.
  Then a large transaction lies across chunks and is read again with each (or large values lay there compressed). The
  stream goes on, and chunks aren't tried before it has passed everything that the source had written by then.
- Any refusal by the source ends chunks for good. So do two connections in a row that broke before a chunk had come.
- `always` reads in chunks whenever a session begins behind the source's end, however slow; the last two rules hold.

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from millstream.model.positions import Lsn

START_BYTES: Final = 64 << 20
"""Backlog from which chunks pay: the stream reads it in one to four seconds, and a change costs a tenth of one."""
CHUNK_WAL_BYTES: Final = 128 << 20
CHUNK_CHANGES: Final = 1_000_000
"""Larger chunks gain little, and lie on the source's disk until they are sent; smaller ones decode too much again and
again. 1.5 M rows in transactions of a thousand took 8.8 s in chunks of 50 thousand, 3.4 s of 250 thousand, 2.6 s of a
million."""

_END_PART: Final = 4
_STUCK_PART: Final = 16
_STUCK_TIMES: Final = 3
_MEASURED_S: Final = 3.0
"""How long the stream is read before its rate counts."""
_CHUNKS_MEASURED_S: Final = 1.0
_TRY_STREAM_AFTER_S: Final = 10.0
_TRY_STREAM_REST_S: Final = 30.0
_TRY_STREAM_ANYHOW_S: Final = 60.0
"""Time after which the stream is tried however little is left: as much may be written during the catch-up."""
_RATE_COUNTS_S: Final = 300.0
_FASTER: Final = 1.1
_BROKEN_MAX: Final = 2


class CatchUpMode(StrEnum):
    """Whether a backlog may be read in chunks."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class Mode(StrEnum):
    """How the source is read."""

    STREAMING = "streaming"
    CATCHING_UP = "catching up"


@dataclass(frozen=True, slots=True)
class BacklogChunk:
    """The result of reading one chunk."""

    begin: Lsn
    end: Lsn
    """LSN up to which every commit has come."""
    source_end: Lsn
    """The end of the source's WAL, read behind the chunk."""
    messages: int
    size_bytes: int
    """Size of the messages, as they were sent."""


@dataclass(frozen=True, slots=True)
class _Rate:
    bytes_s: float
    measured_at: float


class ModeChoice:
    """Chooses the mode for one capture, from session to session.

    Args:
        setting: the configured choice.
        start_bytes: the backlog from which chunks are tried.
        chunk_changes: the largest number of changes in a chunk.
        chunk_wal_bytes: the most WAL that a chunk reads.
    """

    def __init__(
        self,
        setting: CatchUpMode,
        *,
        start_bytes: int = START_BYTES,
        chunk_changes: int = CHUNK_CHANGES,
        chunk_wal_bytes: int = CHUNK_WAL_BYTES,
    ) -> None:
        self._setting = setting
        self._start_bytes = start_bytes
        self._chunk_changes = chunk_changes
        self._chunk_wal_bytes = chunk_wal_bytes
        self._rates: dict[Mode, _Rate] = {}
        self._streams_next = False
        self._began: tuple[float, Lsn] | None = None
        self._not_below = Lsn(0)
        self._broken = 0
        self._possible = True
        self.mode = Mode.STREAMING
        self.given_up = ""
        """Why chunks are no longer tried; empty while they are."""
        self.reason = ""
        """Why the mode was last changed."""

    def begin(self, *, reached: Lsn, source_end: Lsn, now: float, possible: bool = True) -> Mode:
        """Begin a session at `reached`; return how it reads.

        Args:
            reached: LSN at which the session begins.
            source_end: the end of the source's WAL.
            now: seconds, of any monotonic clock.
            possible: whether this session may read chunks at all.
        """
        self._possible = possible
        asked, self._streams_next = self._streams_next, False
        backlog = source_end - reached
        if asked or not self._allowed(reached):
            self.mode = Mode.STREAMING
        elif self._setting is CatchUpMode.ALWAYS:
            self.mode = Mode.CATCHING_UP if backlog > 0 else Mode.STREAMING
        else:
            pays = backlog >= self._start_bytes and not self._stream_is_faster(now)
            self.mode = Mode.CATCHING_UP if pays else Mode.STREAMING
        self._began = (now, reached) if self.mode is Mode.CATCHING_UP else None
        return self.mode

    def after_chunk(self, chunk: BacklogChunk, now: float) -> bool:
        """Return whether to read another chunk; else the stream is read next."""
        assert self._began is not None, "chunks are read in sessions that began so"
        self._broken = 0
        since, first = self._began
        seconds, moved = now - since, chunk.end - first
        rest = chunk.source_end - chunk.end
        if rest < self._start_bytes // _END_PART:
            self._note(Mode.CATCHING_UP, moved, seconds, now)
            return self._stream_next("the rest is small")
        is_stuck = (
            chunk.messages >= self._chunk_changes and chunk.end - chunk.begin < self._chunk_wal_bytes // _STUCK_PART
        )
        if is_stuck or chunk.size_bytes > _STUCK_TIMES * self._chunk_wal_bytes:
            self._not_below = chunk.source_end
            return self._stream_next("a large transaction is read again with every chunk")
        if self._setting is CatchUpMode.ALWAYS or seconds < _CHUNKS_MEASURED_S:
            return True
        self._note(Mode.CATCHING_UP, moved, seconds, now)
        if self._rate(Mode.STREAMING, now) is not None:
            return not self._stream_is_faster(now) or self._stream_next("the stream is faster")
        takes_long = rest * seconds >= _TRY_STREAM_REST_S * moved
        if seconds >= (_TRY_STREAM_AFTER_S if takes_long else _TRY_STREAM_ANYHOW_S):
            return self._stream_next("to see how fast the stream is")
        return True

    def while_streaming(self, *, passed: Lsn, source_end: Lsn, now: float) -> bool:
        """Return whether to change to chunks; called now and then, with the LSN that the log has reached."""
        if not self._allowed(passed):
            return False
        backlog = source_end - passed
        since, first = self._began or (now, passed)
        if backlog < self._start_bytes // _END_PART or passed == first:
            self._began = now, passed  # the stream isn't the limit, or its first change is still to come
            return False
        if now - since < _MEASURED_S:
            return False
        self._note(Mode.STREAMING, passed - first, now - since, now)
        self._began = now, passed
        if backlog < self._start_bytes:
            return False
        chunks, stream = self._rate(Mode.CATCHING_UP, now), self._rate(Mode.STREAMING, now)
        pays = self._setting is CatchUpMode.ALWAYS or chunks is None or stream is None or chunks > _FASTER * stream
        if pays:
            self.reason = "the backlog is large"
        return pays

    def give_up(self, why: str) -> None:
        """Read the stream from now on, because the source refuses chunks."""
        self.given_up = why
        self.mode = Mode.STREAMING
        self._began = None

    def broke(self) -> None:
        """Note that a session that read chunks broke. If no chunk has come, chunks may be the cause."""
        self._broken += 1
        if self._broken >= _BROKEN_MAX:
            self.give_up("connections broke before a chunk had come")

    def _allowed(self, reached: Lsn) -> bool:
        wanted = self._setting is not CatchUpMode.NEVER and self._possible
        return wanted and not self.given_up and reached >= self._not_below

    def _stream_next(self, reason: str) -> bool:
        self._streams_next = True
        self.reason = reason
        return False

    def _note(self, mode: Mode, moved: int, seconds: float, now: float) -> None:
        if seconds > 0:
            self._rates[mode] = _Rate(moved / seconds, now)

    def _rate(self, mode: Mode, now: float) -> float | None:
        rate = self._rates.get(mode)
        return None if rate is None or now - rate.measured_at > _RATE_COUNTS_S else rate.bytes_s

    def _stream_is_faster(self, now: float) -> bool:
        chunks, stream = self._rate(Mode.CATCHING_UP, now), self._rate(Mode.STREAMING, now)
        return chunks is not None and stream is not None and stream > chunks
