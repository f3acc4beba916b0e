"""Consumers in `millstream.toml`, which belong to a deployment. The descriptions here are the reference documentation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from millstream.config.section import Section


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
        description="Failed deliveries after which a message is dead. 0: never.",
    )
    max_ack_pending: int = Field(default=1000, ge=1, le=100_000, description="Number of messages in flight, at most.")

    @field_validator("group_by", mode="before")
    @classmethod
    def _check_group_by(cls, group_by: Any) -> Any:
        names = [group_by] if isinstance(group_by, str) else group_by
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError('must be "key", "none" or a list of columns')
        return group_by

    def body(self, name: str) -> dict[str, Any]:
        """Return the definition as a request's body has it."""
        fields = self.model_dump(exclude_none=True)
        return {"name": name, **fields}
