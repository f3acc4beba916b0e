"""The push sink of a consumer's definition: its kind and its valid settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from millstream.errors import DeliveryError

SINKS: Final = ("webhook", "kafka", "redis", "command")
TRUSTED_SINKS: Final = ("command",)
"""Sinks that only the configuration file may have."""


@dataclass(frozen=True)
class SinkDefinition:
    """A sink. Two are equal if their true settings are."""

    kind: str
    settings: Mapping[str, Any] = field(repr=False)
    """Every setting with its default, and with its secrets."""
    shown: Mapping[str, Any] = field(compare=False)
    """The same without secrets."""

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, is_trusted: bool) -> SinkDefinition | None:
        """Read the sink of a definition; None if it has none.

        Args:
            body: the definition.
            is_trusted: as `Definition.parse`.

        Raises:
            DeliveryError (`invalid_consumer`): a setting isn't valid, there are two sinks, or a sink isn't allowed there.
        """
        kinds = [kind for kind in SINKS if body.get(kind) is not None]
        if not kinds:
            return None
        kind = kinds[0]
        if len(kinds) > 1:
            hint = "Make a consumer for each sink."
            raise _refusal(f"a consumer has one sink, and this one has {kind} and {kinds[1]}", kinds[1], hint)
        if kind in TRUSTED_SINKS and not is_trusted:
            hint = "Define the consumer in millstream.toml, as [streams.S.consumers.C.command]."
            raise _refusal("a command can be set only in millstream.toml", kind, hint)
        found = _settings(kind, body[kind], is_trusted=is_trusted)
        return cls(kind, found.as_dict(masked=False), found.as_dict())


def _settings(kind: str, settings: object, *, is_trusted: bool) -> Any:
    if kind == "webhook":
        from millstream.delivery.webhook_settings import WebhookSettings

        return WebhookSettings.parse(settings, may_allow_private=is_trusted)
    if kind == "kafka":
        from millstream.delivery.kafka.settings import KafkaSettings

        return KafkaSettings.parse(settings)
    if kind == "redis":
        from millstream.delivery.redis_stream import RedisSettings

        return RedisSettings.parse(settings)
    from millstream.delivery.command import CommandSettings

    return CommandSettings.parse(settings)


def _refusal(problem: str, field: str, hint: str) -> DeliveryError:
    return DeliveryError(problem, code="invalid_consumer", hint=hint, field=field)
