"""Positions: LSNs of a source, offsets of a shard, numbers (`seq`) of a stream, and tokens.

Ranges of offsets are half-open, `[start, end)`. Rows between two tokens lie in `(A, B]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NewType, Self

from millstream.errors import InvalidValue, PositionError
from millstream.model.ids import StreamId, WriterId

Lsn = NewType("Lsn", int)
"""A byte position in a source's WAL, as PostgreSQL's pg_lsn; 0 is invalid."""
Offset = NewType("Offset", int)
"""A record's number in its shard: dense, from 0."""
Seq = NewType("Seq", int)
"""A record's number in its stream: unique, from 1, with gaps; 0 stands before the first."""

_LSN_TEXT: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")
_TOKEN_TEXT: Final = re.compile(r"([0-9a-f]{8})\.(?:s([0-9]{1,20})|m([0-9]{1,20})((?:~[0-9]{1,20}\.[0-9]{1,20})+))\Z")
_HOW_TOKENS_READ: Final = "A token reads like 5f0c21aa.s1024, or 5f0c21aa.m1024~2.1311 where a writer is ahead: take one that Millstream gave out, as it is."
_SHOWN: Final = 100
"""Characters of a refused text in a message."""
SEQ_MAX: Final = Seq(2**63 - 1)
"""The greatest number that a stream can reach."""


def format_lsn(lsn: Lsn) -> str:
    """Return the text of an LSN, such as `16/0374D848`: the second half has eight digits, as PostgreSQL 19 prints it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:08X}"


def parse_lsn(text: str) -> Lsn:
    """Return the LSN of PostgreSQL's text; raises `InvalidValue` for any other text."""
    found = _LSN_TEXT.match(text)
    if found is None:
        raise InvalidValue(f"{text!r} is not an LSN", hint="An LSN reads like 16/B374D848.")
    return Lsn((int(found[1], 16) << 32) | int(found[2], 16))


def short_stream_id(stream: StreamId) -> str:
    """Return the first eight hex digits of the stream's UUID, with which its tokens begin."""
    return stream.hex[:8]


@dataclass(frozen=True, slots=True)
class SeqRange:
    """Numbers `first … first + count - 1`."""

    first: Seq
    count: int

    @property
    def last(self) -> Seq:
        """The greatest number in the range (`first - 1` if it is empty)."""
        return Seq(self.first + self.count - 1)


NO_NUMBERS: Final = SeqRange(Seq(0), 0)
"""An empty range, for an incarnation that was given none."""


@dataclass(frozen=True, slots=True)
class StreamToken:
    """A vector position: a minimum `seq`, and the positions of the writers that are ahead of it.

    Text: `<short stream id>.s<n>` if every writer stands at n, else `<short stream
    id>.m<min>~<writer>.<pos>~…`. Tokens are partially ordered, pointwise. `<=` exists and `<` does
    not, because a total order would be wrong.
    """

    stream: str
    """The stream's short id."""
    minimum: Seq
    ahead: Mapping[WriterId, Seq] = field(default_factory=dict)
    """Positions above the minimum, by writer; entries at or below it are dropped."""

    def __post_init__(self) -> None:
        kept = {w: p for w, p in sorted(self.ahead.items()) if p > self.minimum}
        object.__setattr__(self, "ahead", MappingProxyType(kept))

    def __reduce__(self) -> tuple[object, ...]:
        return (StreamToken, (self.stream, self.minimum, dict(self.ahead)))

    def __hash__(self) -> int:
        return hash((self.stream, self.minimum, tuple(self.ahead.items())))

    @classmethod
    def scalar(cls, stream: StreamId, seq: Seq) -> Self:
        """Return the token at which every writer stands at `seq`; linear readers use it."""
        return cls(short_stream_id(stream), seq)

    @classmethod
    def parse(cls, text: str, *, stream: StreamId | None = None) -> Self:
        """Parse a token.

        Raises:
            PositionError (`invalid_token`): the text is malformed, or belongs to another stream than `stream`.
        """
        found = _TOKEN_TEXT.match(text)
        if found is None:
            raise PositionError(f"{text[:_SHOWN]!r} is not a token", code="invalid_token", hint=_HOW_TOKENS_READ)
        ahead: dict[WriterId, Seq] = {}
        minimum = int(found[2] or found[3])
        for part in (found[4] or "").split("~")[1:]:
            writer, position = part.split(".")
            ahead[WriterId(int(writer))] = Seq(int(position))
        if any(number > SEQ_MAX for number in (minimum, *ahead.values())):
            raise PositionError(f"{text[:_SHOWN]!r} holds a number that no stream can reach", code="invalid_token")
        token = cls(found[1], Seq(minimum), ahead)
        if str(token) != text:
            raise PositionError(
                f"{text[:_SHOWN]!r} is not how a token is written, which would be {token}",
                code="invalid_token",
                hint=_HOW_TOKENS_READ,
            )
        if stream is not None and token.stream != short_stream_id(stream):
            raise PositionError(
                f"{text!r} is a token of another stream (this one is {short_stream_id(stream)})",
                code="invalid_token",
                hint="Use a token of this stream; a stream that was created again has a new id.",
            )
        return token

    def __str__(self) -> str:
        if not self.ahead:
            return f"{self.stream}.s{self.minimum}"
        return f"{self.stream}.m{self.minimum}" + "".join(f"~{w}.{p}" for w, p in self.ahead.items())

    def linear(self) -> Seq:
        """Return the number at which all writers stand, for linear readers.

        Raises `PositionError` (`invalid_token`) for a vector token.
        """
        if self.ahead:
            raise PositionError(
                f"{self} holds a position for each writer, and what is asked for goes by one number",
                code="invalid_token",
                hint=f"Use {self.stream}.s{self.minimum}, which all writers have reached, or request a linear token.",
            )
        return self.minimum

    def of(self, writer: WriterId) -> Seq:
        """Return the position of one writer."""
        return self.ahead.get(writer, self.minimum)

    def __le__(self, other: StreamToken) -> bool:
        self._same_stream(other)
        writers = set(self.ahead) | set(other.ahead)
        return self.minimum <= other.minimum and all(self.of(w) <= other.of(w) for w in writers)

    def join(self, other: StreamToken) -> StreamToken:
        """Return the least token that is at or above both."""
        self._same_stream(other)
        ahead = {w: max(self.of(w), other.of(w)) for w in set(self.ahead) | set(other.ahead)}
        return StreamToken(self.stream, max(self.minimum, other.minimum), ahead)

    def meet(self, other: StreamToken) -> StreamToken:
        """Return the greatest token that is at or below both."""
        self._same_stream(other)
        ahead = {w: min(self.of(w), other.of(w)) for w in set(self.ahead) | set(other.ahead)}
        return StreamToken(self.stream, min(self.minimum, other.minimum), ahead)

    def _same_stream(self, other: StreamToken) -> None:
        if self.stream != other.stream:
            raise PositionError(
                f"tokens of two streams ({self.stream}, {other.stream}) can't be compared", code="invalid_token"
            )
