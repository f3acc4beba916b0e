"""Access: what a caller may do with which stream, and the text of an access token.

A token is `mst_<id>_<secret>`: the id finds it, the secret proves it. The secret is drawn at random from 2^256, so one round of SHA-256
keeps it as safe as a slow hash would: there is no list of likely ones to try, which is what slow hashes are for. What is kept
is the hash; the text is shown once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Self

from millstream.errors import UsageError
from millstream.model.ids import check_stream_name

ALL_STREAMS: Final = "*"
"""Stands for every stream, those that are yet to come among them."""
TOKEN_PREFIX: Final = "mst_"  # noqa: S105 - what scanners for leaked secrets may look for
_TOKEN: Final = re.compile(r"mst_([0-9a-f]{12})_([0-9A-Za-z]{43})\Z")


class Right(StrEnum):
    """What may be done with a stream. `write` alone reads nothing: what a sensor is given opens nobody else's records."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
    """The other two, and what changes how the stream works."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What a caller may do, by stream."""

    of: Mapping[str, frozenset[Right]] = field(default_factory=dict)
    """By the stream's name, or `ALL_STREAMS`."""

    def allow(self, right: Right, stream: str) -> bool:
        """Whether it may be done with that stream; with `ALL_STREAMS`, whether with each of them."""
        wanted = {right, Right.ADMIN}
        return any(wanted & self.of.get(name, frozenset()) for name in {stream, ALL_STREAMS})

    def as_dict(self) -> dict[str, list[str]]:
        """JSON-able facts."""
        return {stream: sorted(right.value for right in rights) for stream, rights in sorted(self.of.items())}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Iterable[str]]) -> Self:
        """The value that `as_dict` told of."""
        return cls(
            MappingProxyType({stream: frozenset(map(Right, rights)) for stream, rights in facts.items()}),
        )

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Rights as they are written: `shop=read`, `shop=read,write`, `*=admin`; several of one stream add up.

        Raises:
            UsageError: a text says no rights.
        """
        found: dict[str, frozenset[Right]] = {}
        for text in texts:
            stream, equals, rights = text.partition("=")
            if not equals:
                raise UsageError(
                    f"{text!r} says no right", hint="Write STREAM=RIGHT, such as shop=read or shop=read,write."
                )
            if stream != ALL_STREAMS:
                check_stream_name(stream)
            try:
                said = frozenset(Right(right.strip()) for right in rights.split(","))
            except ValueError as error:
                raise UsageError(
                    f"{rights!r} says no right that there is",
                    hint=f"There are {', '.join(right.value for right in Right)}; several are written with commas between.",
                ) from error
            found[stream] = found.get(stream, frozenset()) | said
        return cls(MappingProxyType(found))


EVERYTHING: Final = Rights(MappingProxyType({ALL_STREAMS: frozenset(Right)}))
"""What may be done where nobody is asked who they are."""


def token_text(token_id: str, secret: str) -> str:
    """A token as its holder has it."""
    text = f"{TOKEN_PREFIX}{token_id}_{secret}"
    assert _TOKEN.match(text), "ids and secrets are made to fit"
    return text


def token_parts(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token; None where the text is no token."""
    found = _TOKEN.match(text)
    return None if found is None else (found[1], found[2])


def digest(secret: str) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def is_secret(secret: str, kept: bytes) -> bool:
    """Whether a secret is the one that this was kept of; as long for any wrong one."""
    return hmac.compare_digest(digest(secret), kept)
