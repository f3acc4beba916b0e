"""Consumers in `millstream.toml`, which belong to a deployment. The descriptions here are the reference documentation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator

from millstream.config.section import Duration, Section


def _texts(value: Any, otherwise: str = "must be text in quotes, or a list of it") -> Any:
    """Return a text or a list of texts; `ValueError` for anything else."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(otherwise)
    return value


class WebhookSection(Section):
    """Messages as signed HTTP requests, by the Standard Webhooks specification."""

    url: str = Field(
        repr=False,
        description="Address that takes the messages by POST: `https://example.com/hook`. Credentials go into `headers`.",
    )
    secret: str | list[str] = Field(
        repr=False,
        description="Secret that signs the requests, `whsec_` and Base64: `${HOOK_SECRET}`. A list while it is rotated: a "
        "request has a signature of each.",
    )
    headers: dict[str, str] = Field(
        default={}, repr=False, description="Further headers of the requests, such as `authorization`."
    )
    batch_size: int = Field(default=1, description="Messages of a request, at most: 1 to 1000.")
    timeout: Duration = Field(default="30s", description="Time within which the receiver answers.")
    concurrency: int = Field(default=4, description="Requests at a time, of different groups: 1 to 100.")
    retry_min: Duration = Field(default="1s", description="Wait after a failed request. It doubles with each failure.")
    retry_max: Duration | None = Field(default=None, description="Longest such wait. Unset: `5m`, or `retry_min`.")
    allow_private: bool = Field(
        default=False, description="Allow addresses that aren't public, such as loopback. Possible only here."
    )

    @field_validator("secret", mode="before")
    @classmethod
    def _check_secret(cls, secret: Any) -> Any:
        return _texts(secret)


class KafkaSection(Section):
    """Messages in topics of Kafka, in Debezium's formats or as the record's JSON."""

    location: str = Field(repr=False, description="Addresses of the brokers: `host:9092,host:9092`.")
    client: dict[str, str | int | float | bool] = Field(
        default={},
        repr=False,
        description='Properties of the clients, with the names that librdkafka uses: `"security.protocol"`, '
        '`"sasl.password"` … Those that name files, libraries or further servers, such as `"ssl.ca.location"`, are possible only here; '
        'a request has `"ssl.ca.pem"`.',
    )
    transactions: bool = Field(
        default=True,
        description="Send each batch in a transaction, together with the consumer's progress: a reader with "
        "`read_committed` gets each record once. Off: a record may be there twice after a failure.",
    )
    topic: str = Field(
        default="{stream}.{schema}.{table}",
        description="Template of the topics' names. Characters that Kafka refuses become `_`.",
    )
    format: str = Field(
        default="debezium",
        description="`debezium`: its envelope. `debezium-flat`: the new row alone. `json`: the record as `wal cat` prints it.",
    )
    decimal_handling_mode: str = Field(
        default="precise", description="Debezium's option: `precise`, `double`, `string`."
    )
    time_precision_mode: str = Field(
        default="adaptive",
        description="Debezium's option: `adaptive`, `adaptive_time_microseconds`, `connect`, `isostring`, `microseconds`, "
        "`nanoseconds`.",
    )
    binary_handling_mode: str = Field(
        default="bytes", description="Debezium's option: `bytes`, `base64`, `base64-url-safe`, `hex`."
    )
    interval_handling_mode: str = Field(default="numeric", description="Debezium's option: `numeric`, `string`.")
    schemas_enable: bool = Field(default=True, description="Send the schema of keys and values with each message.")
    tombstones_on_delete: bool = Field(default=True, description="Send a message without a value behind each delete.")
    skipped_operations: str = Field(
        default="none",
        description="Operations that are left out: a list of `c`, `u`, `d`, `t`, `x` with commas, or `none`. "
        "`t,x` for topics with `cleanup.policy = compact`, which take no message without a key.",
    )
    include_unknown_datatypes: bool = Field(
        default=False, description="Send columns of types that Debezium doesn't support, as bytes."
    )


class RedisSection(Section):
    """Messages as entries of Redis streams, with the fields `id`, `op` and `record`."""

    location: str = Field(
        repr=False, description="Address of the server: `redis://host:6379/0`, or `rediss://…` with TLS."
    )
    stream: str = Field(default="{stream}.{schema}.{table}", description="Template of the names of the Redis streams.")
    maxlen: int = Field(default=0, description="Entries that a Redis stream keeps. 0: all.")


class CommandSection(Section):
    """Messages as lines of JSON on a command's standard input. It answers `ok` on its standard output. Possible only here."""

    argv: list[str] = Field(min_length=1, description='The program and its arguments: `["python", "load.py"]`.')
    batch_size: int = Field(default=100, description="Messages for one run of the command, at most: 1 to 1000.")
    timeout: Duration = Field(default="30s", description="Time within which the command ends.")


class ConsumerConfig(Section):
    """A consumer of the stream. It exists once a process of the home has its consumers; it can't be made or removed elsewhere.

    `tables`, `where`, `columns` and the limits may change: they hold from the next record that the consumer reads. A
    consumer that is removed from here is kept, paused, until `millstream consumer rm`.
    """

    tables: list[str] | None = Field(
        default=None,
        min_length=1,
        description='Patterns of tables, as in `[source] tables`: `["public.*", "!public.audit_*"]`. They are matched with '
        "a table's name at the time of the record. Unset: all tables, and logical messages.",
    )
    where: str | None = Field(
        default=None,
        min_length=1,
        description="Condition on rows, as in a routing rule. A record on which it can't be evaluated is delivered.",
    )
    columns: list[str] | None = Field(
        default=None,
        min_length=1,
        description='Columns that are delivered, and their new names: `["id", "total as amount"]`. Unset: all, as they are.',
    )
    kind: Literal["changes", "latest"] = Field(
        default="changes",
        description="`changes`: every record, in order. `latest`: the newest state of each key. It can't change: another kind needs another consumer.",
    )
    group_by: str | list[str] = Field(
        default="key",
        description="Records that are delivered in order: those of each key (`key`), of each value of some columns (a list "
        "of them), or none (`none`). It can't change: other groups need another consumer.",
    )
    start: str = Field(
        default="latest",
        min_length=1,
        description="Where a new consumer begins: `earliest`, `latest`, a token (exclusive) or a time, in the forms of "
        "`--as-of`. A consumer that exists stays where it is.",
    )
    ack_wait_ms: int = Field(
        default=30_000,
        ge=100,
        le=43_200_000,
        description="Milliseconds until a message that wasn't acknowledged is delivered again.",
    )
    max_deliver: int = Field(
        default=10,
        ge=0,
        le=1000,
        description="Failed deliveries after which a message is dead. 0: never. Pushed messages that failed together so often are"
        " each sent alone once more.",
    )
    max_ack_pending: int = Field(default=1000, ge=1, le=100_000, description="Number of messages in flight, at most.")
    backfill: bool = Field(
        default=False, description="Deliver the rows as of `start` first, when the consumer is made."
    )

    webhook: WebhookSection | None = Field(
        default=None, description="Deliver to a webhook. A consumer has at most one sink; without one, clients receive."
    )
    kafka: KafkaSection | None = Field(default=None, description="Deliver to topics of Kafka.")
    redis: RedisSection | None = Field(default=None, description="Deliver to Redis streams.")
    command: CommandSection | None = Field(default=None, description="Deliver to a command.")
    sink: dict[str, JsonValue] | None = Field(
        default=None,
        repr=False,
        description="Deliver by another package: `kind` is the name of its entry point in the group `millstream.push_sinks`, "
        "and the package takes the other settings. Possible only here.",
    )

    @field_validator("group_by", mode="before")
    @classmethod
    def _check_group_by(cls, group_by: Any) -> Any:
        return _texts(group_by, 'must be "key", "none" or a list of columns')

    def body(self, name: str) -> dict[str, Any]:
        """Return the definition as a request's body has it."""
        fields = self.model_dump(exclude_none=True)
        return {"name": name, **fields}
