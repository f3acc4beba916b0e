"""The settings of a webhook."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlsplit

from millstream.delivery.public_addresses import is_public, literal
from millstream.delivery.sink_settings import SinkSettings
from millstream.delivery.sinks import Pacing
from millstream.model.addresses import MASK

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 (the form of one)
_KNOWN: Final = (
    "url", "secret", "headers", "batch_size", "timeout", "concurrency", "retry_min", "retry_max", "allow_private",
)  # fmt: skip
_SECRETS_MAX: Final = 10
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_VALUE: Final = re.compile(r"(?:[!-~\x80-\xff](?:[ \t!-~\x80-\xff]*[!-~\x80-\xff])?)?\Z")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+\Z|[0-9A-Fa-f:.]+(?:%[\w.-]+)?\Z")
_QUERY: Final = re.compile(r"\?.*", re.DOTALL)
_OWN_PREFIXES: Final = ("webhook-", "content-")
_OWN: Final = frozenset({
    "host", "connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
"""Headers that the request has already, or that would change how it is sent."""
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Receiver:
    """The parts of a webhook's URL."""

    scheme: str
    host: str
    """The name in ASCII, or the address without brackets."""
    port: int
    target: str = field(repr=False)
    """The path and the query, percent-encoded. A query may contain a secret."""

    @property
    def host_header(self) -> str:
        """The value of the header `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Valid settings, with their defaults. Made by `parse`."""

    url: str = field(repr=False)
    receiver: Receiver
    secrets: tuple[str, ...] = field(repr=False)
    """The secrets as written. A request has one signature for each."""
    headers: Mapping[str, str] = field(repr=False)
    allow_private: bool
    pacing: Pacing

    @classmethod
    def parse(cls, settings: object, *, may_allow_private: bool = False, needs_secret: bool = True) -> WebhookSettings:
        """Read settings.

        Args:
            settings: a JSON value, or the table of the configuration file.
            may_allow_private: whether `allow_private = true` is valid. It is in the configuration file alone.
            needs_secret: whether a secret is required. Requests aren't signed without one.

        Raises:
            DeliveryError (`invalid_consumer`): a setting is missing, unknown or not valid. It shows no secret.
        """
        fields = SinkSettings("webhook", settings, _KNOWN, () if may_allow_private else ("allow_private",))
        allow_private = fields.flag("allow_private")
        if allow_private and not may_allow_private:
            fields.refuse(
                "allow_private",
                "can be true only in millstream.toml",
                "Define the consumer in millstream.toml, as [streams.S.consumers.C.webhook].",
            )
        url = fields.text("url", hint="Give the address that takes the messages, such as https://example.com/hook.")
        receiver = _receiver(fields, url)
        address = literal(receiver.host)
        if address is not None and not allow_private and not is_public(address):
            fields.refuse(
                "url",
                f"has the address {address}, which isn't public",
                "Use a public address, or set allow_private = true for the consumer in millstream.toml.",
            )
        retry_min_s = fields.seconds("retry_min", "1s", "1d")
        retry_max_s = fields.seconds("retry_max", "5m", "1d")
        if fields.value("retry_max") is None:
            retry_max_s = max(retry_max_s, retry_min_s)
        if retry_max_s < retry_min_s:
            fields.refuse("retry_max", "is shorter than retry_min")
        pacing = Pacing(
            batch_size=fields.whole("batch_size", 1, 1, 1000),
            concurrency=fields.whole("concurrency", 4, 1, 100),
            retry_min_s=retry_min_s,
            retry_max_s=retry_max_s,
            timeout_s=fields.seconds("timeout", "30s", "1h"),
        )
        is_signed = needs_secret or fields.value("secret") is not None
        return cls(url, receiver, _secrets(fields) if is_signed else (), _headers(fields), allow_private, pacing)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The bytes of the secrets, which sign."""
        return tuple(_key(secret) or b"" for secret in self.secrets)

    def as_dict(self, *, masked: bool = True) -> dict[str, Any]:
        """Return every setting; `parse` reads it again.

        Args:
            masked: whether secrets, the values of headers and the URL's query are replaced by `***`.
        """
        secrets = [MASK if masked else secret for secret in self.secrets]
        return {
            "url": _QUERY.sub(f"?{MASK}", self.url) if masked else self.url,
            "secret": secrets[0] if len(secrets) == 1 else secrets,
            "headers": {name: MASK if masked else value for name, value in self.headers.items()},
            "batch_size": self.pacing.batch_size,
            "timeout": _duration(self.pacing.timeout_s),
            "concurrency": self.pacing.concurrency,
            "retry_min": _duration(self.pacing.retry_min_s),
            "retry_max": _duration(self.pacing.retry_max_s),
            "allow_private": self.allow_private,
        }


def _receiver(fields: SinkSettings, url: str) -> Receiver:
    hint = "Write it as https://host/path; %-encode special characters."
    if any(char <= " " or char in {"\x7f", "\\"} for char in url):
        fields.refuse("url", "contains a space, a backslash or a control character", hint)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if ":" not in host:
            host = host.encode("idna").decode("ascii")
    except ValueError:  # UnicodeError is one
        fields.refuse("url", "isn't a URL", hint)
    if parts.scheme not in _PORTS:
        fields.refuse("url", "is neither an http nor an https URL", hint)
    if "@" in parts.netloc:
        fields.refuse("url", "has a user or a password in it", "Send credentials in headers: authorization.")
    if not _HOST.match(host) or port == 0:
        fields.refuse("url", "has no valid host", hint)
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?[]")
    return Receiver(parts.scheme, host, port or _PORTS[parts.scheme], target)


def _secrets(fields: SinkSettings) -> tuple[str, ...]:
    hint = f'Use "{SECRET_PREFIX}" and the base64 of 24 to 64 random bytes; during a rotation, a list of both secrets.'
    value = fields.value("secret")
    if value is None:
        fields.refuse("secret", "is missing", hint)
    secrets = value if isinstance(value, list | tuple) else [value]
    if not 1 <= len(secrets) <= _SECRETS_MAX:
        fields.refuse("secret", f"isn't a list of 1 to {_SECRETS_MAX} secrets", hint)
    if not all(isinstance(secret, str) and _key(secret) for secret in secrets):
        fields.refuse("secret", f"isn't {SECRET_PREFIX} with base64 behind it", hint)
    return tuple(secrets)


def _key(secret: str) -> bytes | None:
    """Return the bytes of a secret; None if it isn't in the form of one, or is empty."""
    if not secret.startswith(SECRET_PREFIX):
        return None
    text = secret.removeprefix(SECRET_PREFIX)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True) or None
    except (binascii.Error, ValueError):
        return None


def _headers(fields: SinkSettings) -> Mapping[str, str]:
    value = fields.value("headers")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        fields.refuse("headers", "isn't an object of texts", 'Write {"authorization": "Bearer …"}.')
    names: set[str] = set()
    for name, text in value.items():
        if not isinstance(name, str) or not _NAME.match(name):
            fields.refuse("headers", f"has {str(name)[:80]!r}, which can't name a header")
        lower = name.lower()
        if lower in _OWN or lower.startswith(_OWN_PREFIXES):
            fields.refuse(
                "headers", f"can't have {lower[:80]!r}", "Leave out host, content-*, webhook-* and connection headers."
            )
        if lower in names:
            fields.refuse("headers", f"has {lower[:80]!r} twice")
        if not isinstance(text, str) or not _VALUE.match(text):
            fields.refuse("headers", f"has a value of {lower[:80]!r} that no header can have")
        names.add(lower)
    return dict(value)


def _duration(seconds: float) -> str:
    for unit, length_s in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= length_s and not seconds % length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{seconds * 1000:.15g}ms"
