"""Routing rules as values: which rows a rule takes, and where it sends them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from millstream.errors import UsageError
from millstream.model.ids import ShardId
from millstream.model.predicate import Predicate
from millstream.routing.shard_map import VIRTUAL_NODES

DEVNULL: Final = "devnull"
"""The sink that drops rows; known by its name alone."""
RING: Final = "ring"
"""As a target: the shard that the hash ring gives a row."""
SHARD_PREFIX: Final = "shard:"


@dataclass(frozen=True, slots=True)
class RuleTarget:
    """The target of a rule: at most one place in the log, and any number of sinks."""

    shard: ShardId | None = None
    """This shard."""
    ring: bool = False
    """The shard that the hash ring gives."""
    sinks: tuple[str, ...] = ()
    """Names of the sinks; none at all, and no shard: rows are dropped."""

    @classmethod
    def parse(cls, *words: str) -> RuleTarget:
        """Read `shard:N`, `ring`, `devnull` or names of sinks. `UsageError` if they contradict each other."""
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
    """Selects the rows of a rule."""

    table: re.Pattern[str]
    """Pattern that the whole of `schema.table`, without quotes, must match."""
    where: Predicate | None = None
    """Condition on the rows of those tables; None: all of them."""

    @classmethod
    def parse(cls, table: str, where: str | None = None) -> Matcher:
        """Read a regular expression and a predicate. `UsageError` if one is invalid."""
        try:
            pattern = re.compile(table)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"{table!r} is no regular expression: {error}") from error
        return cls(pattern, None if where is None else Predicate.parse(where))

    def is_for(self, table: str) -> bool:
        """Return whether it selects rows of a table, all or some."""
        return self.table.fullmatch(table) is not None

    def __str__(self) -> str:
        return self.table.pattern + ("" if self.where is None else f" where {self.where.text}")


@dataclass(frozen=True)
class SpecificTarget:
    """A rule: rows that match go to the target."""

    matcher: Matcher
    to: RuleTarget


@dataclass(frozen=True, slots=True)
class HashRing:
    """The spread of rows that no rule takes."""

    columns: tuple[str, ...] = ()
    """Columns for any table; none: its key."""
    columns_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns for some tables, by `schema.table`, instead of those."""
    virtual_nodes: int = VIRTUAL_NODES

    def columns_for(self, table: str, key: tuple[str, ...]) -> tuple[str, ...]:
        """Return the columns by which a table's rows are spread; none: the ring doesn't place them."""
        return self.columns_of.get(table, self.columns or key)


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """All rows go to one target."""

    to: RuleTarget


@dataclass(frozen=True)
class ShardConfig:
    """Rules in their order, then the hash ring."""

    specific_targets: tuple[SpecificTarget, ...] = ()
    hash_ring: HashRing | None = None
    shards: tuple[ShardId, ...] = (ShardId(0),)
    """Shards over which the ring spreads rows."""
    ignore_errors: frozenset[str] = frozenset()
    """Sinks that may fail: the failure is counted, and the write goes on."""


RoutingRules: TypeAlias = RoutingConfig | ShardConfig
