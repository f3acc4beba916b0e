"""Routing in `millstream.toml`: rules, hash ring and sinks of a stream. The descriptions here are the reference documentation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millstream.config.formed_texts import TopicName
from millstream.config.section import Duration, Section


class RuleConfig(Section):
    """A rule: the rows of some tables, and their target."""

    table: str = Field(
        default=".*",
        description="A regular expression that must match the whole of `schema.table`, without quotes. Unset: every table.",
    )
    where: str | None = Field(
        default=None,
        min_length=1,
        description="Condition on rows: `status = 'bot' and score > 0.5`. It has comparisons with numbers, 'text', true and "
        "false, `in (…)`, `is null`, `and`, `or`, `not` and parentheses. A column that a table lacks is null.",
    )
    to: str | list[str] = Field(
        description="Target of the rows: `shard:N`, `ring` (the shard that the hash ring selects), the name of a sink, or "
        "`devnull`, which drops them. A list means all of these; at most one of them is in the log."
    )

    @property
    def targets(self) -> tuple[str, ...]:
        """Return `to` as a list."""
        return (self.to,) if isinstance(self.to, str) else tuple(self.to)


class HashRingConfig(Section):
    """The ring that spreads rows without a rule over a stream's shards: rows of one key are on one shard."""

    columns: list[str] = Field(
        default=[],
        description="Columns whose values select the shard, for every table. Empty: the table's key columns "
        "([streams.S.keys]). For a table with a key, only key columns are allowed.",
    )
    columns_of: dict[str, list[str]] = Field(
        default={}, description='Columns of single tables, instead of `columns`: `"public.clicks" = ["user_id"]`.'
    )
    virtual_nodes: int = Field(
        default=128,
        ge=1,
        le=4096,
        description="Number of points of each shard on the ring. More points spread keys more evenly.",
    )


class SinkConfig(Section):
    """A sink next to the stream's log. Rules name it as a target."""

    kind: Literal["kafka", "redis", "log", "millstream"] = Field(
        description="A topic of `kafka`, streams of `redis`, `log` files of a folder (in the format of a write buffer, so "
        "that another stream can read them), or a stream of another `millstream`."
    )
    location: str = Field(
        min_length=1,
        repr=False,
        description="Address of the sink. `kafka`: the brokers, `host:9092,host:9092`. `redis`: `redis://host:6379/0`. "
        "`log`: a folder. `millstream`: the address of its server, `https://host:8787`, or the folder of its "
        "home.",
    )
    name: TopicName | None = Field(
        default=None,
        description="Name of the topic, prefix of the keys in Redis, or stream of another Millstream. Unset: "
        "`millstream_<stream>`; for another Millstream, the stream of the same name.",
    )
    token: str | None = Field(
        default=None, repr=False, description="For `millstream`: the access token, such as `${OTHER_TOKEN}`."
    )
    create: bool = Field(
        default=False, description="Create the topic, the Redis streams or the folder if it doesn't exist."
    )
    shards: int = Field(
        default=1, ge=1, le=1024, description="Number of partitions of a new topic, or of new streams in Redis."
    )
    client: dict[str, str] = Field(
        default={}, repr=False, description="Options of the Kafka clients, with the names that librdkafka uses."
    )
    timeout: Duration = Field(default="30s", description="Time that a write may take before its outcome is unknown.")
    accept_loss: bool = Field(default=False, description="Accept a Redis that may lose acknowledged writes.")


class RoutingSection(Section):
    """Routes of appended rows to shards and sinks. A captured table is always on one shard, the one in `shards`."""

    to: str | list[str] | None = Field(
        default=None, description="Target of all rows, as in a rule's `to`; instead of rules and a ring."
    )
    rules: list[RuleConfig] = Field(
        default=[],
        description="Rules, tried in order for each row: the first that matches takes it. After them comes the table's own "
        "shard, if `shards` names one, then the hash ring. Rows without a match are rejected, never dropped.",
    )
    hash_ring: HashRingConfig | None = Field(
        default=None,
        description="Spreads rows without a matching rule over the stream's shards: `log.shards` at first, then as many as "
        "`millstream reshard` set.",
    )
    sinks: dict[str, SinkConfig] = Field(
        default={},
        description="Sinks that rules can name, next to the log. `devnull`, which drops rows, always exists.",
    )
    ignore_errors: list[str] = Field(
        default=[],
        description="Sinks that may fail: a write that such a sink rejects is counted, and the call succeeds. A failure of "
        "any other sink is reported as `partial_write`.",
    )
