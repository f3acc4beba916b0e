"""Routing in `millstream.toml`: rules, hash ring and sinks of a stream. The descriptions here are the reference documentation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millstream.config.section import Duration, Section


class RuleConfig(Section):
    """A rule: which rows of which tables, and where they go."""

    table: str = Field(
        default=".*",
        description="A regular expression; the whole of `schema.table`, without quotes, must match it. Every table where it isn't set.",
    )
    where: str | None = Field(
        default=None,
        min_length=1,
        description="Only these rows: `status = 'bot' and score > 0.5`. Comparisons with numbers, 'text', true and false, `in (…)`, `is null`, joined "
        "by `and`, `or`, `not` and parentheses. A column that a table lacks is null.",
    )
    to: str | list[str] = Field(
        description="Where they go: `shard:N`, `ring` (the shard that the hash ring gives), the name of a sink, or `devnull`, which drops them. A list is "
        "all of these: at most one of them in the log."
    )

    @property
    def targets(self) -> tuple[str, ...]:
        """Return `to` as a list."""
        return (self.to,) if isinstance(self.to, str) else tuple(self.to)


class HashRingConfig(Section):
    """The ring that spreads rows without a rule over a stream's shards: rows of one key are on one shard."""

    columns: list[str] = Field(
        default=[],
        description="Columns whose values choose the shard, of every table. None: those of its key ([streams.S.keys]). Of a table with a key, only "
        "columns of that are allowed.",
    )
    columns_of: dict[str, list[str]] = Field(
        default={}, description='Columns of some tables instead of those: `"public.clicks" = ["user_id"]`.'
    )
    virtual_nodes: int = Field(
        default=128,
        ge=1,
        le=4096,
        description="Points of each shard on the ring: more spread keys more evenly.",
    )


class SinkConfig(Section):
    """A sink next to the stream's log, which rules send rows to by its name."""

    kind: Literal["kafka", "redis", "log", "millstream"] = Field(
        description="A topic of `kafka`, streams of `redis`, `log` files of a folder (as a write buffer has them: another stream may read from it), or a "
        "stream of another `millstream`."
    )
    location: str = Field(
        min_length=1,
        repr=False,
        description="Where it is. Of `kafka`: the brokers, `host:9092,host:9092`. Of `redis`: `redis://host:6379/0`. Of `log`: a folder. Of `millstream`: the "
        "address of its server, `https://host:8787`, or the folder of its home.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,200}$",
        description="The topic, what its keys in Redis begin with, or the stream of another Millstream. Unset: `millstream_<stream>`; of another Millstream "
        "the stream of the same name.",
    )
    token: str | None = Field(
        default=None, repr=False, description="Of `millstream`: the access token, such as `${OTHER_TOKEN}`."
    )
    create: bool = Field(
        default=False, description="Whether a topic, Redis streams or a folder are made where they aren't there."
    )
    shards: int = Field(
        default=1, ge=1, le=1024, description="Of what is made: partitions of a topic, streams in Redis."
    )
    client: dict[str, str] = Field(
        default={}, repr=False, description="Options of Kafka's clients as librdkafka names them."
    )
    timeout: Duration = Field(
        default="30s", description="How long a write may take before nobody knows what became of it."
    )
    accept_loss: bool = Field(
        default=False, description="Whether a Redis is taken that doesn't promise to keep what it acknowledged."
    )


class RoutingSection(Section):
    """Which shard or sink takes the rows that applications append. Captured tables lie whole on one shard, as `shards` says."""

    to: str | list[str] | None = Field(
        default=None, description="Where all rows go, as a rule's `to`; instead of rules and a ring."
    )
    rules: list[RuleConfig] = Field(
        default=[],
        description="Tried in order for each row, the first that matches takes it; behind them comes the table's own shard, where `shards` has one, and "
        "then the hash ring. Rows that nothing takes are refused: nothing is dropped because no rule spoke.",
    )
    hash_ring: HashRingConfig | None = Field(
        default=None,
        description="Spreads what no rule takes over the stream's shards: as many as `log.shards` says at first, then as `millstream reshard` does.",
    )
    sinks: dict[str, SinkConfig] = Field(
        default={},
        description="What rules may send rows to beside the log, by name. `devnull`, which drops them, is always there.",
    )
    ignore_errors: list[str] = Field(
        default=[],
        description="Sinks that may fail: a write that they don't take is counted, and goes on. Without, it is told as a partial one.",
    )
