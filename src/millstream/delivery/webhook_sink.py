"""Webhooks: batches of messages as HTTP requests, by the Standard Webhooks specification.

`webhook_signature` signs a request, `webhook_exchange` sends it, and here its answer becomes an outcome.
`push_retries` repeats what failed.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final

from millstream.delivery.sinks import ACCEPTED, Outcome, Pacing, PushMessage, Verdict, failed
from millstream.delivery.webhook_settings import WebhookSettings
from millstream.delivery.webhook_signature import signatures

if TYPE_CHECKING:
    from millstream.delivery.webhook_exchange import HttpSender

RETRY_AFTER_MAX_S: Final = 3600.0
_GONE: Final = 410
_PLAIN: Final = re.compile(r"[!-~]{1,256}\Z")


class WebhookSink:
    """A webhook: `sinks.PushSink`.

    Args:
        settings: the settings.
        sender: sends the requests; closed with the sink.
        now_s: returns the time in seconds since 1970-01-01 UTC.
    """

    def __init__(
        self, settings: WebhookSettings, sender: HttpSender, *, now_s: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._sender = sender
        self._now_s = now_s
        self._keys = settings.keys

    @property
    def pacing(self) -> Pacing:
        """See `sinks.PushSink`."""
        return self._settings.pacing

    def deliver(self, messages: Sequence[PushMessage]) -> Outcome:
        """See `sinks.PushSink`: one request."""
        return self.post(webhook_id_of(messages), body_of(messages))

    def post(self, webhook_id: str, body: bytes) -> Outcome:
        """Send a request, signed unless there is no secret, and return its outcome.

        Args:
            webhook_id: the request's id, which a retry repeats.
            body: JSON.
        """
        from millstream.delivery.webhook_exchange import AddressRefused, ExchangeFailed

        timestamp = int(self._now_s())
        headers = {
            "user-agent": "millstream",
            **self._settings.headers,
            "content-type": "application/json",
            "webhook-id": webhook_id,
            "webhook-timestamp": str(timestamp),
        }
        if self._keys:
            headers["webhook-signature"] = signatures(self._keys, webhook_id, timestamp, body)
        try:
            answer = self._sender.post(headers, body, timeout_s=self.pacing.timeout_s)
        except AddressRefused as error:
            return Outcome(Verdict.REFUSED, str(error))
        except ExchangeFailed as error:
            return failed(str(error))
        if 200 <= answer.status < 300:
            return ACCEPTED
        reason = f"the receiver answered {answer.status}"
        if answer.status == _GONE:
            return Outcome(Verdict.GONE, reason)
        return failed(reason, retry_after_s=retry_after_s(answer.retry_after, now_s=self._now_s()))

    def close(self) -> None:
        """See `sinks.PushSink`."""
        self._sender.close()


def open_webhook(settings: Mapping[str, Any], *, stream: str, consumer: str) -> WebhookSink:  # noqa: ARG001
    """Return a webhook: a `sinks.SinkFactory`. The settings were checked when the consumer was made."""
    return webhook_of(WebhookSettings.parse(settings, may_allow_private=True))


def webhook_of(settings: WebhookSettings) -> WebhookSink:
    """Return the sink of valid settings."""
    from millstream.delivery.webhook_exchange import HttpSender

    sender = HttpSender(
        settings.receiver, connections=settings.pacing.concurrency, allow_private=settings.allow_private
    )
    return WebhookSink(settings, sender)


def body_of(messages: Iterable[PushMessage]) -> bytes:
    """Return a request's body."""
    return b'{"messages":[%b]}' % b",".join(message.json for message in messages)


def webhook_id_of(messages: Sequence[PushMessage]) -> str:
    """Return the id of a request: equal for equal messages, so that a retry has the same one, also after a restart.

    It is the message's id if there is one message, else a digest of all ids.
    """
    if len(messages) == 1 and _PLAIN.match(messages[0].id):
        return messages[0].id
    digest = hashlib.sha256("\n".join(message.id for message in messages).encode()).hexdigest()
    return f"batch-{digest[:32]}"


def retry_after_s(value: str | None, *, now_s: float) -> float | None:
    """Return the seconds that a header `retry-after` asks to wait, at most an hour; None if it isn't valid.

    Args:
        value: seconds, or a date; None if there is no such header.
        now_s: the time in seconds since 1970-01-01 UTC.
    """
    if value is None:
        return None
    text = value.strip()
    if re.fullmatch(r"[0-9]+", text):
        return RETRY_AFTER_MAX_S if len(text) > 6 else min(float(text), RETRY_AFTER_MAX_S)
    try:
        moment = parsedate_to_datetime(text)
        moment_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return min(max(moment_s - now_s, 0.0), RETRY_AFTER_MAX_S)
