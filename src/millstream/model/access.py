"""Access: the rights of a caller on each stream, and the text of an access token.

A token is `mst_<id>_<secret>`: the id finds it, the secret proves it. Slow hashes protect secrets
that can be guessed from a list of likely ones. This secret is drawn at random from 2^256, so one
round of SHA-256 is as safe. Only the hash is kept; the text is shown once.
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
"""The name that stands for every stream, including future ones."""
TOKEN_PREFIX: Final = "mst_"  # noqa: S105 - what scanners for leaked secrets may look for
_TOKEN: Final = re.compile(r"mst_([0-9a-f]{12})_([0-9A-Za-z]{43})\Z")


class Right(StrEnum):
    """A right on a stream. `write` alone reads nothing: a sensor's token can't read others' records."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
    """Both other rights, and the right to change how the stream works."""


@dataclass(frozen=True, slots=True)
class Rights:
    """A caller's rights, by stream."""

    of: Mapping[str, frozenset[Right]] = field(default_factory=dict)
    """Rights by the stream's name, or `ALL_STREAMS`."""

    def allow(self, right: Right, stream: str) -> bool:
        """Whether the right holds for that stream; for `ALL_STREAMS`, whether it holds for every stream."""
        wanted = {right, Right.ADMIN}
        return any(wanted & self.of.get(name, frozenset()) for name in {stream, ALL_STREAMS})

    def as_dict(self) -> dict[str, list[str]]:
        """Return JSON-able facts."""
        return {stream: sorted(right.value for right in rights) for stream, rights in sorted(self.of.items())}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Iterable[str]]) -> Self:
        """Return the value that `as_dict` was called on."""
        return cls(
            MappingProxyType({stream: frozenset(map(Right, rights)) for stream, rights in facts.items()}),
        )

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Parse rights from texts: `shop=read`, `shop=read,write`, `*=admin`; several texts for one stream add up.

        Raises:
            UsageError: a text names no rights.
        """
        found: dict[str, frozenset[Right]] = {}
        for text in texts:
            stream, equals, rights = text.partition("=")
            if not equals:
                raise UsageError(
                    f"{text!r} is not a right", hint="Write STREAM=RIGHT, such as shop=read or shop=read,write."
                )
            if stream != ALL_STREAMS:
                check_stream_name(stream)
            try:
                said = frozenset(Right(right.strip()) for right in rights.split(","))
            except ValueError as error:
                raise UsageError(
                    f"{rights!r} names no known right",
                    hint=f"There are {', '.join(right.value for right in Right)}; several are written with commas between.",
                ) from error
            found[stream] = found.get(stream, frozenset()) | said
        return cls(MappingProxyType(found))


EVERYTHING: Final = Rights(MappingProxyType({ALL_STREAMS: frozenset(Right)}))
"""The rights of every caller if the home asks for no tokens."""


def token_text(token_id: str, secret: str) -> str:
    """Return a token's text, as its holder keeps it."""
    text = f"{TOKEN_PREFIX}{token_id}_{secret}"
    assert _TOKEN.match(text), "ids and secrets are made to fit"
    return text


def token_parts(text: str) -> tuple[str, str] | None:
    """Return the id and the secret of a token; None if the text is no token."""
    found = _TOKEN.match(text)
    return None if found is None else (found[1], found[2])


def digest(secret: str) -> bytes:
    """Return the hash that is stored for a secret."""
    return hashlib.sha256(secret.encode()).digest()


def is_secret(secret: str, kept: bytes) -> bool:
    """Whether a secret has this hash; takes the same time for every wrong secret."""
    return hmac.compare_digest(digest(secret), kept)
