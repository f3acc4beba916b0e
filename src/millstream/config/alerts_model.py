"""`[alerts]`: where alerts go, and from which bounds on. The descriptions here are the reference documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, field_validator

from millstream.config.formed_texts import Interval
from millstream.config.section import Duration, Section, SizeAboveZero
from millstream.config.toml_lines import KeyPath
from millstream.errors import DeliveryError


class AlertsConfig(Section):
    """Alerts by webhook, and the bounds from which on `status`, `doctor` and alerts report a condition."""

    url: str | None = Field(
        default=None,
        repr=False,
        description="Address that gets a POST request for each alert. It may be private: it is in the operator's own file. "
        "Unset: nothing is sent, and `status` and `doctor` report the conditions that show at once.",
    )
    secret: str | list[str] | None = Field(
        default=None,
        repr=False,
        description='Secret that signs the requests, `"whsec_…"`, as for [webhooks]'
        "(../how-to/alerts.md#verify-the-signature); a list while it is replaced. Unset: requests aren't signed.",
    )
    headers: dict[str, str] = Field(
        default={}, repr=False, description='Headers of the requests, such as `authorization = "Bearer ${TOKEN}"`.'
    )
    timeout: Interval = Field(default="10s", description="Time in which the receiver must have answered.")
    look_every: Interval = Field(default="15s", description="Interval at which the conditions are looked at.")
    repeat_every: Interval = Field(
        default="4h", description="Interval at which an alert is sent again while its condition lasts."
    )
    slot_lag: SizeAboveZero = Field(
        default="4GiB", description="WAL that a slot may keep at its source without an alert."
    )
    stalled_after: Duration = Field(
        default="10m",
        description="Time without progress after which a slot that isn't read, capture, a pipeline, a writer that readers wait "
        "for, a node that should follow or a consumer is reported.",
    )
    silent_after: Duration = Field(
        default="10m",
        description="Time for which a source may send nothing that its WAL has, neither heartbeat nor record.",
    )
    no_records_after: Duration | None = Field(
        default=None,
        description="Time for which a stream may get no record at all, from its source or from applications. Unset: any.",
    )

    @field_validator("secret", mode="before")
    @classmethod
    def _check_secret(cls, secret: Any) -> Any:
        texts = [secret] if isinstance(secret, str) else secret
        if secret is not None and not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise ValueError("must be a secret, or a list of them")
        return secret

    def webhook(self) -> dict[str, Any]:
        """Return the settings of the webhook, as a consumer's `webhook` has them."""
        found = {"url": self.url, "secret": self.secret, "headers": self.headers, "timeout": self.timeout}
        return {name: value for name, value in found.items() if value is not None} | {"allow_private": True}


def clashes_of_alerts(alerts: AlertsConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake that only the reader of webhooks detects, and its description."""
    if alerts.url is None:
        if alerts.secret is not None or alerts.headers:
            yield ("alerts", "url"), "is required with a secret or headers"
        return
    from millstream.delivery.webhook_settings import WebhookSettings

    try:
        WebhookSettings.parse(alerts.webhook(), may_allow_private=True, needs_secret=False)
    except DeliveryError as error:
        field = str(error.details.get("field", "")).removeprefix("webhook.")
        what = error.message.removeprefix(f"webhook.{field} ")
        yield ("alerts", field), f"{what}. {error.hint}" if error.hint else what
