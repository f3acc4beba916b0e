"""The push sink of a consumer's definition: its kind and its valid settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from millstream.delivery.sinks import OURS
from millstream.errors import DeliveryError
from millstream.model.addresses import MASK

OTHER: Final = "sink"
"""The field of another package's sink: its `kind`, and the settings that the package takes."""
SINKS: Final = (*OURS, OTHER)
TRUSTED_SINKS: Final = ("command", OTHER)
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
            hint = f"Define the consumer in millstream.toml, as [streams.S.consumers.C.{kind}]."
            raise _refusal(f"a {kind} can be set only in millstream.toml", kind, hint)
        if kind == OTHER:
            return cls._of_package(body[kind])
        found = _settings(kind, body[kind], is_trusted=is_trusted)
        return cls(kind, found.as_dict(masked=False), found.as_dict())

    @classmethod
    def _of_package(cls, body: object) -> SinkDefinition:
        """Read another package's sink. The package checks its settings when it opens the sink: it may be missing here."""
        kind = body.get("kind") if isinstance(body, Mapping) else None
        if not isinstance(body, Mapping) or not isinstance(kind, str) or not kind or kind in SINKS:
            hint = f"Write the name of a package's entry point. These have tables of their own: {', '.join(OURS)}."
            raise _refusal("sink names no kind of another package", f"{OTHER}.kind", hint)
        settings = {name: value for name, value in body.items() if name != "kind"}
        return cls(kind, settings, dict.fromkeys(settings, MASK))

    def as_fields(self, *, masked: bool) -> dict[str, Any]:
        """Return the field of a definition that `parse` reads again; with `***` for each secret if `masked`."""
        settings = self.shown if masked else self.settings
        return {self.kind: settings} if self.kind in OURS else {OTHER: {"kind": self.kind, **settings}}


def _settings(kind: str, settings: object, *, is_trusted: bool) -> Any:
    if kind == "webhook":
        from millstream.delivery.webhook_settings import WebhookSettings

        return WebhookSettings.parse(settings, may_allow_private=is_trusted)
    if kind == "kafka":
        from millstream.delivery.kafka.settings import KafkaSettings

        return KafkaSettings.parse(settings, is_trusted=is_trusted)
    if kind == "redis":
        from millstream.delivery.redis_stream_sink import RedisSettings

        return RedisSettings.parse(settings, is_trusted=is_trusted)
    from millstream.delivery.command_sink import CommandSettings

    return CommandSettings.parse(settings)


def _refusal(problem: str, field: str, hint: str) -> DeliveryError:
    return DeliveryError(problem, code="invalid_consumer", hint=hint, field=field)
