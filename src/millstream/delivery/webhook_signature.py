"""How a webhook is signed, by the Standard Webhooks specification: HMAC-SHA256 over its id, its time and its body."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable


def signatures(keys: Iterable[bytes], webhook_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature`: a signature for each key, separated by spaces."""
    content = b"%b.%d.%b" % (webhook_id.encode(), timestamp, body)
    digests = (hmac.digest(key, content, "sha256") for key in keys)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
