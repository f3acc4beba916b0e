"""Routing rules as values: what takes which rows, and where it takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from millstream.errors import UsageError
from millstream.model.ids import ShardId
from millstream.routing.predicate import Predicate
from millstream.routing.ring import VIRTUAL_NODES

DEVNULL: Final = "devnull"
"""The sink that drops rows, by name alone."""
RING: Final = "ring"
"""As a target: whatever shard the hash ring gives a row."""
SHARD_PREFIX: Final = "shard:"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a rule takes rows: at most one place in the log, and any number of sinks beside it."""

    shard: ShardId | None = None
    """This one."""
    ring: bool = False
    """The one of the hash ring."""
    sinks: tuple[str, ...] = ()
    """By name; none at all, and no shard: rows are dropped."""

    @classmethod
    def parse(cls, *words: str) -> Target:
        """Read `shard:N`, `ring`, `devnull` or names of sinks. `UsageError` where they make no sense together."""
        shard: ShardId | None = None
        ring = False
        sinks: list[str] = []
        for word in words:
            if word.startswith(SHARD_PREFIX):
                number = word.removeprefix(SHARD_PREFIX)
                if not re.fullmatch(r"\d{1,7}", number):
                    raise UsageError(f"{word!r} names no shard", hint="Such as shard:3.")
                if shard is not None or ring:
                    raise UsageError("rows may lie on one shard alone: a stream has each record once")
                shard = ShardId(int(number))
            elif word == RING:
                if shard is not None or ring:
                    raise UsageError("rows may lie on one shard alone: a stream has each record once")
                ring = True
            elif word in sinks:
                raise UsageError(f"{word} is named twice")
            else:
                sinks.append(word)
        if not words:
            raise UsageError("a rule needs a target", hint=f"To drop rows: {DEVNULL!r}.")
        if DEVNULL in sinks and len(words) > 1:
            raise UsageError(f"{DEVNULL} drops rows: it stands alone")
        return cls(shard, ring, tuple(sinks))

    @property
    def is_local(self) -> bool:
        """Whether the log gets the rows."""
        return self.ring or self.shard is not None

    def __str__(self) -> str:
        local = [RING] if self.ring else [] if self.shard is None else [f"{SHARD_PREFIX}{self.shard}"]
        return " and ".join([*local, *self.sinks])


@dataclass(frozen=True)
class Matcher:
    """Which rows a rule is for."""

    table: re.Pattern[str]
    """The whole of `schema.table`, without quotes, must match."""
    where: Predicate | None = None
    """Of the rows of those tables, only these."""

    @classmethod
    def parse(cls, table: str, where: str | None = None) -> Matcher:
        """Read a regular expression and a predicate. `UsageError` where one makes no sense."""
        try:
            pattern = re.compile(table)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"{table!r} is no regular expression: {error}") from error
        return cls(pattern, None if where is None else Predicate.parse(where))

    def is_for(self, table: str) -> bool:
        """Whether it is for rows of a table, all or some."""
        return self.table.fullmatch(table) is not None

    def __str__(self) -> str:
        return self.table.pattern + ("" if self.where is None else f" where {self.where.text}")


@dataclass(frozen=True)
class SpecificTarget:
    """A rule: what it matches goes there."""

    matcher: Matcher
    to: Target


@dataclass(frozen=True, slots=True)
class HashRing:
    """What rows are spread by that no rule takes."""

    columns: tuple[str, ...] = ()
    """Of any table; none: its key."""
    columns_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of some tables, by `schema.table`, instead of those."""
    virtual_nodes: int = VIRTUAL_NODES

    def columns_for(self, table: str, key: tuple[str, ...]) -> tuple[str, ...]:
        """The columns that a table's rows are spread by; none: the ring says nothing of them."""
        return self.columns_of.get(table, self.columns or key)


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """All rows go to one place."""

    to: Target


@dataclass(frozen=True)
class ShardConfig:
    """Rules in their order, then the hash ring."""

    specific_targets: tuple[SpecificTarget, ...] = ()
    hash_ring: HashRing | None = None
    shards: tuple[ShardId, ...] = (ShardId(0),)
    """Those that the ring spreads rows over."""
    ignore_errors: frozenset[str] = frozenset()
    """Sinks that may fail: it is counted, and the write goes on."""


RoutingRules: TypeAlias = RoutingConfig | ShardConfig
